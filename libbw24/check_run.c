/* One case of kernel-check: makes the same tiny model on the context under test and on ref, runs the same steps and compares every byte of
 * the logits, with guards round the memory they are written to. Knows no op. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { GUARD = 64 };
static const uint32_t GUARD_BITS = 0x7fa5a5a5u; /* a NaN that no op makes */

uint32_t check_random(check_case *c) {
    c->state = c->state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(c->state >> 32);
}

static float unit(check_case *c) { return (float)((int32_t)(check_random(c) >> 8) - (1 << 23)) * 0x1p-23f; }
static float sign(check_case *c) { return check_random(c) & 1 ? 1.0f : -1.0f; }

static float awkward(check_case *c, int kind) {
    switch (kind) {
    case 1: return 0.0f;
    case 2: return -0.0f;
    case 3: return sign(c) * (float)(check_random(c) % 4096) * 0x1p-149f; /* subnormal */
    case 4: return sign(c) * 0x1p-126f;
    case 5: return sign(c) * 65504.0f;
    case 6: return unit(c) * 0x1p-99f; /* amax about 2^-100, where int8 quantisation flushes */
    case 7: return unit(c) * 30.0f;
    default: return unit(c) + unit(c) + unit(c);
    }
}

void check_values(check_case *c, float *x, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++) {
        int kind = (int)(r % 9);
        for (int64_t i = 0; i < cols; i++) {
            int k = kind < 8 ? kind : (int)(check_random(c) % 8); /* the ninth row mixes them */
            if (kind == 7 && i % 37 != 5) k = 0;                  /* the eighth has outliers */
            x[r * cols + i] = awkward(c, k);
        }
    }
}

static bool tame(const bw_type_info *t, const uint8_t *block, float top) {
    float v[256];
    t->decode(block, v);
    for (int i = 0; i < t->block; i++)
        if (!(fabsf(v[i]) <= top)) return false;
    return true;
}

void check_blocks(check_case *c, const bw_type_info *t, uint8_t *dst, int64_t n_blocks, float top) {
    for (int64_t b = 0; b < n_blocks; b++, dst += t->bytes) {
        memset(dst, 0, (size_t)t->bytes);
        if (check_random(c) % 16 == 0 && tame(t, dst, top)) continue;
        do
            for (int i = 0; i < t->bytes; i++) dst[i] = (uint8_t)(check_random(c) >> 9);
        while (!tame(t, dst, top));
    }
}

void *check_tensor_new(check_case *c, const char *name, const bw_type_info *t, int64_t ne0, int64_t ne1, float scale) {
    if (c->n_tensors == CHECK_TENSORS) return NULL;
    void *data = malloc((size_t)(bw_row_bytes(t, ne0) * ne1));
    if (!data) return NULL;
    check_tensor *x = &c->tensors[c->n_tensors];
    *x = (check_tensor){.type = t, .ne = {ne0, ne1, 1}, .data = data, .scale = scale};
    snprintf(x->name, sizeof x->name, "%s", name);
    c->owned[c->n_tensors++] = data;
    return data;
}

float *check_input(check_case *c, const char *name, int64_t width) {
    char tensor[16];
    snprintf(tensor, sizeof tensor, "in_%s", name);
    float *x = check_tensor_new(c, tensor, bw_type_by_name("F32"), width, CHECK_TOKENS, 1.0f);
    if (!x || check_line(c, "BUF %s %lld", name, (long long)width) || check_line(c, "EMBED y=%s w=%s", name, tensor)) return NULL;
    check_values(c, x, CHECK_TOKENS, width);
    return x;
}

int32_t *check_ids_new(check_case *c, int n) {
    for (int i = 0; i < 2; i++)
        if (!c->ids[i]) return c->ids[i] = calloc((size_t)n, sizeof *c->ids[i]);
    return NULL;
}

