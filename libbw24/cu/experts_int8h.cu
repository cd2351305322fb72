/* EXPERTS kernels of units U_INT8H */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_int8h, linear_int8h, U_INT8H)
}
