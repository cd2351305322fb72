/* LINEAR over quantised weights (docs/numerics.md §2) for one row. Owns the mapping of work to warps; the layout of weights is unit.cuh's, several rows
 * are op_linear.cuh's.
 *
 * A warp folds two units at a time: one tile of 16 outputs, two neighbouring segments, which lie side by side in memory. The 8 columns of an mma are 8
 * groups of 32 (forms with two scales a group: 8 halves), a register of the activations holding zero where the column belongs to another group. The
 * results, times the activations' scale, change lanes through shared memory, so that each lane folds all groups of one row of one of the two units. */
#ifndef BW24_CU_OP_LINEAR_ONE_CUH
#define BW24_CU_OP_LINEAR_ONE_CUH

#include <type_traits>
#include "op_linear.cuh"

namespace bw {

enum { ONE_THREADS = 512, ONE_WARPS = ONE_THREADS / 32, ONE_BARS = 512 }; /* ONE_BARS: bytes of shared memory for the barriers of the rings and of blocks in twos */

struct OneShape {
    int warps; /* warps that fold */
    int depth; /* pairs of units of a warp's ring: 1 or 2 */
    int tiles; /* tiles of 16 outputs of a pass; with GLU a multiple of 4 */
    int glu;   /* tiles come in fours: two of gate, two of up */
    int early; /* warps that ask for their first pair before the dependency wait: the input queues behind what is asked for, which takes microseconds */
    int per, more; /* tiles (GLU: fours) of a block or of two; the first `more` have one more */
    uint32_t by_warps, by_tiles[2]; /* one_reciprocal of warps, and of the tiles of the first pass in a block with one more tile and in the others */
};

/* what one_quotient wants for a division by n */
__host__ __device__ inline uint32_t one_reciprocal(int n) { return n > 1 ? 0xffffffffu / (uint32_t)n + 1 : 0; }
/* x / n, rounded down, for x * n < 2^32 */
__device__ __forceinline__ int one_quotient(int x, uint32_t reciprocal) { return reciprocal ? (int)__umulhi((uint32_t)x, reciprocal) : x; }

/* The work of a block: `count` tiles from `first` on (GLU: groups of four tiles), in passes of g.tiles. In a pass the items are (pair of segments, tile),
 * tiles fastest, and each warp takes a run of them, so that it seldom changes its segments.
 * TWO = 1: blocks go in twos. Where theirs is an odd number of tiles (fours), the last is shared: `extra` tiles numbered from `count` on, of which this block has
 * `mine` pairs of segments from `from_pair` on, behind its own items. The first block of the two adds them up. There is one pass then. */
template <class U, int TWO> struct OneWork {
    const LinearArgs &a;
    const OneShape &g;
    int first, count, pairs, warp, extra, last, from_pair, mine;
    __device__ __forceinline__ OneWork(const LinearArgs &args, const OneShape &shape, int w) : a(args), g(shape), pairs((args.segs + 1) >> 1), warp(w) {
        const int b = (int)blockIdx.x >> TWO, second = (int)blockIdx.x & TWO, half = (pairs + 1) >> 1;
        first = b * g.per + min(b, g.more);
        count = g.per + (b < g.more);
        extra = count & TWO;
        last = first + count - 1;
        count >>= TWO;
        first += second * count;
        from_pair = second ? half : 0;
        mine = second ? pairs - half : half;
        if (g.glu) { count *= 4; extra *= 4; }
    }
    __device__ __forceinline__ bool is_second() const { return blockIdx.x & TWO; }
    /* tiles whose sums this block makes, where it has all of them in one pass */
    __device__ __forceinline__ int sums(int n) const { return is_second() ? n : n + extra; }
    /* part and tile of it of tile t of the block */
    __device__ __forceinline__ int part_tile(int t, int &tile) const {
        const int at = !TWO || t < count ? first + (g.glu ? t >> 2 : t) : last;
        int tb = g.glu ? at : at >> 1, p = g.glu ? t >> 1 & 1 : part_of(a, tb);
        tile = tb * 2 + ((g.glu ? t : at) & 1);
        return p;
    }
    /* the run of a pass of n tiles: first item, and the one after the last */
    __device__ __forceinline__ void run(int n, int &from, int &to) const {
        const int all = n * pairs + extra * mine;
        from = one_quotient(warp * all, g.by_warps);
        to = one_quotient((warp + 1) * all, g.by_warps);
    }
    __device__ __forceinline__ uint32_t by_first() const { return g.by_tiles[(int)blockIdx.x >> TWO >= g.more]; }
    /* whether item i of a pass of n tiles is one of the shared tiles, and where then */
    __device__ __forceinline__ bool shared(int i, int n, int &pair, int &t) const {
        const int k = i - n * pairs;
        if (!TWO || k < 0) return false;
        pair = from_pair + (g.glu ? k >> 2 : k);
        t = n + (k & (extra - 1));
        return true;
    }
    /* pair and tile of item i of a pass of n tiles, the first pass or a later one */
    __device__ __forceinline__ void place(int i, int n, int later, int &pair, int &t) const {
        if (!shared(i, n, pair, t)) {
            pair = later ? i / n : one_quotient(i, by_first());
            t = i - pair * n;
        }
    }
    /* address of the pair of units (pair, tile t of the block), its lowest bit set where the second unit is past the matrix */
    __device__ __forceinline__ uintptr_t address(int pair, int t) const {
        int tile, p = part_tile(t, tile);
        return (uintptr_t)(a.part[p].w + ((size_t)tile * a.segs + 2 * pair) * U::UNIT) | (2 * pair + 1 == a.segs);
    }
    /* of the warp's k-th pair; 0: no such pair. early: the short way for the first pass, 0 for the others */
    __device__ __forceinline__ uintptr_t source(int k) const {
        int from, to, pair, t, base = 0, n = min(g.tiles, count);
        run(n, from, to);
        while (k >= to - from) { /* a later pass */
            k -= to - from;
            base += n;
            n = min(g.tiles, count - base);
            if (n <= 0) return 0;
            run(n, from, to);
        }
        if (!shared(from + k, n, pair, t)) {
            pair = (from + k) / n;
            t = from + k - pair * n;
        }
        return address(pair, base + t);
    }
    __device__ __forceinline__ uintptr_t early(int k) const {
        int from, to, pair, t, n = min(g.tiles, count);
        run(n, from, to);
        if (from + k >= to) return 0;
        if (!shared(from + k, n, pair, t)) {
            pair = one_quotient(from + k, by_first());
            t = from + k - pair * n;
        }
        return address(pair, t);
    }
};

/* Blocks in twos. A value goes to the same place in the first block's shared memory and is counted by its barrier `bar`; the barriers are there once both
 * blocks have passed two_here and two_ready. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void two_here() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void two_ready() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void two_hand(float *p, float v, uint64_t *bar) {
    asm volatile("{.reg .b32 p, b; mapa.shared::cluster.u32 p,%0,0; mapa.shared::cluster.u32 b,%2,0;"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [p],%1,[b];}" ::"r"(smem_at(p)), "r"(__float_as_uint(v)), "r"(smem_at(bar)) : "memory");
}
#else
__device__ __forceinline__ void two_here() {}
__device__ __forceinline__ void two_ready() {}
__device__ __forceinline__ void two_hand(float *, float, uint64_t *) {}
#endif

/* eight values, the four at p + half first */
__device__ __forceinline__ void eight(const float *p, int half, float *v) {
    const float4 x = *(const float4 *)(p + half), y = *(const float4 *)(p + (half ^ 4));
    v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w; v[4] = y.x; v[5] = y.y; v[6] = y.z; v[7] = y.w;
}

/* B registers of two segments: b[u][j] of group j */
template <class U> struct OneActs {
    static constexpr bool HALVES = U::FORM == FORM_S2 || U::FORM == FORM_S2M;
    static constexpr int SETS = HALVES ? 2 : 1; /* of accumulators; values of a row and group */
    uint2 b[2][8];
    __device__ __forceinline__ void load(const uint8_t *codes, int lane) {
        const int gid = lane >> 2, tig = lane & 3;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const uint8_t *at = codes + u * 256 + tig * 8;
            uint2 q;
            if (HALVES) { /* column gid: half gid % 2 of group gid / 2 * 2, and of the one after it in the second set */
                q.x = *(const uint32_t *)(at + (gid & 6) * 32 + (gid & 1) * 4);
                q.y = *(const uint32_t *)(at + (gid & 6) * 32 + 32 + (gid & 1) * 4);
            } else q = *(const uint2 *)(at + gid * 32);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint2 &to = b[u][j];
                if (HALVES) to = make_uint2(gid == (j & 6) ? (j & 1 ? q.y : q.x) : 0, gid == (j | 1) ? (j & 1 ? q.y : q.x) : 0);
                else to = make_uint2(gid == j ? q.x : 0, gid == j ? q.y : 0);
                asm volatile("" : "+r"(to.x), "+r"(to.y)); /* kept, not selected again for every pair */
            }
        }
    }
};

