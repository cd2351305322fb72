/* Lists, plans and sequences through the public ABI and the inside: what the parser refuses and how it says so, printing, fusion, pages.
 * Runs under the sanitizers too, so the hostile texts are also a test of memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "internal.h"


static bw24_ctx *ctx;
static float table[64 * 16], norm[64], matrix[64 * 64];

static bw24_model *model(int64_t context) {
    bw24_model_params p = {.size = sizeof p, .max_rows = 200, .max_context = context, .kv_full = "f32"};
    bw24_model *m = NULL;
    CHECK(bw24_model_new(&m, ctx, &p) == 0);
    CHECK(bw24_tensor_load(m, "emb", 0, 2, (int64_t[]){64, 16}, table, sizeof table, 1.0f, 0) == 0);
    CHECK(bw24_tensor_load(m, "norm", 0, 1, (int64_t[]){64}, norm, sizeof norm, 1.0f, 0) == 0);
    CHECK(bw24_tensor_load(m, "mat", 0, 2, (int64_t[]){64, 64}, matrix, sizeof matrix, 1.0f, 0) == 0);
    return m;
}

static int set(const char *text) {
    bw24_model *m = model(64);
    int rc = bw24_list_set(m, "trunk", text);
    bw24_model_free(m);
    return rc;
}

static void refused(const char *text, int code, const char *words) {
    int rc = set(text);
    checks++;
    if (rc == code && strstr(bw24_last_error(), words)) return;
    failures++;
    printf("list refused with %d '%s', expected %d '%s'\n", rc, rc ? bw24_last_error() : "", code, words);
}

#define HEAD "BUF x 64\nBUF logits 64\nEMBED y=x w=emb\n"
#define TAIL "PICK_ROWS y=logits x=x\n"

static void test_refusals(void) {
    CHECK(set(HEAD TAIL) == 0);
    CHECK(set(HEAD "# a remark\n\n  \t\n" TAIL) == 0);
    refused("", BW24_E_SYNTAX, "no op writes the buffer 'logits'");
    refused(HEAD, BW24_E_SYNTAX, "'logits'");
    refused("BUF x 0\n", BW24_E_SYNTAX, "line 1: expected an integer 1..16777216, found '0'");
    refused("BUF x 99999999999999999999\n", BW24_E_SYNTAX, "expected an integer");
    refused("BUF x 64\nBUF x 64\n", BW24_E_SYNTAX, "line 2: buffer declared twice 'x'");
    refused("BUF x\n", BW24_E_SYNTAX, "expected BUF name width");
    refused("KV c heads=2 dim=0 window=0\n", BW24_E_SYNTAX, "1..1024, found '0'");
    refused("KV c heads=2\n", BW24_E_SYNTAX, "expected KV name");
    refused("FOO y=x\n", BW24_E_SYNTAX, "unknown op 'FOO'");
    refused("BUF x 64\nEMBED y=x\n", BW24_E_SYNTAX, "EMBED lacks w=");
    refused("BUF x 64\nEMBED y=x w=emb w=emb\n", BW24_E_SYNTAX, "unknown or repeated operand");
    refused("BUF x 64\nEMBED y=x w=emb colour=1\n", BW24_E_SYNTAX, "unknown or repeated operand");
    refused("BUF x 64\nEMBED y=x w=none\n", BW24_E_MISSING, "needs tensor 'none'");
    refused("BUF x 64\nEMBED y=z w=emb\n", BW24_E_SYNTAX, "unknown buffer 'z'");
    refused("BUF x 64\nEMBED y=x w=emb scale=nan\n", BW24_E_SYNTAX, "expected a finite number, found 'nan'");
    refused("BUF x 64\nEMBED y=x w=emb scale=1e400\n", BW24_E_SYNTAX, "finite");
    refused("BUF x 63\nEMBED y=x w=emb\n", BW24_E_SHAPE, "columns of the tensor expects 63, found 64");
    refused(HEAD "BUF y 64\nADD y=y a=x b=y\n", BW24_E_SHAPE, "buffer 'y' is read before any op writes it");
    refused(HEAD "NORM y=x x=x eps=1e-5 heads=3\n", BW24_E_SHAPE, "modulo heads");
    refused(HEAD "NORM y=x x=x eps=1e-5 kind=max\n", BW24_E_SYNTAX, "kind=max, expected one of rms,l2");
    refused(HEAD "BUF y 32\nLINEAR y=y x=x w=mat @ some.py:7\n", BW24_E_SHAPE, "(some.py:7): rows of the tensor expects 32, found 64");
    refused(HEAD "ROPE x=x heads=4 dim=16 rot=17 style=neox base=10000\n", BW24_E_SHAPE, "even rotated size");
    refused(HEAD "ROPE x=x heads=4 dim=16 rot=16 style=neox base=0\n", BW24_E_SHAPE, "rope base");
    refused(HEAD "KV_APPEND k=x v=x kv=c\n", BW24_E_SYNTAX, "unknown KV cache 'c'");
    refused("KV c heads=2 dim=16 window=0\n" HEAD "KV_APPEND k=x v=x kv=c\n", BW24_E_SHAPE, "K width expects 32, found 64");
    refused("KV c heads=3 dim=16 window=0\n" HEAD "ATTEND y=x q=x kv=c heads=4 scale=1\n", BW24_E_SHAPE, "modulo expects 0, found 1");
    refused(HEAD TAIL "PICK_ROWS y=x x=logits\n", BW24_E_SHAPE, "rows already picked");
    refused(HEAD TAIL "KV c heads=4 dim=16 window=0\nKV_APPEND k=logits v=logits kv=c\n", BW24_E_SHAPE, "KV_APPEND of picked rows");
    refused(HEAD TAIL "ADD y=x a=x b=logits\n", BW24_E_SHAPE, "holds other rows");
}

/* every prefix of a list, and every byte of it changed, is taken or refused, never worse */
static void test_hostile_texts(void) {
    static const char good[] =
        "BUF x 64\nBUF q 64\nBUF logits 64\nKV c heads=4 dim=16 window=8\nEMBED y=x w=emb\nNORM y=q x=x w=norm eps=1e-5 @ a.py:1\n"
        "LINEAR y=q x=q w=mat\nROPE x=q heads=4 dim=16 rot=16 style=neox base=10000\nKV_APPEND k=q v=q kv=c\n"
        "ATTEND y=q q=q kv=c heads=4 scale=0.25\nADD y=x a=x b=q\nPICK_ROWS y=logits x=x\n";
    char text[sizeof good];
    int taken = 0;
    CHECK(set(good) == 0);
    for (size_t i = 0; i < sizeof good; i++) {
        memcpy(text, good, i);
        text[i] = 0;
        int rc = set(text);
        CHECK(rc == 0 || (rc == BW24_E_SYNTAX || rc == BW24_E_SHAPE || rc == BW24_E_MISSING));
    }
    for (size_t i = 0; i + 1 < sizeof good; i++) {
        for (int k = 0; k < 5; k++) {
            memcpy(text, good, sizeof good);
            text[i] = "\n =\x80" "9"[k];
            taken += set(text) == 0;
        }
    }
    CHECK(taken > 0);
    char *long_line = malloc(5000);
    memset(long_line, 'a', 4999);
    long_line[4999] = 0;
    refused(long_line, BW24_E_SYNTAX, "longer than 1023 bytes");
    memcpy(long_line, "BUF ", 4);
    long_line[900] = 0;
    refused(long_line, BW24_E_SYNTAX, "field too long");
    free(long_line);
}

