/* Rounds in one go: what each step of a round holds, known before the first has run, so that a backend need not wait for the host between them.
 * Owns the plan of such a round and its plain execution, step by step, which says what the plan means; round.c accepts and commits. */
#include <stdlib.h>
#include <string.h>

#include "fault.h"
#include "round.h"

/* ---- the plain execution */
static int32_t draft_of(const bw_round *r, const bw_round_step *t, int i) { return r->drafts[t->of[i]][t->depth[i] - 1]; }

/* the tokens and hidden rows of a step that the steps before gave; a missing token is 0, whose row nobody looks at */
static void feed(const bw_round *r, bw_round_step *t, const float *handed, float *hidden, size_t width) {
    int32_t *token = (int32_t *)t->batch.token;
    for (int i = 0; i < t->n; i++) {
        if (t->depth[i]) token[i] = draft_of(r, t, i) < 0 ? 0 : draft_of(r, t, i);
        if (t->from) memcpy(hidden + (size_t)i * width, handed + (size_t)t->from[i] * width, width * sizeof *hidden);
    }
    if (t->from) t->batch.hidden = hidden;
}

static int32_t likeliest(const float *l, int64_t n, const int32_t *ids) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (l[i] > l[best]) best = i;
    return ids ? ids[best] : (int32_t)best;
}

/* the token that wanted row w of a step gives; history: room for the request's and its drafts */
static int draw(const bw_round *r, const bw_round_step *t, const bw_list *l, int w, const float *logits, int32_t vocab, int32_t *history,
                int32_t *token) {
    int row = t->batch.want.row[w], of = t->of[row], depth = t->depth[row], n = 0;
    int64_t columns = l->bufs[l->logits].width;
    if (!r->picks) { *token = likeliest(logits, columns, l->ids); return 0; }
    const bw24_pick *p = &r->picks[of];
    if (p->n_history) {
        memcpy(history, p->history, (size_t)p->n_history * sizeof *history);
        memcpy(history + p->n_history, r->drafts[of], (size_t)depth * sizeof *history);
        n = p->n_history + depth;
        while (n > p->n_history && history[n - 1] < 0) n--; /* what follows a missing draft is not looked at */
    }
    return bw_sample(logits, (int32_t)columns, l->ids, vocab, p->params, history, n, (uint64_t)(r->pos[of] + 1 + depth), NULL, token, NULL);
}

typedef struct scratch { float *logits, *hidden, *handed; int32_t *history; } scratch;

static int one_step(bw24_model *m, bw_round *r, int s, size_t width, const scratch *x) {
    bw_round_step *t = &r->steps[s];
    bw_list *l = t->rows[0].seq->list;
    bool judges = s == r->n_steps - 1;
    feed(r, t, x->handed, x->hidden, width);
    BW_TRY(m->ctx->backend->forward(m, l, &t->batch, x->logits));
    const bw_rowset *want = &t->batch.want;
    float *handed = judges ? r->hidden : x->handed;
    if (m->ctx->backend->hidden) BW_TRY(m->ctx->backend->hidden(m, l, want->n, handed));
    else memcpy(handed, l->mem[l->hidden], (size_t)want->n * width * sizeof *handed);
    for (int w = 0; w < want->n; w++) {
        int32_t *to = judges ? &r->tokens[w] : &r->drafts[t->of[want->row[w]]][s];
        BW_TRY(draw(r, t, l, w, x->logits + w * l->bufs[l->logits].width, m->vocab, x->history, to));
    }
    return 0;
}

int bw_round_by_steps(bw24_model *m, bw_round *r) {
    size_t width = (size_t)m->lists[0]->bufs[m->lists[0]->hidden].width, most = 0, longest = 0;
    for (int s = 0; s < r->n_steps; s++)
        if ((size_t)r->steps[s].n > most) most = (size_t)r->steps[s].n;
    for (int i = 0; i < r->n && r->picks; i++)
        if ((size_t)r->picks[i].n_history > longest) longest = (size_t)r->picks[i].n_history;
    size_t floats = most * ((size_t)m->vocab + 2 * width);
    float *mem = malloc(floats * sizeof *mem + (longest + BW24_MAX_DRAFTS) * sizeof(int32_t));
    if (!mem) return bw_fail(BW24_E_MEMORY, "out of memory for a round of %zu rows", most);
    scratch x = {mem, mem + most * (size_t)m->vocab, mem + most * ((size_t)m->vocab + width), (int32_t *)(mem + floats)};
    int rc = 0;
    double began = bw_round_clock(), judged = began;
    for (int s = 0; s < r->n_steps && !rc; s++) {
        judged = bw_round_clock();
        rc = one_step(m, r, s, width, &x);
    }
    free(mem);
    double all = bw_round_clock() - began;
    r->draft_share = all > 0 ? (judged - began) / all : 0.0;
    return rc;
}

/* ---- the plan */
typedef struct plan {
    bw_round r;
    bw24_row *rows;         /* of all steps, one after the other, as the arrays below */
    int32_t *of, *depth, *from;
    int at;                 /* rows placed */
} plan;

