/* The cases of kernel-check that need no model: every op x type x awkward shape x awkward values. Owns the choice of shapes; knows no
 * kernel. Shapes: 1, 31 and 33 rows on either side of a vector's width, column counts of real models, blocks permitting. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static void steps(check_case *c, int a, int b, int d) {
    const int n[3] = {a, b, d};
    for (int i = 0; i < 3 && n[i]; i++) c->rows[c->n_steps++] = n[i];
}

static int memory(void) { return bw_fail(BW24_E_MEMORY, "out of memory for a case of kernel-check"); }

static void *tensor(check_case *c, const char *name, const char *type, int64_t ne0, int64_t ne1, float scale, float top) {
    const bw_type_info *t = bw_type_by_name(type);
    void *data = check_tensor_new(c, name, t, ne0, ne1, scale);
    if (data) check_blocks(c, t, data, ne0 / t->block * ne1, top);
    return data;
}

/* ---- row ops: NORM, ROPE, GLU, ADD, SCALE, SOFTCAP, GATE, SLICE, CONCAT, EMBED, PICK_ROWS */
static const int widths[] = {1, 31, 32, 33, 255, 256, 257, 512, 576, 640, 1536, 5120, 17408};
typedef struct rope_shape { int heads, dim, rot, norm; double base, scale; int64_t pos; bool factors; } rope_shape;
static const rope_shape ropes[] = {
    {1, 2, 2, 0, 10000, 1, 0, 0},         {3, 31 * 2, 62, 0, 10000, 1, 0, 0},
    {9, 64, 64, 1, 100000, 1, 511, 0},    {4, 256, 256, 0, 1000000, 0.125, 4095, 0},
    {2, 80, 20, 0, 500000, 1, 131071, 0}, {3, 48, 48, 1, 500000, 1, 77, 1},
    {5, 96, 34, 1, 10000, 1, 1000000, 1}, {3, 512, 512, 0, 1000000, 1, 4095, 1},
    {2, 512, 256, 0, 10000, 1, 63, 0},
};
enum { KINDS = 14 };
static const char *const kind_ops[KINDS] = {"NORM weight", "NORM plain", "NORM l2", "NORM 2 heads", "GLU silu",
                                            "GLU gelu",    "ADD",        "SCALE",   "SOFTCAP",      "PICK_ROWS",
                                            "GATE",        "GATE by runs", "SLICE", "CONCAT"};

static int make_norm(check_case *c, int kind, int64_t n) {
    int heads = kind == 3 ? 2 : 1;
    if (!check_input(c, "x", n * heads)) return memory();
    if (kind != 1 && !tensor(c, "w", "F32", n, 1, 1.0f, 4.0f)) return memory();
    BW_TRY(check_line(c, "BUF y %lld", (long long)(n * heads)));
    BW_TRY(check_line(c, "NORM y=y x=x %s heads=%d eps=%s kind=%s", kind == 1 ? "" : "w=w", heads, kind == 2 ? "1e-12" : "1e-06",
                      kind == 2 ? "l2" : "rms"));
    return check_end(c, "y", n * heads);
}

/* GATE by one value each and by one value for 3; SLICE of the middle third; CONCAT of unequal parts */
static int make_parts(check_case *c, int kind, int64_t n) {
    if (kind == 13) {
        if (!check_input(c, "x", n) || !check_input(c, "z", 2 * n)) return memory();
        BW_TRY(check_line(c, "BUF y %lld", (long long)(3 * n)));
        BW_TRY(check_line(c, "CONCAT y=y a=x b=z"));
        return check_end(c, "y", 3 * n);
    }
    int64_t width = kind == 10 ? n : 3 * n;
    if (!check_input(c, "x", width) || (kind < 12 && !check_input(c, "z", n))) return memory();
    BW_TRY(check_line(c, "BUF y %lld", (long long)(kind == 12 ? n : width)));
    if (kind < 12) BW_TRY(check_line(c, "GATE y=y x=x g=z"));
    else BW_TRY(check_line(c, "SLICE y=y x=x from=%lld", (long long)n));
    return check_end(c, "y", kind == 12 ? n : width);
}

