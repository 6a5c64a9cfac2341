// The threads of one parallel region, each of which computes a share of the same operations.
#pragma once

#include <atomic>
#include <new>

#include "threads.h"

namespace fewbit {

// What the threads of a team share. It outlives the region.
struct TeamState {
  std::atomic<bool> lacks_memory{false};
  char* inputs = nullptr;
};

// One thread's place in its team.
class Team {
 public:
  Team(TeamState& state, int thread, int count) : thread(thread), count(count), state_(state) {}

  // This thread as a team of its own, whose lack of memory is the team's.
  Team alone() const { return {state_, 0, 1}; }

  void wait() const { wait_for_all(count); }

  // Does work that may find no memory. The others wait for this thread then: it goes on, and the call reports it.
  template <class Work>
  void guarded(Work&& work) const {
    try {
      work();
    } catch (const std::bad_alloc&) {
      state_.lacks_memory = true;
    }
  }

  // Memory that all threads see, for inputs that they place together; null if there is none. Every thread asks for the
  // same, and no thread may still read what was asked for before.
  char* inputs(int64_t bytes) {
    if (bytes <= size_) return inputs_;
    inputs_ = nullptr;
    if (thread == 0) guarded([&] { inputs_ = static_cast<char*>(scratch(Scratch::kInputs, bytes)); });
    if (count > 1) {
      if (thread == 0) state_.inputs = inputs_;
      wait();
      inputs_ = state_.inputs;
    }
    size_ = bytes;
    return inputs_;
  }

  const int thread, count;

 private:
  TeamState& state_;
  char* inputs_ = nullptr;
  int64_t size_ = 0;
};

// Calls body(team) on at most `threads` threads.
template <class Body>
void parallel_for_team(int threads, Body&& body) {
  TeamState state;
  parallel_for_thread(threads, [&](int thread, int count) {
    Team team(state, thread, count);
    body(team);
  });
  if (state.lacks_memory) throw std::bad_alloc();
}

}  // namespace fewbit
