/* Instantiates the EXPERTS kernels of one unit type: included by the experts_*.cu files. Owns the choice of block shapes. */
#ifndef BW24_CU_EXPERTS_KERNELS_CUH
#define BW24_CU_EXPERTS_KERNELS_CUH

#include "launch.h"
#include "op_experts.cuh"
#include "op_experts_gemm.cuh"

namespace bw {

inline int expert_warps(int tasks) { return tasks < EXPERT_WARPS ? tasks : EXPERT_WARPS; }

template <class U> void experts_product(Queue &q, const ExpertArgs &a, int pairs) {
    const int sums = a.n_mats * a.m[0].segs, tasks = sums * 2 / units_at_once<U>();
    const size_t bytes = row_acts_bytes(a.m[0].segs) + (size_t)sums * 32 * sizeof(float);
    launch(q, k_experts<U>, dim3((unsigned)((a.m[0].rows + 31) / 32), (unsigned)pairs), 32 * expert_warps(tasks), bytes, a, DownArgs());
}
template <class U> void experts_down(Queue &q, const DownArgs &a, int rows) {
    const int tasks = a.slots * a.m.segs;
    launch(q, k_experts<U>, dim3((unsigned)((a.m.rows + 15) / 16), (unsigned)rows), 32 * expert_warps(tasks), (size_t)(tasks + a.slots) * 16 * sizeof(float), ExpertArgs(), a);
}
template <class U> size_t experts_gemm_bytes(const Queue &q) { return gemm_stages(q.shared_max) == 3 ? sizeof(ExpertShared<U, 3>) : sizeof(ExpertShared<U, 2>); }
template <class U> bool experts_gemm_fits(const Queue &q) { return experts_gemm_bytes<U>(q) <= (size_t)q.shared_max; }
template <class U> void experts_gemm(Queue &q, const ExpertGemmArgs &a, int tiles) {
    const int outs = a.n_mats == 2 ? 64 : 128;
    launch(q, k_experts_gemm<U>, dim3((unsigned)tiles, (unsigned)((a.m[0].rows + outs - 1) / outs)), 256, experts_gemm_bytes<U>(q), a);
}

#define BW_EXPERT_KERNELS(name, table, U) const ExpertKernels name = {&table, experts_product<U>, experts_down<U>, experts_gemm_fits<U>, experts_gemm<U>};

} // namespace bw
#endif
