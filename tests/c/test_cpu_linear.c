/* cpu/linear.h against ref/dot.h, byte for byte: every type x instruction set x row count x odd shape, packed and raw, every epilogue,
 * extreme codes, zero rows, special activations. Knows the public interface only. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "canon.h"
#include "cpu/linear.h"
#include "ref/dot.h"

enum { MAX_ROWS = 130, PAD = 7 };
static const float SENTINEL = -12345.5f;
static int checks, failures;
static uint64_t state = 1;

static uint32_t rnd(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 32);
}
static float unit(void) { return (float)((int32_t)rnd() % 20001) / 10000.0f - 1.0f; }

static void *alloc64(size_t n) {
    void *p = aligned_alloc(64, (n + 127) / 64 * 64);
    if (!p) abort();
    return p;
}

/* makes the f16 at p finite and of ordinary size */
static void sane_half(uint8_t *p) {
    uint16_t h = bw_f32_to_f16(unit() * 0.05f);
    memcpy(p, &h, 2);
}

/* random block bytes whose scales are finite; kind 1: all codes 0xff, kind 2: all zero bytes */
static void fill_row(const bw_type_info *t, uint8_t *row, int64_t bytes, int kind) {
    for (int64_t i = 0; i < bytes; i++) row[i] = kind == 2 ? 0 : kind == 1 ? 0xff : (uint8_t)(rnd() >> 11);
    if (kind == 2) return;
    for (uint8_t *b = row; b < row + bytes; b += t->bytes) {
        float f = unit();
        uint16_t h;
        switch (t->id) {
        case 0: memcpy(b, &f, 4); break;
        case 1: sane_half(b); break;
        case 30: h = bw_f32_to_bf16(f); memcpy(b, &h, 2); break;
        case 2: case 6: case 8: case 16: case 17: case 18: case 19: case 20: case 21: case 22: case 23: sane_half(b); break;
        case 3: case 7: case 12: case 13: sane_half(b); sane_half(b + 2); break;
        case 10: sane_half(b + 80); sane_half(b + 82); break;
        case 11: sane_half(b + 108); break;
        case 14: sane_half(b + 208); break;
        case 29: /* IQ1_M: the f16 lies in the top nibbles of four u16 */
            h = bw_f32_to_f16(unit() * 0.05f);
            for (int i = 0; i < 4; i++) b[48 + 2 * i + 1] = (uint8_t)((b[48 + 2 * i + 1] & 15) | (h >> 4 * i & 15) << 4);
            break;
        case 39: b[0] = (uint8_t)(kind == 1 ? rnd() % 4 : 110 + rnd() % 20); break;
        case 256: b[0] &= 0xf7; break;
        default: break; /* NVFP4: every scale byte is finite */
        }
    }
}

/* activations of ordinary rows, then rows that reach every clamp and corner */
static void fill_x(float *x, int rows, int64_t cols, int64_t ld) {
    for (int r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            float v = unit() * (c % 37 == 5 ? 30.0f : 1.0f);
            if (r % 6 == 2) v = (v < 0.0f ? -1.0f : 1.0f) * (c / 32 % 2 ? 0x1p-100f : 0x1.fffffep-101f); /* on and below the zero limit */
            if (r % 6 == 3) v = 0.0f;
            if (r % 6 == 4) v = (rnd() & 1) ? 1.0f : -1.0f;
            if (r % 6 == 5 && c / 32 % 2) v *= 1e-33f;
            x[r * ld + c] = v;
        }
    }
}

typedef struct job {
    const bw_type_info *type;
    int64_t rows, cols;
    uint8_t *src, *src2;
    float *x, *want, *want2; /* [MAX_ROWS][cols], [MAX_ROWS][rows] */
    float *bias;
} job;

static void expect(const job *j, int n) {
    int8_t *q = alloc64((size_t)j->cols);
    float *d = alloc64((size_t)j->cols);
    int64_t rb = bw_row_bytes(j->type, j->cols);
    for (int r = 0; r < n; r++) {
        const float *x = j->x + r * j->cols;
        if (j->type->form != BW_FLOAT && ref_quant_row(x, j->cols, q, d)) abort();
        for (int64_t o = 0; o < j->rows; o++) {
            const uint8_t *w = j->src + o * rb, *w2 = j->src2 + o * rb;
            int f = j->type->form == BW_FLOAT;
            j->want[r * j->rows + o] = f ? ref_dot_row_f32(j->type, w, j->cols, x) : ref_dot_row(j->type, w, j->cols, q, d);
            j->want2[r * j->rows + o] = f ? ref_dot_row_f32(j->type, w2, j->cols, x) : ref_dot_row(j->type, w2, j->cols, q, d);
        }
    }
    free(q);
    free(d);
}

