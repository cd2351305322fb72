/* LINEAR over quantised weights (docs/numerics.md §2) for 2..8 rows; operands of op_linear_one.cuh's one row too. Owns the mapping of work to threads; the layout of weights is
 * unit.cuh's, the quantised activations are made by op_rows.cuh and by the epilogues here.
 *
 * int8 dots run on the tensor cores with the accumulator started at MAGIC, the bits of 1.5 * 2^23: the result read as a float is
 * MAGIC_F + I exactly (|I| < 2^20), so i = delta * float(I) = fma(c, delta, -delta * MAGIC_F), exact as well (delta has four significant bits), without a
 * conversion instruction. -delta * MAGIC_F is of a row and its group, not of an output. */
#ifndef BW24_CU_OP_LINEAR_CUH
#define BW24_CU_OP_LINEAR_CUH

#include "device.cuh"
#include "unit.cuh"

namespace bw {

constexpr int MAGIC = 0x4b400000;
constexpr float MAGIC_F = 12582912.0f;

/* Scale d of a row's group and -d * MAGIC_F; of(c): the exact i of an accumulator c that began at MAGIC */
struct GroupScale {
    float d, dm;
    __device__ __forceinline__ explicit GroupScale(float delta) : d(delta), dm(delta * -MAGIC_F) {}
    __device__ __forceinline__ GroupScale(float delta, float times_magic) : d(delta), dm(times_magic) {}
    __device__ __forceinline__ float of(int c) const { return fmaf(__int_as_float(c), d, dm); }
};
/* scale i of those in shared memory, which lie in twos: d, d, -d * MAGIC_F, -d * MAGIC_F */
__device__ __forceinline__ void put_scale(float *to, int i, float d) {
    to += (i >> 1) * 4 + (i & 1);
    to[0] = d;
    to[2] = d * -MAGIC_F;
}
/* the same of two scales that lie there, by the thread that asked for them or behind a barrier */
__device__ __forceinline__ void finish_scales(float *two) {
    const float2 d = *(const float2 *)two;
    *(float2 *)(two + 2) = make_float2(d.x * -MAGIC_F, d.y * -MAGIC_F);
}

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
    int whole, items;    /* the first `whole` items are tile blocks, the others, at most one a block of threads, halves of the remaining ones (a tile of 16 outputs) */
    int rows, segs, gelu;
    LinearNorm norm;   /* x NULL: the input is x; else one row */
    int *fault, op;    /* op that a fault of the GLU's quantisation names */
};


/* ---- mbarriers and bulk copies ----
 * A thread says how many bytes will come (bar_expect), copies are issued, by it or others, and bar_issued closes the order. Before compute capability
 * 9.0 a bulk copy is as many asynchronous copies of 16 bytes, each counted by the barrier itself, and the arrival stands in bar_issued: after all of
 * them. bulk_copy_once: of weights, which a step reads once: they leave the L2 before activations, keys, arguments and code do. */
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
/* whether bar_wait would go on; what does not use the answer may run before it is there */
__device__ __forceinline__ bool bar_test(uint64_t *b, int parity) {
    int done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p,[%1],%2; selp.b32 %0,1,0,p;}" : "=r"(done) : "r"(smem_at(b)), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void bulk_copy(void *dst, const void *src, int bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(smem_at(dst)), "l"(src), "r"(bytes), "r"(smem_at(b)) : "memory");
}
__device__ __forceinline__ void bulk_copy_once(void *dst, const void *src, int bytes, uint64_t *b) {
    uint64_t first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(smem_at(dst)), "l"(src), "r"(bytes),
                 "r"(smem_at(b)), "l"(first) : "memory");
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
__device__ __forceinline__ void bulk_copy_once(void *dst, const void *src, int bytes, uint64_t *b) { bulk_copy(dst, src, bytes, b); }
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

