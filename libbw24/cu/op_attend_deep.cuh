/* ATTEND (docs/numerics.md §6) of one row at depth, for at most four heads of 128 that share a KV head. A block is alone on its multiprocessor; its pieces (64 keys)
 * come through one ring of K and one of V. Warps have two parts, which meet by mbarriers of single pieces, never the whole block:
 *   scores:   f16: eight warps in a row, each with 16 columns of all queries in its registers, a key a lane. A piece's sums lie in its buffer and go from warp to
 *             warp, so that what shared memory gives is a key once and the sums eight times, where a lane a key would read all queries for every key.
 *             q8_0: a warp a piece, 16 keys at a time on int8 matrix units, the queries' codes in registers.
 *   products: a warp has a piece: all of its columns, four a lane, for all queries. A value is read and decoded once.
 * What holds a kernel of so few queries is the bytes that shared memory gives to registers (128 a cycle): 16 of a sum's operands a fma before, 3 to 6 here.
 * Owns the mapping of work; refuses to know rows of different positions. */
#ifndef BW24_CU_OP_ATTEND_DEEP_CUH
#define BW24_CU_OP_ATTEND_DEEP_CUH

#include "attend_team.cuh"

namespace bw {

/* pieces first, first + step, .. of the block; `count` of them */
struct DeepTile { uint8_t *const *pages; size_t head; int first, step, count, queries; };
__device__ __forceinline__ const uint8_t *deep_page(const DeepTile &t, int c) { return c < t.count ? t.pages[t.first + c * t.step] + t.head : nullptr; }

/* where a key's scores and weights stand: eight lanes side by side have keys of eight groups of eight */
__device__ __forceinline__ constexpr int deep_place(int j) { return (j >> 2 & 1) * 32 + (j & 3) * 8 + (j >> 3); }

/* ---- scores in f16: columns DEEP_COLUMNS * stage .. of all pieces, keys team_key_of(lane) and those + 4 */
template <class S> __device__ __forceinline__ void deep_scores_float(S &sh, const DeepTile &t, TeamRing k, int stage) {
    const int lane = threadIdx.x & 31;
    const int mine = S::key_at((lane & 7) << 3 | lane >> 3) + stage * DEEP_COLUMNS * 2;
    float q[DEEP_QUERIES][DEEP_COLUMNS];
#pragma unroll
    for (int i = 0; i < DEEP_QUERIES; i++)
#pragma unroll
        for (int e = 0; e < DEEP_COLUMNS; e += 4) get_columns<4>(&sh.q[i][stage * DEEP_COLUMNS + e], q[i] + e);
#pragma unroll 1
    for (int c = 0; c < t.count; c++, k.forward(1)) {
        const int buffer = c % DEEP_BUFFERS, turn = c / DEEP_BUFFERS;
        float *to = sh.weights()[buffer][lane];
        float sum[2][DEEP_QUERIES] = {};
        uint4 raw[2][2];
        k.wait();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 *from = (const uint4 *)(k.here() + mine + h * 4 * S::KB);
            raw[h][0] = from[0];
            raw[h][1] = from[1];
        }
        if (stage) {
            bar_wait(&sh.deep.handed[stage - 1][buffer], turn & 1);
#pragma unroll
            for (int h = 0; h < 2; h++) get_columns<4>(to + h * 32 * DEEP_QUERIES, sum[h]);
        } else if (turn) bar_wait(&sh.deep.freed[buffer], (turn - 1) & 1);
#pragma unroll
        for (int e = 0; e < DEEP_COLUMNS / 2; e++)
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float2 f = __half22float2(as_half2(word_of(raw[h][e >> 2], e & 3)));
#pragma unroll
                    for (int i = 0; i < DEEP_QUERIES; i++) sum[h][i] = fmaf(x ? f.y : f.x, q[i][2 * e + x], sum[h][i]);
                }
#pragma unroll
        for (int h = 0; h < 2; h++) put_columns<4>(to + h * 32 * DEEP_QUERIES, sum[h]);
        __syncwarp();
        if (!lane) {
            bar_arrive(&sh.deep.handed[stage][buffer]);
            if (stage == DEEP_STAGES - 1) bar_arrive(&sh.deep.spare[k.slot]);
        }
    }
}

/* ---- softmax of the four queries, by the warp that scores in q8_0, by the one that multiplies in f16: weights in place of scores, +0 where a key is not seen;
 * (n, l) to memory. A lane has keys j = 8 (lane mod 4) + lane / 4 and j + 32; the sum's tree goes over j, each step with fewer queries a lane. */
