/* LINEAR over blocks of activation rows (linear.h). The order inside a row's sum is dot.c's; only independent sums are interleaved.
 * The integer dots run in f32: codes are below 2^8, sums of 32 products below 2^20, so every operation on them is exact. */
#include "linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32, SEGMENT = 256, WROWS = 4, B = REF_BLOCK };

/* ---- activations */
static void put_group(ref_acts *a, int r, int64_t g, const int8_t *q, float d) {
    int64_t groups = a->cols / GROUP, block = r / B, lane = r % B;
    float *x = a->x + (block * a->cols + g * GROUP) * B + lane, sum[2] = {0.0f, 0.0f};
    for (int e = 0; e < GROUP; e++) {
        x[e * B] = (float)q[e];
        sum[e >> 4] += (float)q[e];
    }
    a->d[(block * groups + g) * B + lane] = d;
    for (int h = 0; h < 2; h++) a->alpha[((block * groups + g) * 2 + h) * B + lane] = d * sum[h];
}

static int put_quantised(ref_acts *a, const float *x) {
    int64_t groups = a->cols / GROUP;
    int8_t *q = malloc((size_t)a->cols);
    float *d = malloc((size_t)groups * sizeof *d);
    int rc = q && d ? 0 : 1;
    for (int r = 0; r < a->n && !rc; r++) {
        rc = ref_quant_row(x + r * a->cols, a->cols, q, d);
        for (int64_t g = 0; g < groups && !rc; g++) put_group(a, r, g, q + g * GROUP, d[g]);
    }
    free(q);
    free(d);
    return rc;
}

int ref_acts_init(ref_acts *a, const float *x, int n, int64_t cols, int floats) {
    size_t blocks = (size_t)((n + B - 1) / B), groups = (size_t)(cols / GROUP);
    *a = (ref_acts){.cols = cols, .n = n, .floats = floats};
    a->x = calloc(blocks * (size_t)cols * B, sizeof(float));
    a->w = malloc((size_t)WROWS * ((size_t)cols + 4 * groups) * sizeof(float));
    if (!floats) {
        a->d = calloc(blocks * groups * B, sizeof(float));
        a->alpha = calloc(blocks * groups * 2 * B, sizeof(float));
    }
    if (!a->x || !a->w || (!floats && (!a->d || !a->alpha))) return 1;
    if (!floats) return put_quantised(a, x);
    for (int r = 0; r < n; r++)
        for (int64_t c = 0; c < cols; c++) a->x[((r / B) * cols + c) * B + r % B] = x[r * cols + c];
    return 0;
}

void ref_acts_free(ref_acts *a) {
    free(a->x);
    free(a->d);
    free(a->alpha);
    free(a->w);
    *a = (ref_acts){0};
}

/* ---- float weights, and quantised ones decoded (float activations) */
static void segment_floats(const float *w, int64_t ldw, const float *x, int64_t cols, float p[WROWS][B]) {
    memset(p, 0, sizeof(float) * WROWS * B);
    for (int64_t c = 0; c < cols; c++)
        for (int k = 0; k < WROWS; k++)
            for (int r = 0; r < B; r++) p[k][r] = fmaf(w[k * ldw + c], x[c * B + r], p[k][r]);
}

static void block_floats(const ref_acts *a, int64_t block, float y[WROWS][B]) {
    float p[WROWS][B];
    for (int64_t c = 0; c < a->cols; c += SEGMENT) {
        segment_floats(a->w + c, a->cols, a->x + (block * a->cols + c) * B, a->cols - c < SEGMENT ? a->cols - c : SEGMENT, p);
        for (int k = 0; k < WROWS; k++)
            for (int r = 0; r < B; r++) y[k][r] = y[k][r] + p[k][r];
    }
}

/* ---- quantised weights: a row is [cols] codes, then [groups][4] s0, s1, m0, m1 */
static void half_dots(const float *w, int64_t ldw, const float *x, float dot[WROWS][B]) {
    memset(dot, 0, sizeof(float) * WROWS * B);
    for (int e = 0; e < GROUP / 2; e++)
        for (int k = 0; k < WROWS; k++)
            for (int r = 0; r < B; r++) dot[k][r] = fmaf(w[k * ldw + e], x[e * B + r], dot[k][r]);
}