/* the same with all accumulators at MAGIC before */
template <bool UNSIGNED = false> __device__ __forceinline__ void mma32_first(int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if (UNSIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(MAGIC));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(MAGIC));
}
__device__ __forceinline__ void mma16_first(int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(b0), "r"(MAGIC));
}
template <bool UNSIGNED = false> __device__ __forceinline__ void mma32_to(bool first, int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if (first) mma32_first<UNSIGNED>(c, a0, a1, a2, a3, b0, b1);
    else mma32<UNSIGNED>(c, a0, a1, a2, a3, b0, b1);
}
__device__ __forceinline__ void mma16_to(bool first, int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    if (first) mma16_first(c, a0, a1, b0);
    else mma16(c, a0, a1, b0);
}

/* p with a group folded in: accumulators c (S2, S2M: c and ch), scale a, second scale or minimum b, alpha (S2M: alpha0), S2M: minima m0 and m1, alpha1 */
template <Form F>
__device__ __forceinline__ float fold_group(float p, int c, int ch, const GroupScale &d, float a, float b, float a0, float m0 = 0.0f, float m1 = 0.0f, float a1 = 0.0f) {
    p = fmaf(a, d.of(c), p);
    if (F == FORM_S1M) p = fmaf(b, a0, p);
    if (F == FORM_S2 || F == FORM_S2M) p = fmaf(b, d.of(ch), p);
    if (F == FORM_S2M) p = fmaf(m1, a1, fmaf(m0, a0, p));
    return p;
}

/* Activations of one segment for R row slots. The 8 columns of an mma are R rows x G groups: column gid is row gid / G, group
 * gid % G of a set of G; a register holds zero where the column belongs to another group, so one accumulator gathers G groups. HALVES: column gid is
 * row gid / 2, half gid % 2 of one group.
 * b: the B registers of the segment's 8 groups. Scales and sums of columns 2 tig and 2 tig + 1, by set, lie in the block's copy [segment][8 groups][R]; HELD: they
 * come to registers with the codes. */
template <int R, Form F> struct ActSource {
    static constexpr int G = 8 / R;
    static constexpr bool SUMS = F == FORM_S1M || F == FORM_S2M, LOWS = F == FORM_S2M;
    static constexpr bool HALVES = R == 4 && (F == FORM_S2 || F == FORM_S2M); /* columns: 4 rows x halves of a group of two scales */
    static constexpr bool HELD = R == 4 && !LOWS;
    uint2 b[8];
    float2 rd[HELD ? R : 1], ra[HELD && SUMS ? R : 1];
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
    __device__ __forceinline__ static float2 of_set(const float *p, int s) {
        return R == 8 ? *(const float2 *)(p + s * 8) : make_float2(p[s * 8], p[s * 8 + 4]);
    }
    __device__ __forceinline__ void from_shared(const uint8_t *codes, const float *delta, const float *sum, const float *low, int cols, int seg, int lane, int) {
        int gid = lane >> 2, tig = lane & 3, at = seg * 8 * R + (R == 8 ? 2 : 1) * tig;
        d = delta + at; a = sum + at; l = low + at;
        if (HELD)
#pragma unroll
            for (int s = 0; s < R; s++) {
                rd[HELD ? s : 0] = of_set(d, s);
                if (SUMS) ra[HELD && SUMS ? s : 0] = of_set(a, s);
            }
        if (HALVES) {
            const uint8_t *q = codes + (gid / G) * (cols + 32) + seg * 256 + tig * 8 + (gid & 1) * 4;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const uint32_t w = *(const uint32_t *)(q + j * 32);
                b[j] = gid & 1 ? make_uint2(0, w) : make_uint2(w, 0);
                asm volatile("" : "+r"(b[j].x), "+r"(b[j].y));
            }
            return;
        }
        const uint8_t *q = codes + (gid / G) * (cols + 32) + (seg * 8 + gid % G) * 32 + tig * 8;
#pragma unroll
        for (int s = 0; s < R; s++) put_codes(s, *(const uint2 *)(q + s * G * 32), gid);
    }
    __device__ __forceinline__ float2 delta(int s) const { return HELD ? rd[HELD ? s : 0] : of_set(d, s); }
    __device__ __forceinline__ float2 sum(int s) const { return !SUMS ? make_float2(0, 0) : HELD ? ra[HELD && SUMS ? s : 0] : of_set(a, s); }
    __device__ __forceinline__ float2 low(int s) const { return !LOWS ? make_float2(0, 0) : of_set(l, s); }
};