static bw24_model *prepared(const char *text, int64_t context) {
    bw24_model *m = model(context);
    CHECK(bw24_list_set(m, "trunk", text) == 0);
    for (int i = 0; i <= 3; i++) CHECK(bw24_prepare(m, i) == 0);
    return m;
}

static void test_printing(void) {
    const char *text = NULL, *again = NULL;
    bw24_model *m =
        prepared("BUF x 64\nBUF h 64\nBUF g 64\nBUF logits 64\nEMBED y=x w=emb scale=8\nNORM y=h x=x w=norm eps=1.0000000000000001e-05\n"
                 "LINEAR y=g x=h w=mat\nADD y=x a=x b=g\nPICK_ROWS y=logits x=x\n",
                 64);
    CHECK(bw24_explain(m, "trunk", 0, &text) == 0);
    bw24_model *n = prepared(text, 64);
    CHECK(bw24_explain(n, "trunk", 0, &again) == 0 && !strcmp(text, again));
    CHECK(bw24_explain(n, "trunk", 1, &again) == 0 && strstr(again, "NORM") && strstr(again, "mat"));
    CHECK(bw24_explain(n, "draft", 0, &again) == BW24_E_MISSING);
    CHECK(bw24_explain(n, "trunk", 2, &again) == BW24_E_ARG);
    bw24_model_free(m);
    bw24_model_free(n);
}

static const char cached[] =
    "BUF x 64\nBUF y 64\nBUF logits 64\nKV full heads=4 dim=16 window=0\nKV near heads=4 dim=16 window=8\nEMBED y=x w=emb\n"
    "KV_APPEND k=x v=x kv=full\nKV_APPEND k=x v=x kv=near\nATTEND y=y q=x kv=near heads=4 scale=0.25\n"
    "ATTEND y=x q=y kv=full heads=4 scale=0.25\nPICK_ROWS y=logits x=x\n";

