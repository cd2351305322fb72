/* LINEAR over float weights for few rows or few outputs: as k_linear_float, but with a thread a sum of 256 columns, so that a router's few outputs use the
 * whole card. Owns the mapping of work to threads. */
#ifndef BW24_CU_OP_FLOAT_FEW_CUH
#define BW24_CU_OP_FLOAT_FEW_CUH

#include "op_float.cuh"

namespace bw {

enum { FEW_ROWS = 8, FEW_OUTS = 2, FEW_SEGS = 8, FEW_PITCH = 257 }; /* the pitch keeps segments in separate banks */

struct FewShared { float w[FEW_OUTS][FEW_SEGS][FEW_PITCH], p[FEW_ROWS][FEW_OUTS][FEW_SEGS]; float x[FEW_ROWS][FEW_SEGS][FEW_PITCH]; }; /* x: as many rows as there are */

__device__ __forceinline__ void few_weights(const FloatArgs &a, FewShared &sh, int c0) {
    const int cols = min(a.cols - c0, FEW_SEGS * 256), n0 = blockIdx.x * FEW_OUTS;
#pragma unroll
    for (int o = 0; o < FEW_OUTS; o++)
#pragma unroll
        for (int k = 0; k < FEW_SEGS; k++) {
            int c = k * 256 + threadIdx.x;
            sh.w[o][k][threadIdx.x] = c < cols && n0 + o < a.p.n ? float_at(a.type, a.p.w, (size_t)(n0 + o) * a.cols + c0 + c) : 0.0f;
        }
}

/* grid (outputs / FEW_OUTS, rows / FEW_ROWS); 256 threads: (row, output, segment) */
static __global__ void __launch_bounds__(256, 2) k_float_few(FloatArgs a) {
    extern __shared__ __align__(16) uint8_t raw[];
    FewShared &sh = *(FewShared *)raw;
    const int row0 = blockIdx.y * FEW_ROWS, rows = min(a.rows - row0, (int)FEW_ROWS);
    const int t = threadIdx.x, seg = t % FEW_SEGS, out = t / FEW_SEGS % FEW_OUTS, row = t / (FEW_SEGS * FEW_OUTS), n = blockIdx.x * FEW_OUTS + t % FEW_OUTS;
    pdl_trigger();
    few_weights(a, sh, 0);
    pdl_wait();
    float y = 0.0f;
    for (int c0 = 0; c0 < a.cols; c0 += FEW_SEGS * 256) {
        if (c0) few_weights(a, sh, c0);
        for (int r = 0; r < rows; r++)
#pragma unroll
            for (int k = 0; k < FEW_SEGS; k++) {
                int c = c0 + k * 256 + t;
                sh.x[r][k][t] = c < a.cols ? __ldcg(a.x + (size_t)(row0 + r) * a.cols + c) : 0.0f;
            }
        __syncthreads();
        const int count = min(256, a.cols - c0 - seg * 256);
        if (row < rows) {
            const float *w = sh.w[out][seg], *x = sh.x[row][seg];
            float p = 0.0f;
#pragma unroll 16
            for (int c = 0; c < count; c++) p = fmaf(w[c], x[c], p);
            sh.p[row][out][seg] = p;
        }
        __syncthreads();
        if (t < rows * FEW_OUTS)
            for (int s = 0; s < FEW_SEGS && c0 + s * 256 < a.cols; s++) y = y + sh.p[t / FEW_OUTS][t % FEW_OUTS][s];
    }
    if (t < rows * FEW_OUTS && n < a.p.n) linear_store(a.p, row0 + t / FEW_OUTS, n, y, linear_res(a.p, row0 + t / FEW_OUTS, n));
}

} // namespace bw
#endif
