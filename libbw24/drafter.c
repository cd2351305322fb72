/* Drafters: a draft list's timeline beside a sequence of the first list. Owns the pairing of tokens with hidden rows, the rows that are
 * owed to the draft list, and going back; picks no token.
 *
 * Row m of an MTP list takes token m and the first list's hidden row m - 1 (zeros for the first). Rows of drafts are made from the list's
 * own hidden rows; once their tokens are accepted they are taken back and made again from the first list's, so that keys and values are always
 * those of the true past: `made` rows are, `n_owed` more wait for the next step of the draft list, and made + n_owed = pos - base between
 * rounds. */
#include <stdlib.h>
#include <string.h>

#include "round.h"

/* FORGET_FROM owed rows are cut to KEPT: where nothing is drafted for long, making every row costs more than the gap costs later drafts */
enum { PAID_AT_ONCE = 256, FORGET_FROM = 96, KEPT = 32 };

static int64_t width_of(const bw24_drafter *d) { return d->trunk->list->bufs[d->trunk->list->hidden].width; }

static int check_lists(const bw24_seq *seq, const bw_list *l, const char *role) {
    if (!seq || !l || seq->list->index)
        return bw_fail(BW24_E_MISSING, "bw24_drafter_new: no sequence of the first list, or no list '%s'", role ? role : "(null)");
    if (seq->list->hidden < 0 || l->hidden < 0 || !l->takes_hidden)
        return bw_fail(BW24_E_ARG, "bw24_drafter_new: list %s and list %s do not share hidden rows", seq->list->role, role);
    return 0;
}

static int allocate(bw24_drafter **out, bw24_seq *seq) {
    bw24_drafter *d = calloc(1, sizeof *d);
    if (!d) return bw_fail(BW24_E_MEMORY, "out of memory for a drafter");
    d->trunk = seq;
    d->base = d->pos = seq->pos;
    size_t row = (size_t)width_of(d) * sizeof(float);
    d->last = calloc(1, row);
    d->rows = malloc((BW24_MAX_DRAFTS + 1) * row);
    if (!d->last || !d->rows) {
        bw24_drafter_free(d);
        return bw_fail(BW24_E_MEMORY, "out of memory for a drafter's rows of %zu bytes", row);
    }
    *out = d;
    return 0;
}

int bw24_drafter_new(bw24_drafter **out, bw24_seq *seq, const char *role) {
    const bw_list *l = seq ? bw_find_list(seq->model, role) : NULL;
    if (!out) return bw_fail(BW24_E_ARG, "bw24_drafter_new: NULL argument");
    BW_TRY(check_lists(seq, l, role));
    bw24_drafter *d;
    BW_TRY(allocate(&d, seq));
    int rc = l->borrows ? bw24_seq_new_over(&d->seq, seq, role) : bw24_seq_new_role(&d->seq, seq->model, role);
    if (rc) bw24_drafter_free(d);
    else *out = d;
    return rc;
}

void bw24_drafter_free(bw24_drafter *d) {
    if (!d) return;
    bw24_seq_free(d->seq);
    free(d->last);
    free(d->rows);
    free(d->owed);
    free(d->owed_rows);
    free(d);
}

int64_t bw24_drafter_pos(bw24_drafter *d) { return d ? d->pos : -1; }

int bw_drafter_owe(bw24_drafter *d, int32_t token, const float *row) {
    int64_t w = width_of(d);
    if (d->n_owed == d->cap_owed) {
        int cap = d->cap_owed * 2 + 32;
        int32_t *tokens = realloc(d->owed, (size_t)cap * sizeof *tokens);
        if (tokens) d->owed = tokens;
        float *rows = realloc(d->owed_rows, (size_t)cap * (size_t)w * sizeof *rows);
        if (rows) d->owed_rows = rows;
        if (!tokens || !rows) return bw_fail(BW24_E_MEMORY, "out of memory for %d rows owed to list %s", cap, d->seq->list->role);
        d->cap_owed = cap;
    }
    d->owed[d->n_owed] = token;
    memcpy(d->owed_rows + d->n_owed * w, row, (size_t)w * sizeof *row);
    d->n_owed++;
    return 0;
}

