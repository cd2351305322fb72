/* The gated delta net of a few rows in one launch: CONV, norms of q and k, SIGMOID, DECAY, DELTA, the gated norm, and the quantisation for the matrix that
 * follows (docs/numerics.md §4, §5, §11). A block is a value head of a sequence and keeps its state in registers: warp 4 c + j holds columns 32 c .. 32 c +
 * 31, strand j. The chain of short kernels costs more in starts than in work, so a head's q and k are made again by each value head that reads them; the
 * first of those keeps state and log. Owns this mapping; the mathematics is op_fold.cuh's and op_rows.cuh's. */
#ifndef BW24_CU_OP_GDN_CUH
#define BW24_CU_OP_GDN_CUH

#include "gdn.cuh"

namespace bw {

/* kq: by strand, value 4 t + j at [j][t] */
struct GdnShared { float raw[3][GDN_CHANNELS], k[4][32], q[4][32], part[2][4][4][32], y[GDN_CHANNELS], g, b; };

/* a thread's channel of the convolution: threads 0 .. of q, 128 .. of k, 256 .. of v; the last taps - 1 inputs and the weights in registers */
struct GdnChannel {
    int c;               /* in the convolution's input, -1: none */
    bool keeps;          /* this block writes its state and log */
    float x[GDN_TAPS], w[GDN_TAPS];
    __device__ __forceinline__ void load(const GdnArgs &a, const FoldSeq &s, int head, int key, bool first) {
        const int which = threadIdx.x >> 7, i = threadIdx.x & 127, taps = a.conv.taps;
        bool mine = which < 2 ? i < a.d.dk : which == 2 && i < a.d.dv;
        c = mine ? a.from[which] + (which < 2 ? key * a.d.dk : head * a.d.dv) + i : -1;
        keeps = mine && (which == 2 || first);
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++) {
            x[t] = mine && t < taps - 1 ? __ldcg(s.live + a.conv.state + (size_t)t * a.conv.n + c) : 0.0f;
            w[t] = mine && t < taps ? __ldg(a.conv.w + (size_t)c * taps + t) : 0.0f;
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

/* the finished values of a row: warps of strand 0 have 32 columns each */
__device__ __forceinline__ void gdn_out(const GdnArgs &a, const GdnShared &sh, int row, int head, int block, int lane) {
    const int col = head * a.d.dv + block * 32 + lane;
    const size_t at = (size_t)row * a.d.heads * a.d.dv + col;
    float y = sh.y[block * 32 + lane];
    if (a.tail) {
        float r = gdn_norm(sh.y, a.d.dv, true, a.tail_eps, lane), z = __ldcg(a.z + at);
        y = a.w ? (y * r) * __ldg(a.w + block * 32 + lane) : y * r;
        y = (a.gelu ? bw_gelu(z) : bw_silu(z)) * y;
    }
    a.y[at] = y;
    if (a.o.q) quant_group(a.o, row, col >> 5, lane, y, a.d.fault, a.quant_op);
}

__device__ __forceinline__ void gdn_log(const GdnArgs &a, const GdnShared &sh, float *log, int r, int head, int key, bool first, float kn) {
    float *to = log + a.d.log + (size_t)r * a.d.log_width;
    const int which = threadIdx.x >> 7, i = threadIdx.x & 127;
    if (which == 1 && first && i < a.d.dk) to[key * a.d.dk + i] = kn;
    to += a.d.kheads * a.d.dk;
    if (which == 2 && i < a.d.dv) to[head * a.d.dv + i] = sh.raw[2][i];
    to += a.d.heads * a.d.dv;
    if (threadIdx.x == 384) { to[head] = sh.g; to[a.d.heads + head] = sh.b; }
}

/* grid (value heads, sequences or more) */
static __global__ void __launch_bounds__(GDN_THREADS) k_gdn(GdnArgs a, FoldRows f) {
    __shared__ GdnShared sh;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, block = warp >> 2, strand = warp & 3, which = threadIdx.x >> 7, i = threadIdx.x & 127;
    const int head = blockIdx.x, group = a.d.heads / a.d.kheads, key = a.d.grouped ? head / group : head % a.d.kheads;
    const bool first = a.d.grouped ? head % group == 0 : head < a.d.kheads, holds = block * 32 < a.d.dv;
    const int count = holds ? (a.d.dk - strand + 3) / 4 : 0;
    pdl_trigger();
    /* tables and versions of state come from before the step: no kernel of this step writes them, so they need not wait for one */
    if (blockIdx.y >= __ldcg(f.n_seqs)) return pdl_wait();
    const FoldSeq s = f.seqs[blockIdx.y];
    const size_t at = a.d.state + (size_t)head * a.d.dk * a.d.dv + (size_t)block * 32 * a.d.dk + strand * 32 + lane;
    float S[DELTA_MAX_DK / 4];
    const float *from = s.live + at;
#pragma unroll
    for (int t = 0; t < DELTA_MAX_DK / 4; t++, from += 128) S[t] = t < count ? __ldcg(from) : 0.0f;
    GdnChannel ch;
    ch.load(a, s, head, key, first);
    pdl_wait();
    for (int r = 0; r < s.n; r++) {
        const int row = f.order[s.first + r];
        float x = ch.c >= 0 ? __ldcg(a.conv.x + (size_t)row * a.conv.n + ch.c) : 0.0f;
        float v = ch.step(a, x);
        if (ch.c >= 0) sh.raw[which][i] = v;
        if (ch.keeps && s.log) s.log[a.conv.log + (size_t)r * a.conv.n + ch.c] = x;
        if (threadIdx.x == 384) sh.b = bw_sigmoid(__ldcg(a.beta + (size_t)row * a.d.heads + head));
        if (threadIdx.x == 416) sh.g = bw_exp(__ldg(a.a + head) * bw_softplus(__ldcg(a.decay + (size_t)row * a.d.heads + head) + __ldg(a.dt + head)));
        __syncthreads();
        float n = 0.0f;
        if (which < 2) {
            n = sh.raw[which][i] * gdn_norm(sh.raw[which], a.d.dk, false, a.eps[which], lane);
            if (!which && a.scaled) n = n * a.scale;
            if (i < a.d.dk) (which ? sh.k : sh.q)[i & 3][i >> 2] = n;
        }
        if (s.log) gdn_log(a, sh, s.log, r, head, key, first, n);
        __syncthreads();
        float p = 0.0f;
#pragma unroll
        for (int t = 0; t < DELTA_MAX_DK / 4; t++)
            if (t < count) { S[t] = S[t] * sh.g; p = fmaf(S[t], sh.k[strand][t], p); }
        sh.part[0][block][strand][lane] = p;
        __syncthreads();
        float d = 0.0f, o = 0.0f;
        if (holds) {
            const float(&u)[4][32] = sh.part[0][block];
            d = sh.b * (sh.raw[2][block * 32 + lane] - ((u[0][lane] + u[2][lane]) + (u[1][lane] + u[3][lane])));
        }
#pragma unroll
        for (int t = 0; t < DELTA_MAX_DK / 4; t++)
            if (t < count) { S[t] = fmaf(sh.k[strand][t], d, S[t]); o = fmaf(S[t], sh.q[strand][t], o); }
        sh.part[1][block][strand][lane] = o;
        __syncthreads();
        if (!strand && holds) {
            const float(&u)[4][32] = sh.part[1][block];
            float y = (u[0][lane] + u[2][lane]) + (u[1][lane] + u[3][lane]);
            if (not_finite(y)) report_fault(a.d.fault, a.d.op);
            sh.y[block * 32 + lane] = y;
        }
        __syncthreads();
        if (!strand && holds) gdn_out(a, sh, row, head, block, lane);
    }
    float *to = s.out + at;
#pragma unroll
    for (int t = 0; t < DELTA_MAX_DK / 4; t++, to += 128)
        if (t < count) *to = S[t];
    if (ch.keeps) ch.keep(a, s.out);
}

} // namespace bw
#endif
