/* The gated delta net of a few rows in one launch: CONV, norms of q and k, SIGMOID, DECAY, DELTA, the gated norm, and the quantisation for the matrix that
 * follows (docs/numerics.md §4, §5, §11). A block is a value head of a sequence: what stands before and after DELTA is done for up to GDN_CHUNK rows at
 * once, DELTA row by row with the state in registers, a warp of 8 columns by itself. The chain of short kernels costs more in starts than in work, so a
 * head's q and k are made again by each value head that reads them; the first of those keeps state and log. Owns this mapping; the mathematics is
 * op_fold.cuh's and op_rows.cuh's. */
#ifndef BW24_CU_OP_GDN_CUH
#define BW24_CU_OP_GDN_CUH

#include "gdn.cuh"
#include "op_delta.cuh"

namespace bw {

/* raw: q, k, v as CONV gives them, by row */
struct __align__(16) GdnShared { DeltaRow k[GDN_CHUNK], q[GDN_CHUNK]; float raw[3][GDN_CHUNK][GDN_CHANNELS], y[GDN_CHUNK][GDN_CHANNELS], g[GDN_CHUNK], b[GDN_CHUNK]; };

/* a thread's channel of the convolution: threads 0 .. of q, 128 .. of k, 256 .. of v; the last taps - 1 inputs and the weights in registers */
struct GdnChannel {
    int c;               /* in the convolution's input, -1: none */
    bool keeps;          /* this block writes its state and log */
    float x[GDN_TAPS], w[GDN_TAPS];
    __device__ __forceinline__ void place(const GdnArgs &a, int head, int key, bool first) {
        const int which = threadIdx.x >> 7, i = threadIdx.x & 127;
        bool mine = which < 2 ? i < a.d.dk : which == 2 && i < a.d.dv;
        c = mine ? a.from[which] + (which < 2 ? key * a.d.dk : head * a.d.dv) + i : -1;
        keeps = mine && (which == 2 || first);
    }
    /* what row r of the sequence finds: inputs of this step (order: its rows) and, before them, of the state */
    __device__ __forceinline__ void load(const GdnArgs &a, const FoldSeq &s, const int *order, int r) {
        const int taps = a.conv.taps;
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++) {
            const int back = taps - 1 - t;
            const bool on = c >= 0 && back > 0;
            x[t] = !on ? 0.0f : r >= back ? __ldcg(a.conv.x + (size_t)order[r - back] * a.conv.n + c) : __ldcg(s.live + a.conv.state + (size_t)(r + t) * a.conv.n + c);
            w[t] = c >= 0 && back >= 0 ? __ldg(a.conv.w + (size_t)c * taps + t) : 0.0f;
        }
    }
    /* the row's value; the window moves on */
    __device__ __forceinline__ float step(const GdnArgs &a, float now) {
        float p = 0.0f;
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++)
            if (t < a.conv.taps) {
                float v = t == a.conv.taps - 1 ? now : x[t];
                p = fmaf(w[t], v, p);
                if (t + 1 < a.conv.taps) x[t] = t + 2 == a.conv.taps ? now : x[t + 1 < GDN_TAPS ? t + 1 : t];
            }
        return bw_silu(p);
    }
    __device__ __forceinline__ void keep(const GdnArgs &a, float *to) const {
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++)
            if (t < a.conv.taps - 1) to[a.conv.state + (size_t)t * a.conv.n + c] = x[t];
    }
};

/* 1 / sqrt(sum of squares + eps) of v[0 .. n), n <= 128, by every warp; mean: of their mean */
__device__ __forceinline__ float gdn_norm(const float *v, int n, bool mean, float eps, int lane) {
    float p = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i * 32 + lane < n) p = fmaf(v[i * 32 + lane], v[i * 32 + lane], p);
    float total = 0.0f + warp_tree(p);
    return 1.0f / sqrtf((mean ? total / (float)n : total) + eps);
}

