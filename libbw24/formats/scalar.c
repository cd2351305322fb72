/* Scalar conversions between f32 and f16, bf16, e4m3, and the codecs of the types that hold one number a value.
 * Integer operations only: results do not depend on the rounding or flush mode of the caller. Knows no quantised block. */
#include "internal.h"

float bw_f16_to_f32(uint16_t h) { return half_value(h); }

/* mag >> shift, rounded to nearest even; 1 <= shift <= 31 */
static uint32_t shift_even(uint32_t mag, int shift) {
    uint32_t half = (1u << (shift - 1)) - 1 + (mag >> shift & 1);
    return (mag + half) >> shift;
}

uint16_t bw_f32_to_f16(float f) {
    uint32_t bits = bits_of_float(f), mag = bits & 0x7fffffffu;
    uint32_t sign = bits >> 16 & 0x8000u, h;
    if (mag > 0x7f800000u) h = 0x7e00;
    else if (mag >= 0x477ff000u) h = 0x7c00;                     /* 65520 and more round to Inf */
    else if (mag >= 0x38800000u) h = shift_even(mag - (112u << 23), 13); /* normal: 2^-14 and more */
    else if (mag <= 0x33000000u) h = 0;                          /* 2^-25 is a tie to zero */
    else h = shift_even((mag & 0x7fffffu) | 0x800000u, 126 - (int)(mag >> 23)); /* subnormal: units of 2^-24 */
    return (uint16_t)(sign | h);
}

float bw_bf16_to_f32(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

uint16_t bw_f32_to_bf16(float f) {
    uint32_t bits = bits_of_float(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float bw_e4m3_to_f32(uint8_t c) {
    uint32_t sign = (uint32_t)(c & 0x80u) << 24, mag = c & 0x7fu;
    uint32_t bits = (mag << 20) + (120u << 23);
    if (mag < 8) bits = bits_of_float((float)(int)mag * 0x1p-9f);
    if (mag == 0x7f) bits = 0x7fc00000u;
    return float_of_bits(sign | bits);
}

uint8_t bw_f32_to_e4m3(float f) {
    uint32_t bits = bits_of_float(f), mag = bits & 0x7fffffffu;
    uint32_t sign = bits >> 24 & 0x80u, c;
    if (mag > 0x7f800000u) return 0x7f;
    if (mag >= 0x43e00000u) c = 0x7e;                              /* 448 and more saturate */
    else if (mag >= 0x3c800000u) c = shift_even(mag - (120u << 23), 20); /* normal: 2^-6 and more */
    else if (mag <= 0x3a800000u) c = 0;                            /* 2^-10 is a tie to zero */
    else c = shift_even((mag & 0x7fffffu) | 0x800000u, 141 - (int)(mag >> 23)); /* subnormal: units of 2^-9 */
    return (uint8_t)(sign | c);
}

void bw_decode_F32(const uint8_t *src, float *dst) { *dst = float_of_bits(load32(src)); }
void bw_decode_F16(const uint8_t *src, float *dst) { *dst = load_half(src); }
void bw_decode_BF16(const uint8_t *src, float *dst) { *dst = bw_bf16_to_f32(load16(src)); }
void bw_decode_E4M3(const uint8_t *src, float *dst) { *dst = bw_e4m3_to_f32(*src); }

void bw_encode_F32(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) store32(dst + 4 * i, bits_of_float(src[i]));
}

void bw_encode_F16(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) store16(dst + 2 * i, bw_f32_to_f16(src[i]));
}

void bw_encode_BF16(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) store16(dst + 2 * i, bw_f32_to_bf16(src[i]));
}

void bw_encode_E4M3(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = bw_f32_to_e4m3(src[i]);
}