template <class S>
__device__ __forceinline__ bool deep_softmax(const AttendArgs &a, const S &sh, const DeepTile &t, int c, int lane, DeepWeights &p) {
    const int b = t.first + c * t.step, j0 = sh.lo[0] - b * PIECE, j1 = sh.hi[0] - b * PIECE, j = (lane & 3) << 3 | lane >> 2;
    const uint32_t in0 = j >= j0 && j < j1 ? ~0u : 0, in1 = j + 32 >= j0 && j + 32 < j1 ? ~0u : 0;
    float *at0 = p[deep_place(j)], *at1 = at0 + 4 * DEEP_QUERIES;
    float u0[DEEP_QUERIES], u1[DEEP_QUERIES], n[DEEP_QUERIES], l[DEEP_QUERIES];
    get_columns<4>(at0, u0);
    get_columns<4>(at1, u1);
    uint32_t worst = 0;
#pragma unroll
    for (int i = 0; i < DEEP_QUERIES; i++) { /* masks, not branches: the queries' chains of shuffles and exponentials overlap */
        const uint32_t there = i < t.queries ? ~0u : 0, m0 = in0 & there, m1 = in1 & there;
        u0[i] = (0.0f + u0[i]) * a.c;
        u1[i] = (0.0f + u1[i]) * a.c;
        worst = max(worst, max(magnitude(u0[i]) & m0, magnitude(u1[i]) & m1));
        n[i] = ceilf(warp_max(fmaxf(m0 ? u0[i] : -INFINITY, m1 ? u1[i] : -INFINITY)));
        u0[i] = keep(bw_exp2(keep(u0[i] - n[i], m0)), m0);
        u1[i] = keep(bw_exp2(keep(u1[i] - n[i], m1)), m1);
        l[i] = u0[i] + u1[i];
    }
    put_columns<4>(at0, u0);
    put_columns<4>(at1, u1);
    const bool two = lane & 2, one = lane & 1; /* which queries the lane goes on with: j's bits 4 and 3 are the lane's 1 and 0 */
    const float x0 = (two ? l[2] : l[0]) + __shfl_xor_sync(~0u, two ? l[0] : l[2], 2), x1 = (two ? l[3] : l[1]) + __shfl_xor_sync(~0u, two ? l[1] : l[3], 2);
    float sum = (one ? x1 : x0) + __shfl_xor_sync(~0u, one ? x0 : x1, 1);
#pragma unroll
    for (int o = 16; o >= 4; o >>= 1) sum = sum + __shfl_xor_sync(~0u, sum, o);
    const float high = one ? (two ? n[3] : n[1]) : (two ? n[2] : n[0]);
    if (lane < t.queries) a.nl[sh.at[lane] + (int64_t)b * a.heads] = make_float2(high, sum);
    return worst >= 0x7f800000u;
}

/* ---- scores in q8_0: a quarter of the keys at a time, 8 gid + member and those + 4, x 8 queries, of which four are there */
template <class S> __device__ __forceinline__ bool deep_scores_int8(const AttendArgs &a, S &sh, const DeepTile &t, TeamRing k, int scorer) {
    constexpr int groups = S::DIM / 32;
    static_assert(groups == 4, "scales of a key are 8 bytes");
    const int lane = threadIdx.x & 31, gid = lane >> 2, tig = lane & 3;
    bool bad = false;
    uint2 code[groups];
    float4 delta[groups];
#pragma unroll
    for (int g = 0; g < groups; g++) { code[g] = *(const uint2 *)(sh.code[gid] + g * 32 + tig * 8); delta[g] = *(const float4 *)&sh.delta[g][4 * tig]; }
#pragma unroll 1
    for (int c = scorer; c < t.count; c += S::SCORERS, k.forward(S::SCORERS)) {
        const uint8_t *at = k.here() + gid * S::EIGHT + tig * 8, *scales = k.here() + S::SCALES + 8 * gid * groups * 2;
        DeepWeights &weights = sh.weights()[c % DEEP_BUFFERS];
        float(*to)[DEEP_QUERIES] = weights + gid;
        if (c >= DEEP_BUFFERS) bar_wait(&sh.deep.freed[c % DEEP_BUFFERS], (c / DEEP_BUFFERS - 1) & 1);
        k.wait();
#pragma unroll 1
        for (int member = 0; member < 4; member++) {
            const uint2 h0 = *(const uint2 *)(scales + member * groups * 2), h1 = *(const uint2 *)(scales + (member + 4) * groups * 2);
            float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int g = 0; g < groups; g++) {
                const uint2 k0 = *(const uint2 *)(at + member * S::KB + g * 32), k1 = *(const uint2 *)(at + (member + 4) * S::KB + g * 32);
                const float s0 = half_of(g < 2 ? h0.x : h0.y, g & 1), s1 = half_of(g < 2 ? h1.x : h1.y, g & 1);
                const GroupScale d0(delta[g].x, delta[g].z), d1(delta[g].y, delta[g].w);
                score_group(p, k0, k1, code[g], s0, s1, d0, d1);
            }
            if (tig < DEEP_QUERIES / 2) {
                put_columns<2>(&to[8 * member][2 * tig], p);
                put_columns<2>(&to[8 * member + 32][2 * tig], p + 2);
            }
        }
        __syncwarp();
        if (!lane) bar_arrive(&sh.deep.spare[k.slot]);
        bad |= deep_softmax(a, sh, t, c, lane, weights);
        __syncwarp();
        if (!lane) bar_arrive(&sh.deep.handed[DEEP_STAGES - 1][c % DEEP_BUFFERS]);
    }
    return bad;
}

