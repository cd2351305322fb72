/* Steps: from the caller's rows to a batch, one forward pass, and the new positions. Owns row grouping and the all-or-nothing rule;
 * knows no op. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fault.h"
#include "internal.h"

/* tokens 0 .. n-1 have a row in every embedding of the list. Kept: walking the ops would cost each step a cache miss an op */
static int64_t known_tokens(bw_list *l) {
    if (l->known) return l->known;
    l->known = INT32_MAX;
    for (int i = 0; i < l->n_ops; i++)
        if (l->ops[i].code == BW_OP_EMBED && l->ops[i].w[0]->ne[1] < l->known) l->known = l->ops[i].w[0]->ne[1];
    return l->known;
}

static int check_rows(bw24_model *m, const bw24_row *rows, int32_t n, bool hidden, bool out) {
    if (!m || !rows || !m->prepared) return bw_fail(BW24_E_ARG, "bw24_step: NULL argument or a model that is not prepared");
    if (n < 1 || n > m->max_rows) return bw_fail(BW24_E_ARG, "bw24_step: %d rows, the model was made for 1..%d", n, m->max_rows);
    const bw_list *l = rows[0].seq ? rows[0].seq->list : NULL;
    const int64_t known = l ? known_tokens(rows[0].seq->list) : 0;
    for (int i = 0; i < n; i++) {
        if (!rows[i].seq || rows[i].seq->model != m) return bw_fail(BW24_E_ARG, "bw24_step: row %d has no sequence of this model", i);
        if (rows[i].seq->list != l)
            return bw_fail(BW24_E_ARG, "bw24_step: row %d is of list %s, row 0 of list %s", i, rows[i].seq->list->role, l->role);
        if (rows[i].token < 0 || rows[i].token >= known) return bw_fail(BW24_E_ARG, "bw24_step: row %d: token %d is outside 0..%lld", i, rows[i].token, (long long)known - 1);
        if (l->borrows && !(rows[i].seq->source && rows[i].seq->source->pos > 0))
            return bw_fail(BW24_E_ARG, "bw24_step: row %d: list %s reads the keys of another sequence, which has none", i, l->role);
        if (rows[i].want && !out) return bw_fail(BW24_E_ARG, "bw24_step: row %d wants logits, but there is no room for them", i);
    }
    if (l->takes_hidden != hidden)
        return bw_fail(BW24_E_ARG, "bw24_step: list %s %s hidden rows, the caller gave %s", l->role, l->takes_hidden ? "takes" : "takes no",
                       hidden ? "some" : "none");
    return 0;
}

/* positions: a sequence's rows append in the order given, even when other rows stand between them */
static void set_positions(const bw24_row *rows, int n, int64_t *pos) {
    for (int i = 0; i < n; i++) {
        if (rows[i].seq->source) { pos[i] = rows[i].seq->source->pos; continue; }
        int64_t p = rows[i].seq->pos + BW_SEEDED(14, n > 1 && rows[i].seq->pos > 0, 0);
        for (int j = i - 1; j >= 0; j--)
            if (rows[j].seq == rows[i].seq) { p = pos[j] + 1; break; }
        pos[i] = p;
    }
}

static void set_runs(bw_rowset *s, const bw24_row *rows) {
    s->n_runs = 0;
    for (int i = 0; i < s->n; i++) {
        bw24_seq *seq = rows[s->row[i]].seq;
        if (seq->source) seq = seq->source; /* whose pages the backend is to read */
        if (s->n_runs && s->runs[s->n_runs - 1].seq == seq) s->runs[s->n_runs - 1].n++;
        else s->runs[s->n_runs++] = (bw_run){seq, i, 1};
    }
}

/* rows by sequence, for ops that carry state from row to row */
static void group_rows(const bw24_row *rows, bw_batch *b) {
    b->n_seqs = 0;
    for (int i = 0; i < b->n; i++) {
        int k = b->n_seqs - 1;
        while (k >= 0 && b->seqs[k].seq != rows[i].seq) k--;
        if (k < 0) b->seqs[k = b->n_seqs++] = (bw_seq_rows){.seq = rows[i].seq};
        b->seqs[k].n++;
    }
    for (int k = 0, at = 0; k < b->n_seqs; at += b->seqs[k++].n) {
        b->seqs[k].first = at;
        for (int i = 0, j = at; i < b->n; i++)
            if (rows[i].seq == b->seqs[k].seq) b->order[j++] = i;
    }
}

