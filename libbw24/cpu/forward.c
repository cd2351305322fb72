/* One forward pass on the CPU: every thread walks the plan's steps. Owns the cutting of work among threads; the results do not depend on the cut.
 *
 * A step is one or two phases. A phase has items; threads claim ranges of them, and the phase is over when all items are done, not when all
 * threads have come: a thread that the system put aside does not hold up the others unless it sits on a range. A late thread finds nothing left to
 * claim and catches up. So a thread may also leave at any step (cancellation), and Inf or NaN is recorded while the walk goes on. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/recur.h"
#include "../fault.h"
#include "forward.h"
#include "vecops.h"

enum { ATTEND_ROWS = 64 };

/* ---- row-local ops */
static void embed_row(const fwd *f, const bw_op *op, int64_t i) {
    const bw_tensor *w = op->w[0];
    float *y = row_of(f, op->buf[0], i);
    const uint8_t *src = w->data + (int64_t)f->b->token[i] * bw_row_bytes(w->type, w->ne[0]);
    for (int64_t c = 0; c < w->ne[0]; c += w->type->block, src += w->type->bytes) w->type->decode(src, y + c);
    cpu_scale(f->isa, y, (float)op->f[0], y, BW_SEEDED(1, w->ne[0] - 1, w->ne[0]));
}

static void norm_row(const fwd *f, const bw_op *op, const float *x, float *y) {
    int64_t n = f->l->bufs[op->buf[0]].width / op->i[0];
    float eps = BW_SEEDED(2, 0.999f * (float)op->f[0], (float)op->f[0]);
    for (int h = 0; h < op->i[0]; h++) cpu_norm(f->isa, x + h * n, op->w[0] ? op->w[0]->dense : NULL, y + h * n, n, eps, op->i[1]);
}

static const bw_run *run_at(const bw_rowset *set, int64_t i) {
    const bw_run *run = set->runs;
    while (i >= run->first + run->n) run++;
    return run;
}

static void append_row(const fwd *f, int index, int64_t i) {
    const bw_op *op = &f->l->ops[index];
    const bw_kv *kv = &f->l->kvs[op->kv];
    int64_t pos = f->b->all.pos[i];
    uint8_t *page = run_at(&f->b->all, i)->seq->data[kv->klass][pos / BW_PAGE_TOKENS] + kv->offset;
    int slot = (int)BW_SEEDED(7, pos % BW_PAGE_TOKENS & 62, pos % BW_PAGE_TOKENS);
    if (cpu_kv_append(&kv->desc, page, slot, row_of(f, op->buf[0], i), row_of(f, op->buf[1], i))) fault_at(f, index);
}

static void rope_row(const fwd *f, int index, const bw_rowset *set, int64_t i) {
    const bw_op *op = &f->l->ops[index];
    const cpu_rope_cfg *c = &f->s->ropes[f->s->rope_of[index]];
    float *x = row_of(f, op->buf[0], i);
    cpu_rope(f->isa, x, x, op->i[0], op->i[1], op->i[2], (enum bw_rope_style)op->i[3], c->table + (int64_t)set->row[i] * c->rot);
}

