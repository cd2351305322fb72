/* The row ops: NORM and quantisation as kernels of their own, and an interpreter for a run of row-local ops (docs/numerics.md §4, §5, §7).
 * Owns the mapping of a row to threads. Knows no list: operands come resolved as RowOp. */
#ifndef BW24_CU_OP_ROWS_CUH
#define BW24_CU_OP_ROWS_CUH

#include "early.cuh"
#include "op_route.cuh"
#include "rows.cuh"

namespace bw {

struct NormArgs {
    const float *x; /* [rows][n] */
    const float *w; /* [n] or NULL */
    float *y;       /* [rows][n] or NULL */
    Acts o;         /* o.q NULL: not wanted */
    int n, l2;
    float eps;
    int *fault, op;
    int rows, part; /* k_norm_whole: rows, segments that a block ends */
};

/* One block a row; at most 64 segments */
static __global__ void __launch_bounds__(512) k_norm_quant(NormArgs a) {
    __shared__ float part[64];
    const int lane = threadIdx.x & 31, row = blockIdx.x;
    pdl_trigger();
    norm_row({a.x + (size_t)row * a.n, a.w, a.n, a.l2, a.eps}, blockDim.x >> 5, part, [&](int seg, int c, const float (&v)[8], int count) {
        float *y = a.y + (size_t)row * a.n + c;
        if (a.y && count == 8 && !(a.n & 7)) {
            *(float4 *)y = make_float4(v[0], v[1], v[2], v[3]);
            *(float4 *)(y + 4) = make_float4(v[4], v[5], v[6], v[7]);
        } else if (a.y)
            for (int j = 0; j < count; j++) y[j] = v[j];
        if (!a.o.q) return;
        Quant8 q = quant_eight(v, a.fault, a.op);
        if (count <= 0) return;
        int g = seg * 8 + (lane >> 2);
        put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + g * 32, lane, q);
        if (lane & 3) return;
        size_t at = (size_t)g * a.o.ld + row;
        put_scales(a.o, at, q);
    });
}

