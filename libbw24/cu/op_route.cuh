/* ROUTE (docs/numerics.md §10) by one block. Owns the mapping of experts to threads; the rule for a group's score is route.h's. */
#ifndef BW24_CU_OP_ROUTE_CUH
#define BW24_CU_OP_ROUTE_CUH

#include "../route.h"
#include "device.cuh"
#include "rows.cuh"

namespace bw {

struct RouteShared { float p[BW_ROUTE_MAX], c[BW_ROUTE_MAX], group[BW_ROUTE_MAX], warp[32]; unsigned char skip[BW_ROUTE_MAX], dropped[BW_ROUTE_MAX]; };

/* index of the largest of x[0 .. n) whose skip is not set, the lowest of equals, by one warp: every lane gets it; 0 where none is left */
__device__ __forceinline__ int route_best(const float *x, const unsigned char *skip, int n, int lane) {
    float top = 0.0f;
    int best = -1;
    for (int i = lane; i < n; i += 32)
        if (!skip[i] && (best < 0 || x[i] > top)) { best = i; top = x[i]; }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        float v = __shfl_xor_sync(~0u, top, o);
        int i = __shfl_xor_sync(~0u, best, o);
        if (i >= 0 && (best < 0 || v > top || (v == top && i < best))) { best = i; top = v; }
    }
    best = __shfl_sync(~0u, best, 0);
    return best < 0 ? 0 : best;
}

/* the weights of the chosen, whose probabilities stand in out */
__device__ __forceinline__ void route_weights(const RowOp &o, float *out, float sum, int lane) {
    sum = sum < 0x1p-14f ? 0x1p-14f : sum;
    for (int k = lane; k < o.n / 2; k += 32) {
        float w = out[k];
        out[k] = (o.i[2] ? w / sum : w) * o.f;
    }
}

/* The same choice as route_select where nothing is left out before and a lane can hold its experts: lane, lane + 32, .... Scores are not -0, so that
 * their order is that of integers; no bits of a finite score order as the least integer. */
enum { ROUTE_HELD = 8 };
__device__ __forceinline__ void route_select_held(const RowOp &o, const RouteShared &s, float *out, int lane) {
    const int experts = o.na, top = o.n / 2, none = (int)0x80000000;
    int key[ROUTE_HELD];
#pragma unroll
    for (int j = 0; j < ROUTE_HELD; j++) {
        int bits = j * 32 + lane < experts ? __float_as_int(s.c[j * 32 + lane]) : 0;
        key[j] = j * 32 + lane < experts ? bits ^ ((bits >> 31) & 0x7fffffff) : none;
    }
    float sum = 0.0f;
    for (int k = 0; k < top; k++) {
        int best = none, at = 0;
#pragma unroll
        for (int j = 0; j < ROUTE_HELD; j++)
            if (key[j] > best) { best = key[j]; at = j * 32 + lane; }
        const int most = __reduce_max_sync(~0u, best), e = __reduce_min_sync(~0u, best == most ? at : 0x7fffffff);
#pragma unroll
        for (int j = 0; j < ROUTE_HELD; j++)
            if (e == j * 32 + lane) key[j] = none;
        const float weight = s.p[e];
        sum = sum + weight;
        if (!lane) { out[k] = weight; out[top + k] = (float)e; }
    }
    __syncwarp();
    route_weights(o, out, sum, lane);
}

/* A row's choice by one warp, without a barrier: weights and ids [top] in shared memory. Scores are not -0 (see above). */
inline __device__ __noinline__ void route_choose(const RouteChoice &o, int row, int top, float *weights, int *ids, int *fault) {
    const int lane = threadIdx.x & 31, n = o.experts, none = (int)0x80000000;
    const float *l = o.logits + (size_t)row * n;
    float p[ROUTE_HELD];
    int key[ROUTE_HELD], most = none, mine = 0;
    bool bad = false;
#pragma unroll
    for (int j = 0; j < ROUTE_HELD; j++) p[j] = j * 32 + lane < n ? __ldcg(l + j * 32 + lane) : 0.0f;
#pragma unroll
    for (int j = 0; j < ROUTE_HELD; j++) {
        const int bits = __float_as_int(p[j]);
        bad |= not_finite(p[j]);
        most = max(most, j * 32 + lane < n ? bits ^ ((bits >> 31) & 0x7fffffff) : none);
    }
    if (__any_sync(~0u, bad)) {
        if (!lane) report_fault(fault, o.op);
        if (lane < top) { weights[lane] = 0.0f; ids[lane] = 0; } /* ids that exist: the pass goes on */
        return;
    }
    most = __reduce_max_sync(~0u, most);
    const float largest = __int_as_float(most ^ ((most >> 31) & 0x7fffffff));
    float total = 0.0f, sum = 0.0f, weight = 0.0f;
#pragma unroll
    for (int j = 0; j < ROUTE_HELD; j++) {
        p[j] = bw_exp(p[j] - largest);
        total = j * 32 + lane < n ? total + p[j] : total;
    }
    total = warp_tree(total);
#pragma unroll
    for (int j = 0; j < ROUTE_HELD; j++) {
        p[j] = p[j] / total;
        const int bits = __float_as_int(o.bias && j * 32 + lane < n ? p[j] + __ldg(o.bias + j * 32 + lane) : p[j]);
        key[j] = j * 32 + lane < n ? bits ^ ((bits >> 31) & 0x7fffffff) : none;
    }
#pragma unroll 1
    for (int k = 0; k < top; k++) {
        int best = none, at = 0;
#pragma unroll
        for (int j = 0; j < ROUTE_HELD; j++)
            if (key[j] > best) { best = key[j]; at = j * 32 + lane; }
        most = __reduce_max_sync(~0u, best);
        const int e = __reduce_min_sync(~0u, best == most ? at : 0x7fffffff);
        float v = 0.0f;
#pragma unroll
        for (int j = 0; j < ROUTE_HELD; j++)
            if (e == j * 32 + lane) { key[j] = none; v = p[j]; }
        v = __shfl_sync(~0u, v, e);
        sum = sum + v;
        if (lane == k) { mine = e; weight = v; }
    }
    sum = sum < 0x1p-14f ? 0x1p-14f : sum;
    if (lane < top) { weights[lane] = (o.norm ? weight / sum : weight) * o.scale; ids[lane] = mine; }
}

