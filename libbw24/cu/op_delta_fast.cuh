/* DELTA of the numeric class `fast` (docs/numerics.md, section 13): rows in chunks of 32, what a chunk does to the state as products of matrices by tf32
 * tensor cores. With decays a, c(t) = log2 of their product up to row t, e(t, i) = 2^(c(t) - c(i)), S the state before the chunk:
 *   A[t][i] = b(t) e(t, i) k(t).k(i), i < t;     T = (1 + A)^-1;     P[t][i] = e(t, i) q(t).k(i), i <= t
 *   D = T (b (V - 2^c (K S)));     Y = 2^c (Q S) + P D;     S' = 2^c(31) S + K^T (2^(c(31) - c) D)
 * T and P know nothing of S: one kernel makes them for all chunks at once, the next one walks over the chunks. Owns both kernels and what passes
 * between them; the last rows of a sequence, which are logged, are the exact kernel's. Keys of 128 values, heads' values in blocks of 32. */
#ifndef BW24_CU_OP_DELTA_FAST_CUH
#define BW24_CU_OP_DELTA_FAST_CUH

#include "fold.cuh"
#include "tf32.cuh"

namespace bw {

enum { CHUNK = 32, CHUNK_KEY = 128, CHUNK_THREADS = 256, CHUNK_K_PITCH = CHUNK_KEY + 4, CHUNK_PITCH = CHUNK + 4, CHUNK_S_PITCH = CHUNK + 8 };

/* of one head and chunk; rows past the sequence's have decay 1, beta 0 and zeros */
struct alignas(16) ChunkFacts { float t[CHUNK][CHUNK], p[CHUNK][CHUNK], decay[CHUNK], rest[CHUNK], beta[CHUNK]; };

/* rows of the one sequence that go by chunks: those before its log */
__device__ __forceinline__ int chunk_rows(const FoldSeq &s) { return s.mid ? s.n - s.n_log : 0; }
__device__ __forceinline__ int chunk_key(const DeltaArgs &a, int head) { return a.grouped ? head / (a.heads / a.kheads) : head % a.kheads; }

/* products of 32 rows of x with columns n0 .. n0 + 7 of a matrix that b(k, n) gives, K of them; two tiles of 16 rows; ROUND: x is not rounded yet */
template <int K, bool ROUND, int PITCH, class B> __device__ __forceinline__ void chunk_mma(float (&c)[2][4], const float (*x)[PITCH], B b) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < K; k += 8) {
        const float b0 = b(k + t, g), b1 = b(k + t + 4, g);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float a[4] = {x[m * 16 + g][k + t], x[m * 16 + g + 8][k + t], x[m * 16 + g][k + t + 4], x[m * 16 + g + 8][k + t + 4]};
#pragma unroll
            for (int i = 0; i < 4 && ROUND; i++) a[i] = tf32(a[i]);
            mma_tf32(c[m], a, b0, b1);
        }
    }
}
__device__ __forceinline__ int chunk_row(int m, int i) { return m * 16 + ((threadIdx.x & 31) >> 2) + 8 * (i >> 1); }
__device__ __forceinline__ int chunk_col(int i) { return 2 * (threadIdx.x & 3) + (i & 1); }

/* ---- what a chunk is without the state: grid (heads, chunks or more) */
struct alignas(16) FactsShared { float k[CHUNK][CHUNK_K_PITCH], q[CHUNK][CHUNK_K_PITCH], a[CHUNK][CHUNK_PITCH], c[CHUNK], beta[CHUNK]; };

