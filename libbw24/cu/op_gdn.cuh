/* The gated delta net of a few rows in one launch: CONV, norms of q and k, SIGMOID, DECAY, DELTA, the gated norm, and the quantisation for the matrix that
 * follows (docs/numerics.md §4, §5, §11). A block is 32, 64 or 128 columns of a value head of a sequence: what stands before DELTA is done for up to
 * GDN_CHUNK rows at once, DELTA row by row with the state in registers of a warp for 8 columns, none of which waits for another; what stands after it, by
 * the block itself where it has the whole head, else by the head's last block to come there. The chain of short kernels costs more in starts than in work,
 * so q and k are made again by each block that reads them; a key's first block keeps its state and log. Owns this mapping; the mathematics is
 * op_delta.cuh's and op_rows.cuh's. */
#ifndef BW24_CU_OP_GDN_CUH
#define BW24_CU_OP_GDN_CUH

#include "early.cuh"
#include "gdn.cuh"
#include "op_delta.cuh"

namespace bw {

/* of a chunk of rows. raw: inputs of q, k and v, then what CONV makes of them; then in place of q DELTA's outputs. z: the gate, then its activation, of whole
 * heads alone. order: rows of the step */
template <int COLS> struct GdnShared {
    DeltaRow row[GDN_CHUNK];
    float raw[3][GDN_CHUNK][GDN_CHANNELS], z[COLS == GDN_CHANNELS ? GDN_CHUNK : 1][GDN_CHANNELS];
    int last, order[GDN_CHUNK];
};

/* n / d of numbers below 2^16 by a reciprocal: what the compiler makes of a division is 25 instructions */
__device__ __forceinline__ int gdn_over(int n, int d) { return (int)(((float)n + 0.5f) * (1.0f / (float)d)); }

/* what a block and a thread are. FULL: heads of 128 keys and values and 4 taps, known when this is compiled. Warps 0 .. 3 q, 4 .. 7 k, 8 .. the block's
 * columns of v; where the block has the whole head, four more: the gate, beta, decay */
template <int COLUMNS, bool FULL_> struct GdnShape {
    enum { COLS = COLUMNS, FULL = FULL_, WHOLE = COLS == GDN_CHANNELS, THREADS = gdn_threads(COLS), WARPS = THREADS / 32, BETA = WHOLE ? 13 : 6 };
    int dk, dv, taps, head, block, blocks, key, which, i;
    bool first; /* of the blocks that read this key */
    __device__ __forceinline__ GdnShape(const GdnArgs &a) {
        const DeltaArgs &d = a.d;
        dk = FULL ? (int)GDN_CHANNELS : d.dk; dv = FULL ? (int)GDN_CHANNELS : d.dv; taps = FULL ? (int)GDN_TAPS : a.conv.taps;
        blocks = dv / COLS; head = blockIdx.x / blocks; block = blockIdx.x % blocks;
        const int by = d.grouped ? gdn_over(d.heads, d.kheads) : d.kheads, over = gdn_over(head, by), rest = head - over * by;
        key = d.grouped ? over : rest;
        first = !block && !(d.grouped ? rest : over);
        which = threadIdx.x >> 7; i = threadIdx.x & 127;
    }
};

/* a thread's channel of the convolution; the last taps - 1 inputs and the weights in registers */
template <class S> struct GdnChannel {
    const S &at;
    int c;               /* in the convolution's input, -1: none */
    bool keeps;          /* this block writes its state and log */
    float x[GDN_TAPS], w[GDN_TAPS];
    __device__ __forceinline__ GdnChannel(const GdnArgs &a, const S &at) : at(at) {
        c = at.which > 2 ? -1 : at.which == 2 ? a.from[2] + at.head * at.dv + at.block * S::COLS + at.i : at.i < at.dk ? a.from[at.which] + at.key * at.dk + at.i : -1;
        keeps = c >= 0 && (at.which == 2 || at.first);
    }
    /* the weights of 4 taps, before the dependency wait */
    __device__ __forceinline__ void weights(const GdnArgs &a) {
        const uint4 v = load_now((const uint4 *)a.conv.w + max(c, 0));
        w[0] = __uint_as_float(v.x); w[1] = __uint_as_float(v.y); w[2] = __uint_as_float(v.z); w[3] = __uint_as_float(v.w);
    }
    /* what row r of the sequence finds: inputs of this step (order: its rows) and, before them, of the state */
    __device__ __forceinline__ void load(const GdnArgs &a, const FoldSeq &s, const int *order, int r) {
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++) {
            const int back = at.taps - 1 - t;
            const bool on = c >= 0 && back > 0;
            x[t] = !on ? 0.0f : r >= back ? __ldcg(a.conv.x + (size_t)order[r - back] * a.conv.n + c) : __ldcg(s.live + a.conv.state + (size_t)(r + t) * a.conv.n + c);
            if (!S::FULL) w[t] = c >= 0 && back >= 0 ? __ldg(a.conv.w + (size_t)c * at.taps + t) : 0.0f;
        }
    }
    /* the row's sum; the window moves on */
    __device__ __forceinline__ float step(float now) {
        float p = 0.0f;
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++)
            if (t < at.taps) {
                float v = t == at.taps - 1 ? now : x[t];
                p = fmaf(w[t], v, p);
                if (t + 1 < at.taps) x[t] = t + 2 == at.taps ? now : x[t + 1 < GDN_TAPS ? t + 1 : t];
            }
        return p;
    }
    __device__ __forceinline__ void keep(const GdnArgs &a, float *to) const {
#pragma unroll
        for (int t = 0; t < GDN_TAPS; t++)
            if (t < at.taps - 1) to[a.conv.state + (size_t)t * a.conv.n + c] = x[t];
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

/* a lane's share of beta and decay: of row r0 + lane of the chunk, in the warps of the block that make them */
struct GdnLead { float x, a, dt; };

/* rows r0 .. r0 + m of a sequence, those of sh.order: inputs of all at once, then CONV, and the gate's activation in blocks that have it */
template <class S>
__device__ __forceinline__ GdnLead gdn_inputs(const GdnArgs &a, const FoldSeq &s, GdnShared<S::COLS> &sh, GdnChannel<S> &ch, const S &at, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool gate = S::WHOLE && at.which == 3 && a.tail, on = gate || ch.c >= 0;
    float *raw = gate ? sh.z[0] + at.i : sh.raw[at.which < 3 ? at.which : 0][0] + at.i, in[GDN_CHUNK] = {};
    const float *from = gate ? a.z + at.head * at.dv + at.i : a.conv.x + max(ch.c, 0);
    const int ld = gate ? a.d.heads * at.dv : a.conv.n;
    const auto get = [&](int e0, int e1) { /* more than there are: the last row's again */
#pragma unroll
        for (int e = e0; e < e1; e++) in[e] = __ldcg(from + (int64_t)sh.order[e] * ld);
    };
    const auto put = [&](int e0, int e1) {
#pragma unroll
        for (int e = e0; e < e1; e++)
            if (on) raw[e * GDN_CHANNELS] = in[e];
    };
    get(0, 1);
    if (m > 1) get(1, 4);
    if (m > 4) get(4, GDN_CHUNK);
    GdnLead lead = {};
    if ((warp == S::BETA || warp == S::BETA + 1) && lane < m) {
        lead.x = __ldcg((warp == S::BETA ? a.beta : a.decay) + (int64_t)sh.order[lane] * a.d.heads + at.head);
        lead.a = __ldg(a.a + at.head);
        lead.dt = __ldg(a.dt + at.head);
    }
    put(0, 1);
    if (m > 1) put(1, 4);
    if (m > 4) put(4, GDN_CHUNK);
#pragma unroll 1
    for (int e = 0; e < m && on; e++) {
        const float x = raw[e * GDN_CHANNELS], p = gate ? x : ch.step(x);
        raw[e * GDN_CHANNELS] = gate && a.gelu ? bw_gelu(p) : bw_silu(p);
        if (ch.keeps && s.log) s.log[a.conv.log + (size_t)(r0 + e) * a.conv.n + ch.c] = x;
    }
    if (ch.keeps && r0 + m == s.n) ch.keep(a, s.out);
    return lead;
}

/* beta and decay, and what the log keeps of them, by two warps while others norm the keys: a decay is a long chain */
template <class S> __device__ __forceinline__ void gdn_lead(const GdnArgs &a, const FoldSeq &s, GdnShared<S::COLS> &sh, const S &at, const GdnLead &x, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane >= m || (warp != S::BETA && warp != S::BETA + 1)) return;
    const bool decay = warp != S::BETA;
    const float v = decay ? bw_exp(x.a * bw_softplus(x.x + x.dt)) : bw_sigmoid(x.x);
    if (decay) sh.row[lane].g = v;
    else sh.row[lane].b = v;
    if (s.log && !at.block) s.log[a.d.log + (size_t)(r0 + lane) * a.d.log_width + a.d.kheads * at.dk + a.d.heads * (at.dv + !decay) + at.head] = v;
}

