/* One piece of ATTEND by one block: loads, scores, softmax, products with V, in the order of docs/numerics.md §6. A score lies in p[key][query]
 * and is replaced by its exponential by the thread that reads it. Knows no order of pieces. */
#ifndef BW24_CU_ATTEND_PIECE_CUH
#define BW24_CU_ATTEND_PIECE_CUH

#include "attend.cuh"
#include "op_linear.cuh"

namespace bw {

constexpr float UNSEEN = -1.0f, FRESH = -2.0f; /* in place of a factor of the merge: no key of the piece is seen; its first piece */

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr bool SMALL_CARD = true; /* 100 KB of shared memory a multiprocessor: one block of many queries */
#else
constexpr bool SMALL_CARD = false;
#endif

/* V's format of the block for V in f: large heads with many queries lost 3 to 5 % by sharing one */
__host__ __device__ constexpr bool either_v(int d, int queries) { return d <= 128 || (d == 256 && queries == 8); }
__host__ __device__ constexpr int block_v(int f, int d, int queries) { return f == KV_Q8_0 && either_v(d, queries) ? KV_Q5_1 : f; }

/* Shapes and shared memory of a block. A warp has QT queries x (32 CT) columns of o; heads of 256 take their columns in two passes.
 * EITHER: a block over V in q5_1 serves q8_0 as well, whichever AttendArgs.kv.v says: they differ in how V is decoded, once a piece. */
template <int K, int V, int D, int NQ, int T, bool SPLIT_> struct alignas(16) AttendBlock {
    static constexpr bool SPLIT = SPLIT_, INT_K = K == KV_Q8_0, DECODED_V = V == KV_Q8_0 || V == KV_Q5_1, /* block formats: V as f32 first */
                          EITHER = V == KV_Q5_1 && either_v(D, NQ);
    static constexpr int FK = K, FV = V, DIM = D, QUERIES = NQ, THREADS = T, WARPS = T / 32, CH = D < 128 ? D : 128, PASSES = D / CH;
    static constexpr int WQ = NQ > 8 ? NQ / 8 : CH < 128 ? 2 : 1, WC = WARPS / WQ, QT = NQ / WQ, CT = CH / (32 * WC);
    static constexpr int KB = K == KV_F16 ? 2 * D : D, K_PITCH = INT_K ? D + 32 : KB + 16; /* no bank conflicts */
    static constexpr int SG = NQ / WARPS < 4 ? NQ / WARPS : 4;                            /* queries that a warp's softmax takes at a time */
    static constexpr int BLOCKS = SPLIT && NQ == 8 ? 4 : SMALL_CARD ? 1 : SPLIT ? 3 : 2;  /* an SM, as far as registers go */
    uint8_t k[PIECE * K_PITCH];
    uint8_t kd[INT_K ? PIECE * D / 16 : 16];
    float wide[DECODED_V ? PIECE : 1][CH];
    float q[INT_K ? 1 : NQ][D + 4];
    int8_t code[INT_K ? NQ : 1][D + 32];          /* words in the order 0 4 1 5 .. */
    float delta[D / 32][INT_K ? 2 * NQ : NQ];     /* put_scale's twos */
    float p[PIECE][NQ + 4];
    int row[NQ], head[NQ], lo[NQ], hi[NQ];        /* of each query: row of the step, head, visible keys (none: 0, 0) */
    int from[NQ], to[NQ];                         /* its visible keys of the piece in hand */
    float n[NQ], l[NQ], N[NQ], L[NQ];             /* of the piece; of all pieces so far */
    float2 factor[NQ];                            /* of O and o in the merge */
    int64_t at[NQ];                               /* SPLIT: where (n, l) of its piece 0 would lie */
    uint64_t full[2];                             /* K, V of the piece have come */
    alignas(16) uint8_t v[kv_bytes(EITHER ? KV_Q8_0 : V, D)]; /* last: a launch asks for as much as its format takes */
    static size_t bytes(int format) { return sizeof(AttendBlock) - (EITHER && format != KV_Q8_0 ? kv_bytes(KV_Q8_0, D) - kv_bytes(V, D) : 0); }
    static __device__ __forceinline__ int first_query() { return (threadIdx.x >> 5) / WC * QT; }
    static __device__ __forceinline__ int first_column() { return ((threadIdx.x >> 5) % WC * 32 + (threadIdx.x & 31)) * CT; }
};

template <int N> __device__ __forceinline__ void put_columns(float *to, const float *v) {
    if constexpr (N == 4) *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
    else if constexpr (N == 2) *(float2 *)to = make_float2(v[0], v[1]);
    else *to = v[0];
}
template <int N> __device__ __forceinline__ void get_columns(const float *from, float *v) {
    if constexpr (N == 4) { float4 x = *(const float4 *)from; v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w; }
    else if constexpr (N == 2) { float2 x = *(const float2 *)from; v[0] = x.x; v[1] = x.y; }
    else v[0] = *from;
}

/* ---- decoding */
__device__ __forceinline__ float2 e4m3x2(uint32_t v) {
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)v, __NV_E4M3);
    return __half22float2(*(__half2 *)&h);
}
__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *(__half2 *)&v; }

