/* DELTA over many rows (docs/numerics.md §11): a walk that takes a sequence's rows in order with a column's state in registers. Owns which lane has which
 * values, how inputs come and when sums are joined; the order of additions is a strand's, as in op_delta.cuh. */
#ifndef BW24_CU_OP_DELTA_ROWS_CUH
#define BW24_CU_OP_DELTA_ROWS_CUH

#include "early.cuh"
#include "op_delta.cuh"

namespace bw {

/* Rows go by pairs, so that the keys of a row and of the next one change places by name. The ring has three groups: rows of one are worked on, those of
 * the next are there, the third is on its way, a row asked for in each row's time. */
enum { WALK_GROUP = 8, WALK_RING = 3 * WALK_GROUP, WALK_AHEAD = 2 * WALK_GROUP };

/* One strand of C columns in a lane: a warp has 8 C columns, strand = lane / 8. Of a row's two chains only p's is waited for: the last HELD values' share of
 * the output is added while p is joined, its own joining is left to the next row. Inputs in registers are replaced right after their last use by those of
 * a row or two later. */
template <bool FULL, int C> struct WalkColumns {
    enum { HELD = 16, SOON = DELTA_STRAND - HELD };
    float S[C][DELTA_STRAND], T[C][HELD], p[C], o[C]; /* T: the held values of the row before's state */
    float4 q[DELTA_STRAND / 4];
    int count;
    static __device__ __forceinline__ float part(const float4 &x, int u) { return u == 0 ? x.x : u == 1 ? x.y : u == 2 ? x.z : x.w; }
    __device__ __forceinline__ int values() const { /* compared where it is used: the results would take registers */
        int n = count;
        if (!FULL) asm volatile("" : "+r"(n));
        return n;
    }
    static __device__ __forceinline__ void read(const float *from, float4 (&to)[DELTA_STRAND / 4], int first, int end) {
#pragma unroll
        for (int m = 0; m < DELTA_STRAND / 4; m++)
            if (m >= first && m < end) to[m] = *(const float4 *)(from + 4 * m);
    }
    /* the update of the row of key k by d, all but the held values' output; NEW: the next row's decay g and its p. Then k is that of two rows later. */
    template <bool OLD, bool NEW>
    __device__ __forceinline__ void pass(float4 (&k)[DELTA_STRAND / 4], const float4 (&next)[DELTA_STRAND / 4], const float (&d)[C], float g, const float *later,
                                         const float *later_q) {
#pragma unroll
        for (int c = 0; c < C; c++) { if (NEW) p[c] = 0.0f; if (OLD) o[c] = 0.0f; }
#pragma unroll
        for (int m = 0; m < DELTA_STRAND / 4; m++) {
            const int n = values();
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const int t = 4 * m + u;
                if (!FULL && t >= n) continue;
#pragma unroll
                for (int c = 0; c < C; c++) {
                    if (OLD) {
                        S[c][t] = fmaf(part(k[m], u), d[c], S[c][t]);
                        if (t < SOON) o[c] = fmaf(S[c][t], part(q[m], u), o[c]);
                        else T[c][t - SOON] = S[c][t];
                    }
                    if (NEW) { S[c][t] = S[c][t] * g; p[c] = fmaf(S[c][t], part(next[m], u), p[c]); }
                }
            }
            if (OLD && NEW) k[m] = *(const float4 *)(later + 4 * m);
            if (OLD && m < SOON / 4) q[m] = *(const float4 *)(later_q + 4 * m);
        }
    }
    /* the held values' share of the output */
    __device__ __forceinline__ void rest() {
#pragma unroll
        for (int m = SOON / 4; m < DELTA_STRAND / 4; m++) {
            const int n = values();
#pragma unroll
            for (int u = 0; u < 4; u++) {
                if (!FULL && 4 * m + u >= n) continue;
#pragma unroll
                for (int c = 0; c < C; c++) o[c] = fmaf(T[c][4 * m + u - SOON], part(q[m], u), o[c]);
            }
        }
    }
};
/* (0 + 2) + (1 + 3) over the strands, in every lane, of two sums a column */
template <int C> __device__ __forceinline__ void walk_join(float (&x)[C], float (&y)[C]) {
#pragma unroll
    for (int o = 16; o >= 8; o >>= 1)
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float a = __shfl_xor_sync(~0u, x[c], o), b = __shfl_xor_sync(~0u, y[c], o);
            x[c] = x[c] + a;
            y[c] = y[c] + b;
        }
}

