/* LINEAR kernels of units U_INT8: the types without a unit of their own, decoded at load by the host */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_int8, INT8, SMALL_NONE, false)
}
