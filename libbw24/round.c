/* Rounds: drafts of several replies, one step that judges them, and the sequences moved over what was accepted. Owns the order of a round and who is
 * accepted; the draws are sample.c's, the pairing of rows drafter.c's. Results do not depend on what else is in the round, because every row has the
 * bits it has alone and every draw is a function of its own reply.
 *
 * draft:  owed rows and the newest token through the draft list, the token's logits give draft 1; then draft by draft, one row each
 * verify: token and drafts through the first list: row i judges draft i + 1, the row after the last accepted draft gives the next token
 * commit: the first list goes back over what was not accepted; the accepted drafts' rows are owed to the draft list, with true hidden rows */
#define _GNU_SOURCE /* clock_gettime */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "canon.h"
#include "round.h"

enum { OWED_IN_ROUND = 24 }; /* owed rows that share the step of the newest token; more go before it, by themselves */

static double now(void) {
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
    int32_t *tokens;   /* [most] */
    float *hidden_in, *hidden; /* [most][width] */
    float *logits;     /* [most][vocab], or NULL where greedy or the host has its own */
    float *draft_logits; /* [n][BW24_MAX_DRAFTS][columns], or NULL where no request rejects */
} work;

static bool takes_largest(const bw24_sampler *p) {
    return p && p->temperature == 0.0f && !p->n_bias && p->repetition_penalty == 1.0f && p->presence_penalty == 0.0f && p->frequency_penalty == 0.0f;
}

static int check_request(const bw24_model *m, const bw24_round_request *r, int i, bool drafting) {
    if (r->size != sizeof *r) return bw_fail(BW24_E_ARG, "a round: request %d of size %u, expected %zu", i, r->size, sizeof *r);
    if (!r->drafter || r->drafter->trunk->model != m) return bw_fail(BW24_E_ARG, "a round: request %d has no drafter of this model", i);
    if (drafting && !r->sampler) return bw_fail(BW24_E_ARG, "a round: request %d has no sampler", i);
    if (r->k < 0 || r->k > BW24_MAX_DRAFTS) return bw_fail(BW24_E_ARG, "a round: request %d: %d drafts, expected 0..%d", i, r->k, BW24_MAX_DRAFTS);
    if (r->token < 0 || r->token >= m->vocab) return bw_fail(BW24_E_ARG, "a round: request %d: token %d is outside 0..%d", i, r->token, m->vocab - 1);
    if (r->ids && r->n_ids != r->drafter->seq->list->bufs[r->drafter->seq->list->logits].width)
        return bw_fail(BW24_E_SHAPE, "a round: request %d: %d ids for %lld columns of logits", i, r->n_ids,
                       (long long)r->drafter->seq->list->bufs[r->drafter->seq->list->logits].width);
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
        if (r[i].drafter->seq->list != r[0].drafter->seq->list) return bw_fail(BW24_E_ARG, "a round: requests 0 and %d draft by different lists", i);
        for (int j = 0; j < i; j++)
            if (r[j].drafter == r[i].drafter) return bw_fail(BW24_E_ARG, "a round: requests %d and %d have the same drafter", j, i);
        *rows += 1 + (drafting ? r[i].k : r[i].drafted);
    }
    if (*rows > m->max_rows) return bw_fail(BW24_E_ARG, "a round: %d rows to judge, the model was made for 1..%d", *rows, m->max_rows);
    return 0;
}

/* lays the arrays out in the model's scratch; `logits`: whether the judging rows' are kept */
static int open_round(work *x, bw24_model *m, bw24_round_request *r, int n, int judged, bool logits) {
    *x = (work){.m = m, .r = r, .n = n, .list = r[0].drafter->seq->list, .greedy = true};
    size_t longest = 0, reject = 0;
    for (int i = 0; i < n; i++) {
        x->greedy = x->greedy && takes_largest(r[i].sampler) && !r[i].reject;
        x->own_ids = x->own_ids || r[i].ids;
        if ((size_t)r[i].n_history > longest) longest = (size_t)r[i].n_history;
        reject |= r[i].reject != 0;
    }
    int64_t width = m->lists[0]->bufs[m->lists[0]->hidden].width, columns = x->list->bufs[x->list->logits].width;
    x->most = judged > n * (OWED_IN_ROUND + 1) ? judged : n * (OWED_IN_ROUND + 1);
    if (x->most > m->max_rows) x->most = m->max_rows;
    size_t most = (size_t)x->most, wide = logits ? (size_t)judged * (size_t)m->vocab : 0, drafted = (size_t)n * (size_t)columns;
    if (drafted > wide) wide = drafted;
    size_t need = most * sizeof *x->rows + 4 * (2 * most * (size_t)width + wide + reject * drafted * BW24_MAX_DRAFTS + most + (size_t)n + longest + 64);
    if (need > m->round_mem_bytes) {
        free(m->round_mem);
        m->round_mem_bytes = 0;
        if (!(m->round_mem = malloc(need))) return bw_fail(BW24_E_MEMORY, "out of memory for a round of %d rows: %zu bytes", judged, need);
        m->round_mem_bytes = need;
    }
    x->rows = m->round_mem;
    x->hidden_in = (float *)(x->rows + most);
    x->hidden = x->hidden_in + most * (size_t)width;
    x->logits = x->hidden + most * (size_t)width;
    x->draft_logits = reject ? x->logits + wide : NULL;
    x->tokens = (int32_t *)(x->logits + wide + reject * drafted * BW24_MAX_DRAFTS);
    x->of = x->tokens + most;
    x->history = x->of + n;
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
    if (!r->reject) return bw_sample(logits, (int32_t)columns, ids, x->m->vocab, r->sampler, history, n_history, position, NULL, token, NULL);
    memcpy(x->draft_logits + (i * BW24_MAX_DRAFTS + r->drafted) * columns, logits, (size_t)columns * sizeof *logits);
    return bw24_sample_draft(logits, (int32_t)columns, ids, x->m->vocab, r->sampler, history, n_history, position, NULL, token);
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
    if (!d->pos && r->k && d->seq->source) return bw_fail(BW24_E_ARG, "a round: list %s drafts after the first token only", d->seq->list->role);
    BW_TRY(bw_drafter_owe(d, r->token, d->last));
    if (r->k) return bw_drafter_pay(d, OWED_IN_ROUND);
    bw_drafter_forget(d);
    return 0;
}

