/* EXPERTS of a card's model on the processor (host.h): a context, a model and lists of backend cpu that stand beside the card's and hold the EXPERTS ops
 * alone. Owns that correspondence; the work itself is forward_moe.c's. */
#include <stdlib.h>
#include <string.h>

#include "forward.h"
#include "host.h"

typedef struct host_job { fwd f; int step; cpu_phase *phases; const bw_rowset *set; } host_job;
/* Between two layers the card computes and the bus brings experts, up to about a millisecond: in times of a pool's ordinary wait. */
enum { HOST_WAIT = 5 };
struct bw_host {
    bw24_ctx ctx;
    bw24_model model;
    const bw_list *of[BW_MAX_ROLES]; /* the card's lists, each with its own here at the same index */
    int *op_of[BW_MAX_ROLES];        /* op here -> op there */
    bw_rowset set;                   /* of the step in hand */
    host_job job;                    /* of the op in hand, while `started` */
    bool started;
    int lift_at, lift_ready, lift_hits; /* lifted experts given out, unpacked, found in RAM */
};

int bw_host_new(bw24_model *m, bw_host **out) {
    bw_host *h = *out = calloc(1, sizeof *h);
    if (!h) return bw_fail(BW24_E_MEMORY, "out of memory for a model");
    h->ctx.backend = &bw_backend_cpu;
    h->ctx.threads = m->ctx->threads;
    h->ctx.fuse = m->ctx->fuse;
    h->ctx.repack = m->ctx->repack;
    h->model.ctx = &h->ctx;
    h->model.max_rows = m->max_rows;
    h->model.max_context = m->max_context;
    h->model.spill = m->spill;
    int rc = bw_backend_cpu.open(&h->ctx);
    if (rc) {
        free(h);
        *out = NULL;
        return rc;
    }
    cpu_pool_wait_longer(((cpu_ctx *)h->ctx.priv)->pool, HOST_WAIT);
    return 0;
}

static void free_list(bw_list *l) {
    bw_plan_free(l->plan);
    free(l->ops);
    free(l->mem);
    free(l);
}

void bw_host_free(bw_host *h) {
    if (!h) return;
    bw_backend_cpu.free_model(&h->model);
    for (int i = 0; i < h->model.n_lists; i++) {
        free_list(h->model.lists[i]);
        free(h->op_of[i]);
    }
    bw_backend_cpu.close(&h->ctx);
    free(h);
}

static bool spilled(const bw_op *op) { return op->code == BW_OP_EXPERTS && bw_spilled(op); }

/* the EXPERTS ops of a list, over the same buffers; those of a drafter with a file of its own may be in memory */
static int copy_ops(bw_host *h, const bw_list *l, bw_list **out) {
    int n = 0, index = h->model.n_lists;
    for (int i = 0; i < l->n_ops; i++) n += spilled(&l->ops[i]);
    bw_list *own = *out = calloc(1, sizeof *own);
    if (own) own->ops = calloc((size_t)n + 1, sizeof *own->ops);
    if (own) own->mem = calloc((size_t)l->n_bufs, sizeof *own->mem);
    h->op_of[index] = calloc((size_t)n + 1, sizeof **h->op_of);
    if (!own || !own->ops || !own->mem || !h->op_of[index]) {
        if (own) free_list(own);
        return bw_fail(BW24_E_MEMORY, "out of memory for a list");
    }
    memcpy(own->bufs, l->bufs, sizeof own->bufs);
    own->n_bufs = l->n_bufs;
    own->logits = own->hidden = -1;
    own->index = index;
    for (int i = 0; i < l->n_ops; i++) {
        if (!spilled(&l->ops[i])) continue;
        h->op_of[index][own->n_ops] = i;
        own->ops[own->n_ops++] = l->ops[i];
    }
    h->of[index] = l;
    h->model.lists[h->model.n_lists++] = own;
    return 0;
}

int bw_host_list(bw_host *h, const bw_list *l) {
    bw_list *own;
    if (h->model.n_lists == BW_MAX_ROLES) return bw_fail(BW24_E_ARG, "a model has at most %d lists", BW_MAX_ROLES);
    BW_TRY(copy_ops(h, l, &own));
    BW_TRY(bw_lower(own, false, &own->plan));
    BW_TRY(bw_backend_cpu.prepare_list(&h->model, own));
    for (int i = 0; i < own->plan->n_steps; i++) ((cpu_model *)own->priv)->steps[i].away = true;
    return 0;
}

