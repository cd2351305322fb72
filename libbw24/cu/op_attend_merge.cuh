/* Second half of ATTEND where the pieces of a row were made by many warps: folds them in order. Knows no KV format. */
#ifndef BW24_CU_OP_ATTEND_MERGE_CUH
#define BW24_CU_OP_ATTEND_MERGE_CUH

#include "attend.cuh"

namespace bw {

/* Ordered merge of a row's pieces. Block: 128 threads for (32 columns of a head, row); 128 pieces at a time come into shared memory while the 128
 * before are folded, their factors are made by a running maximum; warp 0 folds O, warp 1 L; then the group is quantised for the output projection. */
enum { MERGE = 128 };
struct MergeShared {
    float o[2][MERGE][32];
    float4 fac[MERGE]; /* of o, of O, l */
    float top[4], L;
};

/* factors of the pieces i0 + thread; N: the maximum before them, then with them */
__device__ __forceinline__ void merge_factors(MergeShared &sh, float2 nl, bool first, float &N) {
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    float m = nl.x;
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) { float x = __shfl_up_sync(~0u, m, k); if (lane >= k) m = fmaxf(m, x); }
    if (lane == 31) sh.top[warp] = m;
    __syncthreads();
    float before = N;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        if (w < warp) before = fmaxf(before, sh.top[w]);
        N = fmaxf(N, sh.top[w]);
    }
    float prev = __shfl_up_sync(~0u, m, 1);
    prev = lane ? fmaxf(prev, before) : before;
    m = fmaxf(m, before);
    sh.fac[t] = make_float4(pow2_factor(nl.x - m), first ? 0.0f : pow2_factor(prev - m), nl.y, 0.0f);
}

static __global__ void __launch_bounds__(MERGE) k_attend_merge(AttendArgs a, StepRows s) {
    __shared__ __align__(16) MergeShared sh;
    const int D = a.kv.dim, groups = D / 32, t = threadIdx.x, lane = t & 31, warp = t >> 5, row = blockIdx.y, head = blockIdx.x / groups, c0 = blockIdx.x % groups * 32;
    const AttendRow r = attend_row(a, s, row); /* positions do not come from an earlier kernel */
    const int pieces = (r.hi - 1) / PIECE - r.lo / PIECE + 1;
    const float *op = a.o + ((size_t)row * a.max_pieces * a.heads + head) * D + c0;
    const float2 *nlp = a.nl + (size_t)row * a.max_pieces * a.heads + head;
    const size_t stride = (size_t)a.heads * D;
    auto fetch = [&](int i0) {
        int n = min((int)MERGE, pieces - i0);
        for (int i = t; i < n * 8; i += MERGE) cp16(&sh.o[i0 / MERGE & 1][i >> 3][(i & 7) * 4], op + (size_t)(i0 + (i >> 3)) * stride + (i & 7) * 4);
        asm volatile("cp.async.commit_group;");
    };
    auto stats = [&](int i) { return i < pieces ? __ldcg(nlp + (size_t)i * a.heads) : make_float2(-INFINITY, 0.0f); };
    pdl_trigger();
    pdl_wait();
    fetch(0);
    float2 nl = stats(t);
    float N = -INFINITY, L = 0.0f, O = 0.0f;
    for (int i0 = 0; i0 < pieces; i0 += MERGE) {
        fetch(i0 + MERGE); /* past the end: nothing */
        const float2 next = stats(i0 + MERGE + t);
        merge_factors(sh, nl, i0 + t == 0, N);
        nl = next;
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        const int n = min((int)MERGE, pieces - i0);
        if (!warp) {
            const float (*oc)[32] = sh.o[i0 / MERGE & 1];
            if (!i0) O = oc[0][lane];
#pragma unroll 16
            for (int k = !i0; k < n; k++) { float4 f = sh.fac[k]; O = fmaf(oc[k][lane], f.x, O * f.y); }
        } else if (warp == 1) {
            if (!i0) L = sh.fac[0].z;
#pragma unroll 16
            for (int k = !i0; k < n; k++) { float4 f = sh.fac[k]; L = fmaf(f.z, f.x, L * f.y); }
        }
        __syncthreads();
    }
    if (t == 32) sh.L = L;
    __syncthreads();
    if (warp) return;
    float y = O * (1.0f / sh.L);
    if (not_finite(y)) report_fault(s.fault, a.op);
    a.y[((size_t)row * a.heads + head) * D + c0 + lane] = y;
    if (a.yo.q) quant_group(a.yo, row, (head * D + c0) >> 5, lane, y, s.fault, a.op);
}

} // namespace bw
#endif
