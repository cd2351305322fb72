/* LINEAR kernels of units U_Q4_K */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_q4_k, U_Q4_K, true, linear_pack<U_Q4_K>, linear_lift<U_Q4_K>)
}
