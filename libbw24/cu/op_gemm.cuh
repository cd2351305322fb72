/* LINEAR over quantised weights for many rows: the same program as op_linear.cuh, hence the same bits, from an int8 tensor-core GEMM.
 * Block tile 128 outputs x 128 rows, 8 warps of 32 x 64; stages of half a segment (4 groups) arrive by cp.async; codes are unpacked
 * from shared memory straight into A registers; a thread carries (p, y) of its 64 results and folds each group in ascending order. */
#ifndef BW24_CU_OP_GEMM_CUH
#define BW24_CU_OP_GEMM_CUH

#include <type_traits>
#include "op_linear.cuh"

namespace bw {

constexpr int GEMM_TILE = 128, GEMM_B_PITCH = 160; /* 128 bytes of codes a row; 160 keeps 8-byte reads of 4 rows in separate banks */

/* ROWS: of activations; a warp has half of them */
template <class U, int STAGES_, int ROWS_ = GEMM_TILE> struct GemmShared {
    static constexpr int STAGES = STAGES_, ROWS = ROWS_, COLUMNS = ROWS / 16; /* mma's of 8 rows of activations a warp */
    uint8_t a[STAGES][8 * U::HALF];
    uint8_t b[STAGES][ROWS * GEMM_B_PITCH];
    float delta[STAGES][4][2 * ROWS]; /* put_scale's twos */
    static constexpr bool SUMS = U::FORM == FORM_S1M || U::FORM == FORM_S2M, LOWS = U::FORM == FORM_S2M;
    float sum[SUMS ? STAGES : 1][SUMS ? 4 : 1][ROWS];
    float low[LOWS ? STAGES : 1][LOWS ? 4 : 1][ROWS];
    uint8_t raw[3][8 * U::SCALE];
    float2 scale[2][4][GEMM_TILE];
    float2 mins[LOWS ? 2 : 1][LOWS ? 4 : 1][GEMM_TILE];
};

__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

/* Stage k = (segment k / 2, half k % 2); the raw scales of the next segment travel with a first half. Rows 4 t + 2 e + i of 16 lie in places 8 e + 2 t + i, so
 * that one lane's rows of two products are four neighbours. Addresses are computed anew for each stage: a register that holds one all the time is missing
 * elsewhere. */
template <class U, int STAGES> struct GemmLoad {
    typedef GemmShared<U, STAGES> Sh;
    static constexpr int N = U::HALF / 16, S = U::SCALE / 16;
    const LinearArgs &a;
    const LinearPart &part;
    Sh &sh;
    int tile0, row0, tiles;
    static __device__ __forceinline__ int thread() {
        int t = threadIdx.x;
        asm volatile("" : "+r"(t));
        return t;
    }
    __device__ __forceinline__ const uint8_t *unit(int t, int seg) const { return part.w + ((size_t)min(tile0 + t, tiles - 1) * a.segs + seg) * U::UNIT; }
    __device__ __forceinline__ void scales(int seg, int thread) {
        if (seg >= a.segs) return;
#pragma unroll
        for (int j = 0; j < (8 * S + 255) / 256; j++) {
            const int i = thread + j * 256;
            if (8 * S % 256 == 0 || i < 8 * S) cp16(sh.raw[seg % 3] + i * 16, unit(i / S, seg) + 2 * U::HALF + i % S * 16);
        }
    }
    /* scales and sums of the stage's groups, zeros past the matrix */
    __device__ __forceinline__ void floats(int k, int slot, int thread) {
        if (thread >= 128) return;
        const int g = thread >> 5, c = (thread & 31) * 4;
        const size_t at = (size_t)(k * 4 + g) * a.x.ld + row0 + c;
        if (k * 4 + g < a.x.cols >> 5) {
            cp8(&sh.delta[slot][g][2 * c], a.x.delta + at);
            cp8(&sh.delta[slot][g][2 * c + 4], a.x.delta + at + 2);
            if (Sh::SUMS) cp16(&sh.sum[slot][g][c], a.x.sum + at);
            if (Sh::LOWS) cp16(&sh.low[slot][g][c], a.x.low + at);
            return;
        }
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *(float4 *)&sh.delta[slot][g][2 * c] = *(float4 *)&sh.delta[slot][g][2 * c + 4] = zero;
        if (Sh::SUMS) *(float4 *)&sh.sum[slot][g][c] = zero;
        if (Sh::LOWS) *(float4 *)&sh.low[slot][g][c] = zero;
    }
    /* of a stage that has come for this thread, by each for what it asked for */
    __device__ __forceinline__ void finish(int slot) const {
        if (threadIdx.x >= 128) return;
        float *to = &sh.delta[slot][threadIdx.x >> 5][(threadIdx.x & 31) * 8];
        finish_scales(to);
        finish_scales(to + 4);
    }
    __device__ __forceinline__ void stage(int k, int slot) {
        if (k < 2 * a.segs) {
            const int thread = this->thread(), row = thread >> 3, col = k * 128 + (thread & 7) * 16;
#pragma unroll
            for (int j = 0; j < (8 * N + 255) / 256; j++) {
                const int i = thread + j * 256;
                if (8 * N % 256 == 0 || i < 8 * N) cp16(sh.a[slot] + i * 16, unit(i / N, k >> 1) + (k & 1) * U::HALF + i % N * 16);
            }
            if (col < a.x.cols) {
                uint8_t *to = sh.b[slot] + ((row & 16) + (row >> 1 & 1) * 8 + (row >> 2 & 3) * 2 + (row & 1)) * GEMM_B_PITCH + (thread & 7) * 16;
                const int8_t *from = a.x.q + (size_t)(row0 + row) * a.x.cols + col;
#pragma unroll
                for (int j = 0; j < 4; j++) cp16(to + j * 32 * GEMM_B_PITCH, from + (size_t)(j * 32) * a.x.cols);
            }
            floats(k, slot, thread);
            if (!(k & 1)) scales((k >> 1) + 1, thread);
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

/* sums of a lane's two rows of one product, or of its four of two */
template <bool FOUR> struct RowFloats {
    float4 v;
    __device__ __forceinline__ void get(const float *p) {
        if (FOUR) v = *(const float4 *)p;
        else { const float2 w = *(const float2 *)p; v.x = w.x; v.y = w.y; }
    }
    __device__ __forceinline__ float2 at(int n) const { return FOUR && n & 1 ? make_float2(v.z, v.w) : make_float2(v.x, v.y); }
};

/* v as something new, so that a loop over a pack's groups does not make all their codes ahead, for which there are no registers */
template <class Pack> __device__ __forceinline__ void hide(Pack &v) {
#pragma unroll
    for (int i = 0; i < (int)sizeof v / 4; i++) asm volatile("" : "+r"(((uint32_t *)&v)[i]));
}

/* the products of stage k; PAIRS: rows lie as GemmLoad puts them; FIRST: p begins here, from +0 */
template <class U, bool PAIRS, bool FIRST, class Sh> __device__ __forceinline__ void gemm_stage(const Sh &sh, int k, int slot, float (&p)[2][Sh::COLUMNS][4]) {
    constexpr Form F = U::FORM;
    constexpr bool FOUR = PAIRS && !Sh::LOWS; /* else registers run out */
    constexpr bool TIGHT = Sh::STAGES == 2 && Sh::COLUMNS == 8; /* of registers; two scales a group: packs of four groups are read twice, two groups at a time */
    constexpr int STEP = TIGHT && F == FORM_S2 ? 2 : U::GP;
    constexpr int UNROLL = Sh::STAGES == 3 || U::GP < 4 || F == FORM_S1M ? U::GP : F == FORM_S1 && !U::APART ? 2 : 1; /* cards of two stages spill the more, the more is unrolled */
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp & 3, wn = warp >> 2, gid = lane >> 2, tig = lane & 3;
    const uint8_t *bp = sh.b[slot] + (wn * (Sh::ROWS / 2) + gid) * GEMM_B_PITCH + tig * 8;
#pragma unroll
    for (int g = 0; g < 4; g += STEP) {
        typename U::Pack w[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) w[m][r] = U::template load_pack<true>(sh.a[slot] + (wm * 2 + m) * U::HALF, g / U::GP, r, lane);
#pragma unroll (F == FORM_S2M ? 1 : UNROLL)
        for (int e = 0; e < STEP; e++) {
            const int c = g + e;
            uint32_t l[2][2], h[2][2];
            float2 s[2][2];
            RowFloats<FOUR> ss, ls;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    typename U::Pack v = w[m][r];
                    if (TIGHT && UNROLL == 1) hide(v);
                    U::unpack(v, c % U::GP, l[m][r], h[m][r]);
                    s[m][r] = sh.scale[k & 1][c][(wm * 2 + m) * 16 + gid + 8 * r];
                }
#pragma unroll
            for (int n = 0; n < Sh::COLUMNS; n++) {
                const uint2 b = *(const uint2 *)(bp + n * 8 * GEMM_B_PITCH + c * 32);
                const int col = wn * (Sh::ROWS / 2) + (PAIRS ? (n >> 1) * 16 + (n & 1) * 2 + 4 * tig : n * 8 + 2 * tig);
                const float4 d = *(const float4 *)(sh.delta[slot][c] + 2 * col);
                if (!FOUR || !(n & 1)) {
                    if (Sh::SUMS) ss.get(sh.sum[slot][c] + col);
                    if (Sh::LOWS) ls.get(sh.low[slot][c] + col);
                }
                const float2 low = Sh::LOWS ? ls.at(n) : make_float2(0.0f, 0.0f);
                float2 sum = Sh::SUMS ? ss.at(n) : make_float2(0.0f, 0.0f);
                if (Sh::LOWS) { sum.x = sum.x - low.x; sum.y = sum.y - low.y; }
                const GroupScale scale[2] = {GroupScale(d.x, d.z), GroupScale(d.y, d.w)};
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    int v[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, vh[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
                    if (F == FORM_S2 || F == FORM_S2M) { mma16(v, l[m][0], l[m][1], b.x); mma16(vh, h[m][0], h[m][1], b.y); }
                    else mma32<U::UNSIGNED>(v, l[m][0], l[m][1], h[m][0], h[m][1], b.x, b.y);
                    float *q = p[m][n];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int r = i >> 1;
                        const float first = F == FORM_S2M ? (i & 1 ? low.y : low.x) : (i & 1 ? sum.y : sum.x);
                        float2 u = make_float2(0.0f, 0.0f);
                        if (Sh::LOWS) u = sh.mins[k & 1][c][(wm * 2 + m) * 16 + gid + 8 * r];
                        q[i] = fold_group<F>(FIRST && !c ? 0.0f : q[i], v[i], vh[i], scale[i & 1], s[m][r].x, s[m][r].y, first, u.x, u.y, i & 1 ? sum.y : sum.x);
                    }
                }
            }
        }
    }
}

/* a lane's results: outputs `out` and out + 8, two rows from `row` on in each eight, or (PAIRS) four in each sixteen; 16 values of the residual are on the
 * way before one is used (a store may be to where the next one is read from, so that the compiler does not move a load over it) */
template <bool RES, bool PAIRS, int N> __device__ __forceinline__ void gemm_store(const LinearPart &part, float scale, int rows, int out, int row, const float (&y)[N][4]) {
    float bias[2];
    bool have[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        have[r] = out + 8 * r < part.n;
        bias[r] = part.bias && have[r] ? __ldg(part.bias + out + 8 * r) : 0.0f;
    }
    const size_t first = (size_t)row * part.n + out;
#pragma unroll
    for (int n = 0; n < N; n += 4) {
        float res[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = i >> 1 & 1, j = n + (i >> 2), k = PAIRS ? (j >> 1) * 16 + (j & 1) * 2 + (i & 1) : j * 8 + (i & 1);
            res[i] = RES && have[r] && row + k < rows ? __ldcg(part.res + first + (size_t)k * part.n + 8 * r) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = i >> 1 & 1, j = n + (i >> 2), k = PAIRS ? (j >> 1) * 16 + (j & 1) * 2 + (i & 1) : j * 8 + (i & 1);
            float v = y[n + (i >> 2)][i & 3] * scale;
            if (part.bias) v = v + bias[r];
            if (RES) v = res[i] + v;
            if (have[r] && row + k < rows) part.y[first + (size_t)k * part.n + 8 * r] = v;
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

/* y of a thread, in 16 places of four. Where two scales a group leave no registers the last places stand in shared memory, of which cards of two stages have
 * 10 KB more than Q6_K's rings take; a segment's end alone touches them. */
template <class U, int STAGES> struct GemmBlock : GemmShared<U, STAGES> {
    static constexpr int OUTSIDE = STAGES == 3 ? 0 : U::FORM == FORM_S2 ? 2 : 0, HELD = 16 - OUTSIDE;
    float4 y[OUTSIDE ? OUTSIDE : 1][OUTSIDE ? 256 : 1];
    /* (held, outside) += p */
    __device__ __forceinline__ void take(float (&held)[HELD][4], const float (&p)[2][8][4]) {
#pragma unroll
        for (int i = 0; i < 4 * HELD; i++) (&held[0][0])[i] = (&held[0][0])[i] + (&p[0][0][0])[i];
#pragma unroll
        for (int i = 0; i < OUTSIDE; i++) {
            const float (&v)[4] = p[1][8 - OUTSIDE + i];
            float4 &to = y[i][threadIdx.x], old = to;
            to = make_float4(old.x + v[0], old.y + v[1], old.z + v[2], old.w + v[3]);
        }
    }
};

/* x: blocks of 128 rows, y: tiles of 128 outputs; 256 threads */
template <class U> __device__ __forceinline__ void gemm_block(const LinearArgs &a) {
    constexpr int STAGES = GEMM_STAGES;
    typedef GemmBlock<U, STAGES> Block;
    extern __shared__ __align__(16) uint8_t raw[];
    Block &sh = *(Block *)raw;
    int tile_y = blockIdx.y, k_part = 0;
    while (k_part + 1 < a.n_parts && tile_y >= (a.part[k_part].n + 127) / 128) tile_y -= (a.part[k_part++].n + 127) / 128;
    const LinearPart &part = a.part[k_part];
    GemmLoad<U, STAGES> ld = {a, part, sh, tile_y * 8, (int)blockIdx.x * GEMM_TILE, 2 * part.blocks};
    const int stages = 2 * a.segs;
    pdl_trigger();
    pdl_wait();
    float p[2][8][4], held[Block::HELD][4];
#pragma unroll
    for (int i = 0; i < 4 * Block::HELD; i++) (&held[0][0])[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < Block::OUTSIDE; i++) sh.y[i][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    ld.scales(0, threadIdx.x);
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) ld.stage(k, k);
    cp_wait<STAGES - 2>();
    __syncthreads();
    gemm_decode<U>(sh, 0, a.segs);
    int slot = 0;
    const auto step = [&](int k, auto first) {
        cp_wait<STAGES - 2>();
        ld.finish(slot);
        __syncthreads();
        ld.stage(k + STAGES - 1, slot ? slot - 1 : STAGES - 1);
        gemm_decode<U>(sh, k + 1, a.segs);
        gemm_stage<U, true, decltype(first)::value>(sh, k, slot, p);
        if (++slot == STAGES) slot = 0;
    };
    if constexpr (STAGES == 3) /* a text for first halves; cards of two stages have no registers for that */
        for (int k = 0; k < stages; k += 2) {
            step(k, std::true_type());
            step(k + 1, std::false_type());
            sh.take(held, p);
        }
    else {
#pragma unroll
        for (int i = 0; i < 64; i++) (&p[0][0][0])[i] = 0.0f;
        for (int k = 0; k < stages; k++) {
            step(k, std::false_type());
            if (k & 1) {
                sh.take(held, p);
#pragma unroll
                for (int i = 0; i < 64; i++) (&p[0][0][0])[i] = 0.0f;
            }
        }
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int out = tile_y * 128 + (warp & 3) * 32 + (lane >> 2), row = blockIdx.x * 128 + (warp >> 2) * 64 + 4 * (lane & 3);
    float y[2][8][4];
#pragma unroll
    for (int i = 0; i < 16; i++)
        *(float4 *)y[i >> 3][i & 7] = i < Block::HELD ? *(float4 *)held[i < Block::HELD ? i : 0] : sh.y[i < Block::HELD ? 0 : i - Block::HELD][threadIdx.x];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if (part.res) gemm_store<true, true>(part, part.scale, a.rows, out + m * 16, row, y[m]);
        else gemm_store<false, true>(part, part.scale, a.rows, out + m * 16, row, y[m]);
    }
}

} // namespace bw
#endif
