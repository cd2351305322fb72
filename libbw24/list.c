/* The list: what a model means. Owns the text form, its parser, the shape rules of every op and the printed form.
 * Knows no backend and no model by name.
 *
 * Text, one item a line:
 *   BUF name width            KV name heads=H dim=D window=W [values=keys] [of=trunk]            STATE name floats
 *   values=keys: a key is its own value, kept once; of=trunk: the first list's cache of that name, for reading
 *   OP key=value ... [@ where]
 * Operand keys and kinds come from ops.def. */
#define _POSIX_C_SOURCE 200809L /* strdup, strtok_r */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "route.h"

enum { MAX_LINE = 1024, MAX_FIELDS = 12, MAX_NAME = 128 };

/* ---- the operand grammar, read from ops.def once per use: "y:y w:w scale:f?=1" */
typedef struct field { char key[12]; char kind; bool optional; const char *dflt; int dflt_len; } field;
typedef struct op_spec { const char *name, *operands; enum bw_state_class state; } op_spec;

#define NONE BW_NONE
#define APPEND BW_APPEND
#define FOLD BW_FOLD
static const op_spec specs[BW_N_OPS] = {
#define OP(name, operands, state) {#name, operands, state},
#include "ops.def"
#undef OP
};
#undef NONE
#undef APPEND
#undef FOLD

const char *bw_op_name(enum bw_opcode c) { return specs[c].name; }

int bw24_op_info(int32_t index, bw24_op_facts *out) {
    static const char *const states[] = {"NONE", "APPEND", "FOLD"};
    if (index < 0 || index >= BW_N_OPS || !out) return BW24_E_ARG;
    *out = (bw24_op_facts){specs[index].name, specs[index].operands, states[specs[index].state]};
    return 0;
}

static int op_fields(const char *spec, field *f) {
    int n = 0;
    for (const char *p = spec; *p && n < MAX_FIELDS; n++) {
        while (*p == ' ') p++;
        const char *colon = strchr(p, ':');
        int len = (int)(colon - p);
        memcpy(f[n].key, p, (size_t)len);
        f[n].key[len] = 0;
        f[n].kind = colon[1];
        p = colon + 2;
        f[n].optional = *p == '?';
        if (f[n].optional) p++;
        f[n].dflt = NULL;
        f[n].dflt_len = 0;
        if (*p == '=') {
            f[n].dflt = ++p;
            while (*p && *p != ' ') p++;
            f[n].dflt_len = (int)(p - f[n].dflt);
        }
        while (*p == ' ') p++;
    }
    return n;
}

/* ---- growable text */
int bw_textf(bw_text *t, const char *fmt, ...) {
    va_list ap, aq;
    va_start(ap, fmt);
    va_copy(aq, ap);
    int need = vsnprintf(NULL, 0, fmt, aq);
    va_end(aq);
    if (t->n + (size_t)need + 1 > t->cap) {
        size_t cap = (t->cap + (size_t)need + 1) * 2;
        char *s = realloc(t->s, cap);
        if (!s) { va_end(ap); return bw_fail(BW24_E_MEMORY, "out of memory for %zu bytes of text", cap); }
        t->s = s;
        t->cap = cap;
    }
    vsnprintf(t->s + t->n, t->cap - t->n, fmt, ap);
    va_end(ap);
    t->n += (size_t)need;
    return 0;
}

/* ---- lookups */
static int find_buf(const bw_list *l, const char *name) {
    for (int i = 0; i < l->n_bufs; i++)
        if (!strcmp(l->bufs[i].name, name)) return i;
    return -1;
}
static int find_kv(const bw_list *l, const char *name) {
    for (int i = 0; i < l->n_kvs; i++)
        if (!strcmp(l->kvs[i].name, name)) return i;
    return -1;
}
static int find_state(const bw_list *l, const char *name) {
    for (int i = 0; i < l->n_states; i++)
        if (!strcmp(l->states[i].name, name)) return i;
    return -1;
}
/* position of `word` in "a,b,c" or -1 */
static int enum_index(const char *names, int len, const char *word) {
    size_t w = strlen(word);
    int i = 0;
    for (const char *p = names; p < names + len; i++) {
        const char *e = p;
        while (e < names + len && *e != ',') e++;
        if ((size_t)(e - p) == w && !memcmp(p, word, w)) return i;
        p = e + 1;
    }
    return -1;
}

/* ---- parsing */
typedef struct parser { bw24_model *m; bw_list *l; int line; char *tok[MAX_FIELDS + 4]; int n_tok; char *where; } parser;

