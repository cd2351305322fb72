/* Weights in fragment order. Owns the device layout of quantised matrices and how a lane reads it; knows no kernel.
 *
 * A unit is 16 rows x 256 columns (8 groups of 32), padded with zeros past the matrix:
 *   [half 0: groups 0-3][half 1: groups 4-7][scales of 16 rows]
 * A half is packs [pack][r][lane]: lane (gid = lane / 4, tig = lane % 4) finds the codes of row gid + 8r, words tig and tig + 4
 * (columns 4 tig .. 4 tig + 3 and 16 more) of each group, which are the A registers of mma m16n8k32. So one 16-byte load per
 * lane is both coalesced from device memory and free of bank conflicts from shared memory, and no transposition exists.
 * A matrix is units [row / 16][column / 256].
 *
 * A type gives: FORM, GP (groups a pack), PACKS (packs a half and r), HALF and SCALE (bytes), load_pack, unpack -> two words of
 * int8 codes, load_scale, pair -> the scales of groups 2w and 2w + 1 (a; b: second scale, or the minimum of S1M; S2M: mins -> the two
 * minima). Codes may come multiplied by a power of two that the scale takes back, exactly.
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
/* byte i of w as a float, exact, without the conversion unit */
__device__ __forceinline__ float byte_of(uint32_t w, int i) { return __uint_as_float(prmt(w, 0x4b000000u, 0x7440 + i)) - 8388608.0f; }

/* element e of a group of int8 codes lies in word e / 4: byte offset of the code in a half of U_Q8_0's and the generic units' shape */
__host__ __device__ inline int int8_place(int c, int row, int e) {
    int word = e >> 2, lane = (row & 7) * 4 + (word & 3);
    return ((c >> 1) * 2 + (row >> 3)) * 512 + lane * 16 + (c & 1) * 8 + (word >> 2) * 4 + (e & 3);
}

struct Pack4 { uint4 v; };
struct Scale16 { uint4 v; };

/* four-bit codes: one 16-byte load holds 4 groups, low nibbles = word tig, high nibbles = word tig + 4 */
struct Nibbles {
    static constexpr int GP = 4, PACKS = 1, HALF = 1024, SCALE = 256, UNIT = 2 * HALF + SCALE;
    typedef Pack4 Pack;
    typedef Scale16 Scale;
    template <bool SHARED> static __device__ __forceinline__ Pack load_pack(const uint8_t *half, int, int r, int lane) {
        Pack p; p.v = ld16<SHARED>(half + r * 512 + lane * 16); return p;
    }
    template <bool SHARED> static __device__ __forceinline__ Scale load_scale(const uint8_t *scales, int row) {
        Scale s; s.v = ld16<SHARED>(scales + row * 16); return s;
    }
};

/* nibble = two's complement of q; codes are 16 q */
struct U_Q4_0 : Nibbles {
    static constexpr Form FORM = FORM_S1;
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        uint32_t w = word_of(p.v, c);
        lo = (w << 4) & 0xf0f0f0f0u; hi = w & 0xf0f0f0f0u;
    }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        uint32_t v = word_of(s.v, w);
        a[0] = half_of(v, 0) * 0.0625f; a[1] = half_of(v, 1) * 0.0625f; b[0] = b[1] = 0.0f;
    }
};

/* nibble = q; the scale row is the block's 16-byte header (d, dmin, 12 bytes of 6-bit scales and minima) */
struct U_Q4_K : Nibbles {
    static constexpr Form FORM = FORM_S1M;
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        uint32_t w = word_of(p.v, c);
        lo = w & 0x0f0f0f0fu; hi = (w >> 4) & 0x0f0f0f0fu;
    }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        uint32_t sc, mn;
        if (w < 2) { sc = s.v.y & 0x3f3f3f3fu; mn = s.v.z & 0x3f3f3f3fu; }
        else {
            sc = (s.v.w & 0x0f0f0f0fu) | ((s.v.y >> 2) & 0x30303030u);
            mn = ((s.v.w >> 4) & 0x0f0f0f0fu) | ((s.v.z >> 2) & 0x30303030u);
        }
        if (w & 1) { sc >>= 16; mn >>= 16; }
        float d = half_of(s.v.x, 0), m = -half_of(s.v.x, 1);
        a[0] = d * byte_of(sc, 0); a[1] = d * byte_of(sc, 1);
        b[0] = m * byte_of(mn, 0); b[1] = m * byte_of(mn, 1);
    }
};

