/* EXPERTS over quantised weights for many rows: the pairs (row, slot) of an expert as an int8 tensor-core GEMM in tiles of 64, the same program as
 * op_experts.cuh, hence the same bits. Owns the gathering of rows; stages and arithmetic are op_gemm.cuh's. Cards of warp groups: op_experts_groups.cuh. */
#ifndef BW24_CU_OP_EXPERTS_GEMM_CUH
#define BW24_CU_OP_EXPERTS_GEMM_CUH

#include <type_traits>
#include "moe.cuh"
#include "op_experts_groups.cuh"

namespace bw {

enum { EXPERT_HALF = 64 }; /* pairs of a block: half a tile */

/* w: gate and up (or the one matrix) of the tile's expert; row: in x of each of its pairs, -1: not there */
template <class U, int STAGES = GEMM_STAGES> struct ExpertShared : GemmShared<U, STAGES, EXPERT_HALF> {
    const uint8_t *w[2];
    int row[EXPERT_HALF];
    float4 y[8][256]; /* sums over the segments so far, of each thread: registers hold those of a segment */
};
constexpr int EXPERT_PITCH = 68; /* floats a row of finished values in shared memory */

/* Stages as GemmLoad's; tiles of 16 outputs of gate and up in turn, where there are both. */
template <class U> struct ExpertLoad {
    const ExpertGemmArgs &a;
    ExpertShared<U> &sh;
    int tile0, tiles;
    __device__ __forceinline__ const uint8_t *unit(int t, int seg) const {
        const int tile = min(tile0 + (a.n_mats == 2 ? t >> 1 : t), tiles - 1);
        return sh.w[a.n_mats == 2 ? t & 1 : 0] + ((size_t)tile * a.m[0].segs + seg) * U::UNIT;
    }
    __device__ __forceinline__ void scales(int seg) {
        constexpr int N = U::SCALE / 16;
        if (seg < a.m[0].segs)
            for (int i = threadIdx.x; i < 8 * N; i += 256) cp16(sh.raw[seg % 3] + i * 16, unit(i / N, seg) + 2 * U::HALF + (i % N) * 16);
    }
    __device__ __forceinline__ void side(float *to, const float *from, size_t at, bool have) {
        if (have) cp4(to, from + at);
        else *to = 0.0f;
    }
    /* of a stage that has come for this thread, by each for what it asked for */
    __device__ __forceinline__ void finish(int slot) const {
        const int at = threadIdx.x & 63;
        float *to = &sh.delta[slot][threadIdx.x >> 6][(at >> 1) * 4 + (at & 1)];
        to[2] = to[0] * -MAGIC_F;
    }
    __device__ __forceinline__ void stage(int k) {
        constexpr int N = U::HALF / 16;
        int thread = threadIdx.x;
        if (U::PACKS == 2) asm volatile("" : "+r"(thread)); /* anew for each stage, so that no address made from it stays in a register */
        if (k < 2 * a.m[0].segs) {
            const int seg = k >> 1, h = k & 1, slot = k % GEMM_STAGES, g = thread >> 6, at = thread & 63;
#pragma unroll
            for (int j = 0; j < (8 * N + 255) / 256; j++) {
                int i = thread + j * 256;
                if (8 * N % 256 == 0 || i < 8 * N) cp16(sh.a[slot] + i * 16, unit(i / N, seg) + h * U::HALF + (i % N) * 16);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int col = k * 128 + (thread & 7) * 16, to = (thread >> 3) + 32 * j, row = sh.row[to];
                if (row >= 0 && col < a.x.cols) cp16(sh.b[slot] + to * GEMM_B_PITCH + (thread & 7) * 16, a.x.q + (size_t)row * a.x.cols + col);
            }
            const bool have = sh.row[at] >= 0 && k * 4 + g < a.x.cols >> 5;
            const size_t from = (size_t)(k * 4 + g) * a.x.ld + sh.row[at];
            side(&sh.delta[slot][g][(at >> 1) * 4 + (at & 1)], a.x.delta, from, have);
            if (ExpertShared<U>::SUMS) side(&sh.sum[slot][g][at], a.x.sum, from, have);
            if (ExpertShared<U>::LOWS) side(&sh.low[slot][g][at], a.x.low, from, have);
            if (!h) scales(seg + 1);
        }
        cp_commit();
    }
};

/* act(gate) * up of the block's 64 outputs to shared memory, quantised from there, a warp a group; rows of the result as the tile's */
template <class U> __device__ __forceinline__ void experts_glu(const ExpertGemmArgs &a, const ExpertTile &tile, float (*v)[EXPERT_PITCH], const float (&y)[2][4][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2, n0 = blockIdx.y * 64;
    const float s0 = a.m[0].scales ? __ldg(a.m[0].scales + tile.expert) : a.m[0].scale, s1 = a.m[1].scales ? __ldg(a.m[1].scales + tile.expert) : a.m[1].scale;
    __syncthreads(); /* the stages are read */
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float g = y[0][n][i] * s0;
            v[wn * 32 + n * 8 + 2 * (lane & 3) + (i & 1)][wm * 16 + (lane >> 2) + 8 * (i >> 1)] = (a.gelu ? bw_gelu(g) : bw_silu(g)) * (y[1][n][i] * s1);
        }
    __syncthreads();
    for (int k = warp; k < tile.n * 2; k += 8) {
        const int row = k >> 1, n = n0 + (k & 1) * 32;
        if (n < a.m[0].rows) quant_group(a.yo, tile.first + row, n >> 5, lane, v[row][(k & 1) * 32 + lane], a.fault, a.op);
    }
}

/* grid (halves of tiles, blocks of 128 outputs; of 64 where gate and up come together). The result of pair order[i] stands in row i of yo, or in row
 * order[i] of y. */
template <class U> __device__ __forceinline__ void experts_gemm_block(const ExpertGemmArgs &a) {
    extern __shared__ __align__(16) uint8_t raw[];
    ExpertShared<U> &sh = *(ExpertShared<U> *)raw;
    static_assert(sizeof(ExpertShared<U>) >= EXPERT_HALF * EXPERT_PITCH * sizeof(float), "finished values take the stages' place");
    pdl_trigger();
    pdl_wait();
    if ((int)blockIdx.x >> 1 >= __ldcg(a.n_tiles)) return;
    ExpertTile tile = a.tiles[blockIdx.x >> 1];
    const int half = (blockIdx.x & 1) * EXPERT_HALF;
    if (half >= tile.n) return;
    tile.first += half;
    tile.n = min(tile.n - half, (int)EXPERT_HALF);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2, stages = 2 * a.m[0].segs;
    if (threadIdx.x < 2) sh.w[threadIdx.x] = expert_at(a.m[threadIdx.x], tile.expert);
    for (int i = threadIdx.x; i < EXPERT_HALF; i += 256) sh.row[i] = i >= tile.n ? -1 : a.gather ? __ldcg(a.order + tile.first + i) / a.top : tile.first + i;
    __syncthreads();
    ExpertLoad<U> ld = {a, sh, (int)blockIdx.y * (a.n_mats == 2 ? 4 : 8), 2 * a.m[0].blocks};
    float p[2][4][4];
    float4 *p4 = (float4 *)&p[0][0][0];
#pragma unroll
    for (int i = 0; i < 8; i++) p4[i] = sh.y[i][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    ld.scales(0);
#pragma unroll
    for (int k = 0; k < GEMM_STAGES - 1; k++) ld.stage(k);
    cp_wait<GEMM_STAGES - 2>();
    __syncthreads();
    gemm_decode<U>(sh, 0, a.m[0].segs);
    for (int k = 0; k < stages; k++) {
        cp_wait<GEMM_STAGES - 2>();
        ld.finish(k % GEMM_STAGES);
        __syncthreads();
        ld.stage(k + GEMM_STAGES - 1);
        gemm_decode<U>(sh, k + 1, a.m[0].segs);
        if (wn * 32 < tile.n) gemm_stage<U, false, false>(sh, k, k % GEMM_STAGES, p);
        if (!(k & 1)) continue;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 y = sh.y[i][threadIdx.x];
            sh.y[i][threadIdx.x] = make_float4(y.x + p4[i].x, y.y + p4[i].y, y.z + p4[i].z, y.w + p4[i].w);
            p4[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) p4[i] = sh.y[i][threadIdx.x];
    if (a.n_mats == 2) return experts_glu<U>(a, tile, (float (*)[EXPERT_PITCH])raw, p);
    const float scale = a.m[0].scales ? __ldg(a.m[0].scales + tile.expert) : a.m[0].scale;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = wn * 32 + n * 8 + 2 * (lane & 3) + e;
            if (row >= tile.n) continue;
            float *to = a.y + (size_t)__ldcg(a.order + tile.first + row) * a.m[0].rows;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int out = blockIdx.y * 128 + wm * 32 + m * 16 + (lane >> 2) + 8 * r;
                    if (out < a.m[0].rows) to[out] = p[m][n][2 * r + e] * scale;
                }
        }
}

/* The form that the card has: GG_THREADS, or 256 threads. Units of INT8_OR_INT8H are of the one type or the other as a.halves says */
struct INT8_OR_INT8H;
template <class U> constexpr bool BY_GROUPS = BW_WARP_GROUPS && !std::is_same<U, INT8_OR_INT8H>::value;
template <class U> __global__ void __launch_bounds__(BY_GROUPS<U> ? GG_THREADS : 256, BY_GROUPS<U> || GEMM_STAGES == 2 ? 1 : 2) k_experts_gemm(ExpertGemmArgs a) {
    if constexpr (BY_GROUPS<U>) {
        pdl_wait();
        if (a.n_mats == 2) experts_groups<U, true>(a);
        else experts_groups<U, false>(a);
    } else if constexpr (!std::is_same<U, INT8_OR_INT8H>::value) experts_gemm_block<U>(a);
    else if (a.halves) experts_gemm_block<U_INT8H>(a);
    else experts_gemm_block<U_INT8>(a);
}

} // namespace bw
#endif
