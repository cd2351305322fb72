/* The lattice types, blocks of 256 values: group form of IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S. Decode only.
 * A group's codes are rows of a codebook (grids.h): four rows of 8, or eight rows of 4, with signs beside them.
 * IQ1 shifts a row by +1/8 or -1/8; the codes here are 8 times that, so the scale carries the 1/8. */
#include "grids.h"
#include "internal.h"

/* 7 stored signs -> 8: the eighth makes the number of minus signs even */
static uint32_t even_signs(uint32_t seven) {
    uint32_t i = seven & 127, parity = i ^ i >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return i | (parity & 1) << 7;
}

/* the 28 low bits of w hold the signs of four rows */
static uint32_t four_signs(uint32_t w) {
    return even_signs(w) | even_signs(w >> 7) << 8 | even_signs(w >> 14) << 16 | even_signs(w >> 21) << 24;
}

/* bit e set makes code e negative */
static void apply_signs(uint32_t signs, int8_t *restrict q) {
    for (int e = 0; e < 32; e++) {
        int s = (int)(signs >> e & 1);
        q[e] = (int8_t)((q[e] ^ -s) + s);
    }
}

/* four rows of eight 2-bit fields; 8 + 17 f + f / 2 is {8, 25, 43} */
static void iq2_codes(const uint16_t *restrict row, uint32_t signs, int8_t *restrict q) {
    for (int e = 0; e < 32; e++) {
        int f = row[e >> 3] >> 2 * (e & 7) & 3;
        q[e] = (int8_t)(8 + 17 * f + (f >> 1));
    }
    apply_signs(signs, q);
}

void bw_group_IQ2_XXS(const uint8_t *src, int g, bw_group *out) {
    const uint8_t *p = src + 2 + 8 * g;
    uint32_t w = load32(p + 4);
    uint16_t row[4];
    set_scale(out, load_half(src) * (float)(2 * (int)(w >> 28) + 1) * 0.125f, 0.0f);
    for (int l = 0; l < 4; l++) row[l] = bw_grid_iq2xxs[p[l]];
    iq2_codes(row, four_signs(w), out->q);
}

/* the two 4-bit scales of a group in one byte, low nibble first: d * (n + 1/2) / 4 */
static void iq2_scales(const uint8_t *src, int nibbles, bw_group *out) {
    float d = load_half(src) * 0.125f;
    set_scales(out, d * (float)(2 * (nibbles & 15) + 1), d * (float)(2 * (nibbles >> 4) + 1));
}

void bw_group_IQ2_XS(const uint8_t *src, int g, bw_group *out) {
    uint16_t row[4];
    uint32_t signs = 0;
    iq2_scales(src, src[66 + g], out);
    for (int l = 0; l < 4; l++) {
        uint32_t u = load16(src + 2 + 8 * g + 2 * l);
        row[l] = bw_grid_iq2xs[u & 511];
        signs |= even_signs(u >> 9) << 8 * l;
    }
    iq2_codes(row, signs, out->q);
}

void bw_group_IQ2_S(const uint8_t *src, int g, bw_group *out) {
    const uint8_t *qs = src + 2 + 4 * g;
    uint16_t row[4];
    iq2_scales(src, src[74 + g], out);
    for (int l = 0; l < 4; l++) row[l] = bw_grid_iq2s[qs[l] | (src[66 + g] >> 2 * l & 3) << 8];
    iq2_codes(row, load32(src + 34 + 4 * g), out->q);
}

/* eight rows of four 4-bit fields; 4 + 8 f, and 2 more for f = 7, is {4, 12, .. 52, 62} */
void bw_group_IQ3_XXS(const uint8_t *src, int g, bw_group *out) {
    uint32_t w = load32(src + 66 + 4 * g);
    uint16_t row[8];
    int8_t *restrict q = out->q;
    set_scale(out, load_half(src) * (float)(2 * (int)(w >> 28) + 1) * 0.25f, 0.0f);
    for (int k = 0; k < 8; k++) row[k] = bw_grid_iq3xxs[src[2 + 8 * g + k]];
    for (int e = 0; e < 32; e++) {
        int f = row[e >> 2] >> 4 * (e & 3) & 15;
        q[e] = (int8_t)(4 + 8 * f + ((f + 1) >> 3) * 2);
    }
    apply_signs(four_signs(w), q);
}

void bw_group_IQ3_S(const uint8_t *src, int g, bw_group *out) {
    const uint8_t *qs = src + 2 + 8 * g;
    uint16_t row[8];
    int8_t *restrict q = out->q;
    int n = src[106 + (g >> 1)] >> 4 * (g & 1) & 15;
    set_scale(out, load_half(src) * (float)(2 * n + 1), 0.0f);
    for (int k = 0; k < 8; k++) row[k] = bw_grid_iq3s[qs[k] | (src[66 + g] >> k & 1) << 8];
    for (int e = 0; e < 32; e++) q[e] = (int8_t)(2 * (row[e >> 2] >> 4 * (e & 3) & 15) + 1);
    apply_signs(load32(src + 74 + 4 * g), q);
}

/* eight times (row + shift), shift = -1/8 where `minus`, else +1/8 */
static void iq1_row(uint32_t row, int minus, int8_t *restrict q) {
    for (int j = 0; j < 8; j++) q[j] = (int8_t)(8 * ((int)(row >> 2 * j & 3) - 1) + (minus ? -1 : 1));
}

void bw_group_IQ1_S(const uint8_t *src, int g, bw_group *out) {
    int qh = load16(src + 34 + 2 * g);
    set_scale(out, load_half(src) * (float)(2 * (qh >> 12 & 7) + 1) * 0.125f, 0.0f);
    for (int l = 0; l < 4; l++) {
        int row = src[2 + 4 * g + l] | (qh >> 3 * l & 7) << 8;
        iq1_row(bw_grid_iq1[row], qh & 0x8000, out->q + 8 * l);
    }
}

/* The block scale's f16 bits are the top nibbles of the four scale words; the 12 bits below hold four 3-bit scales of halves */
void bw_group_IQ1_M(const uint8_t *src, int g, bw_group *out) {
    const uint8_t *sc = src + 48;
    int bits = sc[1] >> 4 | (sc[3] >> 4) << 4 | (sc[5] >> 4) << 8 | (sc[7] >> 4) << 12;
    int word = load16(sc + 2 * (g >> 1)) >> 6 * (g & 1);
    float d = half_value((uint16_t)bits) * 0.125f;
    set_scales(out, d * (float)(2 * (word & 7) + 1), d * (float)(2 * (word >> 3 & 7) + 1));
    for (int l = 0; l < 4; l++) {
        int nib = src[32 + 2 * g + (l >> 1)] >> 4 * (l & 1) & 15;
        int row = src[4 * g + l] | (nib & 7) << 8;
        iq1_row(bw_grid_iq1[row], nib & 8, out->q + 8 * l);
    }
}