/* activations as a unit's products take them; op_linear_half.cuh has others */
template <class U, int R> struct SmallActs { typedef ActSource<R, U::FORM> type; };

/* scales of the groups of an mma's columns 2 tig and 2 tig + 1 for one row of the unit */
struct RowScales { float a[2], b[2], m0[2], m1[2]; };

/* the products of values below zero and of those from zero up, in one accumulator */
template <bool TWO> __device__ __forceinline__ void apart_dots(const TableApart &t0, const TableApart &t1, uint2 b, bool first, int *c, int *ch) {
    if (TWO) {
        mma16_to(first, c, t0.plus[0], t1.plus[0], b.x);
        mma16_to(first, ch, t0.plus[1], t1.plus[1], b.y);
        mma16(c, t0.minus[0], t1.minus[0], b.x);
        mma16(ch, t0.minus[1], t1.minus[1], b.y);
    } else {
        mma32_to(first, c, t0.plus[0], t1.plus[0], t0.plus[1], t1.plus[1], b.x, b.y);
        mma32(c, t0.minus[0], t1.minus[0], t0.minus[1], t1.minus[1], b.x, b.y);
    }
}

/* the integers of a group of a unit: c of its first 16 columns and ch of the others where these have scales of their own, else c of all (HALVES: by column).
 * first: c and ch begin */
template <class U, bool HALVES>
__device__ __forceinline__ void group_dots(const typename U::Pack &p0, const typename U::Pack &p1, int e, uint32_t zero, uint2 b, bool first, int *c, int *ch) {
    constexpr bool TWO = (U::FORM == FORM_S2 || U::FORM == FORM_S2M) && !HALVES;
    if constexpr (U::APART) {
        apart_dots<TWO>(unit_signs<U>(p0, e, zero), unit_signs<U>(p1, e, zero), b, first, c, ch);
    } else {
        uint32_t l0, h0, l1, h1;
        U::unpack(p0, e, l0, h0);
        U::unpack(p1, e, l1, h1);
        if (TWO) { mma16_to(first, c, l0, l1, b.x); mma16_to(first, ch, h0, h1, b.y); }
        else mma32_to<U::UNSIGNED>(first, c, l0, l1, h0, h1, b.x, b.y);
    }
}
/* Scales of a unit are made by the quad of lanes that reads them, each lane those of one word of two rows, and pass through shared memory while the
 * products run. The pitch keeps lanes that store, and those that read, in separate banks. */
enum { BOX_PITCH = 18, BOX = 4 * BOX_PITCH }; /* float4 of a warp: [4 words][16 rows], a[2] and b[2] */
template <class U, int R> __host__ __device__ constexpr bool boxed() { return U::FORM != FORM_S2M; }

/* first: the packs that a unit begins with, asked for before the box is written */
template <class U> __device__ __forceinline__ void box_scales(const uint8_t *w, int lane, float4 *box, typename U::Pack *first) {
    const int gid = lane >> 2, tig = lane & 3;
    typename U::Pair raw[2];
#pragma unroll
    for (int r = 0; r < 2; r++) raw[r] = U::fetch(w + 2 * U::HALF, gid + 8 * r, tig);
#pragma unroll
    for (int r = 0; r < 2; r++) first[r] = U::template load_pack<true>(w, 0, r, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float a[2], b[2];
        U::pair(raw[r], tig, a, b);
        box[tig * BOX_PITCH + gid + 8 * r] = make_float4(a[0], a[1], b[0], b[1]);
    }
    __syncwarp();
}
/* scales of word `at` of a row, from the box where there is one */
template <class U, int R> __device__ __forceinline__ RowScales row_scales(const uint8_t *scales, const float4 *box, int row, int at) {
    if (boxed<U, R>()) {
        const float4 v = box[at * BOX_PITCH + row];
        return {{v.x, v.y}, {v.z, v.w}, {0, 0}, {0, 0}};
    }
    RowScales s;
    const typename U::Pair raw = U::fetch(scales, row, at);
    U::pair(raw, at, s.a, s.b);
    unit_mins<U>(raw, s.m0, s.m1);
    return s;
}

