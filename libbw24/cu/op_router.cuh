/* The way into a mixture of experts in one launch: NORM, the router's LINEAR and with it the shared expert's gate, ROUTE (docs/numerics.md §3, §4, §10).
 * Every block normalises the row for itself and takes two outputs; the block whose outputs are the last to be done chooses the experts. Owns this mapping
 * of work; the mathematics of the choice is op_route.cuh's. */
#ifndef BW24_CU_OP_ROUTER_CUH
#define BW24_CU_OP_ROUTER_CUH

#include "float.cuh"
#include "moe.cuh"
#include "op_route.cuh"

namespace bw {

enum { ROUTER_THREADS = 256, ROUTER_OUTS = 2, ROUTER_PITCH = 257, ROUTER_SEGS = 16 }; /* the pitch keeps segments in separate banks */

/* dynamic shared memory: x [segs][pitch], w [outs][segs][pitch], sums [outs][segs], squares [segs] */
inline size_t router_shared(int cols) {
    size_t segs = (size_t)(cols + 255) / 256;
    return (segs * (1 + ROUTER_OUTS) * ROUTER_PITCH + segs * (ROUTER_OUTS + 1)) * sizeof(float);
}

/* a row of weights to shared memory, as f32, zeros past its end. Copies of f32 are all under way before the caller waits for them. */
__device__ __forceinline__ void router_weights(int type, const uint8_t *w, int cols, int S, float *to) {
    enum { AT_ONCE = 8 };
    for (int k0 = 0; k0 < S; k0 += AT_ONCE) {
        const int c0 = k0 * 256 + threadIdx.x;
        float *at = to + k0 * ROUTER_PITCH + threadIdx.x;
        if (type == FLOAT_F32) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (k0 + k >= S) break;
                if (c0 + k * 256 < cols) cp4(at + k * ROUTER_PITCH, (const float *)w + c0 + k * 256);
                else at[k * ROUTER_PITCH] = 0.0f;
            }
            continue;
        }
        float v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) v[k] = c0 + k * 256 < cols ? float_at(type, w, (size_t)(c0 + k * 256)) : 0.0f;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (k0 + k < S) at[k * ROUTER_PITCH] = v[k];
    }
    asm volatile("cp.async.commit_group;");
}

/* grid (pairs of outputs of part 0, then of part 1; rows) */
static __global__ void __launch_bounds__(ROUTER_THREADS, 2) k_router(RouterArgs a) {
    extern __shared__ __align__(16) float router_mem[];
    __shared__ RouteShared route;
    __shared__ int last;
    const int t = threadIdx.x, lane = t & 31, row = blockIdx.y, S = (a.cols + 255) / 256, first = (a.part[0].n + ROUTER_OUTS - 1) / ROUTER_OUTS;
    const bool extra = blockIdx.x >= first;
    const LinearPart &p = a.part[extra];
    const int n0 = (extra ? blockIdx.x - first : blockIdx.x) * ROUTER_OUTS, type = a.type[extra];
    float *xs = router_mem, *ws = xs + S * ROUTER_PITCH, *sums = ws + ROUTER_OUTS * S * ROUTER_PITCH, *squares = sums + ROUTER_OUTS * S;
    pdl_trigger();
    for (int o = 0; o < ROUTER_OUTS; o++) {
        const int cols = n0 + o < p.n ? a.cols : 0;
        router_weights(type, p.w + (cols ? (size_t)(n0 + o) * a.cols * float_bytes(type) : 0), cols, S, ws + o * S * ROUTER_PITCH);
    }
    norm_row({a.x + (size_t)row * a.cols, a.w, a.cols, a.l2, a.eps}, ROUTER_THREADS / 32, squares, [&](int seg, int c, const float (&v)[8], int count) {
#pragma unroll
        for (int j = 0; j < 8; j++) xs[seg * ROUTER_PITCH + lane * 8 + j] = v[j];
        if (blockIdx.x) return;
        for (int j = 0; j < count; j++) a.h[(size_t)row * a.cols + c + j] = v[j];
        Quant8 q = quant_eight(v, a.fault, a.norm_op);
        if (count <= 0) return;
        const int g = seg * 8 + (lane >> 2);
        put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + g * 32, lane, q);
        if (lane & 3) return;
        const size_t at = (size_t)g * a.o.ld + row;
        a.o.delta[at] = q.d; a.o.sum[at] = (float)q.sum; a.o.low[at] = (float)q.low;
    });
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (t < ROUTER_OUTS * S) {
        const float *w = ws + t * ROUTER_PITCH, *x = xs + t % S * ROUTER_PITCH;
        const int count = min(256, a.cols - t % S * 256);
        float v = 0.0f;
#pragma unroll 16
        for (int c = 0; c < count; c++) v = fmaf(w[c], x[c], v);
        sums[t] = v;
    }
    __syncthreads();
    if (t < ROUTER_OUTS && n0 + t < p.n) {
        float y = 0.0f;
        for (int s = 0; s < S; s++) y = y + sums[t * S + s];
        linear_store(p, row, n0 + t, y, 0.0f);
        __threadfence();
    }
    if (extra) return;
    __syncthreads();
    if (!t) last = atomicAdd(a.count + row, 1) == first - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (!t) a.count[row] = 0;
    row_route(a.route, p.y + (size_t)row * p.n, a.route.y + (size_t)row * a.route.n, route, a.fault);
}

} // namespace bw
#endif
