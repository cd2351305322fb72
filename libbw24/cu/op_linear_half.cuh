/* Products of few rows in f16 (docs/numerics.md §2), for weights of four-bit floats with two scales a group (U_NVFP4). Owns operands and the fold of a unit;
 * rings, hand-over and the int8 products of the other units are op_linear.cuh's.
 *
 * An activation is its code (7 bits) times its group's scale (4 bits) divided by a power of two of its row and segment, 2^R, exact in f16: R puts the segment's
 * largest scale between 16 and 32. So the products of half a group are scale times sum already, as a float without rounding, and fold by one fma a weight scale.
 * p comes out divided by 2^R and is multiplied by it once. Where the scales of a row's segment span more than 2^25 or R leaves -60 .. 60 (p could become
 * subnormal), the warp takes the segment from its int8 codes instead, for all rows.
 *
 * Order of the columns of half a group, the same for both operands: lane tig has columns 4 tig + 0 and 2 in the first register of a row, 1 and 3 in the second. */
#ifndef BW24_CU_OP_LINEAR_HALF_CUH
#define BW24_CU_OP_LINEAR_HALF_CUH

#include "op_linear.cuh"

namespace bw {

/* ---- the instructions */
__device__ __forceinline__ uint32_t halves_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
/* x times y plus z, off the pipe of logic and shifts where y is a register */
__device__ __forceinline__ uint32_t times_plus(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t d;
    asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
    return d;
}
/* c [16][8] = a [16][16] times b [16][8] */
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* ---- weights: a word's eight codes as A registers of row r of two, [half of the group]; a code is its value (U_NVFP4's, doubled) times 2^-15. The three bits
 * below the sign are the lowest of an f16's exponent and the highest of its fraction, so a byte holds all that is not zero. two: 2 in a register */
__device__ __forceinline__ void e2m1_codes(uint32_t w, int r, uint32_t two, uint32_t (&a)[2][4]) {
    const uint32_t even = times_plus(w & 0x0f0f0f0fu, two, 0x70707070u) & 0x8e8e8e8eu; /* 7 more at the sign carry it to the byte's top */
    const uint32_t odd = (w & 0x80808080u) | (w >> 3 & 0x0e0e0e0eu);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        a[h][r] = prmt(even, 0, h ? 0x3424 : 0x1404);
        a[h][2 + r] = prmt(odd, 0, h ? 0x3424 : 0x1404);
    }
}
/* Scales of four groups of a unit pass through shared memory, [word][row] as op_linear.cuh's box: a lane makes those of one word. They are UE4M3 read as f16,
 * which is half of each (what U_NVFP4 multiplies by) times 2^-7. */
constexpr float HALF_BACK = 0x1p22f; /* what codes and scales lack */
constexpr int HALF_BOX = 32;         /* float4 of a warp */
__device__ __forceinline__ void half_scales(const uint8_t *scales, int part, int lane, float4 *box) {
    const uint32_t v = U_NVFP4::fetch(scales, lane & 15, 2 * part + (lane >> 4)), x = (v & 0x00ff00ffu) << 7, y = (v & 0xff00ff00u) >> 1;
    const float2 a = __half22float2(*(const __half2 *)&x), b = __half22float2(*(const __half2 *)&y);
    box[lane] = make_float4(a.x, a.y, b.x, b.y);
}

/* ---- activations */
/* 2^R of eight scales, which is the exponent of the largest less 4; 0: none serves */
__device__ __forceinline__ float half_factor(const float (&d)[8]) {
    uint32_t most = 0, least = ~0u; /* least: of those that are not zero, less 1 */
#pragma unroll
    for (int j = 0; j < 8; j++) {
        most = max(most, __float_as_uint(d[j]));
        least = min(least, __float_as_uint(d[j]) - 1);
    }
    const int high = (int)(most >> 23), low = (int)(least + 1 >> 23), R = most ? high - 131 : 0;
    return most && (high - low > 25 || R > 60 || R < -60) ? 0.0f : __uint_as_float((uint32_t)(127 + R) << 23);
}
/* four codes times d: columns 0 and 2, 1 and 3. less: -1152 d; a byte, its top bit inverted, under f16 1024 is 1152 more than the code */
__device__ __forceinline__ uint2 half_codes(uint32_t q, uint32_t d, uint32_t less) {
    q ^= 0x80808080u;
    return make_uint2(halves_fma(prmt(q, 0x64646464u, 0x4240), d, less), halves_fma(prmt(q, 0x64646464u, 0x4341), d, less));
}
/* eight codes of a lane in a group of scale d: words tig and tig + 4 */
__device__ __forceinline__ uint4 half_group(uint2 q, float d) {
    const __half2 s = __float2half2_rn(d), k = __hmul2(s, __float2half2_rn(-1152.0f));
    const uint2 x = half_codes(q.x, *(const uint32_t *)&s, *(const uint32_t *)&k), y = half_codes(q.y, *(const uint32_t *)&s, *(const uint32_t *)&k);
    return make_uint4(x.x, x.y, y.x, y.y);
}
/* the segment of row gid as a lane's B registers [group], from its codes at the lane's first and its scales; the row's 2^R */
__device__ __forceinline__ float half_row(const uint8_t *codes, const float (&d)[8], uint4 (&b)[8]) {
    const float factor = half_factor(d), up = factor == 0.0f ? 0.0f : __uint_as_float(0x7f000000u - __float_as_uint(factor));
#pragma unroll
    for (int j = 0; j < 8; j++) b[j] = half_group(*(const uint2 *)(codes + j * 32), d[j] * up);
    return factor;
}

