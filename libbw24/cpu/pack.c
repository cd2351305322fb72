/* From the file's rows to packed tiles (layouts: linear_impl.h). Owns every byte order of the packed form; knows no arithmetic on values */
#include "linear_impl.h"

#include <string.h>

enum { LOW = 0x0f0f0f0f, ONES = 0x01010101, TWOS = 0x03030303 };

static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

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

/* ---- four rows at once: their words are exchanged in vectors, as stores of 4 bytes that lie 64 apart are slow */
enum { TOGETHER = 4 };
typedef uint32_t v4 __attribute__((vector_size(16)));
typedef struct four { const uint8_t *row[TOGETHER]; } four; /* a block of each */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (v4){__VA_ARGS__})
#endif

static v4 load_words(const uint8_t *p) { v4 v; memcpy(&v, p, sizeof v); return v; }
static void store_words(uint8_t *p, v4 v) { memcpy(p, &v, sizeof v); }

/* words of rows to words of places: out[n] = word n of each row */
INL void turn(const v4 in[TOGETHER], v4 out[TOGETHER]) {
    v4 a = PICK(in[0], in[1], 0, 4, 1, 5), b = PICK(in[2], in[3], 0, 4, 1, 5), c = PICK(in[0], in[1], 2, 6, 3, 7), d = PICK(in[2], in[3], 2, 6, 3, 7);
    out[0] = PICK(a, b, 0, 1, 4, 5);
    out[1] = PICK(a, b, 2, 3, 6, 7);
    out[2] = PICK(c, d, 0, 1, 4, 5);
    out[3] = PICK(c, d, 2, 3, 6, 7);
}

/* word n of row i to 64 n + 4 i */
INL void put_turned(uint8_t *dst, const v4 in[TOGETHER]) {
    v4 out[TOGETHER];
    turn(in, out);
    for (int n = 0; n < TOGETHER; n++) store_words(dst + 64 * n, out[n]);
}

/* byte i of each row to 16 i + the row */
static void put_bytes(uint8_t *dst, const four *f, int skip, int n) {
    for (int i = skip; i < skip + n; i++, dst += 16)
        store32(dst, (uint32_t)f->row[0][i] | (uint32_t)f->row[1][i] << 8 | (uint32_t)f->row[2][i] << 16 | (uint32_t)f->row[3][i] << 24);
}

static void put_halves(uint8_t *dst, const four *f, int skip) {
    for (int i = 0; i < TOGETHER; i++) memcpy(dst + 2 * i, f->row[i] + skip, 2);
}

/* 16 bytes of a group: word n in the low nibbles, word n + 4 in the high ones. j: the group in its block. Most blocks of 32 values hold them so */
INL v4 nibbles(int k, const uint8_t *block, int bytes, int j) {
    if (k == PACK_IQ4_XS) return load_words(block + 8 + 16 * j);
    if (k == PACK_NVFP4) { /* the file pairs values i and i + 8 of a 16; the tile pairs the two 16s of a group */
        v4 q = load_words(block + 4 + 16 * j), low = q & LOW, high = q >> 4 & LOW;
        return PICK(low, high, 0, 1, 4, 5) | PICK(low, high, 2, 3, 6, 7) << 4;
    }
    if (k != PACK_Q4_K && k != PACK_Q5_K && k != PACK_Q6_K) return load_words(block + bytes - 16);
    /* 32 bytes serve two groups: the next one, or in Q6_K the one after it */
    const uint8_t *q = k == PACK_Q6_K ? block + 64 * (j >> 2) + 32 * (j & 1) : block + (k == PACK_Q5_K ? 48 : 16) + 32 * (j >> 1);
    int shift = k == PACK_Q6_K ? 2 * (j & 2) : 4 * (j & 1);
    return (load_words(q) >> shift & LOW) | (load_words(q + 16) >> shift & LOW) << 4;
}

/* word n of 8 of each row */
INL void eight(const four *f, int skip, v4 out[2 * TOGETHER]) {
    for (int half = 0; half < 2; half++) {
        v4 in[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) in[i] = load_words(f->row[i] + skip + 16 * half);
        turn(in, out + TOGETHER * half);
    }
}

/* the bits above the nibbles. Q5_0, Q5_1: bit e of a word belongs to value e; Q5_K: bit j of byte e to value e of group j; Q6_K: two bits likewise */
INL void put_high(int k, uint8_t *dst, const four *f, int j, int halves) {
    v4 w[2 * TOGETHER], out = {0}, more = {0};
    if (k == PACK_Q5_0 || k == PACK_Q5_1) {
        v4 bits;
        for (int i = 0; i < TOGETHER; i++) bits[i] = load32(f->row[i] + 2 * halves);
        for (int n = 0; n < 8; n++) out |= ((bits >> 4 * n & 15) * 0x00204081u & ONES) << n;
    } else {
        eight(f, k == PACK_Q5_K ? 16 : 128 + 32 * (j >> 2), w);
        for (int n = 0; n < 8 && k == PACK_Q5_K; n++) out |= (w[n] >> j & ONES) << n;
        for (int n = 0; n < 4 && k == PACK_Q6_K; n++) {
            out |= (w[n] >> 2 * (j & 3) & TWOS) << 2 * n;
            more |= (w[n + 4] >> 2 * (j & 3) & TWOS) << 2 * n;
        }
    }
    store_words(dst, out);
    if (k == PACK_Q6_K) store_words(dst + 64, more);
}