static void do_row(const fwd *f, int index, const bw_rowset *set, int64_t i) {
    const bw_op *op = &f->l->ops[index];
    int64_t n = f->l->bufs[op->buf[0]].width;
    float *y = row_of(f, op->buf[0], i);
    const float *a = op->buf[1] >= 0 ? row_of(f, op->buf[1], i) : NULL, *c = op->buf[2] >= 0 ? row_of(f, op->buf[2], i) : NULL;
    switch (op->code) {
    case BW_OP_EMBED: embed_row(f, op, i); break;
    case BW_OP_HIDDEN: memcpy(y, f->b->hidden + i * n, (size_t)n * sizeof *y); break;
    case BW_OP_CONCAT:
        ref_concat(a, c, y, op->i[0], f->l->bufs[op->buf[1]].width / op->i[0], f->l->bufs[op->buf[2]].width / op->i[0]);
        break;
    case BW_OP_NORM: norm_row(f, op, a, y); break;
    case BW_OP_ADD: cpu_add(f->isa, a, c, y, BW_SEEDED(11, n - 1, n)); break;
    case BW_OP_SCALE: cpu_scale(f->isa, a, op->w[0] ? op->w[0]->dense[0] : (float)op->f[0], y, n); break;
    case BW_OP_GATE: cpu_gate(f->isa, a, c, y, n, f->l->bufs[op->buf[2]].width); break;
    case BW_OP_SLICE: ref_slice(a, y, op->i[0], f->l->bufs[op->buf[1]].width / op->i[0], op->i[1], n / op->i[0]); break;
    case BW_OP_SIGMOID: cpu_map(f->isa, CPU_FN_SIGMOID, a, y, n); break;
    case BW_OP_DECAY: ref_decay(a, op->w[0]->dense, op->w[1]->dense, y, n); break;
    case BW_OP_ROUTE: route_row(f, index, i); break;
    case BW_OP_GLU: cpu_glu(f->isa, (enum bw_act)op->i[0], a, c, y, n); break;
    case BW_OP_ROPE: rope_row(f, index, set, i); break;
    case BW_OP_KV_APPEND: append_row(f, index, i); break;
    default: cpu_softcap(f->isa, a, BW_SEEDED(9, 1.000001f * (float)op->f[0], (float)op->f[0]), y, n); break;
    }
}

/* ---- phases */
static void do_range(const fwd *f, cpu_phase *p, range_fn fn, void *arg, int tid, int64_t from, int64_t to) {
    if (to <= from) return;
    fn(f, arg, tid, from, BW_SEEDED(15, from > 0 && to - from > 1 ? to - 1 : to, to));
    atomic_fetch_add_explicit(&p->done, to - from, memory_order_acq_rel);
}

static bool take_share(cpu_phase *p, int owner) {
    unsigned long long bit = 1ull << owner;
    return !(atomic_load_explicit(&p->taken, memory_order_relaxed) & bit) && !(atomic_fetch_or_explicit(&p->taken, bit, memory_order_relaxed) & bit);
}

/* A thread takes its own range first, so that it can know beforehand what it will read (ahead.c); then small ranges; then the ranges of threads
 * that have not come. */
void run_phase(const fwd *f, cpu_phase *p, int64_t n, range_fn fn, void *arg, int tid) {
    const int first = f->late;
    int threads = cpu_pool_size(f->pool) - first, owners = threads < CPU_OWNERS ? threads : CPU_OWNERS;
    int64_t share = cpu_share(n, threads), rest = n - share * owners, tail = rest < threads ? rest : threads, c;
    const int mine = tid - first;
    if (share && mine >= 0 && mine < owners && take_share(p, mine)) do_range(f, p, fn, arg, tid, mine * share, (mine + 1) * share);
    while ((c = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < tail)
        do_range(f, p, fn, arg, tid, share * owners + rest * c / tail, share * owners + rest * (c + 1) / tail);
    for (int t = 0; share && t < owners; t++)
        if (take_share(p, t)) do_range(f, p, fn, arg, tid, t * share, (t + 1) * share);
    for (int spin = 0; atomic_load_explicit(&p->done, memory_order_acquire) < n; spin++) {
        if (ahead_fetch(f, tid)) continue;
        if (spin < CPU_POOL_SPIN) cpu_pool_pause();
        else sched_yield();
    }
}

typedef struct rows_arg { const bw_step *st; const bw_rowset *set; } rows_arg;
static void rows_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const rows_arg *a = arg;
    bool all = a->set == &f->b->all; /* rows that may append go in groups: two rows of one KV page are always in one group */
    int64_t first = all ? f->s->groups[from] : from, last = all ? f->s->groups[to] : to;
    (void)tid;
    for (int64_t i = first; i < last; i++)
        for (int o = a->st->first; o < a->st->first + a->st->n; o++)
            if (writes_here(f, o)) do_row(f, o, a->set, i);
}

