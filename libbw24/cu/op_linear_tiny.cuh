/* LINEAR over quantised weights (docs/numerics.md §2) for one row and small matrices: a warp a unit, so that a whole matrix is on its way before the input is
 * there. Owns the mapping of units to warps; the layout of weights is unit.cuh's, larger matrices are op_linear_one.cuh's.
 *
 * One text serves every type of unit. Before the dependency wait a warp brings its unit to the form of U_INT8H: int8 codes as the A registers of mma32,
 * two scales and two minima a group. Forms with one scale have all of a group in its first half and their minimum in place of the second scale. */
#ifndef BW24_CU_OP_LINEAR_TINY_CUH
#define BW24_CU_OP_LINEAR_TINY_CUH

#include "op_linear_one.cuh"

namespace bw {

enum TinyUnit { TINY_Q4_0, TINY_Q4_K, TINY_NVFP4, TINY_Q8_0, TINY_Q6_K, TINY_IQ4_XS, TINY_INT8, TINY_INT8H };
enum { TINY_WARPS = 20, TINY_BOX = 256 + 16, TINY_SUMS = 20, TINY_SCRATCH = 64 }; /* TINY_BOX: floats of a warp, values by row, then each group's alphas; TINY_SCRATCH: bytes */

struct TinyShape {
    int unit[LINEAR_PARTS]; /* TinyUnit of each part */
    int glu;  /* a block has two tiles of gate and two of up, else one tile */
    int turn; /* 0: a first turn through the code before the dependency wait, which keeps nothing; 1: none */
};

/* A unit in a warp's registers: of group j the A registers of mma32; of row lane % 16 and group 4 (lane / 16) + k scale and second scale, or the
 * minimum of a group with one scale, and the minima of halves */
struct TinyWeights {
    uint32_t a[8][4];
    float s[4], t[4], m[4], n[4];
    int halves, minima; /* a group's halves have scales of their own; and minima */
};

template <class U> __device__ __forceinline__ void tiny_fetch(const uint8_t *w, size_t unit, int lane, TinyWeights &o) {
    constexpr bool HALVES = U::FORM == FORM_S2 || U::FORM == FORM_S2M;
    typename U::Pack pk[2][2 * U::PACKS];
    typename U::Pair raw[2];
    w += unit * U::UNIT;
#pragma unroll
    for (int i = 0; i < 2 * U::PACKS; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) pk[r][i] = U::template load_pack<false>(w + i / U::PACKS * U::HALF, i % U::PACKS, r, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) raw[i] = U::fetch(w + 2 * U::HALF, lane & 15, (lane >> 4) * 2 + i);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t lo, hi;
            U::unpack(pk[r][j / U::GP], (j & 3) % U::GP, lo, hi);
            if (U::UNSIGNED && j & 1) { lo >>= 4; hi >>= 4; } /* U_Q4_K's odd groups hold 16 q: its bytes as int8 */
            o.a[j][r] = lo;
            o.a[j][2 + r] = hi;
        }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float a[2], b[2];
        U::pair(raw[i], (lane >> 4) * 2 + i, a, b);
        unit_mins<U>(raw[i], o.m + 2 * i, o.n + 2 * i);
        if (U::UNSIGNED) a[1] *= 16.0f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            o.s[2 * i + e] = a[e];
            o.t[2 * i + e] = b[e];
        }
    }
    o.halves = HALVES;
    o.minima = U::FORM == FORM_S2M;
}
__device__ __forceinline__ void tiny_weights(int type, const uint8_t *w, size_t unit, int lane, TinyWeights &o) {
    switch (type) {
    case TINY_Q4_0: return tiny_fetch<U_Q4_0>(w, unit, lane, o);
    case TINY_Q4_K: return tiny_fetch<U_Q4_K>(w, unit, lane, o);
    case TINY_NVFP4: return tiny_fetch<U_NVFP4>(w, unit, lane, o);
    case TINY_Q8_0: return tiny_fetch<U_Q8_0>(w, unit, lane, o);
    case TINY_Q6_K: return tiny_fetch<U_Q6_K>(w, unit, lane, o);
    case TINY_IQ4_XS: return tiny_fetch<U_IQ4_XS>(w, unit, lane, o);
    case TINY_INT8: return tiny_fetch<U_INT8>(w, unit, lane, o);
    default: return tiny_fetch<U_INT8H>(w, unit, lane, o);
    }
}

