/* The plan: how a backend runs a list. Owns the fusion rules; a pure function of (list, fuse). Knows no instruction set.
 * Rules, tried at each op in turn; every one keeps the bits of the unfused list because the order inside each op is unchanged:
 *   NORM? + LINEAR x n (one input) + GLU     gate and up meet in registers; gate and up are not stored
 *   NORM? + LINEAR     (one input) + ADD     the product meets the residual in registers
 *   NORM? + LINEAR x n (one input)           one quantisation of the input serves all
 *   row-local op x n                         a row goes through all of them without a barrier */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static bool row_local(enum bw_opcode c) {
    switch (c) {
    case BW_OP_EMBED: case BW_OP_HIDDEN: case BW_OP_CONCAT: case BW_OP_NORM: case BW_OP_ADD: case BW_OP_SCALE: case BW_OP_GLU: case BW_OP_ROPE:
    case BW_OP_KV_APPEND: case BW_OP_SOFTCAP: case BW_OP_SLICE: case BW_OP_GATE: case BW_OP_ROUTE: case BW_OP_SIGMOID:
    case BW_OP_DECAY: return true;
    default: return false;
    }
}

static bool in_place(enum bw_opcode c) { return c == BW_OP_ROPE; }
static bool has_output(enum bw_opcode c) { return c != BW_OP_KV_APPEND; }

static bool reads(const bw_op *op, int buf) {
    int first = has_output(op->code) && !in_place(op->code) ? 1 : 0;
    for (int i = first; i < BW_OP_BUFS; i++)
        if (op->buf[i] == buf) return true;
    return false;
}
static bool writes(const bw_op *op, int buf) { return has_output(op->code) && op->buf[0] == buf; }

/* no op from `from` on reads `buf` before one overwrites it */
static bool dead_after(const bw_list *l, int from, int buf) {
    if (buf == l->logits || buf == l->hidden) return false;
    for (int i = from; i < l->n_ops; i++) {
        if (reads(&l->ops[i], buf)) return false;
        if (writes(&l->ops[i], buf)) return true;
    }
    return true;
}

static enum bw_rows_class rows_of(const bw_list *l, const bw_op *op) { return l->bufs[op->buf[0]].rows; }

/* LINEARs from `i` that read the same buffer and do not write it. One that writes the logits stays alone, because a step may leave those out. */
static int linear_run(const bw_list *l, int i, int x) {
    int n = 0;
    while (i + n < l->n_ops && l->ops[i + n].code == BW_OP_LINEAR && l->ops[i + n].buf[1] == x && l->ops[i + n].buf[0] != x) {
        bool logits = l->ops[i + n].buf[0] == l->logits;
        if (logits && n) break;
        n++;
        if (logits) break;
    }
    return n;
}

static bool match_glu(const bw_list *l, int lin0, int n, int next) {
    if (n != 2 || next >= l->n_ops || l->ops[next].code != BW_OP_GLU) return false;
    const bw_op *g = &l->ops[lin0], *u = &l->ops[lin0 + 1], *glu = &l->ops[next];
    if (glu->buf[1] != g->buf[0] || glu->buf[2] != u->buf[0] || g->buf[0] == u->buf[0]) return false;
    if (glu->buf[0] == g->buf[1]) return false; /* the output may not overwrite the input that other tiles still read */
    bool gate_dead = glu->buf[0] == g->buf[0] || dead_after(l, next + 1, g->buf[0]);
    bool up_dead = glu->buf[0] == u->buf[0] || dead_after(l, next + 1, u->buf[0]);
    return gate_dead && up_dead && g->w[0]->type->form != BW_FLOAT && u->w[0]->type->form != BW_FLOAT;
}

static bool match_add(const bw_list *l, int lin0, int n, int next) {
    if (n != 1 || next >= l->n_ops || l->ops[next].code != BW_OP_ADD) return false;
    const bw_op *w = &l->ops[lin0], *add = &l->ops[next];
    if ((add->buf[1] == w->buf[0]) == (add->buf[2] == w->buf[0]) || add->buf[0] == w->buf[1]) return false;
    return add->buf[0] == w->buf[0] || dead_after(l, next + 1, w->buf[0]);
}

