/* Rounds: drafts of several replies, one step that judges them, and the sequences moved over what was accepted. Owns the order of a round
 * and who is accepted; the draws are sample.c's, the pairing of rows drafter.c's. Results do not depend on what else is in the round,
 * because every row has the bits it has alone and every draw is a function of its own reply.
 *
 * draft:  owed rows and the newest token through the draft list, the token's logits give draft 1; then draft by draft, one row each
 * verify: token and drafts through the first list: row i judges draft i + 1, the row after the last accepted one gives the next token
 * commit: the first list goes back over what was not accepted; rows of accepted drafts are owed to the draft list, with true hidden rows */
#define _GNU_SOURCE /* clock_gettime */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "canon.h"
#include "round.h"

enum { OWED_IN_ROUND = 24 }; /* owed rows that share the step of the newest token; more go before it, by themselves */

double bw_round_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- one round's memory, kept by the model */
typedef struct work {
    bw24_model *m;
    bw24_round_request *r;
    int n;
    bw_list *list;     /* the draft list, shared by all requests */
    bool greedy;       /* every request takes the largest logit as it is: tokens leave the device instead of logits */
    bool own_ids;      /* some request drafts with columns of its own, so that the draft list's logits are needed */
    int most;          /* rows of the widest step */
    bw24_row *rows;    /* [most] */
    int32_t *of;       /* [n]: the requests of a drafting step */
    int32_t *history;  /* room for the longest history and its drafts */
    bw24_pick *picks;  /* [rows to judge]: the draws of all rows, made where the logits are; with their histories, one a request */
    bw_drawn *drawn;   /* NULL: greedy, a request rejects, or the host picks */
    int32_t *past;
    int32_t *tokens;   /* [most] */
    float *hidden_in, *hidden; /* [most][width] */
    float *logits;     /* [most][vocab], or NULL where greedy or the host has its own */
    float *draft_logits; /* [n][BW24_MAX_DRAFTS][columns], or NULL where no request rejects */
} work;

static bool takes_largest(const bw24_sampler *p) {
    bool penalties = p && (p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f);
    return p && p->temperature == 0.0f && !p->n_bias && !penalties;
}

static int check_request(const bw24_model *m, const bw24_round_request *r, int i, bool drafting) {
    if (r->size != sizeof *r) return bw_fail(BW24_E_ARG, "a round: request %d of size %u, expected %zu", i, r->size, sizeof *r);
    if (!r->drafter || r->drafter->trunk->model != m) return bw_fail(BW24_E_ARG, "a round: request %d has no drafter of this model", i);
    if (drafting && !r->sampler) return bw_fail(BW24_E_ARG, "a round: request %d has no sampler", i);
    if (!drafting && (r->drafted < 0 || r->drafted > BW24_MAX_DRAFTS))
        return bw_fail(BW24_E_ARG, "a round: request %d: %d drafts made, expected 0..%d", i, r->drafted, BW24_MAX_DRAFTS);
    if (r->k < 0 || r->k > BW24_MAX_DRAFTS)
        return bw_fail(BW24_E_ARG, "a round: request %d: %d drafts, expected 0..%d", i, r->k, BW24_MAX_DRAFTS);
    if (r->token < 0 || r->token >= m->vocab)
        return bw_fail(BW24_E_ARG, "a round: request %d: token %d is outside 0..%d", i, r->token, m->vocab - 1);
    const bw_list *l = r->drafter->seq->list;
    if (r->ids && r->n_ids != l->bufs[l->logits].width)
        return bw_fail(BW24_E_SHAPE, "a round: request %d: %d ids for %lld columns of logits", i, r->n_ids,
                       (long long)l->bufs[l->logits].width);
    if (r->n_history < 0 || (r->n_history && !r->history) || r->n_stop < 0 || (r->n_stop && !r->stop))
        return bw_fail(BW24_E_ARG, "a round: request %d: history or stop ids are missing", i);
    return 0;
}

