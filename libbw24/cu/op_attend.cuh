/* ATTEND (docs/numerics.md §6) for the formats and head sizes that models use. A warp works alone: it takes a piece (64 keys of one KV head, one
 * contiguous part of a page) for a tile of up to 8 queries that read that head, so that a value is decoded once for all of them.
 *   SPLIT: few rows. The pieces of a tile are shared out among warps; (n, l, o) of each goes to memory, k_attend_merge folds them in order.
 *   else:  many rows. A warp walks the pieces of its tile in order and keeps the running (N, L, O) in registers.
 * Owns the mapping of work; refuses to know sequences beyond a row's page table. */
#ifndef BW24_CU_OP_ATTEND_CUH
#define BW24_CU_OP_ATTEND_CUH

#include "attend.cuh"
#include "op_linear.cuh"

namespace bw {

__device__ __forceinline__ float2 e4m3x2(uint32_t v) {
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)v, __NV_E4M3);
    return __half22float2(*(__half2 *)&h);
}
__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *(__half2 *)&v; }

/* four 5-bit codes: as f16 1024 + q and 1024 + 16 q, brought down by one exact fma a pair */
__device__ __forceinline__ void q5_quad(uint32_t lo, uint32_t hb, float d, float m, float *x) {
    const __half2 mul = __floats2half2_rn(1.0f, 0.0625f), sub = __floats2half2_rn(-1024.0f, -64.0f);
    uint32_t w = lo | lo << 16;
    uint32_t a = ((w & 0x00f0000fu) | 0x64006400u) | ((hb * 0x800010u) & 0x01000010u);
    uint32_t b = (((w >> 8) & 0x00f0000fu) | 0x64006400u) | ((hb * 0x200004u) & 0x01000010u);
    float2 p = __half22float2(__hfma2(as_half2(a), mul, sub)), q = __half22float2(__hfma2(as_half2(b), mul, sub));
    x[0] = fmaf(d, p.x, m); x[1] = fmaf(d, p.y, m); x[2] = fmaf(d, q.x, m); x[3] = fmaf(d, q.y, m);
}

