/* Which runs of row ops have a kernel of their own: chains of NORM, ADD, SCALE whose values stay in registers (op_chain.cuh), and one GLU or GATE with the
 * SLICE that it reads (op_rows.cuh). Owns these conditions; launches nothing. */
#include "forward.h"

namespace bw {

/* a chain in the making: the values of the ops so far */
struct Maker {
    const bw_list *l;
    ChainArgs *a;
    const float *written[2 * CHAIN_PASSES];
    int n, last;         /* of written, of which the last is the value; index of the op that wrote that */
    const float *before; /* the value before the pass in hand read a row of its own; NULL: none */
};

/* whether a row in memory has what the list says at this point: no op of the run wrote it */
static bool from_memory(const Maker &m, const float *x) {
    for (int i = 0; i < m.n; i++)
        if (m.written[i] == x) return false;
    return true;
}
static const float *value_of(const Maker &m) { return m.n ? m.written[m.n - 1] : NULL; }

/* another pass over row x, NULL: over the value */
static ChainPass *new_pass(Maker *m, const float *x) {
    if (m->a->n_passes == CHAIN_PASSES) return NULL;
    ChainPass *p = &m->a->pass[m->a->n_passes++];
    p->a = x;
    m->before = x ? value_of(*m) : NULL;
    return p;
}
/* the pass in hand takes one more op where nobody else needs the value that it would have stored; else a new one over the value */
static ChainPass *same_pass(Maker *m, const RowOp &r, bool free) {
    ChainPass *p = &m->a->pass[m->a->n_passes - 1];
    const int buf = m->l->ops[m->last].buf[0];
    return free && (r.y == p->y || cu_dead_after(m->l, r.op + 1, buf)) ? p : new_pass(m, NULL);
}

static ChainPass *add_norm(Maker *m, const RowOp &r) {
    if (r.i[0] != 1) return NULL;
    const bool own = r.a != value_of(*m);
    if (own && !from_memory(*m, r.a)) return NULL;
    ChainPass *p = new_pass(m, own ? r.a : NULL);
    if (!p) return NULL;
    p->norm = 1; p->l2 = r.i[1]; p->eps = r.f; p->w = r.w;
    if (r.w) m->a->still = r.w;
    return p;
}

static ChainPass *add_add(Maker *m, const RowOp &r) {
    const float *v = value_of(*m), *other = r.a == v ? r.b : r.a;
    if (r.nb != r.n || r.a == r.b) return NULL;
    if (!v || (r.a != v && r.b != v)) {
        if (!from_memory(*m, r.a) || !from_memory(*m, r.b)) return NULL;
        ChainPass *p = new_pass(m, r.a);
        if (!p) return NULL;
        p->b = r.b;
        p->add = 1;
        return p;
    }
    ChainPass *last = &m->a->pass[m->a->n_passes - 1];
    const bool before = m->before && other == m->before && last->y != other;
    if (!before && !from_memory(*m, other)) return NULL;
    ChainPass *p = same_pass(m, r, !last->add && !last->scale);
    if (!p || (before && p != last)) return NULL;
    p->b = before ? NULL : other;
    p->add = 1;
    return p;
}

static ChainPass *add_scale(Maker *m, const RowOp &r) {
    ChainPass *p;
    if (r.a == value_of(*m)) p = same_pass(m, r, !m->a->pass[m->a->n_passes - 1].scale);
    else if (from_memory(*m, r.a)) p = new_pass(m, r.a);
    else return NULL;
    if (!p) return NULL;
    p->c = r.w; p->f = r.f; p->scale = 1;
    return p;
}

/* a value that nobody reads after the run is not stored */
static void drop_dead(Maker *m, const RowOp *ops, int n) {
    ChainPass *last = &m->a->pass[m->a->n_passes - 1];
    for (ChainPass *p = m->a->pass; p < last; p++) {
        int buf = -1;
        for (int i = 0; i < n; i++)
            if (ops[i].y == p->y) buf = m->l->ops[ops[i].op].buf[0];
        bool again = false;
        for (ChainPass *q = p + 1; q <= last; q++) again |= q->y == p->y;
        if (again || cu_dead_after(m->l, m->last + 1, buf)) p->y = NULL;
    }
}

bool cu_chain_of(const bw_list *l, const RowOp *ops, int n, ChainArgs *a) {
    *a = {};
    a->n = ops[0].n;
    if (a->n % 32 || a->n > CHAIN_WARPS * 256 || n > 2 * CHAIN_PASSES) return false;
    Maker m = {l, a, {}, 0, 0, NULL};
    for (int i = 0; i < n; i++) {
        const RowOp &r = ops[i];
        if (r.n != a->n || r.na != r.n) return false;
        ChainPass *p = r.code == ROW_NORM ? add_norm(&m, r) : r.code == ROW_ADD ? add_add(&m, r) : r.code == ROW_SCALE ? add_scale(&m, r) : NULL;
        if (!p) return false;
        p->y = r.y;
        m.written[m.n++] = r.y;
        m.last = r.op;
    }
    drop_dead(&m, ops, n);
    return true;
}

bool cu_pair_of(const bw_list *l, const RowOp *ops, int n, QuantArgs *a) {
    const RowOp &r = ops[n - 1], &s = ops[0];
    *a = {};
    if (n == 1 && r.code == ROW_SOFTCAP) {
        a->x = r.a; a->y = r.y; a->n = r.n; a->f = r.f;
        a->kind = QUANT_CAP;
        return true;
    }
    if (n > 2 || (r.code != ROW_GLU && r.code != ROW_GATE) || r.na != r.n || r.nb < 1) return false;
    a->x = r.a; a->y = r.y; a->n = r.n; a->up = r.b; a->ldu = r.nb;
    a->kind = r.code == ROW_GATE ? QUANT_GATE : r.i[0] ? QUANT_GELU : QUANT_SILU;
    if (r.nb != r.n) {
        if (r.code != ROW_GATE || n != 1) return false;
        a->size = r.n / r.nb; a->stride = 1;
    }
    if (n == 1) return true;
    if (s.code != ROW_SLICE || s.y != r.b || s.n != r.n || r.nb != r.n || r.a == s.y || r.y == s.a) return false;
    if (r.y != s.y && !cu_dead_after(l, r.op + 1, l->ops[s.op].buf[0])) return false;
    a->up = s.a; a->ldu = s.na;
    a->size = s.n / s.i[0]; a->stride = s.na / s.i[0]; a->from = s.i[1]; a->step = 1;
    return true;
}

} // namespace bw