/* index of the list here; *step: of the op in its plan, where a step is an op */
static int find(const bw_host *h, const bw_list *l, int op, int *step) {
    int i = 0;
    while (h->of[i] != l) i++;
    for (*step = 0; h->op_of[i][*step] != op;) ++*step;
    return i;
}

int bw_host_layer(const bw_host *h, const bw_list *l, int op) {
    int step, i = find(h, l, op, &step);
    return ((cpu_model *)h->model.lists[i]->priv)->steps[step].spill;
}

size_t bw_host_results(const bw_host *h, const bw_list *l, void **at) {
    for (int i = 0; i < h->model.n_lists; i++) {
        const cpu_moe *s = &((cpu_model *)h->model.lists[i]->priv)->moe;
        if (h->of[i] != l || !s->d) continue;
        *at = s->d;
        return (size_t)h->model.max_rows * (size_t)s->max_top * (size_t)s->max_out * sizeof(float);
    }
    return 0;
}

static fwd pass_over(bw_host *h, bw_list *l) {
    cpu_ctx *c = h->ctx.priv;
    return (fwd){&h->model, l, NULL, NULL, l->priv, c->isa, c->pool, false};
}

int bw_host_plan(bw_host *h, const bw_list *l, int op, const float *x, const float *route, int n, int lift, const uint8_t *lifts, bw_host_step *out) {
    int step, i = find(h, l, op, &step);
    bw_list *own = h->model.lists[i];
    cpu_model *s = own->priv;
    const bw_op *o = &own->ops[step];
    fwd f = pass_over(h, own);
    h->set = (bw_rowset){.n = n};
    own->mem[o->buf[1]] = (float *)x;
    own->mem[o->buf[2]] = (float *)route;
    atomic_store(&s->fault, 0);
    cpu_step *cs = &s->steps[step];
    cs->lift = lift;
    cs->lifts = lifts;
    plan_experts(&f, step, step, &h->set);
    *out = (bw_host_step){n * (int)(own->bufs[o->buf[2]].width / 2), (int)cs->own_pairs, cs->n_lift, (int)cs->own_pairs, s->moe.place, s->moe.pair, s->moe.d};
    for (int k = 0; k < cs->n_lift; k++) out->first_set += s->moe.count[s->moe.active[cs->n_own + k]];
    h->lift_at = h->lift_ready = h->lift_hits = 0;
    return 0;
}

void bw_host_begin(bw_host *h, const bw_list *l, int op) {
    int step, i = find(h, l, op, &step);
    fwd f = pass_over(h, h->model.lists[i]);
    begin_experts(&f, step, step, &h->set);
}

static bw_host_lifted matrices_of(const bw_host *h, const cpu_step *cs, int expert) {
    bw_host_lifted out = {.expert = expert, .pinned = bw_spill_pinned(h->model.spill, cs->spill, expert)};
    for (int m = 0; m < 3; m++) {
        const cpu_mat *mat = &cs->mats[3 * expert + m];
        out.data[m] = mat->data;
        out.bytes[m] = cpu_pack_bytes(mat->type, mat->rows, mat->cols);
    }
    return out;
}

/* ---- lifted experts: found in RAM, or read and packed as those that are computed here, two at a time */
typedef struct unpack_job { const fwd *f; cpu_step *cs; const int *experts; int n; } unpack_job;
static void unpack_part(void *arg, int tid, int threads) {
    const unpack_job *j = arg;
    for (int i = tid; i < 3 * j->n; i += threads) {
        uint8_t *base, *raw;
        cpu_mat *mat = &j->cs->mats[3 * j->experts[i / 3] + i % 3];
        if (bw_spill_wait(j->f->m->spill, j->cs->spill, j->experts[i / 3], i % 3, &base, &raw)) cpu_unpack_spilled(mat, true, base, raw, j->f->s->threads[tid].tile);
        else mat->data = base;
    }
}

bool bw_host_lift_lets_go(const bw_host *h) { return h->lift_at > 0 && h->lift_at == h->lift_ready; }