/* int8 codes and scales of a segment, for what f16 does not hold: rows `pitch` apart, groups of scales `ld` apart; groups that there are */
struct PlainActs { const uint8_t *codes; const float *delta; int pitch, ld, groups; };
/* p of an output and a row */
template <class U> __device__ __forceinline__ float half_plain(const uint8_t *w, int out, const PlainActs &x, int row) {
    float p = 0.0f;
#pragma unroll 1
    for (int g = 0; g < x.groups; g++) {
        int sum[2] = {0, 0};
#pragma unroll 1
        for (int t = 0; t < 4; t++) {
            const typename U::Pack pack = U::template load_pack<true>(w + (g >> 2) * U::HALF, (g & 3) / U::GP, out >> 3, (out & 7) * 4 + t);
            const uint2 q = *(const uint2 *)(x.codes + (size_t)row * x.pitch + g * 32 + t * 8);
            uint32_t c[2];
            U::unpack(pack, (g & 3) % U::GP, c[0], c[1]);
            sum[0] = __dp4a((int)c[0], (int)q.x, sum[0]);
            sum[1] = __dp4a((int)c[1], (int)q.y, sum[1]);
        }
        float a[2], b[2];
        U::pair(U::fetch(w + 2 * U::HALF, out, g >> 1), g >> 1, a, b);
        const float d = x.delta[(size_t)g * x.ld + row];
        p = fmaf(g & 1 ? a[1] : a[0], d * (float)sum[0], p);
        p = fmaf(g & 1 ? b[1] : b[0], d * (float)sum[1], p);
    }
    return p;
}
/* of a lane's places: p[n][r][k] is row gid + 8r of the unit and row 8n + 2 tig + k of the activations */
template <class U, int N> __device__ __forceinline__ void half_plain_unit(const uint8_t *w, const PlainActs &x, int lane, float (&p)[N][2][2]) {
#pragma unroll 1
    for (int i = 0; i < 4 * N; i++) {
        const float v = half_plain<U>(w, (lane >> 2) + (i & 2) * 4, x, (i >> 2) * 8 + (lane & 3) * 2 + (i & 1));
#pragma unroll
        for (int k = 0; k < 4 * N; k++) p[k >> 2][k >> 1 & 1][k & 1] = k == i ? v : p[k >> 2][k >> 1 & 1][k & 1];
    }
}

/* p of one unit and N groups of eight rows, as half_plain_unit's; acts(n, group): B registers. read() is called by the whole warp once the unit is not read again */
template <int N, class A, class Read>
__device__ __forceinline__ void half_fold(const uint8_t *w, A acts, const float (&back)[N][2], int lane, uint32_t two, float4 *box, float (&p)[N][2][2], Read read) {
    typedef U_NVFP4 U;
    Pack4 pk[2];
    float4 sc[2];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) p[i >> 2][i >> 1 & 1][i & 1] = 0.0f;
#pragma unroll
    for (int s = 0; s < 8; s++) {
        uint32_t a[2][4];
        if (!(s & 3)) {
            half_scales(w + 2 * U::HALF, s >> 2, lane, box);
#pragma unroll
            for (int r = 0; r < 2; r++) pk[r] = U::template load_pack<true>(w + (s >> 2) * U::HALF, 0, r, lane);
            __syncwarp();
        }
#pragma unroll
        for (int r = 0; r < 2; r++) e2m1_codes(word_of(pk[r].v, s & 3), r, two, a);
        if (!(s & 1))
#pragma unroll
            for (int r = 0; r < 2; r++) sc[r] = box[(s >> 1 & 1) * 16 + (lane >> 2) + 8 * r];
        if (s == 4) read();
        if ((s & 3) == 2) __syncwarp(); /* the box may be filled again */
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint4 b = acts(n, s);
            float c[2][4];
            mma_f16(c[0], a[0], b.x, b.y);
            mma_f16(c[1], a[1], b.z, b.w);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 &f = sc[i >> 1];
                float &q = p[n][i >> 1][i & 1];
                q = fmaf(s & 1 ? f.w : f.z, c[1][i], fmaf(s & 1 ? f.y : f.x, c[0][i], q));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * N; i++) p[i >> 2][i >> 1 & 1][i & 1] = p[i >> 2][i >> 1 & 1][i & 1] * back[i >> 2][i & 1];
}

