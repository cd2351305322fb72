/* The cases of kernel-check for ops that carry state from row to row: CONV and DELTA in steps of 1, 33 and 2 rows, and DECAY and SIGMOID,
 * which feed them. Knows no kernel. */
#include <math.h>

#include "check.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static int memory(void) { return bw_fail(BW24_E_MEMORY, "out of memory for a case of kernel-check"); }

static void steps(check_case *c) {
    static const int rows[] = {1, 33, 2};
    for (int i = 0; i < COUNT(rows); i++) c->rows[c->n_steps++] = rows[i];
}

/* [n] or [n][per] random values of [-1, 1) */
static float *weight(check_case *c, const char *name, int64_t per, int64_t n) {
    float *w = check_tensor_new(c, name, bw_type_by_name("F32"), per, n, 1.0f);
    for (int64_t i = 0; w && i < per * n; i++) w[i] = (float)((int32_t)(check_random(c) >> 8) - (1 << 23)) * 0x1p-23f;
    return w;
}

static const int widths[] = {1, 31, 33, 576, 1536};

static int make_sigmoid(check_case *c, int n) {
    check_name(c, "SIGMOID %d", n);
    if (!check_input(c, "x", n)) return memory();
    BW_TRY(check_line(c, "BUF y %d\nSIGMOID y=y x=x", n));
    steps(c);
    return check_end(c, "y", n);
}

static int make_decay(check_case *c, int n) {
    check_name(c, "DECAY %d", n);
    float *x = check_input(c, "x", n), *a = weight(c, "a", n, 1);
    if (!x || !a || !weight(c, "dt", n, 1)) return memory();
    for (int i = 0; i < n; i++) a[i] = -fabsf(a[i]) * 8.0f;
    BW_TRY(check_line(c, "BUF y %d\nDECAY y=y x=x a=a dt=dt", n));
    steps(c);
    return check_end(c, "y", n);
}

static int make_conv(check_case *c, int n, int taps) {
    check_name(c, "CONV %d channels, %d taps", n, taps);
    if (!check_input(c, "x", n) || !weight(c, "w", taps, n)) return memory();
    BW_TRY(check_line(c, "STATE s %d\nBUF y %d\nCONV y=y x=x w=w st=s", (taps - 1) * n, n));
    steps(c);
    return check_end(c, "y", n);
}

/* k and q are normalised, decay and beta come out of SIGMOID: values as a model makes them, so that the state stays finite */
typedef struct delta_shape { int heads, kheads, dk, dv; } delta_shape;
static const delta_shape deltas[] = {{1, 1, 32, 32}, {2, 1, 64, 40}, {3, 3, 16, 16}, {6, 2, 128, 128}, {4, 4, 128, 64}};

static int make_delta(check_case *c, const delta_shape *s, const char *order) {
    int k = s->kheads * s->dk, v = s->heads * s->dv;
    check_name(c, "DELTA %d/%d heads, %dx%d, %s", s->heads, s->kheads, s->dk, s->dv, order);
    if (!check_input(c, "q", k) || !check_input(c, "k", k) || !check_input(c, "v", v) || !check_input(c, "g", s->heads) ||
        !check_input(c, "b", s->heads))
        return memory();
    BW_TRY(check_line(c, "STATE s %d\nBUF y %d", s->heads * s->dk * s->dv, v));
    BW_TRY(check_line(c, "NORM y=q x=q heads=%d eps=1e-06 kind=l2\nNORM y=k x=k heads=%d eps=1e-06 kind=l2", s->kheads, s->kheads));
    BW_TRY(check_line(c, "SIGMOID y=g x=g\nSIGMOID y=b x=b"));
    BW_TRY(check_line(c, "DELTA y=y q=q k=k v=v g=g b=b st=s heads=%d kheads=%d order=%s", s->heads, s->kheads, order));
    steps(c);
    return check_end(c, "y", v);
}

/* The class `fast`: products in tf32, 2^-11 a factor at most, 2^-22 of a product's square or so, some tens of which follow each other from chunk to chunk;
 * the bound leaves more than ten times that. Rows of one sequence in steps that end within a chunk, and a step that goes the exact way. */
static const delta_shape fast_deltas[] = {{6, 2, 128, 128}, {3, 3, 128, 64}};
static int make_fast_delta(check_case *c, int i) {
    const delta_shape *s = &fast_deltas[i / 2];
    BW_TRY(make_delta(c, s, i % 2 ? "grouped" : "tiled"));
    c->nmse = 0x1p-16;
    c->rows[0] = 300; c->rows[1] = 7; c->rows[2] = 130;
    check_name(c, "fast class: DELTA %d/%d heads, %dx%d, %s", s->heads, s->kheads, s->dk, s->dv, i % 2 ? "grouped" : "tiled");
    return 0;
}

enum { EXACT_FOLDS = 4 * COUNT(widths) + 2 * COUNT(deltas) };
static int fold_count(const check_case *c) { return EXACT_FOLDS + (c->ctx->fast_prefill ? 2 * COUNT(fast_deltas) : 0); }
static int fold_make(check_case *c, int i) {
    if (i >= EXACT_FOLDS) return make_fast_delta(c, i - EXACT_FOLDS);
    if (i >= 4 * COUNT(widths)) {
        i -= 4 * COUNT(widths);
        return make_delta(c, &deltas[i / 2], i % 2 ? "grouped" : "tiled");
    }
    int n = widths[i / 4];
    switch (i % 4) {
    case 0: return make_sigmoid(c, n);
    case 1: return make_decay(c, n);
    default: return make_conv(c, n, i % 4 == 2 ? 2 : 4);
    }
}
const check_generator bw_check_fold = {fold_count, fold_make};