static int syntax(const parser *p, const char *what, const char *value) {
    return bw_fail(BW24_E_SYNTAX, "list %s line %d: %s '%s'", p->l->role, p->line, what, value);
}

static int parse_i64(const parser *p, const char *s, int64_t lo, int64_t hi, int64_t *out) {
    char *end;
    long long v = strtoll(s, &end, 10);
    if (end == s || *end || v < lo || v > hi)
        return bw_fail(BW24_E_SYNTAX, "list %s line %d: expected an integer %lld..%lld, found '%s'", p->l->role, p->line, (long long)lo, (long long)hi, s);
    *out = v;
    return 0;
}

static int split(parser *p, char *line) {
    p->n_tok = 0;
    p->where = NULL;
    char *at = strstr(line, " @ ");
    if (at) { *at = 0; p->where = at + 3; }
    char *save = NULL;
    for (char *t = strtok_r(line, " \t\r", &save); t; t = strtok_r(NULL, " \t\r", &save)) {
        if (p->n_tok == MAX_FIELDS + 4) return syntax(p, "too many fields near", t);
        if (strlen(t) >= MAX_NAME) return syntax(p, "field too long", "...");
        p->tok[p->n_tok++] = t;
    }
    return 0;
}

static const char *value_of(const parser *p, const char *key) {
    size_t k = strlen(key);
    for (int i = 1; i < p->n_tok; i++)
        if (!strncmp(p->tok[i], key, k) && p->tok[i][k] == '=') return p->tok[i] + k + 1;
    return NULL;
}

static int parse_buf(parser *p) {
    bw_list *l = p->l;
    int64_t width = 0;
    if (p->n_tok != 3) return syntax(p, "expected BUF name width near", p->tok[0]);
    if (l->n_bufs == BW_MAX_BUF) return syntax(p, "too many buffers at", p->tok[1]);
    if (find_buf(l, p->tok[1]) >= 0) return syntax(p, "buffer declared twice", p->tok[1]);
    BW_TRY(parse_i64(p, p->tok[2], 1, 1 << 24, &width));
    char *name = strdup(p->tok[1]);
    if (!name) return bw_fail(BW24_E_MEMORY, "out of memory for a buffer name");
    l->bufs[l->n_bufs++] = (bw_buf){name, width, BW_ROWS_UNSET};
    return 0;
}

/* the first list's cache that one of this list stands for */
static int borrow_kv(const parser *p, const char *of, bw_kv *kv) {
    const bw_list *from = p->m->n_lists ? p->m->lists[0] : NULL;
    int k = from && !strcmp(from->role, of) ? find_kv(from, kv->name) : -1;
    if (k < 0) return syntax(p, "no earlier list has the KV cache", kv->name);
    const bw_kv *own = &from->kvs[k];
    if (own->desc.heads != kv->desc.heads || own->desc.dim != kv->desc.dim || own->desc.shared != kv->desc.shared || own->window != kv->window)
        return bw_fail(BW24_E_SHAPE, "list %s line %d: KV %s of %s has heads=%d dim=%d window=%lld, here heads=%d dim=%d window=%lld", p->l->role, p->line,
                       kv->name, of, own->desc.heads, own->desc.dim, (long long)own->window, kv->desc.heads, kv->desc.dim, (long long)kv->window);
    kv->desc = own->desc;
    kv->klass = own->klass;
    kv->offset = own->offset;
    kv->borrowed = p->l->borrows = true;
    return 0;
}

static int parse_kv(parser *p) {
    bw_list *l = p->l;
    const char *h = value_of(p, "heads"), *d = value_of(p, "dim"), *w = value_of(p, "window"), *of = value_of(p, "of"), *v = value_of(p, "values");
    if (p->n_tok != 5 + (of != NULL) + (v != NULL) || !h || !d || !w) return syntax(p, "expected KV name heads= dim= window= [values=] [of=] near", p->tok[0]);
    if (v && strcmp(v, "keys")) return syntax(p, "values= takes keys, found", v);
    if (l->n_kvs == BW_MAX_KV) return syntax(p, "too many KV caches at", p->tok[1]);
    if (find_kv(l, p->tok[1]) >= 0) return syntax(p, "KV cache declared twice", p->tok[1]);
    int64_t heads = 0, dim = 0, window = 0;
    BW_TRY(parse_i64(p, h, 1, 1024, &heads));
    BW_TRY(parse_i64(p, d, 1, 1024, &dim));
    BW_TRY(parse_i64(p, w, 0, INT32_MAX, &window));
    bw_kv *grown = realloc(l->kvs, (size_t)(l->n_kvs + 1) * sizeof *grown);
    if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for %d KV caches", l->n_kvs + 1);
    l->kvs = grown;
    bw_kv *kv = &l->kvs[l->n_kvs];
    memset(kv, 0, sizeof *kv);
    if (!(kv->name = strdup(p->tok[1]))) return bw_fail(BW24_E_MEMORY, "out of memory for a KV name");
    l->n_kvs++;
    kv->window = window;
    const bw_type_info *const *types = p->m->kv_type[window > 0];
    kv->desc = (bw_kv_desc){(int)heads, (int)dim, types[0], types[v ? 0 : 1], v != NULL};
    return of ? borrow_kv(p, of, kv) : 0;
}

