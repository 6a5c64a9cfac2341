#include "avx512.h"
#include "linear.h"

namespace fewbit {

void linear_avx512(const Job& job, Team& team, Range blocks);
void integer_linear_avx512_vnni(const Job& job, const Rounding& rounding, Team& team, Range blocks);
void dense_avx512(const Job& job, Team& team, Range blocks);
void decode_avx512(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx512(const Experts& given, const Routing& routing, const Kernels& kernels);

void linear_avx512_bf16(const Job& job, Team& team, Range blocks) {
  takes_bf16_panels(job) ? bf16_linear<Avx512Bf16>(job, team, blocks) : linear_avx512(job, team, blocks);
}

extern const Kernels kAvx512Bf16Kernels{linear_avx512_bf16, integer_linear_avx512_vnni, dense_avx512, decode_avx512,
                                        experts_avx512};

}  // namespace fewbit
