/* The types of one f16 scale (and minimum) a block of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Group form and encoders.
 * Layouts (byte offsets): Q4_0 d, nibbles@2; Q4_1 d, m@2, nibbles@4; Q5_0 d, fifth bits u32@2, nibbles@6;
 * Q5_1 d, m@2, fifth bits@4, nibbles@8; Q8_0 d, int8@2. Nibble order: see split_nibbles. */
#include "internal.h"

/* bit e of the word becomes bit 4 of code e */
static void add_fifth_bits(uint32_t bits, int8_t *restrict q) {
    for (int e = 0; e < 32; e++) q[e] = (int8_t)(q[e] + (int)((bits >> e & 1) << 4));
}

void bw_group_Q4_0(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, load_half(src), 0.0f);
    split_nibbles(src + 2, 8, out->q);
}

void bw_group_Q4_1(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, load_half(src), load_half(src + 2));
    split_nibbles(src + 4, 0, out->q);
}

void bw_group_Q5_0(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, load_half(src), 0.0f);
    split_nibbles(src + 6, 16, out->q);
    add_fifth_bits(load32(src + 2), out->q);
}

void bw_group_Q5_1(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, load_half(src), load_half(src + 2));
    split_nibbles(src + 8, 0, out->q);
    add_fifth_bits(load32(src + 4), out->q);
}

void bw_group_Q8_0(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, load_half(src), 0.0f);
    memcpy(out->q, src + 2, 32);
}

/* A code of a shifted value: truncated to a byte as the reference does, then at most `top` */
static uint8_t trunc_code(float x, int top) {
    int v = (int8_t)(uint8_t)((uint32_t)trunc_int(x) & 255u);
    return (uint8_t)(v < top ? v : top);
}

/* 32 codes below 16 (below 32 where `high` is given) -> nibbles and fifth bits */
static void store_codes(const uint8_t *code, uint8_t *qs, uint8_t *high) {
    uint32_t bits = 0;
    for (int j = 0; j < 16; j++) {
        qs[j] = (uint8_t)((code[j] & 15) | (code[j + 16] & 15) << 4);
        bits |= (uint32_t)(code[j] >> 4 & 1) << j | (uint32_t)(code[j + 16] >> 4 & 1) << (j + 16);
    }
    if (high) store32(high, bits);
}

/* Symmetric: the value of largest magnitude is code 0, i.e. -half; half = 8 or 16 */
static void symmetric_codes(const float *x, int half, uint8_t *dst, uint8_t *code) {
    float d = peak(x, 32) / (float)-half, inv = d != 0.0f ? 1.0f / d : 0.0f;
    store_half(dst, d);
    for (int i = 0; i < 32; i++) {
        float v = x[i] * inv;
        code[i] = trunc_code(v + ((float)half + 0.5f), 2 * half - 1);
    }
}

/* Affine: minimum is code 0, maximum code `top` */
static void affine_codes(const float *x, int top, uint8_t *dst, uint8_t *code) {
    float lo = x[0], hi = x[0];
    for (int i = 1; i < 32; i++) {
        if (x[i] < lo) lo = x[i];
        if (x[i] > hi) hi = x[i];
    }
    float d = (hi - lo) / (float)top, inv = d != 0.0f ? 1.0f / d : 0.0f;
    store_half(dst, d);
    store_half(dst + 2, lo);
    for (int i = 0; i < 32; i++) {
        float v = (x[i] - lo) * inv;
        code[i] = trunc_code(v + 0.5f, top);
    }
}

void bw_encode_Q4_0(const float *src, uint8_t *dst, int64_t n) {
    uint8_t code[32];
    for (int64_t i = 0; i < n; i += 32, dst += 18) {
        symmetric_codes(src + i, 8, dst, code);
        store_codes(code, dst + 2, NULL);
    }
}

void bw_encode_Q4_1(const float *src, uint8_t *dst, int64_t n) {
    uint8_t code[32];
    for (int64_t i = 0; i < n; i += 32, dst += 20) {
        affine_codes(src + i, 15, dst, code);
        store_codes(code, dst + 4, NULL);
    }
}

void bw_encode_Q5_0(const float *src, uint8_t *dst, int64_t n) {
    uint8_t code[32];
    for (int64_t i = 0; i < n; i += 32, dst += 22) {
        symmetric_codes(src + i, 16, dst, code);
        store_codes(code, dst + 6, dst + 2);
    }
}

void bw_encode_Q5_1(const float *src, uint8_t *dst, int64_t n) {
    uint8_t code[32];
    for (int64_t i = 0; i < n; i += 32, dst += 24) {
        affine_codes(src + i, 31, dst, code);
        store_codes(code, dst + 8, dst + 4);
    }
}

/* round half away from zero, to a byte (the truncated value's low byte where an int32 cannot hold it) */
static uint8_t round_away(float x) {
    int32_t t = trunc_int(x);
    if (t == INT32_MIN) return 0;
    float rest = x - (float)t;
    return (uint8_t)(t + (rest >= 0.5f) - (rest <= -0.5f));
}

void bw_encode_Q8_0(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, dst += 34) {
        float top = peak(src + i, 32), d = (top < 0.0f ? -top : top) / 127.0f;
        float inv = d != 0.0f ? 1.0f / d : 0.0f;
        store_half(dst, d);
        for (int j = 0; j < 32; j++) dst[2 + j] = round_away(src[i + j] * inv);
    }
}