static float expected(const job *j, int mode, int r, int64_t o, const float *res) {
    float y = j->want[r * j->rows + o];
    if (mode == 0) return y * 1.0f;
    y = y * 0.37f + j->bias[o];
    if (mode == 1) return y;
    if (mode == 2) return res[r * j->rows + o] + y;
    float g = j->want2[r * j->rows + o] * 1.7f;
    return (mode == 3 ? bw_silu(g) : bw_gelu(g)) * y;
}

static int same(float a, float b) { return memcmp(&a, &b, 4) == 0; }

/* one call over all tiles, in two cuts; mode 0 plain, 1 scale + bias, 2 residual, 3 SiLU gate, 4 GELU gate */
static void run_mode(enum cpu_isa isa, const job *j, const cpu_mat *m0, const cpu_mat *gate0, const cpu_act *a, int n, int mode) {
    cpu_mat m = *m0, gate = *gate0;
    m.scale = mode ? 0.37f : 1.0f;
    m.bias = mode ? j->bias : NULL;
    gate.scale = 1.7f;
    int64_t ld = j->rows + PAD, tiles = cpu_tiles(j->rows);
    float *y = alloc64((size_t)(n * ld) * 4), *res = alloc64((size_t)(n * j->rows) * 4);
    void *work = alloc64(CPU_LINEAR_WORK);
    for (int64_t i = 0; i < n * ld; i++) y[i] = SENTINEL;
    for (int64_t i = 0; i < n * j->rows; i++) res[i] = unit();
    cpu_epi e = {mode == 2 ? CPU_ADD : mode > 2 ? CPU_GLU : CPU_STORE, res, j->rows, &gate, mode == 4 ? CPU_GELU : CPU_SILU};
    int cut = n / 2;
    int64_t tcut = tiles / 2;
    if (mode == 1) {
        cpu_linear(isa, &m, a, 0, cut, y, ld, 0, tiles, &e, work);
        cpu_linear(isa, &m, a, cut, n, y, ld, 0, tiles, &e, work);
    } else {
        cpu_linear(isa, &m, a, 0, n, y, ld, 0, tcut, mode ? &e : NULL, work);
        cpu_linear(isa, &m, a, 0, n, y, ld, tcut, tiles, mode ? &e : NULL, work);
    }
    for (int r = 0; r < n; r++) {
        for (int64_t o = 0; o < ld; o++) {
            float want = o < j->rows ? expected(j, mode, r, o, res) : SENTINEL;
            checks++;
            if (same(y[r * ld + o], want)) continue;
            if (failures++ < 20)
                printf("FAIL %s %s rows %d of %dx%d mode %d %s at (%d, %d): %a, expected %a\n", cpu_isa_name(isa), j->type->name, n,
                       (int)j->rows, (int)j->cols, mode, m.data ? "packed" : "raw", r, (int)o, y[r * ld + o], want);
        }
    }
    free(y);
    free(res);
    free(work);
}

static void run_isa(enum cpu_isa isa, const job *j, const int *counts, int n_counts) {
    size_t size = cpu_pack_bytes(j->type, j->rows, j->cols);
    cpu_mat raw = {j->type, j->rows, j->cols, NULL, j->src, 1.0f, NULL}, raw2 = raw, packed = raw, packed2;
    raw2.raw = j->src2;
    if (size) {
        packed.raw = NULL;
        packed2 = packed;
        packed.data = alloc64(size);
        packed2.data = alloc64(size);
        cpu_pack_tiles(&packed, j->src, 0, cpu_tiles(j->rows));
        cpu_pack_tiles(&packed2, j->src2, 0, cpu_tiles(j->rows));
    }
    for (int i = 0; i < n_counts; i++) {
        int n = counts[i], floats = j->type->form == BW_FLOAT;
        cpu_act a;
        void *mem = alloc64(cpu_act_bytes(n, j->cols, floats));
        cpu_act_init(&a, mem, n, j->cols, floats);
        if (cpu_act_fill(isa, &a, j->x, j->cols, n / 3, n) || cpu_act_fill(isa, &a, j->x, j->cols, 0, n / 3)) failures++;
        int raw_too = !size || n == 1 || n == 9;
        for (int mode = 0; mode < 5; mode++) {
            if (mode && n != 1 && n != 9 && n != 33) continue;
            if (size) run_mode(isa, j, &packed, &packed2, &a, n, mode);
            if (raw_too) run_mode(isa, j, &raw, &raw2, &a, n, mode);
        }
        free(mem);
    }
    if (size) {
        free(packed.data);
        free(packed2.data);
    }
}

