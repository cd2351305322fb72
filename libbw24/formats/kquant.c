/* The K types, blocks of 256 values with two levels of scale: group form of Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
 * Layouts (byte offsets): Q2_K scales[16]@0, qs[64]@16, d@80, dmin@82; Q3_K hmask[32]@0, qs[64]@32, scales[12]@96, d@108;
 * Q4_K d, dmin@2, scales[12]@4, qs[128]@16; Q5_K d, dmin@2, scales[12]@4, qh[32]@16, qs[128]@48;
 * Q6_K ql[128]@0, qh[64]@128, scales[16]@192, d@208. d and dmin are f16. Encoders are in kquant_encode.c. */
#include "internal.h"

/* the 2-bit plane of Q2_K, Q3_K and Q6_K's high bits: 32 bytes serve four groups of one half of the block */
static void two_bits(const uint8_t *restrict plane, int g, int8_t *restrict q) {
    const uint8_t *p = plane + 32 * (g >> 2);
    int shift = 2 * (g & 3);
    for (int l = 0; l < 32; l++) q[l] = (int8_t)(p[l] >> shift & 3);
}

void bw_group_Q2_K(const uint8_t *src, int g, bw_group *out) {
    float d = load_half(src + 80), dmin = load_half(src + 82);
    for (int h = 0; h < 2; h++) {
        int sc = src[2 * g + h];
        out->s[h] = d * (float)(sc & 15);
        out->m[h] = -(dmin * (float)(sc >> 4));
    }
    two_bits(src + 16, g, out->q);
}

/* 6-bit scale j of Q3_K, offset removed: low nibbles in bytes 0..7, high pairs in bytes 8..11 */
static int q3_scale(const uint8_t *sc, int j) {
    int low = j < 8 ? sc[j] & 15 : sc[j - 8] >> 4;
    return (low | (sc[8 + (j & 3)] >> 2 * (j >> 2) & 3) << 4) - 32;
}

void bw_group_Q3_K(const uint8_t *src, int g, bw_group *out) {
    float d = load_half(src + 108);
    set_scales(out, d * (float)q3_scale(src + 96, 2 * g), d * (float)q3_scale(src + 96, 2 * g + 1));
    two_bits(src + 32, g, out->q);
    /* the third bit is stored inverted: a clear bit means minus 4 */
    for (int l = 0; l < 32; l++) out->q[l] = (int8_t)(out->q[l] - (src[l] >> g & 1 ? 0 : 4));
}

/* scale and minimum of group g of Q4_K and Q5_K, from the 16-byte head (d, dmin, 8 + 8 packed 6-bit integers) */
static void q45_scale(const uint8_t *head, int g, bw_group *out) {
    const uint8_t *p = head + 4;
    int sc, m;
    if (g < 4) {
        sc = p[g] & 63;
        m = p[g + 4] & 63;
    } else {
        sc = (p[g + 4] & 15) | (p[g - 4] >> 6) << 4;
        m = p[g + 4] >> 4 | (p[g] >> 6) << 4;
    }
    set_scale(out, load_half(head) * (float)sc, -(load_half(head + 2) * (float)m));
}

void bw_group_Q4_K(const uint8_t *src, int g, bw_group *out) {
    const uint8_t *restrict qs = src + 16 + 32 * (g >> 1);
    int8_t *restrict q = out->q;
    int shift = 4 * (g & 1);
    q45_scale(src, g, out);
    for (int l = 0; l < 32; l++) q[l] = (int8_t)(qs[l] >> shift & 15);
}

void bw_group_Q5_K(const uint8_t *src, int g, bw_group *out) {
    const uint8_t *restrict qs = src + 48 + 32 * (g >> 1), *restrict qh = src + 16;
    int8_t *restrict q = out->q;
    int shift = 4 * (g & 1);
    q45_scale(src, g, out);
    for (int l = 0; l < 32; l++) q[l] = (int8_t)((qs[l] >> shift & 15) | (qh[l] >> g & 1) << 4);
}

void bw_group_Q6_K(const uint8_t *src, int g, bw_group *out) {
    const int8_t *sc = (const int8_t *)src + 192 + 2 * g;
    const uint8_t *restrict ql = src + 64 * (g >> 2) + 32 * (g & 1), *restrict qh = src + 128 + 32 * (g >> 2);
    int8_t *restrict q = out->q;
    int low = 4 * (g >> 1 & 1), high = 2 * (g & 3);
    float d = load_half(src + 208);
    set_scales(out, d * (float)sc[0], d * (float)sc[1]);
    for (int l = 0; l < 32; l++) q[l] = (int8_t)(((ql[l] >> low & 15) | (qh[l] >> high & 3) << 4) - 32);
}