static int make_elementwise(check_case *c, int kind, int64_t n) {
    bool two = kind >= 4 && kind <= 6;
    if (!check_input(c, "x", n) || (two && !check_input(c, "z", n))) return memory();
    if (kind == 9) { c->want_every = 3; return check_end(c, "x", n); }
    BW_TRY(check_line(c, "BUF y %lld", (long long)n));
    if (kind == 6) BW_TRY(check_line(c, "ADD y=y a=x b=z"));
    else if (kind == 7) BW_TRY(check_line(c, "SCALE y=y x=x c=0.0625488"));
    else if (kind == 8) BW_TRY(check_line(c, "SOFTCAP y=y x=x cap=30"));
    else BW_TRY(check_line(c, "GLU y=y g=x u=z act=%s", kind == 4 ? "silu" : "gelu"));
    return check_end(c, "y", n);
}

static int make_rope(check_case *c, const rope_shape *s) {
    check_name(c, "ROPE %s %dx%d, %d rotated, from position %lld", s->norm ? "norm" : "neox", s->heads, s->dim, s->rot, (long long)s->pos);
    if (!check_input(c, "x", (int64_t)s->heads * s->dim)) return memory();
    float *f = s->factors ? check_tensor_new(c, "ff", bw_type_by_name("F32"), s->rot / 2, 1, 1.0f) : NULL;
    if (s->factors && !f) return memory();
    for (int i = 0; s->factors && i < s->rot / 2; i++) f[i] = 1.0f + (float)(check_random(c) % 256) * 0.125f;
    BW_TRY(check_line(c, "ROPE x=x %s heads=%d dim=%d rot=%d style=%s base=%g scale=%g", f ? "ff=ff" : "", s->heads, s->dim, s->rot,
                      s->norm ? "norm" : "neox", s->base, s->scale));
    steps(c, 33, 1, 31);
    c->start = s->pos;
    return check_end(c, "x", (int64_t)s->heads * s->dim);
}

static int make_embed(check_case *c, int type) {
    const bw_type_info *t = bw_type_at(type);
    int64_t cols = t->block > 32 ? 512 : 96;
    check_name(c, "EMBED %s %lld columns", t->name, (long long)cols);
    if (!tensor(c, "w", t->name, cols, CHECK_TOKENS, 1.0f, 1e3f)) return memory();
    BW_TRY(check_line(c, "BUF x %lld", (long long)cols));
    BW_TRY(check_line(c, "EMBED y=x w=w scale=%s", type % 2 ? "22.627417" : "1"));
    steps(c, 1, 33, 0);
    return check_end(c, "x", cols);
}

static int n_types(void) {
    int n = 0;
    while (bw_type_at(n)) n++;
    return n;
}

static int rows_count(const check_case *c) { (void)c; return KINDS * COUNT(widths) + COUNT(ropes) + n_types(); }
static int rows_make(check_case *c, int i) {
    if (i >= KINDS * COUNT(widths) + COUNT(ropes)) return make_embed(c, i - KINDS * COUNT(widths) - COUNT(ropes));
    if (i >= KINDS * COUNT(widths)) return make_rope(c, &ropes[i - KINDS * COUNT(widths)]);
    int kind = i / COUNT(widths), n = widths[i % COUNT(widths)];
    check_name(c, "%s %d", kind_ops[kind], n);
    steps(c, 1, 33, n > 2000 ? 0 : 31);
    if (kind >= 10) return make_parts(c, kind, n);
    return kind < 4 ? make_norm(c, kind, n) : make_elementwise(c, kind, n);
}
const check_generator bw_check_rows = {rows_count, rows_make};

/* ---- LINEAR: shapes x types, then more cases a type */
typedef struct shape { int rows, cols; } shape;
static const shape shapes[] = {{33, 32}, {31, 64}, {1, 256}, {31, 576}, {33, 640}, {33, 1536}, {1, 5120}, {31, 5120}, {33, 17408}};
enum { EXTRA = 8 }; /* raw layout; residual, scale and bias; NORM with SiLU GLU; two types with GELU GLU; Inf or 2^100; NaN; the second and third with many outputs */
enum { MANY_OUTS = 5100, MANY_PAIRS = 8700 }; /* 320 tiles of 16 and 272 pairs of 32: shared out unevenly among some 130 multiprocessors */