static int parse_state(parser *p) {
    bw_list *l = p->l;
    int64_t floats = 0;
    if (p->n_tok != 3) return syntax(p, "expected STATE name floats near", p->tok[0]);
    if (l->n_states == BW_MAX_KV) return syntax(p, "too many states at", p->tok[1]);
    if (find_state(l, p->tok[1]) >= 0) return syntax(p, "state declared twice", p->tok[1]);
    BW_TRY(parse_i64(p, p->tok[2], 1, 1 << 28, &floats));
    bw_state *grown = realloc(l->states, (size_t)(l->n_states + 1) * sizeof *grown);
    if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for %d states", l->n_states + 1);
    l->states = grown;
    char *name = strdup(p->tok[1]);
    if (!name) return bw_fail(BW24_E_MEMORY, "out of memory for a state's name");
    l->states[l->n_states++] = (bw_state){.name = name, .floats = floats, .op = -1, .offset = l->state_floats};
    l->state_floats += ((size_t)floats + 15) & ~(size_t)15;
    return 0;
}

/* one operand into its slot; n counts the slots used per kind */
typedef struct slots { int buf, w, i, f; } slots;
static int parse_operand(parser *p, bw_op *op, const field *f, const char *v, slots *n) {
    int64_t x = 0;
    switch (f->kind) {
    case 'y': case 'x': case 'b':
        if ((op->buf[n->buf] = find_buf(p->l, v)) < 0) return syntax(p, "unknown buffer", v);
        break;
    case 'w':
        if (!(op->w[n->w] = bw_find_tensor(p->m, v)))
            return bw_fail(BW24_E_MISSING, "list %s line %d: %s needs tensor '%s', which was not loaded", p->l->role, p->line, specs[op->code].name, v);
        op->w[n->w]->used = true;
        break;
    case 'k':
        if ((op->kv = find_kv(p->l, v)) < 0) return syntax(p, "unknown KV cache", v);
        break;
    case 's':
        if ((op->state = find_state(p->l, v)) < 0) return syntax(p, "unknown state", v);
        break;
    case 'i':
        BW_TRY(parse_i64(p, v, 0, INT32_MAX, &x));
        op->i[n->i] = (int)x;
        break;
    case 'e':
        if ((op->i[n->i] = enum_index(f->dflt, f->dflt_len, v)) < 0)
            return bw_fail(BW24_E_SYNTAX, "list %s line %d: %s=%s, expected one of %.*s", p->l->role, p->line, f->key, v, f->dflt_len, f->dflt);
        break;
    default: {
        char *end;
        op->f[n->f] = strtod(v, &end);
        if (end == v || *end || !(op->f[n->f] - op->f[n->f] == 0)) return syntax(p, "expected a finite number, found", v);
    }
    }
    return 0;
}

static void next_slot(slots *n, char kind) {
    if (strchr("yxb", kind)) n->buf++;
    else if (kind == 'w') n->w++;
    else if (kind == 'i' || kind == 'e') n->i++;
    else if (kind == 'f') n->f++;
}

static int check_op(bw_list *l, int index);

