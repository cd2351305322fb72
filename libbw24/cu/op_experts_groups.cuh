/* EXPERTS over quantised weights for many rows on sm_90a: op_gemm_groups.cuh over tiles of an expert's pairs, hence the same bits. A place is a tile's 32, 64,
 * 96 or 128 rows (zeros past its pairs) by 128 outputs, or by 64 of gate and 64 of up: a warp has eight of each, so that act(gate) * up meet in a lane; four warps
 * have a group of 32, which they quantise by way of shared memory. Owns the places and what becomes of their results; knows no launch. */
#ifndef BW24_CU_OP_EXPERTS_GROUPS_CUH
#define BW24_CU_OP_EXPERTS_GROUPS_CUH

#include "op_gemm_groups.cuh"

namespace bw {

/* units that this form serves: the generic ones share a kernel of the other */
template <class U> constexpr bool expert_groups = !std::is_same<U, U_INT8>::value && !std::is_same<U, U_INT8H>::value;

/* Products of 32 rows, so that a tile takes two, three or four, or two of 16. HELD: with more, or fewer, ptxas 13.0 lets no product of IQ4_XS and Q4_0
 * be under way (C7511) or spills (Q4_K). */
template <class U> struct ExpertShape { static constexpr int N = 32, HELD = U::FORM == FORM_S2 || std::is_same<U, U_Q4_0>::value ? 12 : 16; };

constexpr int EG_PITCH = 34; /* floats a row of 32 finished values: neither their way in nor out has bank conflicts */

/* of the block's place and the next one: factors of the rows, where their results go (row of yo, pair of y; -1: nowhere), scales of the matrices */
template <class U> struct ExpertGroupShared : GroupShared<U, ExpertShape<U>> {
    float factor[2][EXPERT_TILE];
    int to[2][EXPERT_TILE];
    float matrix[2][2];
    int out[2];
    float v[2][EXPERT_TILE][EG_PITCH]; /* [warp group][row][output] */
};

/* the four warps of a group of outputs wait for each other */
__device__ __forceinline__ void group_meet(int group) { asm volatile("bar.sync %0,128;" ::"r"(group + 1) : "memory"); }

struct ExpertPlace { ExpertTile tile; int out; }; /* out: of the blocks of outputs */
template <class U, bool GLU> struct ExpertPlaces {
    typedef ExpertGroupShared<U> Shared;
    static constexpr bool PAIRED = GLU, TILES = true;
    static constexpr int OUTS = GLU ? 64 : 128;
    const ExpertGemmArgs &a;
    int tiles;
    __device__ __forceinline__ int outs() const { return (a.m[0].rows + OUTS - 1) / OUTS; }
    __device__ __forceinline__ int segs() const { return a.m[0].segs; }
    __device__ __forceinline__ int count() const {
        const int n = tiles * outs();
        return (int)blockIdx.x < n ? (n - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
    }
    __device__ __forceinline__ ExpertPlace place(int i) const {
        const int at = (int)blockIdx.x + i * (int)gridDim.x, all = outs();
        return {a.tiles[at / all], at % all};
    }
    __device__ __forceinline__ const uint8_t *units(const ExpertPlace &p, int lane) const {
        const ExpertMatrix &m = GLU && lane & 4 ? a.m[1] : a.m[0];
        return expert_at(m, p.tile.expert) + (size_t)min(GLU ? p.out * 4 + (lane & 3) : p.out * 8 + lane, 2 * m.blocks - 1) * m.segs * U::UNIT;
    }
    __device__ __forceinline__ const uint8_t *rows(const ExpertPlace &p) const { return a.rows + (size_t)p.tile.at * group_stages(a.x.cols) * GG_BLOCK; }
    static __device__ __forceinline__ int height(const ExpertPlace &p) { return tile_height(p.tile.n); }
    static __device__ __forceinline__ float scale(const ExpertMatrix &m, int expert) { return m.scales ? __ldg(m.scales + expert) : m.scale; }
    /* the slot of place i was last read at the end of place i - 2, before the scales that the helpers have waited for were used */
    __device__ __forceinline__ void open(Shared &sh, int i, int thread) const {
        const ExpertPlace p = place(i);
        for (int r = thread; r < EXPERT_TILE; r += 32 * GG_HELPERS) {
            const bool have = r < p.tile.n;
            const float f = have ? __ldcg(a.factor + p.tile.at * 32 + r) : 1.0f;
            if (f == 0.0f) sh.slow = 1;
            sh.factor[i & 1][r] = f;
            sh.to[i & 1][r] = !have ? -1 : GLU ? p.tile.first + r : __ldcg(a.order + p.tile.first + r);
        }
        if (thread == 0) { sh.matrix[i & 1][0] = scale(a.m[0], p.tile.expert); sh.out[i & 1] = p.out; }
        if (GLU && thread == 1) sh.matrix[i & 1][1] = scale(a.m[1], p.tile.expert);
    }
    template <int N> __device__ __forceinline__ void store(Shared &sh, int i, int warp, int lane, const float (&y)[N][4]) const {
        if (GLU) glu(sh, i & 1, warp, lane, y);
        else down(sh, i & 1, warp, lane, y);
    }
    /* a lane's four rows of sixteen from row on: y[n] and y[n + 1], as group_store has them */
    template <int N> __device__ __forceinline__ void down(Shared &sh, int slot, int warp, int lane, const float (&y)[N][4]) const {
        const float scale = sh.matrix[slot][0];
        const int out = sh.out[slot] * 128 + warp * 16 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const int row = 8 * n + 4 * (lane & 3);
            const float4 of = *(const float4 *)(sh.factor[slot] + row);
            const int4 at = *(const int4 *)(sh.to[slot] + row);
            const float f[4] = {of.x, of.y, of.z, of.w};
            const int to[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int r = i >> 1 & 1, k = (i >> 2) * 2 + (i & 1);
                if (to[k] >= 0 && f[k] != 0.0f && out + 8 * r < a.m[0].rows) a.y[(size_t)to[k] * a.m[0].rows + out + 8 * r] = y[n + (i >> 2)][i & 3] * f[k] * scale;
            }
        }
    }
    template <int N> __device__ __forceinline__ void glu(Shared &sh, int slot, int warp, int lane, const float (&y)[N][4]) const {
        float (&v)[EXPERT_TILE][EG_PITCH] = sh.v[warp >> 2];
        const float s0 = sh.matrix[slot][0], s1 = sh.matrix[slot][1];
        const int group = sh.out[slot] * 2 + (warp >> 2), out = (warp & 3) * 8 + (lane >> 2);
        group_meet(warp >> 2); /* values of the place before are read */
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const int row = 8 * n + 4 * (lane & 3);
            const float4 of = *(const float4 *)(sh.factor[slot] + row);
            const float f[4] = {of.x, of.y, of.z, of.w};
            if (sh.to[slot][8 * n] < 0) break;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float g = y[n + (k >> 1)][k & 1] * f[k] * s0, u = y[n + (k >> 1)][2 + (k & 1)] * f[k] * s1;
                v[row + k][out] = (a.gelu ? bw_gelu(g) : bw_silu(g)) * u;
            }
        }
        group_meet(warp >> 2);
        for (int row = (warp & 3) * 8 + (lane >> 2); sh.to[slot][row & ~7] >= 0; row += 32) {
            quantise(sh.to[slot][row], sh.factor[slot][row] != 0.0f && group * 32 < a.m[0].rows, group, lane & 3, v[row]);
            if (row + 32 >= EXPERT_TILE) break;
        }
    }
    /* four lanes a row, eight rows a warp; the 32 values of a row that is not there are never written */
    __device__ __forceinline__ void quantise(int to, bool wanted, int group, int j, const float (&from)[EG_PITCH]) const {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = to >= 0 ? from[8 * j + i] : 0.0f;
        const Quant8 q = quant_eight(v, a.fault, a.op);
        if (to < 0 || !wanted) return;
        put_eight((uint8_t *)a.yo.q + (size_t)to * a.yo.cols + group * 32, j, q);
        if (!j) put_scales(a.yo, (size_t)group * a.yo.ld + to, q);
    }
};

