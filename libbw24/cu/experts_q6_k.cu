/* EXPERTS kernels of units U_Q6_K */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_q6_k, linear_q6_k, U_Q6_K)
}
