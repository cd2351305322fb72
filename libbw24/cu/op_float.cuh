/* LINEAR over float weights (docs/numerics.md §3): f32 fma over columns ascending in segments of 256. Owns the mapping of work to threads. */
#ifndef BW24_CU_OP_FLOAT_CUH
#define BW24_CU_OP_FLOAT_CUH

#include "float.cuh"
#include "op_linear.cuh"
#include "pack.cuh"

namespace bw {

/* weights as in the file */
struct FloatArgs { LinearPart p; const float *x; int type, cols, rows; };

/* A block: 32 outputs x 8 rows. A warp takes every eighth segment of 256 columns, lane = output; 32 columns of weights at a time pass through
 * shared memory so that reads are coalesced. The p's of eight segments are added in order by warp 0. */
static __global__ void __launch_bounds__(256) k_linear_float(FloatArgs a) {
    __shared__ float tile[8][32][33], xs[8][32][8]; /* xs[w] then holds warp w's p's, [8 rows][32 outputs] */
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n0 = blockIdx.x * 32, row0 = blockIdx.y * 8, segs = (a.cols + 255) / 256;
    pdl_trigger();
    pdl_wait();
    float y[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int s0 = 0; s0 < segs; s0 += 8) {
        int seg = s0 + warp;
        float p[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int c0 = seg * 256; c0 < min(a.cols, (seg + 1) * 256); c0 += 32) {
            int c = c0 + lane, count = min(32, a.cols - c0);
            __syncwarp();
            if (a.type == FLOAT_F32) { /* no branch between the loads: eight at a time are under way */
#pragma unroll 8
                for (int o = 0; o < 32; o++) tile[warp][o][lane] = n0 + o < a.p.n && c < a.cols ? __ldg((const float *)a.p.w + (size_t)(n0 + o) * a.cols + c) : 0.0f;
            } else
                for (int o = 0; o < 32; o++) tile[warp][o][lane] = n0 + o < a.p.n && c < a.cols ? float_at(a.type, a.p.w, (size_t)(n0 + o) * a.cols + c) : 0.0f;
#pragma unroll
            for (int r = 0; r < 8; r++) xs[warp][lane][r] = row0 + r < a.rows && c < a.cols ? __ldcg(a.x + (size_t)(row0 + r) * a.cols + c) : 0.0f;
            __syncwarp();
            for (int k = 0; k < count; k++) {
                float w = tile[warp][lane][k];
                const float4 *xv = (const float4 *)xs[warp][k];
                float4 x0 = xv[0], x1 = xv[1];
                p[0] = fmaf(w, x0.x, p[0]); p[1] = fmaf(w, x0.y, p[1]); p[2] = fmaf(w, x0.z, p[2]); p[3] = fmaf(w, x0.w, p[3]);
                p[4] = fmaf(w, x1.x, p[4]); p[5] = fmaf(w, x1.y, p[5]); p[6] = fmaf(w, x1.z, p[6]); p[7] = fmaf(w, x1.w, p[7]);
            }
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 8; r++) xs[warp][r * 4 + (lane >> 3)][lane & 7] = p[r];
        __syncthreads();
        if (!warp)
            for (int k = 0; k < min(8, segs - s0); k++)
#pragma unroll
                for (int r = 0; r < 8; r++) y[r] = y[r] + xs[k][r * 4 + (lane >> 3)][lane & 7];
        __syncthreads();
    }
    if (warp || n0 + lane >= a.p.n) return;
#pragma unroll
    for (int r = 0; r < 8; r++)
        if (row0 + r < a.rows) linear_store(a.p, row0 + r, n0 + lane, y[r], linear_res(a.p, row0 + r, n0 + lane));
}

} // namespace bw
#endif
