/* LINEAR kernels of units U_Q4_0 */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_q4_0, Q4_0, SMALL_4_8, true)
}
