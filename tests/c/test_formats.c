/* Storage formats under the sanitizers: table facts, exhaustive scalar conversions, and every codec on buffers of the exact size,
 * with random blocks and with values no sane file holds. Expected bytes and values are tests/test_formats.py's business. */
#include "formats/formats.h"
#include "ref/dot.h"
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(bw_group) == 48, "a group is 32 codes, two scales and two minima");
_Static_assert(sizeof(float) == 4 && (int8_t)-1 < 0, "the blocks need 4-byte floats and two's complement bytes");
#define TYPE(name, id, block, bytes, form) \
    _Static_assert(BW_##form == BW_FLOAT ? (block) == 1 : (block) % 32 == 0 && 256 % (block) == 0, #name ": block");
#include "types.def"
#undef TYPE

static uint32_t seed = 1;
static uint32_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 17;
    seed ^= seed << 5;
    return seed;
}

static uint32_t bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void *exact_block(size_t size) {
    void *p = malloc(size);
    if (!p) abort();
    return p;
}

static void test_table(void) {
    int n = 0;
    for (const bw_type_info *t; (t = bw_type_at(n)); n++) {
        CHECK(bw_type(t->id) == t, "%s: id %d finds another row", t->name, t->id);
        CHECK(bw_type_by_name(t->name) == t, "%s: name finds another row", t->name);
        CHECK(t->decode && !t->group == (t->form == BW_FLOAT), "%s: missing codec", t->name);
        CHECK(bw_row_bytes(t, 512) == 512 / t->block * t->bytes, "%s: row bytes %ld", t->name, (long)bw_row_bytes(t, 512));
        CHECK(bw_row_bytes(t, 0) == 0 && bw_row_bytes(t, -256) == -1, "%s: row of no values", t->name);
        CHECK(t->block == 1 || bw_row_bytes(t, t->block + 1) == -1, "%s: part of a block accepted", t->name);
        CHECK(bw_row_bytes(t, INT64_MAX / t->block * t->block) == -1 || t->bytes <= t->block, "%s: overflow accepted", t->name);
    }
    CHECK(n == 25, "expected 25 types, found %d", n);
    CHECK(!bw_type_at(-1) && !bw_type_at(n) && !bw_type(4) && !bw_type(-1) && !bw_type(9999), "unknown types must give NULL");
    CHECK(!bw_type_by_name("Q4") && !bw_type_by_name("") && !bw_type_by_name(NULL), "unknown names must give NULL");
}

static void test_f16(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = bw_f16_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00) {
            CHECK(isnan(f) && (bw_f32_to_f16(f) & 0x7fff) == 0x7e00, "f16 %04x: NaN", h);
            continue;
        }
        CHECK(bw_f32_to_f16(f) == h, "f16 %04x: round trip gives %04x", h, bw_f32_to_f16(f));
        if ((h & 0x7fff) >= 0x7bff) continue;
        /* the midpoint to the next code goes to the even one, its neighbours to the near one */
        float mid = (f + bw_f16_to_f32((uint16_t)(h + 1))) * 0.5f;
        CHECK(bw_f32_to_f16(mid) == h + (h & 1), "f16 %04x: tie gives %04x", h, bw_f32_to_f16(mid));
        CHECK(bw_f32_to_f16(from_bits(bits(mid) - 1)) == h && bw_f32_to_f16(from_bits(bits(mid) + 1)) == h + 1, "f16 %04x: near tie", h);
    }
    CHECK(bw_f32_to_f16(65519.996f) == 0x7bff && bw_f32_to_f16(65520.0f) == 0x7c00 && bw_f32_to_f16(-INFINITY) == 0xfc00, "f16: end");
}

static void test_e4m3(void) {
    for (uint32_t c = 0; c < 256; c++) {
        float f = bw_e4m3_to_f32((uint8_t)c);
        if ((c & 127) == 127) {
            CHECK(isnan(f) && bw_f32_to_e4m3(f) == 127, "e4m3 %02x: NaN", c);
            continue;
        }
        int m = c & 7, e = c >> 3 & 15;
        float want = e ? ldexpf(1.0f + (float)m / 8.0f, e - 7) : ldexpf((float)m, -9);
        CHECK(bits(f) == bits(c & 128 ? -want : want) && bw_f32_to_e4m3(f) == c, "e4m3 %02x: value %g, back %02x", c, f, bw_f32_to_e4m3(f));
        if ((c & 127) >= 126) continue;
        float mid = (f + bw_e4m3_to_f32((uint8_t)(c + 1))) * 0.5f;
        CHECK(bw_f32_to_e4m3(mid) == c + (c & 1), "e4m3 %02x: tie gives %02x", c, bw_f32_to_e4m3(mid));
        CHECK(bw_f32_to_e4m3(from_bits(bits(mid) - 1)) == c && bw_f32_to_e4m3(from_bits(bits(mid) + 1)) == c + 1, "e4m3 %02x: near tie", c);
    }
    CHECK(bw_f32_to_e4m3(INFINITY) == 0x7e && bw_f32_to_e4m3(-1e30f) == 0xfe && bw_f32_to_e4m3(-1e-30f) == 0x80, "e4m3: ends");
}