/* Where the values of a warp's pair change lanes: 32 rows of 8 SETS floats, rows side by side by 32 floats, behind which 4 are free, so that no read or write
 * of 16 bytes has a bank twice */
template <int SETS> struct OneBox {
    __host__ __device__ static constexpr int place(int row) { return row * 8 * SETS + row / (4 / SETS) * 4; }
    static constexpr int PLACES = place(32);
    float *put;       /* the lane's two values (SETS = 2: four) of row gid of the first unit */
    const float *get; /* the values of the lane's row */
    __device__ __forceinline__ OneBox(float *box, int lane) : put(box + place(lane >> 2) + (lane & 3) * 2 * SETS), get(box + place(lane)) {}
};

/* What a lane keeps over all of its warp's pairs: the lane, the first words of the table of a unit that has one (unit.cuh), its box. A fold is bound by what it
 * issues: what is kept here would else be made from the thread's number for each pair anew. */
template <class U> struct OneLane {
    int lane;
    uint32_t plus, minus;
    OneBox<OneActs<U>::SETS> box;
    /* zero: 0 in a way that the compiler does not see. What comes from another lane it cannot make again, and so keeps. */
    __device__ __forceinline__ OneLane(float *to, uint32_t zero) : lane(__shfl_sync(~0u, (int)threadIdx.x & 31, (int)threadIdx.x & 31)), plus(0), minus(0), box(to, lane) {
        if constexpr (U::APART) {
            plus = __shfl_sync(~0u, U::FIRST_PLUS | zero, lane);
            minus = __shfl_sync(~0u, U::FIRST_MINUS | zero, lane);
        }
    }
};