/* A block of THREADS has COLS columns of a head over a sequence's rows */
template <bool FULL, int C, int THREADS> struct DeltaWalk {
    enum { COLS = THREADS / 4 * C, KEYS = DELTA_MAX_DK / THREADS, QUADS = DELTA_STRAND / 4 };
    typedef WalkColumns<FULL, C> Columns;
    const DeltaArgs &a;
    const FoldSeq &s;
    DeltaRow *ring;
    const int *order;
    const int n; /* rows */
    int head, key, col, cols, first; /* col: of the block, this lane's first of C, 8 apart; first: the block's in the head */
    int strand;
    const char *k, *q, *third, *y; /* this thread's first value in row 0; third: of v, decay or beta, NULL: none */
    int ldk, ldq, ld, ldy, place;  /* in bytes; the third's: its row length, its place as floats after v */
    float v[C], b, g;              /* of the row at hand, decay of the next */
    float was[C];                  /* the outputs of the row before the last one, in strands */
    unsigned most;                 /* largest magnitude of an output */
    Columns c;

    __device__ __forceinline__ DeltaWalk(const DeltaArgs &a, const FoldSeq &s, DeltaRow *ring, int item, const int *order)
        : a(a), s(s), ring(ring), order(order + s.first), n(s.n), most(0) {
        const int blocks = (a.dv + COLS - 1) / COLS, group = a.heads / a.kheads, i = threadIdx.x, at = i - COLS;
        head = item / blocks;
        first = item % blocks * COLS;
        key = a.grouped ? head / group : head % a.kheads;
        cols = min((int)COLS, a.dv - first);
        strand = (i & 31) >> 3;
        c.count = (a.dk - strand + 3) / 4;
        col = (i >> 5) * 8 * C + (i & 7);
        k = (const char *)(a.k + key * a.dk + i);
        q = (const char *)(a.q + key * a.dk + i);
        third = (const char *)(i < cols ? a.v + head * a.dv + first + i : at == 0 ? a.g + head : at == 1 ? a.b + head : NULL);
        y = (const char *)(a.y + head * a.dv + first + col);
        ldk = held(a.ldk * 4);
        ldq = held(a.ldq * 4);
        ld = held((i < COLS ? a.ldv : at == 0 ? a.ldg : a.ldb) * 4);
        ldy = held(a.heads * a.dv * 4);
        place = i < COLS ? i : 32 + at;
    }
    /* where value t = 0 of this lane's column j stands in a version, and how far the next of the strand is */
    __device__ __forceinline__ size_t at(int j, int *step) const {
        const int x = first + col + 8 * j;
        *step = 4 * delta_width(a.dv, x);
        return delta_place(a, head, strand, x);
    }
    __device__ __forceinline__ bool have(int j) const { return col + 8 * j < cols; }
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int j = 0; j < C; j++) {
            int step;
            const float *from = s.live + at(j, &step);
#pragma unroll
            for (int t = 0; t < DELTA_STRAND; t++, from = held(from + step)) c.S[j][t] = have(j) && (FULL || t < c.count) ? __ldcg(from) : 0.0f;
        }
    }
    __device__ __forceinline__ void keep(float *to) const {
#pragma unroll
        for (int j = 0; j < C; j++) {
            int step;
            float *p = to + at(j, &step);
#pragma unroll
            for (int t = 0; t < DELTA_STRAND; t++, p = held(p + step))
                if (have(j) && (FULL || t < c.count)) *p = c.S[j][t];
        }
    }
    __device__ __forceinline__ int index(int r) const { return order[min(r, n - 1)]; }
    /* asks for `row` of the step into `to`; rows past the sequence's are its last one again */
    __device__ __forceinline__ void fetch(DeltaRow *to, int row) const {
        const int i = threadIdx.x;
#pragma unroll
        for (int e = 0; e < KEYS; e++) {
            const int x = i + e * THREADS;
            if (FULL || x < a.dk) {
                cp4(&to->k[x & 3][x >> 2], k + (long long)row * ldk + 4 * e * THREADS);
                cp4(&to->q[x & 3][x >> 2], q + (long long)row * ldq + 4 * e * THREADS);
            }
        }
        if (third) cp4(to->v + place, third + (long long)row * ld);
    }
    __device__ __forceinline__ void log(int r0) const {
        const int i = threadIdx.x, from = n - s.n_log;
        const bool logs_k = !first && (a.grouped ? head % (a.heads / a.kheads) == 0 : head < a.kheads);
        for (int r = max(from, r0); r < min(n, r0 + WALK_GROUP); r++) {
            const DeltaRow &x = ring[r % WALK_RING];
            float *to = s.log + a.log + (size_t)(r - from) * a.log_width;
            for (int e = i; logs_k && e < a.dk; e += THREADS) to[key * a.dk + e] = x.k[e & 3][e >> 2];
            to += a.kheads * a.dk;
            if (i < cols) to[head * a.dv + first + i] = x.v[i];
            to += a.heads * a.dv;
            if (!first && !i) { to[head] = x.g; to[a.heads + head] = x.b; }
        }
    }
    /* the joined outputs of a row, from the lanes of strand 0 */
    __device__ __forceinline__ void put(int row, const float (&value)[C]) {
        float *to = (float *)(y + (long long)row * ldy);
#pragma unroll
        for (int j = 0; j < C; j++) {
            if (!strand && have(j)) to[8 * j] = value[j];
            if (have(j)) most = max(most, magnitude(value[j]));
        }
    }
    __device__ __forceinline__ void scalars(const DeltaRow &x, const DeltaRow &next) {
#pragma unroll
        for (int j = 0; j < C; j++) v[j] = x.v[col + 8 * j];
        b = x.b;
        g = next.g;
    }
    __device__ __forceinline__ void delta(float (&d)[C]) const {
#pragma unroll
        for (int j = 0; j < C; j++) d[j] = b * (v[j] - c.p[j]);
    }
    /* p of the row at hand and the output of the row before the last, whole; the last one's strands are done */
    __device__ __forceinline__ void join(const DeltaRow &now, float (&out)[C]) {
#pragma unroll
        for (int j = 0; j < C; j++) out[j] = was[j];
        walk_join(c.p, out);
        c.rest();
#pragma unroll
        for (int j = 0; j < C; j++) was[j] = c.o[j];
        Columns::read(now.q[strand], c.q, Columns::SOON / 4, QUADS);
    }
    /* Row `now`, neither the last nor one whose state is kept; n1, n2: the two behind it; k: its key, next: n1's. done: the row before the last one. Asks for
     * the row `ahead` of the step. */
    __device__ __forceinline__ void row(const DeltaRow &now, const DeltaRow &n1, const DeltaRow &n2, float4 (&k)[QUADS], const float4 (&next)[QUADS], int done,
                                        DeltaRow *to, int ahead) {
        float d[C], out[C];
        join(now, out);
        delta(d);
        const float decay = g;
        scalars(n1, n2);
        fetch(to, ahead);
        c.template pass<true, true>(k, next, d, decay, n2.k[strand], n1.q[strand]);
        put(done, out);
    }
    /* any row; leaves no order of the keys */
    __device__ __forceinline__ void special(const DeltaRow &now, const DeltaRow &n1, const DeltaRow &n2, float4 (&k)[QUADS], const float4 (&next)[QUADS], int done,
                                            bool wanted, bool last) {
        float d[C], out[C];
        join(now, out);
        put(done, out);
        delta(d);
        const float decay = g;
        scalars(n1, n2);
        c.template pass<true, false>(k, next, d, 0.0f, NULL, n1.q[strand]);
        if (wanted) keep(s.mid);
        if (!last) c.template pass<false, true>(k, next, d, decay, NULL, NULL);
    }
    __device__ __forceinline__ void keys(const DeltaRow &now, const DeltaRow &n1, float4 (&k)[QUADS], float4 (&next)[QUADS]) const {
        Columns::read(now.k[strand], k, 0, QUADS);
        Columns::read(n1.k[strand], next, 0, QUADS);
    }
    __device__ __forceinline__ void begin(float4 (&k)[QUADS], float4 (&next)[QUADS]) {
        const float d[C] = {};
        keys(ring[0], ring[1], k, next);
        Columns::read(ring[0].q[strand], c.q, 0, QUADS);
        scalars(ring[0], ring[1]);
        c.template pass<false, true>(next, k, d, ring[0].g, NULL, NULL);
#pragma unroll
        for (int j = 0; j < C; j++) {
            c.o[j] = was[j] = 0.0f;
#pragma unroll
            for (int t = 0; t < Columns::HELD; t++) c.T[j][t] = 0.0f;
        }
    }
    __device__ __forceinline__ void run() {
        const int stop = s.mid ? n - s.n_log - 1 : -1, logged = s.log ? n - s.n_log : n;
        float4 k[QUADS], next[QUADS];
#pragma unroll 1
        for (int r = 0; r < WALK_AHEAD; r++) { /* a group of copies a pair */
            fetch(ring + r, index(r));
            if (r & 1) asm volatile("cp.async.commit_group;");
        }
        load();
        int done[2] = {index(0), index(0)}, ahead[2] = {index(WALK_AHEAD), index(WALK_AHEAD + 1)};
        DeltaRow *x = ring, *to = ring + WALK_AHEAD, *const end = ring + WALK_RING;
#pragma unroll 1
        for (int r = 0; r < n; r += 2) {
            if (r % WALK_GROUP == 0) {
                /* there: rows up to the next group's second */
                asm volatile("cp.async.wait_group 3;" ::: "memory");
                __syncthreads();
                if (r + WALK_GROUP > logged) log(r);
                if (!r) begin(k, next);
            }
            DeltaRow *const x2 = x + 2 == end ? ring : x + 2;
            const int row0 = index(r), row1 = index(r + 1), then[2] = {index(r + WALK_AHEAD + 2), index(r + WALK_AHEAD + 3)};
            /* shorter keys go row by row: no model of note has them, and both ways do not fit the registers */
            if (FULL && r + 2 < n && stop != r && stop != r + 1) {
                row(x[0], x[1], x2[0], k, next, done[0], to, ahead[0]);
                row(x[1], x2[0], x2[1], next, k, done[1], to + 1, ahead[1]);
            } else {
                fetch(to, ahead[0]);
                fetch(to + 1, ahead[1]);
#pragma unroll 1
                for (int e = 0; e < 2 && r + e < n; e++) {
                    const DeltaRow &n1 = e ? x2[0] : x[1], &n2 = e ? x2[1] : x2[0];
                    special(x[e], n1, n2, k, next, e ? done[1] : done[0], r + e == stop, r + e + 1 == n);
                    keys(n1, n2, k, next);
                }
            }
            asm volatile("cp.async.commit_group;");
            done[0] = row0; done[1] = row1;
            ahead[0] = then[0]; ahead[1] = then[1];
            x = x2;
            to = to + 2 == end ? ring : to + 2;
        }
        c.rest();
        walk_join(was, c.o);
        if (n > 1) put(index(n - 2), was);
        put(index(n - 1), c.o);
        if (most >= 0x7f800000u) report_fault(a.fault, a.op);
        keep(s.out);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
};

} // namespace bw
#endif