static int make_linear(check_case *c, const bw_type_info *t, shape s) {
    check_name(c, "LINEAR %s %dx%d", t->name, s.rows, s.cols);
    if (s.cols % t->block) return check_skip(c, "%d columns are not a multiple of %s's block of %d", s.cols, t->name, t->block);
    if (!check_input(c, "x", s.cols) || !tensor(c, "w", t->name, s.cols, s.rows, 1.0f, 1e3f)) return memory();
    BW_TRY(check_line(c, "BUF y %d", s.rows));
    BW_TRY(check_line(c, "LINEAR y=y x=x w=w"));
    steps(c, 1, 33, s.cols > 2000 ? 0 : 31);
    return check_end(c, "y", s.rows);
}

static int make_residual(check_case *c, const bw_type_info *t, int rows, int cols) {
    check_name(c, "LINEAR %s %dx%d x scale + bias, then ADD", t->name, rows, cols);
    if (!check_input(c, "x", cols) || !check_input(c, "r", rows) || !tensor(c, "w", t->name, cols, rows, 0.37f, 1e3f) ||
        !tensor(c, "b", "F32", rows, 1, 1.0f, 8.0f))
        return memory();
    BW_TRY(check_line(c, "BUF y %d", rows));
    BW_TRY(check_line(c, "LINEAR y=y x=x w=w b=b"));
    BW_TRY(check_line(c, "ADD y=r a=r b=y"));
    if (rows > 33) steps(c, 1, 1, 0);
    else steps(c, 1, 33, 2);
    return check_end(c, "r", rows);
}

static int make_glu(check_case *c, const bw_type_info *gate, const bw_type_info *up, const char *act, bool norm, int rows) {
    check_name(c, "%sLINEAR %s and %s %dx512, then GLU %s", norm ? "NORM, " : "", gate->name, up->name, rows, act);
    if (!check_input(c, "x", 512) || !tensor(c, "g", gate->name, 512, rows, 1.7f, 8.0f) || !tensor(c, "u", up->name, 512, rows, 1.0f, 8.0f))
        return memory();
    if (norm && !tensor(c, "n", "F32", 512, 1, 1.0f, 4.0f)) return memory();
    BW_TRY(check_line(c, "BUF h 512\nBUF a %d\nBUF b %d", rows, rows));
    if (norm) BW_TRY(check_line(c, "NORM y=h x=x w=n eps=1e-06"));
    BW_TRY(check_line(c, "LINEAR y=a x=%s w=g\nLINEAR y=b x=%s w=u\nGLU y=a g=a u=b act=%s", norm ? "h" : "x", norm ? "h" : "x", act));
    steps(c, 1, rows > 33 ? 1 : 33, 0);
    return check_end(c, "a", rows);
}

/* high: -Inf, or the least magnitude that a quantised row may not have */
static int make_fault(check_case *c, const bw_type_info *t, bool high) {
    float top = t->form == BW_FLOAT ? INFINITY : 0x1p100f;
    check_name(c, "LINEAR %s must report %s", t->name, !high ? "NaN" : t->form == BW_FLOAT ? "Inf" : "2^100");
    float *x = check_input(c, "x", 512);
    if (!x || !tensor(c, "w", t->name, 512, 17, 1.0f, 1.0f)) return memory();
    for (int r = 0; r < CHECK_TOKENS; r++)
        for (int i = 0; i < 512; i++) x[r * 512 + i] = 1.0f;
    x[20 * 512 + 137] = high ? -top : NAN;
    BW_TRY(check_line(c, "BUF y 17"));
    BW_TRY(check_line(c, "LINEAR y=y x=x w=w"));
    steps(c, 33, 0, 0);
    c->status = BW24_E_NUMERIC;
    return check_end(c, "y", 17);
}

