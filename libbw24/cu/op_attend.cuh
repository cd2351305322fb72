/* ATTEND (docs/numerics.md §6) for the formats and head sizes that models use. A block takes a piece (64 keys of one KV head, one contiguous
 * part of a page) for a tile of NQ queries that read that head, so that a page is read and decoded once for all of them.
 *   SPLIT: few rows. The pieces of a tile are shared out among blocks; (n, l, o) of each goes to memory, k_attend_merge folds them in order.
 *   else:  many rows where op_attend_many.cuh does not take them (keys in q8_0, heads of 512). A block walks the pieces of its tile in order; the running
 *          O stays in registers, N and L in shared memory.
 * Owns the mapping of work; refuses to know sequences beyond a row's page table. */
#ifndef BW24_CU_OP_ATTEND_CUH
#define BW24_CU_OP_ATTEND_CUH

#include "attend_piece.cuh"

namespace bw {

/* a piece's results to memory: this thread's share of o, (n, l) by the first threads */
template <class S> __device__ __forceinline__ void split_store(const AttendArgs &a, const S &sh, int b, int pass, const float (&o)[S::QT][S::CT]) {
    const int q0 = S::first_query(), d = pass * S::CH + S::first_column();
#pragma unroll
    for (int q = 0; q < S::QT; q++) {
        if (sh.from[q0 + q] >= sh.to[q0 + q]) continue;
        put_columns<S::CT>(a.o + (sh.at[q0 + q] + (int64_t)b * a.heads) * S::DIM + d, o[q]);
    }
    if (pass || threadIdx.x >= S::QUERIES) return;
    int q = threadIdx.x;
    if (sh.from[q] < sh.to[q]) a.nl[sh.at[q] + (int64_t)b * a.heads] = make_float2(sh.n[q], sh.l[q]);
}

/* O of docs/numerics.md §6: the first piece that a query sees is taken as it is */
template <class S> __device__ __forceinline__ void loop_merge(const S &sh, const float (&o)[S::QT][S::CT], float (&O)[S::QT][S::CT]) {
    const int q0 = S::first_query();
#pragma unroll
    for (int q = 0; q < S::QT; q++) {
        float2 k = sh.factor[q0 + q];
        if (k.x == UNSEEN) continue;
#pragma unroll
        for (int e = 0; e < S::CT; e++) O[q][e] = k.x == FRESH ? o[q][e] : fmaf(o[q][e], k.y, O[q][e] * k.x);
    }
}
template <class S> __device__ __forceinline__ bool loop_store(const AttendArgs &a, const S &sh, const float (&O)[S::PASSES][S::QT][S::CT]) {
    const int q0 = S::first_query();
    bool bad = false;
#pragma unroll
    for (int q = 0; q < S::QT; q++) {
        if (!sh.hi[q0 + q]) continue;
        float inv = 1.0f / sh.L[q0 + q];
#pragma unroll
        for (int p = 0; p < S::PASSES; p++) {
            float y[S::CT];
#pragma unroll
            for (int e = 0; e < S::CT; e++) { y[e] = O[p][q][e] * inv; bad |= not_finite(y[e]); }
            put_columns<S::CT>(a.y + ((size_t)sh.row[q0 + q] * a.heads + sh.head[q0 + q]) * S::DIM + p * S::CH + S::first_column(), y);
        }
    }
    return bad;
}

/* o of this thread's queries and columns, then where it goes */
template <class S> __device__ __forceinline__ void values_pass(const AttendArgs &a, S &sh, int b, int pass, int queries, float (&O)[S::PASSES][S::QT][S::CT]) {
    float o[S::QT][S::CT];
#pragma unroll
    for (int i = 0; i < S::QT * S::CT; i++) (&o[0][0])[i] = 0.0f;
    const int q0 = S::first_query();
    if (q0 < queries) {
        const int from = sh.from[q0], to = sh.to[q0];
        bool same = true;
#pragma unroll
        for (int q = 1; q < S::QT; q++) same &= q0 + q >= queries || (sh.from[q0 + q] == from && sh.to[q0 + q] == to);
        if (!same) values_edge(sh, pass, o);
        else if (S::SPLIT && S::QT == 8 && queries <= 4) {
            if (to - from == PIECE) values_same<S, 4, true>(sh, pass, from, to, o);
            else values_same<S, 4, false>(sh, pass, from, to, o);
        } else if (to - from == PIECE) values_same<S, S::QT, true>(sh, pass, from, to, o);
        else values_same<S, S::QT, false>(sh, pass, from, to, o);
        if (!S::SPLIT) loop_merge(sh, o, O[pass]);
    }
    if (S::SPLIT) split_store(a, sh, b, pass, o);
}

/* pieces first, first + step, ... of the tile. The next piece's K arrives while V is worked on, its V (formats that are decoded first) while
 * the products are made. */
template <class S> __device__ __forceinline__ void attend_tile(const AttendArgs &a, const StepRows &s, const AttendTile &t, int kvh, int first, int step, S &sh,
                                                                                                             bool &waited, int &phase) {
    place_queries(a, s, t, sh);
    const int b1 = (sh.hi[(t.rows - 1) * t.per] - 1) / PIECE, b0 = sh.lo[0] / PIECE + first; /* the first row sees the earliest, the last the latest key */
    if (b0 > b1) return; /* too few pieces for this block */
    const int queries = t.rows * t.per;
    uint8_t *const *pages = attend_row(a, s, t.r0).pages;
    const size_t head = kv_head_bytes(a.kv) * (size_t)kvh + a.kv.offset;
    if (!waited && !before_step(a, s, t.r0, b0)) { pdl_wait(); waited = true; }
    load_keys(sh, pages[b0] + head);
    load_values(sh, a.kv.v, pages[b0] + head);
    if (!waited) { pdl_wait(); waited = true; }
    bool bad = load_queries(a, sh);
    __syncthreads();
    float O[S::PASSES][S::QT][S::CT];
    for (int b = b0;; b += step) {
        const uint8_t *next = b + step <= b1 ? pages[b + step] + head : nullptr;
        bar_wait(&sh.full[0], phase);
        if constexpr (S::INT_K) scores_int8(sh, queries, a.c);
        else scores_float(sh, queries, a.c);
        __syncthreads(); /* scores are complete, K is free */
        if (next) load_keys(sh, next);
        softmax_piece(sh, b, queries, &bad);
        bar_wait(&sh.full[1], phase);
        phase ^= 1;
#pragma unroll
        for (int pass = 0; pass < S::PASSES; pass++) {
            if (S::DECODED_V) {
                if (pass) __syncthreads();
                decode_values(sh, a.kv.v, pass);
            }
            if (S::DECODED_V || !pass) __syncthreads(); /* p and the decoded V are complete */
            if (S::DECODED_V && pass == S::PASSES - 1 && next) load_values(sh, a.kv.v, next);
            values_pass(a, sh, b, pass, queries, O);
        }
        if (!next) break;
        __syncthreads(); /* p and, where it was read as it is, V are free */
        if (!S::DECODED_V) load_values(sh, a.kv.v, next);
    }
    if (!S::SPLIT) bad |= loop_store(a, sh, O);
    if (bad) report_fault(s.fault, a.op);
}

/* SPLIT: x: blocks that share the pieces of a tile, y: KV heads, z: tiles. else: x: KV heads, y: tiles, the last ones (most keys) first.
 * A tile has `per` heads (all that share the KV head, in chunks of at most NQ) of NQ / per rows. */
template <class S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS) k_attend(AttendArgs a, StepRows s, int chunks, int tiles) {
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int share = a.heads / a.kv.heads, per = share / chunks, rows = S::QUERIES / per;
    bool waited = false; /* positions and page tables do not come from an earlier kernel, nor do pages that the step does not write */
    int phase = 0, before = 0;
    pdl_trigger();
    if (threadIdx.x < 2) bar_init(&sh.full[threadIdx.x], 1);
    bar_fence();
    const int tile = S::SPLIT ? (int)blockIdx.z : tiles - 1 - (int)blockIdx.y, kvh = S::SPLIT ? blockIdx.y : blockIdx.x;
    const int chunk = tile % chunks, end = min(a.rows, (tile / chunks + 1) * rows);
    for (int r = tile / chunks * rows; r < end;) {
        AttendTile t = {r, same_table(a, s, r, end - r), kvh * share + chunk * per, per};
        int first = 0;
        if (S::SPLIT) { /* the pieces of all rows of the tile go round the blocks, so that many short sequences keep them all at work */
            const int n = gridDim.x, x = blockIdx.x;
            first = (x + n - before % n) % n;
            before += (attend_row(a, s, r + t.rows - 1).hi - 1) / PIECE - attend_row(a, s, r).lo / PIECE + 1;
        }
        attend_tile(a, s, t, kvh, first, S::SPLIT ? (int)gridDim.x : 1, sh, waited, phase);
        r += t.rows;
    }
    if (!waited) pdl_wait();
}

} // namespace bw
#endif
