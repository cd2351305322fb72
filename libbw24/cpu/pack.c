/* From the file's rows to packed tiles (layouts: linear_impl.h). Owns every byte order of the packed form; knows no arithmetic on values */
#include "linear_impl.h"

#include <string.h>

enum { LOW = 0x0f0f0f0f, ONES = 0x01010101, TWOS = 0x03030303 };

static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static void put16(uint8_t *p, const uint8_t *src) { memcpy(p, src, 2); }

enum pack_kind pack_kind_of(const bw_type_info *t) {
    static const struct { int id; enum pack_kind kind; } map[] = {
        {2, PACK_Q4_0}, {3, PACK_Q4_1}, {6, PACK_Q5_0}, {7, PACK_Q5_1}, {8, PACK_Q8_0}, {12, PACK_Q4_K}, {13, PACK_Q5_K}, {14, PACK_Q6_K},
        {20, PACK_IQ4_NL}, {23, PACK_IQ4_XS}, {39, PACK_MXFP4}, {40, PACK_NVFP4}, {0, PACK_F32}, {1, PACK_F16}, {30, PACK_BF16}};
    for (size_t i = 0; i < sizeof map / sizeof *map; i++)
        if (map[i].id == t->id) return map[i].kind;
    return PACK_NONE;
}

int64_t pack_tile_bytes(enum pack_kind k, int64_t cols) {
    int64_t groups = cols / GROUP;
    switch (k) {
    case PACK_NONE: return 0;
    case PACK_F32: return cols * 64;
    case PACK_F16: case PACK_BF16: return (cols + 1) / 2 * 64;
    default: return (groups + head_groups(k) - 1) / head_groups(k) * head_bytes(k) + groups * code_bytes(k);
    }
}

size_t cpu_pack_bytes(const bw_type_info *t, int64_t rows, int64_t cols) {
    return (size_t)(pack_tile_bytes(pack_kind_of(t), cols) * cpu_tiles(rows));
}

int cpu_tile_layout(const bw_type_info *t, int *head, int *codes, int *per) {
    enum pack_kind k = pack_kind_of(t);
    *head = (int)head_bytes(k);
    *codes = (int)code_bytes(k);
    *per = head_groups(k);
    return k != PACK_NONE && k < PACK_F32;
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

/* blocks of 32 with f16 scales: d, or d and m, then perhaps the fifth bits, then the nibbles */
static void pack_row_nib(uint8_t *tile, int r, const uint8_t *row, int64_t groups, const bw_type_info *t, enum pack_kind k) {
    int halves = form_of(k) == BW_S1M ? 2 : 1, per = head_groups(k);
    for (int64_t g = 0; g < groups; g++, row += t->bytes) {
        uint8_t *codes = tile + codes_at(k, g), *scales = tile + head_at(k, g) + g % per * 32;
        put_nibbles(codes, r, row + t->bytes - 16);
        if (code_bytes(k) > NIB) put_high1(codes + NIB, r, load32(row + 2 * halves));
        for (int i = 0; i < halves; i++) put16(scales + 32 * i + 2 * r, row + 2 * i);
    }
}

static void pack_row_q8_0(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, row += 34) {
        uint8_t *codes = tile + codes_at(PACK_Q8_0, g);
        for (int w = 0; w < 8; w++) store32(codes + 64 * w + 4 * r, load32(row + 2 + 4 * w) ^ 0x80808080u);
        put16(tile + head_at(PACK_Q8_0, g) + g % 2 * 32 + 2 * r, row);
    }
}

static void pack_row_mxfp4(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, row += 17) {
        put_nibbles(tile + codes_at(PACK_MXFP4, g), r, row + 1);
        tile[head_at(PACK_MXFP4, g) + g % 4 * 16 + r] = row[0];
    }
}

