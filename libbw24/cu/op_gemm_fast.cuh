/* LINEAR over quantised weights in the numeric class `fast`, for steps of many rows: the exact program's activations (codes times scale) and the weights
 * (scale times code plus minimum, one f32 fma) rounded to bf16 once each, products by bf16 tensor cores, f32 sums over the columns ascending. Not the
 * program of docs/numerics.md; kernel-check holds it to a bound on the error. Owns the order of the bf16 activations; knows no launch.
 *
 * Activations lie in fragment order: [group of 32 columns][row / 8][lane][8 values], lane (gid, tig) = row gid, columns 4 tig .. + 3 and 16 more: the
 * two words that a unit keeps for that lane. So the k index of a product of 16 columns is a permutation of its columns, the same on both sides, and a
 * lane reads all that two products need in 16 bytes without conflicts of banks. A block has 128 outputs x ROWS rows, a warp 32 x ROWS / 2. */
#ifndef BW24_CU_OP_GEMM_FAST_CUH
#define BW24_CU_OP_GEMM_FAST_CUH

#include "bf16.cuh"
#include "op_gemm_groups.cuh"

namespace bw {

constexpr int FAST_ROWS_LARGE = 256, FAST_ROWS_SMALL = 128, FAST_PAD = 256; /* rows of a block by the card's shared memory; activations are padded to FAST_PAD */

/* a stage of activations is 64 columns, one of weights a half (128 columns): rings of STAGES and 3, scales of two segments and two halves */
template <class U, int ROWS_> struct FastGemmShared {
    static constexpr int ROWS = ROWS_, STAGES = ROWS == FAST_ROWS_LARGE ? 4 : 2, COLUMNS = ROWS / 16;
    uint8_t b[STAGES][2][ROWS * 64];
    uint8_t a[3][8 * U::HALF];
    uint8_t raw[2][8 * U::SCALE];
    float2 scale[2][4][128];
};

template <int N> __device__ __forceinline__ void fast_gemm_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void fast_gemm_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* asks for what step j (64 columns) issues: activations of step j + STAGES - 1, and in even steps the weights of half j / 2 + 2 */
template <class U, class Sh> struct FastGemmLoad {
    const LinearPart &part;
    const uint8_t *x; /* the activations of this block's first row */
    size_t group;     /* bytes from one group of 32 columns to the next */
    int tile0, tiles, segs, groups;
    __device__ __forceinline__ const uint8_t *unit(int t, int seg) const {
        return part.w + ((size_t)min(tile0 + t, tiles - 1) * segs + seg) * U::UNIT;
    }
    __device__ __forceinline__ void acts(Sh &sh, int s) const {
        constexpr int N = Sh::ROWS * 4;
#pragma unroll
        for (int i = 0; i < 2 * N / 256; i++) {
            int k = threadIdx.x + i * 256, half = k / N, at = k % N * 16;
            if (2 * s + half < groups) cp16(sh.b[s % Sh::STAGES][half] + at, x + (size_t)(2 * s + half) * group + at);
        }
    }
    __device__ __forceinline__ void weights(Sh &sh, int h) const {
        constexpr int N = U::HALF / 16, S = U::SCALE / 16;
        const int seg = h >> 1;
        if (seg >= segs) return;
        for (int i = threadIdx.x; i < 8 * N; i += 256) cp16(sh.a[h % 3] + i * 16, unit(i / N, seg) + (h & 1) * U::HALF + i % N * 16);
        if (h & 1) return;
        for (int i = threadIdx.x; i < 8 * S; i += 256) cp16(sh.raw[seg & 1] + i * 16, unit(i / S, seg) + 2 * U::HALF + i % S * 16);
    }
    __device__ __forceinline__ void step(Sh &sh, int j) const {
        if (j + Sh::STAGES - 1 >= 0) acts(sh, j + Sh::STAGES - 1);
        if (!(j & 1)) weights(sh, j / 2 + 2);
        fast_gemm_commit();
    }
};

/* scales of half h as floats, two groups a thread */
template <class U, class Sh> __device__ __forceinline__ void fast_gemm_scales(Sh &sh, int h, int segs) {
    if (h >= 2 * segs) return;
    const int row = threadIdx.x & 127, w = threadIdx.x >> 7;
    float x[2], y[2];
    const typename U::Pair s = U::fetch(sh.raw[(h >> 1) & 1] + (row >> 4) * U::SCALE, row & 15, 2 * (h & 1) + w);
    U::pair(s, 2 * (h & 1) + w, x, y);
    sh.scale[h & 1][2 * w][row] = make_float2(x[0], y[0]);
    sh.scale[h & 1][2 * w + 1][row] = make_float2(x[1], y[1]);
}

/* four codes of a word times s plus m, as bf16: columns 0 and 1, 2 and 3 */
template <bool UNSIGNED> __device__ __forceinline__ void fast_codes(uint32_t w, float s, float m, uint32_t &first, uint32_t &second) {
    const float zero = UNSIGNED ? -8388608.0f : -8388736.0f; /* 2^23, and 128 more for signed codes */
    const uint32_t v = UNSIGNED ? w : w ^ 0x80808080u;
    float f[4];
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = fmaf(s, big_byte(v, i) + zero, m);
    first = bf16x2(f[0], f[1]);
    second = bf16x2(f[2], f[3]);
}

/* codes times scale as bf16 in fragment order; a warp has 8 rows of a group, 8 groups a block; rows past a.ld are zeros */
__device__ __forceinline__ void fast_acts(const Acts &a, uint4 *to, int tiles) {
    const int lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y * 8 + (lane >> 2);
    if (g >= a.cols / 32) return;
    uint2 q = make_uint2(0, 0);
    float d = 0.0f;
    if (row < a.ld) {
        q = __ldcg((const uint2 *)(a.q + (size_t)row * a.cols + g * 32 + (lane & 3) * 8));
        d = __ldcg(a.delta + (size_t)g * a.ld + row);
    }
    uint4 v;
    fast_codes<false>(q.x, d, 0.0f, v.x, v.y);
    fast_codes<false>(q.y, d, 0.0f, v.z, v.w);
    to[((size_t)g * tiles + blockIdx.y) * 32 + lane] = v;
}

/* groups g0 and g0 + 1 of half h by this warp */
template <class U, class Sh> __device__ __forceinline__ void fast_gemm_step(const Sh &sh, int h, int g0, int slot, int count, float (&y)[2][Sh::COLUMNS][4]) {
    constexpr bool TWO = U::FORM == FORM_S2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2, gid = lane >> 2;
    typename U::Pack w[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) w[m][r] = U::template load_pack<true>(sh.a[h % 3] + (wm * 2 + m) * U::HALF, g0 / U::GP, r, lane);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (e >= count) break;
        uint32_t a[2][2][4]; /* [tile of 16 outputs][16 columns] */
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t lo, hi;
                U::unpack(w[m][r], U::GP == 2 ? e : g0 + e, lo, hi);
                const float2 s = sh.scale[h & 1][g0 + e][(wm * 2 + m) * 16 + gid + 8 * r];
                fast_codes<U::UNSIGNED>(lo, s.x, TWO ? 0.0f : s.y, a[m][0][r], a[m][0][2 + r]);
                fast_codes<U::UNSIGNED>(hi, TWO ? s.y : s.x, TWO ? 0.0f : s.y, a[m][1][r], a[m][1][2 + r]);
            }
        const uint8_t *b = sh.b[slot][e] + (wn * Sh::COLUMNS * 32 + lane) * 16;
#pragma unroll
        for (int n = 0; n < Sh::COLUMNS; n += 2) { /* two tiles of rows at a time: four products lie between two of one sum */
            const uint4 x[2] = {*(const uint4 *)(b + n * 512), *(const uint4 *)(b + n * 512 + 512)};
#pragma unroll
            for (int i = 0; i < 4; i++) mma_bf16(y[i & 1][n + (i >> 1)], a[i & 1][0], x[i >> 1].x, x[i >> 1].y);
#pragma unroll
            for (int i = 0; i < 4; i++) mma_bf16(y[i & 1][n + (i >> 1)], a[i & 1][1], x[i >> 1].z, x[i >> 1].w);
        }
    }
}

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int FAST_ROWS = FAST_ROWS_SMALL;
#else
constexpr int FAST_ROWS = FAST_ROWS_LARGE;
#endif