/* q and k normed and laid out by strand, a warp a row of either; what the log keeps of the rows */
template <class S> __device__ __forceinline__ void gdn_keys(const GdnArgs &a, const FoldSeq &s, GdnShared<S::COLS> &sh, const S &at, int r0, int m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int task = warp; task < 2 * m && warp < S::BETA; task += S::BETA) {
        const int which = task & 1, e = task >> 1;
        const float *v = sh.raw[which][e], r = gdn_norm(v, at.dk, a.eps[which], lane);
        float *log = which && at.first && s.log ? s.log + a.d.log + (size_t)(r0 + e) * a.d.log_width + at.key * at.dk : NULL;
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int i = u * 32 + lane;
            if (i >= at.dk) break;
            float n = v[i] * r;
            if (!which && a.scaled) n = n * a.scale;
            (which ? sh.row[e].k : sh.row[e].q)[i & 3][i >> 2] = n;
            if (log) log[i] = n;
        }
    }
    if (!s.log) return;
#pragma unroll 1
    for (int t = threadIdx.x; t < m * S::COLS; t += S::THREADS) {
        const int e = t / S::COLS, col = t % S::COLS;
        float *to = s.log + a.d.log + (size_t)(r0 + e) * a.d.log_width + a.d.kheads * at.dk;
        to[at.head * at.dv + at.block * S::COLS + col] = sh.raw[2][e][col];
    }
}

