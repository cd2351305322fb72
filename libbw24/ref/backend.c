/* Backend "ref": the list executed op by op in plain C, one row after the other. It is the specification that the other backends must
 * equal. Owns nothing but the walk over the list; the mathematics stands in dot.c, attend.c and elementwise.c. Single-threaded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../internal.h"
#include "attend.h"
#include "dot.h"
#include "elementwise.h"
#include "fold.h"
#include "linear.h"
#include "moe.h"
#include "recur.h"

enum { BLOCK_FROM = 3, LINEAR_CHUNK = 1024 /* weight rows between two looks at the cancel flag */ };

/* what one op works on */
typedef struct ref_run {
    bw24_model *m;
    bw_list *l;
    const bw_batch *b;
    float *logits;
    int8_t *aq; /* quantised activations of one row */
    float *ad;
    float *cs;  /* one row's rope table */
    float *h;   /* what lies between the matrices of one expert */
} ref_run;

static float *row_of(const ref_run *r, int buf, int i) {
    float *base = buf == r->l->logits ? r->logits : r->l->mem[buf];
    return base + (int64_t)i * r->l->bufs[buf].width;
}

static int cancelled(const ref_run *r) {
    return atomic_load_explicit(&r->m->ctx->cancel, memory_order_relaxed) ? bw_fail(BW24_E_CANCELLED, "cancelled") : 0;
}

/*
 * EMBED  y = row `token` of w, decoded to f32, times scale
 */
/*
 * HIDDEN  y = the caller's rows (bw24_step_hidden), as they are
 */
/*
 * PICK_ROWS  y = the rows of x whose logits are wanted, in order; ops after it see these rows only
 */
static void do_embed(const ref_run *r, const bw_op *op, int i) {
    const bw_tensor *w = op->w[0];
    float *y = row_of(r, op->buf[0], i);
    const uint8_t *src = w->data + (int64_t)r->b->token[i] * bw_row_bytes(w->type, w->ne[0]);
    for (int64_t c = 0; c < w->ne[0]; c += w->type->block, src += w->type->bytes) w->type->decode(src, y + c);
    ref_scale(y, (float)op->f[0], y, w->ne[0]);
}

/* products of few rows: dot.c's loops as they stand */
static int linear_by_row(const ref_run *r, const bw_op *op, const bw_rowset *rows, int floats) {
    const bw_tensor *w = op->w[0];
    int64_t cols = w->ne[0], stride = bw_row_bytes(w->type, cols);
    int rc = 0;
    for (int i = 0; i < rows->n; i++) {
        const float *x = row_of(r, op->buf[1], i);
        float *y = row_of(r, op->buf[0], i);
        if (!floats && ref_quant_row(x, cols, r->aq, r->ad)) return BW24_E_NUMERIC;
        for (int64_t j = 0; j < w->ne[1] && !rc; j++) {
            const uint8_t *row = w->data + j * stride;
            y[j] = floats ? ref_dot_row_f32(w->type, row, cols, x) : ref_dot_row(w->type, row, cols, r->aq, r->ad);
            if (j % LINEAR_CHUNK == 0) rc = cancelled(r);
        }
    }
    return rc;
}

/* products of many rows: the same sums, several rows at a time */
static int linear_by_block(const ref_run *r, const bw_op *op, const bw_rowset *rows, int floats) {
    const bw_tensor *w = op->w[0];
    ref_acts a;
    int rc = ref_acts_init(&a, row_of(r, op->buf[1], 0), rows->n, w->ne[0], floats);
    if (rc) rc = rc < 0 ? BW24_E_NUMERIC : bw_fail(BW24_E_MEMORY, "out of memory for %d activation rows", rows->n);
    for (int64_t j = 0; j < w->ne[1] && !rc; j += LINEAR_CHUNK) {
        int64_t end = j + LINEAR_CHUNK < w->ne[1] ? j + LINEAR_CHUNK : w->ne[1];
        ref_linear_rows(&a, w->type, w->data, j, end, row_of(r, op->buf[0], 0), w->ne[1]);
        rc = cancelled(r);
    }
    ref_acts_free(&a);
    return rc;
}

static int do_linear(const ref_run *r, const bw_op *op, const bw_rowset *rows) {
    const bw_tensor *w = op->w[0];
    const float *bias = op->w[1] ? op->w[1]->dense : NULL;
    int floats = r->m->ctx->float_act || w->type->form == BW_FLOAT;
    BW_TRY(rows->n < BLOCK_FROM ? linear_by_row(r, op, rows, floats) : linear_by_block(r, op, rows, floats));
    for (int i = 0; i < rows->n; i++) {
        float *y = row_of(r, op->buf[0], i);
        for (int64_t j = 0; j < w->ne[1]; j++) {
            if (w->scale != 1.0f) y[j] = y[j] * w->scale;
            if (bias) y[j] = y[j] + bias[j];
        }
    }
    return 0;
}

