/* Plain decoding, several tokens a call: the same steps and draws that a caller would make one by one, so that what stands around a step in the
 * caller's language is paid once for all of them. Owns when to stop; a drafter that follows is kept as a round without drafts keeps it. */
#include <stdlib.h>
#include <string.h>

#include "round.h"

enum { MOST_A_CALL = 4096 };

/* one call's memory, in one block */
typedef struct work {
    bw24_model *m;
    bw24_decode_request *r;
    int n, most;
    bool greedy, follows; /* every draw is the largest logit; some request has a drafter */
    float *logits;        /* where the next step's [n][vocab] stay with the caller, or NULL */
    size_t width;
    void *block;
    bw24_row *rows;       /* [n], as all that follows */
    bw24_pick *picks;
    bw_drawn *drawn;
    int32_t *tokens;
    float *hidden;        /* [n][width], or NULL */
    int32_t *past;        /* histories with room for what is drawn */
} work;

static bool is_stop(const bw24_decode_request *r, int32_t token) {
    for (int i = 0; i < r->n_stop; i++)
        if (r->stop[i] == token) return true;
    return false;
}

/* the draw is the largest logit as it is: tokens leave a device instead of states of draws */
static bool takes_largest(const bw24_pick *p) {
    const bw24_sampler *q = p->params;
    bool penalties = q->repetition_penalty != 1.0f || q->presence_penalty != 0.0f || q->frequency_penalty != 0.0f;
    return q->temperature == 0.0f && !q->n_bias && !(penalties && p->n_history);
}

static int check_request(const bw24_model *m, const bw24_decode_request *r, int i) {
    if (r->size != sizeof *r) return bw_fail(BW24_E_ARG, "bw24_decode: request %d of size %u, expected %zu", i, r->size, sizeof *r);
    if (!r->seq || !r->tokens || r->seq->model != m) return bw_fail(BW24_E_ARG, "bw24_decode: request %d has no sequence of this model, or no room", i);
    if (r->drafter && r->drafter->trunk != r->seq) return bw_fail(BW24_E_ARG, "bw24_decode: request %d: the drafter follows another sequence", i);
    if (r->n_stop < 0 || (r->n_stop && !r->stop)) return bw_fail(BW24_E_ARG, "bw24_decode: request %d: stop ids are missing", i);
    return bw_check_pick(&r->pick, m->vocab);
}

static int check(const bw24_model *m, const bw24_decode_request *r, int n, int most) {
    if (n > m->max_rows) return bw_fail(BW24_E_ARG, "bw24_decode: %d requests, the model was made for 1..%d", n, m->max_rows);
    if (most < 1 || most > MOST_A_CALL) return bw_fail(BW24_E_ARG, "bw24_decode: %d tokens, expected 1..%d", most, MOST_A_CALL);
    for (int i = 0; i < n; i++) {
        BW_TRY(check_request(m, &r[i], i));
        for (int j = 0; j < i; j++)
            if (r[j].seq == r[i].seq) return bw_fail(BW24_E_ARG, "bw24_decode: requests %d and %d have the same sequence", j, i);
    }
    return 0;
}

static void *take(uint8_t *base, size_t *used, size_t bytes) {
    void *p = base ? base + *used : NULL;
    *used += (bytes + 15) & ~(size_t)15;
    return p;
}

/* the arrays from `base` on (NULL: only to count). Returns the bytes they take */
static size_t lay_out(work *x, uint8_t *base, size_t past) {
    size_t n = (size_t)x->n, used = 0;
    x->rows = take(base, &used, n * sizeof *x->rows);
    x->picks = take(base, &used, n * sizeof *x->picks);
    x->drawn = take(base, &used, n * sizeof *x->drawn);
    x->tokens = take(base, &used, n * sizeof *x->tokens);
    x->hidden = take(base, &used, x->follows ? n * x->width * sizeof *x->hidden : 0);
    x->past = take(base, &used, past * sizeof *x->past);
    if (!x->follows) x->hidden = NULL;
    return used;
}