/* every request by itself, and together: one draft list, each drafter once, rows for one step. Returns the rows by *rows */
static int check_round(bw24_model *m, bw24_round_request *r, int n, bool drafting, int *rows) {
    if (!m || !r || n < 1) return bw_fail(BW24_E_ARG, "a round: NULL argument or no request");
    *rows = 0;
    for (int i = 0; i < n; i++) {
        BW_TRY(check_request(m, &r[i], i, drafting));
        if (r[i].drafter->seq->list != r[0].drafter->seq->list)
            return bw_fail(BW24_E_ARG, "a round: requests 0 and %d draft by different lists", i);
        for (int j = 0; j < i; j++)
            if (r[j].drafter == r[i].drafter) return bw_fail(BW24_E_ARG, "a round: requests %d and %d have the same drafter", j, i);
        *rows += 1 + (drafting ? r[i].k : r[i].drafted);
    }
    if (*rows > m->max_rows)
        return bw_fail(BW24_E_ARG, "a round: %d rows to judge, the model was made for 1..%d", *rows, m->max_rows);
    return 0;
}

static void *take(uint8_t *base, size_t *used, size_t bytes) {
    void *p = base ? base + *used : NULL;
    *used += (bytes + 15) & ~(size_t)15;
    return p;
}

/* the arrays, one after the other from `base` (NULL: only to count). Returns the bytes they take */
static size_t lay_out(work *x, uint8_t *base, int judged, bool logits, bool reject, size_t longest, size_t past) {
    const bw_list *first = x->m->lists[0];
    size_t most = (size_t)x->most, width = (size_t)first->bufs[first->hidden].width, columns = (size_t)x->list->bufs[x->list->logits].width;
    size_t wide = logits ? (size_t)judged * (size_t)x->m->vocab : 0, drafted = (size_t)x->n * columns;
    bool draws = logits && !x->greedy && !reject;
    size_t used = 0;
    x->rows = take(base, &used, most * sizeof *x->rows);
    x->hidden_in = take(base, &used, most * width * sizeof(float));
    x->hidden = take(base, &used, most * width * sizeof(float));
    x->logits = take(base, &used, (wide > drafted ? wide : drafted) * sizeof(float));
    x->draft_logits = take(base, &used, reject ? drafted * BW24_MAX_DRAFTS * sizeof(float) : 0);
    x->tokens = take(base, &used, most * sizeof(int32_t));
    x->of = take(base, &used, (size_t)x->n * sizeof(int32_t));
    x->history = take(base, &used, (longest + BW24_MAX_DRAFTS) * sizeof(int32_t));
    x->picks = take(base, &used, draws ? (size_t)judged * sizeof *x->picks : 0);
    x->drawn = take(base, &used, draws ? (size_t)judged * sizeof *x->drawn : 0);
    x->past = take(base, &used, draws ? past * sizeof(int32_t) : 0);
    if (!draws) x->drawn = NULL;
    if (!reject) x->draft_logits = NULL;
    return used;
}

/* the model's scratch, as large as the round needs; `logits`: whether the library draws from the rows that are judged */
static int open_round(work *x, bw24_model *m, bw24_round_request *r, int n, int judged, bool logits) {
    *x = (work){.m = m, .r = r, .n = n, .list = r[0].drafter->seq->list, .greedy = true};
    size_t longest = 0, past = 0;
    bool reject = false;
    for (int i = 0; i < n; i++) {
        x->greedy = x->greedy && takes_largest(r[i].sampler) && !r[i].reject;
        x->own_ids = x->own_ids || r[i].ids;
        if ((size_t)r[i].n_history > longest) longest = (size_t)r[i].n_history;
        past += (size_t)r[i].n_history + BW24_MAX_DRAFTS;
        reject = reject || r[i].reject;
    }
    x->most = judged > n * (OWED_IN_ROUND + 1) ? judged : n * (OWED_IN_ROUND + 1);
    if (x->most > m->max_rows) x->most = m->max_rows;
    size_t need = lay_out(x, NULL, judged, logits, reject, longest, past);
    if (need > m->round_mem_bytes) {
        free(m->round_mem);
        m->round_mem_bytes = 0;
        if (!(m->round_mem = aligned_alloc(64, (need + 63) & ~(size_t)63)))
            return bw_fail(BW24_E_MEMORY, "out of memory for a round of %d rows: %zu bytes", judged, need);
        m->round_mem_bytes = need;
    }
    lay_out(x, m->round_mem, judged, logits, reject, longest, past);
    return 0;
}

