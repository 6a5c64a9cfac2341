#include "avx512.h"
#include "linear.h"

namespace fewbit {

void linear_avx512(const Job& job) { linear<Avx512>(job); }

extern const Kernels kAvx512Kernels{linear_avx512, integer_linear<Avx512>};

}  // namespace fewbit
