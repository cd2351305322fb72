/* ATTEND (docs/numerics.md §6) of many rows over float keys, heads of 64, 128 and 256. A block walks the pieces of a tile of 64 queries in order. K,
 * then V, comes as the cache holds it, at most 128 columns at a time, and is widened to f32 once, so that products read nothing but floats.
 *   Scores: a warp has 16 queries and all 64 keys, a thread 8 queries and 4 keys; they stay in registers until they are exponentials.
 *   Products with V: a warp has 32 queries and half of the columns, a thread 8 queries; O of all pieces stays in registers.
 * Two blocks a multiprocessor, one of which works while the other waits. Refuses to know sequences beyond a row's page table. */
#ifndef BW24_CU_OP_ATTEND_MANY_CUH
#define BW24_CU_OP_ATTEND_MANY_CUH

#include "attend_piece.cuh"
#include "early.cuh"

namespace bw {

template <int F, int D> struct alignas(16) ManyBlock {
    static constexpr int FORMAT = F, DIM = D, CH = D < 128 ? D : 128, PASSES = D / CH, QUERIES = PIECE, THREADS = 128, BLOCKS = SMALL_CARD ? 1 : 2;
    static constexpr int QT = 8, KT = 4, CT = CH / 16; /* of a thread: queries, keys, columns */
    static constexpr int PART = kv_bytes(F, D), PART_ROW = PART / PIECE, ROW = PART_ROW / PASSES;
    static constexpr int Q_LINE = 4 * CH + 4, PITCH = CH + 4; /* lanes that read two lines of q, or eight keys, have no bank conflict */
    /* weights of a key for all queries; beside them what belongs to the query of the same number: row and head, factors of the merge, end of its keys */
    struct Line { float p[QUERIES]; float2 factor; int at, hi; };
    float q[QUERIES / 4][Q_LINE]; /* columns in hand of four queries a line */
    float wide[PIECE][PITCH];     /* columns in hand of K or V */
    Line line[PIECE];
    alignas(16) uint8_t raw[PIECE * ROW]; /* the next ones, as the cache holds them */
};

/* Lanes of a warp. Bit 0 (scores) or bits 0 and 4 (V) are the thread's queries, the others its keys or columns: of two neighbours, and of two lanes
 * that differ in bit 1, one pair reads the same queries and one the same keys, which is what 16-byte reads of shared memory can join. */
__device__ __forceinline__ int many_score_query(int t) { return (t >> 5) * 16 + (t & 1) * 4; }              /* and the three behind it; these + 8 */
__device__ __forceinline__ int many_value_query(int t) { return (t >> 6) * 32 + (t & 1) * 4 + (t & 16) / 2; } /* the same; these + 16 */
__device__ __forceinline__ int many_key(int t) { return t >> 1 & 15; }                                       /* + 16, 32, 48 */
template <class S> __device__ __forceinline__ int many_column(int t) { return (t >> 5 & 1) * (S::CH / 2) + (t >> 1 & 7) * 4; } /* + 32 */

/* ---- loads: 16 bytes a thread and turn; a thread widens what it has fetched itself. Held: places are made anew for each piece, as no register is left
 * to keep them in. */
__device__ __forceinline__ void many_issued() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* all but the newest LATER */
template <int LATER> __device__ __forceinline__ void many_arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
template <class S> __device__ __forceinline__ void many_fetch(S &sh, const uint8_t *part, int pass) {
    constexpr int CHUNKS = S::ROW / 16, KEYS = S::THREADS / CHUNKS;
    const int t = held((int)threadIdx.x), j0 = t / CHUNKS, c = t % CHUNKS * 16;
#pragma unroll
    for (int j = 0; j < PIECE; j += KEYS) cp16(sh.raw + (j0 + j) * S::ROW + c, part + (j0 + j) * S::PART_ROW + pass * S::ROW + c);
    many_issued();
}
template <class S> __device__ __forceinline__ void many_widen(S &sh) {
    constexpr int CHUNKS = S::ROW / 16, KEYS = S::THREADS / CHUNKS, VALUES = S::CH / CHUNKS;
    const int t = held((int)threadIdx.x), j0 = t / CHUNKS, c = t % CHUNKS;
#pragma unroll
    for (int j = 0; j < PIECE; j += KEYS)
#pragma unroll
        for (int i = 0; i < VALUES; i += 8) {
            float x[8];
            floats8<S::FORMAT>(sh.raw + (j0 + j) * S::ROW + c * 16 + i, x);
            put_columns<4>(&sh.wide[j0 + j][c * VALUES + i], x);
            put_columns<4>(&sh.wide[j0 + j][c * VALUES + i + 4], x + 4);
        }
}
/* queries that are not there are those of the last row once more; a value that is not finite shows in its scores */
template <class S> __device__ __forceinline__ void many_place(const AttendArgs &a, const StepRows &s, const AttendTile &t, S &sh) {
    if (threadIdx.x >= S::QUERIES) return;
    const int row = t.r0 + min((int)threadIdx.x / t.per, t.rows - 1);
    sh.line[threadIdx.x].at = row * a.heads + t.h0 + threadIdx.x % t.per;
    sh.line[threadIdx.x].hi = (a.want ? s.want_pos[row] : s.pos[row]) + 1;
}
template <class S> __device__ __forceinline__ void many_queries(const AttendArgs &a, S &sh, int pass) {
    constexpr int QUADS = S::CH / 4, ROWS = S::THREADS / QUADS;
    const int t = held((int)threadIdx.x), q0 = t / QUADS, c = t % QUADS * 4;
#pragma unroll
    for (int q = 0; q < S::QUERIES; q += ROWS)
        cp16(&sh.q[(q + q0) / 4][(q + q0) % 4 * S::CH + c], a.q + (size_t)sh.line[q + q0].at * S::DIM + pass * S::CH + c);
    many_issued();
}
/* keys [x, y) of piece b that a query sees whose keys end at hi */
__device__ __forceinline__ int2 many_sight(const AttendArgs &a, int hi, int b) {
    const int lo = a.window && hi > a.window ? hi - a.window : 0;
    return make_int2(max(0, min((int)PIECE, lo - b * PIECE)), max(0, min((int)PIECE, hi - b * PIECE)));
}

/* ---- products
 * A multiprocessor's registers give two operands a cycle and scheduler, and one that the product before read as well is not read again: products go to and
 * fro over the keys or columns, so that each shares one with the one before. What waits is this (stalls of the dispatcher), not shared memory. */
/* ---- scores: fma over columns ascending */
template <class S> __device__ __forceinline__ void many_key_columns(const float *k, float (&w)[S::KT][4]) {
#pragma unroll
    for (int e = 0; e < S::KT; e++) get_columns<4>(k + 16 * e * S::PITCH, w[e]);
}
template <class S> __device__ __forceinline__ void many_query_columns(const float *q, float (&x)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) get_columns<4>(q + i * S::CH, x[i]);
}
template <class S> __device__ __forceinline__ void many_dot(const float (&w)[S::KT][4], const float (&x)[4][4], float (*p)[S::KT]) {
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int k = 0; k < S::KT; k++) {
                const int e = (c ^ i) & 1 ? S::KT - 1 - k : k;
                p[i][e] = fmaf(w[e][c], x[i][c], p[i][e]);
            }
}
/* half of the queries is read while the other half is multiplied, and four columns of the keys while the four before are */
template <class S> __device__ __forceinline__ void many_scores(const S &sh, float (&p)[S::QT][S::KT]) {
    const int t = held((int)threadIdx.x);
    const float *k = sh.wide[many_key(t)], *q = sh.q[many_score_query(t) / 4];
    float w[2][S::KT][4], x[2][4][4];
    many_key_columns<S>(k, w[0]);
    many_query_columns<S>(q, x[0]);
#pragma unroll 1
    for (int d = 0; d < S::CH; d += 8, k += 8, q += 8) {
        many_query_columns<S>(q + 2 * S::Q_LINE, x[1]);
        many_dot<S>(w[0], x[0], p);
        many_key_columns<S>(k + 4, w[1]);
        many_query_columns<S>(q + 4, x[0]);
        many_dot<S>(w[0], x[1], p + 4);
        many_query_columns<S>(q + 2 * S::Q_LINE + 4, x[1]);
        many_dot<S>(w[1], x[0], p);
        if (d + 8 < S::CH) {
            many_key_columns<S>(k + 8, w[0]);
            many_query_columns<S>(q + 8, x[0]);
        }
        many_dot<S>(w[1], x[1], p + 4);
    }
}