/* 4 values of V: columns 4 c .. 4 c + 3 of key j */
template <int V, int D> __device__ __forceinline__ void v_quad(const uint8_t *v, int j, int c, float *x) {
    if (V == KV_Q5_1) {
        uint32_t lo = *(const uint16_t *)(v + j * (D / 2) + c * 2), hb = v[PIECE * D / 2 + j * (D / 8) + (c >> 1)] >> (4 * (c & 1)) & 15;
        float2 dm = __half22float2(*(const __half2 *)(v + PIECE * D * 5 / 8 + (j * (D / 32) + (c >> 3)) * 4));
        q5_quad(lo, hb, dm.x, dm.y, x);
    } else if (V == KV_Q8_0) {
        int w = c & 7;
        uint32_t q = *(const uint32_t *)(v + j * D + (c >> 3) * 32 + (w < 4 ? 2 * w : 2 * w - 7) * 4) ^ 0x80808080u;
        float d = half_at(v + PIECE * D + (j * (D / 32) + (c >> 3)) * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = d * (__uint_as_float(prmt(q, 0x4b000000u, 0x7440 + i)) - 8388736.0f);
    } else if (V == KV_F16) {
        uint2 w = *(const uint2 *)(v + (j * D + 4 * c) * 2);
        float2 a = __half22float2(as_half2(w.x)), b = __half22float2(as_half2(w.y));
        x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y;
    } else {
        uint32_t w = *(const uint32_t *)(v + j * D + 4 * c);
        float2 a = e4m3x2(w & 0xffff), b = e4m3x2(w >> 16);
        x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y;
    }
}

/* shared memory of one warp */
template <int K, int V, int D, int NQ> struct alignas(16) AttendShared {
    static constexpr int KB = K == KV_F16 ? 2 * D : D, PITCH = K == KV_Q8_0 ? D + 32 : KB + 16; /* rows of K: no bank conflicts */
    uint8_t k[PIECE * PITCH];
    uint8_t kd[K == KV_Q8_0 ? PIECE * D / 16 : 16];
    uint8_t v[kv_bytes(V, D)];
    float q[K == KV_Q8_0 ? 1 : D][NQ];            /* float K: queries, transposed */
    int8_t code[K == KV_Q8_0 ? NQ : 1][D];        /* q8_0 K: words in the order 0 4 1 5 .. */
    float delta[D / 32][NQ];
    float u[NQ][PIECE];
    float p[PIECE][NQ];
    int row[NQ], head[NQ], lo[NQ], hi[NQ];        /* of each query: row of the step, head, visible keys (none: 0, 0) */
    int from[NQ], to[NQ];                         /* its visible keys of the piece in hand */
    uint64_t full[2];                             /* K, V of the piece have come */
};

/* a tile: queries q = (row r0 + q / per, head h0 + q % per), rows of one sequence in order */
struct AttendTile { int r0, rows, h0, per; };

template <int K, int V, int D, int NQ>
__device__ __forceinline__ void place_queries(const AttendArgs &a, const StepRows &s, const AttendTile &t, AttendShared<K, V, D, NQ> &sh, int lane) {
    if (lane < NQ) {
        bool have = lane / t.per < t.rows;
        int row = have ? t.r0 + lane / t.per : t.r0, end = (a.want ? s.want_pos[row] : s.pos[row]) + 1;
        sh.row[lane] = row;
        sh.head[lane] = t.h0 + lane % t.per;
        sh.lo[lane] = have && a.window && end > a.window ? end - a.window : 0;
        sh.hi[lane] = have ? end : 0;
    }
    __syncwarp();
}

template <int K, int V, int D, int NQ> __device__ __forceinline__ bool load_queries(const AttendArgs &a, AttendShared<K, V, D, NQ> &sh, int lane) {
    bool bad = false;
    if constexpr (K == KV_Q8_0) { /* made and checked by an earlier kernel */
        constexpr int WORDS = D / 16;
#pragma unroll
        for (int i = 0; i < (NQ * WORDS + 31) / 32; i++) {
            int k = i * 32 + lane, q = k / WORDS;
            if (q < NQ) ((uint4 *)sh.code)[k] = __ldcg((const uint4 *)(a.xq.q + (size_t)sh.row[q] * a.xq.cols + sh.head[q] * D) + k % WORDS);
        }
#pragma unroll
        for (int i = 0; i < (NQ * D / 32 + 31) / 32; i++) {
            int k = i * 32 + lane, q = k % NQ, g = k / NQ;
            if (g < D / 32) sh.delta[g][q] = __ldcg(a.xq.delta + (size_t)(sh.head[q] * (D / 32) + g) * a.xq.ld + sh.row[q]);
        }
        __syncwarp();
        return false;
    }
    constexpr int STEP = D == 256 ? 4 : NQ; /* queries whose loads are in flight together */
#pragma unroll
    for (int q0 = 0; q0 < NQ; q0 += STEP) {
        float v[STEP][D / 32];
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            const float *x = a.q + ((size_t)sh.row[q0 + i] * a.heads + sh.head[q0 + i]) * D;
            bool have = sh.hi[q0 + i] > 0;
#pragma unroll
            for (int g = 0; g < D / 32; g++) v[i][g] = have ? __ldcg(x + g * 32 + lane) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < STEP; i++)
#pragma unroll
            for (int g = 0; g < D / 32; g++) {
                bad |= not_finite(v[i][g]);
                sh.q[g * 32 + lane][q0 + i] = v[i][g];
            }
    }
    __syncwarp();
    return bad;
}

