// The C interface, which Python loads. Pointers arrive as integers; sizes and dtypes are checked on the Python side,
// where a wrong one can be reported in words.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "decoder.h"
#include "experts.h"
#include "prepared.h"
#include "threads.h"

namespace fewbit {

extern const Kernels kAvx2Kernels, kAvx2VnniKernels, kAvx512Kernels, kAvx512VnniKernels, kAvx512Bf16Kernels,
    kAmxKernels, kAmxEmulatedKernels;

namespace {

struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  bool (*present)();
};

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#ifndef FEWBIT_ONLY_AVX2
bool has_avx2_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Whether the CPU has AMX with bytes and bf16, and the system lets this process use it: its registers are so large that
// Linux saves them only for processes that asked.
bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512_vnni() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and the state's number
  return (edx & kAll) == kAll && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#endif

// Best first. Pairs of bf16 come after what they were to replace: on a Xeon, W4A16 for 128 tokens took 1.1 to 1.5 times as
// long by them as by panels of float32. They run where they are asked for by name.
const InstructionSet kInstructionSets[] = {
#ifndef FEWBIT_ONLY_AVX2
    {"amx", &kAmxKernels, has_amx},
    {"avx512-vnni", &kAvx512VnniKernels, has_avx512_vnni},
    {"avx512-bf16", &kAvx512Bf16Kernels, has_avx512_bf16},
    {"avx512", &kAvx512Kernels, has_avx512},
    {"avx2-vnni", &kAvx2VnniKernels, has_avx2_vnni},
#endif
    {"avx2", &kAvx2Kernels, has_avx2},
#ifdef FEWBIT_EMULATE_AMX
    {"amx-emulated", &kAmxEmulatedKernels, has_avx2},
#endif
};

enum Status { kDone = 0, kOutOfMemory = 1, kUnknownInstructionSet = 2 };

template <class Run>
int32_t guarded(int32_t instruction_set, Run&& run) {
  constexpr int32_t count = sizeof kInstructionSets / sizeof *kInstructionSets;
  if (instruction_set < 0 || instruction_set >= count) return kUnknownInstructionSet;
  try {
    run(*kInstructionSets[instruction_set].kernels);
    return kDone;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace
}  // namespace fewbit

#define FEWBIT_EXPORT extern "C" __attribute__((visibility("default")))

// Raised whenever a signature, the layout of a prepared weight or the meaning of a number changes.
FEWBIT_EXPORT int32_t fewbit_cpu_version() { return 4; }

// Name of the instruction set of that number, null past the last.
FEWBIT_EXPORT const char* fewbit_cpu_name(int32_t number) {
  constexpr int32_t count = sizeof fewbit::kInstructionSets / sizeof *fewbit::kInstructionSets;
  return number >= 0 && number < count ? fewbit::kInstructionSets[number].name : nullptr;
}

// Whether this CPU has the instruction set of that number.
FEWBIT_EXPORT int32_t fewbit_cpu_present(int32_t number) {
  return fewbit_cpu_name(number) && fewbit::kInstructionSets[number].present();
}

FEWBIT_EXPORT int32_t fewbit_cpu_has_threads() { return fewbit::has_threads(); }

// y[tokens, N] = x[tokens, K] @ W.T + bias.
FEWBIT_EXPORT int32_t fewbit_cpu_linear(const int64_t* shape, const void* words, const void* scales, const void* zeros,
                                        const void* minima, const void* features, const void* x, const void* bias,
                                        void* y, int64_t tokens, int32_t dtype, int32_t threads,
                                        int32_t instruction_set) {
  const fewbit::LinearLayer layer{fewbit::Arithmetic::kWeightOnly, shape, words, scales, zeros, minima, features, bias,
                                  nullptr, 0, 0, 0};
  return fewbit::guarded(instruction_set, [&](const fewbit::Kernels& kernels) {
    run_layer(kernels, layer, job_of(layer, x, y, tokens, static_cast<fewbit::Dtype>(dtype)), threads);
  });
}

// The same with x rounded to integers of low..high under one scale for each token, for all, or a stored one.
FEWBIT_EXPORT int32_t fewbit_cpu_integer_linear(const int64_t* shape, const void* words, const void* scales,
                                                const void* zeros, const void* features, const void* x,
                                                const void* bias, void* y, int64_t tokens, int32_t dtype,
                                                int32_t threads, int32_t instruction_set, const float* stored_scale,
                                                int32_t per_token, int32_t low, int32_t high) {
  const fewbit::LinearLayer layer{fewbit::Arithmetic::kInteger, shape, words, scales, zeros, nullptr, features, bias,
                                  stored_scale, per_token, low, high};
  return fewbit::guarded(instruction_set, [&](const fewbit::Kernels& kernels) {
    run_layer(kernels, layer, job_of(layer, x, y, tokens, static_cast<fewbit::Dtype>(dtype)), threads);
  });
}

// Tokens through a whole decoder: the logits after the last, and their keys and values into the cache.
FEWBIT_EXPORT int32_t fewbit_cpu_decode(const fewbit::Decoder* decoder, const fewbit::Step* step,
                                        int32_t instruction_set) {
  return fewbit::guarded(instruction_set,
                         [&](const fewbit::Kernels& kernels) { kernels.decode(*decoder, *step, kernels); });
}

// Tokens [tokens, hidden] through the experts [tokens, per_token] that were chosen for them, under these weights.
FEWBIT_EXPORT int32_t fewbit_cpu_experts(const fewbit::Experts* experts, const void* x, const int64_t* chosen,
                                         const void* weights, int32_t weights_dtype, int64_t per_token, void* y,
                                         int64_t tokens, int32_t threads, int32_t instruction_set) {
  const fewbit::Routing routing{x, y, chosen, weights, static_cast<fewbit::Dtype>(weights_dtype), tokens, per_token,
                                threads};
  return fewbit::guarded(instruction_set,
                         [&](const fewbit::Kernels& kernels) { kernels.experts(*experts, routing, kernels); });
}