/* ---- softmax, in registers */
/* bw_exp2 of x <= 0: adding 1.5 * 2^23 rounds as rint does and leaves n in the low bits, and p * 2^n is a normal number. -inf gives +0. */
__device__ __forceinline__ float exp2_below(float x) {
    const float z = fmaxf(x, -125.0f), t = z + 12582912.0f, f = z - (t - 12582912.0f);
    float p = 0.00015453163f;
    p = fmaf(p, f, 0.0013390863f);
    p = fmaf(p, f, 0.009618083f);
    p = fmaf(p, f, 0.05550357f);
    p = fmaf(p, f, 0.24022651f);
    p = fmaf(p, f, 0.6931472f);
    p = fmaf(p, f, 1.0f);
    const float y = __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
    return x < -125.0f ? 0.0f : y;
}

/* op over the 16 lanes of the same bit 0, of 8 queries: the lane gets that of query lane / 4. The order is tree32's from its second level on. */
template <class F> __device__ __forceinline__ float across_lanes(const float (&v)[8], int lane, F op) {
    float a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = op(lane & 16 ? v[i + 4] : v[i], __shfl_xor_sync(~0u, lane & 16 ? v[i] : v[i + 4], 16));
#pragma unroll
    for (int i = 0; i < 2; i++) b[i] = op(lane & 8 ? a[i + 2] : a[i], __shfl_xor_sync(~0u, lane & 8 ? a[i] : a[i + 2], 8));
    const float c = op(lane & 4 ? b[1] : b[0], __shfl_xor_sync(~0u, lane & 4 ? b[0] : b[1], 4));
    return op(c, __shfl_xor_sync(~0u, c, 2));
}

