/* What backend cuda says and does when things go wrong on a card: NaN in a weight, no room, an address that does not exist. A clear error each time, no
 * hang, and the process can end. Without CUDA in the build, or without a card, it checks that opening says so. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "internal.h"


static bw24_ctx *ctx;
static float table[64 * 16], matrix[64 * 64];

static const char LIST[] =
    "BUF x 64\nBUF q 64\nBUF u 64\nBUF y 64\nBUF logits 64\nSTATE s 192\nKV c heads=2 dim=32 window=0\nEMBED y=x w=emb\nCONV y=u x=x w=taps st=s\nLINEAR y=q x=u w=mat\n"
    "KV_APPEND k=u v=x kv=c\nATTEND y=y q=q kv=c heads=2 scale=0.2\nPICK_ROWS y=logits x=y\n";
static float taps[64 * 4];

static int open_cuda(void) {
    bw24_open_params p = {.size = sizeof p, .backend = "cuda", .fuse = 1, .repack = 1};
    return bw24_open(&ctx, &p);
}

static bw24_model *model(const char *list) {
    bw24_model_params p = {.size = sizeof p, .max_rows = 8, .max_context = 256, .kv_full = "f16"};
    bw24_model *m = NULL;
    CHECK(bw24_model_new(&m, ctx, &p) == 0);
    CHECK(bw24_tensor_load(m, "emb", 0, 2, (int64_t[]){64, 16}, table, sizeof table, 1.0f, 0) == 0);
    CHECK(bw24_tensor_load(m, "mat", 0, 2, (int64_t[]){64, 64}, matrix, sizeof matrix, 1.0f, 0) == 0);
    CHECK(bw24_tensor_load(m, "taps", 0, 2, (int64_t[]){4, 64}, taps, sizeof taps, 1.0f, 0) == 0);
    int rc = bw24_list_set(m, "trunk", list);
    for (int i = 0; i <= 3 && !rc; i++) rc = bw24_prepare(m, i);
    CHECK(rc == 0);
    return m;
}

static int step(bw24_seq *s, int token, float *logits) {
    bw24_row row = {s, token, 1};
    return bw24_step(s->model, &row, 1, logits);
}

/* a row that meets NaN names its op, leaves the sequence where it was and spoils nothing */
static void test_nan(void) {
    float good[64], after[64];
    bw24_seq *s = NULL;
    table[3 * 64 + 5] = NAN;
    bw24_model *m = model(LIST);
    CHECK(bw24_seq_new(&s, m) == 0);
    CHECK(step(s, 1, good) == 0);
    CHECK(step(s, 3, after) == BW24_E_NUMERIC);
    CHECK(strstr(bw24_last_error(), "Inf or NaN") && strstr(bw24_last_error(), "op "));
    CHECK(bw24_seq_pos(s) == 1);
    CHECK(bw24_seq_truncate(s, 0, NULL) == 0);
    CHECK(step(s, 1, after) == 0);
    CHECK(!memcmp(good, after, sizeof good));
    bw24_seq_free(s);
    bw24_model_free(m);
    table[3 * 64 + 5] = 0.5f;
}

/* more than any card holds: refused with the sizes, and the context goes on */
static void test_memory(void) {
    bw24_model_params p = {.size = sizeof p, .max_rows = 4096, .max_context = 256};
    bw24_model *m = NULL;
    char list[512];
    CHECK(bw24_model_new(&m, ctx, &p) == 0);
    CHECK(bw24_tensor_load(m, "emb", 0, 2, (int64_t[]){64, 16}, table, sizeof table, 1.0f, 0) == 0);
    snprintf(list, sizeof list, "BUF x 64\nBUF logits 64\nBUF a 16777216\nBUF b 16777216\nEMBED y=x w=emb\nPICK_ROWS y=logits x=x\n");
    CHECK(bw24_list_set(m, "trunk", list) == 0);
    CHECK(bw24_prepare(m, 0) == 0);
    CHECK(bw24_prepare(m, 1) == BW24_E_MEMORY);
    CHECK(strstr(bw24_last_error(), "out of memory"));
    bw24_model_free(m);
    test_nan();
}

/* keys sent to an address that is none: the step fails, so does everything after it, and all of it can be freed */
static void test_device_fault(void) {
    float logits[64];
    bw24_seq *s = NULL, *other = NULL;
    bw24_model *m = model(LIST);
    CHECK(bw24_seq_new(&s, m) == 0);
    CHECK(step(s, 1, logits) == 0);
    uint8_t *own = s->data[0][0];
    s->data[0][0] = (uint8_t *)64;
    CHECK(step(s, 2, logits) == BW24_E_DEVICE);
    CHECK(strstr(bw24_last_error(), "CUDA device failed"));
    s->data[0][0] = own;
    CHECK(step(s, 2, logits) == BW24_E_DEVICE);
    CHECK(strstr(bw24_last_error(), "failed earlier"));
    CHECK(bw24_seq_new(&other, m) == 0);
    CHECK(step(other, 1, logits) == BW24_E_DEVICE || step(other, 1, logits) == BW24_E_MEMORY);
    bw24_seq_free(other);
    bw24_seq_free(s);
    bw24_model_free(m);
}

int main(void) {
    for (int i = 0; i < 64 * 16; i++) table[i] = (float)(i % 37) * 0.125f - 2.0f;
    for (int i = 0; i < 64 * 64; i++) matrix[i] = (float)(i % 29) * 0.03125f - 0.4f;
    for (int i = 0; i < 64 * 4; i++) taps[i] = (float)(i % 7) * 0.25f - 0.5f;
    int rc = open_cuda();
    if (rc) {
        CHECK(rc == BW24_E_DEVICE || rc == BW24_E_UNSUPPORTED || rc == BW24_E_ARG);
        CHECK(*bw24_last_error());
        printf("no card: %s\n", bw24_last_error());
    } else {
        test_nan();
        test_memory();
        test_device_fault(); /* last: the context is lost */
        bw24_close(ctx);
    }
    printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
