/* A run of row ops whose values stay in registers: NORM of whole rows, ADD, SCALE of one width (docs/numerics.md §4, §5). Owns the mapping of a row to
 * threads. Which runs these are is chain.cu's; all others are the interpreter's (op_rows.cuh). */
#ifndef BW24_CU_OP_CHAIN_CUH
#define BW24_CU_OP_CHAIN_CUH

#include "chain.cuh"

namespace bw {

/* what pass k reads, all of it asked for at once. Where nothing may be read yet, weights stand in for rows. */
__device__ __forceinline__ void chain_read(const ChainArgs &a, int k, bool ready, float (&x)[8], float (&b)[8], float (&w)[8]) {
    const ChainPass &p = a.pass[k];
    const int seg = threadIdx.x >> 5, col = seg * 256 + (threadIdx.x & 31), whole = a.n / 32 - seg * 8;
    const size_t at = (size_t)blockIdx.x * a.n + col;
    const float *px = ready ? p.a + at : a.still + col, *pb = ready ? p.b + at : a.still + col;
    if (p.w)
#pragma unroll
        for (int j = 0; j < 8; j++) w[j] = j < whole ? __ldcg(p.w + col + j * 32) : 0.0f;
    if (p.a)
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = j < whole ? __ldcg(px + j * 32) : 0.0f;
    if (p.b)
#pragma unroll
        for (int j = 0; j < 8; j++) b[j] = j < whole ? __ldcg(pb + j * 32) : 0.0f;
}

/* 1 / sqrt(mean or sum of squares + eps) of the row; part: one float a warp, zeros behind */
__device__ __forceinline__ float chain_norm(const ChainPass &p, int n, const float (&v)[8], float *part) {
    const int S = blockDim.x >> 5;
    float q = 0.0f, total = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) q = fmaf(v[j], v[j], q);
    q = warp_tree(q);
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = q;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < CHAIN_WARPS; s += 4) {
        if (s % 8 == 0 && s >= S) break;
        const float4 k = *(const float4 *)(part + s);
        total = total + k.x; total = total + k.y; total = total + k.z; total = total + k.w;
    }
    return 1.0f / sqrtf((p.l2 ? total : total / (float)n) + p.eps);
}

/* the row's last value quantised: a warp's 256 values through shared memory, 8 columns a lane */
__device__ __forceinline__ void chain_quant(const ChainArgs &a, const float (&v)[8], float *held, bool ready, int *nowhere) {
    const int lane = threadIdx.x & 31, g = (threadIdx.x >> 5) * 8 + (lane >> 2), row = blockIdx.x;
    float t[8];
#pragma unroll
    for (int j = 0; j < 8; j++) held[j * 32 + lane] = v[j];
    __syncwarp();
    const float4 t0 = *(const float4 *)(held + lane * 8), t1 = *(const float4 *)(held + lane * 8 + 4);
    t[0] = t0.x; t[1] = t0.y; t[2] = t0.z; t[3] = t0.w; t[4] = t1.x; t[5] = t1.y; t[6] = t1.z; t[7] = t1.w;
    const Quant8 q = quant_eight(t, ready ? a.fault : nowhere, a.quant_op);
    __syncwarp();
    if (!ready || g * 32 >= a.n) return;
    put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + g * 32, lane, q);
    if (lane & 3) return;
    const size_t at = (size_t)g * a.o.ld + row;
    put_scales(a.o, at, q);
}

/* One block a row, one warp a segment of 256 columns; a lane's columns are lane, lane + 32, ... of it, the strands of NORM. Turn 0 goes through the same
 * instructions before the dependency wait and keeps nothing: a row's time is that of fetching them, and then they are at hand. */
static __global__ void __launch_bounds__(CHAIN_WARPS * 32, 1) k_chain(const __grid_constant__ ChainArgs a) {
    __shared__ __align__(16) float part[2][CHAIN_WARPS], held[CHAIN_WARPS][256];
    __shared__ int nowhere;
    const int whole = a.n / 32 - (threadIdx.x >> 5) * 8; /* columns of a lane within the row */
    const size_t at = (size_t)blockIdx.x * a.n + (threadIdx.x >> 5) * 256 + (threadIdx.x & 31);
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, x[8], b[8], w[8];
    int turn = a.turn, norms = 0;
    pdl_trigger();
    if (threadIdx.x < CHAIN_WARPS) part[0][threadIdx.x] = part[1][threadIdx.x] = 0.0f;
    __syncthreads();
    asm volatile("" : "+r"(turn)); /* one text for both turns */
#pragma unroll 1
    for (; turn < 2; turn++) {
        if (turn) pdl_wait();
        chain_read(a, 0, turn, x, b, w);
#pragma unroll 1
        for (int k = 0; k < a.n_passes; k++) {
            const ChainPass &p = a.pass[k];
            float more[8], scale[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                more[j] = p.b ? b[j] : v[j];
                scale[j] = p.w ? w[j] : 1.0f;
                v[j] = p.a ? x[j] : v[j];
            }
            if (k + 1 < a.n_passes) chain_read(a, k + 1, turn, x, b, w);
            if (p.norm) {
                const float r = chain_norm(p, a.n, v, part[norms++ & 1]);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = (v[j] * r) * scale[j];
            }
            if (p.add)
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = v[j] + more[j];
            if (p.scale) {
                const float c = p.c ? __ldg(p.c) : p.f;
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = v[j] * c;
            }
            if (turn && p.y)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (j < whole) p.y[at + j * 32] = v[j];
        }
        if (a.o.q) chain_quant(a, v, held[threadIdx.x >> 5], turn, &nowhere);
    }
}

} // namespace bw
#endif