template <int K, int V, int D, int NQ> __device__ __forceinline__ void load_keys(AttendShared<K, V, D, NQ> &sh, const uint8_t *page, int lane) {
    typedef AttendShared<K, V, D, NQ> S;
    if (!lane) {
        bar_expect(&sh.full[0], kv_bytes(K, D));
        if (K == KV_Q8_0) bulk_copy(sh.kd, page + PIECE * D, PIECE * D / 16, &sh.full[0]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PIECE; j += 32) bulk_copy(sh.k + (j + lane) * S::PITCH, page + (j + lane) * S::KB, S::KB, &sh.full[0]);
}
template <int K, int V, int D, int NQ> __device__ __forceinline__ void load_values(AttendShared<K, V, D, NQ> &sh, const uint8_t *page, int lane) {
    if (lane) return;
    bar_expect(&sh.full[1], kv_bytes(V, D));
    bulk_copy(sh.v, page + kv_bytes(K, D), kv_bytes(V, D), &sh.full[1]);
}

/* scores of 64 keys x NQ queries, times c */
template <int K, int V, int D, int NQ> __device__ __forceinline__ void scores_int8(AttendShared<K, V, D, NQ> &sh, float c, int lane) {
    typedef AttendShared<K, V, D, NQ> S;
    const int gid = lane >> 2, tig = lane & 3, groups = D / 32;
    const uint16_t *kd = (const uint16_t *)sh.kd;
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
        float y[4] = {0, 0, 0, 0}, p[4] = {0, 0, 0, 0};
        const int r0 = mt * 16 + gid, r1 = r0 + 8;
#pragma unroll
        for (int g = 0; g < groups; g++) {
            uint2 b = *(const uint2 *)(sh.code[gid % NQ] + g * 32 + tig * 8), k0 = *(const uint2 *)(sh.k + r0 * S::PITCH + g * 32 + tig * 8),
                  k1 = *(const uint2 *)(sh.k + r1 * S::PITCH + g * 32 + tig * 8);
            float2 d = *(const float2 *)&sh.delta[g][2 * tig % NQ];
            int m[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
            mma32(m, k0.x, k1.x, k0.y, k1.y, b.x, b.y);
            float s0 = half_of(kd[r0 * groups + g], 0), s1 = half_of(kd[r1 * groups + g], 0), n0 = s0 * -MAGIC_F, n1 = s1 * -MAGIC_F;
            p[0] = fmaf(d.x, fmaf(s0, __int_as_float(m[0]), n0), p[0]);
            p[1] = fmaf(d.y, fmaf(s0, __int_as_float(m[1]), n0), p[1]);
            p[2] = fmaf(d.x, fmaf(s1, __int_as_float(m[2]), n1), p[2]);
            p[3] = fmaf(d.y, fmaf(s1, __int_as_float(m[3]), n1), p[3]);
            if ((g & 7) == 7 || g == groups - 1)
#pragma unroll
                for (int i = 0; i < 4; i++) { y[i] = y[i] + p[i]; p[i] = 0.0f; }
        }
        if (2 * tig < NQ) {
            sh.u[2 * tig][r0] = y[0] * c; sh.u[2 * tig + 1][r0] = y[1] * c;
            sh.u[2 * tig][r1] = y[2] * c; sh.u[2 * tig + 1][r1] = y[3] * c;
        }
    }
}

/* a lane owns keys lane and lane + 32; fma over columns ascending */
template <int K, int V, int D, int NQ> __device__ __forceinline__ void scores_float(AttendShared<K, V, D, NQ> &sh, float c, int lane) {
    typedef AttendShared<K, V, D, NQ> S;
    static_assert(D <= 256, "one segment");
    float p[2][NQ];
#pragma unroll
    for (int q = 0; q < NQ; q++) p[0][q] = p[1][q] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < D; d += 8) {
        float w[2][8];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint8_t *k = sh.k + (lane + 32 * e) * S::PITCH;
            if (K == KV_F16) {
                uint4 v = *(const uint4 *)(k + d * 2);
#pragma unroll
                for (int i = 0; i < 4; i++) { float2 f = __half22float2(as_half2(word_of(v, i))); w[e][2 * i] = f.x; w[e][2 * i + 1] = f.y; }
            } else {
                uint2 v = *(const uint2 *)(k + d);
#pragma unroll
                for (int i = 0; i < 4; i++) { float2 f = e4m3x2(((i & 2) ? v.y : v.x) >> (16 * (i & 1)) & 0xffff); w[e][2 * i] = f.x; w[e][2 * i + 1] = f.y; }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int q = 0; q < NQ; q += 4) {
                float4 x = *(const float4 *)&sh.q[d + i][q];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    p[e][q] = fmaf(w[e][i], x.x, p[e][q]); p[e][q + 1] = fmaf(w[e][i], x.y, p[e][q + 1]);
                    p[e][q + 2] = fmaf(w[e][i], x.z, p[e][q + 2]); p[e][q + 3] = fmaf(w[e][i], x.w, p[e][q + 3]);
                }
            }
    }
#pragma unroll
    for (int q = 0; q < NQ; q++) { sh.u[q][lane] = (0.0f + p[0][q]) * c; sh.u[q][lane + 32] = (0.0f + p[1][q]) * c; }
}

/* n and l of query q over keys [j0, j1) of the piece; the p's of the others are +0 */
template <class S> __device__ __forceinline__ float2 softmax_piece(S &sh, int q, int j0, int j1, int lane, bool *bad) {
    float u0 = sh.u[q][lane], u1 = sh.u[q][lane + 32];
    bool in0 = lane >= j0 && lane < j1, in1 = lane + 32 >= j0 && lane + 32 < j1;
    *bad |= (in0 && not_finite(u0)) || (in1 && not_finite(u1));
    float m = fmaxf(in0 ? u0 : -INFINITY, in1 ? u1 : -INFINITY);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    m = ceilf(m);
    float p0 = in0 ? bw_exp2(u0 - m) : 0.0f, p1 = in1 ? bw_exp2(u1 - m) : 0.0f;
    sh.p[lane][q] = p0; sh.p[lane + 32][q] = p1;
    return make_float2(m, warp_tree(p0 + p1));
}