/* rows r0 .. r0 + m of a sequence: inputs of all, then CONV, beta and decay */
__device__ __forceinline__ void gdn_inputs(const GdnArgs &a, const FoldRows &f, const FoldSeq &s, GdnShared &sh, GdnChannel &ch, int head, int r0, int m) {
    const int which = threadIdx.x >> 7, i = threadIdx.x & 127, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int *order = f.order + s.first + r0;
    float x[GDN_CHUNK];
#pragma unroll
    for (int e = 0; e < GDN_CHUNK; e++) x[e] = e < m && ch.c >= 0 ? __ldcg(a.conv.x + (size_t)order[e] * a.conv.n + ch.c) : 0.0f;
    if (warp == 12 && lane < m) sh.b[lane] = bw_sigmoid(__ldcg(a.beta + (size_t)order[lane] * a.d.heads + head));
    if (warp == 13 && lane < m) sh.g[lane] = bw_exp(__ldg(a.a + head) * bw_softplus(__ldcg(a.decay + (size_t)order[lane] * a.d.heads + head) + __ldg(a.dt + head)));
#pragma unroll
    for (int e = 0; e < GDN_CHUNK; e++) {
        if (e >= m || ch.c < 0) break;
        asm volatile("" ::: "memory"); /* rows one after the other: side by side they need more registers than there are */
        sh.raw[which][e][i] = ch.step(a, x[e]);
        if (ch.keeps && s.log) s.log[a.conv.log + (size_t)(r0 + e) * a.conv.n + ch.c] = x[e];
    }
    if (ch.keeps && r0 + m == s.n) ch.keep(a, s.out);
}

/* q and k normed and laid out by strand, a warp a row of either; what the log keeps of the rows */
__device__ __forceinline__ void gdn_keys(const GdnArgs &a, const FoldSeq &s, GdnShared &sh, int head, int key, bool first, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int task = warp; task < 2 * m; task += GDN_THREADS / 32) {
        const int which = task & 1, e = task >> 1;
        const float *v = sh.raw[which][e], r = gdn_norm(v, a.d.dk, false, a.eps[which], lane);
        float *log = which && first && s.log ? s.log + a.d.log + (size_t)(r0 + e) * a.d.log_width + key * a.d.dk : NULL;
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int i = u * 32 + lane;
            if (i >= a.d.dk) break;
            float n = v[i] * r;
            if (!which && a.scaled) n = n * a.scale;
            (which ? sh.k : sh.q)[e][i & 3][i >> 2] = n;
            if (log) log[i] = n;
        }
    }
    if (!s.log) return;
    for (int at = threadIdx.x; at < m * GDN_CHANNELS; at += GDN_THREADS) {
        const int e = at / GDN_CHANNELS, i = at % GDN_CHANNELS;
        float *to = s.log + a.d.log + (size_t)(r0 + e) * a.d.log_width + a.d.kheads * a.d.dk;
        if (i < a.d.dv) to[head * a.d.dv + i] = sh.raw[2][e][i];
        to += a.d.heads * a.d.dv;
        if (!i) { to[head] = sh.g[e]; to[a.d.heads + head] = sh.b[e]; }
    }
}

/* a group of 32 finished values, a warp; z: the gate's values, read before */
__device__ __forceinline__ void gdn_out(const GdnArgs &a, const GdnShared &sh, int row, int e, int head, int block, int lane, float z) {
    const int col = head * a.d.dv + block * 32 + lane;
    float y = sh.y[e][block * 32 + lane];
    if (a.tail) {
        float r = gdn_norm(sh.y[e], a.d.dv, true, a.tail_eps, lane);
        y = a.w ? (y * r) * __ldg(a.w + block * 32 + lane) : y * r;
        y = (a.gelu ? bw_gelu(z) : bw_silu(z)) * y;
    }
    a.y[(size_t)row * a.d.heads * a.d.dv + col] = y;
    if (a.o.q) quant_group(a.o, row, col >> 5, lane, y, a.d.fault, a.quant_op);
}

