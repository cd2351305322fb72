/* ATTEND (docs/numerics.md §6) of few rows over float keys. A warp takes a piece (64 keys of one KV head) for one or several queries and needs no other warp: scores,
 * exponentials and products with V stay in its registers and in a strip of shared memory of its own. (n, l, o) of each piece go to memory,
 * k_attend_merge folds them in order. Two ways to share out the work of a tile of up to 8 queries, chosen by its number of pieces:
 *   together: few pieces. A warp takes one query; all warps of a block read the same one or two pieces.
 *   apart:    many. A team of warps (one, where shared memory has a slot for each) walks pieces of its own, each warp with its share of the queries.
 * Owns the mapping of work; refuses to know sequences beyond a row's page table. */
#ifndef BW24_CU_OP_ATTEND_FEW_CUH
#define BW24_CU_OP_ATTEND_FEW_CUH

#include "attend_piece.cuh"

namespace bw {

/* Shapes and shared memory of a block: this, then as many slots as the card has room for. A lane has 4 columns of each pass over V. */
template <int K, int V, int D> struct alignas(16) FewBlock {
    static constexpr int FK = K, FV = V, DIM = D, QUERIES = 8, WARPS = 8, THREADS = WARPS * 32, CH = D < 128 ? D : 128, PASSES = D / CH;
    static constexpr int QUADS = CH / 4, HALVES = 32 / QUADS;                   /* heads of 64: half warps share the queries */
    static constexpr int KB = kv_bytes(K, D) / PIECE, FOUR = 4 * KB + 16;       /* bytes of a key; of four, with what keeps lanes off each other's banks */
    static constexpr int MOST = D > 128 && K == KV_F16 ? 4 : 8;                 /* queries of a warp */
    struct alignas(16) Slot {
        uint8_t k[PIECE / 4 * FOUR];
        uint8_t v[kv_bytes(V, D)];
    };
    float q[QUERIES][D + 4];
    float p[WARPS][PIECE * MOST];               /* weights of a warp, [key][query] */
    int row[QUERIES], head[QUERIES], lo[QUERIES], hi[QUERIES]; /* of each query: row of the step, head, visible keys (none: 0, 0) */
    int64_t at[QUERIES];                        /* where (n, l) of its piece 0 would lie */
    uint64_t full[WARPS][2];                    /* of a slot: its K, its V have come */
    __device__ __forceinline__ static int key_at(int j) { return (j >> 2) * FOUR + (j & 3) * KB; }
    __device__ __forceinline__ Slot &slot(int i) { return *(Slot *)((uint8_t *)this + sizeof(FewBlock) + i * sizeof(Slot)); }
};

/* the warp's number, which the compiler then knows to be the same in all lanes */
__device__ __forceinline__ int few_warp() { return __shfl_sync(~0u, (int)threadIdx.x >> 5, 0); }

/* the warps of a slot wait for each other */
__device__ __forceinline__ void team_sync(int slot, int team) {
    if (team == 1) __syncwarp();
    else asm volatile("bar.sync %0,%1;" ::"r"(slot + 1), "r"(team * 32) : "memory");
}

/* ---- loads, by one warp */
template <class S> __device__ __forceinline__ void few_keys(S &sh, int slot, const uint8_t *page, int lane) {
    typename S::Slot &to = sh.slot(slot);
    uint64_t *full = &sh.full[slot][0];
    if (!lane) bar_expect(full, kv_bytes(S::FK, S::DIM));
    __syncwarp();
    if (lane < PIECE / 4) bulk_copy(to.k + lane * S::FOUR, page + lane * 4 * S::KB, 4 * S::KB, full);
    bar_issued_by_warp(full);
}
template <class S> __device__ __forceinline__ void few_values(S &sh, int slot, const uint8_t *page, int lane) {
    if (lane) return;
    uint64_t *full = &sh.full[slot][1];
    bar_expect(full, kv_bytes(S::FV, S::DIM));
    bulk_copy(sh.slot(slot).v, page + kv_bytes(S::FK, S::DIM), kv_bytes(S::FV, S::DIM), full);
    bar_issued(full);
}

/* Keys from, from + 1, ... to - 1 of a page again, by `threads` threads: what the step itself wrote after the page was read. */
template <class S> __device__ __forceinline__ void few_fresh(S &sh, int slot, const uint8_t *page, int from, int to, int t, int threads) {
    constexpr int KW = S::KB / 4, VW = kv_bytes(S::FV, S::DIM) / PIECE / 4;
    typename S::Slot &sl = sh.slot(slot);
    const uint8_t *v = page + kv_bytes(S::FK, S::DIM);
#pragma unroll 4
    for (int i = t; i < (to - from) * (KW + VW); i += threads) {
        const int j = from + i / (KW + VW), w = i % (KW + VW), at = (j * VW + w - KW) * 4;
        uint8_t *dst = w < KW ? sl.k + S::key_at(j) + 4 * w : sl.v + at;
        *(uint32_t *)dst = __ldcg((const uint32_t *)(w < KW ? page + j * S::KB + 4 * w : v + at));
    }
}

template <class S> __device__ __forceinline__ void few_place(const AttendArgs &a, const StepRows &s, const AttendTile &t, S &sh) {
    __syncthreads(); /* the tile before is done */
    const int q = threadIdx.x;
    if (q < S::QUERIES) {
        const bool have = q / t.per < t.rows;
        const int row = have ? t.r0 + q / t.per : t.r0, end = (a.want ? s.want_pos[row] : s.pos[row]) + 1;
        sh.row[q] = row;
        sh.head[q] = t.h0 + q % t.per;
        sh.lo[q] = have && a.window && end > a.window ? end - a.window : 0;
        sh.hi[q] = have ? end : 0;
        sh.at[q] = ((int64_t)row * a.max_pieces - sh.lo[q] / PIECE) * a.heads + sh.head[q];
    }
    __syncthreads();
}

/* the queries; true where a value is not finite */
template <class S> __device__ __forceinline__ bool few_queries(const AttendArgs &a, S &sh, int queries) {
    constexpr int D = S::DIM;
    bool bad = false;
#pragma unroll
    for (int k = threadIdx.x; k < S::QUERIES * D / 4; k += S::THREADS) {
        const int q = k / (D / 4), w = k % (D / 4);
        if (q >= queries) break;
        const float4 v = __ldcg((const float4 *)(a.q + ((size_t)sh.row[q] * a.heads + sh.head[q]) * D) + w);
        bad |= not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
        *(float4 *)&sh.q[q][4 * w] = v;
    }
    return bad;
}

/* A lane's keys are few_key_of(lane) and that + 32: bits 0 1 2 3 4 of a lane's number are bits 2 3 4 0 1 of its key's, so that eight lanes side by side
 * read from eight groups of four keys. */
__device__ __forceinline__ int few_key_of(int lane) { return (lane & 7) << 2 | lane >> 3; }
/* tree32 over keys */
__device__ __forceinline__ float few_tree(float p) {
    p = p + __shfl_xor_sync(~0u, p, 4);
    p = p + __shfl_xor_sync(~0u, p, 2);
    p = p + __shfl_xor_sync(~0u, p, 1);
    p = p + __shfl_xor_sync(~0u, p, 16);
    return p + __shfl_xor_sync(~0u, p, 8);
}

/* ---- scores of 64 keys x QG queries from q0 on, times c: of the lane's two keys */
template <class S, int QG> __device__ __forceinline__ void few_scores(const S &sh, const typename S::Slot &sl, int q0, float c, int lane, float (&u)[2][QG]) {
    const uint8_t *k = sl.k + S::key_at(few_key_of(lane));
    static_assert(S::DIM <= 256, "one segment");
    float p[2][QG];
#pragma unroll
    for (int i = 0; i < 2 * QG; i++) (&p[0][0])[i] = 0.0f;
#pragma unroll(QG < 4 ? 4 : 2)
    for (int d = 0; d < S::DIM; d += 8) {
        float w[2][8];
#pragma unroll
        for (int e = 0; e < 2; e++) floats8<S::FK>(k + e * 8 * S::FOUR + d * (S::KB / S::DIM), w[e]);
#pragma unroll
        for (int q = 0; q < QG; q++) {
            float x[8];
            get_columns<4>(&sh.q[q0 + q][d], x);
            get_columns<4>(&sh.q[q0 + q][d + 4], x + 4);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) p[e][q] = fmaf(w[e][i], x[i], p[e][q]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * QG; i++) (&u[0][0])[i] = (0.0f + (&p[0][0])[i]) * c;
}
/* ---- softmax: p of the keys in place of the scores, +0 where a key is not seen; n and l of each query */
template <class S, int QG> __device__ __forceinline__ bool few_softmax(const S &sh, int b, int q0, int lane, float (&u)[2][QG], float (&n)[QG], float (&l)[QG]) {
    const int key = few_key_of(lane);
    uint32_t worst = 0;
#pragma unroll
    for (int i = 0; i < QG; i++) { /* masks, not branches: the queries' chains of shuffles and exponentials overlap */
        const int j0 = sh.lo[q0 + i] - b * PIECE, j1 = sh.hi[q0 + i] - b * PIECE;
        const uint32_t in0 = key >= j0 && key < j1 ? ~0u : 0, in1 = key + 32 >= j0 && key + 32 < j1 ? ~0u : 0;
        worst = max(worst, max(magnitude(u[0][i]) & in0, magnitude(u[1][i]) & in1));
        n[i] = ceilf(warp_max(fmaxf(in0 ? u[0][i] : -INFINITY, in1 ? u[1][i] : -INFINITY)));
        u[0][i] = keep(bw_exp2(keep(u[0][i] - n[i], in0)), in0);
        u[1][i] = keep(bw_exp2(keep(u[1][i] - n[i], in1)), in1);
        l[i] = few_tree(u[0][i] + u[1][i]);
    }
    return worst >= 0x7f800000u;
}

/* ---- o of the warp's queries */
template <class S, int QV, int QG> __device__ __forceinline__ void few_key(const typename S::Slot &sl, const float *p, int pass, int quad, int j, float (&o)[QV][4]) {
    float x[QV], v[4];
#pragma unroll
    for (int q = 0; q < QV; q += 4) get_columns<(QV < 4 ? QV : 4)>(p + j * QG + q, x + q);
    float_columns<S::FV, S::DIM, 4>(sl.v, j, pass * S::CH + 4 * quad, v);
#pragma unroll
    for (int q = 0; q < QV; q++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[q][e] = fmaf(x[q], v[e], o[q][e]);
}
/* Queries of one row see the same keys [j0, j1). Else each is told for each key: the +0 of a key that it does not see would lose a -0. */
template <class S, int QV, int QG>
__device__ __forceinline__ void few_keys_same(const typename S::Slot &sl, const float *p, int pass, int quad, int j0, int j1, float (&o)[QV][4]) {
    int j = j0;
#pragma unroll 1
    for (; j + 8 <= j1; j += 8) {
#pragma unroll
        for (int k = 0; k < 8; k++) few_key<S, QV, QG>(sl, p, pass, quad, j + k, o);
    }
#pragma unroll 1
    for (; j < j1; j++) few_key<S, QV, QG>(sl, p, pass, quad, j, o);
}
template <class S, int QV, int QG>
__device__ __forceinline__ void few_keys_edge(const S &sh, const typename S::Slot &sl, const float *p, int b, int q0, int pass, int quad, int j0, int j1, float (&o)[QV][4]) {
#pragma unroll 1
    for (int j = j0; j < j1; j++) {
        float v[4];
        float_columns<S::FV, S::DIM, 4>(sl.v, j, pass * S::CH + 4 * quad, v);
#pragma unroll
        for (int q = 0; q < QV; q++) {
            const bool in = b * PIECE + j >= sh.lo[q0 + q] && b * PIECE + j < sh.hi[q0 + q];
#pragma unroll
            for (int e = 0; e < 4; e++) { const float x = fmaf(p[j * QG + q], v[e], o[q][e]); o[q][e] = in ? x : o[q][e]; }
        }
    }
}

/* What a block knows of a tile: pages, pieces b0 .. b1 of which it has first, first + step, ...; w0 .. w1 - 1 are seen whole by all queries; first key that the step may write */
struct FewTile { uint8_t *const *pages; size_t head; int b0, b1, w0, w1, first, step, queries, fresh; };

/* what the queries of a warp see of piece b: keys from the first to the last that any sees, and whether all see the same */
struct FewSpan { int from, to; bool same; };
template <class S> __device__ __forceinline__ FewSpan few_span(const S &sh, const FewTile &t, int b, int q0, int n) {
    FewSpan r = {PIECE, 0, true};
    if (b >= t.w0 && b < t.w1) { r.from = 0; r.to = PIECE; return r; }
    int from = 0, to = 0;
    for (int i = 0; i < n; i++) {
        const int j0 = max(0, sh.lo[q0 + i] - b * PIECE), j1 = min((int)PIECE, sh.hi[q0 + i] - b * PIECE);
        if (i && (j0 != from || j1 != to)) r.same = false;
        from = j0; to = j1;
        if (j0 < j1) { r.from = min(r.from, j0); r.to = max(r.to, j1); }
    }
    return r;
}

/* the products with V of some passes and their results to memory */
template <class S, int QG>
__device__ __forceinline__ void few_products(const AttendArgs &a, const S &sh, const FewTile &t, const typename S::Slot &sl, const float *p, int b, int q0,
                                             int n, int pass0, int pass1, int lane) {
    constexpr int QV = QG >= S::HALVES ? QG / S::HALVES : 1;
    const FewSpan span = few_span(sh, t, b, q0, n);
    const int quad = lane % S::QUADS, v0 = QG >= S::HALVES ? lane / S::QUADS * QV : 0;
#pragma unroll 1
    for (int pass = pass0; pass < pass1; pass++) {
        float o[QV][4];
#pragma unroll
        for (int i = 0; i < QV * 4; i++) (&o[0][0])[i] = 0.0f;
        if (span.same) few_keys_same<S, QV, QG>(sl, p + v0, pass, quad, span.from, span.to, o);
        else few_keys_edge<S, QV, QG>(sh, sl, p + v0, b, q0 + v0, pass, quad, span.from, span.to, o);
#pragma unroll
        for (int q = 0; q < QV; q++) {
            if (v0 + q >= n || max(0, sh.lo[q0 + v0 + q] - b * PIECE) >= min((int)PIECE, sh.hi[q0 + v0 + q] - b * PIECE)) continue;
            put_columns<4>(a.o + (sh.at[q0 + v0 + q] + (int64_t)b * a.heads) * S::DIM + pass * S::CH + 4 * quad, o[q]);
        }
    }
}

/* scores and exponentials of piece b for queries q0 .. q0 + QG - 1, n of which are there, into the warp's strip; (n, l) to memory */
template <class S, int QG> __device__ __forceinline__ bool few_weights(const AttendArgs &a, S &sh, const typename S::Slot &sl, int warp, int b, int q0, int n, int lane) {
    float u[2][QG], m[QG], l[QG];
    float *p = sh.p[warp];
    few_scores<S, QG>(sh, sl, q0, a.c, lane, u);
    const bool bad = few_softmax<S, QG>(sh, b, q0, lane, u, m, l);
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int q = 0; q < QG; q += 4) put_columns<(QG < 4 ? QG : 4)>(p + (few_key_of(lane) + 32 * e) * QG + q, u[e] + q);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < QG; i++)
        if (lane == i && i < n && max(0, sh.lo[q0 + i] - b * PIECE) < min((int)PIECE, sh.hi[q0 + i] - b * PIECE))
            a.nl[sh.at[q0 + i] + (int64_t)b * a.heads] = make_float2(m[i], l[i]);
    return bad;
}

/* the keys of piece b from this one on may be written by the step: in pages read before the dependency wait they are read again */
__device__ __forceinline__ int few_fresh_from(const FewTile &t, int b) { return max(0, t.fresh - b * PIECE); }

/* one or two pieces by all warps, a warp a query */
template <class S> __device__ __forceinline__ bool few_together(const AttendArgs &a, S &sh, const FewTile &t, int count, bool &waited, uint32_t phases) {
    const int lane = threadIdx.x & 31, warp = few_warp(), b = t.b0 + t.first + warp * t.step;
    if (warp < count) {
        few_keys(sh, warp, t.pages[b] + t.head, lane);
        few_values(sh, warp, t.pages[b] + t.head, lane);
    }
    const bool early = !waited;
    if (!waited) { pdl_wait(); waited = true; }
    bool bad = few_queries(a, sh, t.queries);
    if (early)
        for (int i = 0; i < count; i++) {
            const int c = t.b0 + t.first + i * t.step, from = few_fresh_from(t, c);
            if (from >= PIECE) continue;
            bar_wait(&sh.full[i][0], phases >> i & 1);
            bar_wait(&sh.full[i][1], phases >> i & 1);
            few_fresh(sh, i, t.pages[c] + t.head, from, min((int)PIECE, sh.hi[t.queries - 1] - c * PIECE), threadIdx.x, S::THREADS);
        }
    __syncthreads();
    const int work = count * t.queries, parts = S::PASSES > 1 && 2 * work <= S::WARPS ? 2 : 1, each = S::PASSES / parts; /* idle warps take half of the columns */
    for (int k = warp; k < work * parts; k += S::WARPS) {
        const int part = k / work, q = k % t.queries, i = k / t.queries - part * count, c = t.b0 + t.first + i * t.step;
        bar_wait(&sh.full[i][0], phases >> i & 1);
        bad |= few_weights<S, 1>(a, sh, sh.slot(i), warp, c, q, 1, lane);
        bar_wait(&sh.full[i][1], phases >> i & 1);
        few_products<S, 1>(a, sh, t, sh.slot(i), sh.p[warp], c, q, 1, part * each, part * each + each, lane);
        __syncwarp();
    }
    return bad;
}

/* pieces b, b + step, ... of a slot by its team; queries q0 .. of this warp */
template <class S, int QG> __device__ __forceinline__ bool few_walk(const AttendArgs &a, S &sh, const FewTile &t, int slot, int team, int b, int step, uint32_t phase) {
    const int lane = threadIdx.x & 31, warp = few_warp(), member = warp % team, q0 = member * QG, n = min(QG, t.queries - q0);
    bool bad = false;
#pragma unroll 1
    for (; b <= t.b1; b += step, phase ^= 1) {
        const uint8_t *next = b + step <= t.b1 ? t.pages[b + step] + t.head : nullptr;
        bar_wait(&sh.full[slot][0], phase);
        if (n > 0) bad |= few_weights<S, QG>(a, sh, sh.slot(slot), warp, b, q0, n, lane);
        team_sync(slot, team); /* K is free */
        if (next && !member) few_keys(sh, slot, next, lane);
        bar_wait(&sh.full[slot][1], phase);
        if (n > 0) few_products<S, QG>(a, sh, t, sh.slot(slot), sh.p[warp], b, q0, n, 0, S::PASSES, lane);
        team_sync(slot, team); /* V is free, and the warp's strip */
        if (next && !member) few_values(sh, slot, next, lane);
    }
    return bad;
}

/* many pieces: a team of warps a slot */
template <class S> __device__ __forceinline__ bool few_apart(const AttendArgs &a, S &sh, const FewTile &t, int used, int team, bool &waited, uint32_t phases) {
    const int lane = threadIdx.x & 31, warp = few_warp(), slot = warp / team, b = t.b0 + t.first + slot * t.step;
    const bool mine = slot < used && b <= t.b1;
    if (mine && warp % team == 0) {
        few_keys(sh, slot, t.pages[b] + t.head, lane);
        few_values(sh, slot, t.pages[b] + t.head, lane);
    }
    const bool early = !waited;
    if (!waited) { pdl_wait(); waited = true; }
    bool bad = few_queries(a, sh, t.queries);
    if (early && mine && few_fresh_from(t, b) < PIECE) {
        bar_wait(&sh.full[slot][0], phases >> slot & 1);
        bar_wait(&sh.full[slot][1], phases >> slot & 1);
        few_fresh(sh, slot, t.pages[b] + t.head, few_fresh_from(t, b), min((int)PIECE, sh.hi[t.queries - 1] - b * PIECE), threadIdx.x - slot * team * 32, team * 32);
    }
    __syncthreads();
    if (!mine) return bad;
    const int each = (t.queries + team - 1) / team, step = t.step * used;
    const uint32_t phase = phases >> slot & 1;
    if constexpr (S::MOST >= 8) if (each > 4) return bad | few_walk<S, 8>(a, sh, t, slot, team, b, step, phase);
    if constexpr (S::MOST >= 4) if (each > 2) return bad | few_walk<S, 4>(a, sh, t, slot, team, b, step, phase);
    if constexpr (S::MOST >= 2) if (each > 1) return bad | few_walk<S, 2>(a, sh, t, slot, team, b, step, phase);
    return bad | few_walk<S, 1>(a, sh, t, slot, team, b, step, phase);
}

/* x: blocks that share the pieces of a tile, y: KV heads, z: tiles. A tile has `per` heads (all that share the KV head, in chunks of at most 8) of
 * 8 / per rows. used: slots, each with `team` warps. */
template <class S> __global__ void __launch_bounds__(S::THREADS, 1) k_attend_few(AttendArgs a, StepRows s, int chunks, int used, int team) {
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int share = a.heads / a.kv.heads, per = share / chunks, rows = S::QUERIES / per, n = gridDim.x, x = blockIdx.x;
    const int chunk = blockIdx.z % chunks, end = min(a.rows, ((int)blockIdx.z / chunks + 1) * rows);
    bool waited = false, bad = false; /* positions and page tables do not come from an earlier kernel */
    uint32_t phases = 0;
    int before = 0;
    pdl_trigger();
    if (threadIdx.x < 2 * S::WARPS) bar_init(&sh.full[0][0] + threadIdx.x, 1);
    bar_fence();
    for (int r = blockIdx.z / chunks * rows; r < end;) {
        const AttendTile tile = {r, same_table(a, s, r, end - r), (int)blockIdx.y * share + chunk * per, per};
        few_place(a, s, tile, sh);
        const int queries = tile.rows * per, b0 = sh.lo[0] / PIECE, b1 = (sh.hi[queries - 1] - 1) / PIECE; /* the first row sees the earliest, the last the latest key */
        const int first = (x + n - before % n) % n, row = a.want ? s.want_row[r] : r, pieces = b1 - b0 + 1, count = (pieces - first + n - 1) / n; /* of this block */
        const FewTile t = {attend_row(a, s, r).pages, kv_head_bytes(a.kv) * (size_t)blockIdx.y + a.kv.offset, b0, b1,
                           (sh.lo[queries - 1] + PIECE - 1) / PIECE, sh.hi[0] / PIECE, first, n, queries, s.pos[row] - row};
        before += pieces;
        r += tile.rows;
        if (count <= 0) continue;
        if (pieces <= n * min(2, used)) { /* the same for all blocks */
            bad |= few_together(a, sh, t, count, waited, phases);
            phases ^= (1u << count) - 1;
        } else {
            bad |= few_apart(a, sh, t, used, team, waited, phases);
            for (int i = 0; i < used; i++) phases ^= (uint32_t)(((count - i + used - 1) / used) & 1) << i;
        }
    }
    if (bad) report_fault(s.fault, a.op);
    if (!waited) pdl_wait();
}

} // namespace bw
#endif
