#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace fewbit {
namespace {

// The entry points that every OpenMP runtime of GCC and of LLVM has.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread_number)();
  int (*thread_count)();
  void (*barrier)();

  OpenMp() {
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread_number = reinterpret_cast<decltype(thread_number)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    thread_count = reinterpret_cast<decltype(thread_count)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
    barrier = reinterpret_cast<decltype(barrier)>(dlsym(RTLD_DEFAULT, "GOMP_barrier"));
  }

  bool found() const { return parallel && thread_number && thread_count && barrier; }
};

const OpenMp& openmp() {
  static const OpenMp runtime;
  return runtime;
}

struct Region {
  void (*body)(void*, int, int);
  void* context;
  std::atomic<bool> lacks_memory{false};
};

void enter(void* data) {
  Region& region = *static_cast<Region*>(data);
  try {  // an exception must not leave the thread
    // The runtime may give fewer threads than were asked for.
    region.body(region.context, openmp().thread_number(), openmp().thread_count());
  } catch (const std::bad_alloc&) {
    region.lacks_memory = true;
  }
}

class Memory {
 public:
  ~Memory() { std::free(memory_); }

  void* at_least(int64_t bytes) {
    if (bytes > size_) {
      const int64_t rounded = (bytes + 4095) / 4096 * 4096;
      void* grown = std::aligned_alloc(64, static_cast<size_t>(rounded));
      if (!grown) throw std::bad_alloc();
      std::free(memory_);
      memory_ = grown;
      size_ = rounded;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace

void parallel(int threads, void (*body)(void*, int, int), void* context) {
  if (threads <= 1 || !openmp().found()) return body(context, 0, 1);
  Region region{body, context, {false}};
  openmp().parallel(enter, &region, static_cast<unsigned>(threads), 0);
  if (region.lacks_memory) throw std::bad_alloc();
}

void wait_for_all(int count) {
  if (count > 1) openmp().barrier();
}

bool has_threads() { return openmp().found(); }

void* scratch(Scratch purpose, int64_t bytes) {
  thread_local Memory memory[static_cast<int>(Scratch::kCount)];
  return memory[static_cast<int>(purpose)].at_least(bytes);
}

}  // namespace fewbit
