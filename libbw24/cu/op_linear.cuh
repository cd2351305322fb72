/* LINEAR over quantised weights (docs/numerics.md §2) for 1..8 rows. Owns the mapping of work to threads; the layout of weights is
 * unit.cuh's, the quantised activations are made by op_rows.cuh and by the epilogues here.
 *
 * int8 dots run on the tensor cores with the accumulator started at MAGIC, the bits of 1.5 * 2^23: the result read as a float is
 * MAGIC_F + I exactly (|I| < 2^22), so s * float(I) = fma(s, c, -s * MAGIC_F) with one rounding and no conversion instruction. */
#ifndef BW24_CU_OP_LINEAR_CUH
#define BW24_CU_OP_LINEAR_CUH

#include "device.cuh"
#include "unit.cuh"

namespace bw {

constexpr int MAGIC = 0x4b400000;
constexpr float MAGIC_F = 12582912.0f;

/* one matrix of a launch: y = (units . x) * scale + bias, then + res where there is one */
struct LinearPart {
    const uint8_t *w;  /* units [2 * blocks][segs] */
    const float *bias; /* [n] or NULL */
    const float *res;  /* [rows][ldres] or NULL; may be y */
    float *y;          /* [rows][n] */
    float scale;
    int n, blocks;     /* outputs; tile blocks of 32 outputs */
};

/* the NORM before a LINEAR of one row: every block normalises and quantises the row for itself, the first also writes it to y */
struct LinearNorm { const float *x, *w; float *y; float eps; int l2, op; };

/* parts are matrices over one input; a GLU has gate and up as parts 0 and 1 and writes act(gate) * up to part 0's y */
struct LinearArgs {
    LinearPart part[3];
    Acts x;
    Acts xo;           /* GLU: the quantised result; xo.q NULL where nobody reads it */
    int n_parts, blocks; /* tile blocks of all parts (GLU: of one) */
    int rows, segs, gelu;
    LinearNorm norm;   /* x NULL: the input is x; else one row */
    int *fault, op;    /* op that a fault of the GLU's quantisation names */
};

/* ---- mbarriers and bulk copies ---- */
__device__ __forceinline__ uint32_t smem_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint64_t *b, int count) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(smem_at(b)), "r"(count)); }
__device__ __forceinline__ void bar_arrive(uint64_t *b) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t,[%0];}" ::"r"(smem_at(b)) : "memory"); }
__device__ __forceinline__ void bar_expect(uint64_t *b, int bytes) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t,[%0],%1;}" ::"r"(smem_at(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t *b, int parity) {
    asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra L; D: }" ::"r"(smem_at(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(void *dst, const void *src, int bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(smem_at(dst)), "l"(src), "r"(bytes), "r"(smem_at(b)) : "memory");
}

