/* kernel-check: tokens drawn by the backend against those of bw24_sample, and what the filters left, as a count and an exact mass. */
#include "check.h"

enum { BIASES = 5, HISTORY = 40 };

typedef struct draw_case { float t; int k; float p, m, rep, presence, freq; bool bias; const char *what; } draw_case;
static const draw_case draws[] = {
    {0, 0, 1, 0, 1, 0, 0, false, "argmax"},
    {0, 0, 1, 0, 1.3f, 0.5f, 0.25f, true, "argmax, penalties and bias"},
    {1, 0, 1, 0, 1, 0, 0, false, "temperature 1"},
    {0.7f, 40, 1, 0, 1, 0, 0, false, "top_k 40"},
    {1, 0, 0.9f, 0, 1, 0, 0, false, "top_p 0.9"},
    {1, 0, 0, 0, 1, 0, 0, false, "top_p 0"},
    {1, 0, 1, 0.05f, 1, 0, 0, false, "min_p 0.05"},
    {0.8f, 20, 0.95f, 0.02f, 1.1f, 0, 0, false, "all filters, repetition"},
    {1.5f, 500, 0.999f, 1e-4f, 0.9f, -0.5f, 0.1f, true, "all filters, penalties and bias"},
    {100, 3000, 1, 0, 1, 0, 0, false, "temperature 100, top_k 3000"},
    {100, 0, 0.99f, 0, 1, 0, 0, false, "temperature 100, top_p 0.99"},
    {1e-6f, 5, 0.5f, 0.5f, 1, 0, 0, false, "temperature 1e-6"},
    {30, 0, 1, 1, 1, 0, 0, false, "min_p 1"},
};
static const int vocabs[] = {1, 31, 2049, 50001};
enum { N_DRAWS = sizeof draws / sizeof *draws, N_VOCABS = sizeof vocabs / sizeof *vocabs };

static int count(const check_case *c) {
    (void)c;
    return N_DRAWS * N_VOCABS;
}

static int make(check_case *c, int i) {
    const draw_case *d = &draws[i % N_DRAWS];
    int vocab = vocabs[i / N_DRAWS];
    check_name(c, "sampling, %s; %d tokens", d->what, vocab);
    if (!check_input(c, "x", vocab)) return bw_fail(BW24_E_MEMORY, "out of memory for a case");
    BW_TRY(check_end(c, "x", vocab));
    int32_t *ids = check_ids_new(c, HISTORY + BIASES);
    float *values = (float *)check_ids_new(c, BIASES);
    if (!ids || !values) return bw_fail(BW24_E_MEMORY, "out of memory for a case");
    for (int k = 0; k < HISTORY + BIASES; k++) ids[k] = (int32_t)(check_random(c) % (uint32_t)(vocab < 20 ? vocab : k % 2 ? vocab : 20));
    ids[HISTORY + 1] = ids[HISTORY]; /* an id with two biases, one of which the history holds */
    ids[HISTORY + 2] = ids[0];
    for (int k = 0; k < BIASES; k++) values[k] = (float)((int)(check_random(c) % 4001) - 2000) * 0.01f;
    c->sampler = (bw24_sampler){.size = sizeof c->sampler, .temperature = d->t, .top_k = d->k, .top_p = d->p, .min_p = d->m,
                                .repetition_penalty = d->rep, .presence_penalty = d->presence, .frequency_penalty = d->freq,
                                .seed = 24 + (uint64_t)i, .n_bias = d->bias ? BIASES : 0, .bias_ids = ids + HISTORY, .bias_values = values};
    c->pick = (bw24_pick){&c->sampler, ids, HISTORY, 0};
    c->n_steps = 3;
    c->rows[0] = 9;
    c->rows[1] = 1;
    c->rows[2] = 33;
    c->want_every = 1;
    return 0;
}

const check_generator bw_check_sample = {count, make};