/* lane's share of o: quads 32 i + lane for i < QUADS of the queries q0 .. q0 + QL; D = 64: half of the queries in each half of the warp */
template <int D, int NQ> struct AttendShare { static constexpr int QUADS = D >= 128 ? D / 128 : 1, QL = D >= 128 ? NQ : NQ / 2; };

/* WHOLE: all queries see all keys. EDGE: queries see different keys; one that a query does not see is left out: adding +0 would lose a -0. */
enum ValuesKind { WHOLE, PART, EDGE_KEYS };
template <ValuesKind KIND, int K, int V, int D, int NQ> __device__ __forceinline__ void values_piece(const AttendShared<K, V, D, NQ> &sh, int j0, int j1, int lane,
                                                                                               float (&o)[AttendShare<D, NQ>::QL][AttendShare<D, NQ>::QUADS][4]) {
    typedef AttendShare<D, NQ> A;
    const int q0 = D >= 128 ? 0 : (lane >> 4) * A::QL, c0 = D >= 128 ? lane : lane & 15;
#pragma unroll
    for (int i = 0; i < A::QL * A::QUADS * 4; i++) (&o[0][0][0])[i] = 0.0f;
#pragma unroll (KIND == EDGE_KEYS ? 1 : KIND == PART ? 2 : A::QL * A::QUADS > 8 ? 2 : A::QL * A::QUADS > 4 ? 4 : 8)
    for (int j = KIND == WHOLE ? 0 : j0; j < (KIND == WHOLE ? PIECE : j1); j++) {
        float p[A::QL];
        if constexpr (A::QL % 4 == 0) {
#pragma unroll
            for (int q = 0; q < A::QL; q += 4) *(float4 *)(p + q) = *(const float4 *)&sh.p[j][q0 + q];
        } else {
            float2 v = *(const float2 *)&sh.p[j][q0];
            p[0] = v.x; p[1] = v.y;
        }
#pragma unroll
        for (int i = 0; i < A::QUADS; i++) {
            float v[4];
            v_quad<V, D>(sh.v, j, i * 32 + c0, v);
#pragma unroll
            for (int q = 0; q < A::QL; q++) {
                if (KIND == EDGE_KEYS && (j < sh.from[q0 + q] || j >= sh.to[q0 + q])) continue;
#pragma unroll
                for (int e = 0; e < 4; e++) o[q][i][e] = fmaf(p[q], v[e], o[q][i][e]);
            }
        }
    }
}

/* the running (N, L, O) of a tile that one warp walks alone */
template <int D, int NQ> struct AttendSum {
    typedef AttendShare<D, NQ> A;
    float O[A::QL][A::QUADS][4], N[NQ], L[NQ];
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int q = 0; q < NQ; q++) { N[q] = -INFINITY; L[q] = 0.0f; }
    }
    /* a piece with (n, l) of each query (n = -inf: none) and this lane's o; its first piece is taken as it is */
    __device__ __forceinline__ void merge(const float2 (&nl)[NQ], const float (&o)[A::QL][A::QUADS][4], bool upper) {
        float f[NQ], g[NQ];
#pragma unroll
        for (int q = 0; q < NQ; q++) {
            if (nl[q].x == -INFINITY) { f[q] = -1.0f; continue; }
            bool fresh = N[q] == -INFINITY;
            float M = fmaxf(N[q], nl[q].x);
            f[q] = fresh ? -2.0f : pow2_factor(N[q] - M);
            g[q] = pow2_factor(nl[q].x - M);
            L[q] = fresh ? nl[q].y : fmaf(nl[q].y, g[q], L[q] * f[q]);
            N[q] = M;
        }
#pragma unroll
        for (int q = 0; q < A::QL; q++) {
            float fq = D < 128 && upper ? f[(A::QL + q) % NQ] : f[q], gq = D < 128 && upper ? g[(A::QL + q) % NQ] : g[q];
            if (fq == -1.0f) continue;
#pragma unroll
            for (int i = 0; i < A::QUADS; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) O[q][i][e] = fq == -2.0f ? o[q][i][e] : fmaf(o[q][i][e], gq, O[q][i][e] * fq);
        }
    }
};