/* ---- op_linear.cuh's eight rows: a segment in registers */
struct HalfActs {
    uint4 b[8];
    float back[1][2]; /* 2^R of rows 2 tig and 2 tig + 1, times HALF_BACK */
    bool plain;       /* from int8 codes */
    PlainActs as;
    /* codes [8 rows][cols + 32], delta [segment][8 groups][8]; rows past the last hold anything */
    __device__ __forceinline__ void from_shared(const uint8_t *codes, const float *delta, const float *, const float *, int cols, int seg, int lane, int rows) {
        const int gid = lane >> 2, tig = lane & 3;
        as = {codes + seg * 256, delta + seg * 64, cols + 32, 8, 8};
        float d[8];
#pragma unroll
        for (int j = 0; j < 8; j++) d[j] = as.delta[j * 8 + gid];
        const float factor = half_row(as.codes + gid * as.pitch + tig * 8, d, b);
        plain = __any_sync(~0u, factor == 0.0f && gid < rows);
#pragma unroll
        for (int i = 0; i < 2; i++) back[0][i] = __shfl_sync(~0u, factor, 8 * tig + 4 * i) * HALF_BACK;
    }
};
template <> struct SmallActs<U_NVFP4, 8> { typedef HalfActs type; };

template <class U, int R, class Read>
__device__ __forceinline__ void unit_fold(const uint8_t *w, const HalfActs &x, int lane, uint32_t zero, float4 *box, float (&p)[2][2], Read read) {
    float (&to)[1][2][2] = *(float (*)[1][2][2])&p;
    if (x.plain) {
        half_plain_unit<U>(w, x.as, lane, to);
        return read();
    }
    half_fold<1>(w, [&](int, int s) { return x.b[s]; }, x.back, lane, zero + 2, box, to, read);
}

/* ---- op_linear_stream.cuh's N groups of eight rows: a segment in shared memory, [group][n][lane] of 16 bytes, then 2^R times HALF_BACK of the rows, 0 for those
 * from int8 codes */
template <int N> struct HalfPlace {
    enum { ROWS = 8 * N, PITCH = 288, SCALES = ROWS * PITCH, BACKS = ROWS * 512, BYTES = BACKS + ROWS * 4 };
    /* from codes [row][PITCH] and scales [8 groups][rows], which may lie there too: the codes at its beginning, the scales at SCALES */
    static __device__ __forceinline__ void make(uint8_t *at, const uint8_t *codes, const float *scales, int rows, int lane) {
        const int gid = lane >> 2, tig = lane & 3;
        uint4 b[N][8];
        float back[N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            float d[8];
#pragma unroll
            for (int j = 0; j < 8; j++) d[j] = scales[j * ROWS + n * 8 + gid];
            back[n] = half_row(codes + (n * 8 + gid) * PITCH + tig * 8, d, b[n]) * HALF_BACK;
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int j = 0; j < 8; j++) *(uint4 *)(at + ((j * N + n) * 32 + lane) * 16) = b[n][j];
            if (!tig) ((float *)(at + BACKS))[n * 8 + gid] = n * 8 + gid < rows ? back[n] : 1.0f;
        }
        __syncwarp();
    }
    /* p of a unit; x: the segment as it came */
    template <class Read>
    static __device__ __forceinline__ void fold(const uint8_t *w, const uint8_t *at, const PlainActs &x, int lane, uint32_t two, float4 *box, float (&p)[N][2][2], Read read) {
        float back[N][2];
        bool plain = false;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 v = *(const float2 *)(at + BACKS + (n * 8 + 2 * (lane & 3)) * 4);
            back[n][0] = v.x; back[n][1] = v.y;
            plain = plain || v.x == 0.0f || v.y == 0.0f;
        }
        if (__any_sync(~0u, plain)) {
            half_plain_unit<U_NVFP4>(w, x, lane, p);
            return read();
        }
        half_fold<N>(w, [&](int n, int s) { return *(const uint4 *)(at + ((s * N + n) * 32 + lane) * 16); }, back, lane, two, box, p, read);
    }
};

} // namespace bw
#endif