static void do_norm(const ref_run *r, const bw_op *op, int i) {
    const float *x = row_of(r, op->buf[1], i);
    float *y = row_of(r, op->buf[0], i);
    int64_t n = r->l->bufs[op->buf[0]].width / op->i[0];
    for (int h = 0; h < op->i[0]; h++) ref_norm(x + h * n, op->w[0] ? op->w[0]->dense : NULL, y + h * n, n, (float)op->f[0], op->i[1]);
}

static void do_rope(const ref_run *r, const bw_op *op, int64_t pos, int i) {
    float *x = row_of(r, op->buf[0], i);
    bw_rope_table(pos, op->i[2], op->f[0], op->w[0] ? op->w[0]->dense : NULL, op->f[1], r->cs);
    ref_rope(x, x, op->i[0], op->i[1], op->i[2], (enum bw_rope_style)op->i[3], r->cs);
}

static const bw_run *run_at(const bw_rowset *s, int i) {
    const bw_run *run = s->runs;
    while (i >= run->first + run->n) run++;
    return run;
}

static int do_append(const ref_run *r, const bw_op *op, int i) {
    const bw_kv *kv = &r->l->kvs[op->kv];
    const bw24_seq *s = run_at(&r->b->all, i)->seq;
    int64_t pos = r->b->all.pos[i];
    uint8_t *page = s->data[kv->klass][pos / BW_PAGE_TOKENS] + kv->offset;
    return ref_kv_append(&kv->desc, page, (int)(pos % BW_PAGE_TOKENS), row_of(r, op->buf[0], i), row_of(r, op->buf[1], i)) ? BW24_E_NUMERIC : 0;
}

static int do_attend(const ref_run *r, const bw_op *op, const bw_rowset *rows, int i) {
    const bw_kv *kv = &r->l->kvs[op->kv];
    const bw24_seq *s = run_at(rows, i)->seq;
    uint8_t **pages = malloc((size_t)s->n_pages * sizeof *pages);
    if (!pages) return bw_fail(BW24_E_MEMORY, "out of memory for %d page pointers", s->n_pages);
    for (int p = 0; p < s->n_pages; p++) pages[p] = s->data[kv->klass][p] ? s->data[kv->klass][p] + kv->offset : NULL;
    float c = (float)(op->f[0] * 1.4426950408889634);
    int rc = ref_attend(&kv->desc, pages, bw_key_lo(kv, rows->pos[i]), bw_key_hi(r->l, rows->pos[i]), row_of(r, op->buf[1], i), op->i[0], c, row_of(r, op->buf[0], i));
    free(pages);
    return rc ? BW24_E_NUMERIC : 0;
}

static int do_route(const ref_run *r, const bw_op *op, int i) {
    bw_route c = {(int)r->l->bufs[op->buf[1]].width, op->i[0], op->i[1], op->i[2], op->i[3], (enum bw_route_kind)op->i[4], (float)op->f[0]};
    return ref_route(&c, row_of(r, op->buf[1], i), op->w[0] ? op->w[0]->dense : NULL, row_of(r, op->buf[0], i)) ? BW24_E_NUMERIC : 0;
}

static ref_matrix matrix_of(const bw_op *op, int m, int e) {
    int part;
    const bw_tensor *scale, *t = bw_expert_part(op, m, e, &part, &scale);
    return (ref_matrix){t->type, t->data + part * bw_part_bytes(t), bw_part_rows(t), t->ne[0], scale ? scale->dense[e] : t->scale};
}

static int do_experts(const ref_run *r, const bw_op *op, int i) {
    int64_t n = r->l->bufs[op->buf[0]].width;
    int top = (int)r->l->bufs[op->buf[2]].width / 2, rc = 0;
    const float *route = row_of(r, op->buf[2], i), *x = row_of(r, op->buf[1], i);
    float *y = row_of(r, op->buf[0], i);
    memset(y, 0, (size_t)n * sizeof *y);
    for (int s = 0; s < top && !rc; s++) {
        int id = (int)route[top + s];
        ref_expert e = {matrix_of(op, BW_EXP_GATE, id), matrix_of(op, BW_EXP_UP, id), matrix_of(op, BW_EXP_DOWN, id)};
        rc = cancelled(r);
        if (!rc && ref_expert_add(&e, x, route[s], (enum bw_act)op->i[0], r->m->ctx->float_act, r->aq, r->ad, r->h, y)) rc = BW24_E_NUMERIC;
    }
    return rc;
}

