/* ATTEND of the numeric class `fast`, for steps of many rows: queries, keys, values and weights rounded to bf16, products by bf16 tensor cores,
 * sums in f32 in an order of their own, a running maximum, exp2 as the card has it. Reads every KV format. Not the program of docs/numerics.md;
 * kernel-check holds it to a bound on the error. */
#ifndef BW24_CU_OP_ATTEND_FAST_CUH
#define BW24_CU_OP_ATTEND_FAST_CUH

#include "attend_piece.cuh"
#include "bf16.cuh"

namespace bw {

/* a block of 4 warps has 64 queries, 16 a warp; keys come KEYS at a time */
template <int D> struct FastBlock {
    static constexpr int QUERIES = 64, THREADS = 128, KEYS = D == 256 ? 32 : 64, PITCH = D + 8; /* no bank conflicts */
    static constexpr bool HELD_Q = D <= 128;                                                      /* the queries stay in registers */
    __nv_bfloat16 k[KEYS][PITCH], v[KEYS][PITCH];
    __nv_bfloat16 q[HELD_Q ? 1 : QUERIES][PITCH]; /* HELD_Q: they pass through k */
    uint64_t full[2];                             /* [0]: the page's part has come */
    /* where it fits: the part of the page, as it is, behind this */
};

__device__ __forceinline__ float fast_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }

/* keys j0 .. j0 + KEYS of a part of a page (in device or shared memory), as bf16 */
template <int F, int D> __device__ __forceinline__ void fill_bf16(const uint8_t *part, int j0, __nv_bfloat16 (*to)[FastBlock<D>::PITCH]) {
    constexpr int QUADS = D / 4, STEP = FastBlock<D>::THREADS / QUADS;
    const int c = threadIdx.x % QUADS, first = threadIdx.x / QUADS;
#pragma unroll 4
    for (int j = 0; j < FastBlock<D>::KEYS; j += STEP) {
        float4 x;
        if constexpr (F == KV_F32) x = *(const float4 *)((const float *)part + (j0 + first + j) * D + 4 * c);
        else if constexpr (F == KV_F16 || F == KV_E4M3) float_columns<F, D, 4>(part, j0 + first + j, 4 * c, &x.x);
        else x = v_quad<F, D>(part, j0 + first + j, c);
        *(uint2 *)&to[first + j][4 * c] = make_uint2(bf16x2(x.x, x.y), bf16x2(x.z, x.w));
    }
}
template <int D> __device__ __forceinline__ void fill_part(int f, const uint8_t *part, int j0, __nv_bfloat16 (*to)[FastBlock<D>::PITCH]) {
    switch (f) {
    case KV_F32: fill_bf16<KV_F32, D>(part, j0, to); break;
    case KV_F16: fill_bf16<KV_F16, D>(part, j0, to); break;
    case KV_Q8_0: fill_bf16<KV_Q8_0, D>(part, j0, to); break;
    case KV_Q5_1: fill_bf16<KV_Q5_1, D>(part, j0, to); break;
    default: fill_bf16<KV_E4M3, D>(part, j0, to); break;
    }
}

/* visible keys of query slot q of a tile; hi 0: none */
struct FastQuery { int lo, hi; };
__device__ __forceinline__ FastQuery fast_query(const AttendArgs &a, const StepRows &s, const AttendTile &t, int q) {
    if (q / t.per >= t.rows) return {0, 0};
    AttendRow r = attend_row(a, s, t.r0 + q / t.per);
    return {r.lo, r.hi};
}

template <int D> __device__ __forceinline__ void fast_queries(const AttendArgs &a, const StepRows &s, const AttendTile &t, __nv_bfloat16 (*to)[FastBlock<D>::PITCH]) {
#pragma unroll 4
    for (int k = threadIdx.x; k < FastBlock<D>::QUERIES * D / 4; k += FastBlock<D>::THREADS) {
        int q = k / (D / 4), w = k % (D / 4);
        bool have = q / t.per < t.rows;
        float4 v = have ? __ldcg((const float4 *)(a.q + ((size_t)(t.r0 + q / t.per) * a.heads + t.h0 + q % t.per) * D) + w) : make_float4(0, 0, 0, 0);
        *(uint2 *)&to[q][4 * w] = make_uint2(bf16x2(v.x, v.y), bf16x2(v.z, v.w));
    }
}

/* what a warp carries: O of its 16 queries (this lane's two rows of them), maxima and sums of the two rows */
template <int D> struct FastSum { float O[D / 8][4], m[2], l[2]; };

