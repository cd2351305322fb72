/* From the file's rows to packed tiles (layouts: linear_impl.h). Owns every byte order of the packed form; knows no arithmetic on values. */
#include "linear_impl.h"

#include <string.h>

enum { LOW = 0x0f0f0f0f, ONES = 0x01010101, TWOS = 0x03030303 };

static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static void put16(uint8_t *p, const uint8_t *src) { memcpy(p, src, 2); }
static int64_t up64(int64_t n) { return (n + 63) / 64 * 64; }

enum pack_kind pack_kind_of(const bw_type_info *t) {
    static const struct { int id; enum pack_kind kind; } map[] = {
        {2, PACK_Q4_0}, {3, PACK_Q4_1}, {6, PACK_Q5_0}, {7, PACK_Q5_1}, {8, PACK_Q8_0}, {12, PACK_Q4_K}, {13, PACK_Q5_K}, {14, PACK_Q6_K},
        {20, PACK_IQ4_NL}, {23, PACK_IQ4_XS}, {39, PACK_MXFP4}, {40, PACK_NVFP4}, {0, PACK_F32}, {1, PACK_F16}, {30, PACK_BF16}};
    for (size_t i = 0; i < sizeof map / sizeof *map; i++)
        if (map[i].id == t->id) return map[i].kind;
    return PACK_NONE;
}

int64_t pack_tile_bytes(enum pack_kind k, int64_t cols) {
    int64_t g = cols / GROUP, b = cols / SEGMENT;
    switch (k) {
    case PACK_Q4_0: case PACK_IQ4_NL: case PACK_NVFP4: return g * NIB + up64(g * 32);
    case PACK_MXFP4: return g * NIB + up64(g * 16);
    case PACK_Q4_1: return g * (NIB + 64);
    case PACK_Q5_0: return g * (NIB + HIGH1) + up64(g * 32);
    case PACK_Q5_1: return g * (NIB + HIGH1 + 64);
    case PACK_Q8_0: return g * 512 + up64(g * 32);
    case PACK_Q4_K: return b * Q4K_BLOCK;
    case PACK_Q5_K: return b * Q5K_BLOCK;
    case PACK_Q6_K: return b * Q6K_BLOCK + up64(b * 32);
    case PACK_IQ4_XS: return b * IQ4XS_BLOCK;
    case PACK_F32: return cols * 64;
    case PACK_F16: case PACK_BF16: return up64(cols * 32);
    default: return 0;
    }
}

size_t cpu_pack_bytes(const bw_type_info *t, int64_t rows, int64_t cols) {
    return (size_t)(pack_tile_bytes(pack_kind_of(t), cols) * cpu_tiles(rows));
}

/* 4 words of 16 split-order nibbles (low = values 0..15, high = 16..31), as most blocks of 32 hold them */
static void put_nibbles(uint8_t *dst, int r, const uint8_t *qs) {
    for (int n = 0; n < 4; n++) store32(dst + 64 * n + 4 * r, load32(qs + 4 * n));
}

/* 8 words of codes below 16 */
static void put_words(uint8_t *dst, int r, const uint32_t *w) {
    for (int n = 0; n < 4; n++) store32(dst + 64 * n + 4 * r, w[n] | w[n + 4] << 4);
}

/* fifth bits, bit e of the word belonging to value e */
static void put_high1(uint8_t *dst, int r, uint32_t bits) {
    uint32_t out = 0;
    for (int w = 0; w < 8; w++) out |= (((bits >> 4 * w) & 15) * 0x00204081u & ONES) << w;
    store32(dst + 4 * r, out);
}

static void pack_row_nib(uint8_t *tile, int r, const uint8_t *row, int64_t groups, const bw_type_info *t, int halves, int high) {
    int64_t rec = high ? NIB + HIGH1 : NIB;
    uint8_t *plane = tile + groups * rec;
    for (int64_t g = 0; g < groups; g++, row += t->bytes) {
        put_nibbles(tile + g * rec, r, row + t->bytes - 16);
        if (high) put_high1(tile + g * rec + NIB, r, load32(row + 2 * halves));
        for (int k = 0; k < halves; k++) put16(plane + (g * halves + k) * 32 + 2 * r, row + 2 * k);
    }
}

static void pack_row_q8_0(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, row += 34) {
        for (int w = 0; w < 8; w++) store32(tile + g * 512 + 64 * w + 4 * r, load32(row + 2 + 4 * w) ^ 0x80808080u);
        put16(tile + groups * 512 + g * 32 + 2 * r, row);
    }
}

static void pack_row_mxfp4(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, row += 17) {
        put_nibbles(tile + g * NIB, r, row + 1);
        tile[groups * NIB + g * 16 + r] = row[0];
    }
}

/* the file pairs values j and j + 8 of a 16; the tile pairs the two 16s of a group */
static void pack_row_nvfp4(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *src = row + g / 2 * 36, *qs = src + 4 + 16 * (g & 1);
        uint32_t a = load32(qs), b = load32(qs + 4), c = load32(qs + 8), d = load32(qs + 12);
        uint32_t w[8] = {a & LOW, b & LOW, a >> 4 & LOW, b >> 4 & LOW, c & LOW, d & LOW, c >> 4 & LOW, d >> 4 & LOW};
        put_words(tile + g * NIB, r, w);
        uint8_t *s = tile + groups * NIB + g * 32;
        s[r] = src[2 * (g & 1)];
        s[16 + r] = src[2 * (g & 1) + 1];
    }
}