static int parse_op(parser *p) {
    bw_list *l = p->l;
    int code = 0;
    while (code < BW_N_OPS && strcmp(specs[code].name, p->tok[0])) code++;
    if (code == BW_N_OPS) return syntax(p, "unknown op", p->tok[0]);
    bw_op *grown = l->n_ops % 64 ? l->ops : realloc(l->ops, (size_t)(l->n_ops + 64) * sizeof *grown);
    if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for %d ops", l->n_ops + 64);
    l->ops = grown;
    bw_op *op = &l->ops[l->n_ops];
    memset(op, 0, sizeof *op);
    op->code = (enum bw_opcode)code;
    op->kv = op->state = -1;
    for (int i = 0; i < BW_OP_BUFS; i++) op->buf[i] = -1;
    field f[MAX_FIELDS];
    int n = op_fields(specs[code].operands, f), seen = 0;
    slots at = {0};
    for (int i = 0; i < n; i++) {
        const char *v = value_of(p, f[i].key);
        char word[MAX_NAME];
        if (v) seen++;
        if (!v && !f[i].optional)
            return bw_fail(BW24_E_SYNTAX, "list %s line %d: %s lacks %s=", l->role, p->line, specs[code].name, f[i].key);
        if (!v && f[i].dflt) { /* an enumeration's first name, or the default number */
            int len = f[i].kind == 'e' && memchr(f[i].dflt, ',', (size_t)f[i].dflt_len) ? (int)((char *)memchr(f[i].dflt, ',', (size_t)f[i].dflt_len) - f[i].dflt) : f[i].dflt_len;
            snprintf(word, sizeof word, "%.*s", len, f[i].dflt);
            v = word;
        }
        if (v) BW_TRY(parse_operand(p, op, &f[i], v, &at));
        next_slot(&at, f[i].kind);
    }
    if (seen != p->n_tok - 1) return syntax(p, "unknown or repeated operand in", p->tok[0]);
    op->where = p->where ? strdup(p->where) : NULL;
    l->n_ops++;
    return check_op(l, l->n_ops - 1);
}

static int parse_line(parser *p, char *line) {
    BW_TRY(split(p, line));
    if (!p->n_tok || p->tok[0][0] == '#') return 0;
    if (!strcmp(p->tok[0], "BUF")) return parse_buf(p);
    if (!strcmp(p->tok[0], "KV")) return parse_kv(p);
    if (!strcmp(p->tok[0], "STATE")) return parse_state(p);
    return parse_op(p);
}

int bw_list_parse(bw24_model *m, const char *role, const char *text, bw_list **out) {
    bw_list *l = calloc(1, sizeof *l);
    if (!l || !(l->role = strdup(role))) { free(l); return bw_fail(BW24_E_MEMORY, "out of memory for a list"); }
    parser p = {.m = m, .l = l};
    char line[MAX_LINE];
    int rc = 0;
    while (*text && !rc) {
        const char *end = strchr(text, '\n');
        size_t n = end ? (size_t)(end - text) : strlen(text);
        p.line++;
        if (n >= sizeof line) { rc = bw_fail(BW24_E_SYNTAX, "list %s line %d: longer than %d bytes", role, p.line, MAX_LINE - 1); break; }
        memcpy(line, text, n);
        line[n] = 0;
        rc = parse_line(&p, line);
        text += n + (end != NULL);
    }
    l->logits = rc ? -1 : find_buf(l, "logits");
    l->hidden = rc ? -1 : find_buf(l, "hidden");
    if (l->hidden >= 0 && l->bufs[l->hidden].rows != BW_ROWS_WANT)
        rc = bw_fail(BW24_E_SYNTAX, "list %s: no op writes the buffer 'hidden' for the picked rows", role);
    if (!rc && (l->logits < 0 || l->bufs[l->logits].rows != BW_ROWS_WANT))
        rc = bw_fail(BW24_E_SYNTAX, "list %s: no op writes the buffer 'logits' for the picked rows", role);
    for (int i = 0; i < l->n_kvs && l->borrows && !rc; i++)
        if (!l->kvs[i].borrowed) rc = bw_fail(BW24_E_SYNTAX, "list %s: KV cache %s is its own, others are borrowed; all must be of one kind", role, l->kvs[i].name);
    if (rc) bw_list_free(l);
    else *out = l;
    return rc;
}

void bw_list_free(bw_list *l) {
    if (!l) return;
    for (int i = 0; i < l->n_bufs; i++) free(l->bufs[i].name);
    for (int i = 0; i < l->n_kvs; i++) free(l->kvs[i].name);
    for (int i = 0; i < l->n_states; i++) free(l->states[i].name);
    for (int i = 0; i < l->n_ops; i++) free(l->ops[i].where);
    bw_plan_free(l->plan);
    free(l->ids);
    free(l->kvs);
    free(l->states);
    free(l->ops);
    free(l->text);
    free(l->plan_text);
    free(l->role);
    free(l);
}

/* ---- shape rules */
void bw_op_label(const bw_list *l, int index, char *out, size_t size) {
    const bw_op *op = &l->ops[index];
    const char *what = op->w[0] ? op->w[0]->name : op->kv >= 0 ? l->kvs[op->kv].name : op->buf[0] >= 0 ? l->bufs[op->buf[0]].name : "";
    snprintf(out, size, "op %d %s %s (%s)", index, specs[op->code].name, what, op->where ? op->where : "?");
}