/* UE4M3 without sign, half value; 0x7f is stored as 0 */
__device__ __forceinline__ float ue4m3_half(uint32_t c) { return __uint_as_float(c << 20) * 0x1p119f; }

/* four nibbles of a 16-bit selector through a table of 16 bytes */
__device__ __forceinline__ uint32_t table4(uint32_t sel, uint32_t pick, const uint32_t *t) {
    return prmt(prmt(t[0], t[1], sel), prmt(t[2], t[3], sel), pick);
}

/* E2M1 codes, values doubled; the low 16 bits of a word are word tig, the high 16 bits word tig + 4, columns ascending; one scale a half */
struct U_NVFP4 : Nibbles {
    static constexpr Form FORM = FORM_S2;
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        const uint32_t t[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
        uint32_t w = word_of(p.v, c), sel = w & 0x77777777u, pick = ((w >> 1) & 0x44444444u) | 0x32103210u;
        lo = table4(sel, pick, t); hi = table4(sel >> 16, pick >> 16, t);
    }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        uint32_t v = word_of(s.v, w);
        a[0] = ue4m3_half(v & 255); b[0] = ue4m3_half((v >> 8) & 255); a[1] = ue4m3_half((v >> 16) & 255); b[1] = ue4m3_half(v >> 24);
    }
};

/* nibbles as U_NVFP4's, values by IQ4's table; scales: for each pair of groups d (f16) and 32 + the factor of each, a byte */
struct U_IQ4_XS : Nibbles {
    static constexpr Form FORM = FORM_S1;
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        const uint32_t t[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
        uint32_t w = word_of(p.v, c), sel = w & 0x77777777u, pick = ((w >> 1) & 0x44444444u) | 0x32103210u;
        lo = table4(sel, pick, t); hi = table4(sel >> 16, pick >> 16, t);
    }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        uint32_t v = word_of(s.v, w);
        float d = half_of(v, 0);
        a[0] = d * (float)((int)(v >> 16 & 255) - 32); a[1] = d * (float)((int)(v >> 24) - 32); b[0] = b[1] = 0.0f;
    }
};

/* int8 codes as stored; a 16-byte load holds 2 groups (word tig, word tig + 4 of each) */
struct U_Q8_0 : Nibbles {
    static constexpr Form FORM = FORM_S1;
    static constexpr int GP = 2, PACKS = 2, HALF = 2048, UNIT = 2 * HALF + SCALE;
    template <bool SHARED> static __device__ __forceinline__ Pack load_pack(const uint8_t *half, int pk, int r, int lane) {
        Pack p; p.v = ld16<SHARED>(half + (pk * 2 + r) * 512 + lane * 16); return p;
    }
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        lo = c ? p.v.z : p.v.x; hi = c ? p.v.w : p.v.y;
    }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        uint32_t v = word_of(s.v, w);
        a[0] = half_of(v, 0); a[1] = half_of(v, 1); b[0] = b[1] = 0.0f;
    }
};