__device__ __forceinline__ void facts_load(const DeltaArgs &a, FactsShared &sh, const int *order, int head, int rows, ChunkFacts &to) {
    const int i = threadIdx.x, r = i >> 3, key = chunk_key(a, head);
    const bool have = r < rows;
    const int row = have ? order[r] : 0;
    const float *k = a.k + (size_t)row * a.ldk + key * CHUNK_KEY, *q = a.q + (size_t)row * a.ldq + key * CHUNK_KEY;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int col = ((i & 7) + 8 * j) * 4;
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 x = have ? __ldcg((const float4 *)(k + col)) : zero, y = have ? __ldcg((const float4 *)(q + col)) : zero;
        *(float4 *)&sh.k[r][col] = make_float4(tf32(x.x), tf32(x.y), tf32(x.z), tf32(x.w));
        *(float4 *)&sh.q[r][col] = make_float4(tf32(y.x), tf32(y.y), tf32(y.z), tf32(y.w));
    }
    if (i >= 32) return;
    const bool mine = i < rows;
    const int at = mine ? order[i] : 0;
    float c = mine ? fmaxf(log2f(__ldcg(a.g + (size_t)at * a.ldg + head)), -120.0f) : 0.0f;
    const float beta = mine ? __ldcg(a.b + (size_t)at * a.ldb + head) : 0.0f;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const float before = __shfl_up_sync(~0u, c, o);
        if (i >= o) c += before;
    }
    sh.c[i] = c;
    sh.beta[i] = to.beta[i] = beta;
    to.decay[i] = exp2f(c);
    to.rest[i] = exp2f(__shfl_sync(~0u, c, 31) - c);
}

/* (1 + a)^-1, a below the diagonal: a column a lane */
__device__ __forceinline__ void facts_solve(const FactsShared &sh, ChunkFacts &to) {
    const int lane = threadIdx.x & 31;
    float t[CHUNK];
#pragma unroll
    for (int r = 0; r < CHUNK; r++) {
        float s[4] = {r == lane ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < r; i += 4) {
            const float4 a = *(const float4 *)&sh.a[r][i];
            s[0] = fmaf(-a.x, t[i], s[0]);
            if (i + 1 < r) s[1] = fmaf(-a.y, t[i + 1 < CHUNK ? i + 1 : i], s[1]);
            if (i + 2 < r) s[2] = fmaf(-a.z, t[i + 2 < CHUNK ? i + 2 : i], s[2]);
            if (i + 3 < r) s[3] = fmaf(-a.w, t[i + 3 < CHUNK ? i + 3 : i], s[3]);
        }
        t[r] = (s[0] + s[1]) + (s[2] + s[3]);
        to.t[r][lane] = tf32(t[r]);
    }
}

static __global__ void __launch_bounds__(CHUNK_THREADS) k_delta_facts(DeltaArgs a, FoldRows f, ChunkFacts *facts) {
    __shared__ FactsShared sh;
    pdl_trigger();
    pdl_wait();
    const FoldSeq &s = f.seqs[0];
    const int head = blockIdx.x, chunk = blockIdx.y, rows = min((int)CHUNK, chunk_rows(s) - chunk * CHUNK), warp = threadIdx.x >> 5, n0 = (warp & 3) * 8;
    if (rows <= 0) return;
    ChunkFacts &to = facts[(size_t)chunk * a.heads + head];
    facts_load(a, sh, f.order + s.first + chunk * CHUNK, head, rows, to);
    __syncthreads();
    float c[2][4] = {};
    chunk_mma<CHUNK_KEY, false>(c, warp < 4 ? sh.k : sh.q, [&](int k, int n) { return sh.k[n0 + n][k]; });
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = chunk_row(m, i), col = n0 + chunk_col(i);
            const float v = exp2f(fminf(sh.c[r] - sh.c[col], 0.0f)) * c[m][i];
            if (warp < 4) sh.a[r][col] = col < r ? sh.beta[r] * v : 0.0f;
            else to.p[r][col] = col <= r ? tf32(v) : 0.0f;
        }
    __syncthreads();
    if (!warp) facts_solve(sh, to);
}