static int linear_count(const check_case *c) { (void)c; return n_types() * (COUNT(shapes) + EXTRA); }
static int linear_make(check_case *c, int i) {
    const bw_type_info *t = bw_type_at(i / (COUNT(shapes) + EXTRA)), *next = bw_type_at(i / (COUNT(shapes) + EXTRA) + 1);
    int k = i % (COUNT(shapes) + EXTRA);
    if (k < COUNT(shapes)) return make_linear(c, t, shapes[k]);
    switch (k - COUNT(shapes)) {
    case 0: {
        c->raw = true;
        int rc = make_linear(c, t, (shape){33, 768});
        check_name(c, "LINEAR %s 33x768, the file's layout", t->name);
        return rc;
    }
    case 1: return make_residual(c, t, 33, 512);
    case 2: return make_glu(c, t, t, "silu", true, 31);
    case 3: return make_glu(c, t, next ? next : bw_type_at(0), "gelu", false, 31);
    case 6: return make_residual(c, t, MANY_OUTS, 768);
    case 7: return make_glu(c, t, t, "silu", true, MANY_PAIRS);
    default: return make_fault(c, t, k == COUNT(shapes) + 4);
    }
}
const check_generator bw_check_linear = {linear_count, linear_make};

/* ---- KV_APPEND and ATTEND: pairs of formats x shapes; then values that a format must refuse */
static const char *const kv_formats[] = {"f32", "f16", "q8_0", "q5_1", "e4m3"};
typedef struct attend_shape { int heads, kv_heads, dim, window, prompt; } attend_shape;
static const attend_shape attends[] = {{2, 1, 32, 0, 1},      {9, 3, 64, 0, 150}, {6, 2, 128, 20, 150},
                                       {4, 1, 256, 100, 130}, {8, 4, 96, 0, 65},  {3, 3, 31, 0, 64},
                                       {16, 2, 128, 0, 300},  {5, 1, 64, 70, 200}, {3, 1, 64, 0, 252}};
static const float refused[] = {INFINITY, NAN, 1e30f};

static int attend_list(check_case *c, const attend_shape *s) {
    int64_t kv = (int64_t)s->kv_heads * s->dim, q = (int64_t)s->heads * s->dim;
    BW_TRY(check_line(c, "KV cache heads=%d dim=%d window=%d", s->kv_heads, s->dim, s->window));
    if (!check_input(c, "q", q) || !check_input(c, "k", kv) || !check_input(c, "v", kv)) return memory();
    BW_TRY(check_line(c, "BUF y %lld", (long long)q));
    BW_TRY(check_line(c, "KV_APPEND k=k v=v kv=cache\nATTEND y=y q=q kv=cache heads=%d scale=%g", s->heads, 1.0 / sqrt((double)s->dim)));
    return check_end(c, "y", q);
}

static int make_attend(check_case *c, const char *k, const char *v, const attend_shape *s) {
    static _Thread_local char kv[16];
    snprintf(kv, sizeof kv, "%s/%s", k, v);
    check_name(c, "KV_APPEND, ATTEND %s %d/%d heads of %d, window %d, %d keys", kv, s->heads, s->kv_heads, s->dim, s->window,
               s->prompt + 41);
    if (s->dim % 32 && (k[0] == 'q' || v[0] == 'q')) return check_skip(c, "%d values a head are not a multiple of the block of 32", s->dim);
    c->kv = kv;
    steps(c, s->prompt, 1, 33);
    c->rows[c->n_steps++] = 7;
    return attend_list(c, s);
}

static int make_refused(check_case *c, const char *format, float value) {
    bool saturates = value == 1e30f && !strcmp(format, "e4m3");
    check_name(c, "KV_APPEND %s must %s %g", format, saturates ? "saturate" : "report", (double)value);
    c->kv = format;
    BW_TRY(attend_list(c, &(attend_shape){2, 1, 64, 0, 0}));
    ((float *)c->owned[2])[20 * 64 + 5] = value; /* V of token 20 */
    if (value == 1e30f && !strcmp(format, "f32")) return check_skip(c, "f32 holds it");
    steps(c, 33, 0, 0);
    c->status = saturates ? 0 : BW24_E_NUMERIC;
    return 0;
}

/* The class `fast` (bf16 matrix units in ATTEND of many rows) on ordinary values: steps of 33 rows and more against the exact program. Rounding q and
 * k to bf16 (2^-9 each) moves a score of size s by about s 2^-9 / 2, so an exponential by as much; p and v add 2^-9 each: in all some 2^-8 of a value, or
 * 2^-16 of its square. q8_0 keys differ by the exact program's int8 queries as well (1/254 of the largest value): 2^-14. The bound leaves four times that. */