/* the merge so far of query lane / 4 of the thread's eight */
struct ManyMerge { float N, L; };

/* Factors of O and o. The first piece is taken as it is since O begins as -0; a piece of which nothing is seen adds +0 times -1. */
template <class S> __device__ __forceinline__ void many_merge(typename S::Line &own, float n, float l, bool any, ManyMerge &m) {
    const float M = fmaxf(m.N, n), f = m.N == -INFINITY ? 1.0f : pow2_factor(m.N - M), g = pow2_factor(n - M);
    own.factor = any ? make_float2(f, g) : make_float2(1.0f, -1.0f);
    if (!any) return;
    m.L = fmaf(l, g, m.L * f);
    m.N = M;
}

/* exponentials in place of the scores p, and to memory. EDGE: some query does not see all of the piece; its weights of what it does not see are +0. */
template <class S, bool EDGE> __device__ __forceinline__ bool many_softmax(const AttendArgs &a, S &sh, int b, float (&p)[S::QT][S::KT], ManyMerge &merge) {
    const int t = held((int)threadIdx.x), q0 = many_score_query(t), key = many_key(t), lane = t & 31;
    float v[S::QT], wrong = 0.0f;
#pragma unroll
    for (int i = 0; i < S::QT; i++) {
        const int2 keys = EDGE ? many_sight(a, sh.line[q0 + i / 4 * 8 + i % 4].hi, b) : make_int2(0, PIECE);
#pragma unroll
        for (int e = 0; e < S::KT; e++) {
            const bool in = !EDGE || (key + 16 * e >= keys.x && key + 16 * e < keys.y);
            p[i][e] = p[i][e] * a.c;
            wrong = fmaf(in ? p[i][e] : 0.0f, 0.0f, wrong); /* NaN once a value is not finite */
            p[i][e] = in ? p[i][e] : -INFINITY;
        }
        v[i] = fmaxf(fmaxf(p[i][0], p[i][1]), fmaxf(p[i][2], p[i][3]));
    }
    const float n = ceilf(across_lanes(v, lane, [](float x, float y) { return fmaxf(x, y); }));
#pragma unroll
    for (int i = 0; i < S::QT; i++) {
        const float top = __shfl_sync(~0u, n, 4 * i + (lane & 3));
#pragma unroll
        for (int e = 0; e < S::KT; e++) p[i][e] = exp2_below(p[i][e] - top);
        v[i] = (p[i][0] + p[i][2]) + (p[i][1] + p[i][3]);
    }
#pragma unroll
    for (int e = 0; e < S::KT; e++) {
        float w[S::QT];
#pragma unroll
        for (int i = 0; i < S::QT; i++) w[i] = p[i][e];
        put_columns<4>(&sh.line[key + 16 * e].p[q0], w);
        put_columns<4>(&sh.line[key + 16 * e].p[q0 + 8], w + 4);
    }
    const float l = across_lanes(v, lane, [](float x, float y) { return x + y; });
    typename S::Line &own = sh.line[q0 + (lane >> 4) * 8 + (lane >> 2 & 3)];
    const int2 keys = EDGE ? many_sight(a, own.hi, b) : make_int2(0, PIECE);
    many_merge<S>(own, n, l, keys.x < keys.y, merge);
    return wrong != 0.0f;
}

