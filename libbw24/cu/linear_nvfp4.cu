/* LINEAR kernels of units U_NVFP4 */
#include "linear_kernels.cuh"

namespace bw {
extern BW_LINEAR_KERNELS(linear_nvfp4, U_NVFP4, true, linear_pack<U_NVFP4>, linear_lift<U_NVFP4>)
}
