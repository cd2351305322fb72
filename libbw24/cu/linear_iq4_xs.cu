/* LINEAR kernels of units U_IQ4_XS */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_iq4_xs, IQ4_XS, SMALL_8, true)
}
