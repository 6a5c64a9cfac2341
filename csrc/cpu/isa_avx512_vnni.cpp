#include "avx512.h"
#include "linear.h"

namespace fewbit {

void linear_avx512(const Job& job);
void linear_blocks_avx512(const Job& job, Range blocks);
void dense_blocks_avx512(const Job& job, Range blocks);
void decode_avx512(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx512(const Experts& given, const Routing& routing, const Kernels& kernels);

extern const Kernels kAvx512VnniKernels{linear_avx512,
                                      linear_blocks_avx512,
                                      integer_linear<Avx512Vnni>,
                                      integer_linear_blocks<Avx512Vnni>,
                                      dense_blocks_avx512,
                                      decode_avx512,
                                      experts_avx512};

}  // namespace fewbit