static int open_work(work *x, bw24_model *m, bw24_decode_request *r, int n, int most, float *logits) {
    *x = (work){.m = m, .r = r, .n = n, .most = most, .greedy = !logits, .logits = logits};
    size_t past = 0;
    for (int i = 0; i < n; i++) {
        x->greedy = x->greedy && takes_largest(&r[i].pick);
        x->follows = x->follows || r[i].drafter;
        past += r[i].pick.n_history ? (size_t)r[i].pick.n_history + (size_t)most : 0;
    }
    const bw_list *l = r[0].seq->list;
    x->width = x->follows ? (size_t)l->bufs[l->hidden].width : 0;
    x->block = malloc(lay_out(x, NULL, past));
    if (!x->block) return bw_fail(BW24_E_MEMORY, "out of memory for %d replies", n);
    lay_out(x, x->block, past);
    int32_t *at = x->past;
    for (int i = 0; i < n; i++) {
        const bw24_pick *p = &r[i].pick;
        x->rows[i] = (bw24_row){r[i].seq, r[i].token, 1};
        x->picks[i] = *p;
        if (!p->n_history) continue;
        memcpy(at, p->history, (size_t)p->n_history * sizeof *at);
        x->picks[i].history = at;
        at += p->n_history + most;
    }
    return 0;
}

/* one step: every row's token is appended, tokens[i] drawn after it */
static int step(work *x) {
    bw_outputs out = {.hidden = x->hidden, .logits = x->logits};
    if (x->greedy) out.tokens = x->tokens;
    else out.drawn = x->drawn, out.picks = x->picks;
    BW_TRY(bw_run_rows(x->m, x->rows, x->n, NULL, out));
    for (int i = 0; i < x->n && !x->greedy; i++) x->tokens[i] = x->drawn[i].token;
    if (x->logits) x->logits += (int64_t)x->n * x->m->vocab;
    return 0;
}

/* what a round without drafts does with the drafters: rows are owed, hidden rows handed on. An error leaves all as before the step */
static int follow(work *x) {
    int rc = 0;
    for (int i = 0; i < x->n && !rc; i++) {
        bw24_drafter *d = x->r[i].drafter;
        if (d && !d->seq->source) rc = bw_drafter_owe(d, x->rows[i].token, d->last);
    }
    for (int i = 0; i < x->n; i++) {
        bw24_drafter *d = x->r[i].drafter;
        if (rc && d) bw_drafter_reset(d);
        else if (rc) bw24_seq_truncate(x->r[i].seq, x->r[i].seq->pos - 1, NULL);
        if (rc || !d) continue;
        memcpy(d->last, x->hidden + (size_t)i * x->width, x->width * sizeof *d->last);
        d->pos++;
        if (!d->seq->source) bw_drafter_forget(d);
    }
    return rc;
}

/* the drawn tokens into results, histories and the next step's rows. Whether one of them ends its reply */
static bool hand_on(work *x, int made) {
    bool ended = false;
    for (int i = 0; i < x->n; i++) {
        int32_t token = x->tokens[i];
        x->r[i].tokens[made] = x->rows[i].token = token;
        if (x->picks[i].n_history) ((int32_t *)x->picks[i].history)[x->picks[i].n_history++] = token;
        ended = ended || is_stop(&x->r[i], token);
    }
    return ended;
}

int bw24_decode_logits(bw24_model *m, bw24_decode_request *r, int32_t n, int32_t most, double seconds, const int32_t *end, float *logits,
                       int32_t *made) {
    if (!m || !r || !made || n < 1) return bw_fail(BW24_E_ARG, "bw24_decode: NULL argument or no request");
    *made = 0;
    BW_TRY(check(m, r, n, most));
    work x;
    BW_TRY(open_work(&x, m, r, n, most, logits));
    double began = bw_round_clock(), until = began + seconds;
    int rc = 0;
    for (int i = 0; i < n && !rc; i++) rc = r[i].drafter ? bw_drafter_reset(r[i].drafter) : 0;
    while (!rc && *made < most) {
        if ((rc = step(&x)) || (rc = follow(&x))) break;
        if (hand_on(&x, (*made)++) || (seconds > 0 && bw_round_clock() >= until) || (end && __atomic_load_n(end, __ATOMIC_RELAXED))) break;
    }
    r[0].us = (int32_t)(1e6 * (bw_round_clock() - began));
    free(x.block);
    return *made && rc != BW24_E_CANCELLED ? 0 : rc;
}

int bw24_decode(bw24_model *m, bw24_decode_request *r, int32_t n, int32_t most, double seconds, const int32_t *end, int32_t *made) {
    return bw24_decode_logits(m, r, n, most, seconds, end, NULL, made);
}
