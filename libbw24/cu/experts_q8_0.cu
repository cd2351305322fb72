/* EXPERTS kernels of units U_Q8_0 */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_q8_0, linear_q8_0, U_Q8_0)
}