/* The accumulators of a lane: of unit u, rows gid and gid + 8: groups 2 tig and 2 tig + 1 (halves: set e has first and second half of group 2 tig + e).
 * The units go side by side, so that one's mma hide the other's; one after the other where registers are short. */
template <class U, class Read> __device__ __forceinline__ void one_dots(const uint8_t *w, const OneActs<U> &x, const OneLane<U> &o, int (*c)[OneActs<U>::SETS][4], Read read) {
    constexpr bool TURNS = U::APART || U::FORM == FORM_S2M, EARLY = U::UNIT < 3072; /* EARLY: units fit in registers */
    constexpr int SETS = OneActs<U>::SETS, PACKS = 2 * U::PACKS;
    typename U::Pack pk[2][2][PACKS];
    const auto get = [&](int u, int i) {
#pragma unroll
        for (int r = 0; r < 2; r++) pk[u][r][i] = U::template load_pack<true>(w + u * U::UNIT + i / U::PACKS * U::HALF, i % U::PACKS, r, o.lane);
    };
    if (EARLY && !TURNS) {
#pragma unroll
        for (int i = 0; i < 2 * PACKS; i++) get(i & 1, i >> 1);
        read();
    }
#pragma unroll
    for (int i = 0; i < 8 * SETS; i++) c[i & 1][i >> 1 & (SETS - 1)][i / (2 * SETS)] = MAGIC;
#pragma unroll
    for (int step = 0; step < 16; step++) {
        const int j = TURNS ? step & 7 : step >> 1, u = TURNS ? step >> 3 : step & 1, e = (j & 3) % U::GP, i = j / U::GP, s = SETS == 2 ? j & 1 : 0;
        if (TURNS && EARLY && !j) {
#pragma unroll
            for (int k = 0; k < PACKS; k++) get(u, k);
            if (u) read();
        }
        if (!EARLY && !e) get(u, i);
        if constexpr (U::APART)
            apart_dots<false>(U::template signs<true>(pk[u][0][i], e, o.plus, o.minus), U::template signs<true>(pk[u][1][i], e, o.plus, o.minus), x.b[u][j], false, c[u][s], NULL);
        else {
            uint32_t l0, h0, l1, h1;
            U::unpack(pk[u][0][i], e, l0, h0);
            U::unpack(pk[u][1][i], e, l1, h1);
            mma32<U::UNSIGNED>(c[u][s], l0, l1, h0, h1, x.b[u][j].x, x.b[u][j].y);
        }
    }
    if (!EARLY) read();
}

/* i of a unit's accumulators; delta: the lane's four floats of the unit's segment */
template <int SETS> __device__ __forceinline__ void one_scaled(const int (&c)[SETS][4], const float *delta, float (&t)[2][2 * SETS]) {
    const float4 d = *(const float4 *)delta;
    const GroupScale d0(d.x, d.z), d1(d.y, d.w);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int s = 0; s < SETS; s++) t[r][e * SETS + s] = (e ? d1 : d0).of(SETS == 2 ? c[e][2 * r + s] : c[0][2 * r + e]);
}