static void run_shape(const bw_type_info *t, int64_t rows, int64_t cols, const int *counts, int n_counts) {
    job j = {.type = t, .rows = rows, .cols = cols};
    int64_t rb = bw_row_bytes(t, cols);
    int n = counts[n_counts - 1];
    j.src = alloc64((size_t)(rows * rb));
    j.src2 = alloc64((size_t)(rows * rb));
    j.x = alloc64((size_t)(n * cols) * 4);
    j.want = alloc64((size_t)(n * rows) * 4);
    j.want2 = alloc64((size_t)(n * rows) * 4);
    j.bias = alloc64((size_t)rows * 4);
    for (int64_t r = 0; r < rows; r++) {
        fill_row(t, j.src + r * rb, rb, r % 8 == 3 ? 1 : r % 8 == 5 ? 2 : 0);
        fill_row(t, j.src2 + r * rb, rb, 0);
        j.bias[r] = unit();
    }
    fill_x(j.x, n, cols, cols);
    expect(&j, n);
    for (int isa = CPU_PORTABLE; isa <= CPU_AVX512VNNI; isa++)
        if (cpu_isa_supported((enum cpu_isa)isa)) run_isa((enum cpu_isa)isa, &j, counts, n_counts);
    void *all[] = {j.src, j.src2, j.x, j.want, j.want2, j.bias};
    for (int i = 0; i < 6; i++) free(all[i]);
}

static void run_type(const bw_type_info *t) {
    static const int few[] = {1, 3, 9, 26}, many[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33}, panels[] = {1, 97, 123};
    static const int64_t cols[] = {32, 64, 256, 576, 640, 1536, 2048};
    static const int64_t rows[] = {1, 15, 17, 48};
    int before = failures, at = checks;
    for (int c = 0; c < 7; c++) {
        if (bw_row_bytes(t, cols[c]) < 0) continue;
        for (int r = 0; r < 4; r++) {
            int big = cols[c] == 256 && rows[r] == 17;
            if (cols[c] >= 1536 && rows[r] != 17) continue;
            run_shape(t, rows[r], cols[c], big ? many : few, big ? 12 : 4);
        }
    }
    run_shape(t, 33, 512, panels, 3);
    if (t->form == BW_FLOAT) run_shape(t, 17, 301, few, 4);
    printf("%-8s %s (%d values)\n", t->name, failures == before ? "ok" : "FAILED", checks - at);
}

/* quantiser: codes are seen through a matrix of unit rows; faults are reported and contained */
static void run_quant_faults(void) {
    float x[96];
    for (int isa = CPU_PORTABLE; isa <= CPU_AVX512VNNI; isa++) {
        if (!cpu_isa_supported((enum cpu_isa)isa)) continue;
        cpu_act a;
        void *mem = alloc64(cpu_act_bytes(1, 96, 0));
        cpu_act_init(&a, mem, 1, 96, 0);
        for (int k = 0; k < 6; k++) {
            for (int i = 0; i < 96; i++) x[i] = unit();
            if (k == 1) x[70] = INFINITY;
            if (k == 2) x[3] = NAN;
            if (k == 3) x[95] = -INFINITY;
            if (k == 4) x[40] = -0x1p100f;
            if (k == 5) x[0] = 0x1p100f;
            checks++;
            if (cpu_act_fill((enum cpu_isa)isa, &a, x, 96, 0, 1) != (k ? -1 : 0)) {
                failures++;
                printf("FAIL %s: fault %d was not told\n", cpu_isa_name((enum cpu_isa)isa), k);
            }
        }
        free(mem);
    }
}

int main(int argc, char **argv) {
    for (int i = 0; bw_type_at(i); i++)
        if (argc < 2 || !strcmp(argv[1], bw_type_at(i)->name)) run_type(bw_type_at(i));
    run_quant_faults();
    printf("%d values compared, %d failures\n", checks, failures);
    return failures != 0;
}