/* p of one unit in shared memory: R = 8: columns 2 tig and 2 tig + 1; R = 4: row slot tig */
/* read() is called by the whole warp once the unit is not read again */
template <class U, int R, class Read>
__device__ __forceinline__ void unit_fold(const uint8_t *w, const ActSource<R, U::FORM> &x, int lane, uint32_t zero, float4 *box, float (*p)[2], Read read) {
    constexpr int G = 8 / R;
    constexpr Form F = U::FORM;
    constexpr bool HALVES = ActSource<R, F>::HALVES;
    const int gid = lane >> 2, tig = lane & 3;
    const uint8_t *scales = w + 2 * U::HALF;
    p[0][0] = p[0][1] = p[1][0] = p[1][1] = 0.0f;
    typename U::Pack pk[2][2 * U::PACKS];
    RowScales sc[2];
    typename U::Pack first[2];
    if constexpr (boxed<U, R>()) box_scales<U>(w, lane, box, first);
#pragma unroll
    for (int s = 0; s < R; s++) {
        int c[HALVES ? G : 1][4], ch[4];
#pragma unroll
        for (int k = 0; k < G; k++) {
            const int j = s * G + k, e = (j & 3) % U::GP;
            if (!e)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    pk[r][j / U::GP] = boxed<U, R>() && !j ? first[r] : U::template load_pack<true>(w + (j >> 2) * U::HALF, (j & 3) / U::GP, r, lane);
            group_dots<U, HALVES>(pk[0][j / U::GP], pk[1][j / U::GP], e, zero, x.b[j], HALVES || !k, c[HALVES ? k : 0], ch);
        }
        const float2 d = x.delta(s), a = x.sum(s), z = x.low(s);
        const GroupScale d0(d.x), d1(d.y);
        if (R < 8 || !(s & 1))
#pragma unroll
            for (int r = 0; r < 2; r++) sc[r] = row_scales<U, R>(scales, box, gid + 8 * r, R == 8 ? s >> 1 : s);
        if (s == R - 1) read();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int e0 = R == 8 ? s & 1 : 0, e1 = R == 8 ? s & 1 : 1, h = HALVES ? G - 1 : 0; /* HALVES: c[k] are the halves of group k */
            const RowScales &q = sc[r];
            const int *c0 = c[0] + 2 * r, *c1 = c[h] + 2 * r + !HALVES, *h0 = HALVES ? c0 + 1 : ch + 2 * r, *h1 = HALVES ? c1 + 1 : ch + 2 * r + 1;
            const int to = R == 8; /* R = 4: both groups are of one row slot */
            p[r][0] = fold_group<F>(p[r][0], *c0, *h0, d0, q.a[e0], q.b[e0], F == FORM_S2M ? z.x : a.x, q.m0[e0], q.m1[e0], a.x - z.x);
            p[r][to] = fold_group<F>(p[r][to], *c1, *h1, d1, q.a[e1], q.b[e1], F == FORM_S2M ? z.y : a.y, q.m0[e1], q.m1[e1], a.y - z.y);
        }
    }
    if (boxed<U, R>()) __syncwarp(); /* the box may be filled again */
}

/* p's of a unit: [R][PITCH] floats, rows of a column adjacent; the pitch keeps the four columns of a store in separate banks */
template <int R> struct PartLayout { static constexpr int PITCH = 20, UNIT = R * PITCH; };
template <int R> __device__ __forceinline__ void unit_store(float *ps, int lane, float (*p)[2]) {
    constexpr int P = PartLayout<R>::PITCH;
    int gid = lane >> 2, tig = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float *at = ps + gid + 8 * r;
        if (R == 8) { at[2 * tig * P] = p[r][0]; at[(2 * tig + 1) * P] = p[r][1]; }
        else at[tig * P] = p[r][0];
    }
}

