/* What the format families share: unaligned loads, inline f16 reading and the declarations that table.c binds to types.def.
 * Internal to formats/; knows no block layout. All multi-byte fields of a block are little-endian. */
#ifndef BW24_FORMATS_INTERNAL_H
#define BW24_FORMATS_INTERNAL_H

#include "formats.h"
#include <string.h>

static inline uint16_t load16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t load32(const uint8_t *p) { return (uint32_t)load16(p) | (uint32_t)load16(p + 2) << 16; }
static inline void store16(uint8_t *p, uint16_t v) { p[0] = (uint8_t)v; p[1] = (uint8_t)(v >> 8); }
static inline void store32(uint8_t *p, uint32_t v) { store16(p, (uint16_t)v); store16(p + 2, (uint16_t)(v >> 16)); }

static inline float float_of_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t bits_of_float(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* f16 bits -> f32, exact; a NaN becomes quiet and keeps its payload. No f32 subnormal is formed, so flush modes cannot matter. */
static inline float half_value(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu;
    uint32_t bits = (mag << 13) + (112u << 23);
    if (mag < 0x400) bits = bits_of_float((float)(int)mag * 0x1p-24f);
    if (mag >= 0x7c00) bits = 0x7f800000u | mag << 13 | (mag > 0x7c00 ? 0x400000u : 0u);
    return float_of_bits(sign | bits);
}

static inline float load_half(const uint8_t *p) { return half_value(load16(p)); }
static inline void store_half(uint8_t *p, float f) { store16(p, bw_f32_to_f16(f)); }

/* a scale (and a minimum) that holds for all 32 values of a group */
static inline void set_scale(bw_group *out, float s, float m) {
    out->s[0] = out->s[1] = s;
    out->m[0] = out->m[1] = m;
}

/* one scale a half, no minimum */
static inline void set_scales(bw_group *out, float s0, float s1) {
    out->s[0] = s0;
    out->s[1] = s1;
    out->m[0] = out->m[1] = 0.0f;
}

/* 16 bytes -> 32 codes less `bias`: low nibbles are values 0..15, high nibbles 16..31 */
static inline void split_nibbles(const uint8_t *restrict qs, int bias, int8_t *restrict q) {
    for (int j = 0; j < 16; j++) {
        q[j] = (int8_t)((qs[j] & 15) - bias);
        q[j + 16] = (int8_t)((qs[j] >> 4) - bias);
    }
}

/* The quantisers' float to int conversions. Truncation: what an int32 cannot hold, NaN included, gives INT32_MIN (the result of
 * x86's instruction, which the reference quantisers' bytes depend on for subnormal scales). */
static inline int32_t trunc_int(float x) { return x >= -0x1p31f && x < 0x1p31f ? (int32_t)x : INT32_MIN; }

/* Round to nearest even by adding 1.5 * 2^23; meant for |x| < 2^22, any other x gives the low bits of that sum */
static inline int32_t near_int(float x) { return (int32_t)(bits_of_float(x + 12582912.0f) & 0x7fffffu) - 0x400000; }

static inline int clamp_int(int v, int lo, int hi) { return v < lo ? lo : (v > hi ? hi : v); }

/* signed value of largest magnitude, the first of equals; NaN is passed over */
static inline float peak(const float *x, int n) {
    float best = 0.0f, mag = 0.0f;
    for (int i = 0; i < n; i++) {
        float a = x[i] < 0.0f ? -x[i] : x[i];
        if (a > mag) { mag = a; best = x[i]; }
    }
    return best;
}

#define FLOAT_CODEC(name) \
    void bw_decode_##name(const uint8_t *src, float *dst); \
    void bw_encode_##name(const float *src, uint8_t *dst, int64_t n)
FLOAT_CODEC(F32); FLOAT_CODEC(F16); FLOAT_CODEC(BF16); FLOAT_CODEC(E4M3);

#define QUANT_CODEC(name) void bw_group_##name(const uint8_t *src, int g, bw_group *out)
QUANT_CODEC(Q4_0); QUANT_CODEC(Q4_1); QUANT_CODEC(Q5_0); QUANT_CODEC(Q5_1); QUANT_CODEC(Q8_0);
QUANT_CODEC(Q2_K); QUANT_CODEC(Q3_K); QUANT_CODEC(Q4_K); QUANT_CODEC(Q5_K); QUANT_CODEC(Q6_K);
QUANT_CODEC(IQ2_XXS); QUANT_CODEC(IQ2_XS); QUANT_CODEC(IQ2_S); QUANT_CODEC(IQ3_XXS); QUANT_CODEC(IQ3_S);
QUANT_CODEC(IQ1_S); QUANT_CODEC(IQ1_M); QUANT_CODEC(IQ4_NL); QUANT_CODEC(IQ4_XS); QUANT_CODEC(MXFP4); QUANT_CODEC(NVFP4);

#define ENCODER(name) void bw_encode_##name(const float *src, uint8_t *dst, int64_t n)
ENCODER(Q4_0); ENCODER(Q4_1); ENCODER(Q5_0); ENCODER(Q5_1); ENCODER(Q8_0); ENCODER(Q4_K); ENCODER(Q5_K); ENCODER(Q6_K);
ENCODER(IQ4_NL); ENCODER(IQ4_XS); ENCODER(MXFP4); ENCODER(NVFP4);

#endif
