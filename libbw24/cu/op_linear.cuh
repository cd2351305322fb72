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

enum { LINEAR_PARTS = 4 };
/* parts are matrices over one input; a GLU has gate and up as parts 0 and 1 and writes act(gate) * up to part 0's y */
struct LinearArgs {
    LinearPart part[LINEAR_PARTS];
    Acts x;
    Acts xo;           /* GLU: the quantised result; xo.q NULL where nobody reads it */
    int n_parts, blocks; /* tile blocks of all parts (GLU: of one) */
    int whole, items;    /* the first `whole` items are tile blocks, the others halves of the remaining blocks (one tile of 16 outputs) */
    int rows, segs, gelu;
    LinearNorm norm;   /* x NULL: the input is x; else one row */
    int *fault, op;    /* op that a fault of the GLU's quantisation names */
};


/* ---- mbarriers and bulk copies ----
 * A thread says how many bytes will come (bar_expect), copies are issued, by it or others, and bar_issued closes the order. Before compute capability
 * 9.0 a bulk copy is as many asynchronous copies of 16 bytes, each counted by the barrier itself, and the arrival stands in bar_issued: after all of
 * them. */
__device__ __forceinline__ uint32_t smem_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint64_t *b, int count) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(smem_at(b)), "r"(count)); }
__device__ __forceinline__ void bar_arrive(uint64_t *b) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t,[%0];}" ::"r"(smem_at(b)) : "memory"); }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bar_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void bar_expect(uint64_t *b, int bytes) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t,[%0],%1;}" ::"r"(smem_at(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_issued(uint64_t *) {}
__device__ __forceinline__ void bar_issued_by_warp(uint64_t *) {}
__device__ __forceinline__ void bar_wait(uint64_t *b, int parity) {
    asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra L; D: }" ::"r"(smem_at(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(void *dst, const void *src, int bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(smem_at(dst)), "l"(src), "r"(bytes), "r"(smem_at(b)) : "memory");
}
#else
__device__ __forceinline__ void bar_fence() { __threadfence_block(); }
__device__ __forceinline__ void bar_expect(uint64_t *, int) {}
__device__ __forceinline__ void bar_issued(uint64_t *b) { bar_arrive(b); }
__device__ __forceinline__ void bar_issued_by_warp(uint64_t *b) {
    __syncwarp();
    if (!(threadIdx.x & 31)) bar_arrive(b);
}
__device__ __forceinline__ void bar_wait(uint64_t *b, int parity) {
    asm volatile("{.reg .pred p; L: mbarrier.test_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra L; D: }" ::"r"(smem_at(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(void *dst, const void *src, int bytes, uint64_t *b) {
    for (int i = 0; i < bytes; i += 16) cp16((uint8_t *)dst + i, (const uint8_t *)src + i);
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(smem_at(b)) : "memory");
}
#endif

template <bool UNSIGNED = false> __device__ __forceinline__ void mma32(int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if (UNSIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma16(int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
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
 * gid % G of a set of G; a register holds zero where the column belongs to another group, so one accumulator gathers G groups.
 * b: the B registers of the segment's 8 groups. Scales and sums of columns 2 tig and 2 tig + 1, by set: read from the block's copy
 * [segment][set][8 columns] (STAGED), else loaded from device memory into registers with the codes. */
template <int R, bool STAGED, Form F> struct ActSource {
    static constexpr int G = 8 / R;
    static constexpr bool SUMS = F == FORM_S1M || F == FORM_S2M, LOWS = F == FORM_S2M;
    uint2 b[8];
    float2 rd[STAGED ? 1 : R], ra[STAGED || !SUMS ? 1 : R], rl[STAGED || !LOWS ? 1 : R];
    const float *d, *a, *l;
    __device__ __forceinline__ void put_codes(int s, uint2 q, int gid) {
#pragma unroll
        for (int k = 0; k < G; k++) {
            bool mine = G == 1 || gid % G == k;
            uint2 &to = b[s * G + k];
            to = make_uint2(mine ? q.x : 0, mine ? q.y : 0);
            if (G > 1) asm volatile("" : "+r"(to.x), "+r"(to.y)); /* kept, not selected again for every unit */
        }
    }
    __device__ __forceinline__ void from_shared(const uint8_t *codes, const float *delta, const float *sum, const float *low, int cols, int seg, int lane) {
        int gid = lane >> 2, tig = lane & 3, at = seg * 8 * R + 2 * tig;
        const uint8_t *q = codes + (gid / G) * (cols + 32) + (seg * 8 + gid % G) * 32 + tig * 8;
#pragma unroll
        for (int s = 0; s < R; s++) put_codes(s, *(const uint2 *)(q + s * G * 32), gid);
        d = delta + at; a = sum + at; l = low + at;
    }
    __device__ __forceinline__ static float2 two(const float *p, const Acts &x, int seg, int s, int tig) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int col = 2 * tig + e, g = seg * 8 + s * G + col % G;
            v[e] = g < x.cols >> 5 ? __ldcg(p + (size_t)g * x.ld + col / G) : 0.0f;
        }
        return make_float2(v[0], v[1]);
    }
    __device__ __forceinline__ void from_device(const Acts &x, int seg, int lane) {
        int gid = lane >> 2, tig = lane & 3, groups = x.cols >> 5;
#pragma unroll
        for (int s = 0; s < R; s++) {
            int g = seg * 8 + s * G + gid % G;
            put_codes(s, g < groups ? __ldcg((const uint2 *)(x.q + (size_t)(gid / G) * x.cols + g * 32 + tig * 8)) : make_uint2(0, 0), gid);
            rd[STAGED ? 0 : s] = two(x.delta, x, seg, s, tig);
            if (SUMS) ra[STAGED ? 0 : s] = two(x.sum, x, seg, s, tig);
            if (LOWS) rl[STAGED ? 0 : s] = two(x.low, x, seg, s, tig);
        }
    }
    __device__ __forceinline__ float2 delta(int s) const { return STAGED ? *(const float2 *)(d + s * 8) : rd[STAGED ? 0 : s]; }
    __device__ __forceinline__ float2 sum(int s) const { return !SUMS ? make_float2(0, 0) : STAGED ? *(const float2 *)(a + s * 8) : ra[STAGED ? 0 : s]; }
    __device__ __forceinline__ float2 low(int s) const { return !LOWS ? make_float2(0, 0) : STAGED ? *(const float2 *)(l + s * 8) : rl[STAGED ? 0 : s]; }
};

/* scales of the groups of an mma's columns 2 tig and 2 tig + 1 for one row of the unit */
struct RowScales { float a[2], b[2], m0[2], m1[2]; };

/* p of one unit in shared memory: R = 8: columns 2 tig and 2 tig + 1; R = 4: row slot tig; R = 2: row slot tig / 2 in odd lanes; R = 1: in lanes of tig 3 */
/* read() is called by the whole warp once the unit is not read again */
template <class U, int R, bool STAGED, class Read>
__device__ __forceinline__ void unit_fold(const uint8_t *w, const ActSource<R, STAGED, U::FORM> &x, int lane, float (*p)[2], Read read) {
    constexpr int G = 8 / R;
    constexpr Form F = U::FORM;
    const int gid = lane >> 2, tig = lane & 3;
    const uint8_t *scales = w + 2 * U::HALF;
    p[0][0] = p[0][1] = p[1][0] = p[1][1] = 0.0f;
    constexpr bool EARLY = R == 1 && U::UNIT < 3072; /* all of the unit fits in registers */
    constexpr bool APART = U::APART && R < 8; /* with 8 row slots its accumulators do not */
    typename U::Pack pk[2][2 * U::PACKS];
    typename U::Pair raw[2];
    RowScales sc[2];
    if (EARLY) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < 2 * U::PACKS; i++) pk[r][i] = U::template load_pack<true>(w + i / U::PACKS * U::HALF, i % U::PACKS, r, lane);
            raw[r] = U::fetch(scales, gid + 8 * r, tig);
        }
        read();
    }
#pragma unroll
    for (int s = 0; s < R; s++) {
        int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, ch[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
        int less[4] = {0, 0, 0, 0}, lessh[4] = {0, 0, 0, 0}; /* APART: what is taken off c and ch */
#pragma unroll
        for (int k = 0; k < G; k++) {
            const int j = s * G + k, e = (j & 3) % U::GP;
            if (!e && !EARLY)
#pragma unroll
                for (int r = 0; r < 2; r++) pk[r][j / U::GP] = U::template load_pack<true>(w + (j >> 2) * U::HALF, (j & 3) / U::GP, r, lane);
            if constexpr (APART) {
                const TableApart t0 = U::apart(pk[0][j / U::GP], e), t1 = U::apart(pk[1][j / U::GP], e);
                if (F == FORM_S1) {
                    mma32(c, t0.plus[0], t1.plus[0], t0.plus[1], t1.plus[1], x.b[j].x, x.b[j].y);
                    mma32(less, t0.minus[0], t1.minus[0], t0.minus[1], t1.minus[1], x.b[j].x, x.b[j].y);
                } else {
                    mma16(c, t0.plus[0], t1.plus[0], x.b[j].x);
                    mma16(ch, t0.plus[1], t1.plus[1], x.b[j].y);
                    mma16(less, t0.minus[0], t1.minus[0], x.b[j].x);
                    mma16(lessh, t0.minus[1], t1.minus[1], x.b[j].y);
                }
            } else {
                uint32_t l0, h0, l1, h1;
                U::unpack(pk[0][j / U::GP], e, l0, h0);
                U::unpack(pk[1][j / U::GP], e, l1, h1);
                if (F == FORM_S2 || F == FORM_S2M) { mma16(c, l0, l1, x.b[j].x); mma16(ch, h0, h1, x.b[j].y); }
                else mma32<U::UNSIGNED>(c, l0, l1, h0, h1, x.b[j].x, x.b[j].y);
            }
        }
        if (APART)
#pragma unroll
            for (int i = 0; i < 4; i++) { c[i] -= less[i]; ch[i] -= lessh[i]; }
        const float2 d = x.delta(s), a = x.sum(s), z = x.low(s);
        if (R < 8 || !(s & 1))
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int at = R == 8 ? s >> 1 : R == 4 ? s : R == 2 ? 2 * s + (tig & 1) : tig;
                if (!EARLY) raw[r] = U::fetch(scales, gid + 8 * r, at);
                U::pair(raw[r], at, sc[r].a, sc[r].b);
                unit_mins<U>(raw[r], sc[r].m0, sc[r].m1);
            }
        if (!EARLY && s == R - 1) read();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int e0 = R == 8 ? s & 1 : 0, e1 = R == 8 ? s & 1 : 1;
            const RowScales &q = sc[r];
            float t0 = group_value<F>(c[2 * r], ch[2 * r], q.a[e0], q.b[e0], q.a[e0] * -MAGIC_F, F == FORM_S2M ? z.x : a.x, q.m0[e0], q.m1[e0], a.x - z.x);
            float t1 = group_value<F>(c[2 * r + 1], ch[2 * r + 1], q.a[e1], q.b[e1], q.a[e1] * -MAGIC_F, F == FORM_S2M ? z.y : a.y, q.m0[e1], q.m1[e1], a.y - z.y);
            if constexpr (R == 8) {
                p[r][0] = fmaf(d.x, t0, p[r][0]);
                p[r][1] = fmaf(d.y, t1, p[r][1]);
            } else {
#pragma unroll
                for (int st = 0; st < G / 2; st++) {
                    p[r][0] = fmaf(d.y, t1, fmaf(d.x, t0, p[r][0]));
                    if (G > 2 && (st < G / 2 - 1 || s < R - 1)) p[r][0] = __shfl_sync(~0u, p[r][0], st, G / 2);
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
        else if (R == 2) { if (tig & 1) at[(tig >> 1) * P] = p[r][0]; }
        else if (tig == 3) *at = p[r][0];
    }
}

/* row 0 of the staged activations from a NORM by the first warps; sq: scratch of one float a segment */
__device__ __forceinline__ void stage_norm(const LinearArgs &a, int warps, uint8_t *codes, float *delta, float *sum, float *low, float *sq) {
    const int lane = threadIdx.x & 31, n = a.x.cols;
    norm_row({a.norm.x, a.norm.w, n, a.norm.l2, a.norm.eps}, warps, sq, [&](int seg, int c, const float (&v)[8], int) {
        Quant8 q = quant_eight(v, a.fault, a.norm.op);
        int g = seg * 8 + (lane >> 2);
        put_eight(codes + g * 32, lane, q);
        if (!(lane & 3)) { delta[g] = q.d; sum[g] = (float)q.sum; low[g] = (float)q.low; }
        if (blockIdx.x || c >= n) return;
        *(float4 *)(a.norm.y + c) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(a.norm.y + c + 4) = make_float4(v[4], v[5], v[6], v[7]);
    });
}

/* R rows of activations into shared memory */
template <int R, Form F> __device__ __forceinline__ void stage_acts(const LinearArgs &a, uint8_t *codes, float *delta, float *sum, float *low) {
    constexpr int G = 8 / R;
    const int cols = a.x.cols, chunks = cols / 16, pitch = a.segs * 256 + 32;
    for (int r = 0; r < R; r++)
        for (int i = threadIdx.x; i < chunks; i += blockDim.x) cp16(codes + r * pitch + i * 16, a.x.q + (size_t)r * cols + i * 16);
    asm volatile("cp.async.commit_group;");
#pragma unroll 2
    for (int i = threadIdx.x; i < a.segs * 8 * R; i += blockDim.x) {
        int col = i & 7, g = (i / (8 * R)) * 8 + (i >> 3) % R * G + col % G, ok = g < cols / 32;
        size_t at = (size_t)g * a.x.ld + col / G;
        float d = ok ? __ldcg(a.x.delta + at) : 0.0f, m = (F == FORM_S1M || F == FORM_S2M) && ok ? __ldcg(a.x.sum + at) : 0.0f;
        float z = F == FORM_S2M && ok ? __ldcg(a.x.low + at) : 0.0f;
        delta[i] = d;
        if (F == FORM_S1M || F == FORM_S2M) sum[i] = m;
        if (F == FORM_S2M) low[i] = z;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

struct SmallShape {
    int warps; /* consumer warps = segments in flight */
    int depth; /* units of a warp's ring, at most 32 */
};

/* most threads of a block; unstaged activations need more registers a thread */
template <class U, int R, bool STAGED> __host__ __device__ constexpr int small_threads() { return R < 8 ? 576 : STAGED ? 640 : U::FORM == FORM_S2M ? 384 : 512; }

/* the part that tile block tb belongs to; tb becomes its number within the part */
__device__ __forceinline__ int part_of(const LinearArgs &a, int &tb) {
    int p = 0;
    while (p + 1 < a.n_parts && tb >= a.part[p].blocks) tb -= a.part[p++].blocks;
    return p;
}

/* what a reducer does with the finished result of (row slot col, output n); res: what it is added to, where there is such */
__device__ __forceinline__ void linear_store(const LinearPart &p, int col, int n, float v, float res) {
    v = v * p.scale;
    if (p.bias) v = v + __ldg(p.bias + n);
    if (p.res) v = res + v;
    p.y[(size_t)col * p.n + n] = v;
}
__device__ __forceinline__ float linear_res(const LinearPart &p, int col, int n) { return p.res ? __ldcg(p.res + (size_t)col * p.n + n) : 0.0f; }
__device__ __forceinline__ float linear_scaled(const LinearPart &p, int n, float v) {
    v = v * p.scale;
    return p.bias && n < p.n ? v + __ldg(p.bias + n) : v;
}

/* The units that consumer warp `warp` asks for, in the order in which it folds them: items of the block, segments warp, warp + W, ..., tiles.
 * One lane calls next(). */
template <class U, bool GLU> struct UnitQueue {
    const LinearArgs &a;
    const uint8_t *src;
    int item, seg, t, tiles, warp, W; /* t of `tiles` units of this item and segment */
    __device__ __forceinline__ size_t row_stride() const { return (size_t)a.segs * U::UNIT; } /* from a tile to the next */
    __device__ __forceinline__ void locate() {
        if (item >= a.items) return;
        int half = item - a.whole, tb = half < 0 ? item : a.whole + (half >> 1), first = half < 0 ? 0 : half & 1;
        tiles = GLU ? 4 : half < 0 ? 2 : 1;
        int p = GLU ? 0 : part_of(a, tb);
        src = a.part[p].w + ((size_t)(tb * 2 + first) * a.segs + seg) * U::UNIT;
    }
    __device__ __forceinline__ void start() { item = blockIdx.x; seg = warp; t = 0; locate(); }
    __device__ __forceinline__ void next(uint8_t *slot, uint64_t *bar) {
        if (item >= a.items) return;
        bar_expect(bar, U::UNIT);
        bulk_copy(slot, src, U::UNIT, bar);
        bar_issued(bar);
        if (++t < tiles) {
            src += row_stride();
            if (GLU && t == 2) src += (a.part[1].w - a.part[0].w) - 2 * row_stride();
            return;
        }
        t = 0;
        seg += W;
        if (seg < a.segs) {
            src += W * U::UNIT - (tiles > 1 ? row_stride() : 0);
            if (GLU) src -= a.part[1].w - a.part[0].w;
            return;
        }
        seg = warp;
        item += gridDim.x;
        locate();
    }
};

/* R row slots (rows <= R), T tiles of 16 outputs a tile block: 2 of one part; GLU: 2 of gate, 2 of up. Persistent over items.
 * Threads: consumer warp w takes segments w, w + W, ... of the tiles through its own ring of bulk copies, which is filled before the
 * dependency wait and never drains between items; reducer warps add the p's, handed over in shared memory, segments ascending.
 * Traffic: every weight byte once; activations once a block (STAGED) or once a segment and item. */
template <class U, int R, bool GLU, bool STAGED> __global__ void __launch_bounds__(small_threads<U, R, STAGED>(), 1) k_linear_small(LinearArgs a, SmallShape g) {
    constexpr int T = GLU ? 4 : 2, RW = R == 8 ? 4 : R == 4 ? 2 : 1, ITEMS = T / 2 * R / RW, PU = PartLayout<R>::UNIT, BUFS = 2;
    extern __shared__ __align__(128) uint8_t sm[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, W = g.warps, D = g.depth, S = a.segs, rounds = (S + W - 1) / W;
    float *parts = (float *)(sm + (size_t)W * D * U::UNIT);   /* [BUFS][T][W][PU] */
    uint64_t *bars = (uint64_t *)(parts + BUFS * T * W * PU); /* full[W][D], handed[BUFS], freed[BUFS] */
    uint64_t *handed = bars + W * D, *freed = handed + BUFS;
    uint8_t *codes = (uint8_t *)(freed + BUFS) + ((W * D & 1) ? 8 : 0);
    float *delta = (float *)(codes + R * (S * 256 + 32)), *sum = delta + S * 8 * R, *low = sum + S * 8 * R;
    uint8_t *ring = sm + (size_t)warp * D * U::UNIT; /* of a consumer warp */
    uint64_t *full = bars + warp * D;
    UnitQueue<U, GLU> queue = {a, NULL, 0, 0, 0, 0, warp, W};
    if (warp < W) {
        if (lane < D) bar_init(full + lane, 1);
        bar_fence();
        __syncwarp();
        if (!lane) {
            queue.start();
            for (int i = 0; i < D; i++) queue.next(ring + (size_t)i * U::UNIT, full + i);
        }
    } else if (threadIdx.x - W * 32 < BUFS) {
        int i = threadIdx.x - W * 32;
        bar_init(handed + i, W);
        bar_init(freed + i, RW);
    }
    pdl_trigger();
    const bool norm = R == 1 && STAGED && a.norm.x;
    if (norm) stage_norm(a, W, codes, delta, sum, low, parts);
    else pdl_wait();
    if (STAGED && !norm) stage_acts<R, U::FORM>(a, codes, delta, sum, low);
    __syncthreads();
    int buf = 0, phase = 0;
    if (warp < W) {
        int slot = 0, ring_phase = 0;
        for (int item = blockIdx.x; item < a.items; item += gridDim.x) {
            const int tiles = GLU ? 4 : item < a.whole ? 2 : 1;
            for (int seg = warp, r = 0; r < rounds; r++, seg += W) {
                bar_wait(freed + buf, phase ^ 1); /* also without a segment: a warp may not run a round ahead */
                if (seg < S) {
                    ActSource<R, STAGED, U::FORM> x;
                    if (STAGED) x.from_shared(codes, delta, sum, low, S * 256, seg, lane);
                    else x.from_device(a.x, seg, lane);
                    float *to = parts + ((size_t)buf * T * W + warp) * PU;
#pragma unroll 1
                    for (int t = 0; t < tiles; t++) {
                        float p[2][2];
                        bar_wait(full + slot, ring_phase);
                        unit_fold<U, R, STAGED>(ring + slot * U::UNIT, x, lane, p, [&]() {
                            __syncwarp();
                            if (!lane) queue.next(ring + slot * U::UNIT, full + slot);
                        });
                        if (++slot == D) { slot = 0; ring_phase ^= 1; }
                        unit_store<R>(to, lane, p);
                        to += W * PU;
                    }
                }
                __syncwarp();
                if (!lane) bar_arrive(handed + buf);
                if (++buf == BUFS) { buf = 0; phase ^= 1; }
            }
        }
        return;
    }
    const int rw = warp - W;
    for (int item = blockIdx.x; item < a.items; item += gridDim.x) {
        constexpr int OUT = GLU ? ITEMS / 2 : ITEMS;
        const int half = item - a.whole; /* of half an item the lanes of the second tile hold nothing */
        int tb = half < 0 ? item : a.whole + (half >> 1), part = GLU ? 0 : part_of(a, tb), n = tb * 32 + lane + (half < 0 ? 0 : (half & 1) * 16);
        const LinearPart &p = a.part[part];
        if (half >= 0 && lane > 15) n = p.n;
        float y[ITEMS], res[OUT]; /* res: read while the consumers work */
#pragma unroll
        for (int i = 0; i < ITEMS; i++) y[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < OUT; i++) res[i] = !GLU && (rw + i * RW) % R < a.rows && n < p.n ? linear_res(p, (rw + i * RW) % R, n) : 0.0f;
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
#pragma unroll
        for (int i = 0; i < OUT; i++) {
            int col = (rw + i * RW) % R;
            if (col >= a.rows) continue;
            if (!GLU) { if (n < p.n) linear_store(p, col, n, y[i], res[i]); continue; }
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