/* asks for a segment of R rows of activations, by one warp: codes, then for each value that the form reads the 8 groups' R of it. sum and low follow delta
 * in shared memory. Rows past the last are read as they are: nobody reads what becomes of them. */
template <int R, Form F> __device__ __forceinline__ void stage_acts(const LinearArgs &a, uint8_t *codes, float *delta, int seg, int lane) {
    enum { FLOATS = F == FORM_S2M ? 3 : F == FORM_S1M ? 2 : 1, CHUNKS = 2 * R };
    const int cols = a.x.cols, pitch = a.segs * 256 + 32;
#pragma unroll
    for (int i = lane; i < 16 * R; i += 32) {
        const int c = seg * 256 + (i & 15) * 16;
        if (c < cols) cp16(codes + (i >> 4) * pitch + c, a.x.q + (size_t)(i >> 4) * cols + c);
    }
#pragma unroll
    for (int i = lane; i < FLOATS * CHUNKS; i += 32) {
        const int what = i / CHUNKS, k = i % CHUNKS, g = seg * 8 + k / (R / 4);
        const float *from = what == 0 ? a.x.delta : what == 1 ? a.x.sum : a.x.low;
        float *to = delta + what * a.segs * 8 * R + seg * 8 * R + k * 4;
        if (g < cols >> 5) cp16(to, from + (size_t)g * a.x.ld + k % (R / 4) * 4);
        else *(float4 *)to = make_float4(0, 0, 0, 0);
    }
}

enum { SMALL_WARPS = 16, SMALL_DEPTH = 32, SMALL_BARS = (SMALL_WARPS * SMALL_DEPTH + 4) * 8 + 96 }; /* most consumer warps, units of a ring; bytes of barriers */
/* Folds of a block: (item, segment), segments first, and warp w takes folds w, w + warps, ... A chunk is as many segments of an item as are handed over
 * together; each warp has a fold of every chunk. */
struct SmallShape {
    int warps;         /* consumer warps */
    int depth;         /* units of a warp's ring, at most 32 */
    int chunk, chunks; /* segments of a chunk, at least `warps` also in the last one; chunks of an item */
    bool mixed;        /* a warp folds segments that another has brought */
    int each, more;    /* whole items of a block; the first `more` blocks have one more */
    int early;         /* units that the warps in turn ask for before the dependency wait: the input queues behind them, which takes microseconds */
};

/* Most threads of a block. The 99 KB of compute capability 12.0 hold 12 warps that fold at most: fewer threads may have more registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1200
#define BW_FEWER(threads, others) threads
#else
#define BW_FEWER(threads, others) others
#endif
template <int R> __host__ __device__ constexpr int small_threads() { return BW_FEWER(512, R < 8 ? 576 : 640); }

/* reducer warps */
template <int R> __host__ __device__ constexpr int small_reducers() { return R == 8 ? 4 : 2; }

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

/* x / n, rounded down, for 0 <= x < 2^20: the quotient's distance from the integer above it is more than the error */
__device__ __forceinline__ int small_quotient(int x, int n) { return (int)__fdividef((float)x + 0.5f, (float)n); }

/* Asks for unit k of a queue, by the whole warp: lane k % 32 does, which finds its address `src` 32 units at a time, so that a request is short. The first
 * 32 addresses are found before. */
template <class U, class Q> __device__ __forceinline__ void ask_next(Q &q, uint8_t *slot, uint64_t *bar, int lane) {
    if (!(q.k & 31) && q.k) q.src = q.source(q.k + lane);
    if (lane == (q.k & 31) && q.src) {
        bar_expect(bar, U::UNIT);
        bulk_copy_once(slot, q.src, U::UNIT, bar);
        bar_issued(bar);
    }
    q.k++;
}