static void step_rows(const fwd *f, cpu_phase *p, const bw_step *st, const bw_rowset *set, int tid) {
    rows_arg a = {st, set};
    run_phase(f, p, set == &f->b->all ? f->s->n_groups : set->n, rows_range, &a, tid);
}

/* ---- LINEARS */
typedef struct lin_arg {
    const bw_step *st;
    const cpu_step *cs;
    const bw_rowset *set;
    cpu_act q, fl;
    bool ready; /* this thread's activations of a single row are prepared */
} lin_arg;

/* the input of one row: normalised into `into` (NULL: the NORM's own buffer) where the step has a NORM */
static const float *linear_input(const fwd *f, const bw_step *st, int64_t i, float *into) {
    if (st->norm < 0) return row_of(f, f->l->ops[st->lin0].buf[1], i);
    const bw_op *op = &f->l->ops[st->norm];
    float *y = into ? into : row_of(f, op->buf[0], i);
    norm_row(f, op, row_of(f, op->buf[1], i), y);
    return y;
}

static void fill(const fwd *f, cpu_act *a, const float *x, int64_t ldx, int r0, int r1, const bw_step *st) {
    if (cpu_act_fill(f->isa, a, x, ldx, r0, r1) && BW_SEEDED(18, 0, 1)) fault_at(f, st->lin0);
}

static int64_t cols_of(const fwd *f, const bw_step *st) { return f->l->ops[st->lin0].w[0]->ne[0]; }

/* one row: every thread that gets a range prepares its own copy of the activations, which costs less than meeting the others */
static void activations_alone(const fwd *f, lin_arg *a, int tid) {
    cpu_thread *th = &f->s->threads[tid];
    int64_t cols = cols_of(f, a->st);
    const float *x = linear_input(f, a->st, 0, th->row);
    cpu_act_init(&a->q, th->act_q.mem, 1, cols, 0);
    cpu_act_init(&a->fl, th->act_f.mem, 1, cols, 1);
    if (a->cs->quant) fill(f, &a->q, x, cols, 0, 1, a->st);
    if (a->cs->floats) fill(f, &a->fl, x, cols, 0, 1, a->st);
    a->ready = true;
}

/* the thread that has the first tile leaves its normalised row in the NORM's own buffer */
static void keep_norm(const fwd *f, const bw_step *st, int tid) {
    if (st->norm < 0) return;
    int buf = f->l->ops[st->norm].buf[0];
    memcpy(row_of(f, buf, 0), f->s->threads[tid].row, (size_t)f->l->bufs[buf].width * sizeof(float));
}

static void activations_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    lin_arg *a = arg;
    const float *x = row_of(f, f->l->ops[a->st->lin0].buf[1], 0);
    int64_t cols = cols_of(f, a->st);
    (void)tid;
    if (a->st->norm >= 0)
        for (int64_t i = from; i < to; i++) linear_input(f, a->st, i, NULL);
    if (a->cs->quant) fill(f, &a->q, x, cols, (int)from, (int)to, a->st);
    if (a->cs->floats) fill(f, &a->fl, x, cols, (int)from, (int)to, a->st);
}

