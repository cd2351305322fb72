/* PERHEAD's input: the columns of each head as a row of their own, as floats or quantised (docs/numerics.md §2, §12). Owns the mapping of work to threads;
 * the products are those of EXPERTS, a head an expert. */
#ifndef BW24_CU_OP_PERHEAD_CUH
#define BW24_CU_OP_PERHEAD_CUH

#include "moe.cuh"

namespace bw {

/* x: [rows][heads][stride], of each head the columns [from, from + cols) */
struct HeadRows {
    const float *x;
    float *y; /* [rows][heads][cols]; NULL: not wanted */
    Acts o;   /* the same quantised; q NULL: not wanted */
    int heads, stride, from, cols, *fault, op;
};

/* grid (heads, rows), a warp a group of 32 columns */
static __global__ void __launch_bounds__(128) k_head_rows(HeadRows a) {
    const int lane = threadIdx.x & 31, pair = blockIdx.y * a.heads + blockIdx.x;
    const float *x = a.x + (size_t)pair * a.stride + a.from;
    pdl_trigger();
    pdl_wait();
#pragma unroll 1 /* unrolled, the values around the call of a division spill on sm_120a */
    for (int g = threadIdx.x >> 5; g * 32 < a.cols; g += 4) {
        const int c = g * 32 + lane;
        float v = c < a.cols ? __ldcg(x + c) : 0.0f;
        if (a.y && c < a.cols) a.y[(size_t)pair * a.cols + c] = v;
        if (a.o.q) quant_group(a.o, pair, g, lane, v, a.fault, a.op);
    }
}

} // namespace bw
#endif
