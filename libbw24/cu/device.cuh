/* What every kernel shares: programmatic dependent launch, warp sums, faults, the step's rows as the device sees them, quantised
 * activations. Knows no op. */
#ifndef BW24_CU_DEVICE_CUH
#define BW24_CU_DEVICE_CUH

#include <cuda_fp16.h>
#include <stdint.h>
#include "../canon.h"

namespace bw {

enum { MAX_CLASS = 4, NO_FAULT = 0x7fffffff };

/* Quantised rows. Codes of a group are stored as words 0 4 1 5 2 6 3 7, so that lane tig of an mma reads its B registers as 8 bytes. */
struct Acts {
    int8_t *q;    /* [ld][cols] */
    float *delta; /* [cols / 32][ld] */
    float *sum;   /* [cols / 32][ld], scale times the sum of codes, exact */
    float *low;   /* [cols / 32][ld], the same of the first 16 codes */
    int ld;       /* rows rounded up to 8, 32 or a multiple of 128 */
    int cols;
};

/* The rows of a step, in device memory. Arrays have one entry a row; "want" arrays hold the rows whose logits are wanted. */
struct StepRows {
    int *fault;               /* first op that met Inf or NaN, or NO_FAULT */
    unsigned long long *best; /* likeliest token of each wanted row as (ordered logit, ~id), 0 before the step */
    const int *token, *pos, *want_pos, *want_row;
    const int *table, *want_table; /* [classes][rows]: where the row's page table of a class begins in `pages` */
    uint8_t *const *pages;    /* page pointers of the step's sequences */
    int n, n_want;
};

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/* every thread of every kernel passes here before it touches memory that an earlier kernel writes or reads */
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void cp16(void *dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"((uint32_t)__cvta_generic_to_shared(dst)), "l"(src));
}
__device__ __forceinline__ void cp8(void *dst, const void *src) {
    asm volatile("cp.async.ca.shared.global [%0],[%1],8;" ::"r"((uint32_t)__cvta_generic_to_shared(dst)), "l"(src));
}
__device__ __forceinline__ void cp4(void *dst, const void *src) {
    asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"((uint32_t)__cvta_generic_to_shared(dst)), "l"(src));
}

__device__ __forceinline__ void report_fault(int *fault, int op) { atomicMin(fault, op); }
__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ bool not_finite(float v) { return magnitude(v) >= 0x7f800000u; }

/* tree32 of docs/numerics.md: every lane gets the sum */
__device__ __forceinline__ float warp_tree(float p) {
#pragma unroll
    for (int o = 16; o; o >>= 1) p = p + __shfl_xor_sync(~0u, p, o);
    return p;
}

/* 1 / d, correctly rounded, of a d with four significant bits and an exponent far from the ends: the steps of a division without its checks. They give
 * the nearest float of each of the eight mantissas for any start within 8 units of its last place. */
__device__ __forceinline__ float act_recip(float d) {
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(d));
    return fmaf(r, fmaf(-d, r, 1.0f), r);
#else
    return 1.0f / d;
#endif
}
/* bw_act_scale without a division's checks: bits of the largest magnitude, below BW_ACT_LIMIT */
__device__ __forceinline__ void act_scale(uint32_t bits, float *d, float *r) {
    const bool zero = bits < 0x0d800000u; /* 2^-100 */
    const float up = __uint_as_float((__float_as_uint(__uint_as_float(zero ? 0x3f800000u : bits) * (1.0f / 127.0f)) + 0xfffffu) & 0xfff00000u);
    *d = zero ? 0.0f : up;
    *r = zero ? 0.0f : act_recip(up);
}
/* code of a value: adding 1.5 * 2^23 rounds as rint does */
__device__ __forceinline__ int act_code(float v, float r) { return __float_as_int(v * r + 12582912.0f) - 0x4b400000; }