/* ---- products: o of four queries and columns 4 lane .. 4 lane + 3 */
__device__ __forceinline__ void deep_fold(const float (&x)[DEEP_QUERIES], const float (&v)[4], float (&o)[DEEP_QUERIES][4]) {
#pragma unroll
    for (int q = 0; q < DEEP_QUERIES; q++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[q][e] = fmaf(x[q], v[e], o[q][e]);
}
/* where a lane's columns stand, by format of V: what is read of a key, and its values */
template <class S, int F> struct DeepValues {
    typedef uint2 Raw;
    const uint8_t *at;
    __device__ __forceinline__ DeepValues(const uint8_t *v, int j, int lane) : at(v + (j * S::DIM + 4 * lane) * 2) { static_assert(F == KV_F16, "four columns are eight bytes"); }
    __device__ __forceinline__ void forward(int keys) { at += keys * S::DIM * 2; }
    __device__ __forceinline__ Raw read(int k) const { return *(const uint2 *)(at + k * S::DIM * 2); }
    __device__ __forceinline__ void values(const Raw &r, float (&v)[4]) const {
        const float2 a = __half22float2(as_half2(r.x)), b = __half22float2(as_half2(r.y));
        v[0] = a.x; v[1] = a.y; v[2] = b.x; v[3] = b.y;
    }
};
template <class S, int F> struct DeepBlocks {
    typedef TeamQuad Raw;
    TeamStored<F, S::DIM> at;
    uint32_t mask, spread;
    __device__ __forceinline__ DeepBlocks(const uint8_t *v, int j, int lane) : at(v, j, lane), mask(lane & 1 ? 0xf0 : 0x0f), spread(lane & 1 ? 0x00208041u : 0x02080410u) {}
    __device__ __forceinline__ void forward(int keys) { at.forward(keys); }
    __device__ __forceinline__ Raw read(int k) const { return at.quad(k); }
    __device__ __forceinline__ void values(const Raw &r, float (&v)[4]) const {
        const float4 x = team_decoded<F>(r, mask, spread);
        v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w;
    }
};
template <class S> struct DeepValues<S, KV_Q5_1> : DeepBlocks<S, KV_Q5_1> { using DeepBlocks<S, KV_Q5_1>::DeepBlocks; };
template <class S> struct DeepValues<S, KV_Q8_0> : DeepBlocks<S, KV_Q8_0> { using DeepBlocks<S, KV_Q8_0>::DeepBlocks; };

/* keys j0 .. j1 - 1, all of them if WHOLE; the next four are read before these are multiplied, their weights before they are decoded */
template <class S, int F, bool WHOLE>
__device__ __forceinline__ void deep_columns(const uint8_t *values, const DeepWeights &p, int j0, int j1, int lane, float (&o)[DEEP_QUERIES][4]) {
    const int f1 = WHOLE ? PIECE / 4 : (j1 + 3) / 4;
    int f = WHOLE ? 0 : j0 / 4;
    DeepValues<S, F> at(values, 4 * f, lane);
    typename DeepValues<S, F>::Raw raw[4];
#pragma unroll
    for (int k = 0; k < 4; k++) raw[k] = at.read(k);
#pragma unroll(WHOLE ? 2 : 1)
    for (; f < f1; f++) {
        float x[4][DEEP_QUERIES], v[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) get_columns<4>(p[(f & 1) * 32 + (f >> 1) + k * 8], x[k]);
#pragma unroll
        for (int k = 0; k < 4; k++) at.values(raw[k], v[k]);
        at.forward(f + 1 < f1 ? 4 : 0); /* past the end: any */
#pragma unroll
        for (int k = 0; k < 4; k++) raw[k] = at.read(k);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (WHOLE || (4 * f + k >= j0 && 4 * f + k < j1)) deep_fold(x[k], v[k], o);
    }
}
template <class S, int F> __device__ __forceinline__ void deep_piece(const uint8_t *values, const DeepWeights &p, int j0, int j1, int lane, float (&o)[DEEP_QUERIES][4]) {
    if (j1 - j0 == PIECE) deep_columns<S, F, true>(values, p, j0, j1, lane, o);
    else deep_columns<S, F, false>(values, p, j0, j1, lane, o);
}
/* pieces worker, worker + v.slots, ..: a slot is one warp's */
template <class S> __device__ __forceinline__ bool deep_products(const AttendArgs &a, S &sh, const DeepTile &t, TeamRing v, int worker) {
    const int lane = threadIdx.x & 31;
    bool bad = false;
#pragma unroll 1
    for (int c = worker; c < t.count; c += v.slots, v.phase ^= 1) {
        const int b = t.first + c * t.step, j0 = max(0, sh.lo[0] - b * PIECE), j1 = min((int)PIECE, sh.hi[0] - b * PIECE), buffer = c % DEEP_BUFFERS;
        const uint8_t *next = deep_page(t, c + v.slots);
        DeepWeights &p = sh.weights()[buffer];
        float o[DEEP_QUERIES][4] = {};
        bar_wait(&sh.deep.handed[DEEP_STAGES - 1][buffer], c / DEEP_BUFFERS & 1);
        if (!S::INT_K) {
            bad |= deep_softmax(a, sh, t, c, lane, p);
            __syncwarp();
        }
        v.wait();
        if (S::EITHER && a.kv.v == KV_Q8_0) deep_piece<S, KV_Q8_0>(v.here(), p, j0, j1, lane, o);
        else deep_piece<S, S::FV>(v.here(), p, j0, j1, lane, o);
        __syncwarp();
        if (!lane) bar_arrive(&sh.deep.freed[buffer]);
        if (next) team_values<S, true>(v.here(), v.full + v.slot, team_page(next), v.bytes, lane);
#pragma unroll
        for (int q = 0; q < DEEP_QUERIES; q++)
            if (q < t.queries) put_columns<4>(a.o + (sh.at[q] + (int64_t)b * a.heads) * S::DIM + 4 * lane, o[q]);
    }
    return bad;
}

/* K of the pieces behind the ring's first, by a warp that does nothing else: nine copies take a thousand cycles beside busy warps */
template <class S> __device__ __forceinline__ void deep_fetch(S &sh, const DeepTile &t, TeamRing k) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int c = k.slots; c < t.count; c++, k.forward(1)) {
        const uint8_t *page = deep_page(t, c);
        bar_wait(&sh.deep.spare[k.slot], k.phase);
        team_keys<S, true>(k.here(), k.full + k.slot, team_page(page), lane);
    }
}