/* a step of the draft list, whose results are tokens or logits, as all requests allow */
static int step(work *x, int rows, const float *hidden_in) {
    bool tokens = x->greedy && !x->own_ids;
    bw_outputs out = {.logits = tokens ? NULL : x->logits, .tokens = tokens ? x->tokens : NULL, .hidden = x->hidden};
    return bw_run_rows(x->m, x->rows, rows, hidden_in, out);
}

/* ---- draft */
/* the history of a draw: the request's, and its first `drafts` drafts */
static const int32_t *history_of(work *x, const bw24_round_request *r, int drafts) {
    if (!r->n_history) return NULL;
    memcpy(x->history, r->history, (size_t)r->n_history * sizeof *x->history);
    memcpy(x->history + r->n_history, r->drafts, (size_t)drafts * sizeof *x->history);
    return x->history;
}

/* the tokens of the draft list's columns, as this request has them */
static const int32_t *ids_of(const work *x, const bw24_round_request *r) { return r->ids ? r->ids : x->list->ids; }

/* the token of the largest of finite logits, the lowest of equals; -1 where no column stands for one */
static int32_t largest(const float *l, int64_t n, const int32_t *ids) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++) {
        if (ids && ids[i] < 0) continue;
        if (best < 0 || l[i] > l[best] || (ids && l[i] == l[best] && ids[i] < ids[best])) best = i;
    }
    return best < 0 ? -1 : ids ? ids[best] : (int32_t)best;
}

/* the draft that row `at` of the last step gives request i; -1: none */
static int pick_draft(work *x, int i, int at, int32_t *token) {
    bw24_round_request *r = &x->r[i];
    int64_t columns = x->list->bufs[x->list->logits].width;
    uint64_t position = (uint64_t)(r->drafter->pos + 1 + r->drafted);
    int n_history = r->n_history ? r->n_history + r->drafted : 0;
    if (x->greedy && !x->own_ids) { *token = x->tokens[at]; return 0; }
    const float *logits = x->logits + at * columns;
    const int32_t *history = history_of(x, r, r->drafted), *ids = ids_of(x, r);
    if (takes_largest(r->sampler) && !r->reject) { *token = largest(logits, columns, ids); return 0; }
    int32_t n = (int32_t)columns;
    if (!r->reject) return bw_sample(logits, n, ids, x->m->vocab, r->sampler, history, n_history, position, NULL, token, NULL);
    memcpy(x->draft_logits + (i * BW24_MAX_DRAFTS + r->drafted) * columns, logits, (size_t)columns * sizeof *logits);
    return bw24_sample_draft(logits, n, ids, x->m->vocab, r->sampler, history, n_history, position, NULL, token);
}

/* after a step in which request of[j] has row j: its draft, and whether it wants another. The rows that go on move to the front */
static int take_drafts(work *x, int live) {
    int64_t width = x->m->lists[0]->bufs[x->m->lists[0]->hidden].width;
    int left = 0;
    for (int j = 0; j < live; j++) {
        bw24_round_request *r = &x->r[x->of[j]];
        int32_t token = -1;
        BW_TRY(pick_draft(x, x->of[j], j, &token));
        if (token < 0) continue; /* a column that stands for no token */
        r->drafts[r->drafted++] = token;
        if (r->drafted == r->k) continue;
        memcpy(x->hidden_in + left * width, x->hidden + j * width, (size_t)width * sizeof(float));
        x->rows[left] = (bw24_row){r->drafter->seq, token, 1};
        x->of[left++] = x->of[j];
    }
    return left;
}