enum { NORM_SEGS = 32, NORM_PARTS = 4 };
/* four values by a load that the compiler leaves before the dependency wait */
__device__ __forceinline__ void load_now(const float *p, float *v) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p) : "memory");
}
/* a warp's 256 values times r and the weights, 8 columns a lane, and what is made of them */
__device__ __forceinline__ void norm_end(const NormArgs &a, int row, int seg, int lane, const float *values, float r, const float (&w)[8]) {
    const float4 v0 = *(const float4 *)&values[lane * 8], v1 = *(const float4 *)&values[lane * 8 + 4];
    float v[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = (v[j] * r) * w[j];
    if (a.y) {
        float4 *y = (float4 *)(a.y + (size_t)row * a.n + seg * 256 + lane * 8);
        y[0] = make_float4(v[0], v[1], v[2], v[3]);
        y[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
    if (!a.o.q) return;
    const Quant8 q = quant_eight(v, a.fault, a.op);
    const int g = seg * 8 + (lane >> 2);
    put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + g * 32, lane, q);
    if (lane & 3) return;
    const size_t at = (size_t)g * a.o.ld + row;
    put_scales(a.o, at, q);
}

/* The same for n = 256 S, S <= NORM_SEGS, a warp a segment; short, for at few rows its time is that of one pass through the code. Each block of a row
 * adds up the squares of all of it, in the one order, and ends `part` segments, so that quantising and stores are shared out and no block meets another.
 * grid (rows, parts): the loop over rows goes round once. It is there because ptxas fetches what a loop does not change before it, and that is before the
 * dependency wait: in a text without it arguments come from the constant cache one by one behind the wait, which takes 1.5 us of 4.1. */
static __global__ void __launch_bounds__(32 * NORM_SEGS, 1) k_norm_whole(const __grid_constant__ NormArgs a) {
    __shared__ __align__(16) float sums[NORM_SEGS], whole[NORM_SEGS][256]; /* of segments; values, read again as 8 columns a lane */
    const int lane = threadIdx.x & 31, seg = threadIdx.x >> 5, S = blockDim.x >> 5, c = seg * 256 + lane * 8, from = blockIdx.y * a.part;
    const bool mine = seg >= from && seg < from + a.part;
    float w[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    pdl_trigger();
    if (a.w) { load_now(a.w + c, w); load_now(a.w + c + 4, w + 4); }
    if (!seg && lane >= S) sums[lane] = 0.0f; /* +0 changes no sum of squares */
#pragma unroll 1
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const float *x = a.x + (size_t)row * a.n + seg * 256 + lane;
        float t[8], p = 0.0f, total = 0.0f;
        pdl_wait();
        if (row != blockIdx.x) __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; j++) t[j] = __ldcg(x + j * 32);
#pragma unroll
        for (int j = 0; j < 8; j++) { p = fmaf(t[j], t[j], p); whole[seg][j * 32 + lane] = t[j]; }
        p = warp_tree(p);
        if (!lane) sums[seg] = p;
        __syncthreads();
        if (!mine) continue;
#pragma unroll
        for (int s = 0; s < NORM_SEGS; s += 4) {
            if (s == 16 && a.n <= 16 * 256) break;
            const float4 k = *(const float4 *)&sums[s];
            total = total + k.x; total = total + k.y; total = total + k.z; total = total + k.w;
        }
        norm_end(a, row, seg, lane, whole[seg], 1.0f / sqrtf((a.l2 ? total : total / (float)a.n) + a.eps), w);
    }
}

/* y = f(x, up) of a row and its quantised form, either may be left out. One warp a group of 32, a value a thread; n need not be a multiple of it
 * without o. */
static __global__ void __launch_bounds__(256) k_quant(QuantArgs a) {
    const int lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y, c = g * 32 + lane;
    pdl_trigger();
    pdl_wait();
    if (g * 32 >= a.n) return;
    const size_t at = (size_t)row * a.n + c;
    float v = c < a.n ? __ldcg(a.x + at) : 0.0f;
    if (a.kind == QUANT_CAP && c < a.n) {
        v = a.f * bw_tanh(v * (1.0f / a.f));
        a.y[at] = v;
    } else if (a.kind != QUANT_ONLY && c < a.n) {
        const int from = a.size ? c / a.size * a.stride + a.from + c % a.size * a.step : c;
        const float u = __ldcg(a.up + (size_t)row * a.ldu + from);
        v = a.kind == QUANT_GATE ? v * bw_sigmoid(u) : (a.kind == QUANT_GELU ? bw_gelu(v) : bw_silu(v)) * u;
        a.y[at] = v;
    }
    if (a.o.q) quant_group(a.o, row, g, lane, v, a.fault, a.op);
}

/* The same for many rows: a warp has 256 columns, a lane 8 of them; n a multiple of 32, up where x is. */
static __global__ void __launch_bounds__(256) k_quant_wide(QuantArgs a) {
    const int lane = threadIdx.x & 31, c = (blockIdx.x * 8 + (threadIdx.x >> 5)) * 256 + lane * 8, row = blockIdx.y;
    const size_t at = (size_t)row * a.n;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, u[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    pdl_trigger();
    pdl_wait();
    if (c - lane * 8 >= a.n) return;
    load_eight(a.x + at, c, a.n, true, false, v);
    if (a.kind != QUANT_ONLY) {
        load_eight(a.up + at, c, a.n, true, false, u);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = a.kind == QUANT_GATE ? v[j] * bw_sigmoid(u[j]) : (a.kind == QUANT_GELU ? bw_gelu(v[j]) : bw_silu(v[j])) * u[j];
        if (c < a.n) {
            *(float4 *)(a.y + at + c) = make_float4(v[0], v[1], v[2], v[3]);
            *(float4 *)(a.y + at + c + 4) = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    if (!a.o.q) return;
    const Quant8 q = quant_eight(v, a.fault, a.op);
    if (c >= a.n) return;
    put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + c / 32 * 32, lane, q);
    if (lane & 3) return;
    const size_t s = (size_t)(c >> 5) * a.o.ld + row;
    put_scales(a.o, s, q);
}

/* wanted rows of up to PICKS buffers, each of its own width. grid (rows, parts of the widest, buffers) */
enum { PICK_COLS = 1024 };
struct PickArgs { float *y[PICKS]; const float *x[PICKS]; int n[PICKS]; };
static __global__ void __launch_bounds__(256) k_pick(const __grid_constant__ PickArgs a, StepRows s) {
    const int n = a.n[blockIdx.z], c = blockIdx.y * PICK_COLS + threadIdx.x;
    pdl_trigger();
    pdl_wait();
    const float *from = a.x[blockIdx.z] + (size_t)s.want_row[blockIdx.x] * n;
    float v[PICK_COLS / 256], *to = a.y[blockIdx.z] + (size_t)blockIdx.x * n;
#pragma unroll
    for (int k = 0; k < PICK_COLS / 256; k++) v[k] = c + k * 256 < n ? __ldcg(from + c + k * 256) : 0.0f;
#pragma unroll
    for (int k = 0; k < PICK_COLS / 256; k++)
        if (c + k * 256 < n) to[c + k * 256] = v[k];
}

/* Ends a step: faults among the logits, and the likeliest token of each row (ties: the lowest id), as the largest key (ordered bits of the logit, ~id).
 * A block looks at FINISH_COLS logits of a row; columns beyond the row are its last one again, which changes nothing. ids: the token of each column,
 * -1: none; NULL: column i is token i. They stand before the step begins, so they are asked for before the wait. */
enum { FINISH_COLS = 1024 };
static __global__ void __launch_bounds__(256) k_finish(const float *x, int vocab, const int *ids, unsigned long long *best, int *fault, int op) {
    __shared__ unsigned long long of_warp[8];
    enum { EACH = FINISH_COLS / 256 };
    const float *row = x + (size_t)blockIdx.y * vocab;
    int id[EACH], at[EACH];
    float v[EACH];
    pdl_trigger();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        at[k] = min((int)(blockIdx.x * FINISH_COLS + k * 256 + threadIdx.x), vocab - 1);
        id[k] = at[k];
        if (ids) id[k] = load_now(ids + at[k]);
    }
    pdl_wait();
#pragma unroll
    for (int k = 0; k < EACH; k++) v[k] = __ldcg(row + at[k]) + 0.0f; /* -0 counts as 0 */
    unsigned long long top = 0;
    bool bad = false;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        bad |= not_finite(v[k]);
        const uint32_t bits = __float_as_uint(v[k]), ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        const unsigned long long key = (unsigned long long)ordered << 32 | (uint32_t)~id[k];
        top = id[k] >= 0 && key > top ? key : top;
    }
    if (bad) report_fault(fault, op);
    const auto largest = [](unsigned long long t) {
        const uint32_t high = __reduce_max_sync(~0u, (uint32_t)(t >> 32)), low = __reduce_max_sync(~0u, (uint32_t)(t >> 32) == high ? (uint32_t)t : 0u);
        return (unsigned long long)high << 32 | low;
    };
    top = largest(top);
    if (!(threadIdx.x & 31)) of_warp[threadIdx.x >> 5] = top;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    top = largest(of_warp[threadIdx.x & 7]);
    if (!threadIdx.x) atomicMax(best + blockIdx.y, top);
}

/* ---- the interpreter */
__device__ __forceinline__ void row_norm(const RowOp &o, const float *x, float *y) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = o.i[0], n = o.n / heads;
    for (int h = warp; h < heads; h += blockDim.x >> 5) {
        const float *xh = x + h * n;
        float total = 0.0f;
        for (int s = 0; s < n; s += 256) {
            float p = 0.0f;
            for (int c = s + lane; c < n && c < s + 256; c += 32) { float v = xh[c]; p = fmaf(v, v, p); }
            total = total + warp_tree(p);
        }
        float r = 1.0f / sqrtf((o.i[1] ? total : total / (float)n) + o.f);
        for (int c = lane; c < n; c += 32) y[h * n + c] = o.w ? (xh[c] * r) * __ldg(o.w + c) : xh[c] * r;
    }
}