/* rows of the chunk through the state of this warp's 8 columns; DELTA's output goes to shared memory or where the finished one will stand */
template <class S> __device__ __forceinline__ void gdn_rows(const GdnArgs &a, GdnShared<S::COLS> &sh, DeltaColumn<S::FULL> &c, const S &at, int col, int m) {
    float2 x = c.begin(sh.row[0]);
    float y;
#pragma unroll 1
    for (int e = 0; e <= m; e++) {
        if (e < m) x = c.row(sh.row[e], sh.raw[2][e] + col, sh.row[e + 1 < m ? e + 1 : e], x, e + 1 == m, false, &y, []() {});
        else y = c.joined(x).y;
        if (!e || c.strand) continue;
        if (S::WHOLE) sh.raw[0][e - 1][col] = y;
        else a.y[(size_t)sh.order[e - 1] * a.d.heads * at.dv + at.head * at.dv + at.block * S::COLS + col] = y;
        if (not_finite(y)) report_fault(a.d.fault, a.d.op);
    }
}

/* the m rows of `order` of a head's output, DELTA's: norm, gate, codes, in place, a group of 32 columns a warp. weight: of whole heads, the norm's for this lane's
 * column, which is the same in all rows */
template <class S> __device__ __forceinline__ void gdn_out(const GdnArgs &a, const int *order, GdnShared<S::COLS> &sh, const S &at, int m, float weight) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = at.dv / 32, tasks = m * groups;
    float (*rows)[GDN_CHANNELS] = sh.raw[0];
    const size_t from = (size_t)at.head * at.dv;
    if (!S::WHOLE)
#pragma unroll 1
        for (int t = warp; t < tasks; t += S::WARPS)
            rows[t / groups][t % groups * 32 + lane] = __ldcg(a.y + (size_t)order[t / groups] * a.d.heads * at.dv + from + t % groups * 32 + lane);
    __syncthreads();
#pragma unroll 1
    for (int t = warp; t < tasks; t += S::WARPS) {
        const int e = t / groups, g = t % groups, row = order[e];
        const size_t to = (size_t)row * a.d.heads * at.dv + from + g * 32 + lane;
        float y = rows[e][g * 32 + lane];
        if (a.tail) {
            const float w = S::WHOLE ? weight : a.w ? __ldg(a.w + g * 32 + lane) : 1.0f;
            float z = S::WHOLE ? sh.z[e][g * 32 + lane] : __ldcg(a.z + to);
            if (!S::WHOLE) z = a.gelu ? bw_gelu(z) : bw_silu(z);
            float p = 0.0f;
            for (int u = 0; u < groups; u++) p = fmaf(rows[e][u * 32 + lane], rows[e][u * 32 + lane], p);
            const float r = 1.0f / sqrtf((0.0f + warp_tree(p)) / (float)at.dv + a.tail_eps);
            y = z * ((y * r) * w);
        }
        if (a.tail || S::WHOLE) a.y[to] = y;
        if (a.o.q) quant_group(a.o, row, (int)(from >> 5) + g, lane, y, a.d.fault, a.quant_op);
    }
}

