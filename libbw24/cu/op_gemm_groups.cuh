/* LINEAR of many rows on sm_90a: the program of op_gemm.cuh, hence the same bits, with products by warp-group instructions. Weights come from registers, so that
 * a lane's scales stand in two registers a group; activations (op_gemm_codes.cuh) from shared memory. A group's products are scale times integer sum already,
 * as a float: one fma for each weight scale, and nothing is loaded for it but alpha where there are minima.
 *
 * A block has 128 outputs x 128 rows at a time and walks from one such place to the next. Two warp groups of 64 outputs each multiply and fold: while one
 * product of a group is folded the next one runs. One warp of the third group asks for what the rings take, three decode scales. p begins
 * anew every segment and y takes it in with the last group: y's first places stand in registers, the others in shared memory. Knows no launch. */
#ifndef BW24_CU_OP_GEMM_GROUPS_CUH
#define BW24_CU_OP_GEMM_GROUPS_CUH

#include "op_gemm_codes.cuh"

namespace bw {

/* units that this form serves */
template <class U> constexpr bool by_groups = U::FORM != FORM_S2M;

/* rows of a product; of 16 places of eight rows of y those in registers; measured */
template <class U> struct GroupShape {
    static constexpr int N = U::FORM == FORM_S2 ? 32 : 64, HELD = U::FORM == FORM_S2 ? 12 : U::FORM == FORM_S1 ? 16 : U::GP == 4 ? 8 : 6;
};

constexpr int GG_ACT_SLOTS = 4, GG_HELPERS = 3; /* a segment of activations; warps that decode scales */
template <class U> constexpr int GG_SLOTS = U::UNIT < 4400 ? 3 : 2; /* segments of weights */
constexpr int GG_WARPS = 8, GG_THREADS = GG_WARPS * 32 + 128;

/* rings: activations in stages of 64 columns, weights by segment; scales of a half, decoded. S: as GroupShape */
template <class U, class S = GroupShape<U>> struct alignas(1024) GroupShared {
    typedef U Unit;
    typedef S Shape;
    static constexpr int Y = GG_ROWS / 8 - S::HELD;
    static constexpr int STAGE = U::FORM == FORM_S1M ? GG_STAGE : GG_CODES;
    uint8_t b[GG_ACT_SLOTS][STAGE];
    uint8_t a[GG_SLOTS<U>][8][U::UNIT];
    float4 y[Y ? Y : 1][GG_WARPS * 32];
    float2 scale[2][4][128]; /* [half][group][output] */
    int slow;                /* rows of factor 0 are among the block's */
    uint64_t full_b[GG_ACT_SLOTS], free_b[GG_ACT_SLOTS], full_a[GG_SLOTS<U>], free_a[GG_SLOTS<U>], full_s[2], free_s[2];
};

/* a place in a ring and the parity that its barriers show when it is full for this turn */
template <int SLOTS> struct RingAt {
    int slot = 0, turn = 0;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) { slot = 0; turn ^= 1; }
    }
};

/* ---- a block's places: blockIdx.x, blockIdx.x + gridDim.x, ...; those of the same outputs follow each other. What a block asks of its places, here those
 * of LINEAR: their number and that of segments; of a place the units of the eight lanes that bring weights, its rows (op_gemm_codes.cuh) and how many stand
 * in a stage; open: the helpers begin it, factors of 0 set sh.slow. PAIRED: outputs of two matrices in turns of eight.
 * TILES: a place's rows are 32, 64, 96 or 128. */
