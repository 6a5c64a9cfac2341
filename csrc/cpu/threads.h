// Threads of the OpenMP runtime that the process has loaded already, which is torch's: a second runtime beside it would
// make the two pools fight for the cores. Nothing is linked; the runtime's entry points are looked up by name.
#pragma once

#include <cstdint>

#include "job.h"

namespace fewbit {

// Calls body(context, thread, count) on `count` threads, at most `threads` of them, the caller being one. Memory that one
// of them lacks is reported as std::bad_alloc to the caller.
void parallel(int threads, void (*body)(void* context, int thread, int count), void* context);

template <class Body>
void parallel_for_thread(int threads, Body&& body) {
  parallel(threads, [](void* context, int thread, int count) { (*static_cast<Body*>(context))(thread, count); }, &body);
}

// The share of `items` that a thread gets: consecutive ones, so that each thread reads one stretch of memory.
inline Range share(int64_t items, int thread, int count) {
  return {items * thread / count, items * (thread + 1) / count};
}

// Waits, inside `body`, for the other threads; each of them must call it.
void wait_for_all(int count);

// What a thread keeps memory for between calls.
enum class Scratch { kInputs, kRow, kPanel, kOwn, kShared, kCount };

// 64-byte aligned memory of at least `bytes`, which the calling thread keeps for the purpose.
void* scratch(Scratch purpose, int64_t bytes);

// Whether there is an OpenMP runtime to take threads from.
bool has_threads();

}  // namespace fewbit
