/* The cases of kernel-check for what stands round ATTEND: PERHEAD by type and shape, CONCAT by heads, caches whose keys are their values, norms and rotations
 * by head before it and GATE behind it. Owns the choice of shapes; knows no kernel. */
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

/* ---- norms, rotations and appends with ATTEND behind them, which a backend may run as one: few rows after a prompt, one row twice at the same context */
typedef struct layer_shape { int heads, kv_heads, dim, rot, window, norm, pairs, gate, prompt, rows; } layer_shape;
static const layer_shape layers[] = {
    {8, 2, 128, 128, 0, 1, 0, 0, 63, 3},   {16, 2, 128, 128, 0, 1, 0, 0, 300, 7},  {4, 4, 128, 128, 100, 1, 0, 0, 190, 2}, {9, 3, 64, 64, 0, 0, 1, 0, 64, 5},
    {8, 1, 64, 64, 0, 0, 1, 0, 700, 7},    {4, 1, 128, 128, 0, 0, 1, 0, 1019, 2},  {4, 2, 128, 64, 0, 1, 0, 0, 126, 3},    {4, 2, 64, 64, 0, 1, 0, 0, 130, 2},
    {4, 2, 256, 64, 0, 1, 0, 1, 125, 4},   {8, 1, 256, 64, 0, 1, 0, 1, 240, 7},
};

/* queries and keys, normed and turned; a norm's weights are ordinary */
static int turned(check_case *c, const layer_shape *s, const char *x, int heads) {
    char w[8];
    snprintf(w, sizeof w, "w%s", x);
    if (s->norm) {
        float *v = check_tensor_new(c, w, bw_type_by_name("F32"), s->dim, 1, 1.0f);
        if (!v) return memory();
        for (int i = 0; i < s->dim; i++) v[i] = (float)(int)(check_random(c) % 512 - 256) * 0x1p-7f;
        BW_TRY(check_line(c, "NORM y=%s x=%s w=%s heads=%d eps=1e-6", x, x, w, heads));
    }
    return check_line(c, "ROPE x=%s heads=%d dim=%d rot=%d style=%s base=10000", x, heads, s->dim, s->rot, s->pairs ? "norm" : "neox");
}

static int layer_list(check_case *c, const layer_shape *s) {
    const int64_t kv = (int64_t)s->kv_heads * s->dim, q = (int64_t)s->heads * s->dim;
    BW_TRY(check_line(c, "KV cache heads=%d dim=%d window=%d", s->kv_heads, s->dim, s->window));
    if (!check_input(c, "k", kv) || !check_input(c, "v", kv) || !check_input(c, s->gate ? "both" : "q", s->gate ? 2 * q : q)) return memory();
    if (!s->norm) /* a pair's turn may be longer than its values, which the format must hold */
        for (int64_t i = 0; i < kv * CHECK_TOKENS; i++) ((float *)c->owned[0])[i] *= 0.5f;
    if (s->gate) {
        BW_TRY(check_line(c, "BUF q %lld\nBUF gate %lld", (long long)q, (long long)q));
        BW_TRY(check_line(c, "SLICE y=q x=both heads=%d\nSLICE y=gate x=both heads=%d from=%d", s->heads, s->heads, s->dim));
    }
    BW_TRY(turned(c, s, "q", s->heads));
    BW_TRY(turned(c, s, "k", s->kv_heads));
    BW_TRY(check_line(c, "BUF y %lld\nKV_APPEND k=k v=v kv=cache", (long long)q));
    BW_TRY(check_line(c, "ATTEND y=y q=q kv=cache heads=%d scale=%g", s->heads, 1.0 / sqrt((double)s->dim)));
    if (s->gate) BW_TRY(check_line(c, "GATE y=y x=y g=gate"));
    return check_end(c, "y", q);
}

static int make_layer(check_case *c, const layer_shape *s) {
    check_name(c, "%sROPE %d of %s, KV_APPEND, ATTEND%s f16, %d/%d heads of %d, window %d, %d keys", s->norm ? "NORM, " : "", s->rot, s->pairs ? "pairs" : "halves",
               s->gate ? ", GATE" : "", s->heads, s->kv_heads, s->dim, s->window, s->prompt + 2 + s->rows);
    c->kv = "f16";
    steps(c, s->prompt, 1, 1);
    c->rows[c->n_steps++] = s->rows;
    return layer_list(c, s);
}

/* of keys, then of values: the one row behind a prompt has what the format must refuse */
static int make_layer_fault(check_case *c, const layer_shape *s, int values) {
    check_name(c, "KV_APPEND f16 of one row behind ROPE, %d heads of %d, must report %s", s->heads, s->dim, values ? "NaN in V" : "1e30 in K");
    c->kv = "f16";
    steps(c, 33, 1, 0);
    BW_TRY(layer_list(c, s));
    ((float *)c->owned[values])[(int64_t)33 * s->kv_heads * s->dim + 5] = values ? NAN : 1e30f;
    c->status = BW24_E_NUMERIC;
    return 0;
}
enum { FAULTY_LAYER = 3 }; /* without norms, which would make 1e30 ordinary */

static int n_types(void) {
    int n = 0;
    while (bw_type_at(n)) n++;
    return n;
}

enum { EACH = COUNT(perheads) + 1 };
static int heads_count(const check_case *c) { (void)c; return EACH * n_types() + COUNT(concats) + COUNT(formats) * COUNT(shareds) + COUNT(layers) + 2; }
static int heads_make(check_case *c, int i) {
    if (i < EACH * n_types()) {
        const bw_type_info *t = bw_type_at(i / EACH);
        return i % EACH < COUNT(perheads) ? make_perhead(c, t, &perheads[i % EACH]) : make_fault(c, t);
    }
    i -= EACH * n_types();
    if (i < COUNT(concats)) return make_concat(c, &concats[i]);
    i -= COUNT(concats);
    if (i < COUNT(formats) * COUNT(shareds)) return make_shared(c, formats[i / COUNT(shareds)], &shareds[i % COUNT(shareds)]);
    i -= COUNT(formats) * COUNT(shareds);
    return i < COUNT(layers) ? make_layer(c, &layers[i]) : make_layer_fault(c, &layers[FAULTY_LAYER], i - COUNT(layers));
}
const check_generator bw_check_heads = {heads_count, heads_make};
