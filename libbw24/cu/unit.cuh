/* Weights in fragment order. Owns the device layout of quantised matrices and how a lane reads it; knows no kernel.
 *
 * A unit is 16 rows x 256 columns (8 groups of 32), padded with zeros past the matrix:
 *   [half 0: groups 0-3][half 1: groups 4-7][scales of 16 rows]
 * A half is packs [pack][r][lane]: lane (gid = lane / 4, tig = lane % 4) finds the codes of row gid + 8r, words tig and tig + 4
 * (columns 4 tig .. 4 tig + 3 and 16 more) of each group, which are the A registers of mma m16n8k32. So one 16-byte load per
 * lane is both coalesced from device memory and free of bank conflicts from shared memory, and no transposition exists.
 * A matrix is units [row / 16][column / 256].
 *
 * A type gives: FORM, UNSIGNED (codes are 0 .. 255, not int8), APART (see TableApart), GP (groups a pack), PACKS (packs a half and r), HALF and SCALE (bytes),
 * load_pack, unpack -> two words of codes, fetch -> what the unit's scales hold for groups 2w and 2w + 1 of a row, pair -> these scales (a; b: second
 * scale, or the minimum of S1M; S2M: mins -> the two minima). Codes may come multiplied by a power of two that the scale takes back, exactly. A zero scale
 * or minimum may have either sign.
 *
 * Types without a unit of their own are decoded at load to int8 codes with f32 scales: U_INT8 (one scale and minimum a 32, 10 bits a
 * weight) and U_INT8H (two of each, 12 bits). A minimum of +0 adds nothing, so both serve the forms without one as well. */
#ifndef BW24_CU_UNIT_CUH
#define BW24_CU_UNIT_CUH

#include <cuda_fp16.h>
#include <stdint.h>

