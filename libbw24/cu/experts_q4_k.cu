/* EXPERTS kernels of units U_Q4_K */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_q4_k, linear_q4_k, U_Q4_K)
}