/* the file pairs values j and j + 8 of a 16; the tile pairs the two 16s of a group */
static void pack_row_nvfp4(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *src = row + g / 2 * 36, *qs = src + 4 + 16 * (g & 1);
        uint32_t a = load32(qs), b = load32(qs + 4), c = load32(qs + 8), d = load32(qs + 12);
        uint32_t w[8] = {a & LOW, b & LOW, a >> 4 & LOW, b >> 4 & LOW, c & LOW, d & LOW, c >> 4 & LOW, d >> 4 & LOW};
        put_words(tile + codes_at(PACK_NVFP4, g), r, w);
        uint8_t *s = tile + head_at(PACK_NVFP4, g) + g % 2 * 32;
        s[r] = src[2 * (g & 1)];
        s[16 + r] = src[2 * (g & 1) + 1];
    }
}

/* ---- four rows at once: their words are exchanged in vectors, as stores of 4 bytes that lie 64 apart are slow */
enum { TOGETHER = 4 };
typedef uint32_t v4 __attribute__((vector_size(16)));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (v4){__VA_ARGS__})
#endif

static v4 load_words(const uint8_t *p) { v4 v; memcpy(&v, p, sizeof v); return v; }
static void store_words(uint8_t *p, v4 v) { memcpy(p, &v, sizeof v); }

/* word n of row i of the four goes to 64 n + 4 i */
INL void put_turned(uint8_t *dst, v4 a, v4 b, v4 c, v4 d) {
    v4 ab = PICK(a, b, 0, 4, 1, 5), cd = PICK(c, d, 0, 4, 1, 5), ab2 = PICK(a, b, 2, 6, 3, 7), cd2 = PICK(c, d, 2, 6, 3, 7);
    store_words(dst, PICK(ab, cd, 0, 1, 4, 5));
    store_words(dst + 64, PICK(ab, cd, 2, 3, 6, 7));
    store_words(dst + 128, PICK(ab2, cd2, 0, 1, 4, 5));
    store_words(dst + 192, PICK(ab2, cd2, 2, 3, 6, 7));
}

/* the byte i of four rows, 16 bytes long, goes to 16 i + row */
static void put_bytes(uint8_t *dst, const uint8_t *row, int64_t row_bytes, int n) {
    for (int i = 0; i < n; i++)
        store32(dst + 16 * i, (uint32_t)row[i] | (uint32_t)row[row_bytes + i] << 8 | (uint32_t)row[2 * row_bytes + i] << 16 | (uint32_t)row[3 * row_bytes + i] << 24);
}

/* Q4_K: 32 bytes serve two groups by their nibbles */
static void pack_four_q4k(uint8_t *tile, int r, const uint8_t *row, int64_t row_bytes, int64_t groups) {
    for (int64_t g = 0; g < groups; g += 8, row += 144) {
        for (int j = 0; j < 8; j += 2) {
            uint8_t *codes = tile + codes_at(PACK_Q4_K, g + j) + 4 * r;
            v4 even[TOGETHER], odd[TOGETHER];
            for (int i = 0; i < TOGETHER; i++) {
                const uint8_t *qs = row + i * row_bytes + 16 + 16 * j;
                v4 a = load_words(qs), b = load_words(qs + 16);
                even[i] = (a & LOW) | (b & LOW) << 4;
                odd[i] = (a >> 4 & LOW) | (b & ~(uint32_t)LOW);
            }
            put_turned(codes, even[0], even[1], even[2], even[3]);
            put_turned(codes + NIB, odd[0], odd[1], odd[2], odd[3]);
        }
        uint8_t *s = tile + head_at(PACK_Q4_K, g);
        put_bytes(s + r, row + 4, row_bytes, 12);
        for (int i = 0; i < TOGETHER; i++) {
            put16(s + 192 + 2 * (r + i), row + i * row_bytes);
            put16(s + 224 + 2 * (r + i), row + i * row_bytes + 2);
        }
    }
}