void bw_drafter_paid(bw24_drafter *d, int n) {
    int64_t w = width_of(d);
    d->made += n;
    d->n_owed -= n;
    memmove(d->owed, d->owed + n, (size_t)d->n_owed * sizeof *d->owed);
    memmove(d->owed_rows, d->owed_rows + n * w, (size_t)(d->n_owed * w) * sizeof *d->owed_rows);
}

/* rows for keys and values alone, until at most `left` are owed */
int bw_drafter_pay(bw24_drafter *d, int left) {
    bw24_model *m = d->trunk->model;
    int most = m->max_rows < PAID_AT_ONCE ? m->max_rows : PAID_AT_ONCE;
    bw24_row rows[PAID_AT_ONCE];
    while (d->n_owed > left) {
        int n = d->n_owed - left < most ? d->n_owed - left : most;
        for (int i = 0; i < n; i++) rows[i] = (bw24_row){d->seq, d->owed[i], 0};
        BW_TRY(bw_run_rows(m, rows, n, d->owed_rows, (bw_outputs){0}));
        bw_drafter_paid(d, n);
    }
    return 0;
}

void bw_drafter_forget(bw24_drafter *d) {
    if (d->n_owed < FORGET_FROM) return;
    int n = d->n_owed - KEPT;
    bw_drafter_paid(d, n);
    d->made -= n;
    d->base += n; /* the draft list's positions are n behind from here on: it sees distances only */
}

/* both timelines as they were before the round that was not committed */
int bw_drafter_reset(bw24_drafter *d) {
    d->open = 0;
    if (d->trunk->pos > d->pos) {
        int64_t at = d->pos;
        BW_TRY(bw24_seq_truncate(d->trunk, d->pos, &at));
        if (at != d->pos)
            return bw_fail(BW24_E_ARG, "a round: the sequence went back to %lld instead of %lld", (long long)at, (long long)d->pos);
    }
    if (d->seq->source) { d->n_owed = 0; return 0; }
    if (d->made > d->pos - d->base) d->made = d->pos - d->base;
    if (d->n_owed > d->pos - d->base - d->made) d->n_owed = (int)(d->pos - d->base - d->made);
    return d->seq->pos > d->made ? bw24_seq_truncate(d->seq, d->made, NULL) : 0;
}

/* a list over the sequence's own keys needs the last hidden row alone */
static bool last_alone(const bw24_drafter *d, const float *logits) { return d->seq->source && !logits; }

/* the hidden rows [n] of tokens that were appended at pos */
static int follow(bw24_drafter *d, const int32_t *tokens, int n, const float *rows) {
    int64_t w = width_of(d);
    for (int i = 0; i < n; i++) {
        if (!d->seq->source && d->pos + i >= d->base + d->made + d->n_owed) BW_TRY(bw_drafter_owe(d, tokens[i], d->last));
        memcpy(d->last, rows + i * w, (size_t)w * sizeof *rows);
    }
    d->pos += n;
    return 0;
}

/* one step of the first list, of n tokens at pos */
static int run(bw24_drafter *d, const int32_t *tokens, int n, float *logits, float *hidden) {
    bw24_row *rows = malloc((size_t)n * sizeof *rows);
    if (!rows) return bw_fail(BW24_E_MEMORY, "out of memory for %d rows", n);
    for (int i = 0; i < n; i++) rows[i] = (bw24_row){d->trunk, tokens[i], i == n - 1 || !last_alone(d, logits)};
    int rc = bw_run_rows(d->trunk->model, rows, n, NULL, (bw_outputs){.logits = logits, .hidden = hidden});
    free(rows);
    return rc;
}

