/* LINEAR kernels of units U_Q4_K */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_q4_k, Q4_K, SMALL_4_8, true)
}