static int shape(const bw_list *l, int index, const char *what, int64_t expects, int64_t has) {
    char label[256];
    bw_op_label(l, index, label, sizeof label);
    return bw_fail(BW24_E_SHAPE, "%s: %s expects %lld, found %lld", label, what, (long long)expects, (long long)has);
}
#define EXPECT(what, expects, has) do { int64_t e_ = (expects), h_ = (has); if (e_ != h_) return shape(l, index, what, e_, h_); } while (0)

static int rows_rule(bw_list *l, int index) {
    const bw_op *op = &l->ops[index];
    char label[256];
    enum bw_rows_class r = op->code == BW_OP_EMBED || op->code == BW_OP_HIDDEN ? BW_ROWS_ALL : BW_ROWS_UNSET;
    int first_in = strchr("y", specs[op->code].operands[2]) && op->code != BW_OP_KV_APPEND ? 1 : 0; /* buf[0] is the output, but for in-place ops */
    for (int i = first_in; i < BW_OP_BUFS; i++) {
        if (op->buf[i] < 0) continue;
        enum bw_rows_class c = l->bufs[op->buf[i]].rows;
        if (c == BW_ROWS_UNSET || (r != BW_ROWS_UNSET && c != r)) {
            bw_op_label(l, index, label, sizeof label);
            return bw_fail(BW24_E_SHAPE, "%s: buffer '%s' %s", label, l->bufs[op->buf[i]].name,
                           c == BW_ROWS_UNSET ? "is read before any op writes it" : "holds other rows than the op's other inputs");
        }
        r = c;
    }
    if (op->code == BW_OP_PICK_ROWS) {
        if (r != BW_ROWS_ALL) return shape(l, index, "PICK_ROWS of rows already picked", BW_ROWS_ALL, r);
        r = BW_ROWS_WANT;
    }
    if (first_in == 1) l->bufs[op->buf[0]].rows = r;
    if (op->code == BW_OP_KV_APPEND && r != BW_ROWS_ALL) return shape(l, index, "KV_APPEND of picked rows", BW_ROWS_ALL, r);
    return 0;
}

static int check_linear(const bw_list *l, int index, const bw_op *op, int64_t w0, int64_t w1) {
    const bw_tensor *w = op->w[0];
    EXPECT("dimensions of the tensor", 2, w->n_dims < 2 || w->ne[2] * w->ne[3] == 1 ? 2 : w->n_dims);
    EXPECT("columns of the tensor", w1, w->ne[0]);
    EXPECT("rows of the tensor", w0, w->ne[1]);
    if (w->type->form != BW_FLOAT && w1 % 32) return shape(l, index, "columns of a quantised tensor, modulo 32,", 0, w1 % 32);
    if (op->w[1]) EXPECT("values of the bias", w0, op->w[1]->ne[0] * op->w[1]->ne[1]);
    return 0;
}

static int check_rope(const bw_list *l, int index, const bw_op *op, int64_t width) {
    EXPECT("heads x dim", (int64_t)op->i[0] * op->i[1], width);
    if (op->i[2] < 2 || op->i[2] % 2 || op->i[2] > op->i[1]) return shape(l, index, "an even rotated size up to the head's", op->i[1], op->i[2]);
    if (op->w[0]) EXPECT("values of the frequency factors", op->i[2] / 2, op->w[0]->ne[0]);
    if (!(op->f[0] >= 1.0)) return shape(l, index, "a rope base of at least 1: here", 1, (int64_t)op->f[0]);
    return 0;
}

static int check_attend(const bw_list *l, int index, const bw_op *op, int64_t y, int64_t q) {
    const bw_kv_desc *d = &l->kvs[op->kv].desc;
    EXPECT("heads x dim of the query", (int64_t)op->i[0] * d->dim, q);
    EXPECT("heads x dim of the output", (int64_t)op->i[0] * d->dim, y);
    if (op->i[0] < 1 || op->i[0] % d->heads) return shape(l, index, "query heads, a multiple of KV heads, here modulo", 0, op->i[0] % d->heads);
    return 0;
}

/* the output of an op whose rows or columns are worked on apart may not be one of its inputs */
static int check_apart(const bw_list *l, int index, const bw_op *op) {
    for (int i = 1; i < BW_OP_BUFS; i++)
        if (op->buf[i] == op->buf[0]) return shape(l, index, "an output that is no input; buffer number", -1, op->buf[0]);
    return 0;
}

static int64_t values_of(const bw_tensor *t) { return t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]; }