/* one warp writes one group of 32 values, lane = column; the codes of values that are too large, Inf or NaN are undefined and reported */
__device__ __forceinline__ void quant_group(const Acts &o, int row, int group, int lane, float v, int *fault, int op) {
    uint32_t bits = __reduce_max_sync(~0u, magnitude(v));
    float delta, recip;
    if (bits >= BW_ACT_LIMIT) { if (!lane) report_fault(fault, op); bits = 0; v = 0.0f; }
    act_scale(bits, &delta, &recip);
    int a = act_code(v, recip), half = __reduce_add_sync(lane < 16 ? 0xffffu : 0xffff0000u, a), sum = half + __shfl_xor_sync(~0u, half, 16);
    o.q[(size_t)row * o.cols + group * 32 + ((lane >> 2) < 4 ? 2 * (lane >> 2) : 2 * (lane >> 2) - 7) * 4 + (lane & 3)] = (int8_t)a;
    if (lane) return;
    size_t at = (size_t)group * o.ld + row;
    o.delta[at] = delta; o.sum[at] = delta * (float)sum; o.low[at] = delta * (float)half;
}

/* N <= 8 groups of 32 values at once, v[j] = this lane's column of group j; d and r: scale and reciprocal of group (lane % N), which lanes 0 .. N - 1
 * compute, so that a division is done once a group and not once a lane */
template <int N> __device__ __forceinline__ void quant_scales(float (&v)[N], int lane, float *d, float *r, int *fault, int op) {
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        uint32_t bits = __reduce_max_sync(~0u, magnitude(v[j]));
        if (bits >= BW_ACT_LIMIT) { if (!lane) report_fault(fault, op); bits = 0; v[j] = 0.0f; }
        if (lane % N == j) mine = bits;
    }
    act_scale(mine, d, r);
}
/* code of this lane's value of group j, the sums of the first half and of the whole group */
__device__ __forceinline__ int quant_code(float v, int j, float r, int lane, int *half, int *sum) {
    int a = act_code(v, __shfl_sync(~0u, r, j)), h = __reduce_add_sync(lane < 16 ? 0xffffu : 0xffff0000u, a), first = __shfl_sync(~0u, h, 0);
    *half = first;
    *sum = first + __shfl_sync(~0u, h, 31);
    return a;
}
__device__ __forceinline__ int code_place(int lane) { return ((lane >> 2) < 4 ? 2 * (lane >> 2) : 2 * (lane >> 2) - 7) * 4 + (lane & 3); }

/* groups g0 .. g0 + N - 1 of a row; groups past the end of the row are left out */
template <int N> __device__ __forceinline__ void quant_groups(const Acts &o, int row, int g0, int lane, float (&v)[N], int *fault, int op) {
    float d, r;
    int half = 0, sum = 0;
    quant_scales<N>(v, lane, &d, &r, fault, op);
#pragma unroll
    for (int j = 0; j < N; j++) {
        int h, s, a = quant_code(v[j], j, r, lane, &h, &s);
        if (lane == j) { half = h; sum = s; }
        if ((g0 + j) * 32 < o.cols) o.q[(size_t)row * o.cols + (g0 + j) * 32 + code_place(lane)] = (int8_t)a;
    }
    if (lane < N && (g0 + lane) * 32 < o.cols) {
        size_t at = (size_t)(g0 + lane) * o.ld + row;
        o.delta[at] = d; o.sum[at] = d * (float)sum; o.low[at] = d * (float)half;
    }
}

/* The same with 8 consecutive columns a lane, four lanes a group: codes as two words, scale, sums of the codes of the first half and of the group (exact in
 * every lane, `low` in the first of the four). */