static void test_bf16(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = bw_bf16_to_f32((uint16_t)h);
        if (isnan(f)) {
            CHECK(isnan(bw_bf16_to_f32(bw_f32_to_bf16(f))), "bf16 %04x: NaN lost", h);
            continue;
        }
        CHECK(bw_f32_to_bf16(f) == h, "bf16 %04x: round trip", h);
        if (isinf(f)) continue;
        uint32_t tie = h << 16 | 0x8000;
        CHECK(bw_f32_to_bf16(from_bits(tie)) == h + (h & 1), "bf16 %04x: tie", h);
        CHECK(bw_f32_to_bf16(from_bits(tie - 1)) == h && bw_f32_to_bf16(from_bits(tie + 1)) == h + 1, "bf16 %04x: near tie", h);
    }
}

/* random blocks: no byte outside the block is read or written, and decode is the group form */
static void test_decode(const bw_type_info *t) {
    uint8_t *src = exact_block((size_t)t->bytes);
    float *dst = exact_block((size_t)t->block * 4);
    for (int trial = 0; trial < 500; trial++) {
        for (int i = 0; i < t->bytes; i++) src[i] = (uint8_t)(next_random() >> 11);
        t->decode(src, dst);
        for (int g = 0; t->group && g < t->block / 32; g++) {
            bw_group v;
            t->group(src, g, &v);
            for (int e = 0; e < 32; e++) {
                float product = v.s[e >> 4] * (float)v.q[e], want = product + v.m[e >> 4], got = dst[32 * g + e];
                CHECK(got == want || (isnan(got) && isnan(want)), "%s: group %d value %d: %g, group form %g", t->name, g, e, got, want);
            }
            if (t->form == BW_S1 || t->form == BW_S1M)
                CHECK(bits(v.s[0]) == bits(v.s[1]) && bits(v.m[0]) == bits(v.m[1]), "%s: unlike halves", t->name);
            if (t->form == BW_S1 || t->form == BW_S2) CHECK(bits(v.m[0]) == 0 && bits(v.m[1]) == 0, "%s: minimum", t->name);
        }
    }
    free(src);
    free(dst);
}

/* rows that encoders never meet in a sane file: any bit pattern, then NaN, Inf and extremes among ordinary values */
static void test_encode(const bw_type_info *t) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e-45f, -1e-38f, 0.0f, -0.0f, 1e-15f};
    size_t size = (size_t)bw_row_bytes(t, 512);
    float *src = exact_block(512 * 4), back[256];
    uint8_t *dst = exact_block(size);
    for (int trial = 0; t->encode && trial < 200; trial++) {
        for (int i = 0; i < 512; i++) {
            uint32_t r = next_random();
            src[i] = trial & 1 ? from_bits(r) : (float)(int32_t)r * 0x1p-31f;
            if (!(trial & 1) && r % 7 == 0) src[i] = odd[(r >> 8) % 10];
        }
        t->encode(src, dst, 512);
        for (size_t at = 0; at < size; at += (size_t)t->bytes) t->decode(dst + at, back);
    }
    free(src);
    free(dst);
}

/* activations: codes, scales, the faults, and a dot product against plain f64 sums */
static void test_dot(const bw_type_info *t) {
    enum { COLS = 768 };
    float x[COLS], scale[COLS / 32], w[256];
    int8_t q[COLS];
    size_t size = (size_t)bw_row_bytes(t, COLS);
    uint8_t *row = exact_block(size);
    for (int i = 0; i < COLS; i++) x[i] = (float)(int32_t)next_random() * 0x1p-31f;
    CHECK(ref_quant_row(x, COLS, q, scale) == 0, "finite row refused");
    for (size_t i = 0; i < size; i++) row[i] = (uint8_t)(next_random() >> 9 & 0x37); /* no scale byte can be Inf or NaN */
    double exact = 0, mass = 0;
    for (int c = 0; c < COLS; c++) {
        if (c % t->block == 0) t->decode(row + c / t->block * t->bytes, w);
        double term = (double)w[c % t->block] * (t->group ? (double)q[c] * scale[c / 32] : x[c]);
        exact += term;
        mass += fabs(term);
    }
    float y = t->group ? ref_dot_row(t, row, COLS, q, scale) : ref_dot_row_f32(t, row, COLS, x);
    CHECK(fabs(y - exact) <= 4e-6 * mass, "%s: dot %g, exact %g", t->name, y, exact);
    free(row);
    x[40] = INFINITY;
    CHECK(ref_quant_row(x, COLS, q, scale) != 0, "Inf accepted");
    x[40] = NAN;
    CHECK(ref_quant_row(x, COLS, q, scale) != 0, "NaN accepted");
    x[40] = -0x1p100f;
    CHECK(ref_quant_row(x, COLS, q, scale) != 0, "2^100 accepted");
    x[40] = -0x1.fffffep99f;
    CHECK(ref_quant_row(x, COLS, q, scale) == 0 && q[40] == -114, "the value below 2^100 refused or not -114 of 1.125 * 2^93");
}

int main(void) {
    test_table();
    test_f16();
    test_e4m3();
    test_bf16();
    for (int i = 0; bw_type_at(i); i++) {
        test_decode(bw_type_at(i));
        test_encode(bw_type_at(i));
        test_dot(bw_type_at(i));
    }
    printf("formats: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