/* x: blocks of rows, y: tiles of 128 outputs; acts: the bf16 activations, of `padded` rows */
template <class U> __device__ __forceinline__ void fast_gemm(const LinearArgs &a, const uint8_t *acts, int padded) {
    typedef FastGemmShared<U, FAST_ROWS> Sh;
    extern __shared__ __align__(1024) uint8_t rings[];
    Sh &sh = *(Sh *)rings;
    int tile_y = blockIdx.y, k_part = 0;
    while (k_part + 1 < a.n_parts && tile_y >= (a.part[k_part].n + 127) / 128) tile_y -= (a.part[k_part++].n + 127) / 128;
    const LinearPart &part = a.part[k_part];
    const int groups = a.x.cols / 32, steps = (groups + 1) / 2;
    const FastGemmLoad<U, Sh> ld = {part, acts + (size_t)blockIdx.x * Sh::ROWS * 64, (size_t)padded * 64, tile_y * 8, 2 * part.blocks, a.segs, groups};
    float y[2][Sh::COLUMNS][4];
#pragma unroll
    for (int i = 0; i < 8 * Sh::COLUMNS; i++) (&y[0][0][0])[i] = 0.0f;
    for (int j = -4; j < 0; j++) ld.step(sh, j);
    fast_gemm_wait<1>();
    __syncthreads();
    fast_gemm_scales<U>(sh, 0, a.segs);
    for (int j = 0; j < steps; j++) {
        fast_gemm_wait<Sh::STAGES - 2>();
        __syncthreads();
        ld.step(sh, j);
        if (j & 1) fast_gemm_scales<U>(sh, j / 2 + 1, a.segs);
        fast_gemm_step<U>(sh, j >> 1, 2 * (j & 1), j % Sh::STAGES, groups - 2 * j, y);
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < Sh::COLUMNS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int out = tile_y * 128 + wm * 32 + m * 16 + (lane >> 2) + 8 * (i >> 1), row = blockIdx.x * Sh::ROWS + wn * (Sh::ROWS / 2) + n * 8 + 2 * (lane & 3) + (i & 1);
                if (out < part.n && row < a.rows) linear_store(part, row, out, y[m][n][i], linear_res(part, row, out));
            }
}