namespace bw {

enum Form { FORM_S1, FORM_S1M, FORM_S2, FORM_S2M };

/* Streaming load: weights pass the L1 once */
__device__ __forceinline__ uint4 ld_stream(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 ld_stream8(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
template <bool SHARED> __device__ __forceinline__ uint4 ld16(const uint8_t *p) {
    if (SHARED) return *(const uint4 *)p;
    return ld_stream(p);
}
template <bool SHARED> __device__ __forceinline__ uint2 ld8(const uint8_t *p) {
    if (SHARED) return *(const uint2 *)p;
    return ld_stream8(p);
}
__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float half_of(uint32_t w, int i) { return __half2float(__ushort_as_half((unsigned short)(i ? w >> 16 : w))); }
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t sel) {
    uint32_t v;
    asm("prmt.b32 %0,%1,%2,%3;" : "=r"(v) : "r"(a), "r"(b), "r"(sel));
    return v;
}
/* 2^23 + byte i of w, exact, without the conversion unit */
__device__ __forceinline__ float big_byte(uint32_t w, int i) { return __uint_as_float(prmt(w, 0x4b000000u, 0x7440 + i)); }

/* element e of a group of int8 codes lies in word e / 4: byte offset of the code in a half of U_Q8_0's and the generic units' shape */
__host__ __device__ inline int int8_place(int c, int row, int e) {
    int word = e >> 2, lane = (row & 7) * 4 + (word & 3);
    return ((c >> 1) * 2 + (row >> 3)) * 512 + lane * 16 + (c & 1) * 8 + (word >> 2) * 4 + (e & 3);
}

/* which unit, for kernels that serve all of them; UNIT_FLOAT: none, a float matrix */
enum UnitId { UNIT_Q4_0, UNIT_Q4_K, UNIT_NVFP4, UNIT_Q8_0, UNIT_Q6_K, UNIT_IQ4_XS, UNIT_INT8, UNIT_INT8H, UNIT_FLOAT };

struct Pack4 { uint4 v; };

/* four-bit codes: one 16-byte load holds 4 groups, low nibbles = word tig, high nibbles = word tig + 4 */
struct Nibbles {
    static constexpr int GP = 4, PACKS = 1, HALF = 1024, SCALE = 256, UNIT = 2 * HALF + SCALE;
    static constexpr bool UNSIGNED = false, APART = false;
    typedef Pack4 Pack;
    template <bool SHARED> static __device__ __forceinline__ Pack load_pack(const uint8_t *half, int, int r, int lane) {
        Pack p; p.v = ld16<SHARED>(half + r * 512 + lane * 16); return p;
    }
    /* four bytes for each pair of groups, 16 a row */
    typedef uint32_t Pair;
    static __device__ __forceinline__ Pair fetch(const uint8_t *scales, int row, int w) { return *(const uint32_t *)(scales + row * 16 + w * 4); }
};
/* all pairs of a row: fetch_row, and row -> scales a and b of the 8 groups */
template <class U> struct RowOfPairs {
    typedef uint4 Row;
    static __device__ __forceinline__ Row fetch_row(const uint8_t *scales, int row) { return *(const uint4 *)(scales + row * 16); }
    static __device__ __forceinline__ void row(const Row &v, float *a, float *b) {
#pragma unroll
        for (int w = 0; w < 4; w++) U::pair(word_of(v, w), w, a + 2 * w, b + 2 * w);
    }
};

/* nibble = two's complement of q; codes are 16 q */
struct U_Q4_0 : Nibbles, RowOfPairs<U_Q4_0> {
    static constexpr Form FORM = FORM_S1;
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        uint32_t w = word_of(p.v, c);
        lo = (w << 4) & 0xf0f0f0f0u; hi = w & 0xf0f0f0f0u;
    }
    static __device__ __forceinline__ void pair(Pair v, int, float *a, float *b) {
        a[0] = half_of(v, 0) * 0.0625f; a[1] = half_of(v, 1) * 0.0625f; b[0] = b[1] = 0.0f;
    }
};

/* Word tig of two neighbouring groups shares a word, the even group in the low nibbles, the odd one in the high (its codes are 16 q): the order of
 * the file. Word c of a pack: groups 2 (c / 2) and 2 (c / 2) + 1, words tig + 4 (c % 2). Scales: 16 rows of (d, dmin, high bits), then 16 rows of
 * 2 bytes for each pair of groups: nibbles (scale, minimum) of the even, of the odd group. Byte j of the high bits holds bits 4 and 5 of scale even,
 * scale odd, minimum even, minimum odd of pair w at bit 2w. */
struct U_Q4_K : Nibbles {
    static constexpr Form FORM = FORM_S1M;
    static constexpr bool UNSIGNED = true;
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        uint32_t m = c & 1 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
        lo = (c < 2 ? p.v.x : p.v.z) & m; hi = (c < 2 ? p.v.y : p.v.w) & m;
    }
    struct Pair { uint2 h; uint32_t low; };
    static __device__ __forceinline__ Pair fetch(const uint8_t *s, int row, int w) { return {*(const uint2 *)(s + row * 8), *(const uint16_t *)(s + 128 + row * 8 + w * 2)}; }
    static __device__ __forceinline__ void pair(const Pair &p, int w, float *a, float *b) {
        const uint2 h = p.h;
        uint32_t v = (p.low & 0x0f0fu) | ((p.low << 12) & 0x0f0f0000u) | (__funnelshift_l(h.y, h.y, 4 - 2 * w) & 0x30303030u);
        float d = half_of(h.x, 0), m = -half_of(h.x, 1), d16 = d * 0.0625f;
        a[0] = fmaf(d, big_byte(v, 0), d * -8388608.0f); /* d times the byte: one rounding of an exact product */
        a[1] = fmaf(d16, big_byte(v, 1), d16 * -8388608.0f);
        b[0] = fmaf(m, big_byte(v, 2), m * -8388608.0f);
        b[1] = fmaf(m, big_byte(v, 3), m * -8388608.0f);
    }
    struct Row { uint2 h, low; };
    static __device__ __forceinline__ Row fetch_row(const uint8_t *s, int row) { return {*(const uint2 *)(s + row * 8), *(const uint2 *)(s + 128 + row * 8)}; }
    static __device__ __forceinline__ void row(const Row &p, float *a, float *b) {
        const float d = half_of(p.h.x, 0), m = -half_of(p.h.x, 1), d16 = d * 0.0625f, d0 = d * -8388608.0f, d1 = d16 * -8388608.0f, m0 = m * -8388608.0f;
#pragma unroll
        for (int w = 0; w < 4; w++) { /* bytes as pair's */
            const uint32_t x = w < 2 ? p.low.x : p.low.y, s = x & 0x0f0f0f0fu, n = (x >> 4) & 0x0f0f0f0fu;
            const uint32_t v = prmt(s, n, w & 1 ? 0x7632 : 0x5410) | (__funnelshift_l(p.h.y, p.h.y, 4 - 2 * w) & 0x30303030u);
            a[2 * w] = fmaf(d, big_byte(v, 0), d0);
            a[2 * w + 1] = fmaf(d16, big_byte(v, 1), d1);
            b[2 * w] = fmaf(m, big_byte(v, 2), m0);
            b[2 * w + 1] = fmaf(m, big_byte(v, 3), m0);
        }
    }
    /* zeros as d times 0 and -(dmin times 0) give them; only EMBED can tell */
    static __device__ __forceinline__ void sign_zeros(const uint8_t *s, int row, float *a, float *b) {
        float d = half_of(*(const uint32_t *)(s + row * 8), 0), m = -half_of(*(const uint32_t *)(s + row * 8), 1);
        for (int i = 0; i < 2; i++) { a[i] = a[i] == 0.0f ? d * 0.0f : a[i]; b[i] = b[i] == 0.0f ? m * 0.0f : b[i]; }
    }
};

