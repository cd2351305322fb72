/* Sampling (docs/numerics.md §9): the exponential race over exact integer weights. Owns bias, penalties, filters and the draw;
 * knows no model and no sequence. A pure function of its arguments, the same on every device.
 *
 *   1. l[id] = logit + bias; then for ids in the history, count c:  l = l > 0 ? l / r : l * r;  l = l - (presence + frequency * c)
 *   2. temperature 0: the largest l, ties to the lowest id
 *   3. w[id] = trunc(exp2((l - lmax) * (log2 e / T)) * 2^40): 64-bit integers, so every sum below is exact
 *   4. filters keep a prefix of the order (l descending, id ascending): top_k its first k; top_p the shortest prefix whose mass reaches
 *      ceil(p * total); min_p those with w >= p * w_max. All three look at the same order; the shortest prefix wins.
 *   5. the survivor with the least E(seed, position, id) / w, ties to the lowest id */
#include <stdlib.h>
#include <string.h>

#include "canon.h"
#include "fault.h"
#include "internal.h"

typedef struct cand { float l; int32_t id; uint64_t w; } cand;

static int check_sampler(const bw24_sampler *p, const float *logits, int32_t n) {
    if (!logits || !p || p->size != sizeof *p || n < 1) return bw_fail(BW24_E_ARG, "bw24_sample: NULL argument, no logits, or params of size %u", p ? p->size : 0);
    if (!(p->temperature >= 0 && p->temperature <= 100) || (p->temperature > 0 && p->temperature < 1e-30f))
        return bw_fail(BW24_E_ARG, "temperature=%g is outside 0..100", (double)p->temperature);
    if (p->top_k < 0) return bw_fail(BW24_E_ARG, "top_k=%d is negative", p->top_k);
    if (!(p->top_p >= 0 && p->top_p <= 1)) return bw_fail(BW24_E_ARG, "top_p=%g is outside 0..1", (double)p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1)) return bw_fail(BW24_E_ARG, "min_p=%g is outside 0..1", (double)p->min_p);
    if (!(p->repetition_penalty > 0 && p->repetition_penalty <= 100)) return bw_fail(BW24_E_ARG, "repetition_penalty=%g is outside 0..100", (double)p->repetition_penalty);
    if (p->n_bias < 0 || (p->n_bias && (!p->bias_ids || !p->bias_values))) return bw_fail(BW24_E_ARG, "logit bias: %d entries without ids or values", p->n_bias);
    return 0;
}

/* logits after bias and penalties, in a copy */
static int adjusted(float *l, int32_t n, const bw24_sampler *p, const int32_t *history, int32_t n_history) {
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (p->bias_ids[i] < 0 || p->bias_ids[i] >= n) return bw_fail(BW24_E_ARG, "logit bias: token %d is outside 0..%d", p->bias_ids[i], n - 1);
        l[p->bias_ids[i]] = l[p->bias_ids[i]] + p->bias_values[i];
    }
    bool on = p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
    if (!on || !n_history) return 0;
    int32_t *count = calloc((size_t)n, sizeof *count);
    if (!count) return bw_fail(BW24_E_MEMORY, "out of memory for %d counts", n);
    int rc = 0;
    for (int32_t i = 0; i < n_history && !rc; i++) {
        if (history[i] < 0 || history[i] >= n) rc = bw_fail(BW24_E_ARG, "history: token %d is outside 0..%d", history[i], n - 1);
        else count[history[i]]++;
    }
    for (int32_t i = 0; i < n && !rc; i++) {
        if (!count[i]) continue;
        l[i] = l[i] > 0.0f ? l[i] / p->repetition_penalty : l[i] * p->repetition_penalty;
        l[i] = l[i] - fmaf(p->frequency_penalty, (float)count[i], p->presence_penalty);
    }
    free(count);
    return rc;
}

static bool allowed(const uint32_t *mask, int32_t id) { return !mask || (mask[id >> 5] >> (id & 31) & 1); }