/* 8 values of a row of float K from its byte on */
template <int F> __device__ __forceinline__ void floats8(const uint8_t *k, float *w) {
    if constexpr (F == KV_F16) {
        uint4 v = *(const uint4 *)k;
#pragma unroll
        for (int i = 0; i < 4; i++) { float2 f = __half22float2(as_half2(word_of(v, i))); w[2 * i] = f.x; w[2 * i + 1] = f.y; }
    } else {
        uint2 v = *(const uint2 *)k;
#pragma unroll
        for (int i = 0; i < 4; i++) { float2 f = e4m3x2(((i & 2) ? v.y : v.x) >> (16 * (i & 1)) & 0xffff); w[2 * i] = f.x; w[2 * i + 1] = f.y; }
    }
}
/* N values of a row of float V from column d on */
template <int F, int D, int N> __device__ __forceinline__ void float_columns(const uint8_t *v, int j, int d, float *x) {
    const uint8_t *at = v + (j * D + d) * (F == KV_F16 ? 2 : 1);
    if constexpr (N == 1) x[0] = F == KV_F16 ? half_at(at) : e4m3_value(*at);
    else {
        uint32_t w[2];
        if (F == KV_F16) {
            w[0] = *(const uint32_t *)at;
            if (N == 4) { uint2 u = *(const uint2 *)at; w[0] = u.x; w[1] = u.y; }
        } else if (N == 4) { uint32_t u = *(const uint32_t *)at; w[0] = u & 0xffff; w[1] = u >> 16; }
        else w[0] = *(const uint16_t *)at;
#pragma unroll
        for (int i = 0; i < N / 2; i++) { float2 f = F == KV_F16 ? __half22float2(as_half2(w[i])) : e4m3x2(w[i]); x[2 * i] = f.x; x[2 * i + 1] = f.y; }
    }
}