/* rows r0 .. of a tile with the page table of r0 */
__device__ __forceinline__ int same_table(const AttendArgs &a, const StepRows &s, int r0, int most) {
    const int *t = a.want ? s.want_table + a.kv.klass * s.n_want : s.table + a.kv.klass * s.n;
    int n = 1;
    while (n < most && r0 + n < a.rows && t[r0 + n] == t[r0]) n++;
    return n;
}

/* (n, l) of every query for piece b; the keys that some query sees; true where queries differ in what they see */
template <int K, int V, int D, int NQ> __device__ __forceinline__ bool softmax_all(AttendShared<K, V, D, NQ> &sh, int b, int lane, float2 (&nl)[NQ],
       int *from, int *to, bool *bad) {
    bool edge = false;
    *from = PIECE;
    *to = 0;
#pragma unroll
    for (int q = 0; q < NQ; q++) {
        int j0 = max(0, sh.lo[q] - b * PIECE), j1 = min(PIECE, sh.hi[q] - b * PIECE);
        bool any = j0 < j1;
        nl[q] = any ? softmax_piece(sh, q, j0, j1, lane, bad) : make_float2(-INFINITY, 0.0f);
        if (!lane) { sh.from[q] = any ? j0 : PIECE; sh.to[q] = any ? j1 : 0; }
        if (!any) continue;
        edge |= *to && (j0 != *from || j1 != *to);
        *from = min(*from, j0);
        *to = max(*to, j1);
    }
    return edge;
}

/* a piece's results to memory */
template <int K, int V, int D, int NQ>
__device__ __forceinline__ void split_store(const AttendArgs &a, const AttendShared<K, V, D, NQ> &sh, int b, int lane, const float2 (&nl)[NQ],
                                                                                   const float (&o)[AttendShare<D, NQ>::QL][AttendShare<D, NQ>::QUADS][4]) {
    typedef AttendShare<D, NQ> A;
    const int qa = D >= 128 ? 0 : (lane >> 4) * A::QL, ca = D >= 128 ? lane : lane & 15;
#pragma unroll
    for (int q = 0; q < A::QL; q++) {
        int k = qa + q;
        if (sh.from[k] >= sh.to[k]) continue;
        size_t at = ((size_t)sh.row[k] * a.max_pieces + b - sh.lo[k] / PIECE) * a.heads + sh.head[k];
#pragma unroll
        for (int i = 0; i < A::QUADS; i++) *(float4 *)(a.o + at * D + (i * 32 + ca) * 4) = make_float4(o[q][i][0], o[q][i][1], o[q][i][2], o[q][i][3]);
    }
#pragma unroll
    for (int q = 0; q < NQ; q++)
        if (lane == q && sh.from[q] < sh.to[q]) a.nl[((size_t)sh.row[q] * a.max_pieces + b - sh.lo[q] / PIECE) * a.heads + sh.head[q]] = nl[q];
}

template <int K, int V, int D, int NQ> __device__ __forceinline__ bool loop_store(const AttendArgs &a, const AttendShared<K, V, D, NQ> &sh, int lane, const AttendSum<D, NQ> &sum) {
    typedef AttendShare<D, NQ> A;
    const int qa = D >= 128 ? 0 : (lane >> 4) * A::QL, ca = D >= 128 ? lane : lane & 15;
    bool bad = false;
#pragma unroll
    for (int q = 0; q < A::QL; q++) {
        float inv = 1.0f / (D < 128 && qa ? sum.L[(A::QL + q) % NQ] : sum.L[q]);
        if (!sh.hi[qa + q]) continue;
#pragma unroll
        for (int i = 0; i < A::QUADS; i++) {
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) { y[e] = sum.O[q][i][e] * inv; bad |= not_finite(y[e]); }
            *(float4 *)(a.y + ((size_t)sh.row[qa + q] * a.heads + sh.head[qa + q]) * D + (i * 32 + ca) * 4) = make_float4(y[0], y[1], y[2], y[3]);
        }
    }
    return bad;
}

