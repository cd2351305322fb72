/* What stands between the q, k, v products and ATTEND, in one launch: parts of heads, norms by head, rotation, KV_APPEND (docs/numerics.md §4, §5, §8).
 * A warp takes one head of one row and keeps it in registers: lane holds columns lane, lane + 32, ..., so a register is a group of 32 and,
 * where half the rotation is a multiple of 32, both values of a pair lie in one lane. G: groups of a head where all heads of the launch have as many,
 * so that the code is short and runs straight on: at one row it is fetched anew in every layer. G = 0: up to 16 groups, each head its own number.
 * Owns the mapping; the list's runs of row ops that have this form are found by the host. */
#ifndef BW24_CU_OP_HEADS_CUH
#define BW24_CU_OP_HEADS_CUH

#include "early.cuh"
#include "heads.cuh"

namespace bw {

/* Registers of a head and of its rotation: cosine and sine of the pair that register i leads, or of the neighbours where pairs are interleaved */
template <int G> struct HeadRegs {
    static constexpr int N = G ? G : 16;
    float v[N], co[N], si[N];
    __device__ __forceinline__ static bool has(int i, int dim) { return G || i * 32 < dim; }
};

template <int G> __device__ __forceinline__ void head_load(HeadRegs<G> &h, const float *x, const float *cs, int dim, int rot, int interleaved, int lane) {
    const int half = rot / 2;
#pragma unroll
    for (int i = 0; i < h.N; i++) h.v[i] = h.has(i, dim) ? __ldcg(x + i * 32) : 0.0f;
#pragma unroll
    for (int i = 0; i < h.N; i++) {
        const int k = interleaved ? i * 16 + lane / 2 : i * 32 + lane;
        const bool in = (interleaved || i < h.N / 2) && k < half;
        h.co[i] = in ? __ldcg(cs + k) : 1.0f;
        h.si[i] = in ? __ldcg(cs + half + k) : 0.0f;
    }
}

template <int G> __device__ __forceinline__ void head_norm(HeadRegs<G> &h, const float (&w)[HeadRegs<G>::N], bool l2, float eps, int dim) {
    float total = 0.0f; /* segments of 256 */
#pragma unroll
    for (int s = 0; s < h.N; s += 8) {
        float p = 0.0f;
#pragma unroll
        for (int i = s; i < h.N && i < s + 8; i++)
            if (h.has(i, dim)) p = fmaf(h.v[i], h.v[i], p);
        total = total + warp_tree(p);
    }
    const float r = 1.0f / sqrtf((l2 ? total : total / (float)dim) + eps);
#pragma unroll
    for (int i = 0; i < h.N; i++) h.v[i] = (h.v[i] * r) * w[i]; /* no weight: 1 */
}

/* half = 32 H: register i pairs with i + H */
template <int G, int H> __device__ __forceinline__ void head_pairs(HeadRegs<G> &h) {
#pragma unroll
    for (int i = 0; i < H; i++) {
        float x0 = h.v[i], x1 = h.v[i + H];
        h.v[i] = fmaf(x0, h.co[i], -(x1 * h.si[i]));
        h.v[i + H] = fmaf(x1, h.co[i], x0 * h.si[i]);
    }
}
template <int G> __device__ __forceinline__ void head_rope(HeadRegs<G> &h, int rot, int interleaved, int lane) {
    if (interleaved) {
#pragma unroll
        for (int i = 0; i < h.N; i++) {
            float other = __shfl_xor_sync(~0u, h.v[i], 1);
            if (i * 32 + lane < rot) h.v[i] = lane & 1 ? fmaf(h.v[i], h.co[i], other * h.si[i]) : fmaf(h.v[i], h.co[i], -(other * h.si[i]));
        }
        return;
    }
    if (rot == h.N * 32) return head_pairs<G, h.N / 2>(h);
    if constexpr (h.N >= 4) if (rot == 64) return head_pairs<G, 1>(h);
    if constexpr (h.N >= 8) {
        if (rot == 128) head_pairs<G, 2>(h);
        else if (rot == 192) head_pairs<G, 3>(h);
        else if (h.N > 8 && rot == 256) head_pairs<G, 4>(h);
    }
}

/* the head into its slot of the page: one choice of format, then straight on */
template <int G> __device__ __forceinline__ bool head_append(const HeadRegs<G> &h, int f, uint8_t *part, int dim, int slot, int lane) {
    bool bad = false, ok = true;
#pragma unroll
    for (int i = 0; i < h.N; i++) bad |= not_finite(h.v[i]);
    if (__any_sync(~0u, bad)) return false;
    if (f == KV_F16) {
        __half *at = (__half *)part + slot * dim + lane;
#pragma unroll
        for (int i = 0; i < h.N; i++) {
            __half x = __float2half_rn(h.v[i]);
            if (h.has(i, dim)) at[i * 32] = x;
            ok &= !not_finite(__half2float(x));
        }
        return ok;
    }
    auto each = [&](auto put) {
#pragma unroll
        for (int i = 0; i < h.N; i++)
            if (h.has(i, dim)) ok &= put(i * 32 + lane, h.v[i]);
    };
    if (f == KV_Q8_0) each([&](int d, float v) { return put_q8_0(part, dim, slot, d, v); });
    else if (f == KV_Q5_1) each([&](int d, float v) { return put_q5_1(part, dim, slot, d, v); });
    else each([&](int d, float v) { return kv_put(f, part, dim, slot, d, v); });
    return ok;
}

template <int G> __device__ __forceinline__ void head_quant(const HeadChain &c, HeadRegs<G> &h, int row, int head, int lane, int *fault) {
    Acts o = c.o;
    o.cols = c.dim; /* a head's groups are numbered from its first; codes lie row by row */
    o.q += (size_t)row * (c.o.cols - c.dim) + head * c.dim;
    o.delta += (size_t)(head * c.dim / 32) * o.ld; o.sum += (size_t)(head * c.dim / 32) * o.ld; o.low += (size_t)(head * c.dim / 32) * o.ld;
    quant_groups<HeadRegs<G>::N>(o, row, 0, lane, h.v, fault, c.op);
}

/* Positions, page tables, weights and everything that the arguments say are at hand before the dependency wait; values and rotation are asked for at once. */
template <int G> __global__ void __launch_bounds__(128) k_heads(HeadArgs a, StepRows s) {
    constexpr int N = HeadRegs<G>::N;
    const int lane = threadIdx.x & 31, row = blockIdx.x;
    int head = blockIdx.y * 4 + (threadIdx.x >> 5), k = 0;
    pdl_trigger();
    while (k < a.n && head >= a.c[k].heads) head -= a.c[k++].heads;
    const HeadChain &c = a.c[k < a.n ? k : 0];
    const int dim = G ? 32 * G : held(c.dim), rot = held(c.rot), interleaved = held(c.interleaved), norm = held(c.norm), append = held(c.append);
    const float *x = held(c.x + ((size_t)row * c.heads + head) * c.pitch + c.from + lane), *cs = held(c.cs + (size_t)row * rot);
    float *y = held(c.y && (norm || rot || c.copy) ? c.y + ((size_t)row * c.heads + head) * dim + lane : (float *)NULL);
    uint8_t *part = NULL;
    int slot = 0;
    if (append && k < a.n) {
        const int pos = s.pos[row];
        slot = pos % PIECE;
        part = held(s.pages[s.table[c.kv.klass * s.n + row] + pos / PIECE] + c.place + (size_t)head * c.stride);
    }
    HeadRegs<G> h;
    float w[N];
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = c.w && h.has(i, dim) ? load_now(c.w + i * 32 + lane) : 1.0f;
    pdl_wait();
    if (k == a.n) return;
    head_load<G>(h, x, cs, dim, rot, interleaved, lane);
    if (norm) head_norm<G>(h, w, c.l2, c.eps, dim);
    if (rot) head_rope<G>(h, rot, interleaved, lane);
    if (y)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (h.has(i, dim)) y[i * 32] = h.v[i];
    if (append && !head_append<G>(h, c.format, part, dim, slot, lane)) report_fault(s.fault, c.op);
    if (c.o.q) head_quant<G>(c, h, row, head, lane, s.fault);
}

} // namespace bw
#endif