static int before(const void *a, const void *b) {
    const cand *x = a, *y = b;
    if (x->l != y->l) return x->l > y->l ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* how many of the ordered candidates survive the filters */
static int32_t survivors(const cand *c, int32_t n, const bw24_sampler *p) {
    int32_t keep = n;
    if (p->top_k && p->top_k < keep) keep = p->top_k;
    if (p->min_p > 0) {
        double least = (double)p->min_p * (double)c[0].w;
        int32_t i = 1;
        while (i < keep && (double)c[i].w >= least) i++;
        keep = i;
    }
    if (p->top_p < 1) {
        uint64_t total = 0, mass = 0;
        for (int32_t i = 0; i < n; i++) total += c[i].w;
        double need = ceil((double)p->top_p * (double)total);
        int32_t i = 0;
        do mass += c[i++].w;
        while (i < keep && (double)mass < need);
        keep = i;
    }
    return keep;
}

static int32_t race(const cand *c, int32_t n, uint64_t seed, uint64_t position) {
    int32_t best = -1;
    double least = 0;
    for (int32_t i = 0; i < n; i++) {
        if (!c[i].w) continue;
        double key = bw_race(seed, BW_SEEDED(16, position & ~1ull, position), (uint64_t)c[i].id) / (double)c[i].w;
        if (best < 0 || key < least || (key == least && c[i].id < best)) {
            best = c[i].id;
            least = key;
        }
    }
    return best;
}

static int draw(const float *l, int32_t n, const bw24_sampler *p, uint64_t position, const uint32_t *mask, int32_t *token) {
    int32_t best = -1, m = 0;
    for (int32_t i = 0; i < n; i++) {
        if (!(l[i] - l[i] == 0)) return bw_fail(BW24_E_NUMERIC, "logit of token %d is Inf or NaN", i);
        if (allowed(mask, i) && (best < 0 || l[i] > l[best])) best = i;
    }
    if (best < 0) return bw_fail(BW24_E_ARG, "bw24_sample: the mask allows no token");
    *token = best;
    if (p->temperature == 0.0f) return 0;
    cand *c = malloc((size_t)n * sizeof *c);
    if (!c) return bw_fail(BW24_E_MEMORY, "out of memory for %d candidates", n);
    float k = 1.44269504f / p->temperature;
    for (int32_t i = 0; i < n; i++) {
        if (!allowed(mask, i)) continue;
        uint64_t w = (uint64_t)(bw_exp2((l[i] - l[best]) * k) * 0x1p40f);
        if (w) c[m++] = (cand){l[i], i, w};
    }
    if (p->top_k || p->top_p < 1 || p->min_p > 0) {
        qsort(c, (size_t)m, sizeof *c, before);
        m = survivors(c, m, p);
    }
    *token = race(c, m, p->seed, position);
    free(c);
    return 0;
}

/* ln of the token's share of the whole distribution at temperature 1, before filters */
static float log_probability(const float *l, int32_t n, int32_t token) {
    float top = l[0];
    for (int32_t i = 1; i < n; i++) top = l[i] > top ? l[i] : top;
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum = sum + (double)bw_exp(l[i] - top);
    return (float)((double)(l[token] - top) - bw_log_f64(sum));
}

int bw24_sample(const float *logits, int32_t n, const bw24_sampler *p, const int32_t *history, int32_t n_history, uint64_t position,
                const uint32_t *mask, int32_t *token, float *logprob) {
    BW_TRY(check_sampler(p, logits, n));
    if (!token || n_history < 0 || (n_history && !history)) return bw_fail(BW24_E_ARG, "bw24_sample: NULL argument");
    float *l = malloc((size_t)n * sizeof *l);
    if (!l) return bw_fail(BW24_E_MEMORY, "out of memory for %d logits", n);
    bw_fpenv e = bw_fpenv_enter();
    memcpy(l, logits, (size_t)n * sizeof *l);
    int rc = adjusted(l, n, p, history, n_history);
    if (!rc) rc = draw(l, n, p, position, mask, token);
    if (!rc && logprob) *logprob = log_probability(logits, n, *token);
    bw_fpenv_leave(e);
    free(l);
    return rc;
}
