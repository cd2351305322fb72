/* ROUTE and EXPERTS on the CPU. Owns the sorting of (row, slot) pairs by expert, so that an expert's weights are read once for all its rows, and
 * the cutting of its work into phases; the results do not depend on either. Knows no router by name. */
#include <string.h>

#include "../fault.h"
#include "forward.h"
#include "../route.h"

/* ---- ROUTE: ref_route with the scores on vectors */
void route_row(const fwd *f, int index, int64_t i) {
    const bw_op *op = &f->l->ops[index];
    const float *l = row_of(f, op->buf[1], i);
    int n = (int)f->l->bufs[op->buf[1]].width;
    bw_route r = {n, op->i[0], op->i[1], op->i[2], op->i[3], (enum bw_route_kind)op->i[4], (float)op->f[0]};
    float p[BW_ROUTE_MAX], c[BW_ROUTE_MAX] = {0}, strand[32] = {0}, top = l[0];
    bool finite = true;
    for (int k = 0; k < n; k++) {
        finite &= l[k] - l[k] == 0;
        top = l[k] > top ? l[k] : top;
    }
    if (!finite) {
        fault_at(f, index);
        memset(row_of(f, op->buf[0], i), 0, 2 * (size_t)r.top * sizeof(float)); /* ids that exist: the walk goes on */
        return;
    }
    if (r.kind == BW_ROUTE_SIGMOID) cpu_map(f->isa, CPU_FN_SIGMOID, l, p, n);
    else {
        for (int k = 0; k < n; k++) c[k] = l[k] - top;
        cpu_map(f->isa, CPU_FN_EXP, c, p, n);
        for (int k = 0; k < n; k++) strand[k % 32] = strand[k % 32] + p[k];
        for (int o = 16; o >= 1; o /= 2)
            for (int k = 0; k < o; k++) strand[k] = strand[k] + strand[k + o];
        for (int k = 0; k < n; k++) p[k] = p[k] / strand[0];
    }
    const float *bias = op->w[0] ? op->w[0]->dense : NULL;
    for (int k = 0; k < n; k++) c[k] = bias && BW_SEEDED(20, 0, 1) ? p[k] + bias[k] : p[k];
    bw_route_select(&r, BW_SEEDED(23, c, p), c, row_of(f, op->buf[0], i));
}

/* ---- EXPERTS */
typedef struct moe_arg {
    int index;
    const bw_op *op;
    cpu_step *cs;
    const bw_rowset *set;
    int top;
    int64_t pairs;
    int from, to;       /* of the active experts, those that the phase in hand is about: all, or a wave */
    cpu_act in_q, in_f, mid_q, mid_f;
} moe_arg;

static int expert_of(const fwd *f, const moe_arg *a, int64_t pair) {
    return (int)row_of(f, a->op->buf[2], pair / a->top)[a->top + pair % a->top];
}

static void sort_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    cpu_moe *s = &f->s->moe;
    int n = a->op->experts, at = 0;
    (void)tid;
    if (to <= from) return;
    const uint8_t *set = a->cs->spill < 0 ? NULL : bw_spill_in_set(f->m->spill, a->cs->spill);
    const uint8_t *lifts = a->cs->lifts;
    memset(s->count, 0, (size_t)n * sizeof *s->count);
    for (int64_t p = 0; p < a->pairs; p++) s->count[expert_of(f, a, p)]++;
    int active = 0;
    for (int pass = 0; pass < 3; pass++) { /* own experts, lifted ones, those of the set */
        for (int e = 0; e < n; e++) {
            if ((lifts && lifts[e] ? 1 : set && set[e] ? 2 : a->cs->lift && s->count[e] >= a->cs->lift) != pass) continue;
            if (s->count[e]) s->active[active++] = e;
            s->start[e] = at;
            at += s->count[e];
        }
        if (pass == 0) {
            a->cs->n_own = active;
            a->cs->own_pairs = at;
        }
        if (pass == 1) a->cs->n_lift = active - a->cs->n_own;
    }
    a->cs->n_active = active;
    for (int64_t p = 0; p < a->pairs; p++) {
        int place = s->start[expert_of(f, a, p)]++;
        s->place[p] = place;
        s->pair[place] = (int)p;
    }
    for (int e = 0; e < n; e++) s->start[e] -= s->count[e];
}

