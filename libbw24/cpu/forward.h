/* What the files of the walk over a plan share: the pass in hand, phases of claimed items, faults. Private to cpu/forward*.c. */
#ifndef BW24_CPU_FORWARD_H
#define BW24_CPU_FORWARD_H

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
    bool late; /* thread 0 comes when it can: no range is its own */
} fwd;

static inline float *row_of(const fwd *f, int buf, int64_t i) {
    float *base = buf == f->l->logits ? f->logits : f->l->mem[buf];
    return base + i * f->l->bufs[buf].width;
}

static inline void fault_at(const fwd *f, int op) {
    int none = 0;
    atomic_compare_exchange_strong(&f->s->fault, &none, op + 1);
}

/* items [from, to) of a phase; tid names the thread's scratch */
typedef void (*range_fn)(const fwd *f, void *arg, int tid, int64_t from, int64_t to);
/* fn over items [0, n), shared out among the threads; returns when all are done, by whichever thread */
void run_phase(const fwd *f, cpu_phase *p, int64_t n, range_fn fn, void *arg, int tid);

/* logits that nobody asked for are not computed */
static inline bool writes_here(const fwd *f, int op) { return f->logits || f->l->ops[op].buf[0] != f->l->logits; }

/* ahead.c; each for the calling thread: the walk begins, a step begins, the next bytes while it waits */
void ahead_begin(const fwd *f, int tid);
void ahead_step(const fwd *f, int tid, int step);
bool ahead_fetch(const fwd *f, int tid);
/* forward_moe.c */
void route_row(const fwd *f, int index, int64_t i);
void step_experts(const fwd *f, cpu_phase *p, int step, int index, const bw_rowset *set, int tid);
/* the same in two parts where another device computes the experts of the set and those that are lifted: the pairs' order, by one thread; then d of the others'
 * pairs, places [0, own_pairs): begin, then work by all */
void plan_experts(const fwd *f, int step, int index, const bw_rowset *set);
void begin_experts(const fwd *f, int step, int index, const bw_rowset *set);
void own_experts(const fwd *f, cpu_phase *p, int step, int index, const bw_rowset *set, int tid);
/* forward_perhead.c */
void step_perhead(const fwd *f, cpu_phase *p, int step, int index, const bw_rowset *set, int tid);
/* forward_fold.c */
void step_fold(const fwd *f, cpu_phase *p, int step, int index, int tid);

#endif