/* a NORM of the whole row by the whole block; part: one float a segment. A thread's own values and weights are asked for before the sums. */
__device__ __forceinline__ void row_norm_wide(const RowOp &o, const float *x, float *y, float *part) {
    enum { AT_ONCE = 8 };
    const int lane = threadIdx.x & 31, n = o.n, S = (n + 255) / 256, step = blockDim.x;
    const float *w = o.w;
    float own[AT_ONCE], scale[AT_ONCE];
    const auto read = [&](int c0) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int c = c0 + k * step;
            own[k] = c < n ? x[c] : 0.0f;
            scale[k] = w && c < n ? __ldg(w + c) : 1.0f;
        }
    };
    read(threadIdx.x);
    for (int s = threadIdx.x >> 5; s < S; s += step >> 5) {
        float v[8], p = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = s * 256 + j * 32 + lane < n ? x[s * 256 + j * 32 + lane] : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) p = fmaf(v[j], v[j], p);
        p = warp_tree(p);
        if (!lane) part[s] = p;
    }
    __syncthreads();
    float total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < S; s++) total = total + part[s];
    const float r = 1.0f / sqrtf((o.i[1] ? total : total / (float)n) + o.f);
    for (int c0 = threadIdx.x; c0 < n; c0 += step * AT_ONCE) {
        if (c0 >= step) read(c0);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int c = c0 + k * step;
            if (c < n) y[c] = w ? (own[k] * r) * scale[k] : own[k] * r;
        }
    }
}

