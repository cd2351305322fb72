/* Finds a mixture's chain of steps in a list and runs its short form. Either norm, router, ROUTE, EXPERTS, the shared expert, the sums: three launches;
 * or a router and experts that read norms of their own beside a dense block, whose norm and sums follow: four. Owns the conditions under which they may
 * stand for the chain. */
#include "forward.h"
#include "op_router.cuh"

namespace bw {

enum { CHOICE_ROWS = 2 }; /* most rows of a step whose experts EXPERTS chooses: each of its blocks does */
enum { MIX_ROWS = 32 }; /* most rows of a step in the short form: each is normalised by every block of the router */

static bool reads(const bw_op *op, int buf) {
    int first = op->code == BW_OP_KV_APPEND || op->code == BW_OP_ROPE ? 0 : 1;
    for (int i = first; i < BW_OP_BUFS; i++)
        if (op->buf[i] == buf) return true;
    return false;
}
/* no op from `from` on reads `buf` before one overwrites it */
bool cu_dead_after(const bw_list *l, int from, int buf) {
    if (buf == l->logits || buf == l->hidden) return false;
    for (int i = from; i < l->n_ops; i++) {
        if (reads(&l->ops[i], buf)) return false;
        if (l->ops[i].code != BW_OP_KV_APPEND && l->ops[i].buf[0] == buf) return true;
    }
    return true;
}


static const CuMatrix *matrix_of(const bw_op *op) { return (const CuMatrix *)op->w[0]->packed; }
static bool plain_linears(const CuStep &c, int n) { return c.kind == CU_LINEARS && c.step->n_lin == n; }

/* a step of one row op */
static const RowOp *lone_row_op(const CuList *s, size_t i, int code, bool want) {
    if (i >= s->steps.size()) return NULL;
    const CuStep &c = s->steps[i];
    const RowOp *o = c.kind == CU_ROWS && c.n == 1 && c.want == want ? &s->row_ops[(size_t)c.at] : NULL;
    return o && o->code == code ? o : NULL;
}

static int put_part(bw24_model *m, bw_list *l, const bw_op *op, RouterArgs *a, int which) {
    const CuMatrix *x = matrix_of(op);
    LinearPart &p = a->part[which];
    p = {x->w, NULL, NULL, list_of(l)->buf[(size_t)op->buf[0]], x->scale, x->rows, x->blocks};
    a->type[which] = x->float_type;
    return cu_upload_dense(m, op->w[1], &p.bias);
}

/* steps i .. i + 2: NORM and the router, ROUTE, EXPERTS */
static bool match_router(bw24_model *m, bw_list *l, size_t i, CuMix *x) {
    CuList *s = list_of(l);
    const CuStep &c = s->steps[i];
    if (i + 2 >= s->steps.size() || !plain_linears(c, 1) || c.step->norm < 0 || c.step->glu >= 0 || c.step->add >= 0) return false;
    const bw_op *norm = &l->ops[c.step->norm], *lin = &l->ops[c.step->lin0];
    const CuMatrix *w = matrix_of(lin);
    const RowOp *route = lone_row_op(s, i + 1, ROW_ROUTE, c.want);
    const CuStep &e = s->steps[i + 2];
    if (w->k || w->cols > ROUTER_SEGS * 256 || w->cols % 4 || !route || route->a != s->buf[(size_t)lin->buf[0]] || e.kind != CU_EXPERTS || e.want != c.want) return false;
    const CuExperts &ex = s->experts[(size_t)e.at];
    if (ex.layer >= 0 || ex.x != norm->buf[0] || s->buf[(size_t)ex.route] != route->y || !ex.k[0] || ex.k[0] != ex.k[1] || !ex.k[2] || !s->acts[(size_t)ex.x]) return false;
    RouterArgs &a = x->router;
    a.x = s->buf[(size_t)norm->buf[1]];
    a.h = s->buf[(size_t)norm->buf[0]];
    a.cols = w->cols;
    a.factor = 1.0f;
    a.l2 = norm->i[1];
    a.eps = (float)norm->f[0];
    a.norm_op = c.step->lin0;
    a.route = *route;
    x->h = norm->buf[0];
    x->at = e.at;
    x->slots = ex.top;
    x->out = ex.y;
    return !cu_upload_dense(m, norm->w[0], &a.w) && !put_part(m, l, lin, &a, 0);
}

static bool same_shape(const bw_op *op, const ExpertKernels *k, const ExpertMatrix &e, ExpertMatrix *out) {
    const CuMatrix *w = matrix_of(op);
    *out = {w->w, 0, NULL, NULL, w->scale, w->rows, w->cols, w->segs, w->blocks};
    return w->k == k->linear && !op->w[1] && w->rows == e.rows && w->cols == e.cols;
}

/* the shared expert in steps i, ...: its gate perhaps, gate and up, GLU, down. Returns how many steps, 0: none of this form. y: what its down writes. */
static size_t match_shared(bw24_model *m, bw_list *l, size_t i, bool want, CuMix *x, int *y, int *gate) {
    CuList *s = list_of(l);
    const CuExperts &e = s->experts[(size_t)x->at];
    if (i + 1 >= s->steps.size()) return 0;
    const CuStep &c = s->steps[i];
    const int extra = plain_linears(c, 3);
    if (c.want != want || !(extra || plain_linears(c, 2)) || c.step->norm >= 0 || l->ops[c.step->lin0].buf[1] != x->h) return 0;
    const bw_op *g = &l->ops[c.step->lin0 + extra], *u = g + 1, *own = &l->ops[c.step->lin0];
    size_t n = 1;
    int mid, glu = c.step->glu;
    if (glu >= 0) mid = l->ops[glu].buf[0];
    else {
        const RowOp *o = lone_row_op(s, i + n, ROW_GLU, want);
        if (!o || o->a != s->buf[(size_t)g->buf[0]] || o->b != s->buf[(size_t)u->buf[0]]) return 0;
        glu = o->op;
        mid = l->ops[glu].buf[0];
        n++;
    }
    if (l->ops[glu].i[0] != e.gelu || i + n >= s->steps.size()) return 0;
    const CuStep &d = s->steps[i + n];
    if (!plain_linears(d, 1) || d.want != want || d.step->norm >= 0 || d.step->glu >= 0 || l->ops[d.step->lin0].buf[1] != mid) return 0;
    const bw_op *down = &l->ops[d.step->lin0];
    if (!same_shape(g, e.k[0], e.m[0], &x->shared[0]) || !same_shape(u, e.k[1], e.m[1], &x->shared[1]) || !same_shape(down, e.k[2], e.m[2], &x->shared[2])) return 0;
    *gate = -1;
    if (extra) {
        const CuMatrix *w = matrix_of(own);
        if (w->k || w->rows != 1 || w->cols != x->router.cols || put_part(m, l, own, &x->router, 1)) return 0;
        *gate = own->buf[0];
    }
    const int after = d.first + d.n;
    for (int b : {g->buf[0], u->buf[0], mid})
        if (b != down->buf[0] && !cu_dead_after(l, after, b)) return 0;
    *y = down->buf[0];
    return n + 1;
}

/* whether `op` adds buffers a and b */
static bool adds(const bw_op *op, int a, int b) {
    return op->code == BW_OP_ADD && ((op->buf[1] == a && op->buf[2] == b) || (op->buf[1] == b && op->buf[2] == a));
}

/* what is added after EXPERTS and, in buffer `shared`, the shared expert: its gate, its sum with y, the residual; from op `at` on, to the end of a step */
static bool match_sums(bw_list *l, int at, int end, int shared, int gate, CuMix *x) {
    CuList *s = list_of(l);
    int y = s->experts[(size_t)x->at].y;
    const bw_op *op = &l->ops[at];
    if (shared >= 0) {
        if (gate >= 0) {
            if (at >= end || op->code != BW_OP_GATE || op->buf[0] != shared || op->buf[1] != shared || op->buf[2] != gate) return false;
            x->gate = s->buf[(size_t)gate];
            op++; at++;
        }
        if (at >= end || !adds(op, y, shared) || op->buf[0] != y) return false;
        op++; at++;
        if (!cu_dead_after(l, at, shared)) return false;
    }
    x->out = y;
    if (at >= end) return true;
    const int res = op->buf[1] == y ? op->buf[2] : op->buf[1];
    if (at + 1 != end || !adds(op, y, res) || res == y || (op->buf[0] != res && op->buf[0] != y)) return false;
    x->res = s->buf[(size_t)res];
    x->sum = s->buf[(size_t)op->buf[0]];
    x->out = op->buf[0];
    return true;
}

/* how many steps from i on the short form stands for */
static int match_mixture(bw24_model *m, bw_list *l, size_t i, CuMix *x) {
    CuList *s = list_of(l);
    if (!match_router(m, l, i, x)) return 0;
    const bool want = s->steps[i].want;
    CuMix with = *x;
    int y = -1, gate = -1;
    size_t n = match_shared(m, l, i + 3, want, &with, &y, &gate), next = i + 3 + n;
    if (n) with.slots++;
    if (next < s->steps.size()) {
        const CuStep &last = s->steps[next - 1], &rows = s->steps[next];
        const int from = n && last.step->add >= 0 ? last.step->add : rows.first, end = rows.first + rows.n;
        if (rows.kind == CU_ROWS && rows.want == want && match_sums(l, from, end, y, gate, &with)) {
            *x = with;
            return (int)(next + 1 - i);
        }
    }
    return 3;
}

/* a whole-row NORM in place `k` of the ops of a step of rows */
static const RowOp *norm_at(const CuList *s, const CuStep &c, int k) {
    const RowOp *o = &s->row_ops[(size_t)(c.at + k)];
    return o->code == ROW_NORM && o->i[0] == 1 ? o : NULL;
}
static bool touches(const bw_list *l, int from, int to, int buf) {
    for (int i = from; i < to; i++)
        if (reads(&l->ops[i], buf) || l->ops[i].buf[0] == buf) return true;
    return false;
}

/* the dense block's NORM, which moves behind EXPERTS, and the row ops after it as one chain */
static bool match_tail(bw_list *l, const CuStep &first, const CuStep &after, CuMix *x) {
    CuList *s = list_of(l);
    const RowOp *ops = &s->row_ops[(size_t)after.at];
    if (after.kind != CU_ROWS || after.want != first.want || ops->code != ROW_NORM) return false;
    std::vector<RowOp> all(1, s->row_ops[(size_t)first.at]);
    all.insert(all.end(), ops, ops + after.n);
    const bw_op *o = &l->ops[first.first];
    return !touches(l, first.first + 1, after.first, o->buf[0]) && !touches(l, first.first + 1, after.first, o->buf[1]) &&
           cu_chain_of(l, all.data(), (int)all.size(), &x->tail);
}

/* steps i .. i + 4: NORM of the dense block, NORM and SCALE of the router's rows; the router; ROUTE and the experts' NORM; EXPERTS; sums */
static int match_beside(bw24_model *m, bw_list *l, size_t i, CuMix *x) {
    CuList *s = list_of(l);
    if (i + 4 >= s->steps.size()) return 0;
    const CuStep &c = s->steps[i], &lin = s->steps[i + 1], &r = s->steps[i + 2], &e = s->steps[i + 3];
    if (c.kind != CU_ROWS || c.n != 3 || !plain_linears(lin, 1) || lin.step->norm >= 0 || lin.step->glu >= 0 || lin.step->add >= 0) return 0;
    if (r.kind != CU_ROWS || r.n != 2 || e.kind != CU_EXPERTS || lin.want != c.want || r.want != c.want || e.want != c.want) return 0;
    const RowOp *n0 = norm_at(s, c, 0), *n1 = norm_at(s, c, 1), *scale = n1 + 1, *route = &s->row_ops[(size_t)r.at], *n2 = norm_at(s, r, 1);
    const bw_op *op = &l->ops[lin.step->lin0];
    const CuMatrix *w = matrix_of(op);
    const CuExperts &ex = s->experts[(size_t)e.at];
    if (!n0 || !n1 || !n2 || scale->code != ROW_SCALE || scale->w || scale->a != n1->y || scale->y != n1->y || n1->y == n1->a) return 0;
    if (w->k || w->cols > ROUTER_SEGS * 256 || w->cols % 4 || s->buf[(size_t)op->buf[1]] != n1->y || n1->n != w->cols || route->code != ROW_ROUTE) return 0;
    if (route->a != s->buf[(size_t)op->buf[0]] || n2->a != n1->a || n2->y == n2->a || n2->i[1] != n1->i[1] || n2->f != n1->f || !n1->w || !n2->w) return 0;
    if (ex.layer >= 0 || s->buf[(size_t)ex.x] != n2->y || s->buf[(size_t)ex.route] != route->y || !ex.k[0] || ex.k[0] != ex.k[1] || !ex.k[2]) return 0;
    if (!s->acts[(size_t)ex.x] || !cu_dead_after(l, lin.step->lin0 + 1, op->buf[1]) || touches(l, c.first + 2, e.first, l->ops[c.first].buf[0])) return 0;
    RouterArgs &a = x->router;
    a.x = n1->a; a.w = n1->w; a.own = n2->w; a.h = n2->y;
    a.cols = w->cols; a.l2 = n1->i[1]; a.eps = n1->f; a.factor = scale->f;
    a.norm_op = e.first;
    a.route = *route;
    x->h = ex.x;
    x->at = e.at;
    x->slots = ex.top;
    x->out = ex.y;
    return match_tail(l, c, s->steps[i + 4], x) && !put_part(m, l, op, &a, 0) ? 5 : 0;
}

int cu_resolve_mixtures(bw24_model *m, bw_list *l) {
    CuList *s = list_of(l);
    CuMoe &all = model_of(m)->moe;
    for (size_t i = 0; i < s->steps.size(); i++) {
        CuMix x = {};
        int steps = s->steps[i].kind == CU_LINEARS ? match_mixture(m, l, i, &x) : match_beside(m, l, i, &x);
        if (!steps || !downs_fit(x.slots, s->experts[(size_t)x.at].m[BW_EXP_DOWN].segs)) continue;
        if (!all.mem[MOE_COUNT]) {
            int rc = cu_share(m, &all.mem[MOE_COUNT], &all.bytes[MOE_COUNT], MIX_ROWS * sizeof(int), "experts");
            cudaError_t e = rc ? cudaSuccess : cudaMemsetAsync(all.mem[MOE_COUNT], 0, MIX_ROWS * sizeof(int), ctx_of(m)->q.stream);
            if (rc || e) return rc ? rc : cu_fail(m->ctx, e, "experts");
        }
        x.router.count = (int *)all.mem[MOE_COUNT];
        s->steps[i].short_n = steps;
        s->steps[i].short_at = (int)s->mixes.size();
        s->mixes.push_back(x);
    }
    return 0;
}

static bool may_choose(const RowOp &r) { return r.i[0] == 1 && !r.i[3] && r.na <= 32 * ROUTE_HELD && r.n / 2 <= EXPERT_SLOTS; }

static void run_router(Pass &p, const CuMix &x, int n) {
    RouterArgs a = x.router;
    if (n <= CHOICE_ROWS && may_choose(a.route)) a.count = NULL;
    a.o = acts_of(p, x.h, n);
    a.fault = p.rows.fault;
    const int blocks = (a.part[0].n + ROUTER_OUTS - 1) / ROUTER_OUTS + (a.part[1].n + ROUTER_OUTS - 1) / ROUTER_OUTS + 1;
    launch(*p.q, k_router, dim3((unsigned)blocks, (unsigned)n), ROUTER_THREADS, router_shared(a.cols), a);
    p.quantised[(size_t)x.h] = 1;
}

/* the last of the steps from i on, with what has moved there */
static void run_tail(Pass &p, size_t i, const CuMix &x) {
    const CuStep &first = p.s->steps[i], &c = p.s->steps[i + (size_t)first.short_n - 1];
    for (int k = first.first; k < c.first + c.n; k++)
        if (p.l->ops[k].buf[0] != x.h) p.quantised[(size_t)p.l->ops[k].buf[0]] = 0;
    launch_chain(p, c, x.tail);
}

int run_mixture(Pass &p, size_t i) {
    const CuStep &c = p.s->steps[i];
    const int n = (c.kind == CU_LINEARS || c.kind == CU_ROWS) && c.short_n ? rows_of(p, c) : 0;
    if (n < 1 || n > MIX_ROWS) return 0;
    const CuMix &x = p.s->mixes[(size_t)c.short_at];
    const CuExperts &e = p.s->experts[(size_t)x.at];
    const int pairs = n * x.slots;
    run_router(p, x, n);
    const Acts mid = cu_pair_acts(p, e, pairs);
    ExpertArgs a = {};
    for (int k = 0; k < 2; k++) { a.m[k] = e.m[k]; a.shared[k] = x.shared[k]; }
    a.slots = x.slots;
    a.top = e.top;
    a.n_mats = 2;
    a.route = x.router.route.y;
    a.x = acts_of(p, x.h, n);
    a.yo = mid;
    a.gelu = e.gelu;
    a.fault = p.rows.fault;
    a.op = p.s->steps[i + (x.tail.n_passes ? 3 : 2)].first;
    const RowOp &r = x.router.route;
    if (n <= CHOICE_ROWS && may_choose(r)) a.choice = {x.router.part[0].y, r.w, r.y, r.f, r.na, r.i[2], r.op};
    e.k[0]->product(*p.q, a, pairs);
    DownArgs d = {e.m[2], a.route, e.top, mid, buf_of(p, e.y), x.shared[2], x.slots, x.gate, x.res, x.sum, 1};
    d.choice = a.choice;
    d.fault = a.fault;
    e.k[2]->down(*p.q, d, n);
    p.quantised[(size_t)e.y] = p.quantised[(size_t)x.out] = 0;
    if (x.tail.n_passes) run_tail(p, i, x);
    return c.short_n;
}

} // namespace bw