/* rows of factor 0, by the threads that fold */
template <class U, bool GLU> __device__ __forceinline__ void expert_slow(const ExpertPlaces<U, GLU> &places) {
    const ExpertGemmArgs &a = places.a;
    const int lane = threadIdx.x & 31, n = places.count(), segs = places.segs();
    for (int i = 0; i < n; i++) {
        const ExpertPlace p = places.place(i);
        const uint8_t *w0 = expert_at(a.m[0], p.tile.expert), *w1 = GLU ? expert_at(a.m[1], p.tile.expert) : NULL;
        const float s0 = places.scale(a.m[0], p.tile.expert), s1 = GLU ? places.scale(a.m[1], p.tile.expert) : 0.0f;
        constexpr int GROUPS = ExpertPlaces<U, GLU>::OUTS / 32;
        for (int k = threadIdx.x >> 5; k < p.tile.n * GROUPS; k += GG_WARPS) {
            const int row = k / GROUPS, group = p.out * GROUPS + k % GROUPS, out = group * 32 + lane, pair = __ldcg(a.order + p.tile.first + row);
            if (group * 32 >= a.m[0].rows || __ldcg(a.factor + p.tile.at * 32 + row) != 0.0f) continue;
            const int from = a.gather ? pair / a.top : p.tile.first + row;
            const float y = out < a.m[0].rows ? group_plain<U>(w0, segs, a.x, out, from) * s0 : 0.0f;
            if (GLU) quant_group(a.yo, p.tile.first + row, group, lane, (a.gelu ? bw_gelu(y) : bw_silu(y)) * (group_plain<U>(w1, segs, a.x, out, from) * s1), a.fault, a.op);
            else if (out < a.m[0].rows) a.y[(size_t)pair * a.m[0].rows + out] = y;
        }
    }
}

/* grid: at most a block a multiprocessor */
template <class U, bool GLU> __device__ __forceinline__ void experts_groups(const ExpertGemmArgs &a) {
    const ExpertPlaces<U, GLU> places = {a, min(__ldcg(a.n_tiles), a.most)};
    if (group_block<U>(places)) expert_slow<U, GLU>(places);
}

} // namespace bw
#endif
