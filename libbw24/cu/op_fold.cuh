/* CONV and DELTA (docs/numerics.md §11) on the device, and the replay of a log. Owns the mapping of channels, heads and columns to threads; rows of a
 * sequence go one after the other, in every phase of a model's work. */
#ifndef BW24_CU_OP_FOLD_CUH
#define BW24_CU_OP_FOLD_CUH

#include "device.cuh"
#include "fold.cuh"

namespace bw {

/* row t of a convolution's state after `end` rows: input row end - (taps - 1) + t, from before the step where that is negative */
__device__ __forceinline__ void conv_put(const ConvArgs &a, float *to, const float *live, int end, int i, int c, float x) {
    const int keep = a.taps - 1;
    if (i < end && i >= end - keep) to[a.state + (size_t)(i - end + keep) * a.n + c] = x;
    if (!i)
        for (int t = 0; t + end < keep; t++) to[a.state + (size_t)t * a.n + c] = __ldcg(live + a.state + (size_t)(t + end) * a.n + c);
}

/* grid (channels / 256, entries of order): a thread is one channel of one row */
static __global__ void __launch_bounds__(256) k_conv(ConvArgs a, FoldRows f) {
    const int c = blockIdx.x * 256 + threadIdx.x, at = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (c >= a.n) return;
    const FoldSeq s = f.seqs[f.seq_of[at]];
    const int i = at - s.first, row = f.order[at];
    float p = 0.0f, x = 0.0f;
    for (int t = 0; t < a.taps; t++) {
        int back = a.taps - 1 - t;
        x = i >= back ? __ldcg(a.x + (size_t)f.order[at - back] * a.n + c) : __ldcg(s.live + a.state + (size_t)(a.taps - 1 + i - back) * a.n + c);
        p = fmaf(__ldg(a.w + (size_t)c * a.taps + t), x, p);
    }
    a.y[(size_t)row * a.n + c] = bw_silu(p);
    if (s.mid) conv_put(a, s.mid, s.live, s.n - s.n_log, i, c, x);
    conv_put(a, s.out, s.live, s.n, i, c, x);
    if (s.log && i >= s.n - s.n_log) s.log[a.log + (size_t)(i - (s.n - s.n_log)) * a.n + c] = x;
}

__device__ __forceinline__ void conv_replay(const ConvArgs &a, const FoldSeq &s, int c) {
    const int keep = a.taps - 1;
    if (c >= a.n) return;
    for (int t = 0; t < keep; t++) {
        int row = s.n - keep + t;
        s.out[a.state + (size_t)t * a.n + c] = row >= 0 ? __ldcg(s.log + a.log + (size_t)row * a.n + c) : __ldcg(s.live + a.state + (size_t)(t + s.n) * a.n + c);
    }
}

/* what one block of DELTA shares: k and q of a row by strand (value 4 t + j at [j][t]), two rows deep; a value a strand and column */
enum { DELTA_ROWS = DELTA_MAX_DK / 4 };
struct DeltaShared { float k[2][4][DELTA_ROWS], q[2][4][DELTA_ROWS], part[2][4][32]; };

/* 32 columns of a head over a sequence's rows. Warp j is strand j: it holds rows j, j + 4, ... of the state, lane = column. The next row's inputs are
 * loaded while a row is worked on. */
struct DeltaBlock {
    const DeltaArgs &a;
    const FoldSeq &s;
    DeltaShared &sh;
    int head, block, lane, strand, key, col, count; /* count: values of this strand */
    bool live_col, logs_k;
    size_t at;
    int cols;
    float kr, qr, v, g, b;

