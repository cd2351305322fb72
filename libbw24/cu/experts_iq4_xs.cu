/* EXPERTS kernels of units U_IQ4_XS */
#include "experts_kernels.cuh"

namespace bw {
extern BW_EXPERT_KERNELS(experts_iq4_xs, linear_iq4_xs, U_IQ4_XS)
}
