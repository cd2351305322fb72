/* Inside of kernel-check: one case is a tiny model (a list, its tensors) that is run by the backend under test and by ref. */
#ifndef BW24_CHECK_H
#define BW24_CHECK_H

#include "internal.h"

enum { CHECK_TENSORS = 8, CHECK_STEPS = 4, CHECK_TOKENS = 36 };

typedef struct check_tensor { char name[16]; const bw_type_info *type; int64_t ne[3]; const void *data; float scale; } check_tensor;

typedef struct check_case {
    bw24_ctx *ctx;          /* under test */
    bw24_model *model;      /* whose shapes are wanted too, or NULL */
    bw24_check_result *out;
    bw_text list;
    int n_tensors;
    check_tensor tensors[CHECK_TENSORS];
    void *owned[CHECK_TENSORS];
    int32_t *ids[2];
    const char *kv;         /* KV formats "K/V", NULL: f32 */
    int n_steps, rows[CHECK_STEPS]; /* rows of consecutive steps of one sequence, tokens 0, 1, ... repeating after CHECK_TOKENS */
    int want_every;         /* logits of every n-th row of a step; 0 counts as 1 */
    int64_t start;          /* position of the first row; nonzero only where the list has no KV */
    bool raw;               /* weights in the file's layout even where the context packs them */
    bw24_sampler sampler;   /* of the pick */
    bw24_pick pick;         /* params set: tokens are drawn with it, and the drawn, not the logits, are compared */
    double nmse;            /* 0: every bit must agree; else the class `fast` runs, and this bounds |found - ref|^2 / |ref|^2 over all logits */
    int status;             /* what bw24_step must return on both sides, 0 or BW24_E_NUMERIC */
    uint64_t state;         /* of check_random */
} check_case;

/* ---- check_run.c */
uint32_t check_random(check_case *c);
/* awkward and ordinary rows: zeros, -0, subnormals, 2^-126, 65504, values about 2^-100 and random ones; by row index */
void check_values(check_case *c, float *x, int64_t rows, int64_t cols);
/* random blocks, every value finite and below `top`; some are all zero bytes */
void check_blocks(check_case *c, const bw_type_info *t, uint8_t *dst, int64_t n_blocks, float top);
/* adds a tensor [ne1][ne0] to the case; its memory, or NULL (out of memory). The case owns it. */
void *check_tensor_new(check_case *c, const char *name, const bw_type_info *t, int64_t ne0, int64_t ne1, float scale);
/* n words for ids or values; the case owns them. NULL: out of memory */
int32_t *check_ids_new(check_case *c, int n);
/* the table of a case's inputs: BUF name, tensor, EMBED; [CHECK_TOKENS][width] of check_values */
float *check_input(check_case *c, const char *name, int64_t width);
/* fills c->out: 1 equal, 0 different. Returns 0, or BW24_E_MEMORY. */
int check_compare(check_case *c);
void check_free(check_case *c);

/* ---- generators: count cases, or set one up and say what it is in out->name. A case that cannot exist sets status 2 and out->detail. */
typedef struct check_generator {
    int (*count)(const check_case *c);
    int (*make)(check_case *c, int i);
} check_generator;
extern const check_generator bw_check_rows, bw_check_linear, bw_check_attend, bw_check_fast, bw_check_moe, bw_check_fold, bw_check_sample,
    bw_check_heads, bw_check_model;

int check_skip(check_case *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void check_name(check_case *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* appends to the list; ends it with PICK_ROWS of buffer `y` into logits */
int check_line(check_case *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int check_end(check_case *c, const char *y, int64_t width);

#endif
