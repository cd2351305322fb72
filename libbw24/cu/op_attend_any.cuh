/* ATTEND (docs/numerics.md §6) for every pair of KV formats and every head size: one block a (row, query head) that walks the pieces in
 * order. Plain and slow; op_attend.cuh has the formats and sizes that models use. */
#ifndef BW24_CU_OP_ATTEND_ANY_CUH
#define BW24_CU_OP_ATTEND_ANY_CUH

#include "attend.cuh"

namespace bw {

struct AnyQuery { const float *x; const int8_t *code; const float *delta; };

/* the LINEAR program of the query over key j */
__device__ __forceinline__ float any_score(const KvPlace &p, const uint8_t *part, int j, const AnyQuery &q) {
    float y = 0.0f, acc = 0.0f;
    if (p.k != KV_Q8_0 && p.k != KV_Q5_1) {
        for (int d = 0; d < p.dim; d++) {
            acc = fmaf(kv_value(p.k, part, p.dim, j, d), q.x[d], acc);
            if ((d & 255) == 255 || d == p.dim - 1) { y = y + acc; acc = 0.0f; }
        }
        return y;
    }
    for (int d = 0; d < p.dim; d += 32) {
        int dot = 0, sum = 0;
        float s = 0.0f, m = 0.0f;
        for (int e = 0; e < 32; e++) { int a = q.code[d + e]; dot += kv_code(p.k, part, p.dim, j, d + e, &s, &m) * a; sum += a; }
        const float delta = q.delta[d / 32];
        acc = fmaf(s, delta * (float)dot, acc);
        if (p.k == KV_Q5_1) acc = fmaf(m, delta * (float)sum, acc);
        if ((d & 255) == 224 || d + 32 == p.dim) { y = y + acc; acc = 0.0f; }
    }
    return y;
}

static __global__ void __launch_bounds__(128) k_attend_any(AttendArgs a, StepRows s) {
    __shared__ float x[ATTEND_MAX_DIM], delta[ATTEND_MAX_DIM / 32], u[PIECE];
    __shared__ int8_t code[ATTEND_MAX_DIM];
    __shared__ float stats[2];
    const int row = blockIdx.x, head = blockIdx.y, D = a.kv.dim, t = threadIdx.x, lane = t & 31;
    pdl_trigger();
    pdl_wait();
    AttendRow r = attend_row(a, s, row);
    const float *q = a.q + ((size_t)row * a.heads + head) * D;
    bool bad = false;
    for (int d = t; d < D; d += 128) { x[d] = __ldcg(q + d); bad |= not_finite(x[d]); }
    __syncthreads();
    if (a.kv.k == KV_Q8_0 || a.kv.k == KV_Q5_1)
        for (int g = t >> 5; g < D / 32; g += 4) {
            float v = x[g * 32 + lane], dl, recip;
            const uint32_t bits = __reduce_max_sync(~0u, magnitude(v));
            bad |= bits >= BW_ACT_LIMIT;
            act_scale(bits, &dl, &recip);
            code[g * 32 + lane] = (int8_t)act_code(v, recip);
            if (!lane) delta[g] = dl;
        }
    __syncthreads();
    const AnyQuery aq = {x, code, delta};
    float N = 0.0f, L = 0.0f, O[ATTEND_MAX_DIM / 128];
    for (int b = r.lo / PIECE; b * PIECE < r.hi; b++) {
        const uint8_t *part = r.pages[b] + a.kv.offset + (head / (a.heads / a.kv.heads)) * kv_head_bytes(a.kv), *v = part + (a.kv.shared ? 0 : kv_bytes(a.kv.k, D));
        int j0 = max(0, r.lo - b * PIECE), j1 = min(PIECE, r.hi - b * PIECE);
        if (t < PIECE) {
            u[t] = t >= j0 && t < j1 ? any_score(a.kv, part, t, aq) * a.c : 0.0f;
            bad |= not_finite(u[t]);
        }
        __syncthreads();
        if (t < 32) {
            bool in0 = t >= j0 && t < j1, in1 = t + 32 >= j0 && t + 32 < j1;
            float m = fmaxf(in0 ? u[t] : -INFINITY, in1 ? u[t + 32] : -INFINITY);
#pragma unroll
            for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
            m = ceilf(m);
            float p0 = in0 ? bw_exp2(u[t] - m) : 0.0f, p1 = in1 ? bw_exp2(u[t + 32] - m) : 0.0f, l = warp_tree(p0 + p1);
            u[t] = p0; u[t + 32] = p1;
            if (!t) { stats[0] = m; stats[1] = l; }
        }
        __syncthreads();
        bool first = b == r.lo / PIECE;
        float n = stats[0], l = stats[1], M = first || n > N ? n : N, f = first ? 0.0f : pow2_factor(N - M), g = first ? 1.0f : pow2_factor(n - M);
        L = first ? l : fmaf(l, g, L * f);
        N = M;
#pragma unroll
        for (int i = 0; i < ATTEND_MAX_DIM / 128; i++) {
            int d = t + i * 128;
            if (d >= D) continue;
            float o = 0.0f;
            for (int j = j0; j < j1; j++) o = fmaf(u[j], kv_value(a.kv.v, v, D, j, d), o);
            O[i] = first ? o : fmaf(o, g, O[i] * f);
        }
        __syncthreads();
    }
    float inv = 1.0f / L;
#pragma unroll
    for (int i = 0; i < ATTEND_MAX_DIM / 128; i++) {
        int d = t + i * 128;
        if (d < D) {
            float v = O[i] * inv;
            bad |= not_finite(v);
            a.y[((size_t)row * a.heads + head) * D + d] = v;
        }
    }
    if (bad) report_fault(s.fault, a.op);
}

} // namespace bw
#endif
