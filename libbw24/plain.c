/* Plain decoding, several tokens a call: the same steps and draws that a caller would make one by one, so that what stands around a step in the
 * caller's language is paid once for all of them. Owns when to stop; a drafter that follows is kept as a round without drafts keeps it. */
#include <stdlib.h>
#include <string.h>

#include "round.h"

enum { MOST_A_CALL = 4096 };

static bool is_stop(const int32_t *stop, int n, int32_t token) {
    for (int i = 0; i < n; i++)
        if (stop[i] == token) return true;
    return false;
}

/* the draw is the largest logit as it is: tokens leave a device instead of states of draws */
static bool takes_largest(const bw24_pick *p) {
    const bw24_sampler *q = p->params;
    bool penalties = q->repetition_penalty != 1.0f || q->presence_penalty != 0.0f || q->frequency_penalty != 0.0f;
    return q->temperature == 0.0f && !q->n_bias && !(penalties && p->n_history);
}

/* one step: `token` is appended, *next drawn after it */
static int one(bw24_seq *seq, bw24_drafter *d, int32_t token, const bw24_pick *pick, int32_t *next) {
    bw24_row row = {seq, token, 1};
    bw_drawn drawn;
    bw_outputs out = {.hidden = d ? d->rows : NULL};
    if (takes_largest(pick)) out.tokens = next;
    else out.drawn = &drawn, out.picks = pick;
    BW_TRY(bw_run_rows(seq->model, &row, 1, NULL, out));
    if (out.drawn) *next = drawn.token;
    return 0;
}

/* what a round without drafts does with the drafter: the row is owed, the hidden row handed on */
static int follow(bw24_drafter *d, int32_t token) {
    size_t width = (size_t)d->trunk->list->bufs[d->trunk->list->hidden].width;
    if (!d->seq->source) BW_TRY(bw_drafter_owe(d, token, d->last));
    memcpy(d->last, d->rows, width * sizeof *d->last);
    d->pos++;
    if (!d->seq->source) bw_drafter_forget(d);
    return 0;
}

static int check(const bw24_seq *seq, const bw24_drafter *d, const bw24_pick *pick, int n_stop, const int32_t *stop, int n) {
    if (n < 1 || n > MOST_A_CALL) return bw_fail(BW24_E_ARG, "bw24_decode: %d tokens, expected 1..%d", n, MOST_A_CALL);
    if (d && d->trunk != seq) return bw_fail(BW24_E_ARG, "bw24_decode: the drafter follows another sequence");
    if (n_stop < 0 || (n_stop && !stop)) return bw_fail(BW24_E_ARG, "bw24_decode: stop ids are missing");
    return bw_check_pick(pick, seq->model->vocab);
}

int bw24_decode(bw24_seq *seq, bw24_drafter *d, int32_t token, const bw24_pick *pick, const int32_t *stop, int32_t n_stop, int32_t n,
                double seconds, int32_t *tokens, int32_t *made) {
    if (!seq || !pick || !tokens || !made) return bw_fail(BW24_E_ARG, "bw24_decode: NULL argument");
    *made = 0;
    BW_TRY(check(seq, d, pick, n_stop, stop, n));
    bw24_pick p = *pick;
    int32_t *history = NULL;
    if (p.n_history) {
        if (!(history = malloc(((size_t)p.n_history + (size_t)n) * sizeof *history))) return bw_fail(BW24_E_MEMORY, "out of memory for a history");
        memcpy(history, p.history, (size_t)p.n_history * sizeof *history);
        p.history = history;
    }
    double until = bw_round_clock() + seconds;
    int rc = d ? bw_drafter_reset(d) : 0;
    while (!rc && *made < n) {
        int32_t next;
        if ((rc = one(seq, d, token, &p, &next))) break;
        if (d && (rc = follow(d, token))) {
            bw_drafter_reset(d);
            break;
        }
        tokens[(*made)++] = token = next;
        if (history) history[p.n_history++] = next;
        if (is_stop(stop, n_stop, next) || (seconds > 0 && bw_round_clock() >= until)) break;
    }
    free(history);
    return *made && rc != BW24_E_CANCELLED ? 0 : rc;
}