static int check_route(const bw_list *l, int index, const bw_op *op, int64_t y, int64_t experts) {
    int top = op->i[0], groups = op->i[1], keep = op->i[2];
    if (experts > BW_ROUTE_MAX) return shape(l, index, "at most so many experts", BW_ROUTE_MAX, experts);
    if (top < 1 || top > experts) return shape(l, index, "a top of 1 up to the experts", experts, top);
    EXPECT("weights and ids", 2 * top, y);
    if (groups < 1 || experts % groups) return shape(l, index, "experts, modulo groups,", 0, groups ? experts % groups : -1);
    if (keep < 1 || keep > groups) return shape(l, index, "kept groups of 1 up to the groups", groups, keep);
    if (keep * (experts / groups) < top) return shape(l, index, "a top within the kept groups' experts", keep * (experts / groups), top);
    if (op->w[0]) EXPECT("values of the selection bias", experts, values_of(op->w[0]));
    return 0;
}

/* gate and up {x, f, e} or fused {x, 2 f, e}, down {f, y, e}; per-expert scales {e} */
static int check_experts(const bw_list *l, int index, bw_op *op, const int64_t *b) {
    bw_tensor *gate = op->w[BW_EXP_GATE], *up = op->w[BW_EXP_UP], *down = op->w[BW_EXP_DOWN];
    int64_t experts = down->ne[2], ff = down->ne[0];
    BW_TRY(check_apart(l, index, op));
    if (b[2] < 2 || b[2] % 2) return shape(l, index, "a route of weights and ids: width modulo 2", 0, b[2] % 2);
    EXPECT("columns of gate", b[1], gate->ne[0]);
    EXPECT("rows of gate", up ? ff : 2 * ff, gate->ne[1]);
    EXPECT("experts of gate", experts, gate->ne[2]);
    EXPECT("rows of down", b[0], down->ne[1]);
    if (up) {
        EXPECT("columns of up", b[1], up->ne[0]);
        EXPECT("rows of up", ff, up->ne[1]);
        EXPECT("experts of up", experts, up->ne[2]);
    }
    for (int i = 0; i < 3; i++) {
        const bw_tensor *w = op->w[i], *s = op->w[3 + i];
        if (!w) { EXPECT("scales of a matrix that is not there", 0, s != NULL); continue; }
        EXPECT("fourth dimension", 1, w->ne[3]);
        if (w->type->form != BW_FLOAT) EXPECT("columns of a quantised tensor, modulo 32,", 0, w->ne[0] % 32);
        if (!s) continue;
        EXPECT("per-expert scales", experts, values_of(s));
        if (w->scale != 1.0f) return shape(l, index, "one kind of scale: scales per expert and for the tensor", 1, 2);
    }
    if (up) EXPECT("gate and up both of float types or both quantised", gate->type->form == BW_FLOAT, up->type->form == BW_FLOAT);
    op->experts = (int)experts;
    int from = index - 1; /* the op that wrote the route: ids of experts that exist */
    while (from >= 0 && l->ops[from].buf[0] != op->buf[2]) from--;
    if (from < 0 || l->ops[from].code != BW_OP_ROUTE) return shape(l, index, "a route written by the op", BW_OP_ROUTE, from < 0 ? -1 : (int)l->ops[from].code);
    EXPECT("experts of the route", experts, l->bufs[l->ops[from].buf[1]].width);
    return 0;
}

/* the op owns its state; its rows run through all of a sequence's tokens */
static int check_fold(bw_list *l, int index, const bw_op *op, int64_t floats, int64_t log_width) {
    bw_state *s = &l->states[op->state];
    BW_TRY(check_apart(l, index, op));
    EXPECT("floats of the state", floats, s->floats);
    if (s->op >= 0) return shape(l, index, "a state of its own; the state belongs to op", index, s->op);
    if (l->bufs[op->buf[0]].rows != BW_ROWS_ALL) return shape(l, index, "all rows of the step: class", BW_ROWS_ALL, l->bufs[op->buf[0]].rows);
    s->op = index;
    s->log_width = log_width;
    s->log_offset = l->log_floats;
    l->log_floats += ((size_t)log_width * BW_LOG_ROWS + 15) & ~(size_t)15;
    return 0;
}

static int check_conv(bw_list *l, int index, const bw_op *op, const int64_t *b) {
    int64_t taps = op->w[0]->ne[0];
    if (taps < 2 || taps > BW_CONV_TAPS) return shape(l, index, "taps of 2 up to", BW_CONV_TAPS, taps);
    EXPECT("width", b[0], b[1]);
    EXPECT("channels of the weight", b[0], op->w[0]->ne[1]);
    EXPECT("values of the weight", taps * b[0], values_of(op->w[0]));
    return check_fold(l, index, op, (taps - 1) * b[0], b[0]);
}