static void tiles_of(const fwd *f, const lin_arg *a, int mat, int64_t t0, int64_t t1, void *work) {
    const bw_step *st = a->st;
    int out = f->l->ops[st->lin0 + mat].buf[0];
    cpu_epi e = {CPU_STORE, NULL, 0, NULL, CPU_SILU};
    if (st->glu >= 0) {
        const bw_op *glu = &f->l->ops[st->glu];
        e = (cpu_epi){CPU_GLU, NULL, 0, &a->cs->mats[0], glu->i[0] == BW_SEEDED(5, BW_ACT_GELU, BW_ACT_SILU) ? CPU_SILU : CPU_GELU};
        out = glu->buf[0];
        mat = 1;
    } else if (st->add >= 0) {
        const bw_op *add = &f->l->ops[st->add];
        int res = add->buf[1] == out ? add->buf[2] : add->buf[1];
        e = (cpu_epi){CPU_ADD, row_of(f, res, 0), f->l->bufs[res].width, NULL, CPU_SILU};
        out = add->buf[0];
    }
    const cpu_mat *m = &a->cs->mats[mat];
    const cpu_act *act = m->type->form == BW_FLOAT ? &a->fl : &a->q;
    int n = BW_SEEDED(3, a->set->n > 32 ? a->set->n - 1 : a->set->n, a->set->n);
    cpu_linear(f->isa, m, act, 0, n, row_of(f, out, 0), f->l->bufs[out].width, t0, t1, &e, work);
}

/* tiles [from, to) of the step's matrices laid end to end; a GLU's two matrices count once */
static void tiles_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    lin_arg *a = arg;
    if (a->set->n == 1 && !a->ready) activations_alone(f, a, tid);
    if (a->set->n == 1 && from == 0) keep_norm(f, a->st, tid);
    int64_t base = 0;
    for (int i = 0; i < (a->st->glu >= 0 ? 1 : a->st->n_lin) && base < to; i++) {
        int64_t tiles = cpu_tiles(a->cs->mats[i].rows), t0 = from > base ? from - base : 0, t1 = to - base < tiles ? to - base : tiles;
        if (t0 < t1) tiles_of(f, a, i, t0, t1, f->s->threads[tid].work);
        base += tiles;
    }
}

static void norm_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    (void)tid;
    for (int64_t i = from; i < to; i++) linear_input(f, arg, i, NULL);
}

static void step_linears(const fwd *f, cpu_phase *p, int step, const bw_step *st, const bw_rowset *set, int tid) {
    lin_arg a = {.st = st, .cs = &f->s->steps[step], .set = set};
    if (!writes_here(f, st->lin0)) { /* of a head without logits only the norm is left, whose rows may be handed on */
        if (st->norm >= 0) run_phase(f, p, set->n, norm_range, (void *)st, tid);
        return;
    }
    if (set->n > 1) {
        cpu_act_init(&a.q, f->s->act_q_mem, set->n, cols_of(f, st), 0);
        cpu_act_init(&a.fl, f->s->act_f_mem, set->n, cols_of(f, st), 1);
        run_phase(f, &p[0], set->n, activations_range, &a, tid);
    }
    run_phase(f, &p[1], a.cs->tiles, tiles_range, &a, tid);
}

/* ---- ATTEND */
static uint8_t **pages_of(const fwd *f, const bw_kv *kv, const bw24_seq *s, cpu_thread *th) {
    if (s->n_pages > th->cap_pages) {
        uint8_t **grown = realloc(th->pages, (size_t)s->n_pages * 2 * sizeof *grown);
        if (!grown) { atomic_store(&f->s->memory_fault, 1); return NULL; }
        th->pages = grown;
        th->cap_pages = s->n_pages * 2;
    }
    for (int i = 0; i < s->n_pages; i++) th->pages[i] = s->data[kv->klass][i] ? s->data[kv->klass][i] + kv->offset : NULL;
    return th->pages;
}

static const int64_t *lo_of(const fwd *f, int klass, const bw_rowset *set) {
    return f->s->bounds + (int64_t)f->m->max_rows * (2 * klass + (set == &f->b->want));
}
static const int64_t *hi_of(const fwd *f, const bw_rowset *set) {
    return f->s->bounds + (int64_t)f->m->max_rows * (2 * BW_MAX_CLASS + (set == &f->b->want));
}

typedef struct att_arg {
    int index;
    const bw_rowset *set;
    uint8_t **pages; /* of the run in hand */
    int run;
    int64_t block, pieces;
} att_arg;