void bw_host_lift(bw_host *h, const bw_list *l, int op, bw_host_lifted *out) {
    int step, i = find(h, l, op, &step);
    fwd f = pass_over(h, h->model.lists[i]);
    cpu_step *cs = &f.s->steps[step];
    cpu_moe *s = &f.s->moe;
    int *experts = s->active + cs->n_own;
    if (h->lift_at == 0) {
        bw_spill_begin(f.m->spill, cs->spill, experts, cs->n_lift, h->set.n, s->count, experts, &h->lift_hits);
        h->lift_ready = h->lift_hits;
        if (h->lift_hits) bw_spill_next(f.m->spill, 0, h->lift_hits);
    }
    if (h->lift_at == h->lift_ready) {
        int to = h->lift_at + BW_SPILL_WAVE < cs->n_lift ? h->lift_at + BW_SPILL_WAVE : cs->n_lift;
        unpack_job job = {&f, cs, experts + h->lift_at, to - h->lift_at};
        int64_t begun = bw_spill_clock();
        bw_spill_next(f.m->spill, h->lift_at, to);
        cpu_pool_run(f.pool, unpack_part, &job);
        bw_spill_time(f.m->spill, bw_spill_clock() - begun, 0);
        h->lift_ready = to;
    }
    int e = experts[h->lift_at++];
    *out = matrices_of(h, cs, e);
    out->first = s->start[e];
    out->n = s->count[e];
}

const int *bw_host_lift_order(const bw_host *h, const bw_list *l, int op) {
    int step, i = find(h, l, op, &step);
    const cpu_model *s = h->model.lists[i]->priv;
    return s->moe.active + s->steps[step].n_own;
}

void bw_host_held(const bw_host *h, const bw_list *l, int op, int expert, bw_host_lifted *out) {
    int step, i = find(h, l, op, &step);
    *out = matrices_of(h, &((cpu_model *)h->model.lists[i]->priv)->steps[step], expert);
}

static int read_error(const bw_host *h) {
    const char *lost = bw_spill_error(h->model.spill);
    return lost ? bw_fail(BW24_E_IO, "%s", lost) : 0;
}

int bw_host_lift_end(bw_host *h) {
    bw_spill_end(h->model.spill);
    return read_error(h);
}

typedef struct copy_job { uint8_t *to; const uint8_t *from; size_t bytes; } copy_job;
static void copy_part(void *arg, int tid, int n) {
    const copy_job *j = arg;
    size_t piece = (j->bytes / (size_t)n + 63) & ~(size_t)63, from = piece * (size_t)tid, to = from + piece;
    if (to > j->bytes) to = j->bytes;
    if (from < to) memcpy(j->to + from, j->from + from, to - from);
}
void bw_host_copy(bw_host *h, void *to, const void *from, size_t bytes) {
    copy_job job = {to, from, bytes};
    cpu_pool_run(((cpu_ctx *)h->ctx.priv)->pool, copy_part, &job);
}

static void work_part(void *arg, int tid, int n) {
    const host_job *j = arg;
    (void)n;
    own_experts(&j->f, j->phases, j->step, j->step, j->set, tid);
}

static void begin_work(bw_host *h, const bw_list *l, int op, bool late) {
    int step, i = find(h, l, op, &step);
    bw_list *own = h->model.lists[i];
    cpu_model *s = own->priv;
    cpu_step *cs = &s->steps[step];
    h->job = (host_job){pass_over(h, own), step, &s->phases[cs->phase], &h->set};
    int used = 4 + CPU_WAVE_PHASES * cs->n_waves;
    for (int k = 0; k < used; k++) cpu_phase_reset(&h->job.phases[k]);
    h->started = true;
    h->job.f.late = late && cpu_pool_size(h->job.f.pool) > 1;
    if (cs->n_own) cpu_pool_start(h->job.f.pool, work_part, &h->job);
}

void bw_host_start(bw_host *h, const bw_list *l, int op) { begin_work(h, l, op, true); }

int bw_host_work(bw_host *h, const bw_list *l, int op) {
    if (!h->started) begin_work(h, l, op, false);
    cpu_model *s = h->job.f.s;
    h->started = false;
    if (s->steps[h->job.step].n_own) cpu_pool_join(h->job.f.pool);
    else bw_spill_end(h->model.spill);
    BW_TRY(read_error(h));
    if (!atomic_load(&s->fault)) return 0;
    char label[256];
    bw_op_label(l, op, label, sizeof label);
    return bw_fail(BW24_E_NUMERIC, "%s: Inf or NaN in its input (or beyond 2^100 or the KV format's range)", label);
}

int bw_host_warm(bw_host *h, int layer, const int *experts, int n) { return cpu_warm(&h->model, layer, experts, n); }
