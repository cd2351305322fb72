/* ATTEND (docs/numerics.md §6): pieces of 64 keys in parallel, merged in order. Owns the work mapping of one row over a key-value
 * cache of pages; a page holds 64 keys of one kv head, so a piece is one contiguous copy. Refuses to know sequences and lengths
 * beyond its arguments.
 *
 * Page layout (D = head_dim): K part then V part.
 *   q8_0 K: codes [64][D], words of a group in the order 0 4 1 5 2 6 3 7; d f16 [64][D / 32]
 *   q5_1 V: low nibbles [64][D / 2], high bits [64][D / 8] (a nibble for 4 values), (d, m) f16 [64][D / 32]
 *   f16, e4m3: values [64][D] */
#ifndef BW24_CU_OP_ATTEND_CUH
#define BW24_CU_OP_ATTEND_CUH

#include "op_gemm.cuh"
#include <cuda_fp8.h>

namespace bw {

enum KvFormat { KV_Q8_0, KV_Q5_1, KV_F16, KV_E4M3 };

constexpr int PIECE = 64;

__host__ __device__ constexpr int kv_bytes(KvFormat f, int d) { return PIECE * d / 32 * (f == KV_Q8_0 ? 34 : f == KV_Q5_1 ? 24 : f == KV_F16 ? 64 : 32); }

struct AttendArgs {
    const uint8_t *pages; /* [kv_heads][pieces] pages of K part + V part */
    Acts q;               /* q8_0 K: quantised queries, row = head, cols = D */
    const float *qf;      /* float K: [heads][D] */
    float *o;             /* [pieces][heads][D] */
    float2 *nl;           /* [pieces][heads] (n, l) */
    float *y;             /* [heads][D] */
    Acts yo;              /* quantised result: one row of heads * D */
    int kv_heads, keys, pieces;
    float scale; /* scale * log2 e */
};

__device__ __forceinline__ float2 e4m3x2(uint32_t v) {
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)v, __NV_E4M3);
    return __half22float2(*(__half2 *)&h);
}

/* 4 values of V: columns 4 c .. 4 c + 3 of key j */
template <KvFormat V, int D> __device__ __forceinline__ void v_load(const uint8_t *v, int j, int c, float *x) {
    if (V == KV_Q5_1) {
        uint32_t lo = *(const uint16_t *)(v + j * (D / 2) + c * 2), hb = v[PIECE * D / 2 + j * (D / 8) + (c >> 1)] >> (4 * (c & 1));
        __half2 dm = *(const __half2 *)(v + PIECE * D * 5 / 8 + (j * (D / 32) + (c >> 3)) * 4);
        float d = __low2float(dm), m = __high2float(dm);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t q = ((lo >> (4 * i)) & 15) | ((hb << (4 - i)) & 16);
            x[i] = fmaf(d, __uint_as_float(0x4b000000u | q) - 8388608.0f, m);
        }
    } else if (V == KV_F16) {
        uint2 w = *(const uint2 *)(v + (j * D + 4 * c) * 2);
        x[0] = half_of(w.x, 0); x[1] = half_of(w.x, 1); x[2] = half_of(w.y, 0); x[3] = half_of(w.y, 1);
    } else {
        uint32_t w = *(const uint32_t *)(v + j * D + 4 * c);
        float2 a = e4m3x2(w & 0xffff), b = e4m3x2(w >> 16);
        x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y;
    }
}

