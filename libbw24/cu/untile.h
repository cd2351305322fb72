/* From backend cpu's packed tiles (cpu/linear_impl.h) back to a block of the file's rows, byte for byte: what an expert in RAM goes through on its way to
 * a card. One text for C and CUDA; owns the inverse of cpu/pack.c for the types that the card packs itself. */
#ifndef BW24_CU_UNTILE_H
#define BW24_CU_UNTILE_H

#include "../canon.h"

enum { UNTILE_NONE, UNTILE_Q4_0, UNTILE_Q8_0, UNTILE_Q4_K, UNTILE_Q6_K, UNTILE_IQ4_XS, UNTILE_NVFP4 };
enum { UNTILE_ROWS = 16 };

/* head: bytes of a record's head, codes: of a group's codes, per: groups of a record; block: groups of a file's block, bytes: of it */
typedef struct bw_untile { int kind, head, codes, per, block, bytes; } bw_untile;

BW_FN uint32_t bw_untile_load(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
BW_FN void bw_untile_put(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}
BW_FN const uint8_t *bw_untile_head(const bw_untile *u, const uint8_t *tile, int g) { return tile + (int64_t)(g / u->per) * (u->head + u->per * u->codes); }
BW_FN const uint8_t *bw_untile_codes(const bw_untile *u, const uint8_t *tile, int g) { return bw_untile_head(u, tile, g) + u->head + g % u->per * u->codes; }
/* word n of a group's nibbles, of row r */
BW_FN uint32_t bw_untile_word(const bw_untile *u, const uint8_t *tile, int g, int n, int r) { return bw_untile_load(bw_untile_codes(u, tile, g) + 64 * n + 4 * r); }

BW_FN void bw_untile_q4_k(const bw_untile *u, const uint8_t *tile, int g, int r, uint8_t *to) {
    const uint32_t LOW = 0x0f0f0f0f;
    const uint8_t *s = bw_untile_head(u, tile, g);
    to[0] = s[192 + 2 * r]; to[1] = s[193 + 2 * r]; to[2] = s[224 + 2 * r]; to[3] = s[225 + 2 * r];
    for (int i = 0; i < 12; i++) to[4 + i] = s[16 * i + r];
    for (int j = 0; j < 8; j += 2)
        for (int n = 0; n < 4; n++) {
            uint32_t a = bw_untile_word(u, tile, g + j, n, r), b = bw_untile_word(u, tile, g + j + 1, n, r);
            bw_untile_put(to + 16 + 16 * j + 4 * n, (a & LOW) | (b & LOW) << 4);
            bw_untile_put(to + 16 + 16 * j + 4 * (n + 4), (a >> 4 & LOW) | (b & LOW << 4));
        }
}

BW_FN void bw_untile_q6_k(const bw_untile *u, const uint8_t *tile, int g, int r, uint8_t *to) {
    const uint32_t LOW = 0x0f0f0f0f;
    const uint8_t *s = bw_untile_head(u, tile, g);
    for (int i = 0; i < 16; i++) to[192 + i] = s[16 * i + r];
    to[208] = s[256 + 2 * r]; to[209] = s[257 + 2 * r];
    for (int h = 0; h < 2; h++)
        for (int n = 0; n < 8; n++) {
            uint32_t high = 0;
            for (int p = 0; p < 2; p++) {
                uint32_t a = bw_untile_word(u, tile, g + 4 * h + p, n & 3, r), b = bw_untile_word(u, tile, g + 4 * h + p + 2, n & 3, r);
                bw_untile_put(to + 64 * h + 32 * p + 4 * n, n < 4 ? (a & LOW) | (b & LOW) << 4 : (a >> 4 & LOW) | (b & LOW << 4));
            }
            for (int k = 0; k < 4; k++) high |= (bw_untile_load(bw_untile_codes(u, tile, g + 4 * h + k) + 256 + 64 * (n >> 2) + 4 * r) >> 2 * (n & 3) & 0x03030303u) << 2 * k;
            bw_untile_put(to + 128 + 32 * h + 4 * n, high);
        }
}

BW_FN void bw_untile_iq4_xs(const bw_untile *u, const uint8_t *tile, int g, int r, uint8_t *to) {
    const uint8_t *s = bw_untile_head(u, tile, g);
    to[0] = s[2 * r]; to[1] = s[2 * r + 1]; to[2] = s[32 + 2 * r]; to[3] = s[33 + 2 * r];
    for (int i = 0; i < 4; i++) to[4 + i] = s[64 + 16 * i + r];
    for (int j = 0; j < 8; j++)
        for (int n = 0; n < 4; n++) bw_untile_put(to + 8 + 16 * j + 4 * n, bw_untile_word(u, tile, g + j, n, r));
}

BW_FN void bw_untile_nvfp4(const bw_untile *u, const uint8_t *tile, int g, int r, uint8_t *to) {
    const uint32_t LOW = 0x0f0f0f0f;
    for (int k = 0; k < 2; k++) {
        const uint8_t *s = bw_untile_head(u, tile, g + k) + (g + k) % u->per * 32;
        uint32_t w[4];
        for (int n = 0; n < 4; n++) w[n] = bw_untile_word(u, tile, g + k, n, r);
        to[2 * k] = s[r]; to[2 * k + 1] = s[16 + r];
        for (int n = 0; n < 2; n++) {
            bw_untile_put(to + 4 + 16 * k + 4 * n, (w[n] & LOW) | (w[n + 2] & LOW) << 4);
            bw_untile_put(to + 12 + 16 * k + 4 * n, (w[n] >> 4 & LOW) | (w[n + 2] & LOW << 4));
        }
    }
}

/* the file's block that begins with group g of row r of a tile */
BW_FN void bw_untile_block(const bw_untile *u, const uint8_t *tile, int g, int r, uint8_t *to) {
    if (u->kind == UNTILE_Q4_K) bw_untile_q4_k(u, tile, g, r, to);
    else if (u->kind == UNTILE_Q6_K) bw_untile_q6_k(u, tile, g, r, to);
    else if (u->kind == UNTILE_IQ4_XS) bw_untile_iq4_xs(u, tile, g, r, to);
    else if (u->kind == UNTILE_NVFP4) bw_untile_nvfp4(u, tile, g, r, to);
    else {
        const uint8_t *s = bw_untile_head(u, tile, g) + g % u->per * 32 + 2 * r;
        to[0] = s[0]; to[1] = s[1];
        for (int n = 0; n < (u->kind == UNTILE_Q8_0 ? 8 : 4); n++)
            bw_untile_put(to + 2 + 4 * n, bw_untile_word(u, tile, g, n, r) ^ (u->kind == UNTILE_Q8_0 ? 0x80808080u : 0));
    }
}

#endif