/* y, v: [heads][dv]; q, k: [kheads][dk]; g, b: [heads] */
static int check_delta(bw_list *l, int index, const bw_op *op, const int64_t *b) {
    int64_t heads = op->i[0], kheads = op->i[1];
    if (heads < 1 || kheads < 1 || heads % kheads) return shape(l, index, "value heads, modulo key heads,", 0, kheads ? heads % kheads : -1);
    if (b[2] % kheads || b[3] % heads) return shape(l, index, "widths of k and v, modulo heads,", 0, b[2] % kheads + b[3] % heads);
    EXPECT("width of q", b[2], b[1]);
    EXPECT("width of the output", b[3], b[0]);
    EXPECT("width of the decay", heads, b[4]);
    EXPECT("width of beta", heads, b[5]);
    return check_fold(l, index, op, heads * (b[2] / kheads) * (b[3] / heads), b[2] + b[3] + 2 * heads);
}

/* y: [heads][rows]; x: [heads][stride], of each head the columns [from, from + cols); w: {cols, rows, heads} */
static int check_perhead(const bw_list *l, int index, const bw_op *op, int64_t y, int64_t x) {
    const bw_tensor *w = op->w[0];
    int64_t heads = op->i[0];
    BW_TRY(check_apart(l, index, op));
    if (heads < 1 || x % heads || y % heads) return shape(l, index, "widths, modulo heads,", 0, heads ? x % heads + y % heads : -1);
    EXPECT("matrices of the tensor", heads, w->ne[2] * w->ne[3]);
    EXPECT("rows of the tensor", y / heads, w->ne[1]);
    if (op->i[1] + w->ne[0] > x / heads) return shape(l, index, "an end within a head of", x / heads, op->i[1] + w->ne[0]);
    if (w->type->form != BW_FLOAT && w->ne[0] % 32) return shape(l, index, "columns of a quantised tensor, modulo 32,", 0, w->ne[0] % 32);
    return 0;
}

static int check_concat(const bw_list *l, int index, const bw_op *op, const int64_t *b) {
    int64_t heads = op->i[0];
    BW_TRY(check_apart(l, index, op));
    if (heads < 1 || b[1] % heads || b[2] % heads) return shape(l, index, "widths, modulo heads,", 0, heads ? b[1] % heads + b[2] % heads : -1);
    EXPECT("width of both inputs", b[0], b[1] + b[2]);
    return 0;
}

static int check_slice(const bw_list *l, int index, const bw_op *op, int64_t y, int64_t x) {
    int64_t heads = op->i[0];
    BW_TRY(check_apart(l, index, op));
    if (heads < 1 || x % heads || y % heads) return shape(l, index, "widths, modulo heads,", 0, heads ? x % heads + y % heads : -1);
    if (op->i[1] + y / heads > x / heads) return shape(l, index, "an end within a head of", x / heads, op->i[1] + y / heads);
    return 0;
}