/* Q4_K and Q5_K: 32 bytes serve two groups by their nibbles, qh bit j of byte e is the fifth bit of value e of group j */
static void pack_row_q45k(uint8_t *tile, int r, const uint8_t *row, int64_t blocks, int high) {
    int64_t rec = high ? NIB + HIGH1 : NIB, size = high ? Q5K_BLOCK : Q4K_BLOCK;
    for (int64_t b = 0; b < blocks; b++, row += high ? 176 : 144, tile += size) {
        const uint8_t *qs = row + (high ? 48 : 16), *qh = row + 16;
        for (int j = 0; j < 8; j++) {
            uint32_t w[8], bits = 0;
            for (int n = 0; n < 8; n++) {
                w[n] = load32(qs + 32 * (j >> 1) + 4 * n) >> 4 * (j & 1) & LOW;
                if (high) bits |= (load32(qh + 4 * n) >> j & ONES) << n;
            }
            put_words(tile + j * rec, r, w);
            if (high) store32(tile + j * rec + NIB + 4 * r, bits);
        }
        uint8_t *s = tile + 8 * rec;
        for (int i = 0; i < 12; i++) s[16 * i + r] = row[4 + i];
        put16(s + 192 + 2 * r, row);
        put16(s + 224 + 2 * r, row + 2);
    }
}

static void pack_row_q6k(uint8_t *tile, int r, const uint8_t *row, int64_t blocks) {
    uint8_t *plane = tile + blocks * Q6K_BLOCK;
    for (int64_t b = 0; b < blocks; b++, row += 210, tile += Q6K_BLOCK) {
        for (int j = 0; j < 8; j++) {
            const uint8_t *ql = row + 64 * (j >> 2) + 32 * (j & 1), *qh = row + 128 + 32 * (j >> 2);
            uint32_t w[8], high[2] = {0, 0};
            for (int n = 0; n < 8; n++) {
                w[n] = load32(ql + 4 * n) >> (j & 2 ? 4 : 0) & LOW;
                high[n >> 2] |= (load32(qh + 4 * n) >> 2 * (j & 3) & TWOS) << 2 * (n & 3);
            }
            put_words(tile + j * (NIB + HIGH2), r, w);
            for (int k = 0; k < 2; k++) store32(tile + j * (NIB + HIGH2) + NIB + 64 * k + 4 * r, high[k]);
        }
        for (int i = 0; i < 16; i++) tile[8 * (NIB + HIGH2) + 16 * i + r] = row[192 + i];
        put16(plane + 32 * b + 2 * r, row + 208);
    }
}

static void pack_row_iq4xs(uint8_t *tile, int r, const uint8_t *row, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++, row += 136, tile += IQ4XS_BLOCK) {
        for (int j = 0; j < 8; j++) put_nibbles(tile + j * NIB, r, row + 8 + 16 * j);
        uint8_t *s = tile + 8 * NIB;
        put16(s + 2 * r, row);
        put16(s + 32 + 2 * r, row + 2);
        for (int i = 0; i < 4; i++) s[64 + 16 * i + r] = row[4 + i];
    }
}

static void pack_row_float(uint8_t *tile, int r, const uint8_t *row, int64_t cols, int size) {
    for (int64_t c = 0; c < cols; c++) memcpy(tile + (c * CPU_TILE + r) * size, row + c * size, (size_t)size);
}

static void pack_row(enum pack_kind k, const bw_type_info *t, uint8_t *tile, int r, const uint8_t *row, int64_t cols) {
    int64_t groups = cols / GROUP, blocks = cols / SEGMENT;
    switch (k) {
    case PACK_Q4_0: case PACK_IQ4_NL: pack_row_nib(tile, r, row, groups, t, 1, 0); break;
    case PACK_Q4_1: pack_row_nib(tile, r, row, groups, t, 2, 0); break;
    case PACK_Q5_0: pack_row_nib(tile, r, row, groups, t, 1, 1); break;
    case PACK_Q5_1: pack_row_nib(tile, r, row, groups, t, 2, 1); break;
    case PACK_Q8_0: pack_row_q8_0(tile, r, row, groups); break;
    case PACK_Q4_K: pack_row_q45k(tile, r, row, blocks, 0); break;
    case PACK_Q5_K: pack_row_q45k(tile, r, row, blocks, 1); break;
    case PACK_Q6_K: pack_row_q6k(tile, r, row, blocks); break;
    case PACK_IQ4_XS: pack_row_iq4xs(tile, r, row, blocks); break;
    case PACK_MXFP4: pack_row_mxfp4(tile, r, row, groups); break;
    case PACK_NVFP4: pack_row_nvfp4(tile, r, row, groups); break;
    case PACK_F32: pack_row_float(tile, r, row, cols, 4); break;
    case PACK_F16: case PACK_BF16: pack_row_float(tile, r, row, cols, 2); break;
    default: break;
    }
}

void cpu_pack_tiles(cpu_mat *m, const uint8_t *src, int64_t tile0, int64_t tile1) {
    enum pack_kind k = pack_kind_of(m->type);
    int64_t size = pack_tile_bytes(k, m->cols), row_bytes = bw_row_bytes(m->type, m->cols);
    for (int64_t t = tile0; t < tile1; t++) {
        int64_t first = t * CPU_TILE, n = m->rows - first < CPU_TILE ? m->rows - first : CPU_TILE;
        uint8_t *tile = m->data + t * size;
        if (n < CPU_TILE) memset(tile, 0, (size_t)size);
        for (int r = 0; r < n; r++) pack_row(k, m->type, tile, r, src + (first + r) * row_bytes, m->cols);
    }
}