/* ---- o, keys ascending */
template <class S> __device__ __forceinline__ void many_columns(const float *wide, float (&v)[S::CT]) {
#pragma unroll
    for (int c = 0; c < S::CT; c += 4) get_columns<4>(wide + 8 * c, v + c);
}
template <class S> __device__ __forceinline__ void many_products(const float (&p)[4], const float (&v)[S::CT], float (*o)[S::CT]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int k = 0; k < S::CT; k++) {
            const int c = i & 1 ? S::CT - 1 - k : k;
            o[i][c] = fmaf(p[i], v[c], o[i][c]);
        }
}
/* keys that all of the warp's queries see: half of the queries is read while the other half is multiplied, and a key's columns while the key before is */
template <class S> __device__ __forceinline__ void many_seen(const S &sh, int t, int from, int to, float (&o)[S::QT][S::CT]) {
    constexpr int LINE = sizeof(typename S::Line) / 4;
    const float *weights = sh.line[from].p + many_value_query(t), *wide = sh.wide[from] + many_column<S>(t);
    float p[2][4], v[2][S::CT];
    if (from >= to) return;
    get_columns<4>(weights, p[0]);
    many_columns<S>(wide, v[0]);
    int j = from;
#pragma unroll 1
    for (; j < to - 1; j += 2, weights += 2 * LINE, wide += 2 * S::PITCH) {
        get_columns<4>(weights + 16, p[1]);
        many_products<S>(p[0], v[0], o);
        get_columns<4>(weights + LINE, p[0]);
        many_columns<S>(wide + S::PITCH, v[1]);
        many_products<S>(p[1], v[0], o + 4);
        get_columns<4>(weights + LINE + 16, p[1]);
        many_products<S>(p[0], v[1], o);
        if (j + 2 < to) {
            get_columns<4>(weights + 2 * LINE, p[0]);
            many_columns<S>(wide + 2 * S::PITCH, v[0]);
        }
        many_products<S>(p[1], v[1], o + 4);
    }
    if (j >= to) return;
    get_columns<4>(weights + 16, p[1]);
    many_products<S>(p[0], v[0], o);
    many_products<S>(p[1], v[0], o + 4);
}
/* keys that some of them see: the +0 of one that a query does not see would lose a -0 */
template <class S> __device__ __forceinline__ void many_partly(const AttendArgs &a, const S &sh, int t, int b, int from, int to, float (&o)[S::QT][S::CT]) {
#pragma unroll 1
    for (int j = from; j < to; j++) {
        float p[S::QT], v[S::CT];
        get_columns<4>(sh.line[j].p + many_value_query(t), p);
        get_columns<4>(sh.line[j].p + many_value_query(t) + 16, p + 4);
        many_columns<S>(sh.wide[j] + many_column<S>(t), v);
#pragma unroll
        for (int i = 0; i < S::QT; i++) {
            const int2 keys = many_sight(a, sh.line[many_value_query(t) + i / 4 * 16 + i % 4].hi, b);
            const bool in = j >= keys.x && j < keys.y;
#pragma unroll
            for (int c = 0; c < S::CT; c++) {
                const float y = fmaf(p[i], v[c], o[i][c]);
                o[i][c] = in ? y : o[i][c];
            }
        }
    }
}
/* what a query sees does not begin or end before what the query before it sees */
template <class S> __device__ __forceinline__ void many_edge(const AttendArgs &a, const S &sh, int t, int b, float (&o)[S::QT][S::CT]) {
    const int q0 = t >> 6 << 5;
    const int2 first = many_sight(a, sh.line[q0].hi, b), last = many_sight(a, sh.line[q0 + 31].hi, b);
    const int seen = min(last.x, last.y), unseen = max(seen, first.y);
    many_partly(a, sh, t, b, first.x, seen, o);
    many_seen(sh, t, seen, unseen, o);
    many_partly(a, sh, t, b, unseen, last.y, o);
}
template <class S> __device__ __forceinline__ void many_values(const AttendArgs &a, const S &sh, int b, bool whole, float (&O)[S::QT][S::CT]) {
    const int t = held((int)threadIdx.x);
    float o[S::QT][S::CT];
#pragma unroll
    for (int i = 0; i < S::QT * S::CT; i++) (&o[0][0])[i] = 0.0f;
    if (whole) many_seen(sh, t, 0, PIECE, o);
    else many_edge(a, sh, t, b, o);
#pragma unroll
    for (int i = 0; i < S::QT; i++) {
        const float2 k = sh.line[many_value_query(t) + i / 4 * 16 + i % 4].factor;
#pragma unroll
        for (int c = 0; c < S::CT; c++) O[i][c] = fmaf(o[i][c], k.y, O[i][c] * k.x);
    }
}
/* factor.x of a query: 1 / L */
template <class S> __device__ __forceinline__ bool many_store(const AttendArgs &a, const S &sh, int queries, const float (&O)[S::PASSES][S::QT][S::CT]) {
    const int t = held((int)threadIdx.x);
    bool bad = false;
#pragma unroll
    for (int i = 0; i < S::QT; i++) {
        const int q = many_value_query(t) + i / 4 * 16 + i % 4;
        if (q >= queries) continue;
        float *y = a.y + (size_t)sh.line[q].at * S::DIM + many_column<S>(t), x[S::CT];
        const float inv = sh.line[q].factor.x;
#pragma unroll
        for (int pass = 0; pass < S::PASSES; pass++) {
#pragma unroll
            for (int c = 0; c < S::CT; c++) { x[c] = O[pass][i][c] * inv; bad |= not_finite(x[c]); }
#pragma unroll
            for (int c = 0; c < S::CT; c += 4) put_columns<4>(y + pass * S::CH + 8 * c, x + c);
        }
    }
    return bad;
}