INL void put_codes(int k, uint8_t *codes, const four *f, int bytes, int j) {
    v4 in[TOGETHER], w[2 * TOGETHER];
    if (k == PACK_Q8_0) {
        eight(f, 2, w);
        for (int n = 0; n < 8; n++) store_words(codes + 64 * n, w[n] ^ 0x80808080u);
        return;
    }
    for (int i = 0; i < TOGETHER; i++) in[i] = nibbles(k, f->row[i], bytes, j);
    put_turned(codes, in);
    if (code_bytes(k) > NIB) put_high(k, codes + NIB, f, j, form_of(k) == BW_S1M ? 2 : 1);
}

/* the scales of a block; s: of row r in the head, of the block's first group */
INL void put_scales(int k, uint8_t *s, int r, const four *f) {
    switch (k) {
    case PACK_MXFP4: put_bytes(s + r, f, 0, 1); break;
    case PACK_NVFP4: put_bytes(s + r, f, 0, 4); break;
    case PACK_Q4_K: case PACK_Q5_K:
        put_bytes(s + r, f, 4, 12);
        put_halves(s + 192 + 2 * r, f, 0);
        put_halves(s + 224 + 2 * r, f, 2);
        break;
    case PACK_Q6_K:
        put_bytes(s + r, f, 192, 16);
        put_halves(s + 256 + 2 * r, f, 208);
        memset(s + 288 + 2 * r, 0, 2 * TOGETHER);
        break;
    case PACK_IQ4_XS:
        put_halves(s + 2 * r, f, 0);
        put_halves(s + 32 + 2 * r, f, 2);
        put_bytes(s + 64 + r, f, 4, 4);
        break;
    default:
        put_halves(s + 2 * r, f, 0);
        if (form_of(k) == BW_S1M) put_halves(s + 32 + 2 * r, f, 2);
    }
}

/* rows r .. r + 3 of a tile; a block has `per` groups, and a head serves one block or several */
INL void pack_four(int k, uint8_t *tile, int r, four f, int64_t groups, int bytes, int per) {
    int wide = head_bytes(k) / head_groups(k);
    for (int64_t g = 0; g < groups; g += per) {
        put_scales(k, tile + head_at(k, g) + g % head_groups(k) * wide, r, &f);
        for (int j = 0; j < per && g + j < groups; j++) put_codes(k, tile + codes_at(k, g + j) + 4 * r, &f, bytes, j);
        for (int i = 0; i < TOGETHER; i++) f.row[i] += bytes;
    }
}

static void pack_four_f32(uint8_t *tile, int r, const four *f, int64_t cols) {
    int64_t c = 0;
    for (; c + TOGETHER <= cols; c += TOGETHER) {
        v4 in[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) in[i] = load_words(f->row[i] + 4 * c);
        put_turned(tile + 64 * c + 4 * r, in);
    }
    for (; c < cols; c++)
        for (int i = 0; i < TOGETHER; i++) memcpy(tile + 64 * c + 4 * (r + i), f->row[i] + 4 * c, 4);
}

static void pack_four_halves(uint8_t *tile, int r, four f, int64_t cols) {
    for (int64_t c = 0; c < cols; c++) {
        put_halves(tile + 32 * c + 2 * r, &f, 0);
        for (int i = 0; i < TOGETHER; i++) f.row[i] += 2;
    }
}

/* one copy of the loop for each type */
static void pack_rows(enum pack_kind k, uint8_t *tile, int r, const four *f, int64_t cols) {
    int64_t groups = cols / GROUP;
    switch (k) {
#define ONE(kind, bytes, per) case kind: pack_four(kind, tile, r, *f, groups, bytes, per); break;
    ONE(PACK_Q4_0, 18, 1) ONE(PACK_IQ4_NL, 18, 1) ONE(PACK_Q4_1, 20, 1) ONE(PACK_Q5_0, 22, 1) ONE(PACK_Q5_1, 24, 1) ONE(PACK_Q8_0, 34, 1)
    ONE(PACK_Q4_K, 144, 8) ONE(PACK_Q5_K, 176, 8) ONE(PACK_Q6_K, 210, 8) ONE(PACK_IQ4_XS, 136, 8) ONE(PACK_MXFP4, 17, 1) ONE(PACK_NVFP4, 36, 2)
#undef ONE
    case PACK_F32: pack_four_f32(tile, r, f, cols); break;
    case PACK_F16: case PACK_BF16: pack_four_halves(tile, r, *f, cols); break;
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
        for (int r = 0; r < n; r += TOGETHER) {
            four f;
            for (int i = 0; i < TOGETHER; i++) f.row[i] = src + (first + (r + i < n ? r + i : n - 1)) * row_bytes; /* the last one again behind the end */
            pack_rows(k, tile, r, &f, m->cols);
        }
    }
}
