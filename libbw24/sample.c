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
#include "sample.h"

static int check_params(const bw24_sampler *p, const char *who) {
    if (!p || p->size != sizeof *p) return bw_fail(BW24_E_ARG, "%s: no params, or params of size %u", who, p ? p->size : 0);
    if (!(p->temperature >= 0 && p->temperature <= 100) || (p->temperature > 0 && p->temperature < 1e-30f))
        return bw_fail(BW24_E_ARG, "temperature=%g is outside 0..100", (double)p->temperature);
    if (p->top_k < 0) return bw_fail(BW24_E_ARG, "top_k=%d is negative", p->top_k);
    if (!(p->top_p >= 0 && p->top_p <= 1)) return bw_fail(BW24_E_ARG, "top_p=%g is outside 0..1", (double)p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1)) return bw_fail(BW24_E_ARG, "min_p=%g is outside 0..1", (double)p->min_p);
    if (!(p->repetition_penalty > 0 && p->repetition_penalty <= 100)) return bw_fail(BW24_E_ARG, "repetition_penalty=%g is outside 0..100", (double)p->repetition_penalty);
    if (p->n_bias < 0 || (p->n_bias && (!p->bias_ids || !p->bias_values))) return bw_fail(BW24_E_ARG, "logit bias: %d entries without ids or values", p->n_bias);
    return 0;
}

int bw_dist_check(const bw_dist_in *in, const char *who) {
    BW_TRY(check_params(in->p, who));
    if (!in->logits || in->n < 1 || in->n_history < 0 || (in->n_history && !in->history))
        return bw_fail(BW24_E_ARG, "%s: NULL argument, or no logits", who);
    if (!in->ids && in->n != in->n_vocab)
        return bw_fail(BW24_E_ARG, "%s: %d logits of %d tokens without their ids", who, in->n, in->n_vocab);
    for (int32_t r = 0; in->ids && r < in->n; r++) {
        if (in->ids[r] < -1 || in->ids[r] >= in->n_vocab)
            return bw_fail(BW24_E_ARG, "%s: row %d stands for token %d, outside 0..%d", who, r, in->ids[r], in->n_vocab - 1);
    }
    return 0;
}

/* the row of each token, -1 where a cut vocabulary lacks it; NULL ids: no table is needed */
static int row_table(const bw_dist_in *in, int32_t **out) {
    *out = NULL;
    if (!in->ids) return 0;
    int32_t *row = malloc((size_t)in->n_vocab * sizeof *row);
    if (!row) return bw_fail(BW24_E_MEMORY, "out of memory for %d rows", in->n_vocab);
    memset(row, 0xff, (size_t)in->n_vocab * sizeof *row);
    for (int32_t r = 0; r < in->n; r++) {
        if (in->ids[r] >= 0) row[in->ids[r]] = r;
    }
    *out = row;
    return 0;
}

static int add_bias(const bw_dist_in *in, const int32_t *row, float *l) {
    const bw24_sampler *p = in->p;
    for (int32_t i = 0; i < p->n_bias; i++) {
        int32_t id = p->bias_ids[i];
        if (id < 0 || id >= in->n_vocab) return bw_fail(BW24_E_ARG, "logit bias: token %d is outside 0..%d", id, in->n_vocab - 1);
        int32_t r = row ? row[id] : id;
        if (r >= 0) l[r] = l[r] + p->bias_values[i];
    }
    return 0;
}