/* low nibbles as Nibbles, then 2 high bits of 8 values a group; codes are 4 q (top bit inverted at repack); scales int8 per 16, d f16 */
struct U_Q6_K {
    static constexpr Form FORM = FORM_S2;
    static constexpr int GP = 4, PACKS = 1, HALF = 1536, SCALE = 288, UNIT = 2 * HALF + SCALE;
    struct Pack { uint4 v; uint2 h; };
    struct Scale { uint4 v; uint16_t d; };
    template <bool SHARED> static __device__ __forceinline__ Pack load_pack(const uint8_t *half, int, int r, int lane) {
        Pack p; p.v = ld16<SHARED>(half + r * 512 + lane * 16); p.h = ld8<SHARED>(half + 1024 + r * 256 + lane * 8); return p;
    }
    static __device__ __forceinline__ void unpack(const Pack &p, int c, uint32_t &lo, uint32_t &hi) {
        uint32_t w = word_of(p.v, c), h = c < 2 ? p.h.x : p.h.y;
        uint32_t hl = (c & 1) ? h << 2 : h << 6, hh = (c & 1) ? h : h << 4;
        lo = ((w << 2) & 0x3c3c3c3cu) | (hl & 0xc0c0c0c0u);
        hi = ((w >> 2) & 0x3c3c3c3cu) | (hh & 0xc0c0c0c0u);
    }
    template <bool SHARED> static __device__ __forceinline__ Scale load_scale(const uint8_t *scales, int row) {
        Scale s; s.v = ld16<SHARED>(scales + row * 16); s.d = *(const uint16_t *)(scales + 256 + row * 2); return s;
    }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        uint32_t v = word_of(s.v, w) ^ 0x80808080u; /* int8 + 128 as bytes */
        float d = half_of(s.d, 0) * 0.25f;
        a[0] = d * (byte_of(v, 0) - 128.0f); b[0] = d * (byte_of(v, 1) - 128.0f);
        a[1] = d * (byte_of(v, 2) - 128.0f); b[1] = d * (byte_of(v, 3) - 128.0f);
    }
};

/* codes as U_Q8_0; scales a row: 8 scales, then 8 minima, f32 */
struct U_INT8 : U_Q8_0 {
    static constexpr Form FORM = FORM_S1M;
    static constexpr int SCALE = 1024, UNIT = 2 * HALF + SCALE;
    struct Scale { const float *p; };
    template <bool SHARED> static __device__ __forceinline__ Scale load_scale(const uint8_t *scales, int row) { return {(const float *)(scales + row * 64)}; }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        float2 x = *(const float2 *)(s.p + 2 * w), m = *(const float2 *)(s.p + 8 + 2 * w);
        a[0] = x.x; a[1] = x.y; b[0] = m.x; b[1] = m.y;
    }
};

/* codes as U_Q8_0; scales a row: (s0, s1) of 8 groups, then (m0, m1) of 8 groups, f32 */
struct U_INT8H : U_Q8_0 {
    static constexpr Form FORM = FORM_S2M;
    static constexpr int SCALE = 2048, UNIT = 2 * HALF + SCALE;
    struct Scale { const float *p; };
    template <bool SHARED> static __device__ __forceinline__ Scale load_scale(const uint8_t *scales, int row) { return {(const float *)(scales + row * 128)}; }
    static __device__ __forceinline__ void pair(const Scale &s, int w, float *a, float *b) {
        float4 x = *(const float4 *)(s.p + 4 * w);
        a[0] = x.x; b[0] = x.y; a[1] = x.z; b[1] = x.w;
    }
    static __device__ __forceinline__ void mins(const Scale &s, int w, float *m0, float *m1) {
        float4 x = *(const float4 *)(s.p + 16 + 4 * w);
        m0[0] = x.x; m1[0] = x.y; m0[1] = x.z; m1[1] = x.w;
    }
};

/* the minima of a unit's pair; nothing for the forms that keep none apart */
template <class U> __device__ __forceinline__ void unit_mins(const typename U::Scale &s, int w, float *m0, float *m1) {
    if constexpr (U::FORM == FORM_S2M) U::mins(s, w, m0, m1);
    else m0[0] = m0[1] = m1[0] = m1[1] = 0.0f;
}

} // namespace bw
#endif