/* scores of the block's keys, times c; keys that a row does not see get -inf */
template <int D> __device__ __forceinline__ void fast_scores(const FastBlock<D> &sh, const uint32_t (&held)[FastBlock<D>::HELD_Q ? D / 16 : 1][4], float c, int key0,
                                                                  const FastQuery (&x)[2], float (&u)[FastBlock<D>::KEYS / 8][4]) {
    constexpr int N = FastBlock<D>::KEYS / 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mi = lane >> 3, r = lane & 7;
#pragma unroll
    for (int i = 0; i < N * 4; i++) (&u[0][0])[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t q[4];
        if constexpr (FastBlock<D>::HELD_Q) { q[0] = held[k][0]; q[1] = held[k][1]; q[2] = held[k][2]; q[3] = held[k][3]; }
        else ldsm(q, &sh.q[warp * 16 + (mi & 1) * 8 + r][k * 16 + (mi >> 1) * 8]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldsm(b, &sh.k[n * 8 + (mi >> 1) * 8 + r][k * 16 + (mi & 1) * 8]);
            mma_bf16(u[n], q, b[0], b[1]);
            mma_bf16(u[n + 1], q, b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < N * 4; i++) (&u[0][0])[i] *= c;
    const int last = key0 + FastBlock<D>::KEYS;
    if (!__any_sync(~0u, x[0].lo > key0 || x[0].hi < last || x[1].lo > key0 || x[1].hi < last)) return;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = key0 + n * 8 + 2 * (lane & 3) + (i & 1);
            if (key < x[i >> 1].lo || key >= x[i >> 1].hi) u[n][i] = -INFINITY;
        }
}

/* exponentials in place of the scores, O rescaled */
template <int D> __device__ __forceinline__ void fast_softmax(float (&u)[FastBlock<D>::KEYS / 8][4], FastSum<D> &sum) {
    constexpr int N = FastBlock<D>::KEYS / 8;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = sum.m[h], total = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) m = fmaxf(m, fmaxf(u[n][2 * h], u[n][2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float base = m == -INFINITY ? 0.0f : m, f = fast_exp2(sum.m[h] - base);
        sum.m[h] = m;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; i++) { u[n][i] = fast_exp2(u[n][i] - base); total += u[n][i]; }
        sum.l[h] = sum.l[h] * f + total;
#pragma unroll
        for (int n = 0; n < D / 8; n++) { sum.O[n][2 * h] *= f; sum.O[n][2 * h + 1] *= f; }
    }
}

template <int D> __device__ __forceinline__ void fast_values(const FastBlock<D> &sh, const float (&p)[FastBlock<D>::KEYS / 8][4], FastSum<D> &sum) {
    const int lane = threadIdx.x & 31, mi = lane >> 3, r = lane & 7;
#pragma unroll
    for (int k = 0; k < FastBlock<D>::KEYS / 16; k++) {
        const uint32_t a[4] = {bf16x2(p[2 * k][0], p[2 * k][1]), bf16x2(p[2 * k][2], p[2 * k][3]), bf16x2(p[2 * k + 1][0], p[2 * k + 1][1]),
                               bf16x2(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t b[4];
            ldsm_t(b, &sh.v[k * 16 + (mi & 1) * 8 + r][n * 8 + (mi >> 1) * 8]);
            mma_bf16(sum.O[n], a, b[0], b[1]);
            mma_bf16(sum.O[n + 1], a, b[2], b[3]);
        }
    }
}

template <int D> __device__ __forceinline__ bool fast_store(const AttendArgs &a, const AttendTile &t, int q0, const FastSum<D> &sum) {
    bool bad = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float l = sum.l[h] + __shfl_xor_sync(~0u, sum.l[h], 1);
        l = l + __shfl_xor_sync(~0u, l, 2);
        const int q = q0 + 8 * h, row = q / t.per;
        if (row >= t.rows) continue;
        float inv = 1.0f / l, *y = a.y + ((size_t)(t.r0 + row) * a.heads + t.h0 + q % t.per) * D + 2 * (threadIdx.x & 3);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float2 v = make_float2(sum.O[n][2 * h] * inv, sum.O[n][2 * h + 1] * inv);
            bad |= not_finite(v.x) | not_finite(v.y);
            *(float2 *)(y + n * 8) = v;
        }
    }
    return bad;
}