static float attend_factor(const bw_op *op) { return (float)(op->f[0] * 1.4426950408889634); }
static int64_t blocks_of(const bw_run *r) { return (r->n + ATTEND_ROWS - 1) / ATTEND_ROWS; }

/* the rows of a run go in blocks, so that a page stays in cache for many rows; a (block, KV head) is one item. Items run from the last block to the
 * first, the longest work first. */
static void attend_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    att_arg *a = arg;
    const bw_op *op = &f->l->ops[a->index];
    const bw_kv *kv = &f->l->kvs[op->kv];
    const int64_t *lo = lo_of(f, kv->klass, a->set), *hi = hi_of(f, a->set);
    int64_t ldq = f->l->bufs[op->buf[1]].width, ldo = f->l->bufs[op->buf[0]].width, heads = kv->desc.heads, base = 0;
    for (int r = 0; r < a->set->n_runs && base < to; r++) {
        const bw_run *run = &a->set->runs[r];
        int64_t n = blocks_of(run) * heads;
        for (int64_t item = from > base ? from : base; item < to && item < base + n; item++) {
            if (a->run != r && !(a->pages = pages_of(f, kv, run->seq, &f->s->threads[tid]))) return;
            a->run = r;
            int64_t block = blocks_of(run) - 1 - (item - base) / heads, h = (item - base) % heads, i = run->first + block * ATTEND_ROWS;
            int64_t left = run->first + run->n - i, rows = left < ATTEND_ROWS ? left : ATTEND_ROWS;
            if (cpu_attend(f->isa, &kv->desc, a->pages, (int)rows, lo + i, hi + i, row_of(f, op->buf[1], i), ldq, op->i[0], attend_factor(op),
                           row_of(f, op->buf[0], i), ldo, (int)h, (int)h + 1, f->s->threads[tid].work))
                fault_at(f, a->index);
        }
        base += n;
    }
}

/* a single row: its pages are shared out, then the pieces are merged in order */
static void pieces_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    att_arg *a = arg;
    const bw_op *op = &f->l->ops[a->index];
    const bw_kv *kv = &f->l->kvs[op->kv];
    int64_t lo = *lo_of(f, kv->klass, a->set), hi = *hi_of(f, a->set), b0 = lo / BW_PAGE_TOKENS, heads = kv->desc.heads;
    if (!a->pages && !(a->pages = pages_of(f, kv, a->set->runs[0].seq, &f->s->threads[tid]))) return;
    for (int64_t item = from; item < to; item++) {
        int64_t p0 = item / heads * a->block, p1 = p0 + a->block < a->pieces ? p0 + a->block : a->pieces;
        int h = (int)(item % heads);
        if (cpu_attend_pieces(f->isa, &kv->desc, a->pages, b0 + p0, b0 + p1, lo, hi, row_of(f, op->buf[1], 0), op->i[0], attend_factor(op), f->s->acc,
                              h, h + 1, f->s->threads[tid].work))
            fault_at(f, a->index);
    }
}

static void merge_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const att_arg *a = arg;
    const bw_op *op = &f->l->ops[a->index];
    (void)tid;
    if (cpu_attend_merge(f->isa, &f->l->kvs[op->kv].desc, a->pieces, f->s->acc, op->i[0], row_of(f, op->buf[0], 0), (int)from, (int)to)) fault_at(f, a->index);
}