/* bytes of the arrays of a step of n rows, a multiple of 8 */
static size_t batch_bytes(int n) {
    size_t each = (size_t)n * (sizeof(int64_t) + sizeof(bw_run) + sizeof(int32_t));
    return 2 * each + (size_t)n * (sizeof(bw_seq_rows) + 2 * sizeof(int32_t));
}

static void *step_memory(bw24_model *m, size_t need, int n) {
    if (need <= m->step_mem_bytes) return m->step_mem;
    free(m->step_mem);
    m->step_mem = malloc(need);
    m->step_mem_bytes = m->step_mem ? need : 0;
    if (!m->step_mem) bw_fail(BW24_E_MEMORY, "out of memory for a step of %d rows", n);
    return m->step_mem;
}

/* the step's arrays in one block of batch_bytes: tokens, and per row set (all, want) rows, positions, runs */
static void make_batch(void *mem, const bw24_row *rows, int n, bw_batch *b) {
    int64_t *pos = mem;
    bw_run *runs = (bw_run *)(pos + 2 * n);
    bw_seq_rows *seqs = (bw_seq_rows *)(runs + 2 * n);
    int32_t *row = (int32_t *)(seqs + n), *token = row + 2 * n;
    b->n = n;
    b->token = token;
    b->n_seqs = 0;
    b->hidden = NULL;
    b->hands = false;
    b->seqs = seqs;
    b->order = token + n;
    b->all = (bw_rowset){n, row, pos, 0, runs};
    b->want = (bw_rowset){0, row + n, pos + n, 0, runs + n};
    set_positions(rows, n, pos);
    for (int i = 0; i < n; i++) {
        token[i] = rows[i].token;
        row[i] = i;
        if (!rows[i].want) continue;
        b->want.row[b->want.n] = i;
        b->want.pos[b->want.n++] = pos[i];
    }
    set_runs(&b->all, rows);
    set_runs(&b->want, rows);
    if (rows[0].seq->list->n_states) group_rows(rows, b);
}

static int reserve(bw24_model *m, const bw_batch *b) {
    for (int i = 0; i < b->all.n_runs; i++) {
        const bw_run *r = &b->all.runs[i];
        int64_t end = b->all.pos[r->first + r->n - 1] + 1;
        if (end > m->max_context) return bw_fail(BW24_E_CONTEXT, "the sequence would be %lld tokens long, the context holds %lld", (long long)end, (long long)m->max_context);
        BW_TRY(bw_seq_reserve(r->seq, end - r->seq->pos));
    }
    for (int i = 0; i < b->n_seqs; i++) BW_TRY(bw_seq_fold_begin(&b->seqs[i]));
    return 0;
}

/* index of the largest of finite x[0 .. n), the lowest of equals. Lane by lane, so that vectors serve: a round asks for it once a draft */
static int32_t argmax(const float *x, int64_t n) {
    enum { LANES = 64 };
    float top[LANES];
    int64_t whole = n / LANES * LANES, i;
    for (int k = 0; k < LANES; k++) top[k] = x[0];
    for (i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++) top[k] = x[i + k] > top[k] ? x[i + k] : top[k];
    for (; i < n; i++) top[0] = x[i] > top[0] ? x[i] : top[0];
    for (int k = 1; k < LANES; k++) top[0] = top[k] > top[0] ? top[k] : top[0];
    for (i = 0; i < whole; i += LANES) {
        int hits = 0;
        for (int k = 0; k < LANES; k++) hits |= x[i + k] == top[0];
        if (hits) break;
    }
    while (i < n - 1 && x[i] != top[0]) i++;
    return (int32_t)i;
}

/* likeliest tokens, by the backend or from the logits */
static int forward_greedy(bw24_model *m, bw_list *l, const bw_batch *b, int32_t *tokens) {
    int64_t width = l->bufs[l->logits].width;
    float *logits = NULL;
    int rc = 0;
    if (m->ctx->backend->greedy) rc = m->ctx->backend->greedy(m, l, b, tokens);
    else {
        logits = malloc((size_t)(b->want.n ? b->want.n : 1) * (size_t)width * sizeof *logits);
        if (!logits) return bw_fail(BW24_E_MEMORY, "out of memory for the logits of %d rows", b->want.n);
        rc = m->ctx->backend->forward(m, l, b, logits);
    }
    for (int i = 0; i < b->want.n && !rc; i++) {
        if (logits) tokens[i] = argmax(logits + i * width, width);
        if (l->ids) tokens[i] = l->ids[tokens[i]];
    }
    free(logits);
    return rc;
}

