/* CONV and DELTA (docs/numerics.md §11) on the device, and the replay of a log. Owns the mapping of channels, heads and columns to threads; rows of a
 * sequence go one after the other, in every phase of a model's work. */
#ifndef BW24_CU_OP_FOLD_CUH
#define BW24_CU_OP_FOLD_CUH

#include "op_delta_rows.cuh"

namespace bw {

/* row t of a convolution's state after `end` rows: input row end - (taps - 1) + t, from before the step where that is negative */
__device__ __forceinline__ void conv_put(const ConvArgs &a, float *to, const float *live, int end, int i, int c, float x) {
    const int keep = a.taps - 1;
    if (i < end && i >= end - keep) to[a.state + (size_t)(i - end + keep) * a.n + c] = x;
    if (!i)
        for (int t = 0; t + end < keep; t++) to[a.state + (size_t)t * a.n + c] = __ldcg(live + a.state + (size_t)(t + end) * a.n + c);
}

/* input of entry `at` minus `back` rows: of this step, or from the state before it. i: the entry's row within its sequence */
__device__ __forceinline__ float conv_input(const ConvArgs &a, const FoldRows &f, const FoldSeq &s, int at, int i, int back, int c) {
    return i >= back ? __ldcg(a.x + (size_t)f.order[at - back] * a.n + c) : __ldcg(s.live + a.state + (size_t)(a.taps - 1 + i - back) * a.n + c);
}

/* one row's sum over its n taps and where its input is kept. x: the row's inputs, oldest first */
template <int TAPS> __device__ __forceinline__ void conv_row(const ConvArgs &a, const FoldSeq &s, int row, int i, int c, const float *w, const float *x, int n) {
    float p = 0.0f, now = 0.0f;
#pragma unroll
    for (int t = 0; t < TAPS; t++)
        if (t < n) { now = x[t]; p = fmaf(w[t], now, p); }
    a.y[(size_t)row * a.n + c] = bw_silu(p);
    if (s.mid) conv_put(a, s.mid, s.live, s.n - s.n_log, i, c, now);
    conv_put(a, s.out, s.live, s.n, i, c, now);
    if (s.log && i >= s.n - s.n_log) s.log[a.log + (size_t)(i - (s.n - s.n_log)) * a.n + c] = now;
}

/* a run of CONV_RUN rows of one sequence, TAPS taps: all of its inputs are asked for before one is used */
template <int TAPS> __device__ __forceinline__ void conv_run(const ConvArgs &a, const FoldRows &f, const FoldSeq &s, int at, int c) {
    float w[TAPS], x[CONV_RUN + TAPS - 1]; /* x[TAPS - 1 + r]: input of row r of the run */
    int row[CONV_RUN];
    const int i0 = at - s.first;
#pragma unroll
    for (int r = 0; r < CONV_RUN; r++) row[r] = f.order[at + r];
#pragma unroll
    for (int t = 0; t < TAPS; t++) w[t] = __ldg(a.w + (size_t)c * TAPS + t);
#pragma unroll
    for (int r = 0; r < CONV_RUN; r++) x[TAPS - 1 + r] = __ldcg(a.x + (size_t)row[r] * a.n + c);
#pragma unroll
    for (int t = 1; t < TAPS; t++) x[TAPS - 1 - t] = conv_input(a, f, s, at, i0, t, c);
#pragma unroll
    for (int r = 0; r < CONV_RUN; r++) conv_row<TAPS>(a, s, row[r], i0 + r, c, w, x + r, TAPS);
}

/* grid (channels / 256, entries of order / CONV_RUN): a thread is one channel of a run of rows */
static __global__ void __launch_bounds__(256, 4) k_conv(ConvArgs a, FoldRows f) {
    const int c = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * CONV_RUN, end = min(f.n, first + (int)CONV_RUN);
    pdl_trigger();
    pdl_wait();
    if (c >= a.n) return;
    const FoldSeq &seq = f.seqs[f.seq_of[first]];
    if (a.taps == 4 && end - first == CONV_RUN && first + CONV_RUN <= seq.first + seq.n) return conv_run<4>(a, f, seq, first, c);
    float w[BW_CONV_TAPS];
#pragma unroll
    for (int t = 0; t < BW_CONV_TAPS; t++) w[t] = t < a.taps ? __ldg(a.w + (size_t)c * a.taps + t) : 0.0f;
    for (int at = first; at < end; at++) {
        const FoldSeq &s = f.seqs[f.seq_of[at]];
        float x[BW_CONV_TAPS];
#pragma unroll
        for (int t = 0; t < BW_CONV_TAPS; t++) x[t] = t < a.taps ? conv_input(a, f, s, at, at - s.first, a.taps - 1 - t, c) : 0.0f;
        conv_row<BW_CONV_TAPS>(a, s, f.order[at], at - s.first, c, w, x, a.taps);
    }
}

__device__ __forceinline__ void conv_replay(const ConvArgs &a, const FoldSeq &s, int c) {
    const int keep = a.taps - 1;
    if (c >= a.n) return;
    for (int t = 0; t < keep; t++) {
        int row = s.n - keep + t;
        s.out[a.state + (size_t)t * a.n + c] = row >= 0 ? __ldcg(s.log + a.log + (size_t)row * a.n + c) : __ldcg(s.live + a.state + (size_t)(t + s.n) * a.n + c);
    }
}

/* grid (heads * blocks of 32 columns, sequences or more); logged: only the rows of the log, from the version before them on */
static __global__ void __launch_bounds__(FOLD_THREADS) k_delta(DeltaArgs a, FoldRows f, int logged) {
    __shared__ DeltaRow ring[WALK_RING];
    __shared__ FoldSeq s; /* looked at seldom: no registers for it */
    pdl_trigger();
    pdl_wait();
    if (blockIdx.y >= *f.n_seqs) return;
    if (!threadIdx.x) {
        const FoldSeq x = f.seqs[blockIdx.y];
        s = x;
        if (logged && x.mid) s = {x.mid, NULL, x.out, x.log, x.first + x.n - x.n_log, x.n_log, x.n_log};
    }
    __syncthreads();
    if (a.dk == DELTA_MAX_DK) DeltaWalk<true, 1, FOLD_THREADS>(a, s, ring, blockIdx.x, f.order).run();
    else DeltaWalk<false, 1, FOLD_THREADS>(a, s, ring, blockIdx.x, f.order).run();
}

enum { REPLAY_GROUP = 8 };

/* DELTA's state alone over the rows of a log, 32 columns of a head: no outputs, so half the registers and three times the blocks of k_delta on a
 * multiprocessor, which hide the way of a state to memory and back */
template <bool FULL> __device__ __forceinline__ void delta_replay(const DeltaArgs &a, const FoldSeq &s, DeltaRow (&rows)[REPLAY_GROUP], int item) {
    const int blocks = (a.dv + 31) / 32, i = threadIdx.x, head = item / blocks, block = item % blocks, cols = min(32, a.dv - block * 32);
    const int col = (i >> 5) * 8 + (i & 7), strand = (i & 31) >> 3, count = (a.dk - strand + 3) / 4, key = a.grouped ? head / (a.heads / a.kheads) : head % a.kheads;
    const size_t at = delta_place(a, head, strand, block * 32 + col), step = 4 * delta_width(a.dv, block * 32 + col);
    float S[DELTA_STRAND];
#pragma unroll
    for (int t = 0; t < DELTA_STRAND; t++) S[t] = col < cols && (FULL || t < count) ? __ldcg(s.live + at + t * step) : 0.0f;
#pragma unroll 1
    for (int r0 = 0; r0 < s.n; r0 += REPLAY_GROUP) {
        const int m = min((int)REPLAY_GROUP, s.n - r0);
        __syncthreads();
#pragma unroll 1
        for (int e = 0; e < m; e++) {
            const float *k = s.log + a.log + (size_t)(r0 + e) * a.log_width, *v = k + a.kheads * a.dk, *g = v + a.heads * a.dv;
            if (FULL || i < a.dk) cp4(&rows[e].k[i & 3][i >> 2], k + key * a.dk + i);
            if (i < cols) cp4(&rows[e].v[i], v + head * a.dv + block * 32 + i);
            if (i == 32) cp4(&rows[e].g, g + head);
            if (i == 64) cp4(&rows[e].b, g + a.heads + head);
        }
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (int e = 0; e < m; e++) {
            const DeltaRow &x = rows[e];
            float p = 0.0f;
#pragma unroll
            for (int t = 0; t < DELTA_STRAND; t++)
                if (FULL || t < count) { S[t] = S[t] * x.g; p = fmaf(S[t], x.k[strand][t], p); }
            p = p + __shfl_xor_sync(~0u, p, 16);
            p = p + __shfl_xor_sync(~0u, p, 8);
            const float d = x.b * (x.v[col] - p);
#pragma unroll
            for (int t = 0; t < DELTA_STRAND; t++)
                if (FULL || t < count) S[t] = fmaf(x.k[strand][t], d, S[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < DELTA_STRAND; t++)
        if (col < cols && (FULL || t < count)) s.out[at + t * step] = S[t];
}

/* the state after the first s.n rows of a log: grid (items of the widest op, ops) */
static __global__ void __launch_bounds__(FOLD_THREADS, 5) k_replay(const ReplayOp *ops, FoldSeq s) {
    __shared__ DeltaRow rows[REPLAY_GROUP];
    pdl_trigger();
    pdl_wait();
    const ReplayOp &o = ops[blockIdx.y];
    if (!o.delta) return conv_replay(o.conv, s, blockIdx.x * FOLD_THREADS + threadIdx.x);
    if (blockIdx.x >= o.d.heads * ((o.d.dv + 31) / 32)) return;
    if (o.d.dk == DELTA_MAX_DK) delta_replay<true>(o.d, s, rows, blockIdx.x);
    else delta_replay<false>(o.d, s, rows, blockIdx.x);
}

} // namespace bw
#endif
