/* Rejection sampling (docs/numerics.md §9): drafts are drawn from the draft's distribution q, judged against the target's p. Owns the decision and
 * the draw after a refusal; the masses are sample.c's. All decisions compare exact integers:
 *
 *   1. p and q are the masses wp[id], wq[id] of the survivors, of sums Wp and Wq: below 2^59 for 2^18 tokens
 *   2. draft x ~ q by the race of stream DRAFT; accepted iff floor(U * wq[x] Wp / 2^128) < wp[x] Wq, U 128 random bits of stream ACCEPT: with
 *      probability min(1, p/q) to 2^-128
 *   3. else the first id, ascending, at which the sum of max(0, wp Wq - wq Wp) passes floor(U' * R / 2^128), R the whole sum, U' of RESIDUAL
 *
 * Sums of products stay below 2^118. */
#include <stdlib.h>

#include "canon.h"
#include "fault.h"
#include "sample.h"

typedef unsigned __int128 u128;

/* floor(a * b / 2^128) */
static u128 high_product(u128 a, u128 b) {
    uint64_t a0 = (uint64_t)a, a1 = (uint64_t)(a >> 64), b0 = (uint64_t)b, b1 = (uint64_t)(b >> 64);
    u128 low = (u128)a0 * b0, x = (u128)a1 * b0 + (low >> 64), y = (u128)a0 * b1 + (uint64_t)x;
    return (u128)a1 * b1 + (x >> 64) + (y >> 64);
}

/* uniform over 0..n-1, to 2^-128 */
static u128 below(u128 n, uint64_t seed, uint64_t position, enum bw_stream stream) {
    uint64_t id = (uint64_t)stream << 32;
    return high_product((u128)bw_draw(seed, position, id) << 64 | bw_draw(seed, position, id | 1), n);
}

static uint64_t sum(const bw_mass *c, int32_t m) {
    uint64_t total = 0;
    for (int32_t i = 0; i < m; i++) total += c[i].w;
    return total;
}

static int by_id(const void *a, const void *b) {
    int32_t x = ((const bw_mass *)a)->id, y = ((const bw_mass *)b)->id;
    return x < y ? -1 : x > y;
}

static uint64_t mass_of(const bw_mass *c, int32_t m, int32_t id) {
    for (int32_t i = 0; i < m; i++) {
        if (c[i].id == id) return c[i].w;
    }
    return 0;
}

/* p and q in order of ids: the token of the residual at which its sum passes `at`; at -1: *total only */
static int32_t residual(const bw_mass *p, int32_t np, uint64_t wp, const bw_mass *q, int32_t nq, uint64_t wq, u128 at, u128 *total) {
    u128 passed = 0;
    int32_t j = 0;
    for (int32_t i = 0; i < np; i++) {
        while (j < nq && q[j].id < p[i].id) j++;
        u128 mine = (u128)p[i].w * wq, its = j < nq && q[j].id == p[i].id ? (u128)q[j].w * wp : 0;
        its = BW_SEEDED(33, 0, its);
        if (mine > its) passed += mine - its;
        if (!total && passed > at) return p[i].id;
    }
    if (total) *total = passed;
    return -1;
}

static int judge(bw_mass *p, int32_t np, bw_mass *q, int32_t nq, const bw24_sampler *s, uint64_t position, int32_t draft, int32_t *token) {
    uint64_t wp = sum(p, np), wq = sum(q, nq), mine = mass_of(p, np, draft), its = mass_of(q, nq, draft);
    if (!its) return bw_fail(BW24_E_ARG, "bw24_sample_reject: draft token %d has no mass in the draft's distribution", draft);
    u128 have = (u128)mine * BW_SEEDED(30, wp, wq), need = (u128)its * wp;
    if (have >= need || below(need, s->seed, position, BW_SEEDED(31, BW_STREAM_RESIDUAL, BW_STREAM_ACCEPT)) < have) {
        *token = draft;
        return 0;
    }
    qsort(p, (size_t)np, sizeof *p, by_id);
    qsort(q, (size_t)nq, sizeof *q, by_id);
    u128 total;
    residual(p, np, wp, q, nq, wq, 0, &total);
    *token = residual(p, np, wp, q, nq, wq, below(total, s->seed, position, BW_STREAM_RESIDUAL), NULL);
    return 0;
}

int bw24_sample_draft(const float *logits, int32_t n_rows, const int32_t *ids, int32_t n_vocab, const bw24_sampler *p, const int32_t *history,
                      int32_t n_history, uint64_t position, const uint32_t *mask, int32_t *token) {
    bw_dist_in in = {logits, n_rows, ids, n_vocab, p, history, n_history, mask};
    BW_TRY(bw_dist_check(&in, "bw24_sample_draft"));
    if (!token) return bw_fail(BW24_E_ARG, "bw24_sample_draft: NULL argument");
    bw_fpenv e = bw_fpenv_enter();
    bw_mass *q;
    int32_t m;
    int rc = bw_dist_make(&in, &q, &m);
    if (!rc) *token = bw_dist_race(q, m, p->seed, position, BW_STREAM_DRAFT);
    if (!rc) free(q);
    bw_fpenv_leave(e);
    return rc;
}

int bw24_sample_reject(const float *logits, int32_t n_vocab, const float *draft_logits, int32_t n_rows, const int32_t *ids, const bw24_sampler *s,
                       const int32_t *history, int32_t n_history, uint64_t position, const uint32_t *mask, int32_t draft, int32_t *token) {
    bw_dist_in p = {logits, n_vocab, NULL, n_vocab, s, history, n_history, mask};
    bw_dist_in q = {draft_logits, n_rows, ids, n_vocab, s, history, BW_SEEDED(32, 0, n_history), mask};
    BW_TRY(bw_dist_check(&p, "bw24_sample_reject"));
    BW_TRY(bw_dist_check(&q, "bw24_sample_reject"));
    if (!token) return bw_fail(BW24_E_ARG, "bw24_sample_reject: NULL argument");
    bw_fpenv e = bw_fpenv_enter();
    bw_mass *cp = NULL, *cq = NULL;
    int32_t np, nq;
    int rc = bw_dist_make(&p, &cp, &np);
    if (!rc) rc = bw_dist_make(&q, &cq, &nq);
    if (!rc) rc = judge(cp, np, cq, nq, s, position, draft, token);
    free(cp);
    free(cq);
    bw_fpenv_leave(e);
    return rc;
}
