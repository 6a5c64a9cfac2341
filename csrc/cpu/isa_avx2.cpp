#include "avx2.h"
#include "decode_step.h"
#include "experts.h"
#include "linear.h"

namespace fewbit {

void linear_avx2(const Job& job, Team& team, Range blocks) { linear<Avx2>(job, team, blocks); }
void dense_avx2(const Job& job, Team& team, Range blocks) { dense<Avx2>(job, team, blocks); }
void decode_avx2(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  decode<Avx2>(decoder, step, kernels);
}
void experts_avx2(const Experts& given, const Routing& routing, const Kernels& kernels) {
  experts<Avx2>(given, routing, kernels);
}

extern const Kernels kAvx2Kernels{linear_avx2, integer_linear<Avx2>, dense_avx2, decode_avx2, experts_avx2};

}  // namespace fewbit