static int add_penalties(const bw_dist_in *in, const int32_t *row, float *l) {
    const bw24_sampler *p = in->p;
    int32_t *count = calloc((size_t)in->n, sizeof *count);
    if (!count) return bw_fail(BW24_E_MEMORY, "out of memory for %d counts", in->n);
    int rc = 0;
    for (int32_t i = 0; i < in->n_history && !rc; i++) {
        int32_t id = in->history[i];
        if (id < 0 || id >= in->n_vocab) {
            rc = bw_fail(BW24_E_ARG, "history: token %d is outside 0..%d", id, in->n_vocab - 1);
            break;
        }
        int32_t r = row ? row[id] : id;
        if (r >= 0) count[r]++;
    }
    for (int32_t i = 0; i < in->n && !rc; i++) {
        if (!count[i]) continue;
        l[i] = l[i] > 0.0f ? l[i] / p->repetition_penalty : l[i] * p->repetition_penalty;
        l[i] = l[i] - fmaf(p->frequency_penalty, (float)count[i], p->presence_penalty);
    }
    free(count);
    return rc;
}

static bool penalised(const bw24_sampler *p) {
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

/* *out: logits after bias and penalties, NULL where there are none, so that a draw for each token of a reply copies nothing */
static int adjusted(const bw_dist_in *in, float **out) {
    const bw24_sampler *p = in->p;
    bool penalties = in->n_history && penalised(p);
    *out = NULL;
    if (!p->n_bias && !penalties) return 0;
    float *l = malloc((size_t)in->n * sizeof *l);
    if (!l) return bw_fail(BW24_E_MEMORY, "out of memory for %d logits", in->n);
    memcpy(l, in->logits, (size_t)in->n * sizeof *l);
    int32_t *row = NULL;
    int rc = row_table(in, &row);
    if (!rc) rc = add_bias(in, row, l);
    if (!rc && penalties) rc = add_penalties(in, row, l);
    free(row);
    if (rc) free(l);
    else *out = l;
    return rc;
}

static bool allowed(const uint32_t *mask, int32_t id) { return id >= 0 && (!mask || (mask[id >> 5] >> (id & 31) & 1)); }

static int before(const void *a, const void *b) {
    const bw_mass *x = a, *y = b;
    if (x->l != y->l) return x->l > y->l ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* how many of the first n ordered candidates survive the filters; total: the mass of all candidates */
static int32_t survivors(const bw_mass *c, int32_t n, uint64_t total, const bw24_sampler *p) {
    int32_t keep = n;
    if (p->top_k && p->top_k < keep) keep = p->top_k;
    if (p->min_p > 0) {
        double least = (double)p->min_p * (double)c[0].w;
        int32_t i = 1;
        while (i < keep && (double)c[i].w >= least) i++;
        keep = i;
    }
    if (p->top_p < 1) {
        uint64_t mass = 0;
        double need = ceil((double)p->top_p * (double)total);
        int32_t i = 0;
        do mass += c[i++].w;
        while (i < keep && (double)mass < need);
        keep = i;
    }
    return keep;
}

/* Few logarithms are taken: with E = -ln u >= 1 - u, a candidate for which 1 - u alone is above the least key so far times w cannot win. The margin is
 * far above what rounding takes from either side. */
int32_t bw_dist_race(const bw_mass *c, int32_t m, uint64_t seed, uint64_t position, enum bw_stream stream) {
    int32_t best = -1;
    double least = 0, bound = 0;
    const uint64_t at = BW_SEEDED(16, position & ~1ull, position);
    for (int32_t i = 0; i < BW_SEEDED(34, m - (m > 1), m); i++) {
        if (!c[i].w) continue;
        uint64_t id = (uint64_t)c[i].id | (uint64_t)stream << 32;
        if (best >= 0 && (double)(~bw_draw(seed, at, id) >> 12) * 0x1p-52 > bound * (double)c[i].w) continue;
        double key = bw_race(seed, at, id) / (double)c[i].w;
        if (best < 0 || key < least || (key == least && c[i].id < best)) {
            best = c[i].id;
            least = key;
            bound = key * (1.0 + 0x1p-20);
        }
    }
    return best;
}

enum { LANES = 32 }; /* ids of one word of a mask */

/* look where every id is allowed */
static void look_at_all(const float *l, float *top, float *odd) {
    for (int j = 0; j < LANES; j++) {
        top[j] = l[j] > top[j] ? l[j] : top[j];
        odd[j] = odd[j] + (l[j] - l[j]);
    }
}

/* top: the largest of up to LANES logits whose bit is set, in lanes; odd stays 0 while all are finite. Elementwise, so that vectors serve. */
static void look(const float *l, int n, uint32_t bits, float *top, float *odd) {
    for (int j = 0; j < n; j++) {
        float x = bits >> j & 1 ? l[j] : -INFINITY;
        top[j] = x > top[j] ? x : top[j];
        odd[j] = odd[j] + (l[j] - l[j]);
    }
}

/* the row of the largest logit of whole vocabularies, the lowest of equals, -1 where the mask allows none; every logit is looked at */
static int largest(const bw_dist_in *in, const float *l, int32_t *best) {
    float top[LANES], odd[LANES] = {0}, sum = 0, high = -INFINITY;
    for (int j = 0; j < LANES; j++) top[j] = -INFINITY;
    for (int32_t i = 0; i + LANES <= in->n; i += LANES) {
        if (in->mask) look(l + i, LANES, in->mask[i / LANES], top, odd);
        else look_at_all(l + i, top, odd);
    }
    int32_t rest = in->n % LANES, from = in->n - rest;
    if (rest) look(l + from, rest, in->mask ? in->mask[from / LANES] : ~0u, top, odd);
    for (int j = 0; j < LANES; j++) { sum = sum + odd[j]; high = top[j] > high ? top[j] : high; }
    for (int32_t i = 0; i < in->n && sum != 0; i++)
        if (!(l[i] - l[i] == 0)) return bw_fail(BW24_E_NUMERIC, "logit of token %d is Inf or NaN", i);
    *best = -1;
    for (int32_t i = 0; i < in->n && *best < 0 && high > -INFINITY; i++)
        if (l[i] == high && allowed(in->mask, i)) *best = i;
    return 0;
}

/* the same where rows stand for the tokens of in->ids */
static int largest_of(const bw_dist_in *in, const float *l, int32_t *best, int32_t *best_id) {
    *best = -1;
    for (int32_t i = 0; i < in->n; i++) {
        int32_t id = in->ids[i];
        if (id >= 0 && !(l[i] - l[i] == 0)) return bw_fail(BW24_E_NUMERIC, "logit of token %d is Inf or NaN", id);
        if (allowed(in->mask, id) && (*best < 0 || l[i] > l[*best] || (l[i] == l[*best] && id < *best_id))) *best = i, *best_id = id;
    }
    return 0;
}

/* w as a float whose whole part it is, for all n; elementwise, so that vectors serve. The w of rows that stand for no token mean nothing. */
static void weigh(const float *l, int32_t n, float top, float k, float *w) {
    for (int32_t i = 0; i < n; i++) w[i] = bw_exp2((l[i] - top) * k) * 0x1p40f;
}

/* Candidates in classes by their distance from the largest logit, FINE to an octave of mass: all of a class stand in order before those of the next,
 * as each operation of `class_of` keeps the order of logits. So a filter's end lies in the first class that satisfies it. */
enum { FINE = 6, CLASSES = 256, NEAR = 16 * FINE };
static int class_of(float l, float top, float k) {
    float x = (top - l) * k * (float)FINE;
    return x < (float)(CLASSES - 1) ? (int)x : CLASSES - 1;
}

typedef struct classes { int32_t n[CLASSES]; uint64_t mass[CLASSES], least[CLASSES], total; } classes;

/* the last class that the filters can reach, -1 where it is not among the first n_classes */
static int reach(const classes *h, const bw24_sampler *p, int n_classes) {
    double need = ceil((double)p->top_p * (double)h->total), least = (double)p->min_p * 0x1p40;
    int64_t n = 0;
    uint64_t mass = 0;
    for (int b = 0; b < n_classes; b++) {
        n += h->n[b];
        mass += h->mass[b];
        if (p->top_k && n >= p->top_k) return b;
        if (p->top_p < 1 && (double)mass >= need) return b;
        if (p->min_p > 0 && h->n[b] && (double)h->least[b] < least) return b;
    }
    return n_classes < CLASSES ? -1 : CLASSES - 1;
}

static int32_t id_of(const bw_dist_in *in, int32_t row) { return in->ids ? in->ids[row] : row; }

/* a w that no candidate of the first n classes is below: an octave of margin for a power of two that is off by 2e-7 */
static float floor_of(int n) { return n < CLASSES ? bw_exp2((float)(39 - n / FINE)) * 0.5f : 1.0f; }

/* candidates of classes 0 .. last, in the order of rows */
static int32_t gather(const bw_dist_in *in, const float *l, const float *w, float top, float k, int last, bw_mass *c) {
    int32_t m = 0;
    float least = floor_of(last + 1);
    for (int32_t i = 0; i < in->n; i++) {
        if (!(w[i] >= least) || w[i] < 1.0f) continue;
        if (!allowed(in->mask, id_of(in, i)) || (last < CLASSES && class_of(l[i], top, k) > last)) continue;
        c[m++] = (bw_mass){l[i], id_of(in, i), (uint64_t)w[i]};
    }
    return m;
}

/* the first n_classes classes, and the mass of all candidates */
static void classify(const bw_dist_in *in, const float *l, const float *w, float top, float k, int n_classes, classes *h) {
    float least = floor_of(n_classes);
    uint64_t total = 0;
    *h = (classes){0};
    for (int32_t i = 0; i < in->n; i++) {
        if (!(w[i] >= 1.0f) || !allowed(in->mask, id_of(in, i))) continue;
        uint64_t mass = (uint64_t)w[i];
        total += mass;
        if (w[i] < least) continue; /* surely of none: nearly all */
        int b = class_of(l[i], top, k);
        if (!h->n[b]++ || mass < h->least[b]) h->least[b] = mass;
        h->mass[b] += mass;
    }
    h->total = total;
}

/* what the filters leave, in order: only as many candidates are put in order as they can reach */
static int32_t filtered(const bw_dist_in *in, const float *l, const float *w, float top, float k, bw_mass *c) {
    classes h;
    classify(in, l, w, top, k, NEAR, &h);
    int last = reach(&h, in->p, NEAR);
    if (last < 0) {
        classify(in, l, w, top, k, CLASSES, &h);
        last = reach(&h, in->p, CLASSES);
    }
    int32_t m = gather(in, l, w, top, k, last, c);
    qsort(c, (size_t)m, sizeof *c, before);
    return survivors(c, m, h.total, in->p);
}

/* masses of the adjusted logits l, then the filters; c and w have room for in->n, of temperature 0 c for one */
static int masses(const bw_dist_in *in, const float *l, bw_mass *c, float *w, int32_t *count) {
    const bw24_sampler *p = in->p;
    int32_t best = -1, best_id = 0;
    if (in->ids) BW_TRY(largest_of(in, l, &best, &best_id));
    else BW_TRY(largest(in, l, &best));
    if (best < 0)
        return bw_fail(BW24_E_ARG, in->mask ? "bw24_sample: the mask allows no token" : "bw24_sample: no logit stands for a token");
    if (p->temperature == 0.0f) {
        c[0] = (bw_mass){l[best], in->ids ? best_id : best, 1ull << 40};
        *count = 1;
        return 0;
    }
    float k = 1.44269504f / p->temperature;
    weigh(l, in->n, l[best], k, w);
    bool filters = p->top_k || p->top_p < 1 || p->min_p > 0;
    *count = filters ? filtered(in, l, w, l[best], k, c) : gather(in, l, w, l[best], k, CLASSES, c);
    return 0;
}

int bw_dist_make(const bw_dist_in *in, bw_mass **out, int32_t *m) {
    float *l;
    BW_TRY(adjusted(in, &l));
    size_t n = in->p->temperature == 0.0f ? 1 : (size_t)in->n;
    bw_mass *c = malloc(n * (sizeof *c + sizeof(float)));
    int rc = c ? masses(in, l ? l : in->logits, c, (float *)(c + n), m) : bw_fail(BW24_E_MEMORY, "out of memory for %d logits", in->n);
    free(l);
    if (rc) free(c);
    *out = rc ? NULL : c;
    return rc;
}

/* ln of the token's share of the whole distribution at temperature 1, before filters */
static float log_probability(const float *l, int32_t n, float chosen) {
    float top = l[0];
    for (int32_t i = 1; i < n; i++) top = l[i] > top ? l[i] : top;
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum = sum + (double)bw_exp(l[i] - top);
    return (float)((double)(chosen - top) - bw_log_f64(sum));
}

int bw_sample(const float *logits, int32_t n, const int32_t *ids, int32_t vocab, const bw24_sampler *p, const int32_t *history,
              int32_t n_history, uint64_t position, const uint32_t *mask, int32_t *token, float *logprob) {
    bw_dist_in in = {logits, n, ids, vocab, p, history, n_history, mask};
    BW_TRY(bw_dist_check(&in, "bw24_sample"));
    if (!token || (logprob && ids))
        return bw_fail(BW24_E_ARG, "bw24_sample: NULL argument, or a log probability of a part of the vocabulary");
    bw_fpenv e = bw_fpenv_enter();
    bw_mass *c;
    int32_t m;
    int rc = bw_dist_make(&in, &c, &m);
    if (!rc) {
        *token = bw_dist_race(c, m, p->seed, position, BW_STREAM_TOKEN);
        if (logprob) *logprob = log_probability(logits, n, logits[*token]);
        free(c);
    }
    bw_fpenv_leave(e);
    return rc;
}

int bw_check_pick(const bw24_pick *p, int32_t n) {
    BW_TRY(check_params(p->params, "bw24_step_sample"));
    if (p->n_history < 0 || (p->n_history && !p->history)) return bw_fail(BW24_E_ARG, "bw24_step_sample: a history of %d ids", p->n_history);
    for (int32_t i = 0; i < p->n_history && penalised(p->params); i++)
        if (p->history[i] < 0 || p->history[i] >= n) return bw_fail(BW24_E_ARG, "history: token %d is outside 0..%d", p->history[i], n - 1);
    for (int32_t i = 0; i < p->params->n_bias; i++)
        if (p->params->bias_ids[i] < 0 || p->params->bias_ids[i] >= n)
            return bw_fail(BW24_E_ARG, "logit bias: token %d is outside 0..%d", p->params->bias_ids[i], n - 1);
    return 0;
}

int bw_draw_row(const float *logits, int32_t n, const bw24_pick *p, uint64_t position, bw_drawn *out) {
    bw_dist_in in = {logits, n, NULL, n, p->params, p->history, p->n_history, NULL};
    bw_mass *c;
    int32_t m;
    BW_TRY(bw_dist_make(&in, &c, &m));
    *out = (bw_drawn){bw_dist_race(c, m, p->params->seed, position, BW_STREAM_TOKEN), m, 0};
    for (int32_t i = 0; i < m; i++) out->mass += c[i].w;
    free(c);
    return 0;
}

int bw24_sample(const float *logits, int32_t n, const bw24_sampler *p, const int32_t *history, int32_t n_history, uint64_t position,
                const uint32_t *mask, int32_t *token, float *logprob) {
    return bw_sample(logits, n, NULL, n, p, history, n_history, position, mask, token, logprob);
}

int bw24_sample_ids(const float *logits, int32_t n, const int32_t *ids, int32_t n_vocab, const bw24_sampler *p, const int32_t *history,
                    int32_t n_history, uint64_t position, int32_t *token) {
    return bw_sample(logits, n, ids, n_vocab, p, history, n_history, position, NULL, token, NULL);
}
