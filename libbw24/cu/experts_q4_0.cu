/* EXPERTS kernels of units U_Q4_0 */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_q4_0, linear_q4_0, U_Q4_0)
}