    __device__ __forceinline__ DeltaBlock(const DeltaArgs &a, const FoldSeq &s, DeltaShared &sh, int item) : a(a), s(s), sh(sh) {
        const int blocks = (a.dv + 31) / 32, group = a.heads / a.kheads;
        lane = threadIdx.x & 31; strand = threadIdx.x >> 5;
        head = item / blocks; block = item % blocks;
        key = a.grouped ? head / group : head % a.kheads;
        logs_k = !block && (a.grouped ? head % group == 0 : head < a.kheads);
        cols = min(32, a.dv - block * 32);
        col = head * a.dv + block * 32 + lane;
        count = (a.dk - strand + 3) / 4;
        live_col = lane < cols;
        at = a.state + (size_t)head * a.dk * a.dv + (size_t)block * 32 * a.dk + (size_t)strand * cols + lane;
    }
    __device__ __forceinline__ void load(size_t row) {
        const int i = threadIdx.x;
        kr = i < a.dk ? __ldcg(a.k + row * a.ldk + key * a.dk + i) : 0.0f;
        qr = a.q && i < a.dk ? __ldcg(a.q + row * a.ldq + key * a.dk + i) : 0.0f;
        v = live_col ? __ldcg(a.v + row * a.ldv + col) : 0.0f;
        g = __ldcg(a.g + row * a.ldg + head);
        b = __ldcg(a.b + row * a.ldb + head);
    }
    __device__ __forceinline__ void stage(int turn) {
        sh.k[turn][threadIdx.x & 3][threadIdx.x >> 2] = kr;
        sh.q[turn][threadIdx.x & 3][threadIdx.x >> 2] = qr;
    }
    __device__ __forceinline__ void log(int r) const {
        float *to = s.log + a.log + (size_t)r * a.log_width;
        if (logs_k && threadIdx.x < a.dk) to[key * a.dk + threadIdx.x] = kr;
        to += a.kheads * a.dk;
        if (!strand && live_col) to[col] = v;
        to += a.heads * a.dv;
        if (!block && !threadIdx.x) { to[head] = g; to[a.heads + head] = b; }
    }
    __device__ __forceinline__ float joined(int which) const {
        return (sh.part[which][0][lane] + sh.part[which][2][lane]) + (sh.part[which][1][lane] + sh.part[which][3][lane]);
    }
    __device__ __forceinline__ void keep(float *to, const float (&S)[DELTA_ROWS]) const {
        if (!live_col) return;
        to += at;
#pragma unroll
        for (int t = 0; t < DELTA_ROWS; t++, to += 4 * cols)
            if (t < count) *to = S[t];
    }
    /* one row: the state, and this strand's part of the output */
    __device__ __forceinline__ void row(int turn, float (&S)[DELTA_ROWS], float v, float g, float b) const {
        float p = 0.0f;
#pragma unroll
        for (int t = 0; t < DELTA_ROWS; t++)
            if (t < count) {
                S[t] = S[t] * g;
                p = fmaf(S[t], sh.k[turn][strand][t], p);
            }
        sh.part[0][strand][lane] = p;
        __syncthreads();
        float d = b * (v - joined(0)), o = 0.0f;
#pragma unroll
        for (int t = 0; t < DELTA_ROWS; t++)
            if (t < count) {
                S[t] = fmaf(sh.k[turn][strand][t], d, S[t]);
                o = fmaf(S[t], sh.q[turn][strand][t], o);
            }
        sh.part[1][strand][lane] = o;
    }
    __device__ __forceinline__ void run(const int *order) {
        float S[DELTA_ROWS];
        const float *from = s.live + at;
#pragma unroll
        for (int t = 0; t < DELTA_ROWS; t++, from += 4 * cols) S[t] = live_col && t < count ? __ldcg(from) : 0.0f;
        load(order ? order[s.first] : 0);
        stage(0);
        if (a.q && s.log && !(s.n - s.n_log)) log(0);
        __syncthreads();
        for (int r = 0; r < s.n; r++) {
            float rv = v, rg = g, rb = b;
            if (r + 1 < s.n) load(order ? order[s.first + r + 1] : r + 1);
            row(r & 1, S, rv, rg, rb);
            if (r + 1 < s.n) {
                stage((r + 1) & 1);
                if (a.q && s.log && r + 1 >= s.n - s.n_log) log(r + 1 - (s.n - s.n_log));
            }
            __syncthreads();
            if (!strand && live_col && a.q) {
                float y = joined(1);
                a.y[(size_t)order[s.first + r] * a.heads * a.dv + col] = y;
                if (not_finite(y)) report_fault(a.fault, a.op);
            }
            if (s.mid && r + 1 == s.n - s.n_log) keep(s.mid, S);
        }
        keep(s.out, S);
    }
};

/* grid (heads * blocks of 32 columns, sequences or more) */
static __global__ void __launch_bounds__(FOLD_THREADS) k_delta(DeltaArgs a, FoldRows f) {
    __shared__ DeltaShared sh;
    pdl_trigger();
    pdl_wait();
    if (blockIdx.y >= *f.n_seqs) return;
    const FoldSeq s = f.seqs[blockIdx.y];
    DeltaBlock(a, s, sh, blockIdx.x).run(f.order);
}

/* the state after the first s.n rows of a log: grid (items of the widest op, ops) */
static __global__ void __launch_bounds__(FOLD_THREADS) k_replay(const ReplayOp *ops, FoldSeq s) {
    __shared__ DeltaShared sh;
    pdl_trigger();
    pdl_wait();
    const ReplayOp &o = ops[blockIdx.y];
    if (!o.delta) return conv_replay(o.conv, s, blockIdx.x * FOLD_THREADS + threadIdx.x);
    DeltaArgs a = o.d;
    if (blockIdx.x >= a.heads * ((a.dv + 31) / 32)) return;
    a.k = s.log + a.log;
    a.v = a.k + a.kheads * a.dk;
    a.g = a.v + a.heads * a.dv;
    a.b = a.g + a.heads;
    a.ldk = a.ldv = a.ldg = a.ldb = a.log_width;
    DeltaBlock(a, s, sh, blockIdx.x).run(NULL);
}

} // namespace bw
#endif
