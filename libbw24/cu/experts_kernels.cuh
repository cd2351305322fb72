/* Instantiates the EXPERTS kernels of one unit type: included by the experts_*.cu files. Owns the choice of block shapes. */
#ifndef BW24_CU_EXPERTS_KERNELS_CUH
#define BW24_CU_EXPERTS_KERNELS_CUH

#include "gemm_fast.h"
#include "launch.h"
#include "op_experts.cuh"
#include "op_experts_gemm.cuh"

namespace bw {

/* Warps and depth of their rings: all tasks on their way at once where two blocks fit a multiprocessor so, else fewer */
struct ExpertBlock { int warps, depth; size_t bytes; };
template <class U> ExpertBlock expert_block(const Queue &q, int tasks, int segs, int rows, int tiles) {
    const int pairs = (segs + 1) / 2, warps = tasks < EXPERT_WARPS ? tasks : EXPERT_WARPS, half = q.shared_max / 2 - 1024, least = SHARED_LEAST;
    ExpertBlock b = {warps, (tasks + warps - 1) / warps, 0};
    if (b.depth > 32) b.depth = 32;
    const auto bytes = [&]() { return b.bytes = ExpertMem<U>::bytes(b.warps, b.depth, pairs, rows, tiles); };
    while (bytes() > (size_t)half && b.depth > 1) b.depth--;
    while (bytes() > (size_t)(half > least ? half : least) && b.warps > 1) b.warps--;
    return b;
}
template <class U> void experts_product(Queue &q, const ExpertArgs &args, int pairs) {
    ExpertArgs a = args;
    const int segs = a.m[0].segs, tiles = a.n_mats * 2;
    const ExpertBlock b = expert_block<U>(q, tiles * ((segs + 1) / 2), segs, 1, tiles);
    a.depth = b.depth;
    a.by_pairs = one_reciprocal((segs + 1) / 2);
    launch(q, k_experts<U>, dim3((unsigned)((a.m[0].rows + 31) / 32), (unsigned)pairs), 32 * b.warps, b.bytes, a, DownArgs());
}
template <class U> void experts_down(Queue &q, const DownArgs &args, int rows) {
    DownArgs a = args;
    const ExpertBlock b = expert_block<U>(q, a.slots * ((a.m.segs + 1) / 2), a.m.segs, a.slots, a.slots);
    a.depth = b.depth;
    a.by_pairs = one_reciprocal((a.m.segs + 1) / 2);
    launch(q, k_experts<U>, dim3((unsigned)((a.m.rows + 15) / 16), (unsigned)rows), 32 * b.warps, b.bytes, ExpertArgs(), a);
}
template <class U> bool experts_by_groups(const Queue &q) { return q.warp_groups && expert_groups<U>; }
template <class U> size_t experts_gemm_bytes(const Queue &q) {
    if (experts_by_groups<U>(q)) return sizeof(ExpertGroupShared<U>);
    return gemm_stages(q.shared_max) == 3 ? sizeof(ExpertShared<U, 3>) : sizeof(ExpertShared<U, 2>);
}
template <class U> bool experts_gemm_fits(const Queue &q) { return experts_gemm_bytes<U>(q) <= (size_t)q.shared_max; }
template <class U> void experts_gemm(Queue &q, const ExpertGemmArgs &args) {
    constexpr bool halves = std::is_same<U, U_INT8H>::value, generic = halves || std::is_same<U, U_INT8>::value;
    typedef typename std::conditional<generic, INT8_OR_INT8H, U>::type Of;
    ExpertGemmArgs a = args;
    const int outs = a.n_mats == 2 ? 64 : 128;
    a.halves = halves;
    const int blocks = (a.m[0].rows + outs - 1) / outs, places = a.most * blocks;
    dim3 grid((unsigned)a.most * 2, (unsigned)blocks);
    if (experts_by_groups<U>(q)) {
        gemm_pairs(q, a);
        grid = dim3((unsigned)(places < q.sms ? places : q.sms));
    }
    launch(q, k_experts_gemm<Of>, grid, experts_by_groups<U>(q) ? GG_THREADS : 256, experts_gemm_bytes<U>(q), a);
}

#define BW_EXPERT_KERNELS(name, table, U) const ExpertKernels name = {&table, experts_product<U>, experts_down<U>, experts_gemm_fits<U>, experts_gemm<U>};

} // namespace bw
#endif