static void step_attend(const fwd *f, cpu_phase *p, int index, const bw_rowset *set, int tid) {
    const bw_kv *kv = &f->l->kvs[f->l->ops[index].kv];
    att_arg a = {.index = index, .set = set, .run = -1};
    int64_t items = 0, heads = kv->desc.heads;
    if (set->n == 1) {
        a.pieces = (*hi_of(f, set) - 1) / BW_PAGE_TOKENS - *lo_of(f, kv->klass, set) / BW_PAGE_TOKENS + 1;
        a.block = 1 + a.pieces * heads / (cpu_pool_size(f->pool) * 32);
    }
    if (set->n == 1 && a.pieces > 1 && cpu_pool_size(f->pool) > 1) {
        run_phase(f, &p[0], (a.pieces + a.block - 1) / a.block * heads, pieces_range, &a, tid);
        run_phase(f, &p[1], heads, merge_range, &a, tid);
        return;
    }
    for (int r = 0; r < set->n_runs; r++) items += blocks_of(&set->runs[r]) * heads;
    run_phase(f, &p[1], items, attend_range, &a, tid);
}

typedef struct pick_arg { const bw_op *op; const bw_rowset *set; } pick_arg;
static void pick_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const pick_arg *a = arg;
    size_t bytes = (size_t)f->l->bufs[a->op->buf[0]].width * sizeof(float);
    (void)tid;
    for (int64_t i = from; i < to; i++) {
        int64_t row = BW_SEEDED(10, a->set->row[0] + i, a->set->row[i]);
        memcpy(row_of(f, a->op->buf[0], i), row_of(f, a->op->buf[1], row), bytes);
    }
}

static void step_op(const fwd *f, cpu_phase *p, int step, const bw_step *st, const bw_rowset *set, int tid) {
    pick_arg a = {&f->l->ops[st->first], set};
    switch (a.op->code) {
    case BW_OP_PICK_ROWS: run_phase(f, p, set->n, pick_range, &a, tid); break;
    case BW_OP_EXPERTS: step_experts(f, p, step, st->first, set, tid); break;
    case BW_OP_PERHEAD: step_perhead(f, p, step, st->first, set, tid); break;
    case BW_OP_CONV: case BW_OP_DELTA: step_fold(f, p, step, st->first, tid); break;
    default: step_attend(f, p, st->first, set, tid); break;
    }
}

/* ---- the walk */
static void rope_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    (void)arg;
    (void)tid;
    for (int c = 0; c < f->s->n_ropes; c++) {
        const cpu_rope_cfg *r = &f->s->ropes[c];
        int half = r->rot / 2;
        for (int64_t i = from; i < to; i++) {
            float *cs = r->table + i * r->rot;
            double pos = (double)(f->b->all.pos[i] + BW_SEEDED(6, 1, 0));
            for (int k = 0; k < half; k++) bw_sincos((pos * r->inv[k]) * r->scale, cs + half + k, cs + k);
        }
    }
}

static bool finite_part(const float *x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        bw_f32 v = {.f = x[i]};
        uint32_t a = v.u & 0x7fffffffu;
        top = a > top ? a : top;
    }
    return top < 0x7f800000u;
}

static void finite_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    (void)arg;
    (void)tid;
    if (!finite_part(f->logits + from, to - from)) fault_at(f, f->l->n_ops - 1);
}

static void walk(void *arg, int tid, int n) {
    const fwd *f = arg;
    const bw_plan *plan = f->l->plan;
    (void)n;
    ahead_begin(f, tid);
    run_phase(f, &f->s->phases[0], f->b->n, rope_range, NULL, tid);
    for (int i = 0; i < plan->n_steps; i++) {
        const bw_step *st = &plan->steps[i];
        cpu_phase *p = &f->s->phases[f->s->steps[i].phase];
        const bw_rowset *set = bw_rows_of(f->l, f->b, f->l->ops[st->first].buf[0]);
        if (!set->n) continue;
        ahead_step(f, tid, i);
        if (atomic_load_explicit(&f->m->ctx->cancel, memory_order_relaxed)) {
            atomic_store(&f->s->cancelled, 1);
            return;
        }
        if (st->kind == BW_STEP_ROWS) step_rows(f, p, st, set, tid);
        else if (st->kind == BW_STEP_LINEARS) step_linears(f, p, i, st, set, tid);
        else step_op(f, p, i, st, set, tid);
    }
    if (f->logits) run_phase(f, &f->s->phases[1], (int64_t)f->b->want.n * f->l->bufs[f->l->logits].width, finite_range, NULL, tid);
}

