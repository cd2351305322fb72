/* What the ways to share out ATTEND of few rows over heads of 64 and 128 have in common (op_attend_team.cuh, op_attend_deep.cuh): the block's shapes and shared
 * memory, its queries, loads of pages, V in block formats. Knows no order of pieces. */
#ifndef BW24_CU_ATTEND_TEAM_CUH
#define BW24_CU_ATTEND_TEAM_CUH

#include "op_attend_few.cuh"

namespace bw {

enum { TEAM_WARPS = 4, TEAMS = 4, TEAM_DEEP = 2, TEAM_CHUNK = 16 }; /* warps of a team, teams, most slots of a ring; keys decoded at a time */

/* of op_attend_deep.cuh: queries; warps that score f16, columns of each; most slots of a ring; buffers of weights; pieces of K and V asked for before the
 * dependency wait: more would delay the queries; pieces of a block from which on it is faster than teams */
enum { DEEP_QUERIES = 4, DEEP_STAGES = 8, DEEP_COLUMNS = 16, DEEP_SLOTS = 8, DEEP_BUFFERS = 16, DEEP_EARLY = 4, DEEP_LEAST = 5 };
struct DeepBars { /* a slot of K, of V has come; a slot of K is left; a stage has done with a piece, the last one: it is scored (q8_0: has weights); its buffer is left */
    uint64_t keys[DEEP_SLOTS], values[DEEP_SLOTS], spare[DEEP_SLOTS], handed[DEEP_STAGES][DEEP_BUFFERS], freed[DEEP_BUFFERS];
};
struct DeepSlots { int keys, values; }; /* of the rings; 0: too little room */
typedef float DeepWeights[PIECE][DEEP_QUERIES]; /* of a piece, a key at deep_place(key): scores, then weights */

/* Shapes and shared memory of a block: this, then the teams' rings, at a multiple of 128 as bulk copies want it. EITHER: as AttendBlock's, the same kernel for
 * V in q5_1 and in q8_0.
 * A lane has CT columns of V and one of GROUPS shares of the queries. */
template <int K, int V, int D> struct alignas(128) TeamBlock {
    static constexpr bool INT_K = K == KV_Q8_0, DECODED_V = V == KV_Q8_0 || V == KV_Q5_1, EITHER = V == KV_Q5_1;
    static constexpr int FK = K, FV = V, DIM = D, QUERIES = 8, WARPS = TEAM_WARPS * TEAMS, THREADS = WARPS * 32, STEP = K == KV_F16 ? 8 : 16;
    static constexpr int KB = K == KV_F16 ? 2 * D : D, EIGHT = 8 * KB + (INT_K ? 32 : 16); /* bytes of a key; of eight, with what keeps lanes off each other's banks */
    static constexpr int SCALES = PIECE / 8 * EIGHT;                                      /* q8_0: place of the scales behind the codes */
    static constexpr int COLUMNS = D / TEAM_WARPS, CT = DECODED_V ? 4 : 2, LANES = COLUMNS / CT, GROUPS = 32 / LANES, PITCH = PIECE + 4;
    static_assert(D <= 128, "one segment, a share of the columns a warp");
    static constexpr int K_SLOT = SCALES + (INT_K ? PIECE * D / 16 : 0);
    float p[TEAMS][2][QUERIES][PITCH];          /* of a team's piece in hand and the one before: scores, then weights */
    float wide[DECODED_V ? WARPS : 1][DECODED_V ? TEAM_CHUNK : 1][COLUMNS];
    float q[INT_K ? 1 : QUERIES][D + 4];
    int8_t code[INT_K ? QUERIES : 1][D + 32];   /* words in the order 0 4 1 5 .. */
    float delta[D / 32][2 * QUERIES];           /* put_scale's twos */
    int row[QUERIES], head[QUERIES], lo[QUERIES], hi[QUERIES]; /* of each query: row of the step, head, visible keys (none: 0, 0) */
    int64_t at[QUERIES];                        /* where (n, l) of its piece 0 would lie */
    uint64_t full[TEAMS][2][TEAM_DEEP];         /* a slot of K, of V has come */
    DeepBars deep;
    __device__ __forceinline__ static int key_at(int j) { return (j >> 3) * EIGHT + (j & 7) * KB; }
    __host__ __device__ static constexpr int value_bytes(int format) { return kv_bytes(EITHER && format == KV_Q8_0 ? KV_Q8_0 : V, D); }
    /* op_attend_deep.cuh: warps that score int8, a piece each (slots of K are a multiple of them: whoever waits for a slot or a buffer has waited for the one
     * before it in the same place, so that a parity is enough); buffers of weights in the place of p */
    static constexpr bool DEEP = D == 128 && (INT_K || (K == KV_F16 && V == KV_F16));
    static constexpr int SCORERS = INT_K ? 4 : DEEP_STAGES;
    static_assert(DEEP_BUFFERS * sizeof(DeepWeights) <= sizeof p, "the teams' weights are not in use then");
    static_assert(!DEEP || DEEP_STAGES * DEEP_COLUMNS == D, "a share of the columns a stage");
    static constexpr DeepSlots deep_slots(int room, int value) {
        const int both = room / (K_SLOT + value), keys = INT_K ? (both >= 8 ? 8 : both >= 4 ? 4 : 0) : both >= 5 ? 6 : 0, left = keys ? (room - keys * K_SLOT) / value : 0;
        return {keys, INT_K ? keys : left < 5 ? left : 5};
    }
    __device__ __forceinline__ DeepWeights *weights() { return (DeepWeights *)p; }
    __device__ __forceinline__ uint8_t *rings() { return (uint8_t *)this + sizeof(TeamBlock); }
};

/* What the host says of a launch: heads that share a KV head; of one tile (`chunks` of them make the share); rows of a tile; teams, slots of their rings;
 * what a division by per (of numbers below 8) and by chunks (below 4096) is multiplied by, in 64ths and 65536ths; slots of K and of V for
 * op_attend_deep.cuh, 0: never */
struct TeamShape { int share, per, chunks, rows, teams, keys, values, by_per, by_chunks; DeepSlots deep; };
inline TeamShape team_shape(int share, int chunks, int queries, int teams, int keys, int values, DeepSlots deep) {
    const int per = share / chunks;
    return {share, per, chunks, queries / per, teams, keys, values, (64 + per - 1) / per, (65536 + chunks - 1) / chunks, deep};
}

/* What a team or a warp knows of a ring: its slots, the one in hand, parity of that one's barrier */
struct TeamRing {
    uint8_t *at;
    uint64_t *full;
    int slots, slot, phase, bytes;
    __device__ __forceinline__ uint8_t *here() const { return at + slot * bytes; }
    __device__ __forceinline__ void wait() const { bar_wait(full + slot, phase); }
    __device__ __forceinline__ void next() {
        if (++slot == slots) { slot = 0; phase ^= 1; }
    }
    __device__ __forceinline__ void forward(int n) {
        if ((slot += n) >= slots) { slot -= slots; phase ^= 1; }
    }
};

/* ---- loads, by one lane of a warp; ONCE: no other block reads them in this step. The page is the same in all lanes, and the compiler knows it:
 * else it sends each copy round a loop over lanes. */
__device__ __forceinline__ const uint8_t *team_page(const uint8_t *p) {
    const uint64_t v = (uint64_t)p;
    return (const uint8_t *)((uint64_t)__shfl_sync(~0u, (uint32_t)(v >> 32), 0) << 32 | __shfl_sync(~0u, (uint32_t)v, 0));
}
template <bool ONCE> __device__ __forceinline__ void team_copy(uint8_t *to, const uint8_t *from, int bytes, uint64_t *full) {
    if (ONCE) bulk_copy_once(to, from, bytes, full);
    else bulk_copy(to, from, bytes, full);
}
template <class S, bool ONCE = false> __device__ __forceinline__ void team_keys(uint8_t *to, uint64_t *full, const uint8_t *page, int lane) {
    if (lane) return;
    bar_expect(full, kv_bytes(S::FK, S::DIM));
#pragma unroll 1
    for (int i = 0; i < PIECE / 8; i++) team_copy<ONCE>(to + i * S::EIGHT, page + i * 8 * S::KB, 8 * S::KB, full);
    if (S::INT_K) team_copy<ONCE>(to + S::SCALES, page + PIECE * S::DIM, PIECE * S::DIM / 16, full);
    bar_issued(full);
}
template <class S, bool ONCE = false> __device__ __forceinline__ void team_values(uint8_t *to, uint64_t *full, const uint8_t *page, int bytes, int lane) {
    if (lane) return;
    bar_expect(full, bytes);
    team_copy<ONCE>(to, page + kv_bytes(S::FK, S::DIM), bytes, full);
    bar_issued(full);
}

template <class S> __device__ __forceinline__ void team_place(const AttendArgs &a, const StepRows &s, const AttendTile &t, int by_per, S &sh) {
    const int q = threadIdx.x;
    if (q < S::QUERIES) {
        const int n = q * by_per >> 6; /* q / per */
        const bool have = n < t.rows;
        const int row = have ? t.r0 + n : t.r0, end = (a.want ? s.want_pos[row] : s.pos[row]) + 1;
        sh.row[q] = row;
        sh.head[q] = t.h0 + q - n * t.per;
        sh.lo[q] = have && a.window && end > a.window ? end - a.window : 0;
        sh.hi[q] = have ? end : 0;
        sh.at[q] = ((int64_t)row * a.max_pieces - sh.lo[q] / PIECE) * a.heads + sh.head[q];
    }
    __syncthreads();
}

/* the queries, as codes made and checked by an earlier kernel or as floats; true where a value is not finite */
template <class S> __device__ __forceinline__ bool team_queries(const AttendArgs &a, S &sh, int queries) {
    constexpr int D = S::DIM;
    const int t = threadIdx.x;
    bool bad = false;
    if constexpr (S::INT_K) {
        constexpr int W = D / 16, CODES = S::QUERIES * W;
        if (t < CODES) {
            const int q = t / W, w = t % W;
            if (q < queries) *(uint4 *)(sh.code[q] + 16 * w) = __ldcg((const uint4 *)(a.xq.q + (size_t)sh.row[q] * a.xq.cols + sh.head[q] * D) + w);
        } else if (t < CODES + S::QUERIES * (D / 32)) {
            const int q = t % S::QUERIES, g = (t - CODES) / S::QUERIES;
            if (q < queries) put_scale(sh.delta[g], q, __ldcg(a.xq.delta + (size_t)(sh.head[q] * (D / 32) + g) * a.xq.ld + sh.row[q]));
        }
    } else if (t < S::QUERIES * D / 4 && t / (D / 4) < queries) {
        static_assert(S::QUERIES * D / 4 <= S::THREADS, "a value four a thread");
        const int q = t / (D / 4), w = t % (D / 4);
        const float4 v = __ldcg((const float4 *)(a.q + ((size_t)sh.row[q] * a.heads + sh.head[q]) * D) + w);
        bad = not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
        *(float4 *)&sh.q[q][4 * w] = v;
    }
    return bad;
}

/* ---- V in a block format: four columns of a key as they are stored */
struct TeamQuad { uint32_t code, high, scale; };
/* where a lane's quad of its first key stands: codes, high bits (q5_1), scales; all parts have keys at equal distances */
template <int F, int D> struct TeamStored {
    static constexpr int Q5 = F == KV_Q5_1, CODE = Q5 ? D / 2 : D, HIGH = D / 8, SCALE = Q5 ? D / 8 : D / 16;
    const uint8_t *code, *high, *scale;
    __device__ __forceinline__ TeamStored(const uint8_t *v, int j, int c) {
        const int w = c & 7;
        code = v + j * CODE + (Q5 ? c * 2 : (c >> 3) * 32 + (w < 4 ? 2 * w : 2 * w - 7) * 4);
        high = v + PIECE * CODE + j * HIGH + (c >> 1);
        scale = v + PIECE * (CODE + (Q5 ? HIGH : 0)) + j * SCALE + (c >> 3) * (Q5 ? 4 : 2);
    }
    __device__ __forceinline__ void forward(int keys) { code += keys * CODE; high += keys * HIGH; scale += keys * SCALE; }
    __device__ __forceinline__ TeamQuad quad(int keys) const { /* of the key so much further */
        TeamQuad r;
        if constexpr (Q5) { r.code = *(const uint16_t *)(code + keys * CODE); r.high = high[keys * HIGH]; r.scale = *(const uint32_t *)(scale + keys * SCALE); }
        else { r.code = *(const uint32_t *)(code + keys * CODE); r.high = 0; r.scale = *(const uint16_t *)(scale + keys * SCALE); }
        asm volatile("" : "+r"(r.code), "+r"(r.high), "+r"(r.scale)); /* whole registers from here on */
        return r;
    }
};
/* Values of a quad: a code's byte becomes the bits of the float 2^23 + code. mask, spread: of the quad's half of a byte of high bits. */
template <int V> __device__ __forceinline__ float4 team_decoded(const TeamQuad &r, uint32_t mask, uint32_t spread) {
    float x[4];
    if constexpr (V == KV_Q5_1) {
        const float2 dm = __half22float2(as_half2(r.scale));
        const uint32_t q = ((r.code | r.code << 12) & 0x0f0f0f0fu) | (((r.high & mask) * spread) & 0x10101010u); /* bytes: codes 0, 2, 1, 3 */
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fmaf(dm.x, __uint_as_float(prmt(q, 0x4b000000u, 0x7440 + ((i & 1) << 1 | i >> 1))) - 8388608.0f, dm.y);
    } else {
        const uint32_t q = r.code ^ 0x80808080u;
        const float d = half_of(r.scale, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = d * (__uint_as_float(prmt(q, 0x4b000000u, 0x7440 + i)) - 8388736.0f);
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}

} // namespace bw
#endif
