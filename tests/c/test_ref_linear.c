/* ref/linear.h against ref/dot.h, byte for byte: every type, float activations too, activation rows on both sides of a block, odd weight
 * rows. Knows the two interfaces only. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/dot.h"
#include "ref/linear.h"

enum { MAX_ACTS = 35, MAX_ROWS = 7 };
static uint64_t state = 7;
static uint32_t rnd(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 32);
}

static void tame_block(const bw_type_info *t, uint8_t *block) {
    float v[256];
    int bad = 1;
    while (bad) {
        for (int i = 0; i < t->bytes; i++) block[i] = (uint8_t)(rnd() >> 9);
        t->decode(block, v);
        bad = 0;
        for (int i = 0; i < t->block; i++) bad |= !(fabsf(v[i]) < 1e3f);
    }
}

static int run(const bw_type_info *t, int64_t cols, int rows, int n, int floats, const uint8_t *w, const float *x) {
    static float y[MAX_ACTS * MAX_ROWS];
    int8_t q[768];
    float d[24];
    ref_acts a;
    int wrong = 0;
    if (ref_acts_init(&a, x, n, cols, floats)) return 1;
    for (int i = 0; i < MAX_ACTS * MAX_ROWS; i++) y[i] = -12345.5f;
    ref_linear_rows(&a, t, w, 0, rows, y, MAX_ROWS);
    for (int r = 0; r < n; r++) {
        if (!floats && ref_quant_row(x + r * cols, cols, q, d)) return 1;
        for (int j = 0; j < MAX_ROWS; j++) {
            const uint8_t *row = w + j * bw_row_bytes(t, cols);
            float want = j >= rows ? -12345.5f : floats ? ref_dot_row_f32(t, row, cols, x + r * cols) : ref_dot_row(t, row, cols, q, d);
            wrong |= memcmp(&want, &y[r * MAX_ROWS + j], 4) != 0;
        }
    }
    ref_acts_free(&a);
    return wrong;
}

int main(void) {
    static float x[MAX_ACTS * 768];
    static uint8_t w[MAX_ROWS * 768 * 4];
    static const int acts[] = {1, 15, 16, 17, MAX_ACTS}, rows[] = {1, 4, MAX_ROWS};
    int cases = 0, failures = 0;
    for (int i = 0; i < MAX_ACTS * 768; i++) x[i] = i % 5 == 0 ? 0.0f : (float)((int32_t)rnd() >> 8) * (i % 7 ? 0x1p-23f : 0x1p-60f);
    for (int k = 0; bw_type_at(k); k++) {
        const bw_type_info *t = bw_type_at(k);
        int64_t cols = t->block > 32 ? 768 : 352; /* a whole number of segments, and one and a part */
        for (uint8_t *b = w; b < w + MAX_ROWS * bw_row_bytes(t, cols); b += t->bytes) tame_block(t, b);
        for (int i = 0; i < 5 * 3 * 2; i++) {
            int floats = i % 2;
            if (!floats && t->form == BW_FLOAT) continue;
            cases++;
            if (!run(t, cols, rows[i / 2 % 3], acts[i / 6], floats, w, x)) continue;
            failures++;
            printf("FAIL %s, %d rows, %d activation rows, floats %d\n", t->name, rows[i / 2 % 3], acts[i / 6], floats);
        }
    }
    ref_acts a;
    x[40] = NAN;
    if (ref_acts_init(&a, x, 1, 352, 0) != -1) failures++;
    ref_acts_free(&a);
    printf("%d cases, %d failures\n", cases, failures);
    return failures != 0;
}
