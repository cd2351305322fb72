/* The way into a mixture of experts in one launch: NORM, the router's LINEAR and with it the shared expert's gate, ROUTE (docs/numerics.md §3, §4, §10).
 * Every block normalises the row for itself and takes two outputs, but one, which makes the rows that the experts read; the block whose outputs are the
 * last to be done chooses the experts, where EXPERTS does not. Owns this mapping of work; the mathematics of the choice is op_route.cuh's. */
#ifndef BW24_CU_OP_ROUTER_CUH
#define BW24_CU_OP_ROUTER_CUH

#include "float.cuh"
#include "moe.cuh"
#include "op_route.cuh"

namespace bw {

enum { ROUTER_THREADS = 256, ROUTER_OUTS = 2, ROUTER_PITCH = 260, ROUTER_SEGS = 16 }; /* the pitch keeps four values of eight segments in separate banks */

/* dynamic shared memory: x [segs][pitch], w [outs][segs][pitch], sums [outs][segs], squares [segs] */
inline size_t router_shared(int cols) {
    size_t segs = (size_t)(cols + 255) / 256;
    return (segs * (1 + ROUTER_OUTS) * ROUTER_PITCH + segs * (ROUTER_OUTS + 1)) * sizeof(float);
}

/* a row of weights to shared memory, as f32. Copies of f32 are all under way before the caller waits for them. */
__device__ __forceinline__ void router_weights(int type, const uint8_t *w, int cols, float *to) {
    enum { AT_ONCE = 8 };
    if (type == FLOAT_F32) {
        for (int c = threadIdx.x * 4; c < cols; c += ROUTER_THREADS * 4) cp16(to + (c >> 8) * ROUTER_PITCH + (c & 255), (const float *)w + c);
        return;
    }
    for (int c0 = threadIdx.x; c0 < cols; c0 += AT_ONCE * 256) {
        float v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) v[k] = c0 + k * 256 < cols ? float_at(type, w, (size_t)(c0 + k * 256)) : 0.0f;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (c0 + k * 256 < cols) to[(c0 >> 8) * ROUTER_PITCH + k * ROUTER_PITCH + (c0 & 255)] = v[k];
    }
}

/* w . x of one segment, columns ascending */
__device__ __forceinline__ float router_dot(const float *w, const float *x, int count) {
    float v = 0.0f;
#pragma unroll 4
    for (int c = 0; c < count; c += 4) {
        const float4 p = *(const float4 *)(w + c), q = *(const float4 *)(x + c);
        v = fmaf(p.x, q.x, v); v = fmaf(p.y, q.y, v); v = fmaf(p.z, q.z, v); v = fmaf(p.w, q.w, v);
    }
    return v;
}

/* grid (pairs of outputs of part 0, then of part 1, then a block that makes the experts' rows; rows). cols: a multiple of 4. */
static __global__ void __launch_bounds__(ROUTER_THREADS, 4) k_router(RouterArgs a) {
    extern __shared__ __align__(16) float router_mem[];
    __shared__ RouteShared route;
    __shared__ int last;
    const int t = threadIdx.x, lane = t & 31, row = blockIdx.y, S = (a.cols + 255) / 256, first = (a.part[0].n + ROUTER_OUTS - 1) / ROUTER_OUTS;
    const bool maker = blockIdx.x == gridDim.x - 1, extra = !maker && blockIdx.x >= first;
    const LinearPart &p = a.part[extra];
    const int n0 = (extra ? blockIdx.x - first : blockIdx.x) * ROUTER_OUTS, type = a.type[extra], seg = t % S, count = min(256, a.cols - seg * 256);
    float *xs = router_mem, *ws = xs + S * ROUTER_PITCH, *sums = ws + ROUTER_OUTS * S * ROUTER_PITCH, *squares = sums + ROUTER_OUTS * S;
    pdl_trigger();
    for (int o = 0; o < ROUTER_OUTS && !maker; o++)
        if (n0 + o < p.n) router_weights(type, p.w + (size_t)(n0 + o) * a.cols * float_bytes(type), a.cols, ws + o * S * ROUTER_PITCH);
    norm_row({a.x + (size_t)row * a.cols, maker && a.own ? a.own : a.w, a.cols, a.l2, a.eps}, ROUTER_THREADS / 32, squares,
             [&](int seg, int c, const float (&v)[8], int count) {
        if (!maker) {
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                *(float4 *)(xs + seg * ROUTER_PITCH + lane * 8 + j) = make_float4(v[j] * a.factor, v[j + 1] * a.factor, v[j + 2] * a.factor, v[j + 3] * a.factor);
            return;
        }
        for (int j = 0; j < count; j++) a.h[(size_t)row * a.cols + c + j] = v[j];
        Quant8 q = quant_eight(v, a.fault, a.norm_op);
        if (count <= 0) return;
        const int g = seg * 8 + (lane >> 2);
        put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + g * 32, lane, q);
        if (lane & 3) return;
        const size_t at = (size_t)g * a.o.ld + row;
        put_scales(a.o, at, q);
    });
    if (maker) return;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (t < ROUTER_OUTS * S) sums[t] = router_dot(ws + t * ROUTER_PITCH, xs + seg * ROUTER_PITCH, count);
    __syncthreads();
    if (t < ROUTER_OUTS && n0 + t < p.n) {
        float y = 0.0f;
        for (int s = 0; s < S; s++) y = y + sums[t * S + s];
        linear_store(p, row, n0 + t, y, 0.0f);
        if (a.count) __threadfence();
    }
    if (extra || !a.count) return;
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
