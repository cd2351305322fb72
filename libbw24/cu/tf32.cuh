/* Products of a warp in tf32 on tensor cores. Knows no op. */
#ifndef BW24_CU_TF32_CUH
#define BW24_CU_TF32_CUH

#include "device.cuh"

namespace bw {

/* v for a product, which drops the last 13 bits: half a unit more, so that it is rounded (the conversion instruction does the same at an eighth of the speed) */
__device__ __forceinline__ float tf32(float v) { return __uint_as_float(__float_as_uint(v) + 0x1000u); }
/* c [16][8] += a [16][8] b [8][8]; lane (g, t): a of rows g, g + 8 at column t, then at t + 4; b of rows t, t + 4 at column g; c of rows g, g + 8 at columns 2t, 2t + 1 */
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)),
                   "r"(__float_as_uint(b1)));
}

} // namespace bw
#endif
