/* One forward pass on the CPU: every thread walks the plan's steps and meets the others at a barrier after each. Owns the cutting of work among threads;
 * the results do not depend on the cut. No thread leaves early: Inf and NaN are recorded and the walk goes on, so that all meet at every barrier. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"
#include "vecops.h"

typedef struct fwd {
    bw24_model *m;
    bw_list *l;
    const bw_batch *b;
    float *logits;
    cpu_model *s;
    enum cpu_isa isa;
    cpu_pool *pool;
} fwd;

enum { ATTEND_ROWS = 64, CHUNKS_PER_THREAD = 8 };

static float *row_of(const fwd *f, int buf, int64_t i) {
    float *base = buf == f->l->logits ? f->logits : f->l->mem[buf];
    return base + i * f->l->bufs[buf].width;
}

static void fault_at(const fwd *f, int op) {
    int none = 0;
    atomic_compare_exchange_strong(&f->s->fault, &none, op + 1);
}

/* ---- row-local ops */
static void embed_row(const fwd *f, const bw_op *op, int64_t i) {
    const bw_tensor *w = op->w[0];
    float *y = row_of(f, op->buf[0], i);
    const uint8_t *src = w->data + (int64_t)f->b->token[i] * bw_row_bytes(w->type, w->ne[0]);
    for (int64_t c = 0; c < w->ne[0]; c += w->type->block, src += w->type->bytes) w->type->decode(src, y + c);
    cpu_scale(f->isa, y, (float)op->f[0], y, w->ne[0]);
}

static void norm_row(const fwd *f, const bw_op *op, const float *x, float *y) {
    int64_t n = f->l->bufs[op->buf[0]].width / op->i[0];
    for (int h = 0; h < op->i[0]; h++) cpu_norm(f->isa, x + h * n, op->w[0] ? op->w[0]->dense : NULL, y + h * n, n, (float)op->f[0], op->i[1]);
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
    if (cpu_kv_append(&kv->desc, page, (int)(pos % BW_PAGE_TOKENS), row_of(f, op->buf[0], i), row_of(f, op->buf[1], i))) fault_at(f, index);
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
    case BW_OP_NORM: norm_row(f, op, a, y); break;
    case BW_OP_ADD: cpu_add(f->isa, a, c, y, n); break;
    case BW_OP_SCALE: cpu_scale(f->isa, a, (float)op->f[0], y, n); break;
    case BW_OP_GLU: cpu_glu(f->isa, (enum bw_act)op->i[0], a, c, y, n); break;
    case BW_OP_ROPE: rope_row(f, index, set, i); break;
    case BW_OP_KV_APPEND: append_row(f, index, i); break;
    default: cpu_softcap(f->isa, a, (float)op->f[0], y, n); break;
    }
}

/* groups of rows go to the threads as they come; two rows of one KV page are always in one group */
static void step_rows(const fwd *f, int step, const bw_step *st, const bw_rowset *set) {
    bool all = set == &f->b->all;
    int groups = all ? f->s->n_groups : set->n;
    for (int g; (g = atomic_fetch_add_explicit(&f->s->next[2 * step], 1, memory_order_relaxed)) < groups;) {
        int from = all ? f->s->groups[g] : g, to = all ? f->s->groups[g + 1] : g + 1;
        for (int i = from; i < to; i++)
            for (int o = st->first; o < st->first + st->n; o++) do_row(f, o, set, i);
    }
}

/* ---- LINEARS */
/* the input of one row: normalised into `into` where the step has a NORM; thread 0 also leaves it in the NORM's own buffer */
static const float *linear_input(const fwd *f, const bw_step *st, int64_t i, float *into, bool keep) {
    if (st->norm < 0) return row_of(f, f->l->ops[st->lin0].buf[1], i);
    const bw_op *op = &f->l->ops[st->norm];
    float *own = row_of(f, op->buf[0], i), *y = into ? into : own;
    norm_row(f, op, row_of(f, op->buf[1], i), y);
    if (keep && y != own) memcpy(own, y, (size_t)f->l->bufs[op->buf[0]].width * sizeof(float));
    return y;
}