/* the chains of requests of[0 .. live), whose first rows have run: draft by draft */
static int chain(work *x, int live) {
    while ((live = take_drafts(x, live)) > 0) BW_TRY(step(x, live, x->hidden_in));
    return live;
}

/* request i's owed rows, the newest token's last, into the step from row `at` on. Returns the rows */
static int put_owed(work *x, int i, int at) {
    bw24_drafter *d = x->r[i].drafter;
    int64_t width = x->m->lists[0]->bufs[x->m->lists[0]->hidden].width;
    memcpy(x->hidden_in + at * width, d->owed_rows, (size_t)(d->n_owed * width) * sizeof(float));
    for (int j = 0; j < d->n_owed; j++) x->rows[at + j] = (bw24_row){d->seq, d->owed[j], j == d->n_owed - 1};
    return d->n_owed;
}

static int begin_request(bw24_round_request *r) {
    bw24_drafter *d = r->drafter;
    BW_TRY(bw_drafter_reset(d));
    r->drafted = r->accepted = 0;
    if (d->pos + 1 + r->k > d->trunk->model->max_context)
        return bw_fail(BW24_E_CONTEXT, "a round: %lld tokens and %d drafts, the context holds %lld", (long long)d->pos + 1, r->k,
                       (long long)d->trunk->model->max_context);
    if (!d->pos && r->k && d->seq->source)
        return bw_fail(BW24_E_ARG, "a round: list %s drafts after the first token only", d->seq->list->role);
    BW_TRY(bw_drafter_owe(d, r->token, d->last));
    if (r->k) return bw_drafter_pay(d, OWED_IN_ROUND);
    bw_drafter_forget(d);
    return 0;
}

static int begin(work *x) {
    for (int i = 0; i < x->n; i++) BW_TRY(begin_request(&x->r[i]));
    return 0;
}

static int draft(work *x) {
    for (int i = 0; i < x->n;) {
        int rows = 0, live = 0;
        for (; i < x->n; i++) { /* as many requests as the step holds */
            if (!x->r[i].k) continue;
            if (rows + x->r[i].drafter->n_owed > x->most) {
                if (live) break;
                BW_TRY(bw_drafter_pay(x->r[i].drafter, 1));
            }
            rows += put_owed(x, i, rows);
            x->of[live++] = i;
        }
        if (!live) continue;
        BW_TRY(step(x, rows, x->hidden_in));
        for (int j = 0; j < live; j++)
            if (!x->r[x->of[j]].drafter->seq->source) bw_drafter_paid(x->r[x->of[j]].drafter, x->r[x->of[j]].drafter->n_owed);
        BW_TRY(chain(x, live));
    }
    return 0;
}

/* ---- verify, accept, commit */
/* a request's draws of the rows from `at` on; its history with all drafts goes to `past` */
static int put_picks(work *x, const bw24_round_request *r, int at, int32_t *past) {
    if (r->n_history) {
        memcpy(past, r->history, (size_t)r->n_history * sizeof *past);
        memcpy(past + r->n_history, r->drafts, (size_t)r->drafted * sizeof *past);
    }
    for (int j = 0; j <= r->drafted; j++) {
        bool uses = r->n_history > 0;
        x->picks[at + j] = (bw24_pick){.params = r->sampler, .history = uses ? past : NULL, .n_history = uses ? r->n_history + j : 0};
        BW_TRY(bw_check_pick(&x->picks[at + j], x->m->vocab));
    }
    return 0;
}