/* columns 4 c .. 4 c + 3 of key j of V in a block format. A code's byte becomes the bits of the float 2^23 + code. */
template <int V, int D> __device__ __forceinline__ float4 v_quad(const uint8_t *v, int j, int c) {
    float x[4];
    if constexpr (V == KV_Q5_1) {
        uint32_t lo = *(const uint16_t *)(v + j * (D / 2) + c * 2), high = v[PIECE * D / 2 + j * (D / 8) + (c >> 1)] >> (4 * (c & 1)) & 15;
        float2 dm = __half22float2(*(const __half2 *)(v + PIECE * D * 5 / 8 + (j * (D / 32) + (c >> 3)) * 4));
        /* bytes: codes 0, 2, 1, 3 */
        uint32_t q = ((lo | lo << 12) & 0x0f0f0f0fu) | ((high * 0x02080410u) & 0x10101010u);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fmaf(dm.x, __uint_as_float(prmt(q, 0x4b000000u, 0x7440 + ((i & 1) << 1 | i >> 1))) - 8388608.0f, dm.y);
    } else {
        int w = c & 7;
        uint32_t q = *(const uint32_t *)(v + j * D + (c >> 3) * 32 + (w < 4 ? 2 * w : 2 * w - 7) * 4) ^ 0x80808080u;
        float d = half_at(v + PIECE * D + (j * (D / 32) + (c >> 3)) * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = d * (__uint_as_float(prmt(q, 0x4b000000u, 0x7440 + i)) - 8388736.0f);
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}
template <int F, class S> __device__ __forceinline__ void decode_format(S &sh, int pass) {
    constexpr int QUADS = S::CH / 4, KEYS = S::THREADS / QUADS;
    const int c = threadIdx.x % QUADS, j0 = threadIdx.x / QUADS;
#pragma unroll (S::SPLIT ? 8 : 4)
    for (int j = 0; j < PIECE; j += KEYS) *(float4 *)&sh.wide[j0 + j][4 * c] = v_quad<F, S::DIM>(sh.v, j0 + j, pass * QUADS + c);
}
template <class S> __device__ __forceinline__ void decode_values(S &sh, int format, int pass) {
    if (S::EITHER && format == KV_Q8_0) decode_format<KV_Q8_0>(sh, pass);
    else decode_format<S::FV>(sh, pass);
}

/* ---- loads */
template <class S> __device__ __forceinline__ void place_queries(const AttendArgs &a, const StepRows &s, const AttendTile &t, S &sh) {
    __syncthreads(); /* the tile before is done */
    const int q = threadIdx.x;
    if (q < S::QUERIES) {
        bool have = q / t.per < t.rows;
        int row = have ? t.r0 + q / t.per : t.r0, end = (a.want ? s.want_pos[row] : s.pos[row]) + 1;
        sh.row[q] = row;
        sh.head[q] = t.h0 + q % t.per;
        sh.lo[q] = have && a.window && end > a.window ? end - a.window : 0;
        sh.hi[q] = have ? end : 0;
        sh.at[q] = ((int64_t)row * a.max_pieces - sh.lo[q] / PIECE) * a.heads + sh.head[q];
        sh.N[q] = -INFINITY;
        sh.L[q] = 0.0f;
        sh.from[q] = PIECE; /* stays so for queries that are not there */
        sh.to[q] = 0;
        sh.factor[q] = make_float2(UNSEEN, 0.0f);
    }
    __syncthreads();
}

/* the queries, as codes made and checked by an earlier kernel or as floats; true where a value is not finite */
template <class S> __device__ __forceinline__ bool load_queries(const AttendArgs &a, S &sh) {
    constexpr int D = S::DIM, NQ = S::QUERIES;
    bool bad = false;
    if constexpr (S::INT_K) {
        for (int k = threadIdx.x; k < NQ * D / 16; k += S::THREADS) {
            int q = k / (D / 16), w = k % (D / 16);
            *(uint4 *)(sh.code[q] + 16 * w) = __ldcg((const uint4 *)(a.xq.q + (size_t)sh.row[q] * a.xq.cols + sh.head[q] * D) + w);
        }
        for (int k = threadIdx.x; k < NQ * D / 32; k += S::THREADS) {
            int q = k % NQ, g = k / NQ;
            put_scale(sh.delta[g], q, __ldcg(a.xq.delta + (size_t)(sh.head[q] * (D / 32) + g) * a.xq.ld + sh.row[q]));
        }
    } else {
#pragma unroll 4
        for (int k = threadIdx.x; k < NQ * D / 4; k += S::THREADS) {
            int q = k / (D / 4), w = k % (D / 4);
            float4 v = sh.hi[q] ? __ldcg((const float4 *)(a.q + ((size_t)sh.row[q] * a.heads + sh.head[q]) * D) + w) : make_float4(0, 0, 0, 0);
            bad |= not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
            *(float4 *)&sh.q[q][4 * w] = v;
        }
    }
    return bad;
}

template <class S> __device__ __forceinline__ void load_keys(S &sh, const uint8_t *page) {
    const int lane = threadIdx.x & 31;
    if (threadIdx.x >= 32) return;
    if (!lane) {
        bar_expect(&sh.full[0], kv_bytes(S::FK, S::DIM));
        if (S::INT_K) bulk_copy(sh.kd, page + PIECE * S::DIM, PIECE * S::DIM / 16, &sh.full[0]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PIECE; j += 32) bulk_copy(sh.k + (j + lane) * S::K_PITCH, page + (j + lane) * S::KB, S::KB, &sh.full[0]);
    bar_issued_by_warp(&sh.full[0]);
}
template <class S> __device__ __forceinline__ void load_values(S &sh, int format, const uint8_t *page) {
    if (threadIdx.x) return;
    const int bytes = S::EITHER && format == KV_Q8_0 ? kv_bytes(KV_Q8_0, S::DIM) : kv_bytes(S::FV, S::DIM);
    bar_expect(&sh.full[1], bytes);
    bulk_copy(sh.v, page + kv_bytes(S::FK, S::DIM), bytes, &sh.full[1]);
    bar_issued(&sh.full[1]);
}

/* ---- scores of 64 keys x NQ queries, times c */
/* a group of two keys (codes k0 and k1, scales s0 and s1) x two queries (codes b, scales d0 and d1) of a lane, folded into p */
__device__ __forceinline__ void score_group(float (&p)[4], uint2 k0, uint2 k1, uint2 b, float s0, float s1, const GroupScale &d0, const GroupScale &d1) {
    int m[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
    mma32(m, k0.x, k1.x, k0.y, k1.y, b.x, b.y);
    p[0] = fmaf(s0, d0.of(m[0]), p[0]);
    p[1] = fmaf(s0, d1.of(m[1]), p[1]);
    p[2] = fmaf(s1, d0.of(m[2]), p[2]);
    p[3] = fmaf(s1, d1.of(m[3]), p[3]);
}
/* by int8 tensor cores: a warp has 16 keys and NT of the eights of queries, every (WARPS / 4)th */
template <class S, int NT> __device__ __forceinline__ void score_tiles(S &sh, float c) {
    constexpr int groups = S::DIM / 32, STEP = S::WARPS / 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3, r0 = (warp & 3) * 16 + gid, r1 = r0 + 8;
    const uint16_t *kd = (const uint16_t *)sh.kd;
    float p[NT][4], y[NT][4];
#pragma unroll
    for (int i = 0; i < NT * 4; i++) (&p[0][0])[i] = (&y[0][0])[i] = 0.0f;
#pragma unroll (S::DIM > 256 ? 2 : groups)
    for (int g = 0; g < groups; g++) {
        if (S::DIM > 256 && g && g % 8 == 0) /* the next segment */
#pragma unroll
            for (int i = 0; i < NT * 4; i++) { (&y[0][0])[i] = (&y[0][0])[i] + (&p[0][0])[i]; (&p[0][0])[i] = 0.0f; }
        uint2 k0 = *(const uint2 *)(sh.k + r0 * S::K_PITCH + g * 32 + tig * 8), k1 = *(const uint2 *)(sh.k + r1 * S::K_PITCH + g * 32 + tig * 8);
        float s0 = half_of(kd[r0 * groups + g], 0), s1 = half_of(kd[r1 * groups + g], 0);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const int q0 = (t * STEP + (warp >> 2)) * 8;
            uint2 b = *(const uint2 *)(sh.code[q0 + gid] + g * 32 + tig * 8);
            const float4 d = *(const float4 *)&sh.delta[g][2 * q0 + 4 * tig];
            const GroupScale d0(d.x, d.z), d1(d.y, d.w);
            score_group(p[t], k0, k1, b, s0, s1, d0, d1);
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int q = (t * STEP + (warp >> 2)) * 8 + 2 * tig;
        *(float2 *)&sh.p[r0][q] = make_float2((y[t][0] + p[t][0]) * c, (y[t][1] + p[t][1]) * c);
        *(float2 *)&sh.p[r1][q] = make_float2((y[t][2] + p[t][2]) * c, (y[t][3] + p[t][3]) * c);
    }
}
template <class S> __device__ __forceinline__ void scores_int8(S &sh, int queries, float c) {
    constexpr int NT = S::QUERIES / 8 / (S::WARPS / 4);
    if (NT > 1 && S::SPLIT && queries <= 8) score_tiles<S, 1>(sh, c); /* rows of different sequences: few queries a tile */
    else score_tiles<S, NT>(sh, c);
}

/* by fma over columns ascending: a thread has KT keys x QS queries */
template <class S> __device__ __forceinline__ void scores_float(S &sh, int queries, float c) {
    constexpr int PER = PIECE * S::QUERIES / S::THREADS, KT = PER >= 8 ? 4 : 2, QS = PER / KT, KEYS = PIECE / KT;
    const int j = threadIdx.x % KEYS, q0 = threadIdx.x / KEYS * QS;
    if (q0 >= queries) return;
    float p[KT][QS], y[KT][QS];
#pragma unroll
    for (int i = 0; i < KT * QS; i++) (&p[0][0])[i] = (&y[0][0])[i] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < S::DIM; d += 8) {
        if (S::DIM > 256 && d && d % 256 == 0) /* the next segment */
#pragma unroll
            for (int i = 0; i < KT * QS; i++) { (&y[0][0])[i] = (&y[0][0])[i] + (&p[0][0])[i]; (&p[0][0])[i] = 0.0f; }
        float w[KT][8];
#pragma unroll
        for (int e = 0; e < KT; e++) floats8<S::FK>(sh.k + (j + KEYS * e) * S::K_PITCH + d * (S::KB / S::DIM), w[e]);
#pragma unroll
        for (int q = 0; q < QS; q++) {
            float x[8];
            get_columns<4>(&sh.q[q0 + q][d], x);
            get_columns<4>(&sh.q[q0 + q][d + 4], x + 4);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int e = 0; e < KT; e++) p[e][q] = fmaf(w[e][i], x[i], p[e][q]);
        }
    }
#pragma unroll
    for (int e = 0; e < KT; e++) {
        float u[QS];
#pragma unroll
        for (int q = 0; q < QS; q++) u[q] = (y[e][q] + p[e][q]) * c;
        put_columns<QS>(&sh.p[j + KEYS * e][q0], u);
    }
}

/* v, or +0 where the mask is 0 */
__device__ __forceinline__ float keep(float v, uint32_t mask) { return __uint_as_float(__float_as_uint(v) & mask); }

/* ---- softmax: p in place of the scores, (n, l) of every query, factors of the merge. Keys that a query does not see get +0. */
template <class S> __device__ __forceinline__ void softmax_queries(S &sh, int b, int q0, bool *bad) {
    constexpr int SG = S::SG;
    const int lane = threadIdx.x & 31;
    float u[2][SG], m[SG], l[SG];
    uint32_t worst = 0;
    get_columns<SG>(&sh.p[lane][q0], u[0]);
    get_columns<SG>(&sh.p[lane + 32][q0], u[1]);
#pragma unroll
    for (int i = 0; i < SG; i++) { /* masks, not branches: the queries' chains of shuffles and exponentials overlap */
        const int j0 = sh.lo[q0 + i] - b * PIECE, j1 = sh.hi[q0 + i] - b * PIECE;
        const uint32_t in0 = lane >= j0 && lane < j1 ? ~0u : 0, in1 = lane + 32 >= j0 && lane + 32 < j1 ? ~0u : 0;
        worst = max(worst, max(magnitude(u[0][i]) & in0, magnitude(u[1][i]) & in1));
        m[i] = ceilf(warp_max(fmaxf(in0 ? u[0][i] : -INFINITY, in1 ? u[1][i] : -INFINITY)));
        u[0][i] = keep(bw_exp2(keep(u[0][i] - m[i], in0)), in0);
        u[1][i] = keep(bw_exp2(keep(u[1][i] - m[i], in1)), in1);
        l[i] = warp_tree(u[0][i] + u[1][i]);
    }
    *bad |= worst >= 0x7f800000u;
    put_columns<SG>(&sh.p[lane][q0], u[0]);
    put_columns<SG>(&sh.p[lane + 32][q0], u[1]);
    if (lane >= SG) return;
    float n = m[0], sum = l[0];
#pragma unroll
    for (int i = 1; i < SG; i++)
        if (lane == i) { n = m[i]; sum = l[i]; }
    const int q = q0 + lane, j0 = max(0, sh.lo[q] - b * PIECE), j1 = min(PIECE, sh.hi[q] - b * PIECE);
    const bool any = j0 < j1;
    sh.from[q] = any ? j0 : PIECE;
    sh.to[q] = any ? j1 : 0;
    if (S::SPLIT) { sh.n[q] = n; sh.l[q] = sum; return; }
    if (!any) { sh.factor[q] = make_float2(UNSEEN, 0.0f); return; }
    const float N = sh.N[q], L = sh.L[q], M = fmaxf(N, n), f = N == -INFINITY ? FRESH : pow2_factor(N - M), g = pow2_factor(n - M);
    sh.factor[q] = make_float2(f, g);
    sh.L[q] = f == FRESH ? sum : fmaf(sum, g, L * f);
    sh.N[q] = M;
}
template <class S> __device__ __forceinline__ void softmax_piece(S &sh, int b, int queries, bool *bad) {
    const int q0 = (threadIdx.x >> 5) * (S::QUERIES / S::WARPS);
#pragma unroll
    for (int i = 0; i < S::QUERIES / S::WARPS; i += S::SG)
        if (!S::SPLIT || q0 + i < queries) softmax_queries(sh, b, q0 + i, bad);
}

/* ---- o of this thread's queries and columns */
template <class S> __device__ __forceinline__ void value_columns(const S &sh, int pass, int j, float (&v)[S::CT]) {
    const int c0 = S::first_column();
    if constexpr (S::DECODED_V) get_columns<S::CT>(&sh.wide[j][c0], v);
    else float_columns<S::FV, S::DIM, S::CT>(sh.v, j, pass * S::CH + c0, v);
}
/* weights of the first QN queries and columns of a key, read from where they stand */
template <class S, int QN> __device__ __forceinline__ void key_values(const float *weights, const uint8_t *values, float (&p)[QN], float (&v)[S::CT]) {
#pragma unroll
    for (int q = 0; q < QN; q += 4) get_columns<4>(weights + q, p + q);
    if constexpr (S::DECODED_V) get_columns<S::CT>((const float *)values, v);
    else float_columns<S::FV, S::DIM, S::CT>(values, 0, 0, v);
}
template <class S, int QN> __device__ __forceinline__ void key_products(const float (&p)[QN], const float (&v)[S::CT], float (&o)[S::QT][S::CT]) {
#pragma unroll
    for (int q = 0; q < QN; q++)
#pragma unroll
        for (int e = 0; e < S::CT; e++) o[q][e] = fmaf(p[q], v[e], o[q][e]);
}
/* all keys of the piece: one is read while the one before is multiplied */
template <class S, int QN> __device__ __forceinline__ void values_whole(const S &sh, int pass, float (&o)[S::QT][S::CT]) {
    constexpr int P = S::QUERIES + 4, V = S::DECODED_V ? (int)sizeof sh.wide[0] : S::DIM * (S::FV == KV_F16 ? 2 : 1), COLUMN = S::DECODED_V ? 4 : V / S::DIM;
    const float *weights = &sh.p[0][S::first_query()];
    const uint8_t *values = (S::DECODED_V ? (const uint8_t *)sh.wide[0] : sh.v) + (S::first_column() + (S::DECODED_V ? 0 : pass * S::CH)) * COLUMN;
    float p[2][QN], v[2][S::CT];
    key_values<S, QN>(weights, values, p[0], v[0]);
#pragma unroll 1
    for (int j = 0; j < PIECE - 2; j += 2, weights += 2 * P, values += 2 * V) {
        key_values<S, QN>(weights + P, values + V, p[1], v[1]);
        key_products<S, QN>(p[0], v[0], o);
        key_values<S, QN>(weights + 2 * P, values + 2 * V, p[0], v[0]);
        key_products<S, QN>(p[1], v[1], o);
    }
    key_values<S, QN>(weights + P, values + V, p[1], v[1]);
    key_products<S, QN>(p[0], v[0], o);
    key_products<S, QN>(p[1], v[1], o);
}
/* the first QN queries, which see the same keys [j0, j1); WHOLE: all of the piece */
template <class S, int QN, bool WHOLE> __device__ __forceinline__ void values_same(const S &sh, int pass, int j0, int j1, float (&o)[S::QT][S::CT]) {
    if constexpr (WHOLE && !S::SPLIT && QN * S::CT >= 32) return values_whole<S, QN>(sh, pass, o);
    const int q0 = S::first_query();
    if (WHOLE) { j0 = 0; j1 = PIECE; }
#pragma unroll (QN * S::CT < 32 ? 8 : S::SPLIT ? 4 : 2)
    for (int j = j0; j < j1; j++) {
        float p[QN], v[S::CT];
#pragma unroll
        for (int q = 0; q < QN; q += 4) get_columns<4>(&sh.p[j][q0 + q], p + q);
        value_columns(sh, pass, j, v);
#pragma unroll
        for (int q = 0; q < QN; q++)
#pragma unroll
            for (int e = 0; e < S::CT; e++) o[q][e] = fmaf(p[q], v[e], o[q][e]);
    }
}
/* queries that see different keys, one after the other: the +0 of a key that one does not see would lose a -0 */
template <class S> __device__ __forceinline__ void values_edge(const S &sh, int pass, float (&o)[S::QT][S::CT]) {
    const int q0 = S::first_query();
#pragma unroll
    for (int q = 0; q < S::QT; q++) {
        const int to = sh.to[q0 + q];
#pragma unroll 4
        for (int j = sh.from[q0 + q]; j < to; j++) {
            float v[S::CT], p = sh.p[j][q0 + q];
            value_columns(sh, pass, j, v);
#pragma unroll
            for (int e = 0; e < S::CT; e++) o[q][e] = fmaf(p, v[e], o[q][e]);
        }
    }
}

} // namespace bw
#endif