/* scores of 64 keys x H heads into u[H][PIECE]; K in shared memory with rows `pitch` apart */
template <int D, int H> __device__ __forceinline__ void scores_q8(const AttendArgs &a, const uint8_t *k, const uint16_t *dk, int head0, float (*u)[PIECE]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3, groups = D / 32, pitch = D + 32;
    const int8_t *q = a.q.q + (size_t)(head0 + gid % H) * D + tig * 8;
    const float *dq = a.q.delta + head0 + (2 * tig) % H;
#pragma unroll
    for (int mt = warp; mt < 4; mt += D / 128) {
        float y[4] = {0, 0, 0, 0}, p[4] = {0, 0, 0, 0};
#pragma unroll
        for (int g = 0; g < groups; g++) {
            uint2 b = __ldg((const uint2 *)(q + g * 32));
            float d0 = __ldg(dq + (size_t)g * a.q.ld), d1 = __ldg(dq + (size_t)g * a.q.ld + 1);
            uint2 k0 = *(const uint2 *)(k + (mt * 16 + gid) * pitch + g * 32 + tig * 8), k1 = *(const uint2 *)(k + (mt * 16 + gid + 8) * pitch + g * 32 + tig * 8);
            int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
            mma32(c, k0.x, k1.x, k0.y, k1.y, b.x, b.y);
            float s0 = half_of(dk[(mt * 16 + gid) * groups + g], 0), s1 = half_of(dk[(mt * 16 + gid + 8) * groups + g], 0);
            float n0 = s0 * -MAGIC_F, n1 = s1 * -MAGIC_F;
            p[0] = fmaf(d0, fmaf(s0, __int_as_float(c[0]), n0), p[0]);
            p[1] = fmaf(d1, fmaf(s0, __int_as_float(c[1]), n0), p[1]);
            p[2] = fmaf(d0, fmaf(s1, __int_as_float(c[2]), n1), p[2]);
            p[3] = fmaf(d1, fmaf(s1, __int_as_float(c[3]), n1), p[3]);
            if ((g & 7) == 7 || g == groups - 1)
#pragma unroll
                for (int i = 0; i < 4; i++) { y[i] = y[i] + p[i]; p[i] = 0.0f; }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (2 * tig < H) u[2 * tig + (i & 1)][mt * 16 + gid + 8 * (i >> 1)] = y[i] * a.scale;
    }
}

/* float K: a thread owns keys; fma over columns ascending, queries broadcast from shared memory */
template <KvFormat K, int D, int H> __device__ __forceinline__ void scores_float(const AttendArgs &a, const uint8_t *k, const float *q, float (*u)[PIECE]) {
    constexpr int E = K == KV_F16 ? 2 : 1, pitch = D * E + 16;
    for (int key = threadIdx.x; key < PIECE; key += D / 4) {
        float y[H], p[H];
#pragma unroll
        for (int h = 0; h < H; h++) y[h] = p[h] = 0.0f;
#pragma unroll 2
        for (int c = 0; c < D; c += 8 ) {
            float w[8];
            if (K == KV_F16) {
                uint4 v = *(const uint4 *)(k + key * pitch + c * 2);
#pragma unroll
                for (int i = 0; i < 8; i++) w[i] = half_of(word_of(v, i >> 1), i & 1);
            } else {
                uint2 v = *(const uint2 *)(k + key * pitch + c);
#pragma unroll
                for (int i = 0; i < 4; i++) { float2 f = e4m3x2(((i & 2) ? v.y : v.x) >> (16 * (i & 1)) & 0xffff); w[2 * i] = f.x; w[2 * i + 1] = f.y; }
            }
#pragma unroll
            for (int h = 0; h < H; h++) {
                float4 q0 = *(const float4 *)(q + h * D + c), q1 = *(const float4 *)(q + h * D + c + 4);
                p[h] = fmaf(w[0], q0.x, p[h]); p[h] = fmaf(w[1], q0.y, p[h]); p[h] = fmaf(w[2], q0.z, p[h]); p[h] = fmaf(w[3], q0.w, p[h]);
                p[h] = fmaf(w[4], q1.x, p[h]); p[h] = fmaf(w[5], q1.y, p[h]); p[h] = fmaf(w[6], q1.z, p[h]); p[h] = fmaf(w[7], q1.w, p[h]);
            }
            if ((c & 255) == 248 || c == D - 8)
#pragma unroll
                for (int h = 0; h < H; h++) { y[h] = y[h] + p[h]; p[h] = 0.0f; }
        }
#pragma unroll
        for (int h = 0; h < H; h++) u[h][key] = y[h] * a.scale;
    }
}

__device__ __forceinline__ float pow2_factor(float e) { return e < -126.0f ? 0.0f : bw_pow2i((int)e); }

template <KvFormat K, int D> __host__ __device__ constexpr int k_pitch() { return K == KV_Q8_0 ? D + 32 : K == KV_F16 ? 2 * D + 16 : D + 16; }

template <KvFormat K, KvFormat V, int D, int H> constexpr int attend_shared() {
    return PIECE * k_pitch<K, D>() + (K == KV_Q8_0 ? PIECE * D / 16 : H * D * 4) + kv_bytes(V, D) + H * PIECE * 8;
}

/* One block of D / 4 threads a (piece, kv head); a thread owns 4 columns of V for all H heads, so each value is decoded once.
 * Reads a page once, writes (n, l, o) of H heads. */
template <KvFormat K, KvFormat V, int D, int H> __global__ void __launch_bounds__(D / 4) k_attend(AttendArgs a) {
    extern __shared__ __align__(16) uint8_t sm[];
    constexpr int NT = D / 4, KC = K == KV_F16 ? 2 * D : D;
    uint8_t *ks = sm;
    uint16_t *dk = (uint16_t *)(ks + PIECE * k_pitch<K, D>());
    float *qs = (float *)dk;
    uint8_t *vs = (uint8_t *)dk + (K == KV_Q8_0 ? PIECE * D / 16 : H * D * 4);
    float (*u)[PIECE] = (float (*)[PIECE])(vs + kv_bytes(V, D));
    float (*pr)[H] = (float (*)[H])(u + H);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, piece = blockIdx.x, kvh = blockIdx.y, heads = a.kv_heads * H, head0 = kvh * H;
    const uint8_t *page = a.pages + ((size_t)kvh * a.pieces + piece) * (kv_bytes(K, D) + kv_bytes(V, D));
    for (int i = threadIdx.x; i < PIECE * KC / 16; i += NT) cp16(ks + i / (KC / 16) * k_pitch<K, D>() + i % (KC / 16) * 16, page + i * 16);
    if (K == KV_Q8_0)
        for (int i = threadIdx.x; i < PIECE * D / 256; i += NT) cp16((uint8_t *)dk + i * 16, page + PIECE * D + i * 16);
    asm volatile("cp.async.commit_group;");
    for (int i = threadIdx.x; i < kv_bytes(V, D) / 16; i += NT) cp16(vs + i * 16, page + kv_bytes(K, D) + i * 16);
    asm volatile("cp.async.commit_group;");
    pdl_trigger();
    pdl_wait();
    if (K != KV_Q8_0)
        for (int i = threadIdx.x; i < H * D / 4; i += NT) ((float4 *)qs)[i] = __ldcg((const float4 *)(a.qf + (size_t)head0 * D) + i);
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    if (K == KV_Q8_0) scores_q8<D, H>(a, ks, dk, head0, u);
    else scores_float<K, D, H>(a, ks, qs, u);
    __syncthreads();
    const int n = min(PIECE, a.keys - piece * PIECE);
    for (int h = warp; h < H; h += NT / 32) {
        float u0 = lane < n ? u[h][lane] : -INFINITY, u1 = lane + 32 < n ? u[h][lane + 32] : -INFINITY, m = fmaxf(u0, u1);
#pragma unroll
        for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
        m = ceilf(m);
        float p0 = lane < n ? bw_exp2(u0 - m) : 0.0f, p1 = lane + 32 < n ? bw_exp2(u1 - m) : 0.0f, l = p0 + p1;
        pr[lane][h] = p0; pr[lane + 32][h] = p1;
#pragma unroll
        for (int o = 16; o; o >>= 1) l = l + __shfl_xor_sync(~0u, l, o);
        if (!lane) a.nl[(size_t)piece * heads + head0 + h] = make_float2(m, l);
    }
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    float o[H][4];
#pragma unroll
    for (int h = 0; h < H; h++) o[h][0] = o[h][1] = o[h][2] = o[h][3] = 0.0f;
#pragma unroll 2
    for (int j = 0; j < n; j++) {
        float v[4], p[H];
        v_load<V, D>(vs, j, threadIdx.x, v);
#pragma unroll
        for (int h = 0; h < H; h += 4) *(float4 *)(p + h) = *(const float4 *)(pr[j] + h);
#pragma unroll
        for (int h = 0; h < H; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[h][i] = fmaf(p[h], v[i], o[h][i]);
    }
#pragma unroll
    for (int h = 0; h < H; h++) *(float4 *)(a.o + ((size_t)piece * heads + head0 + h) * D + threadIdx.x * 4) = *(float4 *)o[h];
}

/* Ordered merge of the pieces. Block = 32 columns of one head: one warp folds, after the factors of 64 pieces at a time were made
 * by a running maximum; then the group is quantised for the output projection. */
template <int D> __global__ void __launch_bounds__(32) k_attend_merge(AttendArgs a, int heads) {
    const int lane = threadIdx.x, head = blockIdx.x / (D / 32), c = blockIdx.x % (D / 32) * 32 + lane;
    __shared__ float3 fac[32];
    pdl_trigger();
    pdl_wait();
    float N = -INFINITY, L = 0.0f, O = 0.0f;
    for (int i0 = 0; i0 < a.pieces; i0 += 32) {
        int i = i0 + lane, cnt = min(32, a.pieces - i0);
        float o[32];
        const float *op = a.o + ((size_t)i0 * heads + head) * D + c;
#pragma unroll
        for (int k = 0; k < 32; k++) o[k] = k < cnt ? __ldcg(op + (size_t)k * heads * D) : 0.0f;
        float2 nl = i < a.pieces ? __ldcg(a.nl + (size_t)i * heads + head) : make_float2(-INFINITY, 0.0f);
        float m = nl.x;
#pragma unroll
        for (int s = 1; s < 32; s <<= 1) { float t = __shfl_up_sync(~0u, m, s); if (lane >= s) m = fmaxf(m, t); }
        m = fmaxf(m, N);
        float before = __shfl_up_sync(~0u, m, 1);
        if (!lane) before = N;
        __syncwarp();
        fac[lane] = make_float3(pow2_factor(nl.x - m), i ? pow2_factor(before - m) : 0.0f, nl.y);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 32; k++)
            if (k < cnt) {
                float3 f = fac[k];
                L = k || i0 ? fmaf(f.z, f.x, L * f.y) : f.z;
                O = k || i0 ? fmaf(o[k], f.x, O * f.y) : o[k];
            }
        N = __shfl_sync(~0u, m, 31);
    }
    float y = O * (1.0f / L);
    if (a.y) a.y[(size_t)head * D + c] = y;
    if (a.yo.q) quant_group(a.yo, 0, (head * D + c) >> 5, lane, y);
}

} // namespace bw
#endif
