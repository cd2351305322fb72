/* Second half of ATTEND where the pieces of a row were made by many warps: folds them in order. Knows no KV format. */
#ifndef BW24_CU_OP_ATTEND_MERGE_CUH
#define BW24_CU_OP_ATTEND_MERGE_CUH

#include "attend.cuh"

namespace bw {

/* Ordered merge of a row's pieces. Block: 128 threads for (32 columns of a head, row). Pieces pass in chunks: warps 2 and 3 fetch o three chunks ahead, warp 1
 * makes a chunk's factors by a running maximum while warp 0 folds the chunk before, O and L side by side; then the group is quantised for the output
 * projection. What is missing of a chunk is filled up with pieces that change nothing: o = l = -0, both factors 1; the fold begins from -0, to which the first
 * piece adds itself as it is. */
enum { MERGE = 128, MERGE_CHUNK = 64, MERGE_BATCH = 8, MERGE_BUFFERS = 4 };
struct MergeShared {
    float o[MERGE_BUFFERS][MERGE_CHUNK][32];
    float4 fac[2][MERGE_CHUNK]; /* of o, of O, l */
};

/* o of a chunk's n pieces, those up to the next whole batch -0; by 64 threads, eight pieces at a time */
__device__ __forceinline__ void merge_fetch(float (&to)[MERGE_CHUNK][32], const float *from, size_t stride, int n) {
    const int t = threadIdx.x & 63, i0 = t >> 3, c = (t & 7) * 4;
    const int last = min((int)MERGE_CHUNK, n);
    from += i0 * stride + c;
#pragma unroll 4
    for (int i = i0; i < last; i += MERGE_BATCH, from += MERGE_BATCH * stride) cp16(&to[i][c], from);
    if (n < MERGE_CHUNK && n % MERGE_BATCH + i0 < MERGE_BATCH && n % MERGE_BATCH) *(float4 *)&to[n + i0][c] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
}

/* factors of a chunk's n pieces, two a lane; N: the maximum before them, then with them */
__device__ __forceinline__ void merge_factors(float4 *fac, const float2 (&nl)[2], int n, float &N) {
    const int lane = threadIdx.x & 31;
    float m = fmaxf(nl[0].x, nl[1].x);
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) { float x = __shfl_up_sync(~0u, m, k); if (lane >= k) m = fmaxf(m, x); }
    float before = __shfl_up_sync(~0u, m, 1);
    before = lane ? fmaxf(before, N) : N;
    N = fmaxf(N, __shfl_sync(~0u, m, 31));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float with = fmaxf(before, nl[i].x);
        float4 f = make_float4(pow2_factor(nl[i].x - with), pow2_factor(before - with), nl[i].y, 0.0f);
        if (2 * lane + i >= n) f = make_float4(1.0f, 1.0f, -0.0f, 0.0f);
        fac[2 * lane + i] = f;
        before = with;
    }
}

/* a chunk into O and L, a batch read while the one before is folded */
__device__ __forceinline__ void merge_fold(const float (&o)[MERGE_CHUNK][32], const float4 *fac, int n, float &O, float &L) {
    const int lane = threadIdx.x & 31;
    float v[MERGE_BATCH];
    float4 f[MERGE_BATCH];
#pragma unroll
    for (int k = 0; k < MERGE_BATCH; k++) { v[k] = o[k][lane]; f[k] = fac[k]; }
#pragma unroll 2
    for (int k0 = MERGE_BATCH; k0 - MERGE_BATCH < n; k0 += MERGE_BATCH) {
        const int next = k0 < MERGE_CHUNK ? k0 : 0; /* past the end: any */
        float w[MERGE_BATCH];
        float4 g[MERGE_BATCH];
#pragma unroll
        for (int k = 0; k < MERGE_BATCH; k++) { w[k] = o[next + k][lane]; g[k] = fac[next + k]; }
#pragma unroll
        for (int k = 0; k < MERGE_BATCH; k++) {
            O = fmaf(v[k], f[k].x, O * f[k].y);
            L = fmaf(f[k].z, f[k].x, L * f[k].y);
        }
#pragma unroll
        for (int k = 0; k < MERGE_BATCH; k++) { v[k] = w[k]; f[k] = g[k]; }
    }
}

/* GATE: of the result too */
template <bool GATE> __global__ void __launch_bounds__(MERGE) k_attend_merge(AttendArgs a, StepRows s) {
    __shared__ __align__(16) MergeShared sh;
    const int D = a.kv.dim, groups = D / 32, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.y, head = blockIdx.x / groups, c0 = blockIdx.x % groups * 32;
    pdl_trigger();
    const AttendRow r = attend_row(a, s, row); /* positions do not come from an earlier kernel */
    const int pieces = (r.hi - 1) / PIECE - r.lo / PIECE + 1;
    const float *op = a.o + ((size_t)row * a.max_pieces * a.heads + head) * D + c0;
    const float2 *nlp = a.nl + (size_t)row * a.max_pieces * a.heads + head;
    const size_t stride = (size_t)a.heads * D;
    auto fetch = [&](int i0) { /* past the end: nothing */
        if (i0 < pieces) merge_fetch(sh.o[i0 / MERGE_CHUNK % MERGE_BUFFERS], op + i0 * stride, stride, pieces - i0);
        asm volatile("cp.async.commit_group;");
    };
    float2 nl[2];
    auto stats = [&](int i0) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            nl[i] = i0 + 2 * lane + i < pieces ? __ldcg(nlp + (size_t)(i0 + 2 * lane + i) * a.heads) : make_float2(-INFINITY, 0.0f);
    };
    float N = -INFINITY, L = -0.0f, O = -0.0f, by = 0.0f;
    const size_t at_y = ((size_t)row * a.heads + head) * D + c0 + lane;
    pdl_wait();
    if (warp == 1) stats(0);
    if (GATE && !warp) by = __ldcg(a.gate + at_y);
#pragma unroll 1
    for (int i0 = -2 * MERGE_CHUNK; i0 < pieces; i0 += MERGE_CHUNK) {
        const int n = pieces - i0, at = i0 / MERGE_CHUNK;
        if (warp >= 2) fetch(i0 + 2 * MERGE_CHUNK); /* where the chunk before last was, which warp 0 has left behind */
        if (i0 < 0) continue;
        if (warp >= 2) asm volatile("cp.async.wait_group 2;");
        else if (warp == 1) {
            merge_factors(sh.fac[at & 1], nl, n, N);
            stats(i0 + MERGE_CHUNK);
        }
        __syncthreads();
        if (!warp) merge_fold(sh.o[at % MERGE_BUFFERS], sh.fac[at & 1], min((int)MERGE_CHUNK, n), O, L);
    }
    if (warp) return;
    float y = O * (1.0f / L);
    if (not_finite(y)) report_fault(s.fault, a.op);
    if (GATE) y = y * bw_sigmoid(by);
    a.y[at_y] = y;
    if (a.yo.q) quant_group(a.yo, row, (head * D + c0) >> 5, lane, y, s.fault, GATE ? a.quant_op : a.op);
}

} // namespace bw
#endif