/*
 * PERHEAD  y[h] = w[h] x[h][from .. from + cols)   for each head, by LINEAR's order (docs/numerics.md §2, §3)
 *
 * x: [heads][stride], y: [heads][rows], w: {cols, rows, heads}. Each head's part is quantised by itself, in groups of 32 from `from` on.
 */
static int do_perhead(const ref_run *r, const bw_op *op, int i) {
    const bw_tensor *w = op->w[0];
    int64_t heads = op->i[0], cols = w->ne[0], rows = w->ne[1], row_bytes = bw_row_bytes(w->type, cols), stride = r->l->bufs[op->buf[1]].width / heads;
    int floats = r->m->ctx->float_act || w->type->form == BW_FLOAT;
    for (int64_t h = 0; h < heads; h++) {
        const float *x = row_of(r, op->buf[1], i) + h * stride + op->i[1];
        float *y = row_of(r, op->buf[0], i) + h * rows;
        const uint8_t *src = w->data + h * bw_part_bytes(w);
        if (!floats && ref_quant_row(x, cols, r->aq, r->ad)) return BW24_E_NUMERIC;
        for (int64_t j = 0; j < rows; j++, src += row_bytes) {
            y[j] = floats ? ref_dot_row_f32(w->type, src, cols, x) : ref_dot_row(w->type, src, cols, r->aq, r->ad);
            if (w->scale != 1.0f) y[j] = y[j] * w->scale;
        }
    }
    return 0;
}

static int do_row(const ref_run *r, const bw_op *op, const bw_rowset *rows, int i) {
    int64_t n = r->l->bufs[op->buf[0]].width;
    float *b[BW_OP_BUFS];
    for (int k = 0; k < BW_OP_BUFS; k++) b[k] = op->buf[k] >= 0 && op->code != BW_OP_PICK_ROWS ? row_of(r, op->buf[k], i) : NULL;
    switch (op->code) {
    case BW_OP_EMBED: do_embed(r, op, i); break;
    case BW_OP_HIDDEN: memcpy(b[0], r->b->hidden + (int64_t)i * n, (size_t)n * sizeof *b[0]); break;
    case BW_OP_CONCAT:
        ref_concat(b[1], b[2], b[0], op->i[0], r->l->bufs[op->buf[1]].width / op->i[0], r->l->bufs[op->buf[2]].width / op->i[0]);
        break;
    case BW_OP_PERHEAD: return do_perhead(r, op, i);
    case BW_OP_NORM: do_norm(r, op, i); break;
    case BW_OP_ADD: ref_add(b[1], b[2], b[0], n); break;
    case BW_OP_SCALE: ref_scale(b[1], op->w[0] ? op->w[0]->dense[0] : (float)op->f[0], b[0], n); break;
    case BW_OP_GATE: ref_gate(b[1], b[2], b[0], n, r->l->bufs[op->buf[2]].width); break;
    case BW_OP_SLICE: ref_slice(b[1], b[0], op->i[0], r->l->bufs[op->buf[1]].width / op->i[0], op->i[1], n / op->i[0]); break;
    case BW_OP_SIGMOID: ref_sigmoid(b[1], b[0], n); break;
    case BW_OP_DECAY: ref_decay(b[1], op->w[0]->dense, op->w[1]->dense, b[0], n); break;
    case BW_OP_ROUTE: return do_route(r, op, i);
    case BW_OP_EXPERTS: return do_experts(r, op, i);
    case BW_OP_GLU: ref_glu((enum bw_act)op->i[0], b[1], b[2], b[0], n); break;
    case BW_OP_ROPE: do_rope(r, op, rows->pos[i], i); break;
    case BW_OP_KV_APPEND: return do_append(r, op, i);
    case BW_OP_ATTEND: return do_attend(r, op, rows, i);
    case BW_OP_SOFTCAP: ref_softcap(b[1], (float)op->f[0], b[0], n); break;
    case BW_OP_PICK_ROWS: memcpy(row_of(r, op->buf[0], i), row_of(r, op->buf[1], r->b->want.row[i]), (size_t)n * sizeof(float)); break;
    default: return bw_fail(BW24_E_UNSUPPORTED, "backend ref has no op %s", bw_op_name(op->code));
    }
    return 0;
}

static float *fold_row(const void *arg, int buf, int64_t i) { return row_of(arg, buf, (int)i); }

static int do_fold(const ref_run *r, const bw_op *op) {
    fold_rows rows = {fold_row, r};
    int rc = 0;
    for (int i = 0; i < r->b->n_seqs && !rc; i++) {
        rc = cancelled(r);
        if (!rc) rc = ref_fold(r->l, op, &r->b->seqs[i], r->b->order, &rows);
    }
    return rc;
}