int bw24_drafter_append(bw24_drafter *d, const int32_t *tokens, int32_t n, float *logits) {
    if (!d || !tokens || n < 1 || n > d->trunk->model->max_rows)
        return bw_fail(BW24_E_ARG, "bw24_drafter_append: NULL argument, or %d tokens, the model was made for 1..%d", n,
                       d ? d->trunk->model->max_rows : 0);
    BW_TRY(bw_drafter_reset(d));
    float *hidden = malloc((size_t)n * (size_t)width_of(d) * sizeof *hidden);
    if (!hidden) return bw_fail(BW24_E_MEMORY, "out of memory for %d hidden rows", n);
    int rc = run(d, tokens, n, logits, hidden);
    if (!rc && last_alone(d, logits)) memcpy(hidden + (n - 1) * width_of(d), hidden, (size_t)width_of(d) * sizeof *hidden);
    if (!rc) rc = follow(d, tokens, n, hidden);
    free(hidden);
    return rc ? rc : bw_drafter_pay(d, 0);
}

/* ---- several at once */
/* rows for keys and values alone of all drafters that owe some, in as few steps as they fit */
static int pay_together(bw24_drafter **d, int n) {
    bw24_model *m = d[0]->trunk->model;
    const size_t w = (size_t)width_of(d[0]);
    int most = m->max_rows < PAID_AT_ONCE ? m->max_rows : PAID_AT_ONCE, rc = 0;
    float *hidden = malloc((size_t)most * w * sizeof *hidden);
    if (!hidden) return bw_fail(BW24_E_MEMORY, "out of memory for %d hidden rows", most);
    for (int first = 0, of[PAID_AT_ONCE]; first < n && !rc;) {
        bw24_row rows[PAID_AT_ONCE];
        int at = 0, last = first;
        for (; last < n && at < most && last - first < PAID_AT_ONCE; last++) {
            of[last - first] = d[last]->n_owed < most - at ? d[last]->n_owed : most - at;
            memcpy(hidden + (size_t)at * w, d[last]->owed_rows, (size_t)of[last - first] * w * sizeof *hidden);
            for (int j = 0; j < of[last - first]; j++) rows[at++] = (bw24_row){d[last]->seq, d[last]->owed[j], 0};
        }
        if (at) rc = bw_run_rows(m, rows, at, hidden, (bw_outputs){0});
        for (int i = first; i < last && !rc; i++) bw_drafter_paid(d[i], of[i - first]);
        while (first < last && !rc && !d[first]->n_owed) first++;
    }
    free(hidden);
    return rc;
}

/* one step of the first list for all parts; hidden: the wanted rows', one after the other */
static int run_together(bw24_drafter **d, const int32_t *n, int drafters, const int32_t *tokens, int total, float *hidden) {
    bw24_row *rows = malloc((size_t)total * sizeof *rows);
    if (!rows) return bw_fail(BW24_E_MEMORY, "out of memory for %d rows", total);
    for (int i = 0, at = 0; i < drafters; i++)
        for (int j = 0; j < n[i]; j++, at++) rows[at] = (bw24_row){d[i]->trunk, tokens[at], j == n[i] - 1 || !last_alone(d[i], NULL)};
    int rc = bw_run_rows(d[0]->trunk->model, rows, total, NULL, (bw_outputs){.hidden = hidden});
    free(rows);
    return rc;
}

static int check_together(bw24_drafter **d, const int32_t *n, int drafters, const int32_t *tokens, int *total) {
    if (!d || !n || !tokens || drafters < 1) return bw_fail(BW24_E_ARG, "bw24_drafters_append: NULL argument or no drafter");
    *total = 0;
    for (int i = 0; i < drafters; i++) {
        if (!d[i] || n[i] < 1 || d[i]->trunk->model != d[0]->trunk->model || d[i]->seq->list != d[0]->seq->list)
            return bw_fail(BW24_E_ARG, "bw24_drafters_append: drafter %d is NULL, of another model or list, or has %d tokens", i, n[i]);
        for (int j = 0; j < i; j++)
            if (d[j] == d[i]) return bw_fail(BW24_E_ARG, "bw24_drafters_append: drafters %d and %d are the same", j, i);
        if (n[i] > d[0]->trunk->model->max_rows - *total)
            return bw_fail(BW24_E_ARG, "bw24_drafters_append: more than the %d tokens that the model was made for", d[0]->trunk->model->max_rows);
        *total += n[i];
    }
    return 0;
}

