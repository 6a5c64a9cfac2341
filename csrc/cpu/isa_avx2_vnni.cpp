#include "avx2.h"
#include "linear.h"

namespace fewbit {

void linear_avx2(const Job& job);

extern const Kernels kAvx2VnniKernels{linear_avx2, integer_linear<Avx2Vnni>};

}  // namespace fewbit
