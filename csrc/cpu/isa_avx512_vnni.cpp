#include "avx512.h"
#include "linear.h"

namespace fewbit {

void linear_avx512(const Job& job);

extern const Kernels kAvx512VnniKernels{linear_avx512, integer_linear<Avx512Vnni>};

}  // namespace fewbit
