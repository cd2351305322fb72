/* What EXPERTS needs beside the products over quantised weights: float weights, the order of pairs by expert, the activation of separate products, the
 * sum over slots. Owns the mapping of work to threads. */
#ifndef BW24_CU_OP_EXPERTS_ANY_CUH
#define BW24_CU_OP_EXPERTS_ANY_CUH

#include "float.cuh"
#include "moe.cuh"

namespace bw {

enum { MOST_EXPERTS = 1024 };

/* Float weights, as k_experts: grid (blocks of 32 outputs, pairs); lane = output, a warp takes segments. Shared: [n_mats][segs][32] sums. */
static __global__ void __launch_bounds__(256) k_experts_float(ExpertArgs a) {
    extern __shared__ float part[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockIdx.x * 32 + lane, cols = a.m[0].cols, S = (cols + 255) / 256;
    pdl_trigger();
    pdl_wait();
    const int pair = a.order ? __ldcg(a.order + blockIdx.y) : blockIdx.y, row = pair / a.top;
    const int id = a.route ? (int)__ldcg(a.route + (size_t)row * 2 * a.top + a.top + pair % a.top) : pair % a.top; /* PERHEAD has none */
    const float *x = a.xf + (size_t)(a.per_pair ? pair : row) * cols;
    for (int k = warp; k < a.n_mats * S; k += 8) {
        const ExpertMatrix &m = a.m[k >= S];
        const int type = a.type[k >= S], seg = k >= S ? k - S : k, end = min(cols, seg * 256 + 256);
        const uint8_t *w = expert_at(m, id);
        float p = 0.0f;
        for (int c = seg * 256; c < end && n < m.rows; c++) p = fmaf(float_at(type, w, (size_t)n * cols + c), __ldcg(x + c), p);
        part[k * 32 + lane] = p;
    }
    __syncthreads();
    if (warp) return;
    float y = 0.0f, u = 0.0f;
    for (int s = 0; s < S; s++) y = y + part[s * 32 + lane];
    y = y * (a.m[0].scales ? __ldg(a.m[0].scales + id) : a.m[0].scale);
    if (a.n_mats == 2) {
        for (int s = 0; s < S; s++) u = u + part[(S + s) * 32 + lane];
        u = u * (a.m[1].scales ? __ldg(a.m[1].scales + id) : a.m[1].scale);
        y = (a.gelu ? bw_gelu(y) : bw_silu(y)) * u;
    }
    if (a.y && n < a.m[0].rows) a.y[(size_t)pair * a.m[0].rows + n] = y;
    if (a.yo.q && blockIdx.x * 32 < a.m[0].rows) quant_group(a.yo, pair, blockIdx.x, lane, y, a.fault, a.op);
}

/* h = act(h) * u of [pairs][n], quantised as well where o is wanted: grid (n / 256, pairs), a warp a group of 32. order: as ExpertArgs */
static __global__ void __launch_bounds__(256) k_experts_glu(float *h, const float *u, const int *order, Acts o, int n, int gelu, int *fault, int op) {
    const int lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), c = g * 32 + lane;
    pdl_trigger();
    pdl_wait();
    if (g * 32 >= n) return;
    const int pair = order ? __ldcg(order + blockIdx.y) : blockIdx.y;
    const size_t at = (size_t)pair * n + c;
    float v = 0.0f;
    if (c < n) {
        float x = __ldcg(h + at);
        v = (gelu ? bw_gelu(x) : bw_silu(x)) * __ldcg(u + at);
        h[at] = v;
    }
    if (o.q) quant_group(o, pair, g, lane, v, fault, op);
}

/* sum over the threads before this one, of a block of 1024; sums: 32 words of shared memory */
__device__ __forceinline__ int sum_before(int v, int *sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int at = v;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        int other = __shfl_up_sync(~0u, at, o);
        if (lane >= o) at += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = at;
    __syncthreads();
    for (int w = 0; w < warp; w++) at += sums[w];
    return at - v;
}

/* f(pair, its expert) for each pair, the experts of eight on their way at once */
template <class F> __device__ __forceinline__ void each_pair(const float *route, int pairs, int top, F f) {
    enum { AT_ONCE = 8 };
    for (int p0 = threadIdx.x; p0 < pairs; p0 += AT_ONCE * 1024) {
        float id[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int p = min(p0 + i * 1024, pairs - 1);
            id[i] = __ldcg(route + (size_t)(p / top) * 2 * top + top + p % top);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (p0 + i * 1024 < pairs) f(p0 + i * 1024, (int)id[i]);
    }
}

/* The pairs, those of expert 0 first, and tiles over those of one expert, high ones first so that blocks which take them in turn have equal work: a pair's
 * result does not depend on its place. One block. */
static __global__ void __launch_bounds__(1024) k_experts_order(const float *route, int pairs, int top, int *order, ExpertTile *tiles, int *n_tiles) {
    __shared__ int next[MOST_EXPERTS], sums[32], all[2];
    const int t = threadIdx.x;
    pdl_trigger();
    next[t] = 0;
    pdl_wait();
    __syncthreads();
    each_pair(route, pairs, top, [&](int, int expert) { atomicAdd(&next[expert], 1); });
    __syncthreads();
    const int count = next[t], whole = count / EXPERT_TILE, rest = count % EXPERT_TILE, height = tile_height(rest) / 32;
    const int large = (whole + (height == 4)) | (height == 1) << 16, small = (height == 3) | (height == 2) << 16; /* tiles of 128 and of 32 rows; of 96 and of 64 */
    const int at = sum_before(count, sums), tile = sum_before(large, sums), less = sum_before(small, sums), block = sum_before(whole * 4 + height, sums);
    if (t == 1023) { all[0] = tile + large; all[1] = less + small; }
    next[t] = at;
    __syncthreads();
    for (int i = 0; i < whole; i++) tiles[(tile & 0xffff) + i] = {t, at + i * EXPERT_TILE, EXPERT_TILE, block + i * 4};
    const int after4 = all[0] & 0xffff, after3 = after4 + (all[1] & 0xffff), after2 = after3 + (all[1] >> 16);
    const int last = height == 4 ? (tile & 0xffff) + whole : height == 3 ? after4 + (less & 0xffff) : height == 2 ? after3 + (less >> 16) : after2 + (tile >> 16);
    if (rest) tiles[last] = {t, at + whole * EXPERT_TILE, rest, block + whole * 4};
    if (!t) *n_tiles = after2 + (all[0] >> 16);
    each_pair(route, pairs, top, [&](int p, int expert) { order[atomicAdd(&next[expert], 1)] = p; });
}

} // namespace bw
#endif
