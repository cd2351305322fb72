/* The sum over the slots of a mixture where their products stand apart, those of the processor's experts among them. Owns the mapping of work to threads. */
#ifndef BW24_CU_OP_EXPERTS_SUM_CUH
#define BW24_CU_OP_EXPERTS_SUM_CUH

#include "device.cuh"

namespace bw {

/* y[row] = sum over the slots, ascending, of w_s * d_s: of a pair whose place is below `own` from row `place` of host (the processor's memory, read over
 * the bus, each value once), else from row `pair` of d. place NULL: all from d */
struct ExpertsSum {
    const float *host;
    int own;
    const int *place;
    const float *d, *route;
    float *y;
    int n, top;
};
/* N columns from c on; eight slots' values are on their way at once */
template <int N> __device__ __forceinline__ void experts_sum(const ExpertsSum &a, int row, int c) {
    float v[N] = {};
#pragma unroll 8
    for (int s = 0; s < a.top; s++) {
        const size_t pair = (size_t)row * a.top + s;
        const int at = a.place ? __ldcg(a.place + pair) : a.own;
        const float *x = (at < a.own ? a.host + (size_t)at * a.n : a.d + pair * a.n) + c;
        const float w = __ldcg(a.route + (size_t)row * 2 * a.top + s);
        float d[4];
        if (N == 4) { const float4 f = __ldcg((const float4 *)x); d[0] = f.x; d[1] = f.y; d[2] = f.z; d[3] = f.w; }
        else d[0] = __ldcg(x);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = fmaf(w, d[i], v[i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) a.y[(size_t)row * a.n + c + i] = v[i];
}

/* grid (n / SUM_COLS, rows); four columns a thread where rows begin on 16 bytes */
enum { SUM_COLS = 1024 };
static __global__ void __launch_bounds__(256) k_experts_sum(ExpertsSum a) {
    const int c = (blockIdx.x * 256 + threadIdx.x) * 4;
    pdl_trigger();
    pdl_wait();
    if (!((a.n & 3) | ((uint64_t)a.host & 15))) {
        if (c < a.n) experts_sum<4>(a, blockIdx.y, c);
    } else
        for (int i = c; i < min(c + 4, a.n); i++) experts_sum<1>(a, blockIdx.y, i);
}

} // namespace bw
#endif
