/* Instantiates the EXPERTS kernels of one unit type: included by the experts_*.cu files. Owns the choice of block shapes. */
#ifndef BW24_CU_EXPERTS_KERNELS_CUH
#define BW24_CU_EXPERTS_KERNELS_CUH

#include "launch.h"
#include "op_experts.cuh"

namespace bw {

inline int expert_warps(int tasks) { return tasks < 16 ? tasks : 16; }

template <class U> void experts_product(Queue &q, const ExpertArgs &a, int pairs) {
    int tasks = a.n_mats * a.m[0].segs;
    launch(q, k_experts<U>, dim3((unsigned)((a.m[0].rows + 31) / 32), (unsigned)pairs), 32 * expert_warps(tasks), (size_t)tasks * 32 * sizeof(float), a);
}
template <class U> void experts_down(Queue &q, const DownArgs &a, int rows) {
    int tasks = a.top * a.m.segs;
    launch(q, k_experts_down<U>, dim3((unsigned)((a.m.rows + 15) / 16), (unsigned)rows), 32 * expert_warps(tasks), (size_t)(tasks + a.top) * 16 * sizeof(float), a);
}

#define BW_EXPERT_KERNELS(name, table, U) const ExpertKernels name = {&table, experts_product<U>, experts_down<U>};

} // namespace bw
#endif