/* whether this block is its head's last to come here; what the others wrote is then seen */
template <class S, class Keep> __device__ __forceinline__ bool gdn_last(const GdnArgs &a, GdnShared<S::COLS> &sh, const S &at, Keep keep) {
    int *count = a.count + blockIdx.y * a.d.heads + at.head;
    __threadfence();
    __syncthreads();
    if (!threadIdx.x) sh.last = atomicAdd(count, 1) == at.blocks - 1;
    keep();
    __syncthreads();
    if (!sh.last) return false;
    __threadfence();
    if (!threadIdx.x) *count = 0;
    return true;
}

template <class S> __device__ __forceinline__ void gdn_block(const GdnArgs &a, const FoldSeq &s, const int *order, GdnShared<S::COLS> &sh) {
    const S at(a);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, col = warp * 8 + (lane & 7);
    const bool holds = S::WHOLE || warp < S::COLS / 8;
    DeltaColumn<S::FULL> c;
    GdnChannel<S> ch(a, at);
    c.place(lane, at.dk);
    const auto state = [&](const float *version) { /* dv is a multiple of 32 here */
        const int column = at.block * S::COLS + col;
        return version + a.d.state + (at.head * at.dk * at.dv + (column & ~7) * at.dk + c.strand * 8 + (column & 7));
    };
    c.load(held(state(s.live)), 32, holds);
    const auto rows = [&](int r0) { if (threadIdx.x < GDN_CHUNK) sh.order[threadIdx.x] = order[min(r0 + (int)threadIdx.x, s.n - 1)]; };
    rows(0);
    if (S::FULL) ch.weights(a);
    const float weight = S::WHOLE && a.tail && a.w ? load_now(a.w + (warp % (GDN_CHANNELS / 32) * 32 + lane)) : 1.0f;
    ch.load(a, s, order, 0);
    __syncthreads();
    pdl_wait();
#pragma unroll 1
    for (int r0 = 0; r0 < s.n; r0 += GDN_CHUNK) {
        const int m = min((int)GDN_CHUNK, s.n - r0);
        const GdnLead lead = gdn_inputs(a, s, sh, ch, at, r0, m);
        __syncthreads();
        gdn_lead(a, s, sh, at, lead, r0, m);
        gdn_keys(a, s, sh, at, r0, m);
        __syncthreads();
        if (holds) gdn_rows(a, sh, c, at, col, m);
        if (S::WHOLE) gdn_out(a, sh.order, sh, at, m, weight);
        if (r0 + m == s.n) break;
        __syncthreads();
        rows(r0 + m);
        ch.load(a, s, order, r0 + m); /* again, so that no register holds it meanwhile */
        __syncthreads();
    }
    const auto keep = [&]() { if (holds) c.keep((float *)state(s.out), 32); };
    if (S::WHOLE) return keep();
    if (!gdn_last(a, sh, at, keep)) return;
    for (int r0 = 0; r0 < s.n; r0 += GDN_CHUNK) {
        gdn_out(a, order + r0, sh, at, min((int)GDN_CHUNK, s.n - r0), 1.0f);
        __syncthreads();
    }
}

/* grid (value heads times blocks of COLS columns, sequences or more) */
template <int COLS, bool FULL> static __global__ void __launch_bounds__(gdn_threads(COLS)) k_gdn(const __grid_constant__ GdnArgs a, FoldRows f) {
    __shared__ GdnShared<COLS> sh;
    pdl_trigger();
    /* tables and versions of state come from before the step: no kernel of this step writes them, so they need not wait for one */
    const int n_seqs = load_now(f.n_seqs); /* beside the sequence, which is none where there are fewer: there is room for as many as rows */
    union { uint4 words[sizeof(FoldSeq) / 16]; FoldSeq s; } of;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(FoldSeq) / 16); i++) of.words[i] = load_now((const uint4 *)(f.seqs + blockIdx.y) + i);
    if (blockIdx.y >= n_seqs) return pdl_wait();
    const FoldSeq s = of.s;
    gdn_block<GdnShape<COLS, FULL>>(a, s, f.order + s.first, sh);
}

} // namespace bw
#endif