/* The units that a consumer warp asks for, in the order of its folds and their tiles */
template <class U, bool GLU> struct UnitQueue {
    enum { TILES = GLU ? 4 : 2 };
    const LinearArgs &a;
    const SmallShape &g;
    const uint8_t *src; /* of the lane's next unit, NULL: none */
    int k, warp;
    /* where unit i of the warp lies: whole items come first, then at most one half */
    __device__ __forceinline__ const uint8_t *source(int i) const {
        const int b = blockIdx.x, whole = g.each + (b < g.more), n = whole * a.segs - warp;
        const int full = n > 0 ? (small_quotient(n - 1, g.warps) + 1) * TILES : 0;
        const bool half = i >= full;
        const int fold = warp + (half ? full / TILES + i - full : i / TILES) * g.warps, item = small_quotient(fold, a.segs), t = half ? b & 1 : i % TILES;
        if (half && (item > whole || b >= a.items - a.whole)) return NULL;
        int tb = half ? a.whole + (b >> 1) : b + item * gridDim.x, p = GLU ? t >> 1 : part_of(a, tb);
        return a.part[p].w + ((size_t)(tb * 2 + (t & 1)) * a.segs + fold - item * a.segs) * U::UNIT;
    }
    __device__ __forceinline__ void next(uint8_t *slot, uint64_t *bar, int lane) { ask_next<U>(*this, slot, bar, lane); }
};

/* Each warp reads another line of the arguments, so that they come to the constant cache at once and not one after the other as they are wanted */
__device__ __forceinline__ void small_arguments(const LinearArgs &a, int warp) {
    enum { WORDS = sizeof(LinearArgs) / 4, LINE = 16 };
    if (warp * LINE >= WORDS) return;
    const uint32_t v = ((const uint32_t *)&a)[warp * LINE];
    asm volatile("" ::"r"(v));
}

enum { SMALL_BUFS = 2 };

/* A reducer warp: adds the p's of its rows, segments ascending, and stores what follows them. A lane has a column; of half an item the lanes of the second
 * tile hold nothing. */
template <int R, bool GLU>
__device__ __forceinline__ void small_reduce(const LinearArgs &a, const SmallShape &g, const float *parts, uint64_t *handed, uint64_t *freed, int rw, int lane) {
    constexpr int RW = small_reducers<R>(), OUT = R / RW, PU = PartLayout<R>::UNIT;
    constexpr int T = GLU ? 4 : 2;
    const int C = g.chunk;
    int turn = 0;
    for (int item = blockIdx.x; item < a.items; item += gridDim.x) {
        const int half = item - a.whole;
        int tb = half < 0 ? item : a.whole + (half >> 1), part = GLU ? 0 : part_of(a, tb), n = tb * 32 + lane + (half < 0 ? 0 : (half & 1) * 16);
        const LinearPart &p = a.part[part];
        if (half >= 0 && lane > 15) n = p.n;
        float y[2 * OUT], res[OUT]; /* res: read while the consumers work */
#pragma unroll
        for (int i = 0; i < 2 * OUT; i++) y[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < OUT; i++) res[i] = !GLU && rw + i * RW < a.rows && n < p.n ? linear_res(p, rw + i * RW, n) : 0.0f;
        for (int r = 0; r < g.chunks; r++, turn++) {
            const int count = min(C, a.segs - r * C), buf = turn & 1;
            bar_wait(handed + buf, turn >> 1 & 1);
#pragma unroll
            for (int i = 0; i < 2 * OUT; i++) { /* gate, then up */
                if (i >= OUT && !GLU) break;
                const float *ps = parts + (size_t)(buf * T + i / OUT * 2 + (lane >> 4)) * C * PU + (rw + i % OUT * RW) * PartLayout<R>::PITCH + (lane & 15);
#pragma unroll 8
                for (int w = 0; w < count; w++) y[i] = y[i] + ps[w * PU];
            }
            __syncwarp();
            if (!lane) bar_arrive(freed + buf);
        }
#pragma unroll
        for (int i = 0; i < OUT; i++) {
            const int col = rw + i * RW;
            if (col >= a.rows) continue;
            if (!GLU) { if (n < p.n) linear_store(p, col, n, y[i], res[i]); continue; }
            float gate = linear_scaled(a.part[0], n, y[i]), v = (a.gelu ? bw_gelu(gate) : bw_silu(gate)) * linear_scaled(a.part[1], n, y[i + OUT]);
            if (n < p.n) p.y[(size_t)col * p.n + n] = v;
            if (a.xo.q) quant_group(a.xo, col, n >> 5, lane, v, a.fault, a.op);
        }
    }
}

