/* ATTEND (docs/numerics.md §6) of few rows where keys are values: the pieces of a (row, query head) are shared out among blocks, k_attend_merge folds
 * them. Every pair of formats and every head size that is a multiple of 32; a thread makes a key's product over a segment of 256 columns. Owns the
 * mapping of work. */
#ifndef BW24_CU_OP_ATTEND_SHARED_CUH
#define BW24_CU_OP_ATTEND_SHARED_CUH

#include "op_attend_any.cuh"

namespace bw {

enum { SHARED_THREADS = 256, SHARED_SEGS = ATTEND_MAX_DIM / 256 };

struct SharedQuery {
    float x[ATTEND_MAX_DIM], delta[ATTEND_MAX_DIM / 32], p[SHARED_SEGS][PIECE], u[PIECE];
    int8_t code[ATTEND_MAX_DIM];
};

/* the segment's sum of a key's LINEAR program */
__device__ __forceinline__ float shared_segment(const KvPlace &p, const uint8_t *part, int j, int seg, const SharedQuery &q) {
    const int c0 = seg * 256, c1 = min(p.dim, c0 + 256);
    float acc = 0.0f;
    if (p.k != KV_Q8_0 && p.k != KV_Q5_1) {
        for (int d = c0; d < c1; d++) acc = fmaf(kv_value(p.k, part, p.dim, j, d), q.x[d], acc);
        return acc;
    }
    for (int d = c0; d < c1; d += 32) {
        int dot = 0, sum = 0;
        float s = 0.0f, m = 0.0f;
        for (int e = 0; e < 32; e++) { int a = q.code[d + e]; dot += kv_code(p.k, part, p.dim, j, d + e, &s, &m) * a; sum += a; }
        const float delta = q.delta[d / 32];
        acc = fmaf(s, delta * (float)dot, acc);
        if (p.k == KV_Q5_1) acc = fmaf(m, delta * (float)sum, acc);
    }
    return acc;
}

__device__ __forceinline__ bool shared_query(const AttendArgs &a, const float *q, SharedQuery &sh) {
    const int t = threadIdx.x, lane = t & 31, D = a.kv.dim;
    bool bad = false;
    for (int d = t; d < D; d += SHARED_THREADS) { sh.x[d] = __ldcg(q + d); bad |= not_finite(sh.x[d]); }
    __syncthreads();
    if (a.kv.k != KV_Q8_0 && a.kv.k != KV_Q5_1) return bad;
    for (int g = t >> 5; g < D / 32; g += SHARED_THREADS / 32) {
        float v = sh.x[g * 32 + lane], dl, recip;
        const uint32_t bits = __reduce_max_sync(~0u, magnitude(v));
        bad |= bits >= BW_ACT_LIMIT;
        act_scale(bits, &dl, &recip);
        sh.code[g * 32 + lane] = (int8_t)act_code(v, recip);
        if (!lane) sh.delta[g] = dl;
    }
    __syncthreads();
    return bad;
}

/* p of the piece's keys [j0, j1) into u, (n, l) to memory; by warp 0 */
__device__ __forceinline__ void shared_softmax(SharedQuery &sh, int j0, int j1, float2 *nl) {
    const int t = threadIdx.x;
    const bool in0 = t >= j0 && t < j1, in1 = t + 32 >= j0 && t + 32 < j1;
    float m = fmaxf(in0 ? sh.u[t] : -INFINITY, in1 ? sh.u[t + 32] : -INFINITY);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    m = ceilf(m);
    const float p0 = in0 ? bw_exp2(sh.u[t] - m) : 0.0f, p1 = in1 ? bw_exp2(sh.u[t + 32] - m) : 0.0f, l = warp_tree(p0 + p1);
    sh.u[t] = p0;
    sh.u[t + 32] = p1;
    if (!t) *nl = make_float2(m, l);
}

/* grid (blocks that share the pieces, query heads, rows) */
static __global__ void __launch_bounds__(SHARED_THREADS) k_attend_shared(AttendArgs a, StepRows s) {
    __shared__ SharedQuery sh;
    const int row = blockIdx.z, head = blockIdx.y, D = a.kv.dim, t = threadIdx.x, segs = (D + 255) / 256;
    pdl_trigger();
    pdl_wait();
    const AttendRow r = attend_row(a, s, row);
    const int first = r.lo / PIECE, last = (r.hi - 1) / PIECE;
    if (first + (int)blockIdx.x > last) return;
    bool bad = shared_query(a, a.q + ((size_t)row * a.heads + head) * D, sh);
    for (int b = first + blockIdx.x; b <= last; b += gridDim.x) {
        const uint8_t *part = r.pages[b] + a.kv.offset + (head / (a.heads / a.kv.heads)) * kv_head_bytes(a.kv);
        const int j0 = max(0, r.lo - b * PIECE), j1 = min((int)PIECE, r.hi - b * PIECE), j = t % PIECE, seg = t / PIECE;
        if (seg < segs) sh.p[seg][j] = j >= j0 && j < j1 ? shared_segment(a.kv, part, j, seg, sh) : 0.0f;
        __syncthreads();
        if (t < PIECE) {
            float y = 0.0f;
            for (int k = 0; k < segs; k++) y = y + sh.p[k][t];
            sh.u[t] = y * a.c;
            bad |= t >= j0 && t < j1 && not_finite(sh.u[t]);
        }
        __syncthreads();
        const int64_t at = ((int64_t)row * a.max_pieces + b - first) * a.heads + head;
        if (t < 32) shared_softmax(sh, j0, j1, a.nl + at);
        __syncthreads();
        for (int d = t; d < D; d += SHARED_THREADS) {
            float o = 0.0f;
            for (int k = j0; k < j1; k++) o = fmaf(sh.u[k], kv_value(a.kv.v, part, D, k, d), o);
            a.o[at * D + d] = o;
        }
        __syncthreads();
    }
    if (bad) report_fault(s.fault, a.op);
}

} // namespace bw
#endif