/* four nibbles of a 16-bit selector through a table of 16 bytes */
__device__ __forceinline__ uint32_t table4(uint32_t sel, uint32_t pick, const uint32_t *t) {
    return prmt(prmt(t[0], t[1], sel), prmt(t[2], t[3], sel), pick);
}
/* the nibbles of both halves of w */
__device__ __forceinline__ void unpack_table(uint32_t w, const uint32_t *t, uint32_t &lo, uint32_t &hi) {
    const uint32_t sel = w & 0x77777777u, pick = ((w >> 1) & 0x44444444u) | 0x32103210u;
    lo = table4(sel, pick, t);
    hi = table4(sel >> 16, pick >> 16, t);
}

/* w >> 16, off the pipe of prmt and shifts */
__device__ __forceinline__ uint32_t upper_half(uint32_t w) {
    uint32_t v;
    asm("dp2a.lo.u32.u32 %0,%1,%2,%3;" : "=r"(v) : "r"(w), "r"(0x100u), "r"(0u));
    return v;
}

/* Values from zero up and values below zero lie in words of their own: plus holds value + 1 for each value from zero up and 0 for the others, minus holds
 * each value below zero and -1 for the others: a nibble whose bit 3 is set makes prmt repeat the top bit of a byte of the table, which is clear in the one
 * and set in the other. So plus . x + minus . x is the product, with four prmt where signed codes take six. OFF: halves move off the pipe of prmt. */
struct TableApart { uint32_t plus[2], minus[2]; }; /* word tig, word tig + 4 */
template <bool OFF> __device__ __forceinline__ TableApart table_signs(uint32_t below, uint32_t above, uint32_t p0, uint32_t p1, uint32_t m0, uint32_t m1) {
    const uint32_t a = OFF ? upper_half(above) : above >> 16, b = OFF ? upper_half(below) : below >> 16;
    return {{prmt(p0, p1, above), prmt(p0, p1, a)}, {prmt(m0, m1, below), prmt(m0, m1, b)}};
}

/* E2M1 codes, values doubled; the low 16 bits of a word are word tig, the high 16 bits word tig + 4, columns ascending; one scale a half */
struct U_NVFP4 : Nibbles, RowOfPairs<U_NVFP4> {
    static constexpr Form FORM = FORM_S2;
    static constexpr bool APART = true;
    /* The nibble of -0 does not occur. plus, minus: the first words of the two halves of the table */
    static constexpr uint32_t FIRST_PLUS = 0x04030201u, FIRST_MINUS = 0xfdfeff80u;
    template <bool OFF = false> static __device__ __forceinline__ TableApart signs(const Pack &p, int c, uint32_t plus, uint32_t minus) {
        const uint32_t w = word_of(p.v, c);
        return table_signs<OFF>(w ^ 0x88888888u, w, plus, 0x0d090705u, minus, 0xf4f8fafcu);
    }
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        const uint32_t t[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
        unpack_table(word_of(p.v, c), t, lo, hi);
    }
    /* half of each UE4M3 (bit 7 is clear) of a pair: its bits as f16 are the value times 2^-8 */
    static __device__ __forceinline__ void halves(Pair v, __half2 &p, __half2 &q) {
        const uint32_t x = (v & 0x00ff00ffu) << 7, y = (v & 0xff00ff00u) >> 1;
        p = *(const __half2 *)&x;
        q = *(const __half2 *)&y;
    }
    /* the row's scales over 128, by four operations a pair of groups less: for activations whose scales are 128 times as large */
    static __device__ __forceinline__ void row_over_128(const Row &v, float *a, float *b) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            __half2 x, y;
            halves(word_of(v, w), x, y);
            const float2 p = __half22float2(x), q = __half22float2(y);
            a[2 * w] = p.x; a[2 * w + 1] = p.y; b[2 * w] = q.x; b[2 * w + 1] = q.y;
        }
    }
    static __device__ __forceinline__ void pair(Pair v, int, float *a, float *b) {
        __half2 x, y;
        halves(v, x, y);
        const __half2 c = __half2half2(__ushort_as_half(0x5800)); /* 128 */
        const float2 p = __half22float2(__hmul2(x, c)), q = __half22float2(__hmul2(y, c));
        a[0] = p.x; a[1] = p.y; b[0] = q.x; b[1] = q.y;
    }
};