/* R row slots (rows <= R), T tiles of 16 outputs a tile block: 2 of one part; GLU: 2 of gate, 2 of up. Persistent over items.
 * Threads: consumer warps fold units that come through their own rings of bulk copies, which begin before the dependency wait, are filled behind the
 * input and never drained between items; reducer warps add the p's, handed over in shared memory, segments ascending.
 * Traffic: every weight byte once; activations once a block. */
template <class U, int R, bool GLU>
__global__ void __launch_bounds__(small_threads<R>(), 1) k_linear_small(const __grid_constant__ LinearArgs a, const __grid_constant__ SmallShape g) {
    constexpr int T = GLU ? 4 : 2, RW = small_reducers<R>(), PU = PartLayout<R>::UNIT, BUFS = SMALL_BUFS;
    extern __shared__ __align__(128) uint8_t sm[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), W = g.warps, D = g.depth, S = a.segs, C = g.chunk; /* warp: a register */
    uint64_t *full = (uint64_t *)sm + warp * SMALL_DEPTH, *handed = (uint64_t *)sm + SMALL_WARPS * SMALL_DEPTH, *freed = handed + BUFS; /* full: of a warp */
    float4 *box = (float4 *)(sm + SMALL_BARS) + warp * BOX;
    uint8_t *rings = sm + SMALL_BARS + (boxed<U, R>() ? W * BOX * 16 : 0), *ring = rings + (size_t)warp * D * UNIT_SLOT<U>;
    float *parts = (float *)(rings + (size_t)W * D * UNIT_SLOT<U>); /* [BUFS][T][C][PU] */
    uint8_t *codes = (uint8_t *)(parts + BUFS * T * C * PU);
    float *delta = (float *)(codes + R * (S * 256 + 32)), *sum = delta + S * 8 * R, *low = sum + S * 8 * R;
    UnitQueue<U, GLU> queue = {a, g, NULL, 0, warp};
    small_arguments(a, warp);
    if (warp < W) {
        if (lane < D) bar_init(full + lane, 1);
        bar_fence();
        __syncwarp();
        queue.src = queue.source(lane);
#pragma unroll 1
        for (int i = 0; i < D && i * W + warp < g.early; i++) queue.next(ring + (size_t)i * UNIT_SLOT<U>, full + i, lane);
    } else if (threadIdx.x - W * 32 < BUFS) {
        int i = threadIdx.x - W * 32;
        bar_init(handed + i, C);
        bar_init(freed + i, RW);
    }
    pdl_trigger();
    __syncthreads(); /* the barriers are there */
    pdl_wait();
    if (warp < W) {
#pragma unroll 1
        for (int seg = warp; seg < S; seg += W) stage_acts<R, U::FORM>(a, codes, delta, seg, lane);
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
        for (int i = queue.k; i < D; i++) queue.next(ring + (size_t)i * UNIT_SLOT<U>, full + i, lane); /* the input is there: see k_linear_one */
        __syncwarp();
    }
    if (g.mixed) __syncthreads(); /* else a warp reads what it brought */
    if (warp < W) {
        int slot = 0, ring_phase = 0, held = -1;
        typename SmallActs<U, R>::type x;
        const uint32_t zero = (uint32_t)lane * ((uint32_t)a.n_parts >> 8); /* the compiler does not know: what it is part of stays in a register of each lane */
        for (int item = blockIdx.x, seg = warp, turn = 0; item < a.items;) {
            const int tiles = GLU ? 4 : item < a.whole ? 2 : 1, chunk = g.chunks > 1 ? small_quotient(seg, C) : 0, buf = (turn + chunk) & 1;
            bar_wait(freed + buf, ((turn + chunk) >> 1 & 1) ^ 1);
            if (seg != held) {
                x.from_shared(codes, delta, sum, low, S * 256, seg, lane, a.rows);
                held = seg;
            }
            float *to = parts + ((size_t)buf * T * C + seg - chunk * C) * PU;
#pragma unroll 1
            for (int t = 0; t < tiles; t++) {
                float p[2][2];
                bar_wait(full + slot, ring_phase);
                unit_fold<U, R>(ring + slot * UNIT_SLOT<U>, x, lane, zero, box, p, [&]() {
                    __syncwarp();
                    queue.next(ring + slot * UNIT_SLOT<U>, full + slot, lane);
                });
                if (++slot == D) { slot = 0; ring_phase ^= 1; }
                unit_store<R>(to, lane, p);
                to += C * PU;
            }
            __syncwarp();
            if (!lane) /* the item's last fold stands for those that its last chunk lacks */
                for (int i = seg == S - 1 ? S : g.chunks * C; i <= g.chunks * C; i++) bar_arrive(handed + buf);
            for (seg += W; seg >= S; seg -= S) { item += gridDim.x; turn += g.chunks; }
        }
        return;
    }
    small_reduce<R, GLU>(a, g, parts, handed, freed, warp - W, lane);
}