static void fill(const fwd *f, const moe_arg *a, cpu_act *act, int64_t place, const float *x) {
    /* row `place` of x[][act->cols] */
    if (act->mem && cpu_act_fill(f->isa, act, x - place * act->cols, act->cols, (int)place, (int)place + 1)) fault_at(f, a->index);
}

/* inputs in the order of the places; a single row serves all its pairs */
static void input_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    moe_arg *a = arg;
    (void)tid;
    for (int64_t i = from; i < to; i++) {
        const float *x = row_of(f, a->op->buf[1], a->set->n == 1 ? 0 : f->s->moe.pair[i] / a->top);
        fill(f, a, &a->in_q, i, x);
        fill(f, a, &a->in_f, i, x);
    }
}

static void middle_of(const fwd *f, const moe_arg *a, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        const float *h = f->s->moe.h + i * a->mid_q.cols;
        fill(f, a, (cpu_act *)&a->mid_q, i, h);
        fill(f, a, (cpu_act *)&a->mid_f, i, h);
    }
}
static void middle_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    (void)tid;
    middle_of(f, arg, from, to);
}

static const cpu_act *form(const cpu_mat *m, const cpu_act *q, const cpu_act *fl) { return m->type->form == BW_FLOAT ? fl : q; }

/* act(gate x) * up x of one expert's places, tiles [t0, t1). Gate and up read the same form of x, or up meets the gate's values afterwards. */
static void gate_up(const fwd *f, const moe_arg *a, int e, int64_t t0, int64_t t1, void *work) {
    const cpu_moe *s = &f->s->moe;
    const cpu_mat *m = a->cs->mats + 3 * e;
    int r0 = s->start[e], r1 = r0 + s->count[e];
    int64_t ff = m[BW_EXP_UP].rows;
    const cpu_act *in = form(&m[BW_EXP_UP], &a->in_q, &a->in_f);
    cpu_epi epi = {CPU_GLU, NULL, 0, &m[BW_EXP_GATE], a->op->i[0] == BW_ACT_SILU ? CPU_SILU : CPU_GELU};
    if (a->set->n > 1) {
        cpu_linear(f->isa, &m[BW_EXP_UP], in, r0, r1, s->h, ff, t0, t1, &epi, work);
        return;
    }
    for (int r = r0; r < r1; r++) cpu_linear(f->isa, &m[BW_EXP_UP], in, 0, 1, s->h + r * ff, ff, t0, t1, &epi, work);
}

static void down(const fwd *f, const moe_arg *a, int e, int64_t t0, int64_t t1, void *work) {
    const cpu_moe *s = &f->s->moe;
    const cpu_mat *m = &a->cs->mats[3 * e + BW_EXP_DOWN];
    cpu_linear(f->isa, m, form(m, &a->mid_q, &a->mid_f), s->start[e], s->start[e] + s->count[e], s->d, m->rows, t0, t1, NULL, work);
}

/* items: (active expert, tile), expert by expert */
static void tiles_over(const fwd *f, const moe_arg *a, int tid, int64_t from, int64_t to, int64_t tiles,
                       void (*fn)(const fwd *, const moe_arg *, int, int64_t, int64_t, void *)) {
    for (int64_t i = from, end; i < to; i = end) {
        int64_t k = i / tiles, t0 = i % tiles;
        end = (k + 1) * tiles < to ? (k + 1) * tiles : to;
        fn(f, a, f->s->moe.active[a->from + k], t0, t0 + (end - i), f->s->threads[tid].work);
    }
}
static void gate_up_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    tiles_over(f, a, tid, from, to, cpu_tiles(a->cs->mats[BW_EXP_UP].rows), gate_up);
}
static void down_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    tiles_over(f, a, tid, from, to, cpu_tiles(a->cs->mats[BW_EXP_DOWN].rows), down);
}

