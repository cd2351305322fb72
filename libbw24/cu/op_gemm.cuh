/* LINEAR over quantised weights for many rows: the same program as op_linear.cuh, hence the same bits, from an int8 tensor-core GEMM.
 * Block tile 128 outputs x 128 rows, 8 warps of 32 x 64; stages of half a segment (4 groups) arrive by cp.async; codes are unpacked
 * from shared memory straight into A registers; a thread carries (p, y) of its 64 results and folds each group in ascending order. */
#ifndef BW24_CU_OP_GEMM_CUH
#define BW24_CU_OP_GEMM_CUH

#include "op_linear.cuh"

namespace bw {

constexpr int GEMM_TILE = 128, GEMM_B_PITCH = 160; /* 128 bytes of codes a row; 160 keeps 8-byte reads of 4 rows in separate banks */

/* ROWS: of activations; a warp has half of them */
template <class U, int STAGES_, int ROWS_ = GEMM_TILE> struct GemmShared {
    static constexpr int STAGES = STAGES_, ROWS = ROWS_, COLUMNS = ROWS / 16; /* mma's of 8 rows of activations a warp */
    uint8_t a[STAGES][8 * U::HALF];
    uint8_t b[STAGES][ROWS * GEMM_B_PITCH];
    float delta[STAGES][4][ROWS];
    static constexpr bool SUMS = U::FORM == FORM_S1M || U::FORM == FORM_S2M, LOWS = U::FORM == FORM_S2M;
    float sum[SUMS ? STAGES : 1][SUMS ? 4 : 1][ROWS];
    float low[LOWS ? STAGES : 1][LOWS ? 4 : 1][ROWS];
    uint8_t raw[3][8 * U::SCALE];
    float2 scale[2][4][GEMM_TILE];
    float2 mins[LOWS ? 2 : 1][LOWS ? 4 : 1][GEMM_TILE];
};

__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

/* stage k = (segment k / 2, half k % 2); the raw scales of the next segment travel with a first half */
template <class U, int STAGES> struct GemmLoad {
    const LinearArgs &a;
    const LinearPart &part;
    GemmShared<U, STAGES> &sh;
    int tile0, row0, tiles;
    typedef GemmShared<U, STAGES> Sh;
    __device__ __forceinline__ const uint8_t *unit(int t, int seg) const {
        int tile = min(tile0 + t, tiles - 1);
        return part.w + ((size_t)tile * a.segs + seg) * U::UNIT;
    }
    __device__ __forceinline__ void scales(int seg) {
        constexpr int N = U::SCALE / 16;
        if (seg < a.segs)
            for (int i = threadIdx.x; i < 8 * N; i += 256) cp16(sh.raw[seg % 3] + i * 16, unit(i / N, seg) + 2 * U::HALF + (i % N) * 16);
    }
    /* Q6_K: computed anew for each stage, so that no address made from it stays in a register: all are taken */
    static __device__ __forceinline__ int thread() {
        int t = threadIdx.x;
        if (U::HALF == 1536) asm volatile("" : "+r"(t));
        return t;
    }
    __device__ __forceinline__ void stage(int k) {
        constexpr int N = U::HALF / 16;
        const int thread = this->thread();
        if (k < 2 * a.segs) {
            int seg = k >> 1, h = k & 1, slot = k % STAGES, groups = a.x.cols >> 5;
#pragma unroll
            for (int j = 0; j < (8 * N + 255) / 256; j++) {
                int i = thread + j * 256;
                if (8 * N % 256 == 0 || i < 8 * N) cp16(sh.a[slot] + i * 16, unit(i / N, seg) + h * U::HALF + (i % N) * 16);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int i = thread + j * 256, r = i >> 3, c = k * 128 + (i & 7) * 16;
                if (c < a.x.cols) cp16(sh.b[slot] + r * GEMM_B_PITCH + (i & 7) * 16, a.x.q + (size_t)(row0 + r) * a.x.cols + c);
            }
            if (thread < 128) {
                int g = thread >> 5, c = (thread & 31) * 4;
                if (k * 4 + g < groups) {
                    cp16(&sh.delta[slot][g][c], a.x.delta + (size_t)(k * 4 + g) * a.x.ld + row0 + c);
                    if (Sh::SUMS) cp16(&sh.sum[slot][g][c], a.x.sum + (size_t)(k * 4 + g) * a.x.ld + row0 + c);
                    if (Sh::LOWS) cp16(&sh.low[slot][g][c], a.x.low + (size_t)(k * 4 + g) * a.x.ld + row0 + c);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        sh.delta[slot][g][c + e] = 0.0f;
                        if (Sh::SUMS) sh.sum[slot][g][c + e] = 0.0f;
                        if (Sh::LOWS) sh.low[slot][g][c + e] = 0.0f;
                    }
                }
            }
            if (!h) scales(seg + 1);
        }
        cp_commit();
    }
};

/* scales of stage k as floats, two groups a thread */
template <class U, class Sh> __device__ __forceinline__ void gemm_decode(Sh &sh, int k, int segs) {
    if (k >= 2 * segs) return;
    int row = threadIdx.x & 127, w = threadIdx.x >> 7;
    const uint8_t *raw = sh.raw[(k >> 1) % 3] + (row >> 4) * U::SCALE;
    float x[2], y[2], m0[2], m1[2];
    const typename U::Pair s = U::fetch(raw, row & 15, 2 * (k & 1) + w);
    U::pair(s, 2 * (k & 1) + w, x, y);
    unit_mins<U>(s, m0, m1);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        sh.scale[k & 1][2 * w + e][row] = make_float2(x[e], y[e]);
        if (Sh::LOWS) sh.mins[k & 1][2 * w + e][row] = make_float2(m0[e], m1[e]);
    }
}