/* The block's pieces: the first ones are asked for before the dependency wait, a warp each; the step's own key is in the last piece, which is none of them. After
 * it the queries come before the other pieces. */
template <class S> __device__ __forceinline__ bool deep_tile(const AttendArgs &a, S &sh, const DeepTile &t, DeepSlots slots) {
    static_assert(DEEP_EARLY < DEEP_LEAST, "the last piece is asked for after the dependency wait");
    const int lane = threadIdx.x & 31, warp = few_warp(), value = S::value_bytes(a.kv.v);
    TeamRing k = {sh.rings(), sh.deep.keys, slots.keys, 0, 0, S::K_SLOT}, v = {sh.rings() + slots.keys * S::K_SLOT, sh.deep.values, slots.values, 0, 0, value};
    const uint8_t *page = deep_page(t, warp);
    auto ask = [&] {
        const uint8_t *from = team_page(page);
        if (warp < slots.keys) team_keys<S, true>(k.at + warp * k.bytes, k.full + warp, from, lane);
        if (warp < slots.values) team_values<S, true>(v.at + warp * v.bytes, v.full + warp, from, v.bytes, lane);
    };
    const bool early = warp < DEEP_EARLY; /* there are that many */
    if (early) ask();
    pdl_wait();
    const bool bad = team_queries(a, sh, t.queries);
    if (page && !early) ask();
    __syncthreads();
    if (warp == S::WARPS - 1) {
        deep_fetch(sh, t, k);
        return bad;
    }
    if (warp >= S::SCORERS) {
        v.slot = warp - S::SCORERS;
        return v.slot < slots.values ? bad | deep_products(a, sh, t, v, v.slot) : bad;
    }
    if constexpr (S::INT_K) {
        k.slot = warp;
        return bad | deep_scores_int8(a, sh, t, k, warp);
    }
    deep_scores_float(sh, t, k, warp);
    return bad;
}

} // namespace bw
#endif