void check_free(check_case *c) {
    for (int i = 0; i < 2; i++) free(c->ids[i]);
    for (int i = 0; i < CHECK_TENSORS; i++) free(c->owned[i]);
    free(c->list.s);
}

/* ---- running */
/* f32 words of the result of a wanted row: its logits, or what was drawn from them */
static int32_t result_words(const check_case *c, const bw24_model *m) {
    return c->pick.params ? (int32_t)(sizeof(bw_drawn) / sizeof(float)) : m->vocab;
}

static int one_step(check_case *c, bw24_model *m, const bw24_row *rows, int n, int wanted, float *out) {
    if (!c->pick.params) return bw24_step(m, rows, n, out);
    bw24_pick picks[64];
    bw_drawn drawn[64];
    if (wanted > 64) return bw_fail(BW24_E_ARG, "a case draws at most 64 tokens a step, here %d", wanted);
    for (int i = 0; i < wanted; i++) picks[i] = c->pick;
    int rc = bw_step_drawn(m, rows, n, picks, drawn);
    if (!rc) memcpy(out, drawn, (size_t)wanted * sizeof *drawn);
    return rc;
}

static int make_model(check_case *c, bw24_ctx *ctx, bw24_model **out) {
    int most = 1;
    for (int i = 0; i < c->n_steps; i++) most = c->rows[i] > most ? c->rows[i] : most;
    bw24_model_params p = {.size = sizeof p, .max_rows = most, .max_context = c->start + 4096, .kv_full = c->kv ? c->kv : "f32"};
    bw24_model *m = NULL;
    BW_TRY(bw24_model_new(&m, ctx, &p));
    *out = m;
    for (int i = 0; i < c->n_tensors; i++) {
        const check_tensor *t = &c->tensors[i];
        uint64_t bytes = (uint64_t)(bw_row_bytes(t->type, t->ne[0]) * t->ne[1] * t->ne[2]);
        BW_TRY(bw24_tensor_load(m, t->name, t->type->id, 3, t->ne, t->data, bytes, t->scale, 0));
    }
    BW_TRY(bw24_list_set(m, "trunk", c->list.s));
    for (int i = 0; i <= c->n_tensors; i++) BW_TRY(bw24_prepare(m, i));
    return 0;
}

static int run_steps(check_case *c, bw24_model *m, float *logits, int32_t vocab, int *failed_at) {
    bw24_seq *s = NULL;
    BW_TRY(bw24_seq_new(&s, m));
    s->pos = c->start;
    int rc = 0, token = 0, every = c->want_every ? c->want_every : 1;
    for (int i = 0; i < c->n_steps && !rc; i++) {
        bw24_row *rows = calloc((size_t)c->rows[i], sizeof *rows);
        if (!rows) { rc = bw_fail(BW24_E_MEMORY, "out of memory for %d rows", c->rows[i]); break; }
        int wanted = 0;
        for (int r = 0; r < c->rows[i]; r++, token++) {
            rows[r] = (bw24_row){s, token % CHECK_TOKENS, r % every == 0};
            wanted += rows[r].want;
        }
        rc = one_step(c, m, rows, c->rows[i], wanted, logits);
        free(rows);
        logits += (int64_t)wanted * vocab;
        *failed_at = i;
    }
    bw24_seq_free(s);
    return rc;
}

static int64_t wanted_rows(const check_case *c) {
    int64_t n = 0;
    for (int i = 0; i < c->n_steps; i++) n += c->want_every ? (c->rows[i] + c->want_every - 1) / c->want_every : c->rows[i];
    return n;
}

typedef struct side { bw24_model *m; float *mem; int rc, step; int32_t vocab; } side;

