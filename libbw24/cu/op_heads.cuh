/* What stands between the q, k, v products and ATTEND, in one launch: parts of heads, norms by head, rotation, KV_APPEND (docs/numerics.md §4, §5, §8).
 * A warp takes one head of one row and keeps it in registers: lane holds columns lane, lane + 32, ..., so a register is a group of 32 and,
 * where half the rotation is a multiple of 32, both values of a pair lie in one lane. Owns the mapping; the list's runs of row ops that have
 * this form are found by the host. */
#ifndef BW24_CU_OP_HEADS_CUH
#define BW24_CU_OP_HEADS_CUH

#include "heads.cuh"

namespace bw {

__device__ __forceinline__ void head_norm(const HeadChain &c, const float (&w)[8], float (&v)[8]) {
    float p = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i * 32 < c.dim) p = fmaf(v[i], v[i], p);
    float total = 0.0f + warp_tree(p), r = 1.0f / sqrtf((c.l2 ? total : total / (float)c.dim) + c.eps);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = c.w ? (v[i] * r) * w[i] : v[i] * r;
}

__device__ __forceinline__ void head_rope(const HeadChain &c, const float *cs, float (&v)[8], int lane) {
    const int half = c.rot / 2;
    if (c.interleaved) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int d = i * 32 + lane;
            float other = __shfl_xor_sync(~0u, v[i], 1);
            if (d >= c.rot) continue;
            float co = __ldcg(cs + d / 2), si = __ldcg(cs + half + d / 2);
            v[i] = d & 1 ? fmaf(v[i], co, other * si) : fmaf(v[i], co, -(other * si));
        }
        return;
    }
#pragma unroll
    for (int h = 1; h <= 4; h++) { /* half = 32 h: register i pairs with i + h */
        if (half != 32 * h) continue;
#pragma unroll
        for (int i = 0; i < h; i++) {
            float co = __ldcg(cs + i * 32 + lane), si = __ldcg(cs + half + i * 32 + lane), x0 = v[i], x1 = v[i + h];
            v[i] = fmaf(x0, co, -(x1 * si));
            v[i + h] = fmaf(x1, co, x0 * si);
        }
    }
}

__device__ __forceinline__ void head_append(const HeadChain &c, const StepRows &s, int row, int head, const float (&v)[8], int lane) {
    const int pos = s.pos[row], f = c.append == APPEND_K ? c.kv.k : c.kv.v;
    uint8_t *part = s.pages[s.table[c.kv.klass * s.n + row] + pos / PIECE] + c.kv.offset + head * kv_head_bytes(c.kv) + (c.append == APPEND_V ? kv_bytes(c.kv.k, c.dim) : 0);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i * 32 < c.dim) kv_put_values(f, part, c.dim, pos % PIECE, i * 32 + lane, v[i], s.fault, c.op);
}

static __global__ void __launch_bounds__(128) k_heads(HeadArgs a, StepRows s) {
    const int lane = threadIdx.x & 31, row = blockIdx.x;
    int head = blockIdx.y * 4 + (threadIdx.x >> 5), k = 0;
    while (k < a.n && head >= a.c[k].heads) head -= a.c[k++].heads;
    const HeadChain &c = a.c[k < a.n ? k : 0];
    float v[8], w[8];
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = c.w && i * 32 < c.dim ? __ldg(c.w + i * 32 + lane) : 1.0f;
    pdl_trigger();
    pdl_wait();
    if (k == a.n) return;
    const size_t at = ((size_t)row * c.heads + head) * c.dim + lane, from = ((size_t)row * c.heads + head) * c.pitch + c.from + lane;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = i * 32 < c.dim ? __ldcg(c.x + from + i * 32) : 0.0f;
    if (c.norm) head_norm(c, w, v);
    if (c.rot) head_rope(c, c.cs + (size_t)row * c.rot, v, lane);
    if (c.norm || c.rot || c.copy)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i * 32 < c.dim) c.y[at + i * 32] = v[i];
    if (c.o.q) {
        Acts o = c.o;
        o.cols = c.dim; /* a head's groups are numbered from its first; codes lie row by row */
        o.q += (size_t)row * (c.o.cols - c.dim) + head * c.dim;
        o.delta += (size_t)(head * c.dim / 32) * o.ld; o.sum += (size_t)(head * c.dim / 32) * o.ld; o.low += (size_t)(head * c.dim / 32) * o.ld;
        quant_groups<8>(o, row, 0, lane, v, s.fault, c.op);
    }
    if (c.append) head_append(c, s, row, head, v, lane);
}

} // namespace bw
#endif