/* The lane's part of a segment: words tig and tig + 4 of group gid, its scale */
struct TinyActs { uint32_t w0, w1; float d; };

__device__ __forceinline__ void load_pair(const void *p, uint32_t &x, uint32_t &y) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1},[%2];" : "=r"(x), "=r"(y) : "l"(p) : "memory");
}
/* of a row that was quantised before */
__device__ __forceinline__ TinyActs tiny_codes(const Acts &x, int seg, int lane) {
    const int group = seg * 8 + (lane >> 2);
    TinyActs o = {0, 0, 0.0f};
    if (group * 32 >= x.cols) return o;
    load_pair(x.q + group * 32 + (lane & 3) * 8, o.w0, o.w1);
    load_one(x.delta + (size_t)group * x.ld, &o.d);
    return o;
}
/* Total of the sums of squares: segments ascending, four at a time; +0 changes none */
__device__ __forceinline__ float tiny_total(const float *part, int segs) {
    float total = 0.0f;
#pragma unroll 1
    for (int s = 0; s < segs; s += 4) {
        const float4 k = *(const float4 *)(part + s);
        total = total + k.x;
        total = total + (s + 1 < segs ? k.y : 0.0f);
        total = total + (s + 2 < segs ? k.z : 0.0f);
        total = total + (s + 3 < segs ? k.w : 0.0f);
    }
    return total;
}
/* The NORM before the LINEAR (docs/numerics.md §4), each warp its own segment. w: weights of the lane's columns; part: a float of each segment. All of
 * a block come here. keep: the values go to norm.y as well */
__device__ __forceinline__ TinyActs tiny_norm(const LinearArgs &a, const float (&w)[8], int seg, int lane, bool sums, bool keep, float *part, int op) {
    const int n = a.x.cols, c = seg * 256 + (lane >> 2) * 32 + (lane & 3) * 4, left = n - seg * 256;
    const float *x = a.norm.x + seg * 256 + lane, *xc = a.norm.x + c;
    asm volatile("" : "+l"(x), "+l"(xc)); /* one address for all loads */
    float t[8], v[8], p = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        t[j] = v[j] = 0.0f;
        if (j * 32 < left) load_one(x + j * 32, &t[j]);
    }
    if (c < n) { load_early(xc, v); load_early(xc + 16, v + 4); }
#pragma unroll
    for (int j = 0; j < 8; j++) p = fmaf(t[j], t[j], p);
    p = warp_tree(p);
    if (sums && !lane) part[seg] = p;
    __syncthreads();
    const float total = tiny_total(part, a.segs), r = 1.0f / sqrtf((a.norm.l2 ? total : total / (float)n) + a.norm.eps);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = (v[j] * r) * w[j];
    const Quant8 o = quant_eight(v, a.fault, op);
    if (keep && c < n) {
        *(float4 *)(a.norm.y + c) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(a.norm.y + c + 16) = make_float4(v[4], v[5], v[6], v[7]);
    }
    return {o.w0, o.w1, o.d};
}

/* The accumulators: c[e] of group 2 tig + e, columns first and second half of rows gid and gid + 8. low and high: sums of codes of the halves of the lane's
 * group lane / 4; of a group with one scale low is the whole sum */
