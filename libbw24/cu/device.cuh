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
    float *sum;   /* [cols / 32][ld], exact float of the sum of codes */
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

__device__ __forceinline__ void report_fault(int *fault, int op) { atomicMin(fault, op); }
__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ bool not_finite(float v) { return magnitude(v) >= 0x7f800000u; }

/* tree32 of docs/numerics.md: every lane gets the sum */
__device__ __forceinline__ float warp_tree(float p) {
#pragma unroll
    for (int o = 16; o; o >>= 1) p = p + __shfl_xor_sync(~0u, p, o);
    return p;
}

/* one warp writes one group of 32 values, lane = column; the codes of Inf or NaN are undefined and reported */
__device__ __forceinline__ void quant_group(const Acts &o, int row, int group, int lane, float v, int *fault, int op) {
    uint32_t bits = __reduce_max_sync(~0u, magnitude(v));
    float delta, recip;
    if (bits >= 0x7f800000u) { if (!lane) report_fault(fault, op); bits = 0; v = 0.0f; }
    bw_q8_scale(bits, &delta, &recip);
    int a = bw_q8_code(v, recip), half = __reduce_add_sync(lane < 16 ? 0xffffu : 0xffff0000u, a), sum = half + __shfl_xor_sync(~0u, half, 16);
    int word = lane >> 2, place = word < 4 ? 2 * word : 2 * word - 7;
    o.q[(size_t)row * o.cols + group * 32 + place * 4 + (lane & 3)] = (int8_t)a;
    if (lane) return;
    size_t at = (size_t)group * o.ld + row;
    o.delta[at] = delta; o.sum[at] = (float)sum; o.low[at] = (float)half;
}

} // namespace bw
#endif
