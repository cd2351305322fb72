/* The samplers under the sanitizers: random and awkward distributions, whole and cut vocabularies. What tokens they give is
 * tests/test_sampling.py's and tests/test_distributions.py's business; here every answer must be one that can be, and every wrong call an error. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bw24.h"
#include "check.h"

enum { MOST = 400, CASES = 20000 };

static uint64_t state = 88172645463325252ull;
static uint32_t below(uint32_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 11) % n);
}

/* [n] logits in memory of exactly that size, so that a read past the end is seen; the largest penalty takes none of them to infinity */
static float *logits_of(int n) {
    static const float sizes[] = {0.0f, 0.1f, 3.0f, 50.0f, 1e30f, 5e37f};
    float *l = malloc((size_t)n * sizeof *l), size = sizes[below(6)];
    for (int i = 0; i < n; i++) l[i] = ((float)below(2001) / 1000.0f - 1.0f) * size;
    return l;
}

static bw24_sampler sampler_of(void) {
    static const float temperatures[] = {0.0f, 1e-30f, 0.3f, 1.0f, 100.0f};
    bw24_sampler p = {.size = sizeof p, .temperature = temperatures[below(5)], .top_p = 1.0f, .repetition_penalty = 1.0f};
    if (below(3) == 0) p.top_k = (int32_t)below(12);
    if (below(3) == 0) p.top_p = (float)below(101) / 100.0f;
    if (below(3) == 0) p.min_p = (float)below(101) / 100.0f;
    if (below(3) == 0) p.repetition_penalty = 0.5f + (float)below(30) / 10.0f;
    if (below(3) == 0) p.frequency_penalty = (float)below(40) / 10.0f - 2.0f;
    p.seed = (uint64_t)below(1u << 31) << 33;
    return p;
}

/* rows of a cut head: different tokens of the vocabulary, now and then none */
static int32_t *ids_of(int rows, int vocab) {
    int32_t *ids = malloc((size_t)rows * sizeof *ids), *all = malloc((size_t)vocab * sizeof *all);
    for (int i = 0; i < vocab; i++) all[i] = i;
    for (int r = 0; r < rows; r++) {
        int at = r + (int)below((uint32_t)(vocab - r)), t = all[at];
        all[at] = all[r];
        all[r] = t;
        ids[r] = r && below(9) == 0 ? -1 : t;
    }
    free(all);
    return ids;
}

static void random_case(int number) {
    int vocab = 1 + (int)below(MOST), rows = 1 + (int)below((uint32_t)vocab), n_history = (int)below(20);
    float *target = logits_of(vocab), *draft = logits_of(rows);
    int32_t *ids = ids_of(rows, vocab), history[20], x = -7, y = -7, z = -7;
    bw24_sampler p = sampler_of();
    for (int i = 0; i < n_history; i++) history[i] = (int32_t)below((uint32_t)vocab);
    uint64_t at = below(1u << 30);
    int rc = bw24_sample(target, vocab, &p, history, n_history, at, NULL, &z, NULL);
    CHECK(rc == 0 && z >= 0 && z < vocab, "case %d: sample: %d, token %d of %d: %s", number, rc, z, vocab, bw24_last_error());
    rc = bw24_sample_draft(draft, rows, ids, vocab, &p, history, n_history, at, NULL, &x);
    int found = 0;
    for (int r = 0; r < rows; r++) found |= ids[r] == x;
    CHECK(rc == 0 && x >= 0 && found, "case %d: draft: %d, token %d: %s", number, rc, x, bw24_last_error());
    rc = bw24_sample_reject(target, vocab, draft, rows, ids, &p, history, n_history, at, NULL, x, &y);
    CHECK(rc == 0 && y >= 0 && y < vocab, "case %d: reject: %d, token %d: %s", number, rc, y, bw24_last_error());
    if (p.temperature == 0.0f) CHECK(y == z, "case %d: greedy: rejection gives %d, the sampler %d", number, y, z);
    rc = bw24_sample_draft(target, vocab, NULL, vocab, &p, history, n_history, at, NULL, &x);
    if (!rc) rc = bw24_sample_reject(target, vocab, target, vocab, NULL, &p, history, n_history, at, NULL, x, &y);
    CHECK(rc == 0 && x == y, "case %d: a draft of the target's own distribution was refused: %d, %d and %d", number, rc, x, y);
    free(target);
    free(draft);
    free(ids);
}

static void wrong_calls(void) {
    float l[3] = {0.0f, 1.0f, 2.0f}, bad[3] = {0.0f, INFINITY, 1.0f};
    int32_t ids[3] = {0, 1, 2}, outside[3] = {0, 1, 3}, none[3] = {-1, -1, -1}, out, past[1] = {3};
    bw24_sampler p = {.size = sizeof p, .temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f}, old = p, penal = p;
    old.size = 8;
    penal.presence_penalty = 1.0f;
    CHECK(bw24_sample_draft(l, 3, outside, 3, &p, NULL, 0, 0, NULL, &out) == BW24_E_ARG, "an id outside the vocabulary");
    CHECK(bw24_sample_draft(l, 3, none, 3, &p, NULL, 0, 0, NULL, &out) == BW24_E_ARG, "a head without tokens");
    CHECK(bw24_sample_draft(l, 3, NULL, 4, &p, NULL, 0, 0, NULL, &out) == BW24_E_ARG, "logits of a part without ids");
    CHECK(bw24_sample_draft(l, 0, ids, 3, &p, NULL, 0, 0, NULL, &out) == BW24_E_ARG, "no logits");
    CHECK(bw24_sample_draft(l, 3, ids, 3, &old, NULL, 0, 0, NULL, &out) == BW24_E_ARG, "params of another size");
    CHECK(bw24_sample_draft(l, 3, ids, 3, &p, NULL, 1, 0, NULL, &out) == BW24_E_ARG, "a history that is not there");
    CHECK(bw24_sample_draft(l, 3, ids, 3, &penal, past, 1, 0, NULL, &out) == BW24_E_ARG, "a history outside the vocabulary");
    CHECK(bw24_sample_draft(bad, 3, ids, 3, &p, NULL, 0, 0, NULL, &out) == BW24_E_NUMERIC, "an infinite logit");
    CHECK(bw24_sample_draft(l, 3, ids, 3, &p, NULL, 0, 0, NULL, NULL) == BW24_E_ARG, "no room for the token");
    CHECK(bw24_sample_reject(l, 3, l, 3, ids, &p, NULL, 0, 0, NULL, 3, &out) == BW24_E_ARG, "a draft outside the vocabulary");
    CHECK(bw24_sample_reject(l, 3, l, 3, ids, &p, NULL, 0, 0, NULL, -1, &out) == BW24_E_ARG, "a negative draft");
    CHECK(bw24_sample_reject(l, 3, NULL, 3, ids, &p, NULL, 0, 0, NULL, 0, &out) == BW24_E_ARG, "no logits of the draft");
    CHECK(bw24_sample_reject(bad, 3, l, 3, ids, &p, NULL, 0, 0, NULL, 0, &out) == BW24_E_NUMERIC, "an infinite logit of the target");
}

int main(void) {
    for (int i = 0; i < CASES; i++) random_case(i);
    wrong_calls();
    printf("test_sample: %d cases, %d failures\n", CASES, failures);
    return failures != 0;
}
