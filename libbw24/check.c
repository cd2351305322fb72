/* kernel-check: every op of the backend under test against ref, byte for byte. Owns the numbering of cases; what they are stands in
 * check_ops.c (row ops, LINEAR, ATTEND), check_moe.c (ROUTE, EXPERTS), check_fold.c (CONV, DELTA), check_heads.c (latent attention), check_sample.c (drawn tokens)
 * and check_model.c (the shapes of a loaded model), how one is run in check_run.c. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static const check_generator *const generators[] = {&bw_check_rows, &bw_check_linear, &bw_check_attend, &bw_check_fast, &bw_check_moe, &bw_check_fold,
                                                   &bw_check_sample, &bw_check_heads, &bw_check_model};
enum { N_GENERATORS = sizeof generators / sizeof *generators };

int check_skip(check_case *c, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->out->detail, sizeof c->out->detail, fmt, ap);
    va_end(ap);
    c->out->status = 2;
    return 0;
}

void check_name(check_case *c, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(c->out->name, sizeof c->out->name, fmt, ap);
    va_end(ap);
    if (n >= 0 && n < (int)sizeof c->out->name)
        snprintf(c->out->name + n, sizeof c->out->name - (size_t)n, "; %s %s", c->ctx->backend->name, c->ctx->isa_name);
}

int check_line(check_case *c, const char *fmt, ...) {
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    return bw_textf(&c->list, "%s\n", line);
}

int check_end(check_case *c, const char *y, int64_t width) {
    BW_TRY(check_line(c, "BUF logits %lld", (long long)width));
    return check_line(c, "PICK_ROWS y=logits x=%s", y);
}

int bw24_check(bw24_ctx *ctx, bw24_model *model, int32_t index, bw24_check_result *out) {
    if (!ctx || !out || out->size != sizeof *out)
        return bw_fail(BW24_E_ARG, "bw24_check: NULL argument, or a result of size %u", out ? out->size : 0);
    if (model && !model->prepared) return bw_fail(BW24_E_ARG, "bw24_check: the model is not prepared");
    check_case c = {.ctx = ctx, .model = model, .out = out, .state = 1 + (uint64_t)(uint32_t)index};
    int g = 0, i = index, total = 0;
    for (int k = 0; k < N_GENERATORS; k++) total += generators[k]->count(&c);
    if (index == -1) return total;
    if (index < 0 || index >= total) return bw_fail(BW24_E_ARG, "bw24_check: case %d is outside 0..%d", index, total - 1);
    while (i >= generators[g]->count(&c)) i -= generators[g++]->count(&c);
    memset(out->name, 0, sizeof out->name);
    memset(out->detail, 0, sizeof out->detail);
    out->status = 0;
    bw_fpenv e = bw_fpenv_enter();
    int rc = generators[g]->make(&c, i);
    if (!rc && out->status != 2 && ctx->backend == &bw_backend_ref) check_skip(&c, "the backend under test is the reference itself");
    if (!rc && out->status != 2) rc = check_compare(&c);
    bw_fpenv_leave(e);
    check_free(&c);
    return rc;
}