/* nibbles as U_NVFP4's, values by IQ4's table; scales: for each pair of groups d (f16) and 32 + the factor of each, a byte */
struct U_IQ4_XS : Nibbles, RowOfPairs<U_IQ4_XS> {
    static constexpr Form FORM = FORM_S1;
    static constexpr bool APART = true;
    static constexpr uint32_t FIRST_PLUS = 0x271a0e02u, FIRST_MINUS = 0xbfad9881u;
    /* the lower half of the table is below zero */
    template <bool OFF = false> static __device__ __forceinline__ TableApart signs(const Pack &p, int c, uint32_t plus, uint32_t minus) {
        const uint32_t w = word_of(p.v, c);
        return table_signs<OFF>(w, w ^ 0x88888888u, plus, 0x725a4636u, minus, 0xf6eaddcfu);
    }
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        const uint32_t t[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
        unpack_table(word_of(p.v, c), t, lo, hi);
    }
    static __device__ __forceinline__ void pair(Pair v, int, float *a, float *b) {
        float d = half_of(v, 0);
        a[0] = d * (float)((int)(v >> 16 & 255) - 32); a[1] = d * (float)((int)(v >> 24) - 32); b[0] = b[1] = 0.0f;
    }
};

/* int8 codes as stored; a 16-byte load holds 2 groups (word tig, word tig + 4 of each) */
struct U_Q8_0 : Nibbles, RowOfPairs<U_Q8_0> {
    static constexpr Form FORM = FORM_S1;
    static constexpr int GP = 2, PACKS = 2, HALF = 2048, UNIT = 2 * HALF + SCALE;
    template <bool SHARED> static __device__ __forceinline__ Pack load_pack(const uint8_t *half, int pk, int r, int lane) {
        Pack p; p.v = ld16<SHARED>(half + (pk * 2 + r) * 512 + lane * 16); return p;
    }
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        lo = c ? p.v.z : p.v.x; hi = c ? p.v.w : p.v.y;
    }
    static __device__ __forceinline__ void pair(Pair v, int, float *a, float *b) {
        a[0] = half_of(v, 0); a[1] = half_of(v, 1); b[0] = b[1] = 0.0f;
    }
};

/* low nibbles as Nibbles, then 2 high bits of 8 values a group; codes are 4 q (top bit inverted at repack); scales int8 per 16, d f16 */
struct U_Q6_K {
    static constexpr Form FORM = FORM_S2;
    static constexpr int GP = 4, PACKS = 1, HALF = 1536, SCALE = 288, UNIT = 2 * HALF + SCALE;
    static constexpr bool UNSIGNED = false, APART = false;
    struct Pack { uint4 v; uint2 h; };
    template <bool SHARED> static __device__ __forceinline__ Pack load_pack(const uint8_t *half, int, int r, int lane) {
        Pack p; p.v = ld16<SHARED>(half + r * 512 + lane * 16); p.h = ld8<SHARED>(half + 1024 + r * 256 + lane * 8); return p;
    }
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        uint32_t w = word_of(p.v, c), h = c < 2 ? p.h.x : p.h.y;
        uint32_t hl = (c & 1) ? h << 2 : h << 6, hh = (c & 1) ? h : h << 4;
        lo = ((w << 2) & 0x3c3c3c3cu) | (hl & 0xc0c0c0c0u);
        hi = ((w >> 2) & 0x3c3c3c3cu) | (hh & 0xc0c0c0c0u);
    }
    struct Pair { uint32_t v; uint16_t d; };
    static __device__ __forceinline__ Pair fetch(const uint8_t *s, int row, int w) { return {*(const uint32_t *)(s + row * 16 + w * 4), *(const uint16_t *)(s + 256 + row * 2)}; }
    static __device__ __forceinline__ void pair(const Pair &p, int, float *a, float *b) {
        uint32_t v = p.v ^ 0x80808080u; /* int8 + 128 as bytes */
        float d = half_of(p.d, 0) * 0.25f;
        a[0] = d * (big_byte(v, 0) - 8388736.0f); b[0] = d * (big_byte(v, 1) - 8388736.0f);
        a[1] = d * (big_byte(v, 2) - 8388736.0f); b[1] = d * (big_byte(v, 3) - 8388736.0f);
    }
    struct Row { uint4 v; uint16_t d; };
    static __device__ __forceinline__ Row fetch_row(const uint8_t *s, int row) { return {*(const uint4 *)(s + row * 16), *(const uint16_t *)(s + 256 + row * 2)}; }
    static __device__ __forceinline__ void row(const Row &p, float *a, float *b) {
#pragma unroll
        for (int w = 0; w < 4; w++) pair({word_of(p.v, w), p.d}, w, a + 2 * w, b + 2 * w);
    }
};