static int draft(work *x) {
    for (int i = 0; i < x->n; i++) BW_TRY(begin_request(&x->r[i]));
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
static int verify(work *x, bool tokens, float *logits) {
    int64_t width = x->m->lists[0]->bufs[x->m->lists[0]->hidden].width;
    int rows = 0;
    for (int i = 0; i < x->n; i++) {
        bw24_round_request *r = &x->r[i];
        for (int j = 0; j <= r->drafted; j++) x->rows[rows++] = (bw24_row){r->drafter->trunk, j ? r->drafts[j - 1] : r->token, 1};
    }
    BW_TRY(bw_run_rows(x->m, x->rows, rows, NULL, (bw_outputs){.logits = tokens ? NULL : logits, .tokens = tokens ? x->tokens : NULL, .hidden = x->hidden}));
    for (int i = 0, at = 0; i < x->n; at += x->r[i++].drafted + 1) {
        bw24_drafter *d = x->r[i].drafter;
        d->open = x->r[i].drafted + 1;
        memcpy(d->rows, x->hidden + at * width, (size_t)(d->open * width) * sizeof(float));
    }
    return 0;
}

/* the token that row `at`, the j-th of request i, gives */
static int pick(work *x, int i, int j, int at, int32_t *token) {
    bw24_round_request *r = &x->r[i];
    if (x->greedy) { *token = x->tokens[at]; return 0; }
    int32_t vocab = x->m->vocab, columns = (int32_t)x->list->bufs[x->list->logits].width;
    uint64_t position = (uint64_t)(r->drafter->pos + 1 + j);
    const float *logits = x->logits + (int64_t)at * vocab;
    const int32_t *history = history_of(x, r, j);
    int n_history = r->n_history ? r->n_history + j : 0;
    if (!r->reject || j == r->drafted) return bw_sample(logits, vocab, NULL, vocab, r->sampler, history, n_history, position, NULL, token, NULL);
    const float *from = x->draft_logits + ((int64_t)i * BW24_MAX_DRAFTS + j) * columns;
    return bw24_sample_reject(logits, vocab, from, columns, ids_of(x, r), r->sampler, history, n_history, position, NULL, r->drafts[j], token);
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
    for (int i = 0; i < r->accepted && !d->seq->source; i++) BW_TRY(bw_drafter_owe(d, r->drafts[i], d->rows + i * width));
    memcpy(d->last, d->rows + r->accepted * width, (size_t)width * sizeof *d->last);
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
    double t[4] = {now()};
    BW_TRY(check_round(m, r, n, true, &rows));
    BW_TRY(open_round(&x, m, r, n, rows, true));
    int rc = draft(&x);
    t[1] = now();
    if (!rc) rc = verify(&x, x.greedy, x.logits);
    t[2] = now();
    if (!rc) rc = accept(&x);
    if (rc) return give_up(r, n, rc);
    rc = commit(r, n);
    t[3] = now();
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
    int rc = draft(&x);
    return rc ? give_up(r, n, rc) : 0;
}

int bw24_round_verify(bw24_model *m, bw24_round_request *r, int32_t n, float *logits) {
    work x;
    int rows;
    if (!logits) return bw_fail(BW24_E_ARG, "bw24_round_verify: NULL argument");
    BW_TRY(check_round(m, r, n, false, &rows));
    BW_TRY(open_round(&x, m, r, n, rows, false));
    int rc = verify(&x, false, logits);
    return rc ? give_up(r, n, rc) : 0;
}

int bw24_round_commit(bw24_model *m, bw24_round_request *r, int32_t n) {
    int rows;
    BW_TRY(check_round(m, r, n, false, &rows));
    return commit(r, n);
}