__device__ __forceinline__ void mma32(int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma16(int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}

/* the group value t from accumulators c (S2, S2M: c and ch), scale a and am = -a * MAGIC_F, second scale or minimum b, sum of codes A (S2M: A0),
 * S2M: minima m0 and m1, A1 */
template <Form F> __device__ __forceinline__ float group_value(int c, int ch, float a, float b, float am, float a0, float m0 = 0.0f, float m1 = 0.0f, float a1 = 0.0f) {
    float t = fmaf(a, __int_as_float(c), am);
    if (F == FORM_S1M) t = fmaf(b, a0, t);
    if (F == FORM_S2 || F == FORM_S2M) t = fmaf(b, __int_as_float(ch) - MAGIC_F, t);
    if (F == FORM_S2M) t = fmaf(m1, a1, fmaf(m0, a0, t));
    return t;
}

/* Activations of one segment for R row slots. The 8 columns of an mma are R rows x G groups: column gid is row gid / G, group
 * gid % G of a set; a register holds zero where the column belongs to another group, so one accumulator gathers G groups.
 * Staged: read from the block's copy in shared memory; else loaded from device memory into registers once per segment. */
template <int R, bool STAGED, Form F> struct ActSource {
    static constexpr int G = 8 / R;
    static constexpr bool SUMS = F == FORM_S1M || F == FORM_S2M;
    uint2 rq[STAGED ? 1 : R];
    float rd[STAGED ? 1 : R][2], ra[STAGED ? 1 : R][2], rl[STAGED ? 1 : R][2];
    const uint8_t *q; /* staged: codes [R][cols + 32] at this lane's row and word; delta and sum [groups][R] */
    const float *d, *a, *l;
    __device__ __forceinline__ void from_shared(const uint8_t *codes, const float *delta, const float *sum, const float *low, int cols, int seg, int lane) {
        int gid = lane >> 2, tig = lane & 3;
        q = codes + (gid / G) * (cols + 32) + (seg * 8 + gid % G) * 32 + tig * 8;
        int at = (seg * 8 + 2 * tig % G) * R + 2 * tig / G;
        d = delta + at; a = sum + at; l = low + at;
    }
    __device__ __forceinline__ void from_device(const Acts &x, int seg, int lane) {
        int gid = lane >> 2, tig = lane & 3, groups = x.cols >> 5;
#pragma unroll
        for (int s = 0; s < R; s++) {
            int g = seg * 8 + s * G + gid % G;
            rq[s] = g < groups ? __ldcg((const uint2 *)(x.q + (size_t)(gid / G) * x.cols + g * 32 + tig * 8)) : make_uint2(0, 0);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int col = 2 * tig + e, gc = seg * 8 + s * G + col % G, ok = gc < groups;
                size_t at = (size_t)gc * x.ld + col / G;
                rd[s][e] = ok ? __ldcg(x.delta + at) : 0.0f;
                ra[s][e] = SUMS && ok ? __ldcg(x.sum + at) : 0.0f;
                rl[s][e] = F == FORM_S2M && ok ? __ldcg(x.low + at) : 0.0f;
            }
        }
    }
    /* columns 2 tig and 2 tig + 1 are two rows of one group (R = 8) or two groups of one row */
    static constexpr int STEP = R == 8 ? 1 : R;
    __device__ __forceinline__ uint2 code(int s) const { return STAGED ? *(const uint2 *)(q + s * G * 32) : rq[s]; }
    __device__ __forceinline__ float delta(int s, int e) const { return STAGED ? d[s * G * R + e * STEP] : rd[s][e]; }
    __device__ __forceinline__ float sum(int s, int e) const { return !SUMS ? 0.0f : STAGED ? a[s * G * R + e * STEP] : ra[s][e]; }
    __device__ __forceinline__ float low(int s, int e) const { return F != FORM_S2M ? 0.0f : STAGED ? l[s * G * R + e * STEP] : rl[s][e]; }
};

/* p of one unit in shared memory: R = 8: columns 2 tig and 2 tig + 1; else one value of row slot 2 tig / G, equal in the lanes that share it */
template <class U, int R, bool STAGED> __device__ __forceinline__ void unit_fold(const uint8_t *w, const ActSource<R, STAGED, U::FORM> &x, int lane, float (*p)[2]) {
    constexpr int G = 8 / R;
    constexpr Form F = U::FORM;
    const int gid = lane >> 2, tig = lane & 3;
    typename U::Scale sc[2];
    sc[0] = U::template load_scale<true>(w + 2 * U::HALF, gid);
    sc[1] = U::template load_scale<true>(w + 2 * U::HALF, gid + 8);
    p[0][0] = p[0][1] = p[1][0] = p[1][1] = 0.0f;
    typename U::Pack pk0, pk1;
#pragma unroll
    for (int s = 0; s < R; s++) {
        int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, ch[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
        uint2 q = x.code(s);
#pragma unroll
        for (int k = 0; k < G; k++) {
            const int j = s * G + k, e = (j & 3) % U::GP;
            if (!e) {
                pk0 = U::template load_pack<true>(w + (j >> 2) * U::HALF, (j & 3) / U::GP, 0, lane);
                pk1 = U::template load_pack<true>(w + (j >> 2) * U::HALF, (j & 3) / U::GP, 1, lane);
            }
            uint32_t l0, h0, l1, h1;
            U::unpack(pk0, e, l0, h0);
            U::unpack(pk1, e, l1, h1);
            bool mine = G == 1 || gid % G == k;
            uint32_t b0 = mine ? q.x : 0, b1 = mine ? q.y : 0;
            if (F == FORM_S2 || F == FORM_S2M) { mma16(c, l0, l1, b0); mma16(ch, h0, h1, b1); }
            else mma32(c, l0, l1, h0, h1, b0, b1);
        }
        float d0 = x.delta(s, 0), d1 = x.delta(s, 1), a0 = x.sum(s, 0), a1 = x.sum(s, 1);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float a[2], b[2], m0[2], m1[2];
            const int w = R == 8 ? s >> 1 : R == 4 ? s : R == 2 ? 2 * s + (tig & 1) : tig;
            U::pair(sc[r], w, a, b);
            unit_mins<U>(sc[r], w, m0, m1);
            if (R == 8) { a[0] = a[1] = a[s & 1]; b[0] = b[1] = b[s & 1]; m0[0] = m0[1] = m0[s & 1]; m1[0] = m1[1] = m1[s & 1]; }
            float t0, t1;
            if (F == FORM_S2M) {
                float z0 = x.low(s, 0), z1 = x.low(s, 1);
                t0 = group_value<F>(c[2 * r], ch[2 * r], a[0], b[0], a[0] * -MAGIC_F, z0, m0[0], m1[0], a0 - z0);
                t1 = group_value<F>(c[2 * r + 1], ch[2 * r + 1], a[1], b[1], a[1] * -MAGIC_F, z1, m0[1], m1[1], a1 - z1);
            } else {
                t0 = group_value<F>(c[2 * r], ch[2 * r], a[0], b[0], a[0] * -MAGIC_F, a0);
                t1 = group_value<F>(c[2 * r + 1], ch[2 * r + 1], a[1], b[1], a[1] * -MAGIC_F, a1);
            }
            if constexpr (R == 8) {
                p[r][0] = fmaf(d0, t0, p[r][0]);
                p[r][1] = fmaf(d1, t1, p[r][1]);
            } else {
#pragma unroll
                for (int st = 0; st < G / 2; st++) {
                    float v = fmaf(d1, t1, fmaf(d0, t0, p[r][0]));
                    p[r][0] = G > 2 ? __shfl_sync(~0u, v, (lane & ~(G / 2 - 1)) | st) : v;
                }
            }
        }
    }
}