/* ops that go through their rows by themselves */
static bool whole(enum bw_opcode c) { return c == BW_OP_LINEAR || c == BW_OP_CONV || c == BW_OP_DELTA; }
static int do_whole(const ref_run *r, const bw_op *op, const bw_rowset *rows) {
    return op->code == BW_OP_LINEAR ? do_linear(r, op, rows) : do_fold(r, op);
}

static int numeric_fault(const bw_list *l, int op) {
    char label[256];
    bw_op_label(l, op, label, sizeof label);
    return bw_fail(BW24_E_NUMERIC, "%s: Inf or NaN in its input (or beyond 2^100 or the KV format's range)", label);
}

static int check_logits(const ref_run *r) {
    int64_t n = r->logits ? (int64_t)r->b->want.n * r->l->bufs[r->l->logits].width : 0;
    for (int64_t i = 0; i < n; i++)
        if (!(r->logits[i] - r->logits[i] == 0)) return bw_fail(BW24_E_NUMERIC, "logit %lld is Inf or NaN", (long long)i);
    return 0;
}

static int ref_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits) {
    int64_t widest = 32;
    int64_t inner = 1;
    int rot = 2, rc = 0;
    for (int i = 0; i < l->n_bufs; i++) widest = l->bufs[i].width > widest ? l->bufs[i].width : widest;
    for (int i = 0; i < l->n_ops; i++) rot = l->ops[i].code == BW_OP_ROPE && l->ops[i].i[2] > rot ? l->ops[i].i[2] : rot;
    for (int i = 0; i < l->n_ops; i++) {
        if (l->ops[i].code != BW_OP_EXPERTS) continue;
        int64_t ff = l->ops[i].w[BW_EXP_DOWN]->ne[0], need = 2 * ff + l->bufs[l->ops[i].buf[0]].width;
        inner = need > inner ? need : inner;
        widest = ff > widest ? ff : widest;
    }
    ref_run r = {m, l, b, logits, malloc((size_t)widest), malloc((size_t)widest / 8 + 4), malloc((size_t)rot * sizeof(float)), malloc((size_t)inner * sizeof(float))};
    if (!r.aq || !r.ad || !r.cs || !r.h) rc = bw_fail(BW24_E_MEMORY, "out of memory for a row of %lld values", (long long)widest);
    for (int o = 0; o < l->n_ops && !rc; o++) {
        const bw_op *op = &l->ops[o];
        const bw_rowset *rows = bw_rows_of(l, b, op->buf[0]);
        if (!logits && op->buf[0] == l->logits) continue;
        if (whole(op->code)) rc = do_whole(&r, op, rows);
        for (int i = 0; i < rows->n && !rc && !whole(op->code); i++) {
            rc = cancelled(&r);
            if (!rc) rc = do_row(&r, op, rows, i);
        }
        if (rc == BW24_E_NUMERIC) numeric_fault(l, o);
    }
    if (!rc) rc = check_logits(&r);
    free(r.aq);
    free(r.ad);
    free(r.cs);
    free(r.h);
    return rc;
}

static bool ref_kv_supported(const bw_kv_desc *d) { return ref_kv_page_bytes(d) > 0; }
static int ref_open(bw24_ctx *c) {
    c->threads = 1;
    snprintf(c->isa_name, sizeof c->isa_name, "portable");
    snprintf(c->device, sizeof c->device, "ref (plain C%s)", c->float_act ? ", float activations" : "");
    return 0;
}
static void ref_close(bw24_ctx *c) { (void)c; }
static int ref_prepare_tensor(bw24_model *m, bw_tensor *t) { (void)m; (void)t; return 0; }
static int ref_prepare_list(bw24_model *m, bw_list *l) { (void)m; (void)l; return 0; }
static int ref_repack(bw24_model *m, bw_tensor *t, int64_t first, int64_t n) { (void)m; (void)t; (void)first; (void)n; return 0; } /* it reads the raw rows */
static void ref_free_tensor(bw_tensor *t) { (void)t; }
static void ref_free_model(bw24_model *m) { (void)m; }

const bw_backend bw_backend_ref = {
    .name = "ref", .kv_page_bytes = ref_kv_page_bytes, .kv_supported = ref_kv_supported, .open = ref_open, .close = ref_close,
    .prepare_tensor = ref_prepare_tensor, .repack = ref_repack, .prepare_list = ref_prepare_list, .free_tensor = ref_free_tensor, .free_model = ref_free_model,
    .replay = ref_replay, .forward = ref_forward, .round = bw_round_by_steps, .roles = true, .borrows = true,
};
