/* EXPERTS kernels of units U_INT8 and U_INT8H, which share one of many rows */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_int8, linear_int8, U_INT8)
extern BW_EXPERT_KERNELS(experts_int8h, linear_int8h, U_INT8H)
}
