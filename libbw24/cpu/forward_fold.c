/* CONV and DELTA on the CPU: the rows of each sequence from one version of its state to the next, and its log. Owns the cutting of this work;
 * the results do not depend on it. Knows no way back (replay.c). */
#include <string.h>

#include "../fault.h"
#include "forward.h"
#include "recur.h"

typedef struct fold_arg {
    int index;
    const bw_op *op;
    const bw_state *st;
    const float *w; /* CONV: [taps][n] */
    int64_t n;      /* width of the output */
} fold_arg;

static int32_t row_at(const fwd *f, const bw_seq_rows *s, int i) { return f->b->order[s->first + i]; }
static float *log_row(const fold_arg *a, const bw_seq_rows *s, int i) { return s->log->data + a->st->log_offset + i * a->st->log_width; }

/* ---- CONV: items are blocks of channels of a row; that of a sequence's last row also writes the block's state and log */
static int64_t conv_blocks(const fold_arg *a) { return (a->n + CPU_CONV_COLS - 1) / CPU_CONV_COLS; }

/* row i - back of the sequence, from this step or from the state before it */
static const float *conv_row(const fwd *f, const fold_arg *a, const bw_seq_rows *s, int i, int back) {
    if (i >= back) return row_of(f, a->op->buf[1], row_at(f, s, i - back));
    return s->live->data + a->st->offset + a->st->floats + (i - back) * a->n;
}

/* channels [c0, c1) of the last rows before row `end` of the sequence */
static void conv_state(const fwd *f, const fold_arg *a, const bw_seq_rows *s, int end, float *to, int64_t c0, int64_t c1) {
    int rows = (int)(a->st->floats / a->n);
    for (int t = 0; t < rows; t++)
        memcpy(to + a->st->offset + t * a->n + c0, conv_row(f, a, s, end, rows - t) + c0, (size_t)(c1 - c0) * sizeof *to);
}

static void conv_keep(const fwd *f, const fold_arg *a, const bw_seq_rows *s, int64_t c0, int64_t c1) {
    if (s->mid) conv_state(f, a, s, s->n - s->n_log, s->mid->data, c0, c1);
    conv_state(f, a, s, BW_SEEDED(21, s->n - 1, s->n), s->out->data, c0, c1);
    for (int i = 0; i < s->n_log; i++)
        memcpy(log_row(a, s, i) + c0, row_of(f, a->op->buf[1], row_at(f, s, s->n - s->n_log + i)) + c0, (size_t)(c1 - c0) * sizeof(float));
}

static void conv_part(const fwd *f, const fold_arg *a, int64_t flat, int64_t block) {
    const bw_seq_rows *s = f->b->seqs;
    while (flat >= s->first + s->n) s++;
    int i = (int)flat - s->first, taps = (int)a->op->w[0]->ne[0];
    int64_t c0 = block * CPU_CONV_COLS, c1 = c0 + CPU_CONV_COLS < a->n ? c0 + CPU_CONV_COLS : a->n;
    const float *x[BW_CONV_TAPS];
    for (int t = 0; t < taps; t++) x[t] = conv_row(f, a, s, i, taps - 1 - t);
    cpu_conv(f->isa, x, a->w, taps, row_of(f, a->op->buf[0], row_at(f, s, i)), a->n, c0, c1);
    if (i == s->n - 1) conv_keep(f, a, s, c0, c1);
}

static void conv_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const fold_arg *a = arg;
    int64_t blocks = conv_blocks(a);
    (void)tid;
    for (int64_t i = from; i < to; i++) conv_part(f, a, i / blocks, i % blocks);
}

/* ---- DELTA: items are blocks of columns of a head of a sequence, then the log of each sequence. The states between the step's rows stay in
 * `between`, small enough for the first-level cache; the last one goes past the caches, because whatever reads it comes after all the weights. */
static void delta_block(const fwd *f, const fold_arg *a, const bw_seq_rows *s, int head, int block, float *between) {
    const bw_op *op = a->op;
    int dk = (int)f->l->bufs[op->buf[2]].width / op->i[1], dv = (int)a->n / op->i[0];
    int cols = bw_delta_cols(dv, block), key = bw_delta_key(op, head) * dk, col = head * dv + block * BW_DELTA_COLS;
    int64_t at = (int64_t)a->st->offset + (int64_t)head * dk * dv + (int64_t)block * BW_DELTA_COLS * dk;
    const float *from = s->live->data + at;
    bool finite = true;
    for (int i = 0; i < s->n; i++) {
        int64_t r = row_at(f, s, i);
        bool last = i == s->n - 1, kept = last || i == s->n - s->n_log - 1;
        float *to = kept ? (last ? s->out : s->mid)->data + at : between, *y = row_of(f, op->buf[0], r) + col;
        cpu_delta(f->isa, from, to, last, dk, cols, row_of(f, op->buf[2], r) + key, row_of(f, op->buf[1], r) + key, row_of(f, op->buf[3], r) + col,
                  row_of(f, op->buf[4], r)[head], row_of(f, op->buf[5], r)[head], y);
        for (int c = 0; c < cols; c++) finite &= y[c] - y[c] == 0;
        from = to;
    }
    if (!finite) fault_at(f, a->index);
}

static void delta_log(const fwd *f, const fold_arg *a, const bw_seq_rows *s) {
    for (int i = BW_SEEDED(22, 1, 0); i < s->n_log; i++) {
        float *out = log_row(a, s, i);
        for (int b = 2; b < BW_OP_BUFS; b++) {
            int64_t n = f->l->bufs[a->op->buf[b]].width;
            memcpy(out, row_of(f, a->op->buf[b], row_at(f, s, s->n - s->n_log + i)), (size_t)n * sizeof *out);
            out += n;
        }
    }
}

static int64_t delta_items(const fold_arg *a) { return (int64_t)a->op->i[0] * bw_delta_blocks((int)a->n / a->op->i[0]); }
static void delta_range(const fwd *f, void *arg, int tid, int64_t from, int64_t to) {
    const fold_arg *a = arg;
    int64_t each = delta_items(a), parts = f->b->n_seqs * each, blocks = each / a->op->i[0];
    for (int64_t i = from; i < to; i++) {
        if (i < parts) delta_block(f, a, &f->b->seqs[i / each], (int)(i % each / blocks), (int)(i % blocks), f->s->threads[tid].state);
        else delta_log(f, a, &f->b->seqs[i - parts]);
    }
    cpu_far_done();
}

void step_fold(const fwd *f, cpu_phase *p, int step, int index, int tid) {
    const bw_op *op = &f->l->ops[index];
    fold_arg a = {index, op, &f->l->states[op->state], f->s->steps[step].conv, f->l->bufs[op->buf[0]].width};
    if (op->code == BW_OP_CONV) run_phase(f, p, f->b->n * conv_blocks(&a), conv_range, &a, tid);
    else run_phase(f, p, f->b->n_seqs * delta_items(&a) + f->b->n_seqs, delta_range, &a, tid);
}