static int run_side(check_case *c, bw24_ctx *ctx, side *s) {
    s->rc = make_model(c, ctx, &s->m);
    if (s->rc) return s->rc;
    s->vocab = result_words(c, s->m);
    size_t n = (size_t)(wanted_rows(c) * s->vocab) + 2 * GUARD;
    s->mem = malloc(n * sizeof *s->mem);
    if (!s->mem) return bw_fail(BW24_E_MEMORY, "out of memory for %zu logits", n);
    for (size_t i = 0; i < n; i++) memcpy(s->mem + i, &GUARD_BITS, 4);
    s->rc = run_steps(c, s->m, s->mem + GUARD, s->vocab, &s->step);
    return 0;
}

static void different(check_case *c, const side *ref, const side *found, int64_t n) {
    uint32_t guard, a, b;
    for (int64_t i = 0; i < n + 2 * GUARD; i++) {
        memcpy(&guard, found->mem + i, 4);
        bool outside = i < GUARD || i >= n + GUARD;
        if (outside && guard != GUARD_BITS) {
            snprintf(c->out->detail, sizeof c->out->detail, "wrote %lld values %s the output",
                     (long long)(i < GUARD ? GUARD - i : i - n - GUARD + 1), i < GUARD ? "before" : "past");
            return;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy(&a, ref->mem + GUARD + i, 4);
        memcpy(&b, found->mem + GUARD + i, 4);
        if (a == b) continue;
        snprintf(c->out->detail, sizeof c->out->detail, "row %lld, value %lld: reference %a, found %a", (long long)(i / ref->vocab),
                 (long long)(i % ref->vocab), (double)ref->mem[GUARD + i], (double)found->mem[GUARD + i]);
        return;
    }
    c->out->status = 1;
}

/* the error of an approximate class, over the values that both sides wrote */
static void near(check_case *c, const side *ref, const side *found, int64_t n) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double a = ref->mem[GUARD + i], b = found->mem[GUARD + i];
        error += (b - a) * (b - a);
        size += a * a;
    }
    c->out->status = error <= c->nmse * size; /* false for NaN */
    snprintf(c->out->detail, sizeof c->out->detail, "error %.3g of %.3g allowed (|found - reference|^2 / |reference|^2)", error / size, c->nmse);
}

static void judge(check_case *c, const side *ref, const side *found) {
    if (ref->rc != c->status || found->rc != c->status) {
        const side *wrong = ref->rc != c->status ? ref : found;
        snprintf(c->out->detail, sizeof c->out->detail, "%s: status %d, expected %d: %.90s", wrong == ref ? "reference" : "found",
                 wrong->rc, c->status, wrong->rc ? bw24_last_error() : "Inf or NaN went through");
        return;
    }
    if (c->status) { c->out->status = 1; return; }
    if (c->nmse > 0) return near(c, ref, found, wanted_rows(c) * ref->vocab);
    different(c, ref, found, wanted_rows(c) * ref->vocab);
}

int check_compare(check_case *c) {
    bw24_ctx *plain = NULL, tested = *c->ctx;
    tested.repack = c->ctx->repack && !c->raw;
    tested.fast_prefill = c->nmse > 0;
    bw24_open_params p = {.size = sizeof p, .backend = "ref", .fuse = 1, .repack = 1};
    BW_TRY(bw24_open(&plain, &p));
    side ref = {0}, found = {0};
    int rc = run_side(c, plain, &ref);
    if (!rc) rc = run_side(c, &tested, &found);
    if (!rc) judge(c, &ref, &found);
    else if (!ref.rc && rc == BW24_E_UNSUPPORTED && c->ctx->backend != &bw_backend_cpu) /* backend cpu has every op */
        check_skip(c, "the backend refuses it: %.120s", bw24_last_error());
    else snprintf(c->out->detail, sizeof c->out->detail, "%s: %.140s", ref.rc ? "reference" : "found", bw24_last_error());
    bw24_model_free(ref.m);
    bw24_model_free(found.m);
    free(ref.mem);
    free(found.mem);
    bw24_close(plain);
    return rc == BW24_E_MEMORY ? rc : 0;
}
