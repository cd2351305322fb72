/* The cases of kernel-check for mixture-of-experts ops: ROUTE by shape and kind, EXPERTS by type, form and scales. Knows no kernel. */
#include <stdio.h>

#include "check.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static int memory(void) { return bw_fail(BW24_E_MEMORY, "out of memory for a case of kernel-check"); }

/* ---- ROUTE */
typedef struct route_shape { int experts, top, groups, keep, norm; const char *kind; bool bias; double scale; } route_shape;
static const route_shape routes[] = {
    {1, 1, 1, 1, 1, "softmax", false, 1},    {8, 2, 1, 1, 1, "softmax", false, 1},  {31, 5, 1, 1, 0, "softmax", false, 1},
    {33, 4, 1, 1, 1, "sigmoid", true, 2.5},  {128, 8, 1, 1, 1, "softmax", false, 1}, {192, 8, 1, 1, 1, "sigmoid", true, 2.826},
    {256, 8, 8, 4, 1, "sigmoid", true, 2.5}, {64, 6, 4, 2, 0, "softmax", true, 16},
};

static int make_route(check_case *c, const route_shape *s) {
    check_name(c, "ROUTE %s %d of %d experts, %d of %d groups%s%s", s->kind, s->top, s->experts, s->keep, s->groups,
               s->norm ? ", normalised" : "", s->bias ? ", bias" : "");
    if (!check_input(c, "x", s->experts)) return memory();
    float *bias = s->bias ? check_tensor_new(c, "b", bw_type_by_name("F32"), s->experts, 1, 1.0f) : NULL;
    if (s->bias && !bias) return memory();
    for (int i = 0; bias && i < s->experts; i++) bias[i] = (float)(check_random(c) % 64) / 64.0f;
    BW_TRY(check_line(c, "BUF y %d\nROUTE y=y x=x %s top=%d groups=%d keep=%d norm=%d kind=%s scale=%g", 2 * s->top, bias ? "b=b" : "",
                      s->top, s->groups, s->keep, s->norm, s->kind, s->scale));
    c->rows[c->n_steps++] = 1;
    c->rows[c->n_steps++] = 33;
    return check_end(c, "y", 2 * s->top);
}

/* ---- EXPERTS: every type, then forms of one type */
enum { EXPERTS = 5, TOP = 2, WIDTH = 256 };
typedef struct experts_form { const char *name; bool joined, scales, gelu; float tensor_scale; } experts_form;
static const experts_form forms[] = {{"plain", false, false, false, 1},
                                     {"gate and up in one", true, false, true, 1},
                                     {"scale per expert", false, true, false, 1},
                                     {"tensor scale", false, false, true, 0.37f}};

static int matrix(check_case *c, const char *name, const bw_type_info *t, int64_t ne0, int64_t ne1, float scale) {
    uint8_t *data = check_tensor_new(c, name, t, ne0, ne1 * EXPERTS, scale);
    if (!data) return memory();
    c->tensors[c->n_tensors - 1].ne[1] = ne1;
    c->tensors[c->n_tensors - 1].ne[2] = EXPERTS;
    check_blocks(c, t, data, ne0 / t->block * ne1 * EXPERTS, 4.0f);
    return 0;
}

static int make_experts(check_case *c, const bw_type_info *t, int64_t ff, const experts_form *form) {
    check_name(c, "EXPERTS %s %dx%lld, %s", t->name, WIDTH, (long long)ff, form->name);
    if (ff % t->block) return check_skip(c, "%lld columns are not a multiple of %s's block of %d", (long long)ff, t->name, t->block);
    if (!check_input(c, "x", WIDTH) || !check_input(c, "l", EXPERTS)) return memory();
    BW_TRY(matrix(c, "g", t, WIDTH, form->joined ? 2 * ff : ff, form->tensor_scale));
    if (!form->joined) BW_TRY(matrix(c, "u", t, WIDTH, ff, form->tensor_scale));
    BW_TRY(matrix(c, "d", t, ff, WIDTH, form->tensor_scale));
    float *s = form->scales ? check_tensor_new(c, "s", bw_type_by_name("F32"), EXPERTS, 1, 1.0f) : NULL;
    if (form->scales && !s) return memory();
    for (int i = 0; s && i < EXPERTS; i++) s[i] = 0.25f + (float)i * 0.3f;
    BW_TRY(check_line(c, "BUF r %d\nBUF y %d\nROUTE y=r x=l top=%d kind=softmax", 2 * TOP, WIDTH, TOP));
    BW_TRY(check_line(c, "EXPERTS y=y x=x r=r g=g %s d=d %s act=%s", form->joined ? "" : "u=u", s ? "gs=s us=s ds=s" : "",
                      form->gelu ? "gelu" : "silu"));
    c->rows[c->n_steps++] = 1;
    c->rows[c->n_steps++] = 33;
    return check_end(c, "y", WIDTH);
}

static int n_types(void) {
    int n = 0;
    while (bw_type_at(n)) n++;
    return n;
}

static int moe_count(const check_case *c) { (void)c; return COUNT(routes) + 2 * n_types() + COUNT(forms) - 1; }
static int moe_make(check_case *c, int i) {
    if (i < COUNT(routes)) return make_route(c, &routes[i]);
    i -= COUNT(routes);
    if (i < n_types()) return make_experts(c, bw_type_at(i), 256, &forms[0]);
    if (i < 2 * n_types()) return make_experts(c, bw_type_at(i - n_types()), 96, &forms[0]);
    return make_experts(c, bw_type_by_name("Q4_0"), 96, &forms[i - 2 * n_types() + 1]);
}
const check_generator bw_check_moe = {moe_count, moe_make};