__device__ __forceinline__ void row_rope(const RowOp &o, float *x, int row) {
    const int heads = o.i[0], dim = o.i[1], half = o.i[2] / 2;
    const float *cs = o.cs + (size_t)row * o.i[2];
    for (int k = threadIdx.x; k < heads * half; k += blockDim.x) {
        int h = k / half, i = k % half, p = o.i[3] ? 2 * i : i, q = o.i[3] ? 2 * i + 1 : i + half;
        float *xh = x + h * dim, x0 = xh[p], x1 = xh[q], c = __ldcg(cs + i), s = __ldcg(cs + half + i);
        xh[p] = fmaf(x0, c, -(x1 * s));
        xh[q] = fmaf(x1, c, x0 * s);
    }
}

/* y[i] = f(a[i], b[i]) over a row, b only where PAIR: a thread asks for all its values of a round before it uses one, for a round trip takes longer
 * than the work of a row */
template <bool PAIR, class F> __device__ __forceinline__ void row_each(int n, const float *a, const float *b, float *y, F f) {
    enum { AT_ONCE = 8 };
    const int step = blockDim.x;
    for (int c0 = threadIdx.x; c0 < n; c0 += step * AT_ONCE) {
        float u[AT_ONCE], v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int c = c0 + k * step;
            u[k] = c < n ? a[c] : 0.0f;
            v[k] = PAIR && c < n ? b[c] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (c0 + k * step < n) y[c0 + k * step] = f(u[k], v[k]);
    }
}

/* the same where a value's place in a or b has to be found: from(i, &a's, &b's place), NULL where it is not read */
template <class From, class F> __device__ __forceinline__ void row_gather(int n, float *y, From from, F f) {
    enum { AT_ONCE = 4 };
    const int step = blockDim.x;
    for (int c0 = threadIdx.x; c0 < n; c0 += step * AT_ONCE) {
        float u[AT_ONCE], v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const float *a = NULL, *b = NULL;
            if (c0 + k * step < n) from(c0 + k * step, &a, &b);
            u[k] = a ? *a : 0.0f;
            v[k] = b ? *b : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (c0 + k * step < n) y[c0 + k * step] = f(u[k], v[k]);
    }
}

