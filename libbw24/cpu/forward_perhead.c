/* PERHEAD on the CPU. Owns the cutting of its work: activations by (head, row), products by (head, tile). Knows one matrix a head and no model. */
#include "forward.h"

typedef struct head_arg {
    int index;
    const bw_op *op;
    const cpu_mat *mats;
    const bw_rowset *set;
} head_arg;

/* the activations of head h for all rows of the set */
static cpu_act act_of(const fwd *f, const head_arg *a, int64_t h) {
    cpu_act act;
    const cpu_mat *m = &a->mats[h];
    cpu_act_init(&act, f->s->head_acts + (size_t)h * cpu_head_bytes(f->m, a->op), a->set->n, m->cols, m->type->form == BW_FLOAT);
    return act;
}

static void fill_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const head_arg *a = arg;
    int64_t width = f->l->bufs[a->op->buf[1]].width, stride = width / a->op->i[0], rows = a->set->n;
    (void)tid;
    for (int64_t i = from, end; i < to; i = end) {
        int64_t h = i / rows, r = i % rows;
        end = (h + 1) * rows < to ? (h + 1) * rows : to;
        cpu_act act = act_of(f, a, h);
        const float *x = row_of(f, a->op->buf[1], 0) + h * stride + a->op->i[1];
        if (cpu_act_fill(f->isa, &act, x, width, (int)r, (int)(r + end - i))) fault_at(f, a->index);
    }
}

static void product_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const head_arg *a = arg;
    int64_t width = f->l->bufs[a->op->buf[0]].width, tiles = cpu_tiles(a->mats[0].rows);
    for (int64_t i = from, end; i < to; i = end) {
        int64_t h = i / tiles, t = i % tiles;
        end = (h + 1) * tiles < to ? (h + 1) * tiles : to;
        cpu_act act = act_of(f, a, h);
        float *y = row_of(f, a->op->buf[0], 0) + h * a->mats[h].rows;
        cpu_linear(f->isa, &a->mats[h], &act, 0, a->set->n, y, width, t, t + end - i, NULL, f->s->threads[tid].work);
    }
}

void step_perhead(const fwd *f, cpu_phase *p, int step, int index, const bw_rowset *set, int tid) {
    head_arg a = {index, &f->l->ops[index], f->s->steps[step].mats, set};
    run_phase(f, &p[0], (int64_t)a.op->i[0] * set->n, fill_range, &a, tid);
    run_phase(f, &p[1], a.op->i[0] * cpu_tiles(a.mats[0].rows), product_range, &a, tid);
}
