/* The sum over the slots of a mixture where their products stand apart, those of the processor's experts among them. Owns the mapping of work to threads. */
#ifndef BW24_CU_OP_EXPERTS_SUM_CUH
#define BW24_CU_OP_EXPERTS_SUM_CUH

#include "device.cuh"

namespace bw {

/* y[row] = sum over the slots, ascending, of w_s * d_s: of a pair whose place is below `own` from row `place` of host (the processor's memory, read over
 * the bus, each value once), else from row `pair` of d. place NULL: all from d. grid (n / 256, rows) */
static __global__ void __launch_bounds__(256) k_experts_sum(const float *host, int own, const int *place, const float *d, const float *route, float *y, int n,
                                                            int top) {
    const int c = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (c >= n) return;
    float v = 0.0f;
#pragma unroll 4
    for (int s = 0; s < top; s++) {
        const size_t pair = (size_t)row * top + s;
        const int at = place ? __ldcg(place + pair) : own;
        const float *x = at < own ? host + (size_t)at * n : d + pair * n;
        v = fmaf(__ldcg(route + (size_t)row * 2 * top + s), __ldcg(x + c), v);
    }
    y[(size_t)row * n + c] = v;
}

} // namespace bw
#endif