/* Q4_K and Q5_K: 32 bytes serve two groups by their nibbles, qh bit j of byte e is the fifth bit of value e of group j */
static void pack_row_q45k(uint8_t *tile, int r, const uint8_t *row, int64_t groups, enum pack_kind k) {
    int high = k == PACK_Q5_K;
    for (int64_t g = 0; g < groups; g += 8, row += high ? 176 : 144) {
        const uint8_t *qs = row + (high ? 48 : 16), *qh = row + 16;
        for (int j = 0; j < 8; j++) {
            uint8_t *codes = tile + codes_at(k, g + j);
            uint32_t w[8], bits = 0;
            for (int n = 0; n < 8; n++) {
                w[n] = load32(qs + 32 * (j >> 1) + 4 * n) >> 4 * (j & 1) & LOW;
                if (high) bits |= (load32(qh + 4 * n) >> j & ONES) << n;
            }
            put_words(codes, r, w);
            if (high) store32(codes + NIB + 4 * r, bits);
        }
        uint8_t *s = tile + head_at(k, g);
        for (int i = 0; i < 12; i++) s[16 * i + r] = row[4 + i];
        put16(s + 192 + 2 * r, row);
        put16(s + 224 + 2 * r, row + 2);
    }
}

static void pack_row_q6k(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g += 8, row += 210) {
        for (int j = 0; j < 8; j++) {
            uint8_t *codes = tile + codes_at(PACK_Q6_K, g + j);
            const uint8_t *ql = row + 64 * (j >> 2) + 32 * (j & 1), *qh = row + 128 + 32 * (j >> 2);
            uint32_t w[8], high[2] = {0, 0};
            for (int n = 0; n < 8; n++) {
                w[n] = load32(ql + 4 * n) >> (j & 2 ? 4 : 0) & LOW;
                high[n >> 2] |= (load32(qh + 4 * n) >> 2 * (j & 3) & TWOS) << 2 * (n & 3);
            }
            put_words(codes, r, w);
            for (int i = 0; i < 2; i++) store32(codes + NIB + 64 * i + 4 * r, high[i]);
        }
        uint8_t *s = tile + head_at(PACK_Q6_K, g);
        for (int i = 0; i < 16; i++) s[16 * i + r] = row[192 + i];
        put16(s + 256 + 2 * r, row + 208);
        memset(s + 288 + 2 * r, 0, 2);
    }
}

static void pack_row_iq4xs(uint8_t *tile, int r, const uint8_t *row, int64_t groups) {
    for (int64_t g = 0; g < groups; g += 8, row += 136) {
        for (int j = 0; j < 8; j++) put_nibbles(tile + codes_at(PACK_IQ4_XS, g + j), r, row + 8 + 16 * j);
        uint8_t *s = tile + head_at(PACK_IQ4_XS, g);
        put16(s + 2 * r, row);
        put16(s + 32 + 2 * r, row + 2);
        for (int i = 0; i < 4; i++) s[64 + 16 * i + r] = row[4 + i];
    }
}

static void pack_row_float(uint8_t *tile, int r, const uint8_t *row, int64_t cols, int size) {
    for (int64_t c = 0; c < cols; c++) memcpy(tile + (c * CPU_TILE + r) * size, row + c * size, (size_t)size);
}

static void pack_row(enum pack_kind k, const bw_type_info *t, uint8_t *tile, int r, const uint8_t *row, int64_t cols) {
    int64_t groups = cols / GROUP;
    switch (k) {
    case PACK_Q4_0: case PACK_IQ4_NL: case PACK_Q4_1: case PACK_Q5_0: case PACK_Q5_1: pack_row_nib(tile, r, row, groups, t, k); break;
    case PACK_Q8_0: pack_row_q8_0(tile, r, row, groups); break;
    case PACK_Q4_K: case PACK_Q5_K: pack_row_q45k(tile, r, row, groups, k); break;
    case PACK_Q6_K: pack_row_q6k(tile, r, row, groups); break;
    case PACK_IQ4_XS: pack_row_iq4xs(tile, r, row, groups); break;
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
        int r = 0;
        for (; k == PACK_Q4_K && r + TOGETHER <= n; r += TOGETHER) pack_four_q4k(tile, r, src + (first + r) * row_bytes, row_bytes, m->cols / GROUP);
        for (; r < n; r++) pack_row(k, m->type, tile, r, src + (first + r) * row_bytes, m->cols);
    }
}
