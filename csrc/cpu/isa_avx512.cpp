#include "avx512.h"
#include "decode_step.h"
#include "experts.h"
#include "linear.h"

namespace fewbit {

void linear_avx512(const Job& job, Team& team, Range blocks) { linear<Avx512>(job, team, blocks); }
void dense_avx512(const Job& job, Team& team, Range blocks) { dense<Avx512>(job, team, blocks); }
void decode_avx512(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  decode<Avx512>(decoder, step, kernels);
}
void experts_avx512(const Experts& given, const Routing& routing, const Kernels& kernels) {
  experts<Avx512>(given, routing, kernels);
}

extern const Kernels kAvx512Kernels{linear_avx512, integer_linear<Avx512>, dense_avx512, decode_avx512, experts_avx512};

}  // namespace fewbit
