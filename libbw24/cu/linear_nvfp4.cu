/* LINEAR kernels of units U_NVFP4 */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_nvfp4, NVFP4, SMALL_4_8, true)
}