/* Lanes of a quad hold the values of two groups each of four rows; afterwards lane 16 u + row holds all values of its row, groups ascending */
template <int SETS> __device__ __forceinline__ void one_change(const OneBox<SETS> &box, const float (*t)[2][2 * SETS], float *mine) {
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *to = box.put + OneBox<SETS>::place(16 * u + 8 * r);
            if constexpr (SETS == 1) *(float2 *)to = make_float2(t[u][r][0], t[u][r][1]);
            else *(float4 *)to = make_float4(t[u][r][0], t[u][r][1], t[u][r][2], t[u][r][3]);
        }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 8 * SETS; k += 4) {
        const float4 v = *(const float4 *)(box.get + k);
        mine[k] = v.x; mine[k + 1] = v.y; mine[k + 2] = v.z; mine[k + 3] = v.w;
    }
}

/* p of a row of a unit, from +0; a, b: its scales, raw: its minima, sum, low: of the segment's groups */
template <class U, int SETS>
__device__ __forceinline__ float one_row_fold(const float (&a)[8], const float (&b)[8], const typename U::Row &raw, const float (&mine)[8 * SETS], const float *sum,
                                              const float *low) {
    constexpr Form F = U::FORM;
    float m0[8], m1[8], s[8], z[8], p = 0.0f;
    if constexpr (F == FORM_S2M) U::row_mins(raw, m0, m1);
    if (F == FORM_S1M || F == FORM_S2M) eight(sum, 0, s);
    if (F == FORM_S2M) eight(low, 0, z);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        p = fmaf(a[j], mine[SETS * j], p);
        if (SETS == 2) p = fmaf(b[j], mine[SETS * j + SETS - 1], p);
        if (F == FORM_S1M) p = fmaf(b[j], s[j], p);
        if (F == FORM_S2M) p = fmaf(m1[j], s[j] - z[j], fmaf(m0[j], z[j], p));
    }
    return p;
}

/* what the activations' scales are multiplied by, and a row's are too small by */
template <class U> constexpr float ONE_OVER = std::is_same<U, U_NVFP4>::value ? 128.0f : 1.0f;
template <class U> __device__ __forceinline__ void one_row_scales(const typename U::Row &raw, float *a, float *b) {
    if constexpr (ONE_OVER<U> != 1.0f) U::row_over_128(raw, a, b);
    else U::row(raw, a, b);
}
/* Scales of a row before the products, whose latency hides them: where registers suffice for the 16 */
template <class U> constexpr bool ROW_EARLY = U::APART;
template <class U> __device__ __forceinline__ void one_scales(const typename U::Row &raw, float (&a)[8], float (&b)[8]) {
    one_row_scales<U>(raw, a, b);
#pragma unroll
    for (int j = 0; j < 8; j++) asm volatile("" : "+f"(a[j]), "+f"(b[j])); /* here, not where they are wanted */
}

/* p of the lane's row (lane % 16) in unit lane / 16 of the pair at w. delta: the lane's of the first segment (as put_scale puts them), the second's 16 floats
 * on; sum, low: of the lane's segment. read() is called by the whole warp once the pair is not read again */
template <class U, class Read>
__device__ __forceinline__ float one_fold(const uint8_t *w, const OneActs<U> &x, const float *delta, const float *sum, const float *low, const OneLane<U> &o, Read read) {
    constexpr int SETS = OneActs<U>::SETS;
    int c[2][SETS][4];
    float t[2][2][2 * SETS], mine[8 * SETS], a[8], b[8];
    const typename U::Row raw = U::fetch_row(w + (o.lane >> 4) * U::UNIT + 2 * U::HALF, o.lane & 15);
    if (ROW_EARLY<U>) one_scales<U>(raw, a, b);
    one_dots<U>(w, x, o, c, read);
#pragma unroll
    for (int u = 0; u < 2; u++) one_scaled<SETS>(c[u], delta + u * 16, t[u]);
    if (!ROW_EARLY<U>) one_row_scales<U>(raw, a, b);
    one_change<SETS>(o.box, t, mine);
    return one_row_fold<U, SETS>(a, b, raw, mine, sum, low);
}

/* Units whose pair is asked for again when its p is stored. A bulk copy does not wait for reads of its slot that are still in the queue of shared memory: most
 * units' are few or used before it, but the scales of these are 16 reads of the same banks. */
template <class U> constexpr bool ONE_LATE = sizeof(typename U::Row) > 32;

/* four values by a load that the compiler leaves before the dependency wait */
__device__ __forceinline__ void load_early(const float *p, float *v) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_one(const float *p, float *v) { asm volatile("ld.relaxed.gpu.global.f32 %0,[%1];" : "=f"(*v) : "l"(p) : "memory"); }