static bw_round_step *begin_step(plan *p, bool hidden) {
    bw_round_step *t = &p->r.steps[p->r.n_steps++];
    *t = (bw_round_step){.rows = p->rows + p->at, .of = p->of + p->at, .depth = p->depth + p->at, .from = hidden ? p->from + p->at : NULL};
    return t;
}

static void put_row(plan *p, bw_round_step *t, bw24_row row, int of, int depth, int from) {
    p->rows[p->at] = row;
    p->of[p->at] = of;
    p->depth[p->at] = depth;
    p->from[p->at++] = from;
    t->n++;
}

/* owed rows, then draft by draft the requests that want one more, then the rows to judge */
static void place_steps(plan *p, const bw24_round_request *r, int n, const float *owed) {
    int deepest = 0;
    for (int i = 0; i < n; i++) deepest = r[i].k > deepest ? r[i].k : deepest;
    bw_round_step *t = deepest ? begin_step(p, false) : NULL;
    if (t) t->hidden = owed;
    for (int i = 0; i < n && t; i++) {
        const bw24_drafter *d = r[i].drafter;
        for (int j = 0; j < d->n_owed && r[i].k; j++) put_row(p, t, (bw24_row){d->seq, d->owed[j], j == d->n_owed - 1}, i, 0, 0);
    }
    for (int s = 1; s < deepest; s++) {
        t = begin_step(p, true);
        for (int i = 0, before = 0; i < n; i++) {
            if (r[i].k > s) put_row(p, t, (bw24_row){r[i].drafter->seq, 0, 1}, i, BW_SEEDED(43, 1, s), before);
            before += r[i].k >= s;
        }
    }
    t = begin_step(p, false);
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= r[i].k; j++) put_row(p, t, (bw24_row){r[i].drafter->trunk, j ? 0 : r[i].token, 1}, i, j, 0);
}

/* drafts up to the first missing one; judged rows after them go. Returns the rows that stay */
static int take_results(const bw_round *p, bw24_round_request *r, int n, size_t width, int32_t *tokens) {
    int to = 0;
    for (int i = 0, at = 0; i < n; i++) {
        bw24_drafter *d = r[i].drafter;
        r[i].drafted = 0;
        while (r[i].drafted < r[i].k && p->drafts[i][r[i].drafted] >= 0) r[i].drafted++;
        memcpy(r[i].drafts, p->drafts[i], (size_t)r[i].drafted * sizeof *r[i].drafts);
        d->open = r[i].drafted + 1;
        memmove(tokens + to, tokens + at, (size_t)d->open * sizeof *tokens);
        d->judged = p->hidden + (size_t)at * width;
        to += d->open;
        at += r[i].k + 1;
        if (r[i].k && !d->seq->source) bw_drafter_paid(d, d->n_owed);
    }
    return to;
}

static int check_picks(const bw24_model *m, const bw24_round_request *r, int n, bw24_pick *picks, int64_t *pos) {
    for (int i = 0; i < n; i++) {
        picks[i] = (bw24_pick){.params = r[i].sampler, .history = r[i].n_history ? r[i].history : NULL, .n_history = r[i].n_history};
        BW_TRY(bw_check_pick(&picks[i], m->vocab));
        pos[i] = r[i].drafter->pos;
    }
    return 0;
}

int bw_round_once(bw24_model *m, bw24_round_request *r, int n, bool greedy, const float *owed, int32_t *tokens, float *hidden, double *draft_share) {
    size_t rows = 0, width = (size_t)m->lists[0]->bufs[m->lists[0]->hidden].width;
    for (int i = 0; i < n; i++) rows += (size_t)(r[i].drafter->n_owed + 2 * r[i].k + 1);
    size_t each = sizeof(bw24_pick) + sizeof(int64_t) + BW24_MAX_DRAFTS * sizeof(int32_t);
    uint8_t *mem = malloc((size_t)n * each + rows * (sizeof(bw24_row) + 3 * sizeof(int32_t)));
    if (!mem) return bw_fail(BW24_E_MEMORY, "out of memory for a round of %zu rows", rows);
    bw24_pick *picks = (bw24_pick *)mem;
    int64_t *pos = (int64_t *)(picks + n);
    plan p = {.rows = (bw24_row *)(pos + n)};
    p.of = (int32_t *)(p.rows + rows);
    p.depth = p.of + rows;
    p.from = p.depth + rows;
    p.r = (bw_round){.n = n, .picks = greedy ? NULL : picks, .pos = pos, .drafts = (int32_t(*)[BW24_MAX_DRAFTS])(p.from + rows),
                     .tokens = tokens, .hidden = hidden};
    int rc = check_picks(m, r, n, picks, pos);
    place_steps(&p, r, n, owed);
    if (!rc) rc = bw_run_round(m, &p.r);
    if (!rc) take_results(&p.r, r, n, width, tokens);
    *draft_share = p.r.draft_share;
    free(mem);
    return rc;
}
