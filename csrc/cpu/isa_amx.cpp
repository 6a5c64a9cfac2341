#include "avx512.h"

#include "amx_linear.h"

namespace fewbit {

void linear_avx512(const Job& job, Team& team, Range blocks);
void integer_linear_avx512_vnni(const Job& job, const Rounding& rounding, Team& team, Range blocks);
void dense_avx512(const Job& job, Team& team, Range blocks);
void decode_avx512(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx512(const Experts& experts, const Routing& routing, const Kernels& kernels);

void linear_amx(const Job& job, Team& team, Range blocks) {
  takes_amx(job) ? amx_linear<Avx512, Amx>(job, team, blocks) : linear_avx512(job, team, blocks);
}

void integer_linear_amx(const Job& job, const Rounding& rounding, Team& team, Range blocks) {
  if (amx_pays(job)) return amx_integer_linear<Avx512, Amx>(job, rounding, team, blocks);
  integer_linear_avx512_vnni(job, rounding, team, blocks);
}

extern const Kernels kAmxKernels{linear_amx, integer_linear_amx, dense_avx512, decode_avx512, experts_avx512};

}  // namespace fewbit
