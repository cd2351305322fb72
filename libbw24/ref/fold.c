/* The FOLD ops of backend "ref": a sequence's rows one after the other from one version of its state to the next, the log on the way, and the
 * replay of a log. Owns the layout of a log's rows; the mathematics stands in recur.c. */
#include "fold.h"

#include <string.h>

#include "recur.h"

static float *log_row(const bw_state *s, float *log, int row) { return log + s->log_offset + (int64_t)row * s->log_width; }

/* ---- CONV: a log row is x */
static void conv_state(float *to, const float *from, const bw_state *s, int64_t n, const float *x) {
    memmove(to, from + n, (size_t)(s->floats - n) * sizeof *to);
    memcpy(to + s->floats - n, x, (size_t)n * sizeof *to);
}

static void conv_row(const bw_op *op, const bw_state *s, int64_t n, const float *from, const float *x, float *y) {
    int taps = (int)op->w[0]->ne[0];
    const float *rows[BW_CONV_TAPS];
    for (int t = 0; t < taps - 1; t++) rows[t] = from + s->offset + t * n;
    rows[taps - 1] = x;
    ref_conv(rows, op->w[0]->dense, taps, y, n);
}

/* ---- DELTA: a log row is k, v, decay, beta */
typedef struct dims { int heads, kheads, dk, dv; } dims;
static dims dims_of(const bw_list *l, const bw_op *op) {
    int h = op->i[0], k = op->i[1];
    return (dims){h, k, (int)l->bufs[op->buf[2]].width / k, (int)l->bufs[op->buf[3]].width / h};
}

static void delta_row(const bw_op *op, dims d, const float *from, float *to, const float *q, const float *k, const float *v, const float *decay,
                      const float *beta, float *y) {
    for (int h = 0; h < d.heads; h++) {
        int kh = bw_delta_key(op, h);
        int64_t at = (int64_t)h * d.dk * d.dv;
        ref_delta(from + at, to + at, d.dk, d.dv, k + kh * d.dk, q ? q + kh * d.dk : NULL, v + h * d.dv, decay[h], beta[h], y ? y + h * d.dv : NULL);
    }
}

static bool finite_row(const float *x, int64_t n) {
    bool ok = true;
    for (int64_t i = 0; i < n; i++) ok &= x[i] - x[i] == 0;
    return ok;
}

static void log_delta(const bw_list *l, const bw_op *op, float *out, const fold_rows *r, int64_t row) {
    for (int b = 2; b < BW_OP_BUFS; b++) {
        int64_t n = l->bufs[op->buf[b]].width;
        memcpy(out, r->row(r->arg, op->buf[b], row), (size_t)n * sizeof *out);
        out += n;
    }
}

/* ---- one sequence's rows */
int ref_fold(const bw_list *l, const bw_op *op, const bw_seq_rows *s, const int32_t *order, const fold_rows *r) {
    const bw_state *st = &l->states[op->state];
    const float *from = s->live->data;
    int64_t n = l->bufs[op->buf[0]].width;
    for (int i = 0; i < s->n; i++) {
        int64_t row = order[s->first + i];
        int logged = i - (s->n - s->n_log);
        float *to = logged < 0 ? s->mid->data : s->out->data, *y = r->row(r->arg, op->buf[0], row);
        if (op->code == BW_OP_CONV) {
            const float *x = r->row(r->arg, op->buf[1], row);
            conv_row(op, st, n, from, x, y);
            conv_state(to + st->offset, from + st->offset, st, n, x);
            if (logged >= 0) memcpy(log_row(st, s->log->data, logged), x, (size_t)n * sizeof *x);
        } else {
            const float *in[BW_OP_BUFS];
            for (int b = 1; b < BW_OP_BUFS; b++) in[b] = r->row(r->arg, op->buf[b], row);
            delta_row(op, dims_of(l, op), from + st->offset, to + st->offset, in[1], in[2], in[3], in[4], in[5], y);
            if (logged >= 0) log_delta(l, op, log_row(st, s->log->data, logged), r, row);
            if (!finite_row(y, n)) return BW24_E_NUMERIC;
        }
        from = to;
    }
    return 0;
}

int ref_replay(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to) {
    (void)m;
    for (int k = 0; k < l->n_states; k++) {
        const bw_state *s = &l->states[k];
        if (s->op < 0) continue;
        const bw_op *op = &l->ops[s->op];
        const float *at = from + s->offset;
        for (int i = 0; i < n; i++, at = to + s->offset) {
            const float *row = log_row(s, (float *)log, i);
            if (op->code == BW_OP_CONV) { conv_state(to + s->offset, at, s, s->log_width, row); continue; }
            dims d = dims_of(l, op);
            const float *v = row + d.kheads * d.dk, *decay = v + d.heads * d.dv;
            delta_row(op, d, at, to + s->offset, NULL, row, v, decay, decay + d.heads, NULL);
        }
    }
    return 0;
}