/* ---- chunks in order: grid (heads times blocks of 32 columns) */
struct alignas(16) ChunkInput {
    float k[CHUNK][CHUNK_K_PITCH], q[CHUNK][CHUNK_K_PITCH], v[CHUNK][CHUNK_PITCH], t[CHUNK][CHUNK_PITCH], p[CHUNK][CHUNK_PITCH];
    float decay[3 * CHUNK]; /* decay, rest and beta of ChunkFacts */
    int row[CHUNK];         /* of the step */
};
struct alignas(16) ChunkShared {
    ChunkInput in[2];
    float s[CHUNK_KEY][CHUNK_S_PITCH];                              /* the state, rounded */
    float r[CHUNK][CHUNK_S_PITCH], d[CHUNK][CHUNK_S_PITCH], rest[CHUNK][CHUNK_S_PITCH]; /* b (V - ...), D, D times what is left of it at the end */
};

struct ChunkWalk {
    const DeltaArgs &a;
    ChunkShared &sh;
    const ChunkFacts *facts;
    int head, block, rows; /* rows: of the sequence */
    /* asks for chunk c, whose row `threadIdx.x / 8` is `row` */
    __device__ __forceinline__ void load(int c, int row) const {
        const int i = threadIdx.x, r = i >> 3, at = (i & 7) * 4, key = chunk_key(a, head);
        ChunkInput &to = sh.in[c & 1];
        const ChunkFacts &from = facts[(size_t)c * a.heads + head];
        if (c * CHUNK + r < rows) {
            const float *k = a.k + (size_t)row * a.ldk + key * CHUNK_KEY + at, *q = a.q + (size_t)row * a.ldq + key * CHUNK_KEY + at;
#pragma unroll
            for (int j = 0; j < 4; j++) { cp16(&to.k[r][at + 32 * j], k + 32 * j); cp16(&to.q[r][at + 32 * j], q + 32 * j); }
            cp16(&to.v[r][at], a.v + (size_t)row * a.ldv + head * a.dv + block * 32 + at);
        } else {
            const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int j = 0; j < 4; j++) *(float4 *)&to.k[r][at + 32 * j] = *(float4 *)&to.q[r][at + 32 * j] = zero;
            *(float4 *)&to.v[r][at] = zero;
        }
        if (!at) to.row[r] = row;
        cp16(&to.t[r][at], &from.t[r][at]);
        cp16(&to.p[r][at], &from.p[r][at]);
        if (i < 3 * CHUNK / 4) cp16(&to.decay[4 * i], &from.decay[4 * i]); /* the three lie one behind the other */
    }
    /* b (V - 2^c (K S)) to shared memory by the first four warps, 2^c (Q S) stays in the others */
    __device__ __forceinline__ void against_state(const ChunkInput &in, float (&y)[2][4]) const {
        const int warp = threadIdx.x >> 5, n0 = (warp & 3) * 8;
#pragma unroll
        for (int i = 0; i < 8; i++) (&y[0][0])[i] = 0.0f;
        chunk_mma<CHUNK_KEY, true>(y, warp < 4 ? in.k : in.q, [&](int k, int n) { return sh.s[k][n0 + n]; });
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = chunk_row(m, i), col = n0 + chunk_col(i);
                y[m][i] *= in.decay[r];
                if (warp < 4) sh.r[r][col] = tf32(in.decay[2 * CHUNK + r] * (in.v[r][col] - y[m][i]));
            }
    }
    __device__ __forceinline__ void solve(const ChunkInput &in) const {
        const int n0 = (threadIdx.x >> 5) * 8;
        float d[2][4] = {};
        chunk_mma<CHUNK, false>(d, in.t, [&](int k, int n) { return sh.r[k][n0 + n]; });
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = chunk_row(m, i), col = n0 + chunk_col(i);
                sh.d[r][col] = tf32(d[m][i]);
                sh.rest[r][col] = tf32(d[m][i] * in.decay[CHUNK + r]);
            }
    }
    /* by the last four warps */
    __device__ __forceinline__ void output(const ChunkInput &in, int c, float (&y)[2][4]) const {
        const int n0 = ((threadIdx.x >> 5) & 3) * 8;
        chunk_mma<CHUNK, false>(y, in.p, [&](int k, int n) { return sh.d[k][n0 + n]; });
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int r = chunk_row(m, i);
                if (c * CHUNK + r >= rows) continue;
                *(float2 *)(a.y + (size_t)in.row[r] * (a.heads * a.dv) + head * a.dv + block * 32 + n0 + chunk_col(i)) = make_float2(y[m][i], y[m][i + 1]);
                if (not_finite(y[m][i]) || not_finite(y[m][i + 1])) report_fault(a.fault, a.op);
            }
    }
    /* a warp has 16 rows of the state, s[tile of 8 columns] */
    __device__ __forceinline__ void state(const ChunkInput &in, float (&s)[4][4]) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, i0 = (threadIdx.x >> 5) * 16;
        const float decay = in.decay[CHUNK - 1];