/* Scores and weights of piece b, K's first columns on their way. Leaves V's on their way and, behind them, the first columns of the queries if they are
 * more than fit: for the next piece. */
template <class S> __device__ __forceinline__ bool many_weights(const AttendArgs &a, S &sh, const uint8_t *part, int b, bool more, bool whole, bool mine,
                                                                                                              ManyMerge &merge) {
    float p[S::QT][S::KT];
    bool bad = false;
#pragma unroll
    for (int i = 0; i < S::QT * S::KT; i++) (&p[0][0])[i] = 0.0f;
#pragma unroll 1
    for (int pass = 1; pass <= S::PASSES; pass++) {
        many_arrived<0>();
        many_widen(sh);
        __syncthreads(); /* K is wide, queries are there, the place where K came is free */
        if (pass < S::PASSES) many_fetch(sh, part, pass);
        else many_fetch(sh, part + S::PART, 0);
        if (mine) many_scores(sh, p);
        if (pass == S::PASSES) break;
        __syncthreads(); /* K and queries are free */
        many_queries(a, sh, pass);
    }
    if (mine) bad = whole ? many_softmax<S, false>(a, sh, b, p, merge) : many_softmax<S, true>(a, sh, b, p, merge);
    __syncthreads(); /* weights and factors are there, K and queries are free */
    if (S::PASSES > 1 && more) many_queries(a, sh, 0);
    else if (S::PASSES > 1) many_issued();
    return bad;
}