static int check_op(bw_list *l, int index) {
    bw_op *op = &l->ops[index];
    int64_t b[BW_OP_BUFS];
    for (int i = 0; i < BW_OP_BUFS; i++) b[i] = op->buf[i] >= 0 ? l->bufs[op->buf[i]].width : 0;
    BW_TRY(rows_rule(l, index));
    switch (op->code) {
    case BW_OP_EMBED: EXPECT("columns of the tensor", b[0], op->w[0]->ne[0]); break;
    case BW_OP_HIDDEN: l->takes_hidden = true; break;
    case BW_OP_CONCAT: return check_concat(l, index, op, b);
    case BW_OP_PERHEAD: return check_perhead(l, index, op, b[0], b[1]);
    case BW_OP_NORM:
        EXPECT("width", b[0], b[1]);
        if (op->i[0] < 1 || b[0] % op->i[0]) return shape(l, index, "width, modulo heads,", 0, op->i[0] ? b[0] % op->i[0] : -1);
        if (op->w[0]) EXPECT("values of the weight", b[0] / op->i[0], op->w[0]->ne[0] * op->w[0]->ne[1]);
        break;
    case BW_OP_LINEAR: return check_linear(l, index, op, b[0], b[1]);
    case BW_OP_ADD: case BW_OP_GLU:
        EXPECT("width of the first input", b[0], b[1]);
        EXPECT("width of the second input", b[0], b[2]);
        break;
    case BW_OP_SOFTCAP: case BW_OP_PICK_ROWS: EXPECT("width", b[0], b[1]); break;
    case BW_OP_SCALE:
        EXPECT("width", b[0], b[1]);
        if (op->w[0]) EXPECT("values of the factor", 1, values_of(op->w[0]));
        break;
    case BW_OP_SIGMOID: EXPECT("width", b[0], b[1]); break;
    case BW_OP_DECAY:
        EXPECT("width", b[0], b[1]);
        EXPECT("values of a", b[0], values_of(op->w[0]));
        EXPECT("values of dt", b[0], values_of(op->w[1]));
        break;
    case BW_OP_CONV: return check_conv(l, index, op, b);
    case BW_OP_DELTA: return check_delta(l, index, op, b);
    case BW_OP_SLICE: return check_slice(l, index, op, b[0], b[1]);
    case BW_OP_GATE:
        EXPECT("width", b[0], b[1]);
        EXPECT("width, modulo the gate's,", 0, b[0] % b[2]);
        break;
    case BW_OP_ROUTE: return check_route(l, index, op, b[0], b[1]);
    case BW_OP_EXPERTS: return check_experts(l, index, op, b);
    case BW_OP_ROPE: return check_rope(l, index, op, b[0]);
    case BW_OP_KV_APPEND:
        EXPECT("a KV cache of the list's own: borrowed", 0, l->kvs[op->kv].borrowed);
        EXPECT("K width", (int64_t)l->kvs[op->kv].desc.heads * l->kvs[op->kv].desc.dim, b[0]);
        EXPECT("V width", (int64_t)l->kvs[op->kv].desc.heads * l->kvs[op->kv].desc.dim, b[1]);
        if (l->kvs[op->kv].desc.shared) EXPECT("values that are the keys: buffer number", op->buf[0], op->buf[1]);
        break;
    case BW_OP_ATTEND: return check_attend(l, index, op, b[0], b[1]);
    default: break;
    }
    return 0;
}

/* ---- printing: the text form again, so that what is printed can be loaded */
static int print_op(bw_text *t, const bw_list *l, const bw_op *op) {
    field f[MAX_FIELDS];
    int n = op_fields(specs[op->code].operands, f);
    slots at = {0};
    BW_TRY(bw_textf(t, "%-9s", specs[op->code].name));
    for (int i = 0; i < n; i++) {
        const char *k = f[i].key;
        switch (f[i].kind) {
        case 'y': case 'x': case 'b': BW_TRY(bw_textf(t, " %s=%s", k, l->bufs[op->buf[at.buf]].name)); break;
        case 'w': if (op->w[at.w]) BW_TRY(bw_textf(t, " %s=%s", k, op->w[at.w]->name)); break;
        case 's': BW_TRY(bw_textf(t, " %s=%s", k, l->states[op->state].name)); break;
        case 'k': BW_TRY(bw_textf(t, " %s=%s", k, l->kvs[op->kv].name)); break;
        case 'i': BW_TRY(bw_textf(t, " %s=%d", k, op->i[at.i])); break;
        case 'f': BW_TRY(bw_textf(t, " %s=%.17g", k, op->f[at.f])); break;
        default: {
            const char *s = f[i].dflt;
            for (int j = 0; j < op->i[at.i]; j++) s = strchr(s, ',') + 1;
            BW_TRY(bw_textf(t, " %s=%.*s", k, (int)strcspn(s, ", "), s));
        }
        }
        next_slot(&at, f[i].kind);
    }
    return bw_textf(t, "%s%s\n", op->where ? " @ " : "", op->where ? op->where : "");
}

int bw_list_print(const bw_list *l, char **out) {
    bw_text t = {0};
    int rc = 0;
    for (int i = 0; i < l->n_bufs && !rc; i++) rc = bw_textf(&t, "BUF %s %lld\n", l->bufs[i].name, (long long)l->bufs[i].width);
    for (int i = 0; i < l->n_kvs && !rc; i++)
        rc = bw_textf(&t, "KV %s heads=%d dim=%d window=%lld%s%s\n", l->kvs[i].name, l->kvs[i].desc.heads, l->kvs[i].desc.dim, (long long)l->kvs[i].window,
                      l->kvs[i].desc.shared ? " values=keys" : "", l->kvs[i].borrowed ? " of=trunk" : "");
    for (int i = 0; i < l->n_states && !rc; i++) rc = bw_textf(&t, "STATE %s %lld\n", l->states[i].name, (long long)l->states[i].floats);
    for (int i = 0; i < l->n_ops && !rc; i++) rc = print_op(&t, l, &l->ops[i]);
    if (rc) free(t.s);
    else *out = t.s;
    return rc;
}