/* p's of a unit: [R][PITCH] floats, rows of a column adjacent; the pitch keeps the four columns of a store in separate banks */
template <int R> struct PartLayout { static constexpr int PITCH = R > 2 ? 20 : 16, UNIT = R * PITCH; };
template <int R> __device__ __forceinline__ void unit_store(float *ps, int lane, float (*p)[2]) {
    constexpr int P = PartLayout<R>::PITCH;
    int gid = lane >> 2, tig = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float *at = ps + gid + 8 * r;
        if (R == 8) { at[2 * tig * P] = p[r][0]; at[(2 * tig + 1) * P] = p[r][1]; }
        else if (R == 4) at[tig * P] = p[r][0];
        else if (R == 2) { if (!(tig & 1)) at[(tig >> 1) * P] = p[r][0]; }
        else if (!tig) *at = p[r][0];
    }
}

/* row 0 of the staged activations from a NORM; sq: scratch of one float a segment. op_rows.cuh has the same for many rows. */
__device__ __forceinline__ void stage_norm(const LinearArgs &a, uint8_t *codes, float *delta, float *sum, float *low, float *sq) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, n = a.x.cols;
    constexpr int HOLD = 2; /* segments a warp keeps in registers (32 at most, 17 warps) */
    float w[8], v[HOLD][8]; /* weights of the first: they come while the block waits */
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = a.norm.w ? __ldg(a.norm.w + min(warp * 256 + j * 32 + lane, n - 1)) : 1.0f;
    pdl_wait();
#pragma unroll
    for (int i = 0; i < HOLD; i++) {
        float p = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int c = (warp + i * warps) * 256 + j * 32 + lane;
            float x = __ldcg(a.norm.x + min(c, n - 1));
            v[i][j] = c < n ? x : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) p = fmaf(v[i][j], v[i][j], p);
        p = warp_tree(p);
        if (!lane && warp + i * warps < a.segs) sq[warp + i * warps] = p;
    }
    __syncthreads();
    float total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < a.segs; s++) total = total + sq[s];
    const float r = 1.0f / sqrtf((a.norm.l2 ? total : total / (float)n) + a.norm.eps);
#pragma unroll
    for (int i = 0; i < HOLD; i++) {
        int seg = warp + i * warps, half = 0, all = 0;
        if (seg >= a.segs) continue;
        float d, rec;
        if (i && a.norm.w)
#pragma unroll
            for (int j = 0; j < 8; j++) w[j] = __ldg(a.norm.w + min(seg * 256 + j * 32 + lane, n - 1));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int c = seg * 256 + j * 32 + lane;
            v[i][j] = a.norm.w ? (v[i][j] * r) * w[j] : v[i][j] * r;
            if (!blockIdx.x && c < n) a.norm.y[c] = v[i][j];
        }
        quant_scales<8>(v[i], lane, &d, &rec, a.fault, a.norm.op);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int h, s, q = quant_code(v[i][j], j, rec, lane, &h, &s);
            if (lane == j) { half = h; all = s; }
            codes[(seg * 8 + j) * 32 + code_place(lane)] = (uint8_t)(int8_t)q;
        }
        if (lane < 8 && (seg * 8 + lane) * 32 < n) { delta[seg * 8 + lane] = d; sum[seg * 8 + lane] = (float)all; low[seg * 8 + lane] = (float)half; }
    }
    for (int g = n / 32 + threadIdx.x; g < a.segs * 8; g += blockDim.x) delta[g] = sum[g] = low[g] = 0.0f;
}