/* the pieces of a tile */
template <class S> __device__ __forceinline__ void many_tile(const AttendArgs &a, const StepRows &s, const AttendTile &t, int kvh, S &sh, bool &waited) {
    const AttendRow first = attend_row(a, s, t.r0);
    const int b1 = (attend_row(a, s, t.r0 + t.rows - 1).hi - 1) / PIECE, b0 = first.lo / PIECE, queries = t.rows * t.per;
    const size_t head = kv_head_bytes(a.kv) * (size_t)kvh + a.kv.offset;
    const bool scores = (int)(threadIdx.x >> 5) * 16 < queries, values = (int)(threadIdx.x >> 6 << 5) < queries;
    __syncthreads(); /* the tile before is done */
    many_place(a, s, t, sh);
    if (!waited && !before_step(a, s, t.r0, b0)) { pdl_wait(); waited = true; }
    many_fetch(sh, first.pages[b0] + head, 0);
    if (!waited) { pdl_wait(); waited = true; }
    __syncthreads(); /* where the queries stand */
    many_queries(a, sh, 0);
    float O[S::PASSES][S::QT][S::CT];
#pragma unroll
    for (int i = 0; i < S::PASSES * S::QT * S::CT; i++) (&O[0][0][0])[i] = -0.0f;
    ManyMerge merge = {-INFINITY, 0.0f};
    bool bad = false;
#pragma unroll 1
    for (int b = b0; b <= b1; b++) {
        const uint8_t *part = first.pages[b] + head;
        const bool whole = many_sight(a, sh.line[0].hi, b).y == PIECE && many_sight(a, sh.line[PIECE - 1].hi, b).x == 0;
        bad |= many_weights(a, sh, part, b, b < b1, whole, scores, merge);
#pragma unroll
        for (int pass = 0; pass < S::PASSES; pass++) {
            if (S::PASSES > 1 && !pass) many_arrived<1>(); /* not the queries */
            else many_arrived<0>();
            many_widen(sh);
            __syncthreads(); /* V is wide, the place where it came is free */
            if (pass + 1 < S::PASSES) many_fetch(sh, part + S::PART, pass + 1);
            else if (b < b1) many_fetch(sh, first.pages[b + 1] + head, 0);
            if (values) many_values(a, sh, b, whole, O[pass]);
            __syncthreads(); /* V is free, at last weights too */
        }
    }
    const int lane = threadIdx.x & 31;
    sh.line[many_score_query(threadIdx.x) + (lane >> 4) * 8 + (lane >> 2 & 3)].factor.x = 1.0f / merge.L;
    __syncthreads(); /* factors are there */
    bad |= many_store(a, sh, queries, O);
    if (bad) report_fault(s.fault, a.op);
}

/* grid (KV heads, tiles), the last tiles, which have most keys, first. A tile has `per` heads (all that share the KV head, in chunks of at most 64)
 * of 64 / per rows. */
template <class S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS) k_attend_many(AttendArgs a, StepRows s, int chunks, int tiles) {
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int share = a.heads / a.kv.heads, per = share / chunks, rows = S::QUERIES / per, kvh = blockIdx.x, tile = tiles - 1 - (int)blockIdx.y;
    const int chunk = tile % chunks, end = min(a.rows, (tile / chunks + 1) * rows);
    bool waited = false; /* positions and page tables do not come from an earlier kernel, nor do pages that the step does not write */
    pdl_trigger();
    for (int r = tile / chunks * rows; r < end;) {
        const AttendTile t = {r, same_table(a, s, r, end - r), kvh * share + chunk * per, per};
        many_tile(a, s, t, kvh, sh, waited);
        r += t.rows;
    }
}

} // namespace bw
#endif