/* logits: where the host wants them; NULL: tokens, drawn rows or the round's own logits, as the requests allow */
static int verify(work *x, float *logits) {
    const bw_list *first = x->m->lists[0];
    int64_t width = first->bufs[first->hidden].width;
    int32_t *past = x->past;
    int rows = 0;
    for (int i = 0; i < x->n; i++) {
        bw24_round_request *r = &x->r[i];
        if (!logits && x->drawn) BW_TRY(put_picks(x, r, rows, past));
        past += x->drawn ? r->n_history + BW24_MAX_DRAFTS : 0;
        for (int j = 0; j <= r->drafted; j++) x->rows[rows++] = (bw24_row){r->drafter->trunk, j ? r->drafts[j - 1] : r->token, 1};
    }
    bw_outputs out = {.hidden = x->hidden};
    if (logits) out.logits = logits;
    else if (x->greedy) out.tokens = x->tokens;
    else if (x->drawn) out.drawn = x->drawn, out.picks = x->picks;
    else out.logits = x->logits;
    BW_TRY(bw_run_rows(x->m, x->rows, rows, NULL, out));
    for (int i = 0, at = 0; i < x->n; at += x->r[i++].drafted + 1) {
        bw24_drafter *d = x->r[i].drafter;
        d->open = x->r[i].drafted + 1;
        memcpy(d->rows, x->hidden + at * width, (size_t)(d->open * width) * sizeof(float));
        d->judged = d->rows;
    }
    return 0;
}

/* the token that row `at`, the j-th of request i, gives */
static int pick(work *x, int i, int j, int at, int32_t *token) {
    bw24_round_request *r = &x->r[i];
    if (x->greedy) { *token = x->tokens[at]; return 0; }
    if (x->drawn) { *token = x->drawn[at].token; return 0; }
    int32_t vocab = x->m->vocab, columns = (int32_t)x->list->bufs[x->list->logits].width;
    uint64_t position = (uint64_t)(r->drafter->pos + 1 + j);
    const float *logits = x->logits + (int64_t)at * vocab;
    const int32_t *history = history_of(x, r, j);
    int n_history = r->n_history ? r->n_history + j : 0;
    if (!r->reject || j == r->drafted)
        return bw_sample(logits, vocab, NULL, vocab, r->sampler, history, n_history, position, NULL, token, NULL);
    const float *from = x->draft_logits + ((int64_t)i * BW24_MAX_DRAFTS + j) * columns;
    return bw24_sample_reject(logits, vocab, from, columns, ids_of(x, r), r->sampler, history, n_history, position, NULL, r->drafts[j],
                              token);
}

/* ---- drafts and verification in one go, where the backend has it: one wait for the host instead of two a step */
static bool goes_at_once(const work *x) {
    int owed = 0;
    if (!x->m->ctx->backend->round || x->m->spill || x->own_ids || x->draft_logits) return false;
    for (int i = 0; i < x->n; i++) owed += x->r[i].k ? x->r[i].drafter->n_owed : 0;
    return owed <= x->most;
}

static int at_once(work *x, double *draft_share) {
    const float *owed = x->n == 1 ? x->r[0].drafter->owed_rows : x->hidden_in;
    for (int i = 0, at = 0; i < x->n && x->n > 1; i++)
        if (x->r[i].k) at += put_owed(x, i, at);
    BW_TRY(bw_round_once(x->m, x->r, x->n, x->greedy, owed, x->tokens, x->hidden, draft_share));
    for (int i = 0, at = 0; i < x->n && x->drawn; at += x->r[i++].drafted + 1)
        for (int j = 0; j <= x->r[i].drafted; j++) x->drawn[at + j] = (bw_drawn){.token = x->tokens[at + j]};
    return 0;
}

/* a coin that falls on its side with probability p, a function of seed and position */
static bool coin(const bw24_round_request *r, int j) {
    return (double)(bw_draw(r->sampler->seed, (uint64_t)(r->drafter->pos + 1 + j), ~0ull) >> 11) * 0x1p-53 < (double)r->synthetic;
}

static bool ends(const bw24_round_request *r, int32_t token) {
    for (int i = 0; i < r->n_stop; i++)
        if (r->stop[i] == token) return true;
    return false;
}

static int accept(work *x) {
    for (int i = 0, at = 0; i < x->n; at += x->r[i++].drafted + 1) {
        bw24_round_request *r = &x->r[i];
        for (r->accepted = 0;; r->accepted++) {
            int j = r->accepted;
            BW_TRY(pick(x, i, j, at + j, &r->tokens[j]));
            if (j == r->drafted) break;
            bool taken = r->synthetic > 0 ? coin(r, j) : r->tokens[j] == r->drafts[j];
            if (taken) r->tokens[j] = r->drafts[j];
            if (!taken || (r->synthetic <= 0 && ends(r, r->tokens[j]))) break;
        }
    }
    return 0;
}