int bw24_drafters_append(bw24_drafter **d, const int32_t *n, int32_t drafters, const int32_t *tokens) {
    int total = 0, rc = 0;
    BW_TRY(check_together(d, n, drafters, tokens, &total));
    for (int i = 0; i < drafters; i++) BW_TRY(bw_drafter_reset(d[i]));
    const int64_t w = width_of(d[0]);
    float *hidden = malloc((size_t)total * (size_t)w * sizeof *hidden);
    if (!hidden) return bw_fail(BW24_E_MEMORY, "out of memory for %d hidden rows", total);
    rc = run_together(d, n, drafters, tokens, total, hidden);
    const float *rows = hidden;
    for (int i = 0; i < drafters && !rc; i++) {
        if (last_alone(d[i], NULL)) memcpy(d[i]->last, rows, (size_t)w * sizeof *rows), rows += w, d[i]->pos += n[i];
        else rc = follow(d[i], tokens, n[i], rows), rows += n[i] * w;
        tokens += n[i];
    }
    free(hidden);
    return rc ? rc : pay_together(d, drafters);
}

int bw24_drafter_truncate(bw24_drafter *d, int64_t pos, int32_t token, int64_t *actual) {
    if (!d || pos < 0 || pos > d->pos)
        return bw_fail(BW24_E_ARG, "bw24_drafter_truncate: position %lld is outside 0..%lld", (long long)pos, d ? (long long)d->pos : -1LL);
    BW_TRY(bw_drafter_reset(d));
    int64_t at = pos;
    bool again = token >= 0 && pos > 0 && pos < d->pos;
    if (pos < d->pos) {
        BW_TRY(bw24_seq_truncate(d->trunk, again ? pos - 1 : pos, &at));
        memset(d->last, 0, (size_t)width_of(d) * sizeof *d->last);
        d->pos = at;
        if (at < d->base) {
            d->base = at;
            d->made = d->n_owed = 0;
        }
        if (again && at == pos - 1) {
            /* what the draft list has of this token stays: it came from the hidden row before, which is not here any more */
            if (d->made > pos - d->base) d->made = pos - d->base;
            if (d->n_owed > pos - d->base - d->made) d->n_owed = (int)(pos - d->base - d->made);
            BW_TRY(run(d, &token, 1, NULL, d->rows));
            BW_TRY(follow(d, &token, 1, d->rows));
        }
    }
    if (actual) *actual = d->pos;
    return bw_drafter_reset(d);
}

int bw24_drafter_fork(bw24_drafter **out, bw24_drafter *d, bw24_seq *seq) {
    if (!out || !d || !seq || seq->model != d->trunk->model || seq->pos != d->pos)
        return bw_fail(BW24_E_ARG, "bw24_drafter_fork: NULL argument, or a sequence at %lld, the drafter is at %lld",
                       seq ? (long long)seq->pos : -1LL, d ? (long long)d->pos : -1LL);
    BW_TRY(bw_drafter_reset(d));
    bw24_drafter *f;
    BW_TRY(allocate(&f, seq));
    f->base = d->base;
    f->made = d->made;
    memcpy(f->last, d->last, (size_t)width_of(d) * sizeof *f->last);
    int rc = d->seq->source ? bw24_seq_new_over(&f->seq, seq, d->seq->list->role) : bw24_seq_fork(&f->seq, d->seq);
    for (int i = 0; i < d->n_owed && !rc; i++) rc = bw_drafter_owe(f, d->owed[i], d->owed_rows + i * width_of(d));
    if (rc) bw24_drafter_free(f);
    else *out = f;
    return rc;
}
