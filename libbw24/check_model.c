/* The cases of kernel-check that a loaded model adds: each different shape of its LINEAR, NORM and ATTEND ops, LINEAR on the model's own
 * weights. Owns the search for different shapes; knows no kernel. */
#include <string.h>

#include "check.h"

static bool same_shape(const bw_list *l, const bw_op *a, const bw_op *b) {
    if (a->code != b->code) return false;
    const bw_tensor *x = a->w[0], *y = b->w[0];
    switch (a->code) {
    case BW_OP_LINEAR:
        return x->type == y->type && x->ne[0] == y->ne[0] && x->ne[1] == y->ne[1] && (x->scale == 1.0f) == (y->scale == 1.0f);
    case BW_OP_NORM: return l->bufs[a->buf[0]].width == l->bufs[b->buf[0]].width && a->i[0] == b->i[0] && a->i[1] == b->i[1] && !x == !y;
    case BW_OP_ATTEND: {
        const bw_kv *p = &l->kvs[a->kv], *q = &l->kvs[b->kv];
        return a->i[0] == b->i[0] && p->desc.heads == q->desc.heads && p->desc.dim == q->desc.dim && p->window == q->window;
    }
    default: return false;
    }
}

static bool first_of_shape(const bw_list *l, int i) {
    enum bw_opcode c = l->ops[i].code;
    if (c != BW_OP_LINEAR && c != BW_OP_NORM && c != BW_OP_ATTEND) return false;
    for (int j = 0; j < i; j++)
        if (same_shape(l, &l->ops[j], &l->ops[i])) return false;
    return true;
}

/* the n-th op with a new shape over all lists; -1 past the end. count: how many there are */
static int find_op(const bw24_model *m, int n, const bw_list **list, int *count) {
    int found = -1, seen = 0;
    for (int k = 0; k < m->n_lists; k++) {
        for (int i = 0; i < m->lists[k]->n_ops; i++) {
            if (!first_of_shape(m->lists[k], i)) continue;
            if (seen++ == n) { found = i; *list = m->lists[k]; }
        }
    }
    if (count) *count = seen;
    return found;
}

static int model_count(const check_case *c) {
    int n = 1; /* without a model: one case that says so */
    const bw_list *l;
    if (c->model) find_op(c->model, -1, &l, &n);
    return n;
}

static int memory(void) { return bw_fail(BW24_E_MEMORY, "out of memory for a case of kernel-check"); }

static int make_linear(check_case *c, const bw_op *op) {
    const bw_tensor *w = op->w[0];
    check_name(c, "LINEAR %s %lldx%lld of the model (%.40s)", w->type->name, (long long)w->ne[1], (long long)w->ne[0], w->name);
    if (!check_input(c, "x", w->ne[0])) return memory();
    c->tensors[c->n_tensors++] = (check_tensor){"w", w->type, {w->ne[0], w->ne[1], 1}, w->data, w->scale};
    BW_TRY(check_line(c, "BUF y %lld\nLINEAR y=y x=x w=w", (long long)w->ne[1]));
    c->rows[c->n_steps++] = 1;
    c->rows[c->n_steps++] = w->ne[0] * w->ne[1] > 1 << 24 ? 9 : 33;
    return check_end(c, "y", w->ne[1]);
}

static int make_norm(check_case *c, const bw_list *l, const bw_op *op) {
    int64_t width = l->bufs[op->buf[0]].width, n = width / op->i[0];
    check_name(c, "NORM %d heads of %lld of the model", op->i[0], (long long)n);
    if (!check_input(c, "x", width)) return memory();
    if (op->w[0]) c->tensors[c->n_tensors++] = (check_tensor){"w", op->w[0]->type, {n, 1, 1}, op->w[0]->data, 1.0f};
    BW_TRY(check_line(c, "BUF y %lld\nNORM y=y x=x %s heads=%d eps=%.17g kind=%s", (long long)width, op->w[0] ? "w=w" : "", op->i[0],
                      op->f[0], op->i[1] ? "l2" : "rms"));
    c->rows[c->n_steps++] = 1;
    c->rows[c->n_steps++] = 33;
    return check_end(c, "y", width);
}

static int make_attend(check_case *c, const bw_list *l, const bw_op *op) {
    const bw_kv *kv = &l->kvs[op->kv];
    const bw_kv_desc *d = &kv->desc;
    static _Thread_local char formats[16];
    const char *const names[][2] = {{"F32", "f32"}, {"F16", "f16"}, {"Q8_0", "q8_0"}, {"Q5_1", "q5_1"}};
    const char *k = NULL, *v = NULL;
    for (int i = 0; i < 4; i++) {
        if (!strcmp(d->kt->name, names[i][0])) k = names[i][1];
        if (!strcmp(d->vt->name, names[i][0])) v = names[i][1];
    }
    check_name(c, "KV_APPEND, ATTEND %s/%s %d/%d heads of %d, window %lld of the model", d->kt->name, d->vt->name, op->i[0], d->heads,
               d->dim, (long long)kv->window);
    if (!k || !v) return check_skip(c, "a KV format that cannot be asked for by name");
    strcat(strcat(strcpy(formats, k), "/"), v);
    c->kv = formats;
    int64_t past = kv->window > 0 && kv->window < 600 ? kv->window + 40 : 200;
    BW_TRY(check_line(c, "KV cache heads=%d dim=%d window=%lld", d->heads, d->dim, (long long)kv->window));
    int64_t q = (int64_t)op->i[0] * d->dim, each = (int64_t)d->heads * d->dim;
    if (!check_input(c, "q", q) || !check_input(c, "k", each) || !check_input(c, "v", each)) return memory();
    BW_TRY(check_line(c, "BUF y %lld\nKV_APPEND k=k v=v kv=cache\nATTEND y=y q=q kv=cache heads=%d scale=%.17g", (long long)q, op->i[0],
                      op->f[0]));
    c->rows[c->n_steps++] = (int)past;
    c->rows[c->n_steps++] = 1;
    c->rows[c->n_steps++] = 9;
    return check_end(c, "y", q);
}

static int model_make(check_case *c, int i) {
    if (!c->model) {
        check_name(c, "shapes of a model");
        return check_skip(c, "no model is loaded");
    }
    const bw_list *l = NULL;
    int at = find_op(c->model, i, &l, NULL);
    const bw_op *op = &l->ops[at];
    if (op->code == BW_OP_LINEAR) return make_linear(c, op);
    return op->code == BW_OP_NORM ? make_norm(c, l, op) : make_attend(c, l, op);
}
const check_generator bw_check_model = {model_count, model_make};
