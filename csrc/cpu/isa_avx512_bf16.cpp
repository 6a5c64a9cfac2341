#include "avx512.h"
#include "linear.h"

namespace fewbit {

void integer_linear_avx512_vnni(const Job& job, const Rounding& rounding, Team& team, Range blocks);
void dense_avx512(const Job& job, Team& team, Range blocks);
void decode_avx512(const Decoder& decoder, const Step& step, const Kernels& kernels);
void experts_avx512(const Experts& given, const Routing& routing, const Kernels& kernels);

extern const Kernels kAvx512Bf16Kernels{linear<Avx512Bf16>, integer_linear_avx512_vnni, dense_avx512, decode_avx512,
                                        experts_avx512};

}  // namespace fewbit