/* R rows of activations into shared memory */
template <int R, Form F> __device__ __forceinline__ void stage_acts(const LinearArgs &a, uint8_t *codes, float *delta, float *sum, float *low) {
    const int cols = a.x.cols, chunks = cols / 16, pitch = a.segs * 256 + 32;
    for (int i = threadIdx.x; i < R * chunks; i += blockDim.x)
        *(uint4 *)(codes + i / chunks * pitch + i % chunks * 16) = __ldcg((const uint4 *)(a.x.q + (size_t)(i / chunks) * cols) + i % chunks);
    for (int i = threadIdx.x; i < a.segs * 8 * R; i += blockDim.x) {
        int gr = i / R, ok = gr < cols / 32;
        size_t at = (size_t)gr * a.x.ld + i % R;
        delta[i] = ok ? __ldcg(a.x.delta + at) : 0.0f;
        if (F == FORM_S1M || F == FORM_S2M) sum[i] = ok ? __ldcg(a.x.sum + at) : 0.0f;
        if (F == FORM_S2M) low[i] = ok ? __ldcg(a.x.low + at) : 0.0f;
    }
}

struct SmallShape {
    int warps; /* consumer warps = segments in flight */
    int depth; /* units of a warp's ring */
};

/* most threads of a block; unstaged activations need more registers a thread */
template <class U, int R, bool STAGED> __host__ __device__ constexpr int small_threads() { return R == 1 ? 544 : STAGED ? 640 : U::FORM == FORM_S2M ? 384 : 512; }

/* the part that tile block tb belongs to; tb becomes its number within the part */
__device__ __forceinline__ int part_of(const LinearArgs &a, int &tb) {
    int p = 0;
    while (p + 1 < a.n_parts && tb >= a.part[p].blocks) tb -= a.part[p++].blocks;
    return p;
}

/* what a reducer does with the finished result of (row slot col, output n) */
__device__ __forceinline__ void linear_store(const LinearPart &p, int col, int n, float v) {
    v = v * p.scale;
    if (p.bias) v = v + __ldg(p.bias + n);
    size_t at = (size_t)col * p.n + n;
    if (p.res) v = __ldcg(p.res + at) + v;
    p.y[at] = v;
}
__device__ __forceinline__ float linear_scaled(const LinearPart &p, int n, float v) {
    v = v * p.scale;
    return p.bias && n < p.n ? v + __ldg(p.bias + n) : v;
}

/* R row slots (rows <= R), T tiles of 16 outputs a tile block: 2 of one part; GLU: 2 of gate, 2 of up. Persistent over tile blocks.
 * Threads: consumer warp w takes segments w, w + W, ... of the T tiles through its own ring of bulk copies, which is filled before the
 * dependency wait and never drains between tile blocks; reducer warps add the p's, handed over in shared memory, segments ascending.
 * Traffic: every weight byte once; activations once a block (STAGED) or once a segment and tile block. */