/* y = fma(w_s, d_s, y), slots ascending; an item is 64 columns of a row */
enum { SUM_COLS = 64 };
static int64_t sum_blocks(const fwd *f, const bw_op *op) { return (f->l->bufs[op->buf[0]].width + SUM_COLS - 1) / SUM_COLS; }
static void sum_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    int64_t n = f->l->bufs[a->op->buf[0]].width, blocks = sum_blocks(f, a->op);
    (void)tid;
    for (int64_t item = from; item < to; item++) {
        int64_t i = item / blocks, c0 = item % blocks * SUM_COLS, c1 = c0 + SUM_COLS < n ? c0 + SUM_COLS : n;
        const float *route = row_of(f, a->op->buf[2], i);
        float *y = row_of(f, a->op->buf[0], i);
        memset(y + c0, 0, (size_t)(c1 - c0) * sizeof *y);
        for (int s = 0; s < a->top; s++) {
            const float *d = f->s->moe.d + f->s->moe.place[i * a->top + s] * n;
            for (int64_t c = c0; c < c1; c++) y[c] = BW_SEEDED(19, route[s] * d[c] + y[c], fmaf(route[s], d[c], y[c]));
        }
    }
}

static int64_t pairs_of(const cpu_moe *s, int from, int to) {
    int64_t n = 0;
    for (int k = from; k < to; k++) n += s->count[s->active[k]];
    return n;
}

/* ---- spilled experts: sort as ever; then experts of the set and in RAM, while reads of the others are under way; then those, two at a time as they
 * land. A row's own sum stays in the order of its slots, so the order of arrival shows nowhere. */
static void begin_own(const fwd *f, const moe_arg *a) {
    cpu_step *cs = a->cs;
    cpu_moe *s = &f->s->moe;
    int w = 0;
    const int own = cs->n_own, there = own + cs->n_lift;
    bw_spill_begin(f->m->spill, cs->spill, s->active, own, a->set->n, s->count, s->active, &cs->hits);
    if (cs->lifts) bw_spill_held_uses(f->m->spill, cs->spill, s->active + own, cs->n_lift, s->count);
    bw_spill_set_uses(f->m->spill, cs->spill, s->active + there, cs->n_active - there, s->count);
    if (own < cs->n_active && !cs->away) cs->waves[w++] = (cpu_wave){own, cs->n_active, pairs_of(s, own, cs->n_active), true};
    for (int at = 0, end; at < own; at = end, w++) {
        bool landed = at == 0 && cs->hits;
        end = landed ? cs->hits : at + BW_SPILL_WAVE < own ? at + BW_SPILL_WAVE : own;
        cs->waves[w] = (cpu_wave){at, end, pairs_of(s, at, end), landed};
    }
    cs->n_waves = w;
    s->wave_begun = 0;
}
static void plan_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    if (to <= from) return;
    sort_range(f, arg, tid, from, to);
    begin_own(f, arg);
}

/* between waves: the last one's experts are let go, clocks are read */
static void between_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    cpu_moe *s = &f->s->moe;
    int64_t now = bw_spill_clock(), landed = atomic_load(&s->unpacked);
    (void)tid;
    if (to <= from) return;
    if (s->wave_begun) bw_spill_time(f->m->spill, landed - s->wave_begun, now - landed);
    if (a->from == a->to) bw_spill_end(f->m->spill);
    else if (a->from < a->cs->n_own) bw_spill_next(f->m->spill, a->from, a->to);
    s->wave_begun = now;
    atomic_store(&s->unpacked, now);
}

/* items: the wave's matrices, in the order in which they are read */
static void unpack_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    for (int64_t i = from; i < to; i++) {
        int e = f->s->moe.active[a->from + i / 3], m = (int)(i % 3);
        uint8_t *base, *raw;
        cpu_mat *mat = &a->cs->mats[3 * e + m];
        bool ok = bw_spill_wait(f->m->spill, a->cs->spill, e, m, &base, &raw);
        bool pack = cpu_spill_room(f->m, mat->type, mat->rows, mat->cols) > 0;
        if (ok) cpu_unpack_spilled(mat, pack, base, raw, f->s->threads[tid].tile);
        else {
            mat->data = pack ? base : NULL;
            mat->raw = pack ? NULL : raw;
        }
        long long now = bw_spill_clock(), last = atomic_load(&f->s->moe.unpacked);
        while (last < now && !atomic_compare_exchange_weak(&f->s->moe.unpacked, &last, now)) {}
    }
}

/* items: the places of the wave's pairs */
static void wave_middle_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const moe_arg *a = arg;
    const cpu_moe *s = &f->s->moe;
    int64_t base = 0;
    (void)tid;
    for (int k = a->from; k < a->to && base < to; k++) {
        int64_t first = s->start[s->active[k]], n = s->count[s->active[k]];
        int64_t lo = from > base ? from - base : 0, hi = to - base < n ? to - base : n;
        if (lo < hi) middle_of(f, a, first + lo, first + hi);
        base += n;
    }
}

