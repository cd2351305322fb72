/* The types of 4-bit floats: MXFP4 (one power-of-two scale a block of 32) and NVFP4 (one e4m3 magnitude a 16, blocks of 64).
 * Codes are read as twice the E2M1 value, an integer, and the scale as half of itself. Sign bits of NVFP4 scales are ignored.
 * Layouts: MXFP4 e@0, qs[16]@1; NVFP4 scales[4]@0, qs[32]@4, where byte j of a 16's 8 bytes holds values j (low) and j + 8.
 * NVFP4's scale of a whole tensor lies outside the block and is not known here. */
#include "internal.h"

static const int8_t e2m1_twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 2^(e - 128): half the E8M0 value; a subnormal for e < 2 */
static float e8m0_half(int e) {
    return float_of_bits(e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23);
}

/* half the magnitude of an e4m3 code; the NaN code reads as 0 */
static float ue4m3_half(int c) {
    c &= 127;
    return c == 127 ? 0.0f : bw_e4m3_to_f32((uint8_t)c) * 0.5f;
}

void bw_group_MXFP4(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, e8m0_half(src[0]), 0.0f);
    for (int j = 0; j < 16; j++) {
        out->q[j] = e2m1_twice[src[1 + j] & 15];
        out->q[j + 16] = e2m1_twice[src[1 + j] >> 4];
    }
}

void bw_group_NVFP4(const uint8_t *src, int g, bw_group *out) {
    set_scales(out, ue4m3_half(src[2 * g]), ue4m3_half(src[2 * g + 1]));
    for (int j = 0; j < 16; j++) {
        int byte = src[4 + 16 * g + j], e = 16 * (j >> 3) + (j & 7);
        out->q[e] = e2m1_twice[byte & 15];
        out->q[e + 8] = e2m1_twice[byte >> 4];
    }
}

/* floor(log2(amax)) - 2, biased, taken from the exponent bits. Below 2^-125 the least scale serves (the reference's byte wraps there,
 * and its log2f may round up just below a power of two; both are its faults, not the format's). */
static int mxfp4_exponent(float amax) {
    int e = (int)(bits_of_float(amax) >> 23) - 2;
    return e < 0 ? 0 : e;
}

/* nearest code; of equally near ones the lowest, so ties go toward zero and -0 is never written */
static int mxfp4_code(float x, float s) {
    int best = 0;
    float least = 0.0f;
    for (int c = 0; c < 16; c++) {
        float gap = (float)e2m1_twice[c] * s - x;
        if (gap < 0.0f) gap = -gap;
        if (c == 0 || gap < least) { least = gap; best = c; }
    }
    return best;
}

void bw_encode_MXFP4(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, dst += 17) {
        float top = peak(src + i, 32);
        int e = mxfp4_exponent(top < 0.0f ? -top : top);
        dst[0] = (uint8_t)e;
        float s = e8m0_half(e);
        for (int j = 0; j < 16; j++) dst[1 + j] = (uint8_t)(mxfp4_code(src[i + j], s) | mxfp4_code(src[i + j + 16], s) << 4);
    }
}

/* |x| / scale rounded to E2M1, ties to the even code, saturating; products of a threshold and a scale are exact. -0 is never written */
static int nvfp4_code(float x, float scale) {
    static const float threshold[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    float a = x < 0.0f ? -x : x;
    int c = 0;
    for (int k = 0; k < 7; k++) {
        float t = threshold[k] * scale;
        c += k & 1 ? a >= t : a > t; /* the upper neighbour of an odd k is an even code and takes the tie */
    }
    return c && x < 0.0f ? c | 8 : c;
}

/* Scale of a 16 = amax / 6 in e4m3, nearest even, saturating at 448; 0 where it underflows, and then all codes are 0.
 * This is not the reference quantiser of ggml, whose scales round half up and jump to 448 from 248 on. */
void bw_encode_NVFP4(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += 64, dst += 36) {
        for (int t = 0; t < 4; t++) {
            const float *x = src + i + 16 * t;
            float top = peak(x, 16), amax = top < 0.0f ? -top : top;
            dst[t] = bw_f32_to_e4m3(amax / 6.0f);
            float scale = bw_e4m3_to_f32(dst[t]);
            for (int j = 0; j < 8; j++) {
                int lo = scale > 0.0f ? nvfp4_code(x[j], scale) : 0, hi = scale > 0.0f ? nvfp4_code(x[j + 8], scale) : 0;
                dst[4 + 8 * t + j] = (uint8_t)(lo | hi << 4);
            }
        }
    }
}
