// AMX in plain C++ over vectors of AVX2, for tests alone.
#include "amx_emulated.h"
#include "amx_linear.h"
#include "avx2.h"

namespace fewbit {

void linear_avx2(const Job& job, Team& team, Range blocks);
void dense_avx2(const Job& job, Team& team, Range blocks);
void decode_avx2(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx2(const Experts& experts, const Routing& routing, const Kernels& kernels);

namespace {

struct Avx2Emulating : Avx2 {
  static Words look_up_halves(const uint16_t* table, Words halves) {
    uint16_t each[2 * kLanes];
    store_words(each, halves);
    for (uint16_t& half : each) half = table[half % 32];
    return load(each);
  }
};

}  // namespace

void linear_amx_emulated(const Job& job, Team& team, Range blocks) {
  takes_amx(job) ? amx_linear<Avx2Emulating, AmxEmulated>(job, team, blocks) : linear_avx2(job, team, blocks);
}

void integer_linear_amx_emulated(const Job& job, const Rounding& rounding, Team& team, Range blocks) {
  if (amx_pays(job)) return amx_integer_linear<Avx2Emulating, AmxEmulated>(job, rounding, team, blocks);
  integer_linear<Avx2>(job, rounding, team, blocks);
}

extern const Kernels kAmxEmulatedKernels{linear_amx_emulated, integer_linear_amx_emulated, dense_avx2, decode_avx2,
                                         experts_avx2};

}  // namespace fewbit
