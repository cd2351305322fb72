/* The gated delta net of a few rows in one launch: CONV, norms of q and k, SIGMOID, DECAY, DELTA, the gated norm, and the quantisation for the matrix that
 * follows (docs/numerics.md §4, §5, §11). A block is 32 columns of a value head of a sequence: what stands before DELTA is done for up to GDN_CHUNK rows at
 * once, DELTA row by row with the state in registers of four warps, none of which waits for another; what stands after it, by the head's last block to
 * come there. The chain of short kernels costs more in starts than in work, so q and k are made again by each block that reads them; a head's first block
 * keeps state and log. Owns this mapping; the mathematics is op_delta.cuh's and op_rows.cuh's. */
#ifndef BW24_CU_OP_GDN_CUH
#define BW24_CU_OP_GDN_CUH

#include "gdn.cuh"
#include "op_delta.cuh"

namespace bw {

/* raw: inputs of q, k and v (32 columns), then what CONV makes of them, by row; at the end the rows of a head */
struct GdnShared { DeltaRow row[GDN_CHUNK]; float raw[3][GDN_CHUNK][GDN_CHANNELS]; int last; };

/* what a block and a thread are: warps 0 .. 3 q, 4 .. 7 k, 8 the block's 32 columns of v */
struct GdnPlace {
    int head, block, blocks, key, which, i;
    bool first; /* of the blocks that read this key */
    __device__ __forceinline__ GdnPlace(const DeltaArgs &d) {
        const int group = d.heads / d.kheads;
        blocks = d.dv / 32; head = blockIdx.x / blocks; block = blockIdx.x % blocks;
        key = d.grouped ? head / group : head % d.kheads;
        first = !block && (d.grouped ? head % group == 0 : head < d.kheads);
        which = threadIdx.x >> 7; i = threadIdx.x & 127;
    }
};

/* a thread's channel of the convolution; the last taps - 1 inputs and the weights in registers */
struct GdnChannel {
    int c;               /* in the convolution's input, -1: none */
    bool keeps;          /* this block writes its state and log */
    float x[GDN_TAPS], w[GDN_TAPS];
    __device__ __forceinline__ GdnChannel(const GdnArgs &a, const GdnPlace &at) {
        c = at.which == 2 ? a.from[2] + at.head * a.d.dv + at.block * 32 + at.i : at.i < a.d.dk ? a.from[at.which] + at.key * a.d.dk + at.i : -1;
        keeps = c >= 0 && (at.which == 2 || at.first);
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

/* 1 / sqrt(sum of squares + eps) of v[0 .. n), n <= 128 */
__device__ __forceinline__ float gdn_norm(const float *v, int n, float eps, int lane) {
    float p = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i * 32 + lane < n) p = fmaf(v[i * 32 + lane], v[i * 32 + lane], p);
    return 1.0f / sqrtf((0.0f + warp_tree(p)) + eps);
}

/* rows r0 .. r0 + m of a sequence: inputs of all, then CONV, beta and decay */
__device__ __forceinline__ void gdn_inputs(const GdnArgs &a, const int *order, const FoldSeq &s, GdnShared &sh, GdnChannel &ch, const GdnPlace &at, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float *raw = sh.raw[at.which][0] + at.i;
#pragma unroll
    for (int e = 0; e < GDN_CHUNK; e++)
        if (e < m && ch.c >= 0) raw[e * GDN_CHANNELS] = __ldcg(a.conv.x + (size_t)order[r0 + e] * a.conv.n + ch.c);
    if (warp == 6 && lane < m) sh.row[lane].b = bw_sigmoid(__ldcg(a.beta + (size_t)order[r0 + lane] * a.d.heads + at.head));
    if (warp == 7 && lane < m) {
        const float x = __ldcg(a.decay + (size_t)order[r0 + lane] * a.d.heads + at.head);
        sh.row[lane].g = bw_exp(__ldg(a.a + at.head) * bw_softplus(x + __ldg(a.dt + at.head)));
    }
#pragma unroll 1
    for (int e = 0; e < m && ch.c >= 0; e++) {
        const float x = raw[e * GDN_CHANNELS], y = ch.step(a, x);
        *(at.which == 2 ? sh.row[e].v + at.i : raw + e * GDN_CHANNELS) = y;
        if (ch.keeps && s.log) s.log[a.conv.log + (size_t)(r0 + e) * a.conv.n + ch.c] = x;
    }
    if (ch.keeps && r0 + m == s.n) ch.keep(a, s.out);
}

/* q and k normed and laid out by strand, a warp a row of either; what the log keeps of the rows */
__device__ __forceinline__ void gdn_keys(const GdnArgs &a, const FoldSeq &s, GdnShared &sh, const GdnPlace &at, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int task = warp; task < 2 * m; task += GDN_THREADS / 32) {
        const int which = task & 1, e = task >> 1;
        const float *v = sh.raw[which][e], r = gdn_norm(v, a.d.dk, a.eps[which], lane);
        float *log = which && at.first && s.log ? s.log + a.d.log + (size_t)(r0 + e) * a.d.log_width + at.key * a.d.dk : NULL;
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int i = u * 32 + lane;
            if (i >= a.d.dk) break;
            float n = v[i] * r;
            if (!which && a.scaled) n = n * a.scale;
            (which ? sh.row[e].k : sh.row[e].q)[i & 3][i >> 2] = n;
            if (log) log[i] = n;
        }
    }
    if (!s.log || threadIdx.x >= GDN_CHUNK * 32 || threadIdx.x >= m * 32) return;
    const DeltaRow &x = sh.row[threadIdx.x >> 5];
    float *to = s.log + a.d.log + (size_t)(r0 + (threadIdx.x >> 5)) * a.d.log_width + a.d.kheads * a.d.dk;
    to[at.head * a.d.dv + at.block * 32 + lane] = x.v[lane];
    to += a.d.heads * a.d.dv;
    if (!at.block && !lane) { to[at.head] = x.g; to[a.d.heads + at.head] = x.b; }
}