/* codes as U_Q8_0; scales a row: 8 scales, then 8 minima, f32 */
struct U_INT8 : U_Q8_0 {
    static constexpr Form FORM = FORM_S1M;
    static constexpr int SCALE = 1024, UNIT = 2 * HALF + SCALE;
    struct Pair { float2 x, m; };
    static __device__ __forceinline__ Pair fetch(const uint8_t *s, int row, int w) {
        const float2 *f = (const float2 *)(s + row * 64) + w;
        return {f[0], f[4]};
    }
    static __device__ __forceinline__ void pair(const Pair &p, int, float *a, float *b) {
        float2 x = p.x, m = p.m;
        a[0] = x.x; a[1] = x.y; b[0] = m.x; b[1] = m.y;
    }
    struct Row { float4 v[4]; };
    static __device__ __forceinline__ Row fetch_row(const uint8_t *s, int row) {
        const float4 *f = (const float4 *)(s + row * 64);
        return {{f[0], f[1], f[2], f[3]}};
    }
    static __device__ __forceinline__ void row(const Row &p, float *a, float *b) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const float4 x = p.v[w];
            float *to = (w < 2 ? a : b) + 4 * (w & 1);
            to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w;
        }
    }
};

/* codes as U_Q8_0; scales a row: (s0, s1) of 8 groups, then (m0, m1) of 8 groups, f32 */
struct U_INT8H : U_Q8_0 {
    static constexpr Form FORM = FORM_S2M;
    static constexpr int SCALE = 2048, UNIT = 2 * HALF + SCALE;
    struct Pair { float4 x, m; };
    static __device__ __forceinline__ Pair fetch(const uint8_t *s, int row, int w) {
        const float4 *f = (const float4 *)(s + row * 128) + w;
        return {f[0], f[4]};
    }
    static __device__ __forceinline__ void pair(const Pair &p, int, float *a, float *b) {
        float4 x = p.x;
        a[0] = x.x; b[0] = x.y; a[1] = x.z; b[1] = x.w;
    }
    static __device__ __forceinline__ void mins(const Pair &p, float *m0, float *m1) {
        float4 x = p.m;
        m0[0] = x.x; m1[0] = x.y; m0[1] = x.z; m1[1] = x.w;
    }
    struct Row { float4 x[4], m[4]; };
    static __device__ __forceinline__ Row fetch_row(const uint8_t *s, int row) {
        const float4 *f = (const float4 *)(s + row * 128);
        return {{f[0], f[1], f[2], f[3]}, {f[4], f[5], f[6], f[7]}};
    }
    static __device__ __forceinline__ void row(const Row &p, float *a, float *b) {
#pragma unroll
        for (int w = 0; w < 4; w++) pair({p.x[w], p.m[w]}, w, a + 2 * w, b + 2 * w);
    }
    static __device__ __forceinline__ void row_mins(const Row &p, float *m0, float *m1) {
#pragma unroll
        for (int w = 0; w < 4; w++) mins({p.x[w], p.m[w]}, m0 + 2 * w, m1 + 2 * w);
    }
};

/* signs of a word; zero: 0 in a way that the compiler does not see, so that it keeps the first words of the table in registers */
template <class U, bool OFF = false> __device__ __forceinline__ TableApart unit_signs(const typename U::Pack &p, int c, uint32_t zero) {
    return U::template signs<OFF>(p, c, U::FIRST_PLUS | zero, U::FIRST_MINUS | zero);
}

/* bytes from one slot of a ring of units, of pairs of units to the next: bulk copies to places that are no multiple of 128 are slower, one row's steps by 3-5 % */
template <class U> constexpr int UNIT_SLOT = (U::UNIT + 127) / 128 * 128;
template <class U> constexpr int PAIR_SLOT = (2 * U::UNIT + 127) / 128 * 128;

/* the minima of a pair; nothing for the forms that keep none apart */
template <class U> __device__ __forceinline__ void unit_mins(const typename U::Pair &p, float *m0, float *m1) {
    if constexpr (U::FORM == FORM_S2M) U::mins(p, m0, m1);
    else m0[0] = m0[1] = m1[0] = m1[1] = 0.0f;
}

} // namespace bw
#endif