struct GroupPlace { int part, tile, rows; }; /* tile: of 128 outputs; rows: block of 128 */
template <class U> struct LinearPlaces {
    typedef GroupShared<U> Shared;
    static constexpr bool PAIRED = false, TILES = false;
    const LinearArgs &a;
    const uint8_t *acts;
    __device__ __forceinline__ int blocks() const { return (a.rows + GG_ROWS - 1) / GG_ROWS; }
    __device__ __forceinline__ int segs() const { return a.segs; }
    __device__ __forceinline__ int count() const {
        int n = 0;
        for (int i = 0; i < a.n_parts; i++) n += (a.part[i].n + 127) / 128;
        n *= blocks();
        return (int)blockIdx.x < n ? (n - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
    }
    __device__ __forceinline__ GroupPlace place(int i) const {
        const int at = (int)blockIdx.x + i * (int)gridDim.x, all = blocks();
        GroupPlace p = {0, at / all, at % all};
        while (p.part + 1 < a.n_parts && p.tile >= (a.part[p.part].n + 127) / 128) p.tile -= (a.part[p.part++].n + 127) / 128;
        return p;
    }
    __device__ __forceinline__ const uint8_t *units(const GroupPlace &p, int lane) const {
        const LinearPart &part = a.part[p.part];
        return part.w + (size_t)min(p.tile * 8 + lane, 2 * part.blocks - 1) * a.segs * U::UNIT;
    }
    __device__ __forceinline__ const uint8_t *rows(const GroupPlace &p) const { return acts + group_rows(a.x, p.rows); }
    static __device__ __forceinline__ int height(const GroupPlace &) { return GG_ROWS; }
    __device__ __forceinline__ void open(Shared &sh, int i, int thread) const {
        pdl_wait();
        const float4 f = __ldcg((const float4 *)(group_factor(a.x, acts) + place(i).rows * GG_ROWS) + (thread & 31));
        if (f.x == 0.0f || f.y == 0.0f || f.z == 0.0f || f.w == 0.0f) sh.slow = 1;
    }
    template <int N> __device__ __forceinline__ void store(Shared &sh, int i, int warp, int lane, const float (&y)[N][4]) const;
};

/* ---- the warp that asks, ahead of those that fold, from one place to the next */
template <class U, class P> __device__ __forceinline__ void group_fetch(typename P::Shared &sh, const P &places) {
    const int lane = threadIdx.x & 31, n = places.count(), segs = places.segs();
    RingAt<GG_SLOTS<U>> w;
    int turn = 0;
    bool waited = false;
    for (int i = 0; i < n; i++) {
        const auto place = places.place(i);
        const int height = places.height(place), bytes = U::FORM == FORM_S1M ? height * GG_ROW : height * 128;
        const uint8_t *unit = places.units(place, lane), *rows = places.rows(place);
        for (int seg = 0; seg < segs; seg++, unit += U::UNIT, turn ^= 1) {
            bar_wait(&sh.free_a[w.slot], w.turn ^ 1);
            if (!lane) bar_expect(&sh.full_a[w.slot], 8 * U::UNIT);
            __syncwarp();
            if (lane < 8) bulk_copy(sh.a[w.slot][lane], unit, U::UNIT, &sh.full_a[w.slot]);
            w.next();
            if (!waited) pdl_wait();
            waited = true;
            for (int s = 0; s < GG_ACT_SLOTS; s++, rows += height * GG_ROW) {
                bar_wait(&sh.free_b[s], turn ^ 1);
                if (lane) continue;
                bar_expect(&sh.full_b[s], bytes);
                bulk_copy(sh.b[s], rows, bytes, &sh.full_b[s]);
            }
        }
    }
}

/* ---- the helpers: scales of a half for all, two groups of an output a thread at a time */
template <class U, class P> __device__ __forceinline__ void group_scales(typename P::Shared &sh, const P &places, int thread, int segs) {
    RingAt<GG_SLOTS<U>> ring;
    int left = 0, n = 0;
    for (int at = 0; at < segs; at++, ring.next()) {
        bar_wait(&sh.full_a[ring.slot], ring.turn);
        for (int h = 0; h < 2; h++) {
            if (h && !left--) { /* of a place's first segment */
                left = places.segs() - 1;
                places.open(sh, n++, thread);
            }
            bar_wait(&sh.free_s[h], ~at & 1);
            for (int i = thread; i < 256; i += 32 * GG_HELPERS) {
                const int out = i & 127, w = 2 * h + (i >> 7);
                float x[2], y[2];
                U::pair(U::fetch(sh.a[ring.slot][out >> 4] + 2 * U::HALF, out & 15, w), w, x, y);
#pragma unroll
                for (int e = 0; e < 2; e++)
                    sh.scale[h][2 * (i >> 7) + e][out] = make_float2(x[e] * GroupCodes<U>::BACK, U::FORM == FORM_S2 ? y[e] * GroupCodes<U>::BACK : y[e]);
            }
            __syncwarp();
            if (!(thread & 31)) bar_arrive(&sh.full_s[h]);
        }
        if (!(thread & 31)) bar_arrive(&sh.free_a[ring.slot]);
    }
}

/* ---- rows of factor 0: from int8 codes, slowly */
template <class U> __device__ __forceinline__ float group_plain(const uint8_t *w, int segs, const Acts &a, int out, int row) {
    float y = 0.0f;
    for (int seg = 0; seg < segs; seg++) {
        const uint8_t *unit = w + ((size_t)(out >> 4) * segs + seg) * U::UNIT;
        float p = 0.0f;
        for (int g = 0; g < 8 && seg * 8 + g < a.cols / 32; g++) {
            const int *q = (const int *)(a.q + (size_t)row * a.cols + (seg * 8 + g) * 32);
            int sum[2] = {0, 0};
            for (int t = 0; t < 4; t++) {
                const typename U::Pack pack = U::template load_pack<false>(unit + (g >> 2) * U::HALF, (g & 3) / U::GP, out >> 3 & 1, (out & 7) * 4 + t);
                uint32_t c[2];
                U::unpack(pack, (g & 3) % U::GP, c[0], c[1]);
                for (int e = 0; e < 2; e++)
                    for (int b = 0; b < 32; b += 8) sum[e] += (U::UNSIGNED ? (int)(c[e] >> b & 255) : (int)(int8_t)(c[e] >> b)) * (int8_t)(q[2 * t + e] >> b);
            }
            float x[2], m[2];
            U::pair(U::fetch(unit + 2 * U::HALF, out & 15, g >> 1), g >> 1, x, m);
            const size_t at = (size_t)(seg * 8 + g) * a.ld + row;
            const float d = a.delta[at];
            p = fmaf(x[g & 1], d * (float)(U::FORM == FORM_S2 ? sum[0] : sum[0] + sum[1]), p);
            if (U::FORM == FORM_S1M) p = fmaf(m[g & 1], a.sum[at], p);
            if (U::FORM == FORM_S2) p = fmaf(m[g & 1], d * (float)sum[1], p);
        }
        y = y + p;
    }
    return y;
}
template <class U> __device__ __forceinline__ void group_slow(const LinearPlaces<U> &places) {
    const LinearArgs &a = places.a;
    const int n = places.count();
    for (int i = 0; i < n; i++) {
        const GroupPlace place = places.place(i);
        const LinearPart &part = a.part[place.part];
        for (int k = threadIdx.x; k < 128 * GG_ROWS; k += 32 * GG_WARPS) {
            const int out = place.tile * 128 + (k & 127), row = place.rows * GG_ROWS + (k >> 7);
            if (out < part.n && row < a.rows && group_factor(a.x, places.acts)[row] == 0.0f)
                linear_store(part, row, out, group_plain<U>(part.w, a.segs, a.x, out, row), linear_res(part, row, out));
        }
    }
}

/* as gemm_store in pairs, times the rows' factors; rows of factor 0 are not written; eight values of the residual are on the way before one is used */
template <bool RES, int N> __device__ __forceinline__ void group_store(const LinearPart &part, const float *factor, int rows, int out, int row, const float (&y)[N][4]) {
    float bias[2];
    bool have[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        have[r] = out + 8 * r < part.n;
        bias[r] = part.bias && have[r] ? __ldg(part.bias + out + 8 * r) : 0.0f;
    }
    const size_t first = (size_t)row * part.n + out;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const float4 of = __ldcg((const float4 *)(factor + row + 8 * n));
        const float f[4] = {of.x, of.y, of.z, of.w};
        float res[8];
        bool mine[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = i >> 1 & 1, k = (i >> 2) * 2 + (i & 1);
            mine[i] = have[r] && row + 8 * n + k < rows && f[k] != 0.0f;
            res[i] = RES && mine[i] ? __ldcg(part.res + first + (size_t)(8 * n + k) * part.n + 8 * r) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = i >> 1 & 1, k = (i >> 2) * 2 + (i & 1);
            float v = y[n + (i >> 2)][i & 3] * f[k] * part.scale;
            if (part.bias) v = v + bias[r];
            if (RES) v = res[i] + v;
            if (mine[i]) part.y[first + (size_t)(8 * n + k) * part.n + 8 * r] = v;
        }
    }
}

