/* EXPERTS kernels of units U_INT8 */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_int8, linear_int8, U_INT8)
}