__device__ __forceinline__ void tiny_dots(const TinyWeights &q, const TinyActs &x, int lane, int (*c)[4], float &low, float &high) {
    const int gid = lane >> 2;
    const uint32_t y0 = __shfl_xor_sync(~0u, x.w0, 4), y1 = __shfl_xor_sync(~0u, x.w1, 4); /* the group beside the lane's */
    const uint32_t even = q.halves ? y1 : x.w1, odd = q.halves ? x.w1 : y1;
    const int first = __dp4a((int)x.w0, 0x01010101, 0), second = __dp4a((int)x.w1, 0x01010101, 0);
    int both = second * 65536 + first + (q.halves ? 0 : second); /* both sums of a group in one word */
    both += __shfl_xor_sync(~0u, both, 1);
    both += __shfl_xor_sync(~0u, both, 2);
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[e][i] = MAGIC;
#pragma unroll
    for (int k = 0; k < 4; k++) { /* groups 2k and 2k + 1; columns 2k and 2k + 1 are their halves */
        const uint32_t in = gid == 2 * k ? ~0u : 0u, in_y = gid == 2 * k + q.halves ? ~0u : 0u;
        const uint32_t *a = q.a[2 * k], *b = q.a[2 * k + 1];
        mma32(c[0], a[0], a[1], a[2], a[3], x.w0 & in, even & in_y);
        mma32(c[1], b[0], b[1], b[2], b[3], y0 & in, odd & in_y);
    }
    const int l = (int16_t)both;
    low = (float)l;
    high = (float)((both - l) >> 16);
}

/* p with the lane's four groups folded in; v: their i, by halves (one scale: i and alpha), al: their alphas. A minimum of zero changes nothing. */
__device__ __forceinline__ float tiny_groups(const TinyWeights &q, const float (&v)[8], const float (&al)[8], float p) {
    if (!q.minima) {
#pragma unroll
        for (int k = 0; k < 4; k++) p = fmaf(q.t[k], v[2 * k + 1], fmaf(q.s[k], v[2 * k], p));
        return p;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) p = fmaf(q.n[k], al[2 * k + 1], fmaf(q.m[k], al[2 * k], fmaf(q.t[k], v[2 * k + 1], fmaf(q.s[k], v[2 * k], p))));
    return p;
}

/* p of row lane % 16 of the unit, in the upper half of the warp: the lower half folds the first four groups. box: TINY_BOX floats of the warp */
__device__ __forceinline__ float tiny_fold(const TinyWeights &q, const TinyActs &x, int lane, float *box) {
    const int gid = lane >> 2, tig = lane & 3, row = lane & 15, half = lane >> 4;
    int c[2][4];
    float low, high, v[8], al[8];
    tiny_dots(q, x, lane, c, low, high);
    const GroupScale d0(__shfl_sync(~0u, x.d, 8 * tig)), d1(__shfl_sync(~0u, x.d, 8 * tig + 4));
    float *to = box + gid * 16 + (tig ^ (gid >> 1)) * 4; /* as one_change has it: no bank twice */
#pragma unroll
    for (int r = 0; r < 2; r++) *(float4 *)(to + r * 128) = make_float4(d0.of(c[0][2 * r]), d0.of(c[0][2 * r + 1]), d1.of(c[1][2 * r]), d1.of(c[1][2 * r + 1]));
    if (!tig) *(float2 *)(box + 256 + gid * 2) = make_float2(x.d * low, x.d * high);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const float4 u = *(const float4 *)(box + row * 16 + ((2 * half + k) ^ (row >> 1 & 3)) * 4);
        v[4 * k] = u.x; v[4 * k + 1] = u.y; v[4 * k + 2] = u.z; v[4 * k + 3] = u.w;
    }
    eight(box + 256 + half * 8, 0, al);
#pragma unroll
    for (int k = 0; k < 4; k++) v[2 * k + 1] = q.halves ? v[2 * k + 1] : al[2 * k];
    const float p = tiny_groups(q, v, al, 0.0f);
    return tiny_groups(q, v, al, __shfl_sync(~0u, p, row));
}

/* y of N outputs from +0, segments ascending; ps: of the first segment, `step` floats from one to the next, outputs 32 apart */
template <int N> __device__ __forceinline__ void tiny_sum(const float *ps, int step, int segs, float *y) {
#pragma unroll
    for (int i = 0; i < N; i++) y[i] = 0.0f;
#pragma unroll 1
    for (int s = 0; s < segs; s += 4, ps += 4 * step) {
        float v[4][N];
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < N; i++) v[k][i] = s + k < segs ? ps[k * step + i * 32] : 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < N; i++) y[i] = y[i] + v[k][i];
    }
}

