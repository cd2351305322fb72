/* LINEAR over float weights (docs/numerics.md §3): f32 fma over columns ascending in segments of 256. Owns the mapping of work to threads. */
#ifndef BW24_CU_OP_FLOAT_CUH
#define BW24_CU_OP_FLOAT_CUH

#include "float.cuh"
#include "op_linear.cuh"

namespace bw {

/* weights as in the file */
struct FloatArgs { LinearPart p; const float *x; int type, cols, rows; };

enum { FLOAT_OUTS = 32, FLOAT_ROWS = 64, FLOAT_COLS = 8 };

/* eight columns of a warp's rows and weights, [column][row or output ^ 16 * (column / 4)]: without bank conflicts from the lanes that bring four columns of
 * 16 rows each, and 32 bytes in a row for those that read eight rows of a column; y: the sums over the segments so far */
struct FloatShared {
    struct { float x[FLOAT_COLS][FLOAT_ROWS], w[FLOAT_COLS][FLOAT_OUTS]; } warp[8];
    float y[FLOAT_ROWS][FLOAT_OUTS];
};

/* columns c .. c + 3 of a row of n, zeros past them: of x, which another kernel wrote, or of weights */
template <bool X> __device__ __forceinline__ float4 float_four(int type, const void *w, size_t row, int c, int n) {
    const size_t at = row * n + c;
    const float *f = (const float *)w + at;
    if ((X || type == FLOAT_F32) && !(n & 3)) return c >= n ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : X ? __ldcg((const float4 *)f) : __ldg((const float4 *)f);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = c + i >= n ? 0.0f : X ? __ldcg(f + i) : float_at(type, (const uint8_t *)w, at + i);
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* A lane's eight rows x eight outputs of one segment: four columns a lane on their way while eight columns of 16 of 96 rows (64 of x, 32 of weights) are
 * multiplied. */
struct FloatSegment {
    const FloatArgs &a;
    FloatShared &sh;
    int lane, warp, n0, row0;
    float4 next[6];
    __device__ __forceinline__ void load(int c0) {
        const int c = c0 + (lane & 1) * 4;
#pragma unroll
        for (int i = 0; i < 6; i++) {
            const int row = (i < 4 ? row0 + i * 16 : n0 + (i - 4) * 16) + (lane >> 1);
            const bool have = i < 4 ? row < a.rows : row < a.p.n;
            next[i] = !have ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : i < 4 ? float_four<true>(FLOAT_F32, a.x, row, c, a.cols) : float_four<false>(a.type, a.p.w, row, c, a.cols);
        }
    }
    __device__ __forceinline__ void put() {
        auto &to = sh.warp[warp];
#pragma unroll
        for (int i = 0; i < 6; i++) {
            const float v[4] = {next[i].x, next[i].y, next[i].z, next[i].w};
            const int at = ((i & 3) * 16 + (lane >> 1)) ^ (lane & 1) * 16;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = (lane & 1) * 4 + e;
                if (i < 4) to.x[c][at] = v[e];
                else to.w[c][at] = v[e];
            }
        }
    }
    __device__ __forceinline__ void run(int c0, int end, float (&p)[8][8]) {
        load(c0);
        for (; c0 < end; c0 += FLOAT_COLS) {
            __syncwarp();
            put();
            __syncwarp();
            if (c0 + FLOAT_COLS < end) load(c0 + FLOAT_COLS);
#pragma unroll
            for (int c = 0; c < FLOAT_COLS; c++) {
                const float4 *x = (const float4 *)(sh.warp[warp].x[c] + ((lane >> 2) * 8 ^ (c >> 2) * 16));
                const float4 *w = (const float4 *)(sh.warp[warp].w[c] + ((lane & 3) * 8 ^ (c >> 2) * 16));
                const float4 x0 = x[0], x1 = x[1], w0 = w[0], w1 = w[1];
                const float xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w}, ws[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
                for (int r = 0; r < 8; r++)
#pragma unroll
                    for (int o = 0; o < 8; o++) p[r][o] = fmaf(ws[o], xs[r], p[r][o]);
            }
        }
    }
};

/* A block: 32 outputs x 64 rows. A warp takes every eighth segment of 256 columns, a lane 8 x 8 results; the p's of eight segments are added in order. */
static __global__ void __launch_bounds__(256) k_linear_float(FloatArgs a) {
    __shared__ __align__(16) FloatShared sh;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, segs = (a.cols + 255) / 256;
    FloatSegment s = {a, sh, lane, warp, (int)blockIdx.x * FLOAT_OUTS, (int)blockIdx.y * FLOAT_ROWS};
    pdl_trigger();
    pdl_wait();
    for (int s0 = 0; s0 < segs; s0 += 8) {
        float p[8][8];
#pragma unroll
        for (int i = 0; i < 64; i++) (&p[0][0])[i] = 0.0f;
        if (s0 + warp < segs) s.run((s0 + warp) * 256, min(a.cols, (s0 + warp + 1) * 256), p);
        for (int k = s0; k < min(segs, s0 + 8); k++) {
            __syncthreads();
            if (k != s0 + warp) continue;
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int o = 0; o < 8; o += 4) {
                    float4 *y = (float4 *)&sh.y[(lane >> 2) * 8 + r][(lane & 3) * 8 + o];
                    const float4 v = k ? *y : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    *y = make_float4(v.x + p[r][o], v.y + p[r][o + 1], v.z + p[r][o + 2], v.w + p[r][o + 3]);
                }
        }
    }
    __syncthreads();
    const int out = s.n0 + lane;
    for (int r = warp; r < FLOAT_ROWS && out < a.p.n && s.row0 + r < a.rows; r += 8) linear_store(a.p, s.row0 + r, out, sh.y[r][lane], linear_res(a.p, s.row0 + r, out));
}

} // namespace bw
#endif