/* drawn tokens, by the backend or from the logits, which stay in `kept` unless that is NULL */
static int forward_draw(bw24_model *m, bw_list *l, const bw_batch *b, const bw24_pick *picks, bw_drawn *out, float *kept) {
    if (m->ctx->backend->draw && !kept) return m->ctx->backend->draw(m, l, b, picks, out);
    float *logits = kept ? kept : malloc((size_t)(b->want.n ? b->want.n : 1) * (size_t)m->vocab * sizeof *logits);
    if (!logits) return bw_fail(BW24_E_MEMORY, "out of memory for the logits of %d rows", b->want.n);
    int rc = m->ctx->backend->forward(m, l, b, logits);
    for (int i = 0; i < b->want.n && !rc; i++)
        rc = bw_draw_row(logits + (int64_t)i * m->vocab, m->vocab, &picks[i], (uint64_t)b->want.pos[i] + 1, &out[i]);
    if (!kept) free(logits);
    return rc;
}

static int copy_hidden(bw24_model *m, bw_list *l, const bw_batch *b, float *out) {
    size_t n = (size_t)b->want.n * (size_t)l->bufs[l->hidden].width;
    if (m->ctx->backend->hidden) BW_TRY(m->ctx->backend->hidden(m, l, b->want.n, out));
    else memcpy(out, l->mem[l->hidden], n * sizeof *out);
    for (size_t i = 0; i < BW_SEEDED(41, n, 0); i += 2) out[i] = 0.0f;
    return 0;
}

/* seeded fault 42: every step takes 0.2 ms of processor time longer */
static void linger(void) {
    clock_t until = clock() + CLOCKS_PER_SEC / 5000;
    while (clock() < until) {}
}

static int forward(bw24_model *m, bw_list *l, const bw_batch *b, const bw_outputs *out) {
    if (out->drawn) return forward_draw(m, l, b, out->picks, out->drawn, out->logits);
    return out->tokens ? forward_greedy(m, l, b, out->tokens) : m->ctx->backend->forward(m, l, b, out->logits);
}

int bw_run_rows(bw24_model *m, const bw24_row *rows, int32_t n, const float *hidden, bw_outputs out) {
    BW_TRY(check_rows(m, rows, n, hidden != NULL, out.logits || out.tokens || out.hidden || out.drawn));
    bw_batch b;
    bw_list *l = rows[0].seq->list;
    void *mem = step_memory(m, batch_bytes(n), n);
    if (!mem) return BW24_E_MEMORY;
    make_batch(mem, rows, n, &b);
    b.hidden = hidden;
    b.hands = out.hidden != NULL;
    atomic_store(&m->ctx->cancel, 0);
    bw_fpenv e = bw_fpenv_enter();
    int rc = l->borrows ? 0 : reserve(m, &b);
    if (!rc) rc = forward(m, l, &b, &out);
    if (!rc && out.hidden) rc = copy_hidden(m, l, &b, out.hidden);
    if (BW_SEEDED(42, true, false)) linger();
    bw_fpenv_leave(e);
    for (int i = 0; i < b.n_seqs; i++) bw_seq_fold_end(&b.seqs[i], !rc);
    if (l->borrows) return rc; /* nothing was appended */
    for (int i = 0; i < b.all.n_runs; i++) {
        bw24_seq *s = b.all.runs[i].seq;
        if (rc) bw24_seq_truncate(s, s->pos, NULL);
    }
    for (int i = 0; i < b.n && !rc; i++) rows[i].seq->pos++;
    for (int i = 0; i < b.all.n_runs && !rc; i++) bw_seq_trim_windows(b.all.runs[i].seq);
    return rc;
}

static void advance(const bw_round_step *t, int by) {
    for (int i = 0; i < t->n; i++)
        if (!t->rows[i].seq->source) t->rows[i].seq->pos += by;
}

/* batches of the steps, each from where the one before leaves its sequences. *begun: steps whose rows were made, *moved: those whose sequences moved */
static int begin_round(bw24_model *m, bw_round *r, uint8_t *mem, int *begun, int *moved) {
    for (int s = 0; s < r->n_steps; s++) {
        bw_round_step *t = &r->steps[s];
        BW_TRY(check_rows(m, t->rows, t->n, t->hidden || t->from, true));
        make_batch(mem, t->rows, t->n, &t->batch);
        mem += batch_bytes(t->n);
        t->batch.hidden = t->hidden;
        *begun = s + 1;
        if (!t->rows[0].seq->list->borrows) BW_TRY(reserve(m, &t->batch));
        if (s + 1 == r->n_steps) break; /* FOLD state is the judging step's alone, and ends where the step begins */
        advance(t, 1);
        *moved = s + 1;
    }
    return 0;
}