static void fold_group(enum bw_form form, const float *s, const float *i0, const float *i1, const float *a0, const float *a1,
                       const float *d, float *p) {
    for (int r = 0; r < B; r++) {
        if (form == BW_S1 || form == BW_S1M) p[r] = fmaf(s[0], d[r] * (i0[r] + i1[r]), p[r]);
        else p[r] = fmaf(s[1], d[r] * i1[r], fmaf(s[0], d[r] * i0[r], p[r]));
        if (form == BW_S1M) p[r] = fmaf(s[2], a0[r] + a1[r], p[r]);
        if (form == BW_S2M) p[r] = fmaf(s[3], a1[r], fmaf(s[2], a0[r], p[r]));
    }
}

static void block_codes(const ref_acts *a, enum bw_form form, int64_t block, float y[WROWS][B]) {
    int64_t groups = a->cols / GROUP, ldw = a->cols + 4 * groups;
    float p[WROWS][B] = {{0}}, i0[WROWS][B], i1[WROWS][B];
    for (int64_t g = 0; g < groups; g++) {
        const float *x = a->x + (block * a->cols + g * GROUP) * B, *d = a->d + (block * groups + g) * B,
                    *alpha = a->alpha + (block * groups + g) * 2 * B;
        half_dots(a->w + g * GROUP, ldw, x, i0);
        half_dots(a->w + g * GROUP + GROUP / 2, ldw, x + GROUP / 2 * B, i1);
        for (int k = 0; k < WROWS; k++) fold_group(form, a->w + k * ldw + a->cols + 4 * g, i0[k], i1[k], alpha, alpha + B, d, p[k]);
        if ((g + 1) % (SEGMENT / GROUP) && g + 1 < groups) continue;
        for (int k = 0; k < WROWS; k++)
            for (int r = 0; r < B; r++) y[k][r] = y[k][r] + p[k][r];
        memset(p, 0, sizeof p);
    }
}

/* ---- weight rows */
static void decode_row(const ref_acts *a, const bw_type_info *t, const uint8_t *row, float *w) {
    int64_t groups = a->cols / GROUP, per = t->block / GROUP;
    if (a->floats) {
        for (int64_t c = 0; c < a->cols; c += t->block) t->decode(row + c / t->block * t->bytes, w + c);
        return;
    }
    for (int64_t g = 0; g < groups; g++) {
        bw_group v;
        t->group(row + g / per * t->bytes, (int)(g % per), &v);
        for (int e = 0; e < GROUP; e++) w[g * GROUP + e] = (float)v.q[e];
        memcpy(w + a->cols + 4 * g, v.s, 8);
        memcpy(w + a->cols + 4 * g + 2, v.m, 8);
    }
}

void ref_linear_rows(ref_acts *a, const bw_type_info *t, const uint8_t *w, int64_t j0, int64_t j1, float *y, int64_t ldy) {
    int64_t stride = bw_row_bytes(t, a->cols), ldw = a->floats ? a->cols : a->cols + 4 * (a->cols / GROUP);
    for (int64_t j = j0; j < j1; j += WROWS) {
        int k_end = j1 - j < WROWS ? (int)(j1 - j) : WROWS;
        for (int k = 0; k < WROWS; k++) decode_row(a, t, w + (j + (k < k_end ? k : 0)) * stride, a->w + k * ldw);
        for (int r0 = 0; r0 < a->n; r0 += B) {
            float v[WROWS][B] = {{0}};
            if (a->floats) block_floats(a, r0 / B, v);
            else block_codes(a, t->form, r0 / B, v);
            for (int k = 0; k < k_end; k++)
                for (int r = 0; r < B && r0 + r < a->n; r++) y[(r0 + r) * ldy + j + k] = v[k][r];
        }
    }
}