static void spilled_waves(const fwd *f, cpu_phase *p, moe_arg *a, int tid) {
    int64_t up = cpu_tiles(a->cs->mats[BW_EXP_UP].rows), down = cpu_tiles(a->cs->mats[BW_EXP_DOWN].rows);
    for (int w = 0; w < a->cs->n_waves; w++, p += CPU_WAVE_PHASES) {
        a->from = a->cs->waves[w].from;
        a->to = a->cs->waves[w].to;
        run_phase(f, &p[0], 1, between_range, a, tid);
        run_phase(f, &p[1], a->cs->waves[w].landed ? 0 : 3 * (a->to - a->from), unpack_range, a, tid);
        run_phase(f, &p[2], (a->to - a->from) * up, gate_up_range, a, tid);
        run_phase(f, &p[3], a->cs->waves[w].pairs, wave_middle_range, a, tid);
        run_phase(f, &p[4], (a->to - a->from) * down, down_range, a, tid);
    }
    a->from = a->to = 0;
}

static moe_arg arg_for(const fwd *f, int step, int index, const bw_rowset *set) {
    const bw_op *op = &f->l->ops[index];
    cpu_moe *s = &f->s->moe;
    moe_arg a = {.index = index, .op = op, .cs = &f->s->steps[step], .set = set, .top = (int)f->l->bufs[op->buf[2]].width / 2};
    a.pairs = (int64_t)set->n * a.top;
    int inputs = set->n == 1 ? 1 : (int)a.pairs;
    cpu_act_init(&a.in_q, a.cs->quant ? s->in_q : NULL, inputs, a.cs->mats[BW_EXP_UP].cols, 0);
    cpu_act_init(&a.in_f, a.cs->floats ? s->in_f : NULL, inputs, a.cs->mats[BW_EXP_UP].cols, 1);
    cpu_act_init(&a.mid_q, a.cs->quant ? s->mid_q : NULL, (int)a.pairs, a.cs->mats[BW_EXP_DOWN].cols, 0);
    cpu_act_init(&a.mid_f, a.cs->floats ? s->mid_f : NULL, (int)a.pairs, a.cs->mats[BW_EXP_DOWN].cols, 1);
    return a;
}

void plan_experts(const fwd *f, int step, int index, const bw_rowset *set) {
    moe_arg a = arg_for(f, step, index, set);
    sort_range(f, &a, 0, 0, 1);
}

void begin_experts(const fwd *f, int step, int index, const bw_rowset *set) {
    moe_arg a = arg_for(f, step, index, set);
    begin_own(f, &a);
}

void own_experts(const fwd *f, cpu_phase *p, int step, int index, const bw_rowset *set, int tid) {
    moe_arg a = arg_for(f, step, index, set);
    run_phase(f, &p[1], set->n == 1 ? 1 : a.cs->own_pairs, input_range, &a, tid);
    spilled_waves(f, p + 4, &a, tid);
    run_phase(f, &p[2], 1, between_range, &a, tid);
}

void step_experts(const fwd *f, cpu_phase *p, int step, int index, const bw_rowset *set, int tid) {
    moe_arg a = arg_for(f, step, index, set);
    const bw_op *op = a.op;
    int64_t inputs = set->n == 1 ? 1 : a.pairs;
    bool spilled = a.cs->spill >= 0;
    run_phase(f, &p[0], 1, spilled ? plan_range : sort_range, &a, tid);
    run_phase(f, &p[1], inputs, input_range, &a, tid);
    if (spilled) {
        spilled_waves(f, p + 4, &a, tid);
        run_phase(f, &p[2], 1, between_range, &a, tid);
        run_phase(f, &p[3], set->n * sum_blocks(f, op), sum_range, &a, tid);
        return;
    }
    run_phase(f, &p[2], a.cs->n_active * cpu_tiles(a.cs->mats[BW_EXP_UP].rows), gate_up_range, &a, tid);
    run_phase(f, &p[3], a.pairs, middle_range, &a, tid);
    run_phase(f, &p[4], a.cs->n_active * cpu_tiles(a.cs->mats[BW_EXP_DOWN].rows), down_range, &a, tid);
    run_phase(f, &p[5], set->n * sum_blocks(f, op), sum_range, &a, tid);
}
