/* LINEAR kernels of units U_Q6_K */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_q6_k, Q6_K, SMALL_4_8, true)
}
