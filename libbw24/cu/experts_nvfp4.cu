/* EXPERTS kernels of units U_NVFP4 */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_nvfp4, linear_nvfp4, U_NVFP4)
}