/* one copy of this KV head's part of a page, by one thread */
template <int D> __device__ __forceinline__ void fast_request(FastBlock<D> &sh, const uint8_t *part, int bytes) {
    if (threadIdx.x) return;
    bar_expect(&sh.full[0], bytes);
    bulk_copy(&sh + 1, part, bytes, &sh.full[0]);
    bar_issued(&sh.full[0]);
}

/* the tile's pieces in order; staged: parts of pages come through shared memory, the next one while this one is worked on */
template <int D> __device__ __forceinline__ bool fast_tile(const AttendArgs &a, const StepRows &s, const AttendTile &t, int kvh, bool staged, FastBlock<D> &sh,
                                                                                                                                          int &phase) {
    typedef FastBlock<D> S;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, q0 = warp * 16 + (lane >> 2), mi = lane >> 3, r = lane & 7;
    const FastQuery x[2] = {fast_query(a, s, t, q0), fast_query(a, s, t, q0 + 8)};
    const AttendRow first = attend_row(a, s, t.r0);
    const int last = attend_row(a, s, t.r0 + t.rows - 1).hi;
    uint32_t held[S::HELD_Q ? D / 16 : 1][4];
    __syncthreads(); /* the tile before is done */
    if constexpr (S::HELD_Q) {
        fast_queries<D>(a, s, t, sh.k);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < D / 16; k++) ldsm(held[k], &sh.k[warp * 16 + (mi & 1) * 8 + r][k * 16 + (mi >> 1) * 8]);
    } else fast_queries<D>(a, s, t, sh.q);
    FastSum<D> sum;
    sum.m[0] = sum.m[1] = -INFINITY;
    sum.l[0] = sum.l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 2; i++) (&sum.O[0][0])[i] = 0.0f;
    const int bytes = (int)kv_head_bytes(a.kv), key0 = first.lo / PIECE * PIECE;
    const size_t head = (size_t)bytes * kvh + a.kv.offset;
    __syncthreads(); /* what was in the places of the keys is done with */
    if (staged) fast_request(sh, first.pages[key0 / PIECE] + head, bytes);
    for (int key = key0; key < last; key += S::KEYS) {
        const uint8_t *page = staged ? (const uint8_t *)(&sh + 1) : first.pages[key / PIECE] + head;
        if (staged && key % PIECE == 0) { bar_wait(&sh.full[0], phase); phase ^= 1; }
#pragma unroll 1
        for (int part = 0; part < 2; part++)
            fill_part<D>(part ? a.kv.v : a.kv.k, part ? page + kv_bytes(a.kv.k, D) : page, key % PIECE, part ? sh.v : sh.k);
        __syncthreads();
        const int next = key + S::KEYS;
        if (staged && next % PIECE == 0 && next < last) fast_request(sh, first.pages[next / PIECE] + head, bytes);
        float u[S::KEYS / 8][4];
        fast_scores<D>(sh, held, a.c, key, x, u);
        fast_softmax<D>(u, sum);
        fast_values<D>(sh, u, sum);
        __syncthreads(); /* K and V of these keys are done with */
    }
    return fast_store<D>(a, t, q0, sum);
}

/* x: KV heads, y: tiles, the last ones (most keys) first; tiles as in op_attend.cuh */
template <int D> __global__ void __launch_bounds__(128, D == 256 || (SMALL_CARD && D == 128) ? 2 : 3) k_attend_fast(AttendArgs a, StepRows s, int chunks, int tiles, int staged) {
    extern __shared__ __align__(16) uint8_t raw[];
    FastBlock<D> &sh = *(FastBlock<D> *)raw;
    const int share = a.heads / a.kv.heads, per = share / chunks, rows = FastBlock<D>::QUERIES / per, tile = tiles - 1 - (int)blockIdx.y;
    const int chunk = tile % chunks, end = min(a.rows, (tile / chunks + 1) * rows);
    bool bad = false;
    int phase = 0;
    pdl_trigger();
    if (!threadIdx.x) bar_init(&sh.full[0], 1);
    bar_fence();
    pdl_wait();
    for (int r = tile / chunks * rows; r < end;) {
        AttendTile t = {r, same_table(a, s, r, end - r), (int)blockIdx.x * share + chunk * per, per};
        bad |= fast_tile<D>(a, s, t, blockIdx.x, staged, sh, phase);
        r += t.rows;
    }
    if (bad) report_fault(s.fault, a.op);
}

} // namespace bw
#endif
