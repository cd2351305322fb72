/* The row ops: NORM and quantisation as kernels of their own, and an interpreter for a run of row-local ops (docs/numerics.md §4, §5, §7).
 * Owns the mapping of a row to threads. Knows no list: operands come resolved as RowOp. */
#ifndef BW24_CU_OP_ROWS_CUH
#define BW24_CU_OP_ROWS_CUH

#include "device.cuh"
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
        a.o.delta[at] = q.d; a.o.sum[at] = (float)q.sum; a.o.low[at] = (float)q.low;
    });
}


enum { NORM_SEGS = 32 };
/* four values by a load that the compiler leaves before the dependency wait */
__device__ __forceinline__ void load_now(const float *p, float *v) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p) : "memory");
}
/* The same for n = 256 S, S <= NORM_SEGS, a warp a segment. Short and without a loop: at few rows its time is that of one pass through the code. */
static __global__ void __launch_bounds__(32 * NORM_SEGS) k_norm_whole(NormArgs a) {
    __shared__ __align__(16) float part[NORM_SEGS], whole[NORM_SEGS][256]; /* sums; values, read again as 8 columns a lane */
    const int lane = threadIdx.x & 31, seg = threadIdx.x >> 5, row = blockIdx.x, S = blockDim.x >> 5, c = seg * 256 + lane * 8;
    const float *x = a.x + (size_t)row * a.n;
    float w[8] = {1, 1, 1, 1, 1, 1, 1, 1}, v[8], t[8], p = 0.0f;
    pdl_trigger();
    if (a.w) { load_now(a.w + c, w); load_now(a.w + c + 4, w + 4); }
    if (!seg && lane >= S) part[lane] = 0.0f; /* +0 changes no sum of squares */
    pdl_wait();
#pragma unroll
    for (int j = 0; j < 8; j++) t[j] = __ldcg(x + seg * 256 + j * 32 + lane);
#pragma unroll
    for (int j = 0; j < 8; j++) { p = fmaf(t[j], t[j], p); whole[seg][j * 32 + lane] = t[j]; }
    p = warp_tree(p);
    if (!lane) part[seg] = p;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < NORM_SEGS; s += 4) {
        if (s == 16 && S <= 16) break;
        const float4 k = *(const float4 *)&part[s];
        total = total + k.x; total = total + k.y; total = total + k.z; total = total + k.w;
    }
    const float4 v0 = *(const float4 *)&whole[seg][lane * 8], v1 = *(const float4 *)&whole[seg][lane * 8 + 4];
    const float r = 1.0f / sqrtf((a.l2 ? total : total / (float)a.n) + a.eps);
    v[0] = v0.x; v[1] = v0.y; v[2] = v0.z; v[3] = v0.w; v[4] = v1.x; v[5] = v1.y; v[6] = v1.z; v[7] = v1.w;
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = (v[j] * r) * w[j];
    if (a.y) {
        float4 *y = (float4 *)(a.y + (size_t)row * a.n + c);
        y[0] = make_float4(v[0], v[1], v[2], v[3]);
        y[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
    if (!a.o.q) return;
    const Quant8 q = quant_eight(v, a.fault, a.op);
    const int g = seg * 8 + (lane >> 2);
    put_eight((uint8_t *)a.o.q + (size_t)row * a.o.cols + g * 32, lane, q);
    if (lane & 3) return;
    const size_t at = (size_t)g * a.o.ld + row;
    a.o.delta[at] = q.d; a.o.sum[at] = (float)q.sum; a.o.low[at] = (float)q.low;
}

/* quantise [rows][n]; GLU: of act(x) * up, which is written to y as well. One warp a group of 32; n need not be a multiple of it for GLU without o. */
template <bool GLU> __global__ void __launch_bounds__(256) k_quant(const float *x, const float *up, float *y, Acts o, int n, int gelu, int *fault, int op) {
    int lane = threadIdx.x & 31, g = blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y, c = g * 32 + lane;
    pdl_trigger();
    pdl_wait();
    if (g * 32 >= n) return;
    size_t at = (size_t)row * n + c;
    float v = c < n ? __ldcg(x + at) : 0.0f;
    if (GLU && c < n) {
        v = (gelu ? bw_gelu(v) : bw_silu(v)) * __ldcg(up + at);
        y[at] = v;
    }
    if (o.q) quant_group(o, row, g, lane, v, fault, op);
}

/* rotation tables of the step's rows: cs [rows][rot] as rope.h lays them out; inv [rot / 2] inverse frequency / factor */
struct RopeTable { const double *inv; float *cs; double scale; int rot; };
struct RopeTables { RopeTable t[8]; int n; };
static __global__ void __launch_bounds__(128) k_rope_tables(RopeTables a, StepRows s) {
    pdl_trigger();
    pdl_wait();
    const RopeTable &t = a.t[blockIdx.y];
    int row = blockIdx.x, half = t.rot / 2;
    for (int k = threadIdx.x; k < half; k += blockDim.x)
        bw_sincos(((double)s.pos[row] * t.inv[k]) * t.scale, t.cs + (size_t)row * t.rot + half + k, t.cs + (size_t)row * t.rot + k);
}

static __global__ void __launch_bounds__(256) k_pick(float *y, const float *x, int n, StepRows s) {
    pdl_trigger();
    pdl_wait();
    const float *from = x + (size_t)s.want_row[blockIdx.x] * n;
    for (int i = threadIdx.x + blockIdx.y * 256; i < n; i += 256 * gridDim.y) y[(size_t)blockIdx.x * n + i] = __ldcg(from + i);
}

/* Ends a step: faults among the logits, and the likeliest token of each row (ties: the lowest id), as the largest key (ordered bits of the logit, ~id).
 * A block looks at 4096 logits of a row. ids: the token of each column, -1: none; NULL: column i is token i. */
static __global__ void __launch_bounds__(256) k_finish(const float *x, int vocab, const int *ids, unsigned long long *best, int *fault, int op) {
    pdl_trigger();
    pdl_wait();
    const float *row = x + (size_t)blockIdx.y * vocab;
    unsigned long long top = 0;
    bool bad = false;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        int i = blockIdx.x * 4096 + k * 256 + threadIdx.x;
        if (i >= vocab) continue;
        float v = __ldcg(row + i) + 0.0f; /* -0 counts as 0 */
        bad |= not_finite(v);
        const int id = ids ? __ldg(ids + i) : i;
        if (id < 0) continue;
        uint32_t bits = __float_as_uint(v), ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        unsigned long long key = (unsigned long long)ordered << 32 | (uint32_t)~id;
        top = key > top ? key : top;
    }
    if (bad) report_fault(fault, op);
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        unsigned long long other = __shfl_xor_sync(~0u, top, o);
        top = other > top ? other : top;
    }
    if (!(threadIdx.x & 31)) atomicMax(best + blockIdx.y, top);
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