template <class U, int R, bool GLU> inline size_t small_shared(const SmallShape &g, int segs) {
    constexpr int FLOATS = U::FORM == FORM_S2M ? 3 : U::FORM == FORM_S1M ? 2 : 1; /* of a group's activations */
    const size_t acts = (size_t)R * (segs * 256 + 32) + (size_t)segs * 8 * R * 4 * FLOATS;
    const size_t parts = (size_t)2 * (GLU ? 4 : 2) * g.chunk * PartLayout<R>::UNIT * 4;
    return SMALL_BARS + (size_t)g.warps * ((boxed<U, R>() ? BOX * 16 : 0) + g.depth * UNIT_SLOT<U>) + parts + acts;
}

enum { RING_KB = 74 }; /* measured on the H200 (research/orders) */
/* the widest block whose rings are at least two units deep and that fits */
template <class U, int R, bool GLU> SmallShape small_shape(size_t shared_max, int segs, size_t *bytes) {
    constexpr int limit = small_threads<R>() / 32 - small_reducers<R>();
    SmallShape g = {};
    for (int most = limit < SMALL_WARPS ? limit : (int)SMALL_WARPS; most > 0; most--) {
        g.warps = segs < most ? segs : most;
        g.chunks = segs / g.warps;
        g.chunk = (segs + g.chunks - 1) / g.chunks;
        g.mixed = segs % g.warps;
        if (segs - (g.chunks - 1) * g.chunk < g.warps) continue;
        g.depth = RING_KB * 1024 / (g.warps * UNIT_SLOT<U>);
        if (g.depth < 2) g.depth = 2;
        if (g.depth > SMALL_DEPTH) g.depth = SMALL_DEPTH;
        while (g.depth > 2 && small_shared<U, R, GLU>(g, segs) > shared_max) g.depth--;
        *bytes = small_shared<U, R, GLU>(g, segs);
        if (*bytes <= shared_max) break;
    }
    g.early = g.warps;
    return g;
}

/* what each of `sms` blocks works on */
template <class Shape> void small_items(LinearArgs &a, Shape &g, bool glu, int sms) {
    const int rest = a.blocks % sms; /* tile blocks of a last round: as halves if that is one round */
    a.whole = !glu && 2 * rest <= sms ? a.blocks - rest : a.blocks;
    a.items = 2 * a.blocks - a.whole;
    g.each = a.whole / sms;
    g.more = a.whole % sms;
}

} // namespace bw
#endif