static bool match_linears(const bw_list *l, int i, bw_step *s) {
    int lin0 = i, norm = -1;
    const bw_op *op = &l->ops[i];
    if (op->code == BW_OP_NORM && op->i[0] == 1 && i + 1 < l->n_ops && l->ops[i + 1].code == BW_OP_LINEAR && l->ops[i + 1].buf[1] == op->buf[0] &&
        op->buf[0] != op->buf[1]) {
        norm = i;
        lin0 = i + 1;
    }
    if (l->ops[lin0].code != BW_OP_LINEAR) return false;
    int n = linear_run(l, lin0, l->ops[lin0].buf[1]);
    if (!n) return false;
    *s = (bw_step){BW_STEP_LINEARS, i, lin0 + n - i, norm, lin0, n, -1, -1};
    int next = lin0 + n;
    bool spares_input = norm < 0 || next >= l->n_ops || l->ops[next].buf[0] != op->buf[1]; /* other threads may still normalise it */
    if (spares_input && match_glu(l, lin0, n, next)) s->glu = next;
    else if (spares_input && match_add(l, lin0, n, next)) s->add = next;
    if (s->glu >= 0 || s->add >= 0) s->n++;
    return true;
}

static int row_run(const bw_list *l, int i) {
    int n = 0;
    bw_step s;
    while (i + n < l->n_ops && row_local(l->ops[i + n].code) && rows_of(l, &l->ops[i + n]) == rows_of(l, &l->ops[i]) && !(n && match_linears(l, i + n, &s))) n++;
    return n;
}

int bw_lower(bw_list *l, bool fuse, bw_plan **out) {
    bw_plan *p = calloc(1, sizeof *p);
    if (p) p->steps = calloc((size_t)l->n_ops + 1, sizeof *p->steps);
    if (!p || !p->steps) { free(p); return bw_fail(BW24_E_MEMORY, "out of memory for a plan of %d ops", l->n_ops); }
    for (int i = 0; i < l->n_ops;) {
        bw_step *s = &p->steps[p->n_steps++];
        *s = (bw_step){BW_STEP_OP, i, 1, -1, i, 0, -1, -1};
        if (l->ops[i].code == BW_OP_LINEAR) *s = (bw_step){BW_STEP_LINEARS, i, 1, -1, i, 1, -1, -1};
        else if (row_local(l->ops[i].code)) s->kind = BW_STEP_ROWS;
        if (fuse && !match_linears(l, i, s) && row_local(l->ops[i].code)) s->n = row_run(l, i);
        i += s->n;
    }
    *out = p;
    return 0;
}

void bw_plan_free(bw_plan *p) {
    if (!p) return;
    free(p->steps);
    free(p);
}

int bw_plan_print(const bw_list *l, char **out) {
    static const char *const kinds[] = {"OP", "LINEARS", "ROWS"};
    bw_text t = {0};
    int rc = 0;
    for (int i = 0; i < l->plan->n_steps && !rc; i++) {
        const bw_step *s = &l->plan->steps[i];
        rc = bw_textf(&t, "step %3d %-8s rows=%-4s", i, kinds[s->kind], rows_of(l, &l->ops[s->first]) == BW_ROWS_WANT ? "want" : "all");
        for (int j = s->first; j < s->first + s->n && !rc; j++) {
            const bw_op *op = &l->ops[j];
            rc = bw_textf(&t, "%s%s", j == s->first ? " " : " + ", bw_op_name(op->code));
            if (!rc && op->w[0]) rc = bw_textf(&t, "[%s %s]", op->w[0]->name, op->w[0]->type->name);
        }
        if (!rc) rc = bw_textf(&t, "\n");
    }
    if (rc) free(t.s);
    else *out = t.s;
    return rc;
}