__device__ __forceinline__ void row_map(const RowOp &o, const float *a, const float *b, float *y) {
    const int n = o.n;
    switch (o.code) {
    case ROW_ADD: return row_each<true>(n, a, b, y, [](float u, float v) { return u + v; });
    case ROW_SCALE: {
        const float c = o.w ? __ldg(o.w) : o.f;
        return row_each<false>(n, a, b, y, [=](float u, float) { return u * c; });
    }
    case ROW_GLU: {
        const bool gelu = o.i[0] == 1;
        return row_each<true>(n, a, b, y, [=](float u, float v) { return (gelu ? bw_gelu(u) : bw_silu(u)) * v; });
    }
    case ROW_GATE: {
        const int run = n / o.nb;
        return row_gather(n, y, [=](int i, const float **u, const float **v) { *u = a + i; *v = b + i / run; }, [](float u, float v) { return u * bw_sigmoid(v); });
    }
    case ROW_SIGMOID: return row_each<false>(n, a, b, y, [](float u, float) { return bw_sigmoid(u); });
    case ROW_DECAY:
        for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = bw_exp(__ldg(o.w + i) * bw_softplus(a[i] + __ldg(o.cs + i)));
        return;
    case ROW_CONCAT: {
        const int size = n / o.i[0], na = o.na / o.i[0];
        return row_gather(n, y, [=](int i, const float **u, const float **v) {
            int h = i / size, c = i % size;
            if (c < na) *u = a + h * na + c;
            else *u = b + h * (size - na) + c - na;
            (void)v;
        }, [](float u, float) { return u; });
    }
    case ROW_SLICE: {
        const int size = n / o.i[0], pitch = o.na / o.i[0], first = o.i[1];
        return row_gather(n, y, [=](int i, const float **u, const float **v) { *u = a + i / size * pitch + first + i % size; (void)v; }, [](float u, float) { return u; });
    }
    default: {
        const float inv = 1.0f / o.f, cap = o.f;
        return row_each<false>(n, a, b, y, [=](float u, float) { return cap * bw_tanh(u * inv); });
    }
    }
}

/* the last result of a run, quantised for its reader; q NULL: not wanted */
struct RowsQuant { Acts o; const float *x; int op; };
__device__ __forceinline__ void rows_quant(const RowsQuant &z, int row, int *fault) {
    const int lane = threadIdx.x & 31;
    for (int g = (threadIdx.x >> 5) * 4; g * 32 < z.o.cols; g += (blockDim.x >> 5) * 4) {
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = (g + j) * 32 < z.o.cols ? z.x[(size_t)row * z.o.cols + (g + j) * 32 + lane] : 0.0f;
        quant_groups<4>(z.o, row, g, lane, v, fault, z.op);
    }
}

/* One block a row; ops one after the other with a barrier between. want: the rows are the wanted ones. The ops are copied before the dependency wait:
 * nothing writes them. */
enum { ROWS_HELD = 16 };
static __global__ void __launch_bounds__(512, 2) k_rows(const RowOp *ops, int n_ops, int want, RowsQuant z, StepRows s) {
    __shared__ RouteShared route;
    __shared__ float part[64];
    __shared__ RowOp held[ROWS_HELD];
    const int i = blockIdx.x;
    pdl_trigger();
    for (int k = threadIdx.x; k < min(n_ops, (int)ROWS_HELD) * (int)(sizeof(RowOp) / 4); k += blockDim.x) ((uint32_t *)held)[k] = __ldg((const uint32_t *)ops + k);
    pdl_wait();
    for (int k = 0; k < n_ops; k++) {
        __syncthreads();
        const RowOp &o = k < ROWS_HELD ? held[k] : ops[k];
        float *y = o.y + (size_t)i * o.n;
        const float *a = o.a + (size_t)i * o.na, *b = o.b + (size_t)i * o.nb;
        if (o.code == ROW_NORM && o.i[0] == 1 && o.n <= 64 * 256) row_norm_wide(o, a, y, part);
        else if (o.code == ROW_NORM) row_norm(o, a, y);
        else if (o.code == ROW_ROPE) row_rope(o, y, want ? s.want_row[i] : i);
        else if (o.code == ROW_ROUTE) row_route(o, a, y, route, s.fault);
        else if (o.code == ROW_APPEND) {
            uint8_t *page = s.pages[s.table[o.kv.klass * s.n + i] + s.pos[i] / PIECE] + o.kv.offset;
            kv_append(o.kv, page, s.pos[i] % PIECE, a, b, s.fault, o.op);
        } else row_map(o, a, b, y);
    }
    if (!z.o.q) return;
    __syncthreads();
    rows_quant(z, i, s.fault);
}

} // namespace bw
#endif