static void fill(const fwd *f, cpu_act *a, const float *x, int64_t ldx, int r0, int r1, const bw_step *st) {
    if (cpu_act_fill(f->isa, a, x, ldx, r0, r1)) fault_at(f, st->lin0);
}

/* one row: every thread prepares its own copy of the activations, which costs less than a barrier */
static void activations_alone(const fwd *f, const bw_step *st, const cpu_step *cs, int tid, cpu_act *q, cpu_act *fl) {
    cpu_thread *th = &f->s->threads[tid];
    int64_t cols = f->l->ops[st->lin0].w[0]->ne[0];
    const float *x = linear_input(f, st, 0, th->row, tid == 0);
    cpu_act_init(q, th->act_q.mem, 1, cols, 0);
    cpu_act_init(fl, th->act_f.mem, 1, cols, 1);
    if (cs->quant) fill(f, q, x, cols, 0, 1, st);
    if (cs->floats) fill(f, fl, x, cols, 0, 1, st);
}

static void activations_shared(const fwd *f, const bw_step *st, const cpu_step *cs, int rows, int tid, int n, cpu_act *q, cpu_act *fl) {
    int64_t cols = f->l->ops[st->lin0].w[0]->ne[0];
    int r0 = (int)((int64_t)rows * tid / n), r1 = (int)((int64_t)rows * (tid + 1) / n);
    if (st->norm >= 0)
        for (int i = r0; i < r1; i++) linear_input(f, st, i, NULL, true);
    const float *x = row_of(f, f->l->ops[st->lin0].buf[1], 0);
    cpu_act_init(q, f->s->act_q_mem, rows, cols, 0);
    cpu_act_init(fl, f->s->act_f_mem, rows, cols, 1);
    if (cs->quant && r1 > r0) fill(f, q, x, cols, r0, r1, st);
    if (cs->floats && r1 > r0) fill(f, fl, x, cols, r0, r1, st);
    cpu_pool_barrier(f->pool);
}

static void tiles_of(const fwd *f, const bw_step *st, const cpu_step *cs, int mat, int rows, const cpu_act *act, int64_t t0, int64_t t1, void *work) {
    int out = f->l->ops[st->lin0 + mat].buf[0];
    cpu_epi e = {CPU_STORE, NULL, 0, NULL, CPU_SILU};
    if (st->glu >= 0) {
        const bw_op *glu = &f->l->ops[st->glu];
        e = (cpu_epi){CPU_GLU, NULL, 0, &cs->mats[0], glu->i[0] == BW_ACT_SILU ? CPU_SILU : CPU_GELU};
        out = glu->buf[0];
        mat = 1;
    } else if (st->add >= 0) {
        const bw_op *add = &f->l->ops[st->add];
        int res = add->buf[1] == out ? add->buf[2] : add->buf[1];
        e = (cpu_epi){CPU_ADD, row_of(f, res, 0), f->l->bufs[res].width, NULL, CPU_SILU};
        out = add->buf[0];
    }
    cpu_linear(f->isa, &cs->mats[mat], act, 0, rows, row_of(f, out, 0), f->l->bufs[out].width, t0, t1, &e, work);
}