/* Activations of one row in shared memory; delta as put_scale puts it, low and sum only where the form reads them */
struct OneRow { uint8_t *codes; float *delta, *sum, *low; };

/* eight values of the NORM, quantised; the first block writes them to norm.y as well */
template <class U> __device__ __forceinline__ void one_put(const LinearArgs &a, const OneRow &o, int seg, int lane, const float (&v)[8]) {
    constexpr Form F = U::FORM;
    const Quant8 q = quant_eight(v, a.fault, a.norm.op);
    const int g = seg * 8 + (lane >> 2), c = seg * 256 + lane * 8;
    put_eight(o.codes + g * 32, lane, q);
    if (!(lane & 3)) {
        put_scale(o.delta, g, q.d * ONE_OVER<U>);
        if (F == FORM_S1M || F == FORM_S2M) o.sum[g] = q.d * (float)q.sum;
        if (F == FORM_S2M) o.low[g] = q.d * (float)q.low;
    }
    if (blockIdx.x || c >= a.x.cols) return;
    *(float4 *)(a.norm.y + c) = make_float4(v[0], v[1], v[2], v[3]);
    *(float4 *)(a.norm.y + c + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

/* The NORM before the LINEAR (docs/numerics.md section 4) in four steps: weights asked for before the dependency wait, values after it, all under way before
 * one is used, the lanes' sums of squares, then the rest. A warp has segments warp and warp + ONE_WARPS: at most 2 ONE_WARPS segments. part: a float of each. */
struct OneLoads { float w[2][8], v[2][8], t[2][8]; }; /* weights, values as 8 columns a lane, values as strands; of a row that is quantised: t[0] */
__device__ __forceinline__ void one_weights(const LinearArgs &a, OneLoads &l) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int c = (warp + i * ONE_WARPS) * 256 + lane * 8;
#pragma unroll
        for (int j = 0; j < 8; j++) { l.w[i][j] = 1.0f; l.v[i][j] = l.t[i][j] = 0.0f; }
        if (i && a.segs <= ONE_WARPS) break;
        if (a.norm.w && c < a.x.cols) { load_early(a.norm.w + c, l.w[i]); load_early(a.norm.w + c + 4, l.w[i] + 4); }
    }
}
__device__ __forceinline__ void one_values(const LinearArgs &a, OneLoads &l) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = a.x.cols;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int s = (warp + i * ONE_WARPS) * 256;
        if (i && a.segs <= ONE_WARPS) break;
        const float *x = a.norm.x + s;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (s + j * 32 < n) load_one(x + j * 32 + lane, &l.t[i][j]);
        if (s + lane * 8 < n) { load_early(x + lane * 8, l.v[i]); load_early(x + lane * 8 + 4, l.v[i] + 4); }
    }
}
__device__ __forceinline__ void one_squares(const OneLoads &l, float (&p)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) p[i] = fmaf(l.t[i][j], l.t[i][j], p[i]);
}
template <class U> __device__ __forceinline__ void one_norm(const LinearArgs &a, const OneRow &o, float *part, OneLoads &l, float (&p)[2]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = a.x.cols, S = a.segs;
    float(&w)[2][8] = l.w, (&v)[2][8] = l.v;
#pragma unroll
    for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int i = 0; i < 2; i++) p[i] = p[i] + __shfl_xor_sync(~0u, p[i], m);
    if (!lane) { part[warp] = p[0]; part[warp + ONE_WARPS] = p[1]; }
    __syncthreads();
    float total = 0.0f;
#pragma unroll 1
    for (int s = 0; s < S; s += 16) {
        float k[16];
#pragma unroll
        for (int i = 0; i < 16; i++) k[i] = part[s + i];
#pragma unroll
        for (int i = 0; i < 16; i++) total = total + (s + i < S ? k[i] : 0.0f); /* +0 changes no sum of squares */
    }
    const float r = 1.0f / sqrtf((a.norm.l2 ? total : total / (float)n) + a.norm.eps);
#pragma unroll 1
    for (int s = warp; s < S; s += ONE_WARPS) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[0][j] = (v[0][j] * r) * w[0][j];
        one_put<U>(a, o, s, lane, v[0]);
#pragma unroll
        for (int j = 0; j < 8; j++) { v[0][j] = v[1][j]; w[0][j] = w[1][j]; }
    }
}

