#include "avx512.h"
#include "linear.h"

namespace fewbit {

void linear_avx512(const Job& job, Team& team, Range blocks);
void dense_avx512(const Job& job, Team& team, Range blocks);
void decode_avx512(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx512(const Experts& given, const Routing& routing, const Kernels& kernels);

void integer_linear_avx512_vnni(const Job& job, const Rounding& rounding, Team& team, Range blocks) {
  integer_linear<Avx512Vnni>(job, rounding, team, blocks);
}

extern const Kernels kAvx512VnniKernels{linear_avx512, integer_linear_avx512_vnni, dense_avx512, decode_avx512,
                                        experts_avx512};

}  // namespace fewbit