/* The tail of a GLU by one warp: 32 outputs, a lane each. scratch: where a turn that keeps nothing writes */
__device__ __forceinline__ void tiny_glu(const LinearArgs &a, const float *ps, int lane, bool keep, uint8_t *scratch) {
    const int col = (int)blockIdx.x * 32 + lane;
    float y[2];
    tiny_sum<2>(ps + lane, 64, a.segs, y);
    const float gate = linear_scaled(a.part[0], col, y[0]), v = (a.gelu ? bw_gelu(gate) : bw_silu(gate)) * linear_scaled(a.part[1], col, y[1]);
    if (keep && col < a.part[0].n) a.part[0].y[col] = v;
    if (!a.xo.q) return;
    float *none = (float *)scratch;
    const int group = keep ? col >> 5 : 0;
    const Acts o = {keep ? a.xo.q : (int8_t *)(none + 3), keep ? a.xo.delta : none, keep ? a.xo.sum : none + 1, keep ? a.xo.low : none + 2, a.xo.ld, a.xo.cols};
    quant_group(o, 0, group, lane, v, a.fault, keep ? a.op : (int)NO_FAULT);
}

/* A block a tile (GLU: two tiles of gate, two of up), a warp a unit; small blocks, many a multiprocessor, so that those of the next launch find room beside
 * these and have their weights when these end. Traffic: every weight byte once; activations once a block. */
__global__ void __launch_bounds__(32 * TINY_WARPS, 1) k_linear_tiny(const __grid_constant__ LinearArgs a, const __grid_constant__ TinyShape g) {
    extern __shared__ __align__(128) uint8_t sm[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), tile = g.glu ? warp & 3 : 0, seg = g.glu ? warp >> 2 : warp;
    int at = (int)blockIdx.x, part = 0;
    if (g.glu) {
        at = at * 2 + (tile & 1);
        part = tile >> 1;
    } else
        while (part + 1 < a.n_parts && at >= 2 * a.part[part].blocks) at -= 2 * a.part[part++].blocks;
    pdl_trigger();
    const LinearPart &p = a.part[part];
    TinyWeights q;
    tiny_weights(g.unit[part], p.w, (size_t)at * a.segs + seg, lane, q);
    float *box = (float *)(sm + TINY_SCRATCH) + warp * TINY_BOX, *sums = (float *)(sm + TINY_SCRATCH) + (blockDim.x >> 5) * TINY_BOX, *ps = sums + TINY_SUMS;
    float w[8], bias = -0.0f; /* -0 changes nothing */
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = 1.0f;
    const int c = seg * 256 + (lane >> 2) * 32 + (lane & 3) * 4, col = at * 16 + lane;
    if (a.norm.w && c < a.x.cols) { load_early(a.norm.w + c, w); load_early(a.norm.w + c + 16, w + 4); }
    const bool out = !g.glu && !warp && lane < 16 && col < p.n;
    if (out && p.bias) load_one(p.bias + col, &bias);
#pragma unroll 1
    for (int turn = g.turn; turn < 2; turn++, ps += blockDim.x >> 1) {
        if (turn) pdl_wait();
        float res = -0.0f;
        const TinyActs x = a.norm.x ? tiny_norm(a, w, seg, lane, !tile, turn && !tile && !blockIdx.x, sums, turn ? a.norm.op : (int)NO_FAULT) : tiny_codes(a.x, seg, lane);
        if (out && p.res) load_one(p.res + col, &res);
        const float v = tiny_fold(q, x, lane, box);
        if (lane > 15) ps[warp * 16 + lane - 16] = v;
        __syncthreads();
        if (warp) continue;
        if (g.glu) {
            tiny_glu(a, ps, lane, turn, sm);
            continue;
        }
        float y;
        tiny_sum<1>(ps + (lane & 15), 16, a.segs, &y);
        y = y * p.scale;
        y = y + bias;
        if (out && turn) p.y[col] = res + y;
    }
}

inline size_t tiny_shared(int warps) { return TINY_SCRATCH + (size_t)warps * (TINY_BOX + 2 * 16) * 4 + TINY_SUMS * 4; }

} // namespace bw
#endif