template <class U, int R, bool GLU, bool STAGED> __global__ void __launch_bounds__(small_threads<U, R, STAGED>(), R == 1 ? 2 : 1) k_linear_small(LinearArgs a, SmallShape g) {
    constexpr int T = GLU ? 4 : 2, RW = R == 8 ? 4 : R == 4 ? 2 : 1, ITEMS = T / 2 * R / RW, PU = PartLayout<R>::UNIT, BUFS = 2;
    extern __shared__ __align__(128) uint8_t sm[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, W = g.warps, D = g.depth, S = a.segs, rounds = (S + W - 1) / W;
    uint8_t *ring = sm;
    float *parts = (float *)(ring + (size_t)W * D * U::UNIT); /* [BUFS][T][W][PU] */
    uint64_t *bars = (uint64_t *)(parts + BUFS * T * W * PU);  /* full[W][D], handed[BUFS], freed[BUFS] */
    uint64_t *handed = bars + W * D, *freed = handed + BUFS;
    uint8_t *codes = (uint8_t *)(freed + BUFS) + ((W * D & 1) ? 8 : 0);
    float *delta = (float *)(codes + R * (S * 256 + 32)), *sum = delta + S * 8 * R, *low = sum + S * 8 * R;
    int ptb = blockIdx.x, pseg = warp, pt = 0; /* the next unit to request */
    auto request = [&](int slot) {
        if (ptb >= a.blocks) return;
        int tb = ptb, p = GLU ? pt >> 1 : part_of(a, tb);
        const uint8_t *unit = a.part[p].w + ((size_t)(tb * 2 + (pt & 1)) * S + pseg) * U::UNIT;
        uint64_t *b = bars + warp * D + slot;
        bar_expect(b, U::UNIT);
        bulk_copy(ring + (size_t)(warp * D + slot) * U::UNIT, unit, U::UNIT, b);
        if (++pt == T) { pt = 0; pseg += W; if (pseg >= S) { pseg = warp; ptb += gridDim.x; } }
    };
    if (warp < W && warp < S && !lane) {
        for (int i = 0; i < D; i++) bar_init(bars + warp * D + i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < D; i++) request(i);
    }
    if (threadIdx.x < BUFS) { bar_init(handed + threadIdx.x, W); bar_init(freed + threadIdx.x, RW); }
    pdl_trigger();
    const bool norm = R == 1 && STAGED && a.norm.x;
    if (norm) stage_norm(a, codes, delta, sum, low, parts);
    else pdl_wait();
    if (STAGED && !norm) stage_acts<R, U::FORM>(a, codes, delta, sum, low);
    __syncthreads();
    int buf = 0, phase = 0;
    if (warp < W) {
        int slot = 0, ring_phase = 0;
        for (int tb = blockIdx.x; tb < a.blocks; tb += gridDim.x)
            for (int seg = warp, r = 0; r < rounds; r++, seg += W) {
                bar_wait(freed + buf, phase ^ 1); /* also without a segment: a warp may not run a round ahead */
                if (seg < S) {
                    ActSource<R, STAGED, U::FORM> x;
                    if (STAGED) x.from_shared(codes, delta, sum, low, S * 256, seg, lane);
                    else x.from_device(a.x, seg, lane);
#pragma unroll 1
                    for (int t = 0; t < T; t++) {
                        float p[2][2];
                        bar_wait(bars + warp * D + slot, ring_phase);
                        unit_fold<U, R, STAGED>(ring + (size_t)(warp * D + slot) * U::UNIT, x, lane, p);
                        __syncwarp();
                        if (!lane) request(slot);
                        if (++slot == D) { slot = 0; ring_phase ^= 1; }
                        unit_store<R>(parts + ((size_t)(buf * T + t) * W + warp) * PU, lane, p);
                    }
                }
                __syncwarp();
                if (!lane) bar_arrive(handed + buf);
                if (++buf == BUFS) { buf = 0; phase ^= 1; }
            }
        return;
    }
    const int rw = warp - W;
    for (int tb0 = blockIdx.x; tb0 < a.blocks; tb0 += gridDim.x) {
        float y[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) y[i] = 0.0f;
        for (int r = 0; r < rounds; r++) {
            int count = min(W, S - r * W);
            bar_wait(handed + buf, phase);
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                int pair = i * RW / R, col = (rw + i * RW) % R;
                const float *ps = parts + (size_t)(buf * T + pair * 2 + (lane >> 4)) * W * PU + col * PartLayout<R>::PITCH + (lane & 15);
#pragma unroll 8
                for (int w = 0; w < count; w++) y[i] = y[i] + ps[w * PU];
            }
            __syncwarp();
            if (!lane) bar_arrive(freed + buf);
            if (++buf == BUFS) { buf = 0; phase ^= 1; }
        }
        constexpr int OUT = GLU ? ITEMS / 2 : ITEMS;
        int tb = tb0, part = GLU ? 0 : part_of(a, tb), n = tb * 32 + lane;
        const LinearPart &p = a.part[part];
#pragma unroll
        for (int i = 0; i < OUT; i++) {
            int col = (rw + i * RW) % R;
            if (col >= a.rows) continue;
            if (!GLU) { if (n < p.n) linear_store(p, col, n, y[i]); continue; }
            float gate = linear_scaled(a.part[0], n, y[i]), v = (a.gelu ? bw_gelu(gate) : bw_silu(gate)) * linear_scaled(a.part[1], n, y[i + OUT]);
            if (n < p.n) p.y[(size_t)col * p.n + n] = v;
            if (a.xo.q) quant_group(a.xo, col, n >> 5, lane, v, a.fault, a.op);
        }
    }
}

template <class U> inline size_t small_shared(int R, int T, bool staged, const SmallShape &g, int segs) {
    size_t unit = R > 2 ? R * 20 : R * 16, acts = staged ? (size_t)R * (segs * 256 + 32) + (size_t)segs * 8 * R * 12 : 0;
    return (size_t)g.warps * g.depth * (U::UNIT + 8) + (size_t)2 * T * g.warps * unit * 4 + 48 + acts;
}

} // namespace bw
#endif