static void append(bw24_model *m, bw24_seq *s, int n) {
    bw24_row rows[200];
    for (int i = 0; i < n; i++) rows[i] = (bw24_row){s, i % 16, 0};
    CHECK(bw24_step(m, rows, n, NULL) == 0);
}

static uint64_t kv_bytes(bw24_model *m) {
    bw24_memory mem = {.size = sizeof mem};
    CHECK(bw24_model_memory(m, &mem) == 0);
    return mem.kv;
}

static void test_pages(void) {
    bw24_model *m = prepared(cached, 4096);
    bw24_seq *a = NULL, *b = NULL;
    int64_t at = -1;
    CHECK(bw24_seq_new(&a, m) == 0 && bw24_seq_pos(a) == 0 && kv_bytes(m) == 0);
    append(m, a, 70);
    uint64_t two = kv_bytes(m);
    CHECK(a->n_pages == 2 && two > 0);
    CHECK(bw24_seq_fork(&b, a) == 0 && kv_bytes(m) == two); /* shared */
    append(m, b, 1);
    CHECK(kv_bytes(m) == two + two / 2);                    /* only the page that is written was copied */
    CHECK(a->data[0][0] == b->data[0][0] && a->data[0][1] != b->data[0][1]);
    CHECK(bw24_seq_truncate(b, 64, &at) == 0 && at == 64 && b->n_pages == 1 && kv_bytes(m) == two);
    CHECK(bw24_seq_truncate(b, 65, &at) == BW24_E_ARG && bw24_seq_pos(b) == 64);
    bw24_seq_free(a);
    CHECK(kv_bytes(m) == two / 2);
    for (int i = 0; i < 10; i++) append(m, b, 200);
    CHECK(b->floor[1] > 1000 && b->data[1][0] == NULL && b->data[0][0] != NULL); /* the window's old pages went, the full ones did not */
    CHECK(bw24_seq_truncate(b, 2050, &at) == 0 && at == 2050);
    CHECK(bw24_seq_truncate(b, 500, &at) == 0 && at == 0 && kv_bytes(m) == 0);
    bw24_seq_free(b);
    bw24_seq_free(NULL);
    bw24_model_free(m);
}

static void test_arguments(void) {
    bw24_model_params p = {.size = sizeof p, .max_rows = 0, .max_context = 64};
    bw24_model *m = NULL;
    bw24_seq *s = NULL;
    CHECK(bw24_model_new(&m, ctx, &p) == BW24_E_ARG);
    p.max_rows = 4;
    p.kv_full = "q3";
    CHECK(bw24_model_new(&m, ctx, &p) == BW24_E_UNSUPPORTED && strstr(bw24_last_error(), "'q3'"));
    m = model(64);
    CHECK(bw24_seq_new(&s, m) == BW24_E_ARG);
    CHECK(bw24_tensor_load(m, "emb", 0, 2, (int64_t[]){64, 16}, table, sizeof table, 1.0f, 0) == BW24_E_ARG);
    CHECK(bw24_tensor_load(m, "short", 0, 2, (int64_t[]){64, 16}, table, sizeof table - 4, 1.0f, 0) == BW24_E_SHAPE);
    CHECK(bw24_tensor_load(m, "huge", 0, 4, (int64_t[]){1 << 20, 1 << 20, 1 << 20, 1}, table, 4, 1.0f, 0) == BW24_E_SHAPE);
    CHECK(bw24_tensor_load(m, "odd", 12, 1, (int64_t[]){300}, table, 4, 1.0f, 0) == BW24_E_SHAPE);
    CHECK(bw24_tensor_load(m, "type", 99, 1, (int64_t[]){64}, table, 4, 1.0f, 0) == BW24_E_UNSUPPORTED);
    CHECK(bw24_prepare(m, 4) == BW24_E_ARG && bw24_prepare(m, 3) == BW24_E_MISSING);
    CHECK(bw24_step(m, NULL, 1, NULL) == BW24_E_ARG);
    bw24_model_free(m);
    bw24_model_free(NULL);
    bw24_close(NULL);
}

int main(void) {
    static const char *const backends[] = {"ref", "cpu"};
    for (int i = 0; i < 64 * 16; i++) table[i] = (float)(i % 97) / 97.0f - 0.5f;
    for (int i = 0; i < 64 * 64; i++) matrix[i] = (float)(i % 89) / 89.0f - 0.5f;
    for (int i = 0; i < 64; i++) norm[i] = 1.0f;
    for (int b = 0; b < 2; b++) {
        bw24_open_params p = {.size = sizeof p, .threads = 2, .backend = backends[b], .fuse = 1, .repack = 1};
        CHECK(bw24_open(&ctx, &p) == 0);
        test_refusals();
        if (b == 0) test_hostile_texts();
        test_printing();
        test_pages();
        test_arguments();
        bw24_close(ctx);
    }
    printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