template <bool FULL> __device__ __forceinline__ void gdn_rows(const GdnArgs &a, const FoldRows &f, const FoldSeq &s, GdnShared &sh, int head, int key, bool first) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, col = warp * 8 + (lane & 7), blocks = a.d.dv / 32;
    const bool holds = col < a.d.dv;
    DeltaColumn<FULL, false> c;
    GdnChannel ch;
    c.strand = lane >> 3;
    c.count = (a.d.dk - c.strand + 3) / 4;
    const auto state = [&](const float *version) { return version + a.d.state + (size_t)head * a.d.dk * a.d.dv + (size_t)(col >> 5) * 32 * a.d.dk + c.strand * 32 + (col & 31); };
    c.load(state(s.live), 128, holds);
    ch.place(a, head, key, first);
    ch.load(a, s, f.order + s.first, 0);
    pdl_wait();
    for (int r0 = 0; r0 < s.n; r0 += GDN_CHUNK) {
        const int m = min((int)GDN_CHUNK, s.n - r0);
        float z[GDN_CHUNK * 4 / (GDN_THREADS / 32)];
        gdn_inputs(a, f, s, sh, ch, head, r0, m);
#pragma unroll
        for (int k = 0; k < GDN_CHUNK * 4 / (GDN_THREADS / 32); k++) {
            const int task = warp + k * (GDN_THREADS / 32), e = task >> 2, block = task & 3;
            z[k] = a.tail && e < m && block < blocks ? __ldcg(a.z + (size_t)f.order[s.first + r0 + e] * a.d.heads * a.d.dv + head * a.d.dv + block * 32 + lane) : 0.0f;
        }
        __syncthreads();
        gdn_keys(a, s, sh, head, key, first, r0, m);
        __syncthreads();
        float p = c.template step<false, true>(sh.k[0], sh.q[0], 0.0f, sh.k[0], sh.g[0]).x;
        for (int e = 0; e < m; e++) {
            const float d = sh.b[e] * (sh.raw[2][e][col] - c.joined(p));
            const float2 x = e + 1 < m ? c.template step<true, true>(sh.k[e], sh.q[e], d, sh.k[e + 1], sh.g[e + 1]) : c.template step<true, false>(sh.k[e], sh.q[e], d, sh.k[e], 0.0f);
            const float y = c.joined(x.y);
            p = x.x;
            if (c.strand || !holds) continue;
            sh.y[e][col] = y;
            if (not_finite(y)) report_fault(a.d.fault, a.d.op);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < GDN_CHUNK * 4 / (GDN_THREADS / 32); k++) {
            const int task = warp + k * (GDN_THREADS / 32), e = task >> 2, block = task & 3;
            if (e < m && block < blocks) gdn_out(a, sh, f.order[s.first + r0 + e], e, head, block, lane, z[k]);
        }
        if (r0 + m < s.n) ch.load(a, s, f.order + s.first, r0 + m); /* again, so that no register holds it meanwhile */
    }
    if (holds) c.keep((float *)state(s.out), 128);
}

/* grid (value heads, sequences or more) */
static __global__ void __launch_bounds__(GDN_THREADS) k_gdn(GdnArgs a, FoldRows f) {
    __shared__ GdnShared sh;
    const int head = blockIdx.x, group = a.d.heads / a.d.kheads, key = a.d.grouped ? head / group : head % a.d.kheads;
    const bool first = a.d.grouped ? head % group == 0 : head < a.d.kheads;
    pdl_trigger();
    /* tables and versions of state come from before the step: no kernel of this step writes them, so they need not wait for one */
    if (blockIdx.y >= __ldcg(f.n_seqs)) return pdl_wait();
    const FoldSeq s = f.seqs[blockIdx.y];
    if (a.d.dk == DELTA_MAX_DK) gdn_rows<true>(a, f, s, sh, head, key, first);
    else gdn_rows<false>(a, f, s, sh, head, key, first);
}

} // namespace bw
#endif