/* The row as it was quantised before: the codes, and what the thread's group has */
template <Form F> __device__ __forceinline__ void one_group(const LinearArgs &a, int i, float (&t)[8]) {
    const size_t at = (size_t)i * a.x.ld;
    t[0] = t[1] = t[2] = 0.0f;
    if (i >= a.x.cols >> 5) return;
    load_one(a.x.delta + at, &t[0]);
    if (F == FORM_S1M || F == FORM_S2M) load_one(a.x.sum + at, &t[1]);
    if (F == FORM_S2M) load_one(a.x.low + at, &t[2]);
}
template <Form F> __device__ __forceinline__ void one_codes(const LinearArgs &a, const OneRow &o, OneLoads &l) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a.x.cols >> 4; i += ONE_THREADS) cp16(o.codes + i * 16, a.x.q + i * 16);
    asm volatile("cp.async.commit_group;");
    one_group<F>(a, threadIdx.x, l.t[0]);
}
template <class U> __device__ __forceinline__ void one_stage(const LinearArgs &a, const OneRow &o, OneLoads &l) {
    constexpr Form F = U::FORM;
#pragma unroll 1
    for (int i = threadIdx.x; i < a.segs * 8; i += ONE_THREADS, one_group<F>(a, i, l.t[0])) {
        put_scale(o.delta, i, l.t[0][0] * ONE_OVER<U>);
        if (F == FORM_S1M || F == FORM_S2M) o.sum[i] = l.t[0][1];
        if (F == FORM_S2M) o.low[i] = l.t[0][2];
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* y from +0, segments ascending, of N rows of p's at distance `apart`: all values of a round are under way before one is added. Of a sum from +0 a +0 more
 * changes nothing. */
template <int N> __device__ __forceinline__ void one_sum(const float *ps, int apart, int segs, float *y) {
    enum { ROUND = 16 / N };
#pragma unroll
    for (int i = 0; i < N; i++) y[i] = 0.0f;
#pragma unroll 1
    for (int s = 0; s < segs; s += ROUND, ps += 16 * ROUND) {
        float v[N][ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++)
#pragma unroll
            for (int i = 0; i < N; i++) v[i][k] = s + k < segs ? ps[i * apart + k * 16] : 0.0f;
#pragma unroll
        for (int k = 0; k < ROUND; k++)
#pragma unroll
            for (int i = 0; i < N; i++) y[i] = y[i] + v[i][k];
    }
}

/* Where the outputs of the first pass go, looked up while the input is on its way: one a thread, read by the same thread. -0 is added where there is no
 * bias: it changes nothing. y NULL: past the matrix */
enum { ONE_OUTS = 256 };
struct OneOut { float *y; float scale, bias; };

/* Sums of a pass of n tiles from `base` on, and what follows them. res: what the thread's output of the first pass is added to, or -0 */
template <class U, int TWO> __device__ __forceinline__ void one_finish(const OneWork<U, TWO> &work, int base, int n, const float *half, int pitch, const OneOut *outs, float res) {
    const LinearArgs &a = work.a;
    const int lane = threadIdx.x & 31;
    if (work.g.glu) { /* 32 outputs are four tiles; a warp takes the gate and the up of its 32 */
        for (int q = threadIdx.x >> 5; q < n >> 2; q += ONE_WARPS) {
            const int col = (!TWO || base + 4 * q < work.count ? work.first + (base >> 2) + q : work.last) * 32 + lane;
            float y[2];
            one_sum<2>(half + (4 * q + (lane >> 4)) * pitch + (lane & 15), 2 * pitch, a.segs, y);
            const float gate = linear_scaled(a.part[0], col, y[0]), v = (a.gelu ? bw_gelu(gate) : bw_silu(gate)) * linear_scaled(a.part[1], col, y[1]);
            if (col < a.part[0].n) a.part[0].y[col] = v;
            if (a.xo.q) quant_group(a.xo, 0, col >> 5, lane, v, a.fault, a.op);
        }
        return;
    }
    int i = threadIdx.x;
    if (!base && i < ONE_OUTS && i < n * 16) {
        const OneOut o = outs[i];
        float y;
        one_sum<1>(half + (i >> 4) * pitch + (i & 15), 0, a.segs, &y);
        y = y * o.scale;
        y = y + o.bias;
        if (o.y) *o.y = res + y;
        i += ONE_THREADS;
    }
#pragma unroll 1
    for (; i < n * 16; i += ONE_THREADS) {
        int tile, part = work.part_tile(base + (i >> 4), tile), col = tile * 16 + (i & 15);
        const LinearPart &p = a.part[part];
        if (col >= p.n) continue;
        const float r = linear_res(p, 0, col);
        float y;
        one_sum<1>(half + (i >> 4) * pitch + (i & 15), 0, a.segs, &y);
        linear_store(p, 0, col, y, r);
    }
}
template <class U, int TWO> __device__ __forceinline__ float one_res(const OneWork<U, TWO> &work, OneOut *outs) {
    const int i = threadIdx.x;
    float res = -0.0f;
    if (work.g.glu || i >= ONE_OUTS || i >= work.sums(min(work.g.tiles, work.count)) * 16) return res;
    int tile, part = work.part_tile(i >> 4, tile), col = tile * 16 + (i & 15);
    const LinearPart &p = work.a.part[part];
    const bool in = col < p.n;
    if (in && p.res) load_one(p.res + col, &res);
    outs[i] = {in ? p.y + col : NULL, p.scale, in && p.bias ? __ldg(p.bias + col) : -0.0f};
    return res;
}

/* Each warp reads another line of the arguments, so that they come to the constant cache at once and not one after the other as they are wanted */
__device__ __forceinline__ void one_arguments(const LinearArgs &a, const OneShape &g, int warp) {
    enum { WORDS = sizeof(LinearArgs) / 4, LINE = 16 };
    const uint32_t v = warp * LINE < WORDS ? ((const uint32_t *)&a)[warp * LINE] : (uint32_t)g.by_tiles[1];
    asm volatile("" ::"r"(v));
}

/* Persistent over its tiles. Warps fetch pairs of units ahead by bulk copies, each through its own ring, filled before the dependency wait; p's of a pass
 * stay in shared memory until all are there, then all threads add them. Passes alternate between two halves of that memory, so that one barrier a pass
 * suffices. Traffic: every weight byte once; activations once a block. */
template <class U, int TWO> __global__ void __launch_bounds__(ONE_THREADS, 1) k_linear_one(const __grid_constant__ LinearArgs a, const __grid_constant__ OneShape g) {
    extern __shared__ __align__(128) uint8_t sm[];
    constexpr int PAIR = 2 * U::UNIT, SLOT = PAIR_SLOT<U>;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, W = g.warps, D = g.depth;
    one_arguments(a, g, warp);
    const OneWork<U, TWO> work(a, g, warp);
    uint64_t *handed = (uint64_t *)(sm + ONE_BARS) - 1, *full = (uint64_t *)sm + warp * D;
    uint8_t *slot = sm + ONE_BARS + (size_t)warp * D * SLOT; /* slot and barrier in hand */
    uintptr_t src = 0; /* lane l: of the warp's pair k with k % 32 == l that is to be asked for next */
    const auto ask = [&](int k, uint8_t *to, uint64_t *bar) { /* the pair k into a slot; by the whole warp, k ascending */
        if (lane != (k & 31) || !src) return;
        const int bytes = src & 1 ? U::UNIT : PAIR;
        bar_expect(bar, bytes);
        bulk_copy_once(to, (const void *)(src & ~(uintptr_t)1), bytes, bar);
        bar_issued(bar);
    };
    int asked = 0;
    if (warp < W) {
        if (lane < D) bar_init(full + lane, 1);
        if (TWO && !threadIdx.x) bar_init(handed, 1);
        bar_fence();
        if (work.extra && !work.is_second() && !threadIdx.x) bar_expect(handed, work.extra * (work.pairs - work.mine) * 128);
        __syncwarp();
        src = work.early(lane);
        if (warp < g.early) { ask(0, slot, full); asked = __any_sync(~0u, src != 0); }
    }
    if (TWO) { __syncwarp(); two_here(); }
    pdl_trigger();
    const int pairs = work.pairs, pitch = pairs * 32 + 16; /* of a tile's p's; two tiles lie in separate banks */
    float *boxes = (float *)(sm + ONE_BARS + (size_t)W * D * SLOT), *parts = boxes + W * OneBox<OneActs<U>::SETS>::PLACES;
    uint8_t *codes = (uint8_t *)(parts + (size_t)(work.count + work.extra > g.tiles ? 2 : 1) * g.tiles * pitch);
    float *delta = (float *)(codes + pairs * 512), *sum = delta + pairs * 32, *low = sum + (U::FORM == FORM_S1M || U::FORM == FORM_S2M) * pairs * 16;
    OneOut *outs = (OneOut *)(low + (U::FORM == FORM_S2M) * pairs * 16);
    const OneRow row = {codes, delta, sum, low};
    OneLoads loads;
    if (a.norm.x) one_weights(a, loads);
    pdl_wait();
    if (a.norm.x) one_values(a, loads);
    else one_codes<U::FORM>(a, row, loads);
    if (warp < W && work.count + work.extra > g.tiles) src = work.source(lane);
    const float res = one_res(work, outs);
    float squares[2] = {0.0f, 0.0f};
    if (a.norm.x) one_squares(loads, squares);
    else one_stage<U>(a, row, loads);
    /* When the input is there, not right behind its loads: what the first blocks ask for fills the queues of the L2 with reads of memory, behind which the
     * input of the blocks that begin last would wait for microseconds. No sum of squares is below zero: it is looked at so that it is waited for. */
    if (warp < W && !(squares[0] < 0.0f))
#pragma unroll 1
        for (int k = asked; k < D; k++) ask(k, slot + k * SLOT, full + k);
    if (a.norm.x) one_norm<U>(a, row, parts, loads, squares);
    __syncthreads();
    if (TWO) two_ready();
    OneActs<U> x;
    const OneLane<U> o(boxes + (warp < W ? warp : 0) * OneBox<OneActs<U>::SETS>::PLACES, (uint32_t)lane * (uint32_t)(a.rows - 1)); /* one row */
    const float *deltas = delta + 4 * (o.lane & 3), *sums = sum + (o.lane >> 4) * 8, *lows = low + (o.lane >> 4) * 8;
    float *to_lane = parts + o.lane;
    int k = D, step = D > 1; /* the pair to ask for next; from the slot in hand to the other */
    uint32_t turns = D > 1 ? 0xccccccccu : 0xaaaaaaaau; /* lowest bit: parity of the slot in hand */
    for (int base = 0, pass = 0; base < work.count; base += g.tiles, pass++) {
        const int n = min(g.tiles, work.count - base), half = (pass & 1) * g.tiles * pitch;
        if (warp < W) {
            int i, to, pair, t;
            work.run(n, i, to);
            work.place(i, n, pass, pair, t);
#pragma unroll 1
            while (i < to) { /* tiles of one pair of segments */
                const bool own = !TWO || i < n * pairs, hands = !own && work.is_second();
                int m = min(to - i, (own ? n : n + work.extra) - t);
                x.load(codes + pair * 512, lane);
                float *to_p = to_lane + half + t * pitch + pair * 32;
                const float *d = deltas + pair * 32, *s = sums + pair * 16, *l = lows + pair * 16;
                i += m;
                pair++;
                t = own ? 0 : n;
                if (TWO && own && i == n * pairs) { pair = work.from_pair; t = n; }
#pragma unroll 1
                do {
                    bar_wait(full, turns & 1);
                    const auto next = [&]() {
                        __syncwarp(); /* the pair is in registers */
                        if (!(k & 31)) src = work.source(k + lane);
                        ask(k, slot, full); k++;
                    };
                    const float p = one_fold<U>(slot, x, d, s, l, o, [&]() { if (!ONE_LATE<U>) next(); });
                    if (hands) two_hand(to_p, p, handed);
                    else *to_p = p;
                    if (ONE_LATE<U>) next();
                    to_p += pitch;
                    slot += step * SLOT;
                    full += step;
                    step = -step;
                    turns = __funnelshift_r(turns, turns, 1);
                } while (--m);
            }
        }
        __syncthreads();
        if (work.extra && !work.is_second()) bar_wait(handed, 0);
        one_finish(work, base, work.sums(n), parts + half, pitch, outs, res);
    }
}

inline void one_divisors(OneShape &g, int two = 0) {
    const int fours = g.glu ? 4 : 1;
    g.by_warps = one_reciprocal(g.warps);
    for (int i = 0; i < 2; i++) {
        const int n = ((g.per + 1 - i) >> two) * fours;
        g.by_tiles[i] = one_reciprocal(n < g.tiles ? n : g.tiles);
    }
}
/* the most tiles (GLU: fours) that a block has of `all` over `blocks`, a shared one counted in both of the two */
inline int one_most(int all, int blocks, int two) {
    const int n = blocks >> two, most = (all + n - 1) / n;
    return (most + two) >> two;
}
/* bytes; `all` tiles (GLU: fours) over `blocks` */
template <class U> inline size_t one_shared(const OneShape &g, int segs, int blocks, int all, int two = 0) {
    const size_t pairs = (size_t)(segs + 1) / 2;
    const int most = one_most(all, blocks, two) * (g.glu ? 4 : 1);
    const size_t scales = 2 + (U::FORM == FORM_S1M || U::FORM == FORM_S2M) + (U::FORM == FORM_S2M), parts = (most > g.tiles ? 2 : 1) * (size_t)g.tiles * (pairs * 32 + 16) * 4;
    return (size_t)ONE_BARS + (size_t)g.warps * (g.depth * PAIR_SLOT<U> + OneBox<OneActs<U>::SETS>::PLACES * 4) + parts + pairs * (512 + scales * 64) + ONE_OUTS * sizeof(OneOut);
}

} // namespace bw
#endif