template <class U, class Sh> __device__ __forceinline__ void gemm_stage(const Sh &sh, int k, float (&p)[2][Sh::COLUMNS][4]) {
    constexpr Form F = U::FORM;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2, gid = lane >> 2, tig = lane & 3, slot = k % Sh::STAGES;
    const uint8_t *bp = sh.b[slot] + (wn * (Sh::ROWS / 2) + gid) * GEMM_B_PITCH + tig * 8;
#pragma unroll
    for (int pk = 0; pk < U::PACKS; pk++) {
        typename U::Pack w[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) w[m][r] = U::template load_pack<true>(sh.a[slot] + (wm * 2 + m) * U::HALF, pk, r, lane);
#pragma unroll (F == FORM_S2M ? 1 : U::GP)
        for (int e = 0; e < U::GP; e++) {
            const int c = pk * U::GP + e;
            uint32_t l[2][2], h[2][2];
            float2 s[2][2];
            float m0[2][2];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    U::unpack(w[m][r], e, l[m][r], h[m][r]);
                    s[m][r] = sh.scale[k & 1][c][(wm * 2 + m) * 16 + gid + 8 * r];
                    m0[m][r] = s[m][r].x * -MAGIC_F;
                }
#pragma unroll
            for (int n = 0; n < Sh::COLUMNS; n++) {
                const int col = wn * (Sh::ROWS / 2) + n * 8 + 2 * tig;
                uint2 b = *(const uint2 *)(bp + n * 8 * GEMM_B_PITCH + c * 32);
                float2 d = *(const float2 *)&sh.delta[slot][c][col], sum = make_float2(0.0f, 0.0f), low = sum;
                if (Sh::SUMS) sum = *(const float2 *)&sh.sum[slot][c][col];
                if (Sh::LOWS) { low = *(const float2 *)&sh.low[slot][c][col]; sum.x = sum.x - low.x; sum.y = sum.y - low.y; }
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    int v[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, vh[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
                    if (F == FORM_S2 || F == FORM_S2M) { mma16(v, l[m][0], l[m][1], b.x); mma16(vh, h[m][0], h[m][1], b.y); }
                    else mma32<U::UNSIGNED>(v, l[m][0], l[m][1], h[m][0], h[m][1], b.x, b.y);
                    float *q = p[m][n];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int r = i >> 1;
                        const float di = i & 1 ? d.y : d.x, first = F == FORM_S2M ? (i & 1 ? low.y : low.x) : (i & 1 ? sum.y : sum.x);
                        float2 u = make_float2(0.0f, 0.0f);
                        if (Sh::LOWS) u = sh.mins[k & 1][c][(wm * 2 + m) * 16 + gid + 8 * r];
                        q[i] = fmaf(di, group_value<F>(v[i], vh[i], s[m][r].x, s[m][r].y, m0[m][r], first, u.x, u.y, i & 1 ? sum.y : sum.x), q[i]);
                    }
                }
            }
        }
    }
}

/* stages by the shared memory that a block of the card may have: 227 or 163 KB, else 99 KB */
constexpr int gemm_stages(int shared_max) { return shared_max > 100 * 1024 ? 3 : 2; }
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int GEMM_STAGES = 2;
#else
constexpr int GEMM_STAGES = 3;
#endif

template <class U> __global__ void __launch_bounds__(256, 1) k_linear_gemm(LinearArgs a) {
    constexpr int STAGES = GEMM_STAGES;
    extern __shared__ __align__(16) uint8_t raw[];
    GemmShared<U, STAGES> &sh = *(GemmShared<U, STAGES> *)raw;
    int tile_y = blockIdx.y, k_part = 0;
    while (k_part + 1 < a.n_parts && tile_y >= (a.part[k_part].n + 127) / 128) tile_y -= (a.part[k_part++].n + 127) / 128;
    const LinearPart &part = a.part[k_part];
    GemmLoad<U, STAGES> ld = {a, part, sh, tile_y * 8, (int)blockIdx.x * GEMM_TILE, 2 * part.blocks};
    const int stages = 2 * a.segs;
    pdl_trigger();
    pdl_wait();
    float p[2][8][4], y[2][8][4];
#pragma unroll
    for (int i = 0; i < 64; i++) (&p[0][0][0])[i] = (&y[0][0][0])[i] = 0.0f;
    ld.scales(0);
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) ld.stage(k);
    cp_wait<STAGES - 2>();
    __syncthreads();
    gemm_decode<U>(sh, 0, a.segs);
    for (int k = 0; k < stages; k++) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        ld.stage(k + STAGES - 1);
        gemm_decode<U>(sh, k + 1, a.segs);
        gemm_stage<U>(sh, k, p);
        if (k & 1) {
#pragma unroll
            for (int i = 0; i < 64; i++) { (&y[0][0][0])[i] = (&y[0][0][0])[i] + (&p[0][0][0])[i]; (&p[0][0][0])[i] = 0.0f; }
        }
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int out = tile_y * 128 + wm * 32 + m * 16 + (lane >> 2) + 8 * (i >> 1), row = blockIdx.x * 128 + wn * 64 + n * 8 + 2 * (lane & 3) + (i & 1);
                if (out < part.n && row < a.rows) linear_store(part, row, out, y[m][n][i], linear_res(part, row, out));
            }
}

} // namespace bw
#endif