static void set_bounds(const fwd *f) {
    const bw_rowset *sets[2] = {&f->b->all, &f->b->want};
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < sets[s]->n; i++) {
            int64_t pos = sets[s]->pos[i];
            for (int c = 0; c < f->m->n_classes; c++) {
                bw_kv kv = {.window = f->m->class_window[c]};
                ((int64_t *)lo_of(f, c, sets[s]))[i] = bw_key_lo(&kv, pos + BW_SEEDED(8, 1, 0));
            }
            ((int64_t *)hi_of(f, sets[s]))[i] = bw_key_hi(f->l, pos);
        }
}

static void set_groups(const fwd *f) {
    cpu_model *s = f->s;
    s->n_groups = 0;
    for (int r = 0; r < f->b->all.n_runs; r++) {
        const bw_run *run = &f->b->all.runs[r];
        for (int i = run->first; i < run->first + run->n; i++)
            if (i == run->first || f->b->all.pos[i] % BW_PAGE_TOKENS == 0) s->groups[s->n_groups++] = i;
    }
    s->groups[s->n_groups] = f->b->n;
}

/* room for the pieces of a single row's ATTEND */
static int reserve_pieces(const fwd *f) {
    size_t need = 0;
    if (f->b->all.n != 1 && f->b->want.n != 1) return 0;
    int64_t pages = 0;
    for (int r = 0; r < f->b->all.n_runs; r++)
        if (f->b->all.runs[r].seq->n_pages > pages) pages = f->b->all.runs[r].seq->n_pages;
    for (int i = 0; i < f->l->n_ops; i++) {
        const bw_op *op = &f->l->ops[i];
        if (op->code != BW_OP_ATTEND) continue;
        size_t floats = (size_t)pages * (size_t)op->i[0] * cpu_attend_piece_floats(&f->l->kvs[op->kv].desc);
        if (floats > need) need = floats;
    }
    if (need <= f->s->acc_floats) return 0;
    free(f->s->acc);
    f->s->acc_floats = 0;
    f->s->acc = aligned_alloc(64, (need * 2 * sizeof(float) + 63) & ~(size_t)63);
    if (!f->s->acc) return bw_fail(BW24_E_MEMORY, "out of memory for attention over %lld pages", (long long)pages);
    f->s->acc_floats = need * 2;
    return 0;
}

static int verdict(const fwd *f) {
    char label[256];
    int fault = atomic_load(&f->s->fault);
    if (atomic_load(&f->s->cancelled)) return bw_fail(BW24_E_CANCELLED, "cancelled");
    const char *lost = f->m->spill ? bw_spill_error(f->m->spill) : NULL;
    if (lost) return bw_fail(BW24_E_IO, "%s", lost);
    if (atomic_load(&f->s->memory_fault)) return bw_fail(BW24_E_MEMORY, "out of memory for a table of KV pages");
    if (!fault) return 0;
    bw_op_label(f->l, fault - 1, label, sizeof label);
    return bw_fail(BW24_E_NUMERIC, "%s: Inf or NaN in its input (or beyond 2^100 or the KV format's range)", label);
}

int cpu_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits) {
    cpu_ctx *c = m->ctx->priv;
    fwd f = {m, l, b, logits, l->priv, c->isa, c->pool, false};
    for (int i = 0; i < f.s->n_phases; i++) cpu_phase_reset(&f.s->phases[i]);
    atomic_store(&f.s->fault, 0);
    atomic_store(&f.s->memory_fault, 0);
    atomic_store(&f.s->cancelled, 0);
    BW_TRY(reserve_pieces(&f));
    set_bounds(&f);
    set_groups(&f);
    cpu_pool_run(c->pool, walk, &f);
    return verdict(&f);
}