static void step_linears(const fwd *f, int step, const bw_step *st, const bw_rowset *set, int tid, int n) {
    const cpu_step *cs = &f->s->steps[step];
    cpu_act q, fl;
    if (set->n == 1) activations_alone(f, st, cs, tid, &q, &fl);
    else activations_shared(f, st, cs, set->n, tid, n, &q, &fl);
    int64_t chunk = cs->tiles / (n * CHUNKS_PER_THREAD);
    if (chunk < 1) chunk = 1;
    if (n == 1) chunk = cs->tiles;
    for (int64_t at; (at = chunk * atomic_fetch_add_explicit(&f->s->next[2 * step], 1, memory_order_relaxed)) < cs->tiles;) {
        int64_t end = at + chunk < cs->tiles ? at + chunk : cs->tiles, base = 0;
        for (int i = 0; i < (st->glu >= 0 ? 1 : st->n_lin) && base < end; i++) {
            int64_t tiles = cpu_tiles(cs->mats[i].rows), t0 = at > base ? at - base : 0, t1 = end - base < tiles ? end - base : tiles;
            const cpu_act *act = cs->mats[i].type->form == BW_FLOAT ? &fl : &q;
            if (t0 < t1) tiles_of(f, st, cs, i, set->n, act, t0, t1, f->s->threads[tid].work);
            base += tiles;
        }
    }
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

/* rows of one run go in blocks, so that a page stays in cache for many rows; a (block, KV head) is one piece of work */
static void attend_blocks(const fwd *f, int step, int index, const bw_rowset *set, int tid) {
    const bw_op *op = &f->l->ops[index];
    const bw_kv *kv = &f->l->kvs[op->kv];
    cpu_thread *th = &f->s->threads[tid];
    const int64_t *lo = lo_of(f, kv->klass, set), *hi = hi_of(f, set);
    float c = (float)(op->f[0] * 1.4426950408889634);
    int64_t ldq = f->l->bufs[op->buf[1]].width, ldo = f->l->bufs[op->buf[0]].width;
    int item = 0, mine = atomic_fetch_add_explicit(&f->s->next[2 * step], 1, memory_order_relaxed);
    for (int r = 0; r < set->n_runs; r++) {
        const bw_run *run = &set->runs[r];
        uint8_t **pages = NULL;
        for (int at = 0; at < run->n; at += ATTEND_ROWS)
            for (int h = 0; h < kv->desc.heads; h++, item++) {
                if (item != mine) continue;
                mine = atomic_fetch_add_explicit(&f->s->next[2 * step], 1, memory_order_relaxed);
                int rows = run->n - at < ATTEND_ROWS ? run->n - at : ATTEND_ROWS, i = run->first + at;
                if (!pages && !(pages = pages_of(f, kv, run->seq, th))) return;
                if (cpu_attend(f->isa, &kv->desc, pages, rows, lo + i, hi + i, row_of(f, op->buf[1], i), ldq, op->i[0], c, row_of(f, op->buf[0], i), ldo,
                               h, h + 1, th->work))
                    fault_at(f, index);
            }
    }
}

/* a single row: its pages are shared out, then the pieces are merged in order */
static void attend_pieces(const fwd *f, int step, int index, const bw_rowset *set, int tid, int n) {
    const bw_op *op = &f->l->ops[index];
    const bw_kv *kv = &f->l->kvs[op->kv];
    cpu_thread *th = &f->s->threads[tid];
    int64_t lo = *lo_of(f, kv->klass, set), hi = *hi_of(f, set), b0 = lo / 64, b1 = (hi - 1) / 64 + 1, pieces = b1 - b0;
    float c = (float)(op->f[0] * 1.4426950408889634), *out = row_of(f, op->buf[0], 0);
    const float *q = row_of(f, op->buf[1], 0);
    uint8_t **pages = pages_of(f, kv, set->runs[0].seq, th);
    int heads = kv->desc.heads;
    int64_t block = 1 + pieces * heads / (n * 16), blocks = (pieces + block - 1) / block;
    for (int64_t w; pages && (w = atomic_fetch_add_explicit(&f->s->next[2 * step], 1, memory_order_relaxed)) < blocks * heads;) {
        int h = (int)(w % heads);
        int64_t from = b0 + w / heads * block, to = from + block < b1 ? from + block : b1;
        if (cpu_attend_pieces(f->isa, &kv->desc, pages, from, to, lo, hi, q, op->i[0], c, f->s->acc, h, h + 1, th->work)) fault_at(f, index);
    }
    cpu_pool_barrier(f->pool);
    for (int h; (h = atomic_fetch_add_explicit(&f->s->next[2 * step + 1], 1, memory_order_relaxed)) < heads;)
        if (cpu_attend_merge(f->isa, &kv->desc, pieces, f->s->acc, op->i[0], out, h, h + 1)) fault_at(f, index);
}

static void step_op(const fwd *f, int step, const bw_step *st, const bw_rowset *set, int tid, int n) {
    const bw_op *op = &f->l->ops[st->first];
    if (op->code == BW_OP_PICK_ROWS) {
        size_t bytes = (size_t)f->l->bufs[op->buf[0]].width * sizeof(float);
        for (int i = tid; i < set->n; i += n) memcpy(row_of(f, op->buf[0], i), row_of(f, op->buf[1], set->row[i]), bytes);
    } else if (set->n == 1 && n > 1 && *hi_of(f, set) - *lo_of(f, f->l->kvs[op->kv].klass, set) > BW_PAGE_TOKENS) {
        attend_pieces(f, step, st->first, set, tid, n);
    } else {
        attend_blocks(f, step, st->first, set, tid);
    }
}

/* ---- the walk */
static void rope_tables(const fwd *f, int tid, int n) {
    for (int c = 0; c < f->s->n_ropes; c++) {
        const cpu_rope_cfg *r = &f->s->ropes[c];
        int half = r->rot / 2;
        for (int64_t i = tid; i < f->b->n; i += n) {
            float *cs = r->table + i * r->rot;
            for (int k = 0; k < half; k++) bw_sincos(((double)f->b->all.pos[i] * r->inv[k]) * r->scale, cs + half + k, cs + k);
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

static void walk(void *arg, int tid, int n) {
    const fwd *f = arg;
    const bw_plan *p = f->l->plan;
    rope_tables(f, tid, n);
    cpu_pool_barrier(f->pool);
    for (int i = 0; i < p->n_steps; i++) {
        const bw_step *st = &p->steps[i];
        const bw_rowset *set = bw_rows_of(f->l, f->b, f->l->ops[st->first].buf[0]);
        if (!set->n) continue;
        if (st->kind == BW_STEP_ROWS) step_rows(f, i, st, set);
        else if (st->kind == BW_STEP_LINEARS) step_linears(f, i, st, set, tid, n);
        else step_op(f, i, st, set, tid, n);
        if (tid == 0 && atomic_load_explicit(&f->m->ctx->cancel, memory_order_relaxed)) atomic_store(&f->s->stop_at, i);
        cpu_pool_barrier(f->pool);
        if (atomic_load_explicit(&f->s->stop_at, memory_order_relaxed) <= i) return; /* written before the barrier, so all agree */
    }
    int64_t total = (int64_t)f->b->want.n * f->l->bufs[f->l->logits].width;
    int64_t a = total * tid / n, b = total * (tid + 1) / n;
    if (b > a && !finite_part(f->logits + a, b - a)) fault_at(f, f->l->n_ops - 1);
}

static void set_bounds(const fwd *f) {
    const bw_rowset *sets[2] = {&f->b->all, &f->b->want};
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < sets[s]->n; i++) {
            int64_t pos = sets[s]->pos[i];
            for (int c = 0; c < f->m->n_classes; c++) {
                bw_kv kv = {.window = f->m->class_window[c]};
                ((int64_t *)lo_of(f, c, sets[s]))[i] = bw_key_lo(&kv, pos);
            }
            ((int64_t *)hi_of(f, sets[s]))[i] = pos + 1;
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
    if (atomic_load(&f->s->stop_at) != INT_MAX) return bw_fail(BW24_E_CANCELLED, "cancelled");
    if (atomic_load(&f->s->memory_fault)) return bw_fail(BW24_E_MEMORY, "out of memory for a table of KV pages");
    if (!fault) return 0;
    bw_op_label(f->l, fault - 1, label, sizeof label);
    return bw_fail(BW24_E_NUMERIC, "%s: Inf or NaN in its input (or beyond the KV format's range)", label);
}

int cpu_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits) {
    cpu_ctx *c = m->ctx->priv;
    fwd f = {m, l, b, logits, m->priv, c->isa, c->pool};
    for (int i = 0; i < 2 * l->plan->n_steps; i++) atomic_store_explicit(&f.s->next[i], 0, memory_order_relaxed);
    atomic_store(&f.s->fault, 0);
    atomic_store(&f.s->memory_fault, 0);
    atomic_store(&f.s->stop_at, INT_MAX);
    BW_TRY(reserve_pieces(&f));
    set_bounds(&f);
    set_groups(&f);
    cpu_pool_run(c->pool, walk, &f);
    return verdict(&f);
}
