/* LINEAR kernels of units U_Q8_0 */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_q8_0, Q8_0, SMALL_4_8, true)
}