/* a NORM of the whole row by the whole block; part: one float a segment */
__device__ __forceinline__ void row_norm_wide(const RowOp &o, const float *x, float *y, float *part) {
    enum { AT_ONCE = 4 };
    const int lane = threadIdx.x & 31, n = o.n, S = (n + 255) / 256;
    for (int s = threadIdx.x >> 5; s < S; s += blockDim.x >> 5) {
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
    for (int s = 0; s < S; s++) total = total + part[s];
    const float r = 1.0f / sqrtf((o.i[1] ? total : total / (float)n) + o.f);
    for (int c0 = threadIdx.x; c0 < n; c0 += blockDim.x * AT_ONCE) {
        float v[AT_ONCE], w[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int c = c0 + k * blockDim.x;
            v[k] = c < n ? x[c] : 0.0f;
            w[k] = o.w && c < n ? __ldg(o.w + c) : 1.0f;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int c = c0 + k * blockDim.x;
            if (c < n) y[c] = o.w ? (v[k] * r) * w[k] : v[k] * r;
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

__device__ __forceinline__ void row_map(const RowOp &o, const float *a, const float *b, float *y) {
    float inv = o.code == ROW_SOFTCAP ? 1.0f / o.f : 0.0f, c = o.code == ROW_SCALE && o.w ? __ldg(o.w) : o.f;
    for (int i = threadIdx.x; i < o.n; i += blockDim.x) {
        switch (o.code) {
        case ROW_ADD: y[i] = a[i] + b[i]; break;
        case ROW_SCALE: y[i] = a[i] * c; break;
        case ROW_GLU: y[i] = (o.i[0] ? bw_gelu(a[i]) : bw_silu(a[i])) * b[i]; break;
        case ROW_GATE: y[i] = a[i] * bw_sigmoid(b[i / (o.n / o.nb)]); break;
        case ROW_SIGMOID: y[i] = bw_sigmoid(a[i]); break;
        case ROW_DECAY: y[i] = bw_exp(__ldg(o.w + i) * bw_softplus(a[i] + __ldg(o.cs + i))); break;
        case ROW_CONCAT: {
            int n = o.n / o.i[0], na = o.na / o.i[0], h = i / n, c = i % n;
            y[i] = c < na ? a[h * na + c] : b[h * (n - na) + c - na];
            break;
        }
        case ROW_SLICE: { int size = o.n / o.i[0]; y[i] = a[i / size * (o.na / o.i[0]) + o.i[1] + i % size]; break; }
        default: y[i] = o.f * bw_tanh(a[i] * inv); break;
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

/* One block a row; ops one after the other with a barrier between. want: the rows are the wanted ones. */
static __global__ void __launch_bounds__(512, 2) k_rows(const RowOp *ops, int n_ops, int want, RowsQuant z, StepRows s) {
    __shared__ RouteShared route;
    __shared__ float part[64];
    const int i = blockIdx.x;
    pdl_trigger();
    pdl_wait();
    for (int k = 0; k < n_ops; k++) {
        const RowOp &o = ops[k];
        float *y = o.y + (size_t)i * o.n;
        const float *a = o.a + (size_t)i * o.na, *b = o.b + (size_t)i * o.nb;
        if (k) __syncthreads();
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