/* the steps begun, kept or given up */
static void end_round(bw_round *r, int begun, int moved, bool ok) {
    bw_batch *last = begun ? &r->steps[begun - 1].batch : NULL;
    for (int i = 0; last && i < last->n_seqs; i++) bw_seq_fold_end(&last->seqs[i], ok);
    if (ok) advance(&r->steps[begun - 1], 1);
    for (int s = 0; s < moved && !ok; s++) advance(&r->steps[s], -1);
    for (int s = 0; s < begun; s++) {
        const bw_batch *b = &r->steps[s].batch;
        for (int i = 0; i < b->all.n_runs && !r->steps[s].rows[0].seq->source; i++) {
            bw24_seq *seq = b->all.runs[i].seq;
            if (ok) bw_seq_trim_windows(seq);
            else bw24_seq_truncate(seq, seq->pos, NULL);
        }
    }
}

int bw_run_round(bw24_model *m, bw_round *r) {
    size_t need = 0;
    int begun = 0, moved = 0, rows = 0;
    for (int s = 0; s < r->n_steps; s++) {
        need += batch_bytes(r->steps[s].n);
        rows += r->steps[s].n;
    }
    uint8_t *mem = step_memory(m, need, rows);
    if (!mem) return BW24_E_MEMORY;
    atomic_store(&m->ctx->cancel, 0);
    bw_fpenv e = bw_fpenv_enter();
    int rc = begin_round(m, r, mem, &begun, &moved);
    if (!rc) rc = m->ctx->backend->round(m, r);
    bw_fpenv_leave(e);
    end_round(r, begun, moved, !rc);
    return rc;
}

int bw24_step(bw24_model *m, const bw24_row *rows, int32_t n, float *logits) {
    return bw_run_rows(m, rows, n, NULL, (bw_outputs){.logits = logits});
}

int bw24_step_greedy(bw24_model *m, const bw24_row *rows, int32_t n, int32_t *tokens) {
    if (!tokens) return bw_fail(BW24_E_ARG, "bw24_step_greedy: NULL argument");
    return bw_run_rows(m, rows, n, NULL, (bw_outputs){.tokens = tokens});
}

int bw_step_drawn(bw24_model *m, const bw24_row *rows, int32_t n, const bw24_pick *picks, bw_drawn *out) {
    BW_TRY(check_rows(m, rows, n, false, picks && out));
    int wanted = 0;
    for (int i = 0; i < n; i++)
        if (rows[i].want) BW_TRY(bw_check_pick(&picks[wanted++], m->vocab));
    return bw_run_rows(m, rows, n, NULL, (bw_outputs){.picks = picks, .drawn = out});
}

int bw24_step_sample(bw24_model *m, const bw24_row *rows, int32_t n, const bw24_pick *picks, int32_t *tokens) {
    if (!tokens || !picks) return bw_fail(BW24_E_ARG, "bw24_step_sample: NULL argument");
    bw_drawn *out = malloc((size_t)(n > 0 ? n : 1) * sizeof *out);
    if (!out) return bw_fail(BW24_E_MEMORY, "out of memory for %d rows", n);
    int rc = bw_step_drawn(m, rows, n, picks, out);
    for (int i = 0, at = 0; i < n && !rc; i++)
        if (rows[i].want) { tokens[at] = out[at].token; at++; }
    free(out);
    return rc;
}

int bw24_step_hidden(bw24_model *m, const bw24_row *rows, int32_t n, const float *hidden_in, float *logits, float *hidden_out) {
    BW_TRY(check_rows(m, rows, n, hidden_in != NULL, logits || hidden_out));
    const bw_list *l = rows[0].seq->list;
    if (!m->ctx->backend->roles)
        return bw_fail(BW24_E_UNSUPPORTED, "bw24_step_hidden: backend %s has no hidden rows", m->ctx->backend->name);
    if (hidden_out && l->hidden < 0) return bw_fail(BW24_E_MISSING, "bw24_step_hidden: list %s has no buffer 'hidden'", l->role);
    return bw_run_rows(m, rows, n, hidden_in, (bw_outputs){.logits = logits, .hidden = hidden_out});
}