/* ---- the kernels */
static __global__ void __launch_bounds__(256) k_fast_acts(Acts a, uint8_t *to, int padded, bool codes, ExpertRows e) {
    pdl_trigger();
    pdl_wait();
    if (BW_WARP_GROUPS && e.tiles) group_pairs(a, to, e);
    else if (BW_WARP_GROUPS && codes) group_acts(a, to);
    else if (BW_WARP_GROUPS) wg_acts(a, to, padded);
    else fast_acts(a, (uint4 *)to, padded / 8);
}

template <class U> __device__ __forceinline__ void gemm_of_card(const LinearArgs &a, const uint8_t *acts, int padded) {
#if BW_WARP_GROUPS
    wg_gemm<U>(a, acts, padded);
#else
    pdl_trigger();
    pdl_wait();
    fast_gemm<U>(a, acts, padded);
#endif
}

/* one kernel for all units: the choice is made once */
static __global__ void __launch_bounds__(BW_WARP_GROUPS ? WG_THREADS : 256, 1) k_linear_fast(int unit, LinearArgs a, const uint8_t *acts, int padded) {
    switch (unit) {
    case UNIT_Q4_0: gemm_of_card<U_Q4_0>(a, acts, padded); break;
    case UNIT_Q4_K: gemm_of_card<U_Q4_K>(a, acts, padded); break;
    case UNIT_NVFP4: gemm_of_card<U_NVFP4>(a, acts, padded); break;
    case UNIT_Q8_0: gemm_of_card<U_Q8_0>(a, acts, padded); break;
    case UNIT_Q6_K: gemm_of_card<U_Q6_K>(a, acts, padded); break;
    case UNIT_IQ4_XS: gemm_of_card<U_IQ4_XS>(a, acts, padded); break;
    default: gemm_of_card<U_INT8>(a, acts, padded); break;
    }
}

} // namespace bw
#endif
