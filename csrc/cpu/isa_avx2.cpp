#include "avx2.h"
#include "decode_step.h"
#include "experts.h"
#include "linear.h"

namespace fewbit {

void linear_avx2(const Job& job) { linear<Avx2>(job); }
void linear_blocks_avx2(const Job& job, Range blocks) { linear_blocks<Avx2>(job, blocks); }
void dense_blocks_avx2(const Job& job, Range blocks) { dense_blocks<Avx2>(job, blocks); }
void decode_avx2(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  decode<Avx2>(decoder, step, kernels);
}
void experts_avx2(const Experts& given, const Routing& routing, const Kernels& kernels) {
  experts<Avx2>(given, routing, kernels);
}

extern const Kernels kAvx2Kernels{linear_avx2,
                                  linear_blocks_avx2,
                                  integer_linear<Avx2>,
                                  integer_linear_blocks<Avx2>,
                                  dense_blocks_avx2,
                                  decode_avx2,
                                  experts_avx2};

}  // namespace fewbit
