/* NORM (docs/numerics.md §4) with the int8 quantisation of the row in its epilogue. One block a row; a warp takes segments of 256 columns,
 * lane l columns l, l + 32, ..., so a register index is a quantisation group. Reads the row once, writes codes, scales and sums. */
#ifndef BW24_CU_OP_NORM_CUH
#define BW24_CU_OP_NORM_CUH

#include "op_linear.cuh"

namespace bw {

struct NormArgs {
    const float *x; /* [rows][n] */
    const float *w; /* [n], may be NULL */
    Acts o;
    int n;
    float eps;
};

/* SEGS: most segments a warp may hold */
template <int SEGS> __global__ void __launch_bounds__(512) k_norm_quant(NormArgs a) {
    __shared__ float part[128];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, S = (a.n + 255) / 256, row = blockIdx.x;
    const float *x = a.x + (size_t)row * a.n;
    float v[SEGS][8], w[SEGS][8];
#pragma unroll
    for (int i = 0; i < SEGS; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int c = (warp + i * warps) * 256 + j * 32 + lane;
            w[i][j] = a.w && c < a.n ? __ldg(a.w + c) : 1.0f;
        }
    pdl_trigger();
    pdl_wait();
#pragma unroll
    for (int i = 0; i < SEGS; i++) {
        float p = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int c = (warp + i * warps) * 256 + j * 32 + lane;
            v[i][j] = c < a.n ? __ldcg(x + c) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) p = fmaf(v[i][j], v[i][j], p);
#pragma unroll
        for (int o = 16; o; o >>= 1) p = p + __shfl_xor_sync(~0u, p, o);
        if (!lane && warp + i * warps < S) part[warp + i * warps] = p;
    }
    __syncthreads();
    float total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < S; s++) total = total + part[s];
    float r = 1.0f / sqrtf(total / (float)a.n + a.eps);
#pragma unroll
    for (int i = 0; i < SEGS; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int g = (warp + i * warps) * 8 + j;
            if (g * 32 < a.n) quant_group(a.o, row, g, lane, a.w ? (v[i][j] * r) * w[i][j] : v[i][j] * r);
        }
}

/* quantise [rows][n] without a norm; optionally GLU of [rows][2n] first. One warp a group. */
template <bool GLU> __global__ void __launch_bounds__(256) k_quant(const float *x, Acts o, int n) {
    int lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (g * 32 >= n) return;
    float v;
    if (GLU) { const float *p = x + (size_t)row * 2 * n + g * 32 + lane; v = bw_silu(__ldcg(p)) * __ldcg(p + n); }
    else v = __ldcg(x + (size_t)row * n + g * 32 + lane);
    quant_group(o, row, g, lane, v);
}

} // namespace bw
#endif
