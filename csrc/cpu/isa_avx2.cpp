#include "avx2.h"
#include "linear.h"

namespace fewbit {

void linear_avx2(const Job& job) { linear<Avx2>(job); }

extern const Kernels kAvx2Kernels{linear_avx2, integer_linear<Avx2>};

}  // namespace fewbit