#pragma unroll
        for (int i = 0; i < 16; i++) (&s[0][0])[i] *= decay;
#pragma unroll
        for (int k = 0; k < CHUNK; k += 8) {
            const float *x0 = &in.k[k + t][i0 + g], *x1 = &in.k[k + t + 4][i0 + g], x[4] = {tf32(x0[0]), tf32(x0[8]), tf32(x1[0]), tf32(x1[8])};
#pragma unroll
            for (int n = 0; n < 4; n++) mma_tf32(s[n], x, sh.rest[k + t][n * 8 + g], sh.rest[k + t + 4][n * 8 + g]);
        }
        show(s);
    }
    __device__ __forceinline__ void show(const float (&s)[4][4]) const {
        const int i0 = (threadIdx.x >> 5) * 16;
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) *(float2 *)&sh.s[i0 + chunk_row(0, i)][n * 8 + chunk_col(i)] = make_float2(tf32(s[n][i]), tf32(s[n][i + 1]));
    }
    __device__ __forceinline__ float2 *place(const float *version, int n, int i) const {
        const int row = (threadIdx.x >> 5) * 16 + chunk_row(0, i);
        return (float2 *)(version + delta_place(a, head, row, block * 32 + n * 8 + chunk_col(i)));
    }
};

static __global__ void __launch_bounds__(CHUNK_THREADS, 1) k_delta_chunks(DeltaArgs a, FoldRows f, const ChunkFacts *facts) {
    extern __shared__ __align__(16) uint8_t raw[];
    pdl_trigger();
    pdl_wait();
    const FoldSeq &q = f.seqs[0];
    const int blocks = a.dv / 32, rows = chunk_rows(q), chunks = (rows + CHUNK - 1) / CHUNK, r = threadIdx.x >> 3, warp = threadIdx.x >> 5;
    if (!chunks) return;
    const ChunkWalk w = {a, *(ChunkShared *)raw, facts, (int)blockIdx.x / blocks, (int)blockIdx.x % blocks, rows};
    const int *order = f.order + q.first;
    const auto row_of = [&](int c) { return c * CHUNK + r < rows ? order[c * CHUNK + r] : 0; };
    w.load(0, row_of(0));
    asm volatile("cp.async.commit_group;");
    int next = row_of(1);
    float s[4][4], y[2][4];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) { const float2 v = __ldcg(w.place(q.live, n, i)); s[n][i] = v.x; s[n][i + 1] = v.y; }
    w.show(s);
    for (int c = 0; c < chunks; c++) {
        const ChunkInput &in = w.sh.in[c & 1];
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads(); /* the chunk has come, the one before is done with, the state is there */
        if (c + 1 < chunks) w.load(c + 1, next);
        asm volatile("cp.async.commit_group;");
        next = row_of(c + 2);
        w.against_state(in, y);
        __syncthreads();
        if (warp < 4) w.solve(in);
        __syncthreads();
        if (warp >= 4) w.output(in, c, y);
        w.state(in, s);
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) *w.place(q.mid, n, i) = make_float2(s[n][i], s[n][i + 1]);
}

} // namespace bw
#endif