template <class U> template <int N> __device__ __forceinline__ void LinearPlaces<U>::store(Shared &, int i, int warp, int lane, const float (&y)[N][4]) const {
    const GroupPlace at = place(i);
    const LinearPart &part = a.part[at.part];
    const float *factor = group_factor(a.x, acts);
    const int row = at.rows * GG_ROWS + 4 * (lane & 3), out = at.tile * 128 + warp * 16 + (lane >> 2);
    pdl_wait();
    if (part.res) group_store<true>(part, factor, a.rows, out, row, y);
    else group_store<false>(part, factor, a.rows, out, row, y);
}

/* the first T of N results */
template <int T, int N> __device__ __forceinline__ float (&first_of(float (&d)[N][4]))[T][4] { return *(float (*)[T][4])&d[0][0]; }

/* ---- a warp that folds: the segments of all its places, one after the other. A step is a product of a group with N rows; its results lie in t[step % 2], p's
 * places follow the rows. Only the first step's products are under way where the loop over segments turns back: the compiler would wait for each of more. */
template <class U, class P> struct GroupSums {
    typedef typename P::Shared::Shape Shape;
    static constexpr bool TWO = U::FORM == FORM_S2, SUMS = U::FORM == FORM_S1M;
    static constexpr int N = Shape::N / 8, ALL = GG_ROWS / 8, HELD = Shape::HELD;
    typename P::Shared &sh;
    int warp, lane;
    uint32_t k, l; /* for GroupCodes */
    uint64_t rows; /* the instruction's, of the first stage of activations */
    float zero;    /* 0 in a way that the compiler does not see */
    typename U::Pack pack[2];
    uint32_t w[2][2][4]; /* [odd groups][16 columns] */
    float t[2][TWO ? 2 : 1][N][4], p[ALL][4], held[HELD ? HELD : 1][4];

    float2 s[2][2];      /* [odd groups][row of two]: their scales */
    RingAt<GG_SLOTS<U>> ring;

    /* packs of weights that begin with group g of the segment in the ring */
    __device__ __forceinline__ void load(int g) {
        if (g % U::GP) return;
#pragma unroll
        for (int r = 0; r < 2; r++)
            pack[r] = U::template load_pack<true>(sh.a[ring.slot][P::PAIRED ? 4 * r + (warp >> 1) : warp] + (g >> 2) * U::HALF, (g & 3) / U::GP, P::PAIRED ? warp & 1 : r, lane);
    }
    /* as A registers */
    __device__ __forceinline__ void unpack(int g) {
#pragma unroll
        for (int r = 0; r < 2; r++) GroupCodes<U>::get(pack[r], (g & 3) % U::GP, r, w[g & 1], k, l);
    }
    __device__ __forceinline__ void load_scales(int g) {
#pragma unroll
        for (int r = 0; r < 2; r++) s[g & 1][r] = sh.scale[g >> 2][g & 3][P::PAIRED ? 64 * r + warp * 8 + (lane >> 2) : warp * 16 + (lane >> 2) + 8 * r];
    }
    /* asks for step j of group g, eight rows T times; two scales: halves apart */
    template <int T> __device__ __forceinline__ void products(int slot, int g, int j, float (&to)[TWO ? 2 : 1][N][4]) {
        uint32_t (&v)[2][4] = w[g & 1];
#pragma unroll
        for (int i = 0; i < 8; i++) asm volatile("" : "+r"((&v[0][0])[i])); /* all are there before the first product */
        const uint64_t at = P::TILES ? wg_rows(sh.b[slot], j * T * 1024 + (g & 1) * 64) : wg_further(rows, slot * P::Shared::STAGE + j * T * 1024 + (g & 1) * 64);
        wg_fence();
        wg_f16<true>(first_of<T>(to[0]), v[0], at);
        wg_f16<TWO>(first_of<T>(to[TWO]), v[1], wg_further(at, 32));
        wg_commit();
    }
    /* Step j of a group into p, or as p's first. ptxas takes two first sums for one and the same where zero, scale and registers of products have the same
     * names, though other products have been written since: the third and fourth step begin with a zero of another name. */
    template <bool FIRST, int T> __device__ __forceinline__ void fold(int j, const float2 (&s)[2], const float4 (&alpha)[T / 2], float (&from)[TWO ? 2 : 1][N][4]) {
        const float begin = j < 2 ? 0.0f : zero;
        wg_held(from[0]);
        if (TWO) wg_held(from[TWO]);
#pragma unroll
        for (int n = 0; n < T; n++) {
            const float4 z = alpha[n >> 1];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &q = p[j * T + n][i];
                const int r = i >> 1;
                float v = fmaf(s[r].x, from[0][n][i], FIRST ? begin : q);
                if (SUMS) v = fmaf(s[r].y, n & 1 ? (i & 1 ? z.w : z.z) : (i & 1 ? z.y : z.x), v);
                if (TWO) v = fmaf(s[r].y, from[TWO][n][i], v);
                q = v;
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * T; i++) asm volatile("" : "+f"((&p[j * T][0])[i])); /* done before the next products */
    }
    /* of group k, rows of the lane in places n and n + 1; height: rows of a stage */
    __device__ __forceinline__ float4 alpha_of(int slot, int k, int n, int height) const {
        return *(const float4 *)(sh.b[slot] + height * 128 + ((k & 1) * height + 8 * n + 4 * (lane & 3)) * 4);
    }
    __device__ __forceinline__ float4 &own_y(int n) const { return sh.y[n < HELD ? 0 : n - HELD][P::TILES ? threadIdx.x : warp * 32 + lane]; }
    __device__ __forceinline__ float4 y(int n) const { return n < HELD ? *(const float4 *)held[n < HELD ? n : 0] : own_y(n); }
    __device__ __forceinline__ void put_y(int n, float4 v) {
        if (n < HELD) *(float4 *)held[n < HELD ? n : 0] = v;
        else own_y(n) = v;
    }
    /* a place's results leave at its end, while the next one's first products run */
    __device__ __forceinline__ void store(const P &places, int i) {
        float to[ALL][4];
#pragma unroll
        for (int n = 0; n < ALL; n++) {
            *(float4 *)to[n] = y(n);
            put_y(n, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
        places.store(sh, i, warp, lane, to);
    }
    /* group k begins: the next one's weights are on their way to registers, from the next segment after the last group. there: its barrier was asked before */
    __device__ __forceinline__ void next_weights(int at, int k, int segs, bool there) {
        if ((k & 3) == 3) {
            __syncwarp();
            if (!lane) bar_arrive(&sh.free_s[k >> 2]);
            if (k == 7 && !lane) bar_arrive(&sh.free_a[ring.slot]);
        }
        if (k == 7) {
            if (at + 1 == segs) return;
            ring.next();
            if (!there) bar_wait(&sh.full_a[ring.slot], ring.turn);
        }
        load(k + 1 & 7);
    }
    __device__ __forceinline__ bool weights_there() const {
        RingAt<GG_SLOTS<U>> next = ring;
        next.next();
        return bar_test(&sh.full_a[next.slot], next.turn);
    }
    __device__ __forceinline__ void next_scales(int at, int k, int segs, bool there) {
        if (k == 7 && at + 1 == segs) return;
        if ((k & 3) == 3 && !there) bar_wait(&sh.full_s[~k >> 2 & 1], (k == 7 ? at + 1 : at) & 1);
        load_scales(k + 1 & 7);
    }
    __device__ __forceinline__ bool scales_there(int at, int k) const { return bar_test(&sh.full_s[~k >> 2 & 1], (k == 7 ? at + 1 : at) & 1); }
    /* y takes in what a step of the last group ended */
    template <int T> __device__ __forceinline__ void take(int j, const float4 (&old)[T]) {
#pragma unroll
        for (int n = 0; n < T; n++) {
            const float (&v)[4] = p[j * T + n];
            put_y(j * T + n, make_float4(old[n].x + v[0], old[n].y + v[1], old[n].z + v[2], old[n].w + v[3]));
        }
    }
    /* one whose place has STEPS products a group; the next one's first product may be of another place, whose rows are 8 N at least */
    template <int T, int STEPS> __device__ __forceinline__ void segment(int at, int segs) {
        bool weights = false, scales = false, acts = false; /* barriers are asked a step ahead, as their answers take long; tiles lack registers for that */
        products<T>(0, 0, 1, t[1]);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int slot = k >> 1;
            next_weights(at, k, segs, weights);
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                const int q = k * STEPS + j, then = (q + 2) / STEPS, step = (q + 2) % STEPS, of = then < 8 ? at : at + 1;
                float4 alpha[T / 2], old[T];
#pragma unroll
                for (int n = 0; n < T / 2; n++) alpha[n] = SUMS ? alpha_of(slot, k, j * T + 2 * n, STEPS * T * 8) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (j == STEPS - 1) next_scales(at, k, segs, scales);
                if (!P::TILES && j == STEPS - 2 && (k & 3) == 3) scales = scales_there(at, k);
                if (!P::TILES && j == STEPS - 1 && k == 6) weights = weights_there();
                const bool enters = !(then & 1) && !step && q < 8 * STEPS - 1; /* the first product of a stage follows */
                if (!P::TILES && enters) acts = bar_test(&sh.full_b[then >> 1 & 3], of & 1);
                if (q) wg_wait<1>();
                if (k) fold<false, T>(j, s[k & 1], alpha, t[q & 1]);
                else fold<true, T>(j, s[k & 1], alpha, t[q & 1]);
                if (j == STEPS - 1 && (k & 1)) {
                    __syncwarp();
                    if (!lane) bar_arrive(&sh.free_b[slot]);
                }
                if (q < 8 * STEPS - 1) {
                    if (!step) unpack(then & 7);
                    if (enters && of < segs && !acts) bar_wait(&sh.full_b[then >> 1 & 3], of & 1);
                    if (then < 8) products<T>(then >> 1, then, step, t[q & 1]);
                    else products<N>(0, 0, 0, t[q & 1]);
                }
                if (k < 7) continue;
#pragma unroll
                for (int n = 0; n < T; n++) old[n] = y(j * T + n);
                take<T>(j, old);
            }
        }
    }
    /* steps: products of N rows that a place takes */
    __device__ __forceinline__ void segment_of(int steps, int at, int segs) {
        wg_wait<0>();
        if constexpr (!P::TILES) segment<N, GG_ROWS / Shape::N>(at, segs);
        else if (steps == 1) segment<N / 2, 2>(at, segs);
        else if (steps == 2) segment<N, 2>(at, segs);
        else if (steps == 3) segment<N, 3>(at, segs);
        else segment<N, 4>(at, segs);
    }
    __device__ __forceinline__ void run(const P &places, int segs) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof t / 4); i++) (&t[0][0][0][0])[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < ALL; n++) put_y(n, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        bar_wait(&sh.full_a[0], 0);
        load(0);
        unpack(0);
        bar_wait(&sh.full_s[0], 0);
        load_scales(0);
        bar_wait(&sh.full_b[0], 0);
        products<N>(0, 0, 0, t[0]);
        int left = places.segs(), i = 0, steps = places.height(places.place(0)) / Shape::N;
        for (int at = 0; at < segs; at++) {
            segment_of(steps, at, segs);
            if (--left) continue;
            store(places, i++);
            left = places.segs();
            if (P::TILES && at + 1 < segs) steps = places.height(places.place(i)) / Shape::N;
        }
        wg_wait<0>();
        wg_held(t[0][0]);
    }
};

