/* Going back on the CPU: the FOLD state after some rows of a log, as ref_replay gives it, with vector kernels and all threads. Owns the
 * cutting of the work; the results do not depend on it. */
#include <string.h>

#include "state.h"
#include "recur.h"

typedef struct replay {
    bw_list *l;
    const float *from, *log;
    float *to;
    int n;
    enum cpu_isa isa;
} replay;

static const float *log_row(const replay *r, const bw_state *s, int i) { return r->log + s->log_offset + i * s->log_width; }

/* the last rows before row n, from the log or from the state before it */
static void conv_back(const replay *r, const bw_state *s) {
    int64_t n = s->log_width, rows = s->floats / n;
    for (int64_t t = 0; t < rows; t++) {
        int64_t at = r->n - rows + t;
        const float *x = at >= 0 ? log_row(r, s, (int)at) : r->from + s->offset + s->floats + at * n;
        memcpy(r->to + s->offset + t * n, x, (size_t)n * sizeof *r->to);
    }
}

/* one block of columns of a value head */
static void delta_back(const replay *r, const bw_state *s, const bw_op *op, int head, int block) {
    int heads = op->i[0], dk = (int)r->l->bufs[op->buf[2]].width / op->i[1], dv = (int)r->l->bufs[op->buf[3]].width / heads;
    int64_t at = (int64_t)s->offset + (int64_t)head * dk * dv + (int64_t)block * BW_DELTA_COLS * dk;
    const float *from = r->from + at;
    for (int i = 0; i < r->n; i++, from = r->to + at) {
        const float *k = log_row(r, s, i), *v = k + op->i[1] * dk, *decay = v + heads * dv, *beta = decay + heads;
        const float *key = k + bw_delta_key(op, head) * dk, *value = v + head * dv + block * BW_DELTA_COLS;
        cpu_delta(r->isa, from, r->to + at, false, dk, bw_delta_cols(dv, block), key, NULL, value, decay[head], beta[head], NULL);
    }
}

/* every thread takes each n-th item: the items of one state are alike */
static void share(void *arg, int tid, int n) {
    const replay *r = arg;
    for (int k = 0, item = 0; k < r->l->n_states; k++) {
        const bw_state *s = &r->l->states[k];
        if (s->op < 0) continue;
        const bw_op *op = &r->l->ops[s->op];
        if (op->code == BW_OP_CONV) {
            if (item++ % n == tid) conv_back(r, s);
            continue;
        }
        int blocks = bw_delta_blocks((int)r->l->bufs[op->buf[3]].width / op->i[0]);
        for (int i = 0; i < op->i[0] * blocks; i++, item++)
            if (item % n == tid) delta_back(r, s, op, i / blocks, i % blocks);
    }
}

int cpu_replay(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to) {
    const cpu_ctx *c = m->ctx->priv;
    replay r = {l, from, log, to, n, c->isa};
    cpu_pool_run(c->pool, share, &r);
    return 0;
}