/* pieces first, first + step, ... of the tile. The next piece's K arrives while V is worked on, its V while its scores are made. */
template <int K, int V, int D, int NQ, bool SPLIT>
__device__ __forceinline__ void attend_tile(const AttendArgs &a, const StepRows &s, const AttendTile &t, int kvh, int first, int step,
       AttendShared<K, V, D, NQ> &sh, int lane, bool &waited, int &phase) {
    typedef AttendShare<D, NQ> A;
    place_queries<K, V, D, NQ>(a, s, t, sh, lane);
    const int b1 = (sh.hi[(t.rows - 1) * t.per] - 1) / PIECE, b0 = sh.lo[0] / PIECE + first; /* the first row sees the earliest, the last the latest key */
    if (b0 > b1) return; /* too few pieces for this warp */
    uint8_t *const *pages = attend_row(a, s, t.r0).pages;
    const size_t head = kv_head_bytes(a.kv) * (size_t)kvh + a.kv.offset;
    const int row0 = a.want ? s.want_row[t.r0] : t.r0;
    bool early = b0 * PIECE + PIECE <= s.pos[row0] - row0; /* no row of this step is in that page: the step's rows of a sequence end with this one */
    if (!waited && !early) { pdl_wait(); waited = true; }
    load_keys<K, V, D, NQ>(sh, pages[b0] + head, lane);
    load_values<K, V, D, NQ>(sh, pages[b0] + head, lane);
    if (!waited) { pdl_wait(); waited = true; }
    bool bad = load_queries<K, V, D, NQ>(a, sh, lane);
    float o[A::QL][A::QUADS][4];
    AttendSum<D, SPLIT ? 4 : NQ> sum;
    if constexpr (!SPLIT) sum.begin();
    for (int b = b0; b <= b1; b += step, phase ^= 1) {
        const uint8_t *next = b + step <= b1 ? pages[b + step] + head : nullptr;
        float2 nl[NQ];
        int from, to;
        bar_wait(&sh.full[0], phase);
        if constexpr (K == KV_Q8_0) scores_int8<K, V, D, NQ>(sh, a.c, lane);
        else scores_float<K, V, D, NQ>(sh, a.c, lane);
        __syncwarp();
        if (next) load_keys<K, V, D, NQ>(sh, next, lane);
        bool edge = softmax_all<K, V, D, NQ>(sh, b, lane, nl, &from, &to, &bad);
        bar_wait(&sh.full[1], phase);
        __syncwarp();
        if (edge) values_piece<EDGE_KEYS, K, V, D, NQ>(sh, from, to, lane, o);
        else if (to - from == PIECE) values_piece<WHOLE, K, V, D, NQ>(sh, from, to, lane, o);
        else values_piece<PART, K, V, D, NQ>(sh, from, to, lane, o);
        __syncwarp();
        if (next) load_values<K, V, D, NQ>(sh, next, lane);
        if constexpr (SPLIT) split_store<K, V, D, NQ>(a, sh, b, lane, nl, o);
        else sum.merge(nl, o, D < 128 && lane >= 16);
        __syncwarp();
    }
    if constexpr (!SPLIT) bad |= loop_store<K, V, D, NQ>(a, sh, lane, sum);
    if (bad) report_fault(s.fault, a.op);
}

/* x: SPLIT: warps share the pieces of a tile; else each warp has a tile, the last ones (most keys) first. y: KV heads. z: SPLIT: tiles.
 * A tile has `per` heads (all that share the KV head, in chunks of at most NQ) of NQ / per rows. */
template <int K, int V, int D, int NQ, bool SPLIT> __global__ void __launch_bounds__(128) k_attend(AttendArgs a, StepRows s, int chunks, int tiles) {
    extern __shared__ __align__(16) uint8_t raw[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    AttendShared<K, V, D, NQ> &sh = ((AttendShared<K, V, D, NQ> *)raw)[warp];
    const int share = a.heads / a.kv.heads, per = share / chunks, rows = NQ / per;
    bool waited = false; /* positions and page tables do not come from an earlier kernel, nor do pages that the step does not write */
    int phase = 0;
    pdl_trigger();
    if (lane < 2) bar_init(&sh.full[lane], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    int tile = SPLIT ? (int)blockIdx.z : tiles - 1 - (int)(blockIdx.x * warps + warp);
    if (tile < 0) { pdl_wait(); return; }
    const int chunk = tile % chunks, end = min(a.rows, (tile / chunks + 1) * rows);
    for (int r = tile / chunks * rows; r < end;) {
        AttendTile t = {r, same_table(a, s, r, end - r), (int)blockIdx.y * share + chunk * per, per};
        attend_tile<K, V, D, NQ, SPLIT>(a, s, t, blockIdx.y, SPLIT ? (int)(blockIdx.x * warps + warp) : 0, SPLIT ? (int)gridDim.x * warps : 1, sh, lane, waited, phase);
        __syncwarp();
        r += t.rows;
    }
    if (!waited) pdl_wait();
}

} // namespace bw
#endif