/* rows of the chunk through the state of this warp's 8 columns; DELTA's output goes where the finished one will stand */
template <bool FULL> __device__ __forceinline__ void gdn_rows(const GdnArgs &a, const int *order, const GdnShared &sh, DeltaColumn<FULL> &c, const GdnPlace &at, int col, int m) {
    float2 x = c.begin(sh.row[0]);
    float y;
#pragma unroll 1
    for (int e = 0; e <= m; e++) {
        if (e < m) x = c.row(sh.row[e], sh.row[e + 1 < m ? e + 1 : e], col, x, e + 1 == m, false, &y, []() {});
        else y = c.joined(x).y;
        if (!e || c.strand) continue;
        a.y[(size_t)order[e - 1] * a.d.heads * a.d.dv + at.head * a.d.dv + at.block * 32 + col] = y;
        if (not_finite(y)) report_fault(a.d.fault, a.d.op);
    }
}

/* rows r0 .. r0 + m of a head's output, DELTA's: norm, gate, codes, in place, a group of 32 columns a warp */
__device__ __forceinline__ void gdn_out(const GdnArgs &a, const int *order, GdnShared &sh, const GdnPlace &at, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tasks = m * at.blocks;
    float (*rows)[GDN_CHANNELS] = sh.raw[0];
    const size_t from = (size_t)at.head * a.d.dv;
#pragma unroll 1
    for (int t = warp; t < tasks; t += GDN_THREADS / 32)
        rows[t / at.blocks][t % at.blocks * 32 + lane] = __ldcg(a.y + (size_t)order[r0 + t / at.blocks] * a.d.heads * a.d.dv + from + t % at.blocks * 32 + lane);
    __syncthreads();
#pragma unroll 1
    for (int t = warp; t < tasks; t += GDN_THREADS / 32) {
        const int e = t / at.blocks, block = t % at.blocks, row = order[r0 + e];
        const size_t to = (size_t)row * a.d.heads * a.d.dv + from + block * 32 + lane;
        float y = rows[e][block * 32 + lane];
        if (a.tail) {
            const float z = __ldcg(a.z + to), w = a.w ? __ldg(a.w + block * 32 + lane) : 1.0f;
            float p = 0.0f;
            for (int u = 0; u < at.blocks; u++) p = fmaf(rows[e][u * 32 + lane], rows[e][u * 32 + lane], p);
            const float r = 1.0f / sqrtf((0.0f + warp_tree(p)) / (float)a.d.dv + a.tail_eps);
            y = (a.gelu ? bw_gelu(z) : bw_silu(z)) * ((y * r) * w);
            a.y[to] = y;
        }
        if (a.o.q) quant_group(a.o, row, (int)(from >> 5) + block, lane, y, a.d.fault, a.quant_op);
    }
}

template <bool FULL> __device__ __forceinline__ void gdn_block(const GdnArgs &a, const FoldSeq &s, const int *order, GdnShared &sh) {
    const GdnPlace at(a.d);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, col = warp * 8 + (lane & 7);
    const bool holds = warp < 4;
    DeltaColumn<FULL> c;
    GdnChannel ch(a, at);
    c.place(lane, a.d.dk);
    const auto state = [&](const float *version) { return version + a.d.state + (size_t)at.head * a.d.dk * a.d.dv + (size_t)at.block * 32 * a.d.dk + c.strand * 32 + col; };
    c.load(state(s.live), 128, holds);
    ch.load(a, s, order, 0);
    pdl_wait();
#pragma unroll 1
    for (int r0 = 0; r0 < s.n; r0 += GDN_CHUNK) {
        const int m = min((int)GDN_CHUNK, s.n - r0);
        gdn_inputs(a, order, s, sh, ch, at, r0, m);
        __syncthreads();
        gdn_keys(a, s, sh, at, r0, m);
        __syncthreads();
        if (holds) gdn_rows<FULL>(a, order + r0, sh, c, at, col, m);
        if (r0 + m == s.n) break;
        __syncthreads();
        ch.load(a, s, order, r0 + m); /* again, so that no register holds it meanwhile */
    }
    int *count = a.count + blockIdx.y * a.d.heads + at.head;
    __threadfence();
    __syncthreads();
    if (!threadIdx.x) sh.last = atomicAdd(count, 1) == at.blocks - 1;
    if (holds) c.keep((float *)state(s.out), 128);
    __syncthreads();
    if (!sh.last) return;
    __threadfence();
    if (!threadIdx.x) *count = 0;
    for (int r0 = 0; r0 < s.n; r0 += GDN_CHUNK) {
        gdn_out(a, order, sh, at, r0, min((int)GDN_CHUNK, s.n - r0));
        __syncthreads();
    }
}

/* grid (value heads times blocks of 32 columns, sequences or more) */
static __global__ void __launch_bounds__(GDN_THREADS) k_gdn(GdnArgs a, FoldRows f) {
    __shared__ GdnShared sh;
    pdl_trigger();
    /* tables and versions of state come from before the step: no kernel of this step writes them, so they need not wait for one */
    if (blockIdx.y >= __ldcg(f.n_seqs)) return pdl_wait();
    const FoldSeq s = f.seqs[blockIdx.y];
    if (a.d.dk == DELTA_MAX_DK) gdn_block<true>(a, s, f.order + s.first, sh);
    else gdn_block<false>(a, s, f.order + s.first, sh);
}

} // namespace bw
#endif