static const double FAST_BOUND = 0x1p-12;
static int make_fast(check_case *c, const char *format, const attend_shape *s) {
    c->kv = format;
    c->nmse = FAST_BOUND;
    check_name(c, "fast class: ATTEND %s %d/%d heads of %d, window %d, %d keys", format, s->heads, s->kv_heads, s->dim, s->window, s->prompt + 33);
    steps(c, s->prompt, 33, 0);
    BW_TRY(attend_list(c, s));
    for (int t = 0; t < c->n_tensors; t++) {
        float *x = c->owned[t];
        for (int64_t i = 0; i < CHECK_TOKENS * c->tensors[t].ne[0]; i++) x[i] = ((float)(check_random(c) >> 8) * 0x1p-23f - 1.0f) * 2.0f;
    }
    return 0;
}

/* The same of LINEAR: activations and weights rounded to bf16 once each, 2^-9 at most and some 2^-10.3 in the mean, so 2^-19.6 of the square of a sum of
 * independent products; the bound leaves twelve times that. */
static const shape fast_shapes[] = {{33, 64}, {130, 576}, {272, 1536}, {31, 5120}};
static int make_fast_linear(check_case *c, const bw_type_info *t, shape s) {
    c->nmse = 0x1p-16;
    check_name(c, "fast class: LINEAR %s %dx%d", t->name, s.rows, s.cols);
    if (s.cols % t->block) return check_skip(c, "%d columns are not a multiple of %s's block of %d", s.cols, t->name, t->block);
    float *x = check_input(c, "x", s.cols);
    if (!x || !tensor(c, "w", t->name, s.cols, s.rows, 0.37f, 1.0f)) return memory();
    for (int64_t i = 0; i < CHECK_TOKENS * (int64_t)s.cols; i++) x[i] = ((float)(check_random(c) >> 8) * 0x1p-23f - 1.0f) * 2.0f;
    BW_TRY(check_line(c, "BUF y %d", s.rows));
    BW_TRY(check_line(c, "LINEAR y=y x=x w=w"));
    steps(c, 33, s.cols < 5000 ? 300 : 150, 0);
    return check_end(c, "y", s.rows);
}

static const char *const fast_formats[] = {"f32", "f16", "q8_0", "e4m3", "q8_0/q5_1", "q5_1/f16"};
static const attend_shape fasts[] = {{9, 3, 64, 0, 150}, {8, 2, 128, 0, 300}, {6, 2, 128, 40, 150}, {4, 1, 256, 100, 130}, {16, 1, 256, 0, 70}};
enum { FAST_ATTENDS = COUNT(fast_formats) * COUNT(fasts) };
static int fast_count(const check_case *c) { return c->ctx->fast_prefill ? FAST_ATTENDS + n_types() * COUNT(fast_shapes) : 0; }
static int fast_make(check_case *c, int i) {
    if (i < FAST_ATTENDS) return make_fast(c, fast_formats[i / COUNT(fasts)], &fasts[i % COUNT(fasts)]);
    i -= FAST_ATTENDS;
    return make_fast_linear(c, bw_type_at(i / COUNT(fast_shapes)), fast_shapes[i % COUNT(fast_shapes)]);
}
const check_generator bw_check_fast = {fast_count, fast_make};

enum { FORMATS = COUNT(kv_formats) };
static int attend_count(const check_case *c) { (void)c; return FORMATS * FORMATS * COUNT(attends) + FORMATS * COUNT(refused); }
static int attend_make(check_case *c, int i) {
    int plain = FORMATS * FORMATS * COUNT(attends);
    if (i >= plain) return make_refused(c, kv_formats[(i - plain) / COUNT(refused)], refused[(i - plain) % COUNT(refused)]);
    int pair = i / COUNT(attends);
    return make_attend(c, kv_formats[pair / FORMATS], kv_formats[pair % FORMATS], &attends[i % COUNT(attends)]);
}
const check_generator bw_check_attend = {attend_count, attend_make};