static int commit_one(bw24_round_request *r) {
    bw24_drafter *d = r->drafter;
    int64_t width = d->trunk->list->bufs[d->trunk->list->hidden].width, to = d->pos + 1 + r->accepted, at = to;
    if (d->open != r->drafted + 1 || r->accepted < 0 || r->accepted > r->drafted)
        return bw_fail(BW24_E_ARG, "a round: %d of %d drafts accepted, %d rows were judged", r->accepted, r->drafted, d->open);
    if (d->trunk->pos > to) BW_TRY(bw24_seq_truncate(d->trunk, to, &at));
    if (at != to) return bw_fail(BW24_E_ARG, "a round: the sequence went back to %lld instead of %lld", (long long)at, (long long)to);
    for (int i = 0; i < r->accepted && !d->seq->source; i++) BW_TRY(bw_drafter_owe(d, r->drafts[i], d->judged + i * width));
    memcpy(d->last, d->judged + r->accepted * width, (size_t)width * sizeof *d->last);
    d->pos = to;
    return bw_drafter_reset(d);
}

/* the request's timelines as they were before the round */
static void give_up_one(bw24_round_request *r) {
    bw_drafter_reset(r->drafter);
    r->accepted = -1;
}

static int give_up(bw24_round_request *r, int n, int rc) {
    for (int i = 0; i < n; i++) give_up_one(&r[i]);
    return rc;
}

/* a request that cannot move, for want of memory, does not hold up the others */
static int commit(bw24_round_request *r, int n) {
    int rc = 0;
    for (int i = 0; i < n; i++) {
        int one = commit_one(&r[i]);
        if (one) give_up_one(&r[i]);
        rc = one ? one : rc;
    }
    return rc;
}

int bw24_round(bw24_model *m, bw24_round_request *r, int32_t n, bw24_round_times *times) {
    work x;
    int rows;
    double t[4] = {bw_round_clock()};
    BW_TRY(check_round(m, r, n, true, &rows));
    BW_TRY(open_round(&x, m, r, n, rows, true));
    int rc = begin(&x);
    bool once = !rc && goes_at_once(&x);
    double share = 0;
    if (once) rc = at_once(&x, &share);
    else if (!rc) rc = draft(&x);
    t[1] = bw_round_clock();
    if (!rc && !once) rc = verify(&x, NULL);
    t[2] = bw_round_clock();
    if (once) t[1] = t[0] + share * (t[2] - t[0]);
    if (!rc) rc = accept(&x);
    if (rc) return give_up(r, n, rc);
    rc = commit(r, n);
    t[3] = bw_round_clock();
    if (times) {
        times->draft += t[1] - t[0];
        times->verify += t[2] - t[1];
        times->commit += t[3] - t[2];
    }
    return rc;
}

int bw24_round_draft(bw24_model *m, bw24_round_request *r, int32_t n) {
    work x;
    int rows;
    BW_TRY(check_round(m, r, n, true, &rows));
    BW_TRY(open_round(&x, m, r, n, rows, false));
    int rc = begin(&x);
    if (!rc) rc = draft(&x);
    return rc ? give_up(r, n, rc) : 0;
}

int bw24_round_verify(bw24_model *m, bw24_round_request *r, int32_t n, float *logits) {
    work x;
    int rows;
    if (!logits) return bw_fail(BW24_E_ARG, "bw24_round_verify: NULL argument");
    BW_TRY(check_round(m, r, n, false, &rows));
    BW_TRY(open_round(&x, m, r, n, rows, false));
    int rc = verify(&x, logits);
    return rc ? give_up(r, n, rc) : 0;
}

int bw24_round_commit(bw24_model *m, bw24_round_request *r, int32_t n) {
    int rows;
    BW_TRY(check_round(m, r, n, false, &rows));
    return commit(r, n);
}