/* the chosen, by one warp: out [top] weights, [top] ids */
__device__ __forceinline__ void route_select(const RowOp &o, RouteShared &s, float *out, int lane) {
    const int experts = o.na, top = o.n / 2, groups = o.i[0], size = experts / groups;
    if (groups > 1) {
        for (int k = 0; k < o.i[1]; k++) {
            int g = route_best(s.group, s.dropped, groups, lane);
            __syncwarp();
            if (!lane) s.dropped[g] = 1;
            for (int i = lane; i < size; i += 32) s.skip[g * size + i] = 0;
            __syncwarp();
        }
    }
    float sum = 0.0f;
    for (int k = 0; k < top; k++) {
        int e = route_best(s.c, s.skip, experts, lane);
        __syncwarp();
        float weight = s.p[e];
        sum = sum + weight;
        if (!lane) { s.skip[e] = 1; out[k] = weight; out[top + k] = (float)e; }
        __syncwarp();
    }
    route_weights(o, out, sum, lane);
}

/* l: [na] logits; i: groups, keep, norm, sigmoid; w: bias or NULL */
__device__ __forceinline__ void row_route(const RowOp &o, const float *l, float *out, RouteShared &s, int *fault) {
    const int t = threadIdx.x, lane = t & 31, n = o.na;
    const float mine = __ldcg(l + (t < n ? t : 0)); /* read once where there is a thread for each */
    float top = mine;
    bool bad = not_finite(mine);
    for (int i = t + blockDim.x; i < n; i += blockDim.x) {
        float v = __ldcg(l + i);
        bad |= not_finite(v);
        top = v > top ? v : top;
    }
    if (__syncthreads_or(bad)) {
        if (!t) report_fault(fault, o.op);
        for (int i = t; i < o.n; i += blockDim.x) out[i] = 0.0f; /* ids that exist: the pass goes on */
        return;
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) { float v = __shfl_xor_sync(~0u, top, d); top = v > top ? v : top; }
    if (!lane) s.warp[t >> 5] = top;
    __syncthreads();
    for (int w = 0; w < blockDim.x >> 5; w++) top = s.warp[w] > top ? s.warp[w] : top;
    for (int i = t; i < n; i += blockDim.x) {
        const float v = i == t ? mine : __ldcg(l + i);
        s.p[i] = o.i[3] ? bw_sigmoid(v) : bw_exp(v - top);
    }
    __syncthreads();
    float total = 0.0f;
    for (int i = lane; i < n; i += 32) total = total + s.p[i];
    total = warp_tree(total);
    __syncthreads();
    for (int i = t; i < n; i += blockDim.x) {
        float p = o.i[3] ? s.p[i] : s.p[i] / total;
        s.p[i] = p;
        s.c[i] = o.w ? p + __ldg(o.w + i) : p;
        s.skip[i] = o.i[0] > 1;
    }
    __syncthreads();
    if (o.i[0] > 1) {
        for (int g = t; g < o.i[0]; g += blockDim.x) {
            s.dropped[g] = 0;
            s.group[g] = bw_route_group(s.c + g * (n / o.i[0]), n / o.i[0]);
        }
        __syncthreads();
    }
    if (t >= 32) return;
    if (o.i[0] == 1 && n <= 32 * ROUTE_HELD) route_select_held(o, s, out, lane);
    else route_select(o, s, out, lane);
}

} // namespace bw
#endif
