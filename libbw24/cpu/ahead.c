/* What a thread does while it waits for the others of a phase: it fetches into its own second-level cache what it will read first in the steps that
 * follow: weights and state, which no step changes. Where one row is computed, reading is all that a step costs, and memory would idle at every
 * meeting. Owns the choice of the bytes; the results do not depend on it. Knows the cut of a phase from cpu_share, no kernel. */
#include "../ref/recur.h"
#include "forward.h"

/* half of a second-level cache of 1 MiB; rows of a step beyond which computing outlasts reading */
enum { AHEAD_BYTES = 512 * 1024, AHEAD_ROWS = 8, AHEAD_KEYS = 1024, CONV_TAPS_AHEAD = 8 };

/* items of a thread's own range in a phase of n items; *from is its first. 0: it has none */
static int64_t own_range(const fwd *f, int64_t n, int tid, int64_t *from) {
    int threads = cpu_pool_size(f->pool);
    int64_t share = tid < CPU_OWNERS ? cpu_share(n, threads) : 0;
    *from = tid * share;
    return share;
}

static void add_stream(cpu_ahead *a, const void *p) {
    if (a->n < CPU_AHEAD_STREAMS) a->p[a->n++] = p;
}

static void aim_linears(const fwd *f, const bw_step *st, const cpu_step *cs, int tid, cpu_ahead *a) {
    int64_t from, n = own_range(f, cs->tiles, tid, &from), base = 0;
    for (int i = 0; n && i < (st->glu >= 0 ? 1 : st->n_lin); i++) {
        const cpu_mat *m = &cs->mats[i];
        int64_t tiles = cpu_tiles(m->rows), tile = (int64_t)cpu_pack_bytes(m->type, CPU_TILE, m->cols);
        if (from < base + tiles) {
            int64_t end = from + n < base + tiles ? from + n : base + tiles;
            if (!m->data || (st->glu >= 0 && !cs->mats[1].data)) return;
            if (st->glu >= 0) add_stream(a, cs->mats[1].data + (from - base) * (int64_t)cpu_pack_bytes(cs->mats[1].type, CPU_TILE, m->cols));
            add_stream(a, m->data + (from - base) * tile);
            a->len = (size_t)((end - from) * tile);
            return;
        }
        base += tiles;
    }
}

static void aim_conv(const fwd *f, const bw_op *op, const cpu_step *cs, int tid, cpu_ahead *a) {
    const bw_state *st = &f->l->states[op->state];
    int64_t width = f->l->bufs[op->buf[0]].width, blocks = (width + CPU_CONV_COLS - 1) / CPU_CONV_COLS, from, n = own_range(f, blocks, tid, &from);
    int taps = (int)op->w[0]->ne[0];
    if (!n || taps > CONV_TAPS_AHEAD || f->b->n != 1) return;
    for (int t = 0; t < taps; t++) add_stream(a, cs->conv + t * width + from * CPU_CONV_COLS);
    for (int64_t t = 0; t < st->floats / width; t++) add_stream(a, f->b->seqs[0].live->data + st->offset + t * width + from * CPU_CONV_COLS);
    a->len = (size_t)n * CPU_CONV_COLS * sizeof(float);
}

static void aim_delta(const fwd *f, const bw_op *op, int tid, cpu_ahead *a) {
    const bw_state *st = &f->l->states[op->state];
    int dk = (int)f->l->bufs[op->buf[2]].width / op->i[1], dv = (int)f->l->bufs[op->buf[0]].width / op->i[0];
    int64_t from, n = own_range(f, (int64_t)op->i[0] * bw_delta_blocks(dv) + 1, tid, &from);
    if (!n || f->b->n_seqs != 1 || dv % BW_DELTA_COLS) return;
    add_stream(a, f->b->seqs[0].live->data + st->offset + from * BW_DELTA_COLS * dk);
    a->len = (size_t)n * BW_DELTA_COLS * (size_t)dk * sizeof(float);
}

/* false: nothing is fetched across this step, because what it reads is not known yet or pushes out what was fetched */
static bool aim_step(const fwd *f, int step, int tid, cpu_ahead *a) {
    const bw_step *st = &f->l->plan->steps[step];
    const bw_op *op = &f->l->ops[st->first];
    const bw_rowset *set = bw_rows_of(f->l, f->b, op->buf[0]);
    a->n = 0;
    a->at = a->len = 0;
    if (!set->n || st->kind == BW_STEP_ROWS) return true;
    if (st->kind == BW_STEP_LINEARS) {
        if (writes_here(f, st->lin0)) aim_linears(f, st, &f->s->steps[step], tid, a);
    } else if (op->code == BW_OP_CONV) aim_conv(f, op, &f->s->steps[step], tid, a);
    else if (op->code == BW_OP_DELTA) aim_delta(f, op, tid, a);
    else if (op->code == BW_OP_EXPERTS) return false;
    else if (op->code == BW_OP_ATTEND) return set->pos[set->n - 1] < AHEAD_KEYS;
    return true;
}

void ahead_begin(const fwd *f, int tid) {
    f->s->threads[tid].ahead = (cpu_ahead){.step = -1, .on = cpu_pool_size(f->pool) > 1 && f->b->n <= AHEAD_ROWS};
}

/* `step` begins: what was fetched for it is in use now */
void ahead_step(const fwd *f, int tid, int step) {
    cpu_ahead *a = &f->s->threads[tid].ahead;
    if (!a->on || a->step > step) return;
    *a = (cpu_ahead){.step = step, .on = true};
}

/* The next bytes, a few lines of each stream; false: there is nothing to fetch. By loads: a Zen 4 drops prefetches, nine of ten, when this many
 * wait for memory. */
bool ahead_fetch(const fwd *f, int tid) {
    cpu_ahead *a = &f->s->threads[tid].ahead;
    if (!a->on) return false;
    while (a->at >= a->len) {
        if (a->stopped || a->step + 1 >= f->l->plan->n_steps) return false;
        a->stopped = !aim_step(f, ++a->step, tid, a);
    }
    for (int k = 0; k < 4 && a->at < a->len; k++, a->at += 64)
        for (int i = 0; i < a->n; i++) {
            (void)*(const volatile uint8_t *)(a->p[i] + a->at);
            a->spent += 64;
        }
    if (a->spent >= AHEAD_BYTES) {
        a->at = a->len = 0;
        a->stopped = true;
    }
    return true;
}
