/* The cases of kernel-check for latent attention: PERHEAD by type and shape, CONCAT by heads, caches whose keys are their values. Owns the choice of
 * shapes; knows no kernel. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static int memory(void) { return bw_fail(BW24_E_MEMORY, "out of memory for a case of kernel-check"); }

static void steps(check_case *c, int a, int b, int d) {
    const int n[3] = {a, b, d};
    for (int i = 0; i < 3 && n[i]; i++) c->rows[c->n_steps++] = n[i];
}

/* ---- PERHEAD: every type by each shape, then one that must fail */
typedef struct perhead_shape { int heads, rows, cols, before, after; float scale; } perhead_shape; /* before, after: columns of a head that are left out */
static const perhead_shape perheads[] = {
    {1, 33, 32, 0, 0, 1}, {5, 17, 96, 32, 7, 1}, {3, 31, 512, 0, 64, 0.37f}, {16, 48, 128, 0, 64, 1}, {4, 128, 512, 64, 0, 1},
};

static int make_perhead(check_case *c, const bw_type_info *t, const perhead_shape *s) {
    int stride = s->before + s->cols + s->after;
    check_name(c, "PERHEAD %s %d heads of %dx%d, columns from %d of %d", t->name, s->heads, s->rows, s->cols, s->before, stride);
    if (s->cols % t->block) return check_skip(c, "%d columns are not a multiple of %s's block of %d", s->cols, t->name, t->block);
    if (!check_input(c, "x", (int64_t)s->heads * stride)) return memory();
    uint8_t *data = check_tensor_new(c, "w", t, s->cols, (int64_t)s->rows * s->heads, s->scale);
    if (!data) return memory();
    c->tensors[c->n_tensors - 1].ne[1] = s->rows;
    c->tensors[c->n_tensors - 1].ne[2] = s->heads;
    check_blocks(c, t, data, (int64_t)(s->cols / t->block) * s->rows * s->heads, 4.0f);
    BW_TRY(check_line(c, "BUF y %d\nPERHEAD y=y x=x w=w heads=%d from=%d", s->heads * s->rows, s->heads, s->before));
    steps(c, 1, 33, 9);
    return check_end(c, "y", (int64_t)s->heads * s->rows);
}

static int make_fault(check_case *c, const bw_type_info *t) {
    const perhead_shape s = {3, 17, 256, 0, 32, 1};
    BW_TRY(make_perhead(c, t, &s));
    check_name(c, "PERHEAD %s must report NaN", t->name);
    float *x = c->owned[0];
    for (int i = 0; i < CHECK_TOKENS * 3 * 288; i++) x[i] = 1.0f;
    x[20 * 3 * 288 + 288 + 77] = NAN; /* the second head of token 20 */
    c->n_steps = 0;
    steps(c, 33, 0, 0);
    c->status = BW24_E_NUMERIC;
    return 0;
}

/* ---- CONCAT */
typedef struct concat_shape { int heads, a, b; } concat_shape;
static const concat_shape concats[] = {{2, 1, 1}, {4, 8, 32}, {3, 33, 31}, {16, 64, 512}};

static int make_concat(check_case *c, const concat_shape *s) {
    int n = s->heads * (s->a + s->b);
    check_name(c, "CONCAT %d heads of %d and %d", s->heads, s->a, s->b);
    if (!check_input(c, "x", (int64_t)s->heads * s->a) || !check_input(c, "z", (int64_t)s->heads * s->b)) return memory();
    BW_TRY(check_line(c, "BUF y %d\nCONCAT y=y a=x b=z heads=%d", n, s->heads));
    steps(c, 1, 33, 0);
    return check_end(c, "y", n);
}

/* ---- keys that are values */
typedef struct shared_shape { int heads, kv_heads, dim, window, prompt; } shared_shape;
static const shared_shape shareds[] = {{16, 1, 576, 0, 150}, {4, 1, 40, 0, 65}, {128, 1, 96, 0, 70}, {6, 2, 64, 20, 150}, {1, 1, 320, 0, 200}};
static const char *const formats[] = {"f32", "f16", "q8_0", "q5_1", "e4m3", "f16/q5_1"}; /* the last: V's format plays no part */

static int make_shared(check_case *c, const char *format, const shared_shape *s) {
    int64_t kv = (int64_t)s->kv_heads * s->dim, q = (int64_t)s->heads * s->dim;
    check_name(c, "ATTEND %s, keys are values, %d/%d heads of %d, window %d, %d keys", format, s->heads, s->kv_heads, s->dim, s->window, s->prompt + 34);
    if (s->dim % 32 && strchr(format, 'q') == format) return check_skip(c, "%d values a head are not a multiple of the block of 32", s->dim);
    c->kv = format;
    BW_TRY(check_line(c, "KV cache heads=%d dim=%d window=%d values=keys", s->kv_heads, s->dim, s->window));
    if (!check_input(c, "q", q) || !check_input(c, "k", kv)) return memory();
    BW_TRY(check_line(c, "BUF y %lld\nKV_APPEND k=k v=k kv=cache", (long long)q));
    BW_TRY(check_line(c, "ATTEND y=y q=q kv=cache heads=%d scale=%g", s->heads, 1.0 / sqrt((double)s->dim)));
    steps(c, s->prompt, 1, 33);
    return check_end(c, "y", q);
}

static int n_types(void) {
    int n = 0;
    while (bw_type_at(n)) n++;
    return n;
}

enum { EACH = COUNT(perheads) + 1 };
static int heads_count(const check_case *c) { (void)c; return EACH * n_types() + COUNT(concats) + COUNT(formats) * COUNT(shareds); }
static int heads_make(check_case *c, int i) {
    if (i < EACH * n_types()) {
        const bw_type_info *t = bw_type_at(i / EACH);
        return i % EACH < COUNT(perheads) ? make_perhead(c, t, &perheads[i % EACH]) : make_fault(c, t);
    }
    i -= EACH * n_types();
    if (i < COUNT(concats)) return make_concat(c, &concats[i]);
    i -= COUNT(concats);
    return make_shared(c, formats[i / COUNT(shareds)], &shareds[i % COUNT(shareds)]);
}
const check_generator bw_check_heads = {heads_count, heads_make};
