#include "avx2.h"
#include "linear.h"

namespace fewbit {

void linear_avx2(const Job& job, Team& team, Range blocks);
void dense_avx2(const Job& job, Team& team, Range blocks);
void decode_avx2(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx2(const Experts& given, const Routing& routing, const Kernels& kernels);

extern const Kernels kAvx2VnniKernels{linear_avx2, integer_linear<Avx2Vnni>, dense_avx2, decode_avx2, experts_avx2};

}  // namespace fewbit
