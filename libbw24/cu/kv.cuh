/* The KV formats on the device (docs/numerics.md §8) and the layout of a page. A page holds 64 keys of every KV head of a layer; a head is a
 * K part, then a V part, so that what one block of ATTEND reads is contiguous. Owns encode and decode; knows no order of operations of ATTEND.
 *
 * Layout of a part by format, D = head_dim:
 *   f32, f16, e4m3: values [64][D]
 *   q8_0: codes [64][D], words of a group in the order 0 4 1 5 2 6 3 7; d f16 [64][D / 32]
 *   q5_1: low nibbles [64][D / 2], high bits [64][D / 8], (d, m) f16 [64][D / 32] */
#ifndef BW24_CU_KV_CUH
#define BW24_CU_KV_CUH

#include <cuda_fp8.h>
#include "device.cuh"

namespace bw {

enum KvFormat { KV_F32, KV_F16, KV_Q8_0, KV_Q5_1, KV_E4M3 };
constexpr int PIECE = 64;
enum { ATTEND_MAX_DIM = 1024 };

__host__ __device__ constexpr int kv_bytes(int f, int d) {
    return f == KV_Q8_0 ? PIECE * d / 32 * 34 : f == KV_Q5_1 ? PIECE * d / 32 * 24 : PIECE * d * (f == KV_F32 ? 4 : f == KV_F16 ? 2 : 1);
}

/* one layer's cache inside the pages of its class */
struct KvPlace {
    size_t offset;
    int klass, heads, dim, k, v; /* formats */
    int shared;                  /* the K part is the V part */
};
__host__ __device__ inline size_t kv_head_bytes(const KvPlace &p) { return (size_t)kv_bytes(p.k, p.dim) + (p.shared ? 0 : kv_bytes(p.v, p.dim)); }

/* code byte of column d in a row of q8_0 codes */
__host__ __device__ inline int q8_place(int d) { int w = (d & 31) >> 2; return (d & ~31) + (w < 4 ? 2 * w : 2 * w - 7) * 4 + (d & 3); }

__device__ __forceinline__ float half_at(const uint8_t *p) { return __half2float(*(const __half *)p); }
__device__ __forceinline__ float e4m3_value(uint8_t c) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(c, __NV_E4M3))); }

/* one value; for the block formats code and scales, value = d q + m */
__device__ __forceinline__ int kv_code(int f, const uint8_t *part, int D, int j, int d, float *scale, float *min) {
    if (f == KV_Q8_0) {
        *scale = half_at(part + PIECE * D + (j * (D / 32) + d / 32) * 2); *min = 0.0f;
        return (int8_t)part[j * D + q8_place(d)];
    }
    const uint8_t *dm = part + PIECE * D * 5 / 8 + (j * (D / 32) + d / 32) * 4;
    *scale = half_at(dm); *min = half_at(dm + 2);
    int lo = part[j * (D / 2) + d / 2] >> (4 * (d & 1)) & 15, hi = part[PIECE * D / 2 + j * (D / 8) + d / 8] >> (d & 7) & 1;
    return lo | hi << 4;
}
__device__ __forceinline__ float kv_value(int f, const uint8_t *part, int D, int j, int d) {
    if (f == KV_F32) return ((const float *)part)[j * D + d];
    if (f == KV_F16) return half_at(part + (j * D + d) * 2);
    if (f == KV_E4M3) return e4m3_value(part[j * D + d]);
    float s, m;
    int q = kv_code(f, part, D, j, d, &s, &m);
    return f == KV_Q8_0 ? s * (float)q : fmaf(s, (float)q, m);
}

/* one group of 32 columns of slot j by a warp, lane = column; false where the format cannot hold it */
__device__ __forceinline__ bool put_q8_0(uint8_t *part, int D, int j, int d, float x) {
    float delta, recip;
    bw_q8_scale(__reduce_max_sync(~0u, magnitude(x)), &delta, &recip);
    __half h = __float2half_rn(delta);
    part[j * D + q8_place(d)] = (uint8_t)(int8_t)bw_q8_code(x, recip);
    if (!(d & 31)) *(__half *)(part + PIECE * D + (j * (D / 32) + d / 32) * 2) = h;
    return !not_finite(__half2float(h));
}
__device__ __forceinline__ bool put_q5_1(uint8_t *part, int D, int j, int d, float x) {
    float lo = x, hi = x;
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        float a = __shfl_xor_sync(~0u, lo, o), b = __shfl_xor_sync(~0u, hi, o);
        lo = a < lo ? a : lo;
        hi = b > hi ? b : hi;
    }
    float range = hi - lo;
    bool flat = range < 0x1p-100f;
    __half s = __float2half_rn(flat ? 0.0f : range / 31.0f), m = __float2half_rn(lo);
    uint32_t q = flat ? 0 : (uint32_t)(int)fmaf(x - lo, 31.0f / range, 0.5f), bits = __ballot_sync(~0u, q >> 4);
    uint32_t other = __shfl_down_sync(~0u, q, 1);
    if (!(d & 1)) part[j * (D / 2) + d / 2] = (uint8_t)((q & 15) | (other & 15) << 4);
    if (!(d & 7)) part[PIECE * D / 2 + j * (D / 8) + d / 8] = (uint8_t)(bits >> (d & 31));
    if (!(d & 31)) {
        uint8_t *dm = part + PIECE * D * 5 / 8 + (j * (D / 32) + d / 32) * 4;
        *(__half *)dm = s; *(__half *)(dm + 2) = m;
    }
    return !not_finite(__half2float(s)) && !not_finite(__half2float(m));
}
__device__ __forceinline__ bool kv_put(int f, uint8_t *part, int D, int j, int d, float x) {
    __half h;
    switch (f) {
    case KV_F32: ((float *)part)[j * D + d] = x; return true;
    case KV_F16:
        h = __float2half_rn(x);
        *(__half *)(part + (j * D + d) * 2) = h;
        return !not_finite(__half2float(h));
    default: part[j * D + d] = (uint8_t)__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); return true;
    }
}

/* one value a lane (a group of 32 columns of slot j) into a format; the whole warp takes part */
__device__ __forceinline__ void kv_put_values(int f, uint8_t *part, int D, int j, int d, float v, int *fault, int op) {
    bool bad = __any_sync(~0u, not_finite(v));
    if (!bad) {
        bool ok = f == KV_Q8_0 ? put_q8_0(part, D, j, d, v) : f == KV_Q5_1 ? put_q5_1(part, D, j, d, v) : d >= D || kv_put(f, part, D, j, d, v);
        bad = !ok;
    }
    if (bad) report_fault(fault, op);
}

/* KV_APPEND of one row by a block; k, v: [heads][dim] */
__device__ __forceinline__ void kv_append(const KvPlace &p, uint8_t *page, int slot, const float *k, const float *v, int *fault, int op) {
    const int lane = threadIdx.x & 31, groups = (p.dim + 31) / 32;
    for (int g = threadIdx.x >> 5; g < (p.shared ? 1 : 2) * p.heads * groups; g += blockDim.x >> 5) {
        int value = g >= p.heads * groups, i = value ? g - p.heads * groups : g, h = i / groups, d = i % groups * 32 + lane;
        uint8_t *part = page + h * kv_head_bytes(p) + (value ? kv_bytes(p.k, p.dim) : 0);
        kv_put_values(value ? p.v : p.k, part, p.dim, slot, d, d < p.dim ? __ldcg((value ? v : k) + h * p.dim + d) : 0.0f, fault, op);
    }
}

} // namespace bw
#endif