struct Quant8 { uint32_t w0, w1; float d; int low, sum; };
__device__ __forceinline__ Quant8 quant_eight(const float (&v)[8], int *fault, int op) {
    uint32_t bits = 0, c[8];
    float r;
    Quant8 o;
#pragma unroll
    for (int j = 0; j < 8; j++) bits = max(bits, magnitude(v[j]));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
    if (bits >= BW_ACT_LIMIT) { report_fault(fault, op); bits = 0; }
    act_scale(bits, &o.d, &r);
#pragma unroll
    for (int j = 0; j < 8; j++) c[j] = __float_as_uint(v[j] * r + 12582912.0f);
    o.w0 = __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
    o.w1 = __byte_perm(__byte_perm(c[4], c[5], 0x0040), __byte_perm(c[6], c[7], 0x0040), 0x5410);
    o.sum = __dp4a((int)o.w0, 0x01010101, __dp4a((int)o.w1, 0x01010101, 0));
    o.low = o.sum + __shfl_xor_sync(~0u, o.sum, 1);
    o.sum = o.low + __shfl_xor_sync(~0u, o.low, 2);
    return o;
}
/* what a group has beside its codes, by the first of its lanes */
__device__ __forceinline__ void put_scales(const Acts &o, size_t at, const Quant8 &q) {
    o.delta[at] = q.d; o.sum[at] = q.d * (float)q.sum; o.low[at] = q.d * (float)q.low;
}
/* the lane's two words among the eight of its group: 0 4 1 5 2 6 3 7 */
__device__ __forceinline__ void put_eight(uint8_t *group, int lane, const Quant8 &o) {
    int j = lane & 3;
    uint32_t *at = (uint32_t *)group + (j < 2 ? 4 * j : 4 * j - 7);
    at[0] = o.w0; at[2] = o.w1;
}

/* NORM of a row of n values (docs/numerics.md section 4) by the first `warps` warps of a block; all of its threads come here. A warp takes segments
 * warp, warp + warps, ...: in strands (lane, lane + 32, ...) for the sum, then 8 consecutive columns a lane for the values, handed to
 * put(segment, column of the lane's first value, values, how many of them lie within the row). part: shared memory, one float a segment.
 * Weights of a warp's first segment are read before the dependency wait. */
struct NormRow { const float *x, *w; int n, l2; float eps; };
__device__ __forceinline__ void load_eight(const float *p, int c, int n, bool whole, bool cached, float (&v)[8]) {
    if (whole) {
        if (c < n) {
            const float4 *q = (const float4 *)(p + c);
            float4 a = cached ? __ldg(q) : __ldcg(q), b = cached ? __ldg(q + 1) : __ldcg(q + 1);
            v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (c + j < n) v[j] = __ldcg(p + c + j);
}
template <class Put> __device__ __forceinline__ void norm_row(const NormRow &a, int warps, float *part, Put put) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, S = (a.n + 255) >> 8;
    const bool whole = !(a.n & 7), mine = warp < warps && warp < S;
    float w[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (mine && a.w) load_eight(a.w, warp * 256 + lane * 8, a.n, whole, true, w);
    pdl_wait();
    if (mine) load_eight(a.x, warp * 256 + lane * 8, a.n, whole, false, v);
    if (mine)
        for (int s = warp; s < S; s += warps) {
            float t[8], p = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) t[j] = s * 256 + j * 32 + lane < a.n ? __ldcg(a.x + s * 256 + j * 32 + lane) : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) p = fmaf(t[j], t[j], p);
            p = warp_tree(p);
            if (!lane) part[s] = p;
        }
    __syncthreads();
    if (!mine) return;
    float total = 0.0f;
#pragma unroll 16
    for (int s = 0; s < S; s++) total = total + part[s];
    const float r = 1.0f / sqrtf((a.l2 ? total : total / (float)a.n) + a.eps);
    for (int s = warp; s < S; s += warps) {
        const int c = s * 256 + lane * 8;
        if (s != warp) {
            if (a.w) load_eight(a.w, c, a.n, whole, true, w);
            load_eight(a.x, c, a.n, whole, false, v);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = c + j >= a.n ? 0.0f : a.w ? (v[j] * r) * w[j] : v[j] * r;
        put(s, c, v, min(8, a.n - c));
    }
}

} // namespace bw
#endif