/* grid: at most a block a multiprocessor */
template <class U, class P> __device__ __forceinline__ bool group_block(const P &places) {
    extern __shared__ __align__(1024) uint8_t rings[];
    typename P::Shared &sh = *(typename P::Shared *)rings;
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (thread < GG_ACT_SLOTS) { bar_init(&sh.full_b[thread], 1); bar_init(&sh.free_b[thread], GG_WARPS); }
    else if (thread < GG_ACT_SLOTS + GG_SLOTS<U>) { bar_init(&sh.full_a[thread - GG_ACT_SLOTS], 1); bar_init(&sh.free_a[thread - GG_ACT_SLOTS], GG_WARPS + GG_HELPERS); }
    else if (thread < GG_ACT_SLOTS + GG_SLOTS<U> + 2) {
        const int i = thread - GG_ACT_SLOTS - GG_SLOTS<U>;
        bar_init(&sh.full_s[i], GG_HELPERS);
        bar_init(&sh.free_s[i], GG_WARPS);
    } else if (thread == GG_ACT_SLOTS + GG_SLOTS<U> + 2) sh.slow = 0;
    bar_fence();
    __syncthreads();
    pdl_trigger();
    const int segs = places.count() * places.segs();
    if (warp >= GG_WARPS) {
        if constexpr (P::TILES) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == GG_WARPS) group_fetch<U>(sh, places);
        else group_scales<U>(sh, places, thread - 32 * GG_WARPS - 32, segs);
        return false;
    }
    if constexpr (P::TILES) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); /* the helpers of tiles need more */
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    if (!segs) return false;
    /* A lane's number from an instruction that is not run again where registers are few, and a zero that is not the whole warp's: constants of the warp
     * would be moved to a register at each use. */
    const int lane = P::TILES ? thread & 31 : __shfl_sync(~0u, thread & 31, thread & 31);
    const uint32_t zero = P::TILES ? places.segs() >> 31 : lane >> 5;
    GroupSums<U, P> sums = {sh, warp, lane, GroupCodes<U>::K + zero, GroupCodes<U>::L + zero, wg_rows(sh.b[0], 0), __uint_as_float(zero)};
    sums.run(places, segs);
    return sh.slow;
}
template <class U> __device__ __forceinline__ void group_gemm(const LinearArgs &a, const uint8_t *acts) {
    const LinearPlaces<U> places = {a, acts};
    if (group_block<U>(places)) group_slow<U>(places);
}

/* the form that the card has */
template <class U> __global__ void __launch_bounds__(BW_WARP_GROUPS && by_groups<U> ? GG_THREADS : 256, 1) k_linear_gemm(LinearArgs a, const uint8_t *acts) {
#if BW_WARP_GROUPS
    if constexpr (by_groups<U>) return group_gemm<U>(a, acts);
    else
#endif
    gemm_block<U>(a);
}

} // namespace bw
#endif
