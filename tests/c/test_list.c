/* The list's text: what is accepted comes back as it went in, what is wrong is refused with the line, the operand and both values, and
 * damaged text never crashes, whether it is refused or run. Meant for the sanitizers too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bw24.h"

enum { WIDTH = 32, VOCAB = 40, FF = 64, ROUNDS = 20000 };

static int passed, failed;

static void expect(int good, const char *what, const char *found) {
    if (good) { passed++; return; }
    failed++;
    printf("FAIL: %s: %s\n", what, found);
}

static const char *const LIST =
    "BUF x 32\nBUF h 32\nBUF q 32\nBUF k 32\nBUF v 32\nBUF att_want 32\nBUF q_want 32\nBUF x_want 32\nBUF g_want 64\nBUF u_want 64\n"
    "BUF h_want 32\nBUF logits 40\n"
    "KV kv0 heads=2 dim=16 window=0\n"
    "EMBED y=x w=embd scale=1.5 @ test.py:1\n"
    "NORM y=h x=x w=norm eps=1e-05 @ test.py:2\n"
    "LINEAR y=q x=h w=square @ test.py:3\n"
    "LINEAR y=k x=h w=square @ test.py:4\n"
    "LINEAR y=v x=h w=square b=norm @ test.py:5\n"
    "ROPE x=q heads=2 dim=16 rot=16 style=neox base=10000.0 @ test.py:6\n"
    "ROPE x=k heads=2 dim=16 rot=8 style=norm base=10000.0 scale=0.5 @ test.py:7\n"
    "KV_APPEND k=k v=v kv=kv0 @ test.py:8\n"
    "PICK_ROWS y=q_want x=q @ test.py:9\n"
    "PICK_ROWS y=x_want x=x @ test.py:10\n"
    "ATTEND y=att_want q=q_want kv=kv0 heads=2 scale=0.25 @ test.py:11\n"
    "ADD y=x_want a=x_want b=att_want @ test.py:12\n"
    "LINEAR y=g_want x=x_want w=up @ test.py:13\n"
    "LINEAR y=u_want x=x_want w=up @ test.py:14\n"
    "GLU y=g_want g=g_want u=u_want act=silu @ test.py:15\n"
    "LINEAR y=h_want x=g_want w=down @ test.py:16\n"
    "SCALE y=h_want x=h_want c=0.5 @ test.py:17\n"
    "LINEAR y=logits x=h_want w=embd @ test.py:18\n"
    "SOFTCAP y=logits x=logits cap=30.0 @ test.py:19\n";

static float weights[FF * WIDTH];

static bw24_ctx *open_context(const char *backend) {
    bw24_open_params p = {.size = sizeof p, .threads = 1, .backend = backend, .fuse = 1, .repack = 1};
    bw24_ctx *ctx = NULL;
    if (bw24_open(&ctx, &p)) { printf("cannot open: %s\n", bw24_last_error()); exit(2); }
    return ctx;
}

static bw24_model *new_model(bw24_ctx *ctx) {
    bw24_model_params p = {.size = sizeof p, .max_rows = 4, .max_context = 128, .kv_full = "f16", .kv_window = "q8_0"};
    static const struct { const char *name; int64_t cols, rows; } tensors[] = {
        {"embd", WIDTH, VOCAB}, {"square", WIDTH, WIDTH}, {"up", WIDTH, FF}, {"down", FF, WIDTH}, {"norm", WIDTH, 0},
    };
    bw24_model *m = NULL;
    if (bw24_model_new(&m, ctx, &p)) { printf("cannot make a model: %s\n", bw24_last_error()); exit(2); }
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        int64_t ne[2] = {tensors[i].cols, tensors[i].rows ? tensors[i].rows : 1};
        int dims = tensors[i].rows ? 2 : 1;
        uint64_t bytes = (uint64_t)(ne[0] * ne[1]) * sizeof(float);
        if (bw24_tensor_load(m, tensors[i].name, 0, dims, ne, weights, bytes, 1.0f, 0)) { printf("%s\n", bw24_last_error()); exit(2); }
    }
    return m;
}

/* prepares the model and runs two steps; any status is fine, what matters is that nothing breaks */
static int run_model(bw24_model *m) {
    for (int i = 0; i <= 5; i++)
        if (bw24_prepare(m, i)) return -1;
    int vocab = bw24_model_vocab(m), rc = 0;
    float *logits = vocab > 0 && vocab <= 1 << 20 ? calloc((size_t)vocab * 3, sizeof *logits) : NULL;
    bw24_seq *s = NULL;
    if (!logits || bw24_seq_new(&s, m)) { free(logits); return -1; }
    bw24_row rows[3] = {{s, 1, 0}, {s, 2, 1}, {s, 3, 1}};
    rc = bw24_step(m, rows, 3, logits);
    if (!rc) rc = bw24_step(m, rows, 1, logits);
    bw24_seq_free(s);
    free(logits);
    return rc;
}

static void test_round_trip(bw24_ctx *ctx) {
    bw24_model *m = new_model(ctx), *again = new_model(ctx);
    const char *first = "", *second = "";
    int rc = bw24_list_set(m, "trunk", LIST);
    expect(!rc, "the list is accepted", rc ? bw24_last_error() : "");
    expect(!bw24_explain(m, "trunk", 0, &first), "the list is printed", bw24_last_error());
    expect(!bw24_list_set(again, "trunk", first), "the printed form is accepted", bw24_last_error());
    expect(!bw24_explain(again, "trunk", 0, &second) && !strcmp(first, second), "the printed form is stable", second);
    expect(run_model(m) == 0, "the list runs", bw24_last_error());
    bw24_model_free(m);
    bw24_model_free(again);
}

/* LIST with `from` replaced by `to` must be refused with a message that holds `words` */
static void refuse(bw24_ctx *ctx, const char *from, const char *to, const char *words) {
    static char text[8192];
    const char *at = strstr(LIST, from);
    if (!at) { expect(0, "the case is in the list", from); return; }
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - LIST), LIST, to, at + strlen(from));
    bw24_model *m = new_model(ctx);
    int rc = bw24_list_set(m, "trunk", text);
    expect(rc < 0, to, "was accepted");
    if (rc < 0) expect(strstr(bw24_last_error(), words) != NULL && !strchr(bw24_last_error(), '\n'), words, bw24_last_error());
    bw24_model_free(m);
}

static void test_refusals(bw24_ctx *ctx) {
    refuse(ctx, "EMBED", "EMBEDD", "unknown op 'EMBEDD'");
    refuse(ctx, "BUF h 32", "BUF x 32", "declared twice 'x'");
    refuse(ctx, "BUF h 32", "BUF h 0", "found '0'");
    refuse(ctx, "BUF h 32", "BUF h 99999999999999999999", "found '99999999999999999999'");
    refuse(ctx, "w=embd scale", "w=none scale", "'none', which was not loaded");
    refuse(ctx, "y=q x=h w=square", "y=q x=gone w=square", "unknown buffer 'gone'");
    refuse(ctx, "y=q x=h w=square", "y=q w=square", "LINEAR lacks x=");
    refuse(ctx, "y=q x=h w=square", "y=q x=h w=square z=1", "unknown or repeated operand");
    refuse(ctx, "y=q x=h w=square", "y=q x=h w=down", "test.py:3");
    refuse(ctx, "y=q x=h w=square", "y=logits x=h w=square", "test.py:3");
    refuse(ctx, "style=neox", "style=other", "style=other, expected one of neox,norm");
    refuse(ctx, "eps=1e-05", "eps=nan", "found 'nan'");
    refuse(ctx, "eps=1e-05", "eps=1e999", "found '1e999'");
    refuse(ctx, "heads=2 dim=16 rot=16", "heads=3 dim=16 rot=16", "test.py:6");
    refuse(ctx, "rot=16", "rot=15", "test.py:6");
    refuse(ctx, "kv=kv0 @ test.py:8", "kv=kv9 @ test.py:8", "unknown KV cache 'kv9'");
    refuse(ctx, "KV kv0 heads=2 dim=16", "KV kv0 heads=2 dim=4096", "found '4096'");
    refuse(ctx, "q=q_want", "q=q", "test.py:12");
    refuse(ctx, "BUF logits 40", "BUF other 40", "unknown buffer 'logits'");
}

/* ---- damage: a seeded generator, so that a finding repeats */
static uint64_t state = 24;
static uint32_t below(uint32_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((state >> 33) % n);
}

static void damage(char *text, size_t cap) {
    static const char *const words[] = {"0", "-1", "99999999", "1e30", "x=", "y=x", " ", "\n", "=", "@", "KV", "BUF", "kv0", "logits", "window=7", "x_want"};
    for (int i = 0, n = 1 + (int)below(4); i < n; i++) {
        size_t len = strlen(text);
        char *at = text + below((uint32_t)len);
        const char *word = words[below(sizeof words / sizeof *words)];
        size_t w = strlen(word), rest = strlen(at);
        switch (below(5)) {
        case 0: *at = (char)(1 + below(255)); break;
        case 1: memmove(at, at + 1, rest); break;
        case 2: *at = 0; break;
        case 3: if (len + w + 1 < cap) { memmove(at + w, at, rest + 1); memcpy(at, word, w); } break;
        default: if (rest > w) memcpy(at, word, w);
        }
        if (!*text) strcpy(text, "x");
    }
}

static void test_damage(bw24_ctx *ctx) {
    static char text[8192];
    int accepted = 0, ran = 0;
    for (int i = 0; i < ROUNDS; i++) {
        snprintf(text, sizeof text, "%s", LIST);
        damage(text, sizeof text);
        bw24_model *m = new_model(ctx);
        const char *printed = NULL;
        if (!bw24_list_set(m, "trunk", text)) {
            accepted++;
            if (bw24_explain(m, "trunk", 0, &printed)) expect(0, "an accepted list is printed", bw24_last_error());
            ran += run_model(m) == 0;
        } else if (!*bw24_last_error() || strchr(bw24_last_error(), '\n')) {
            expect(0, "a refusal has one line of text", bw24_last_error());
        }
        bw24_model_free(m);
    }
    printf("damaged texts: %d, accepted %d, ran %d\n", ROUNDS, accepted, ran);
    expect(accepted > 0 && accepted < ROUNDS && ran > 0, "damage is neither harmless nor total", "");
}

int main(void) {
    for (int i = 0; i < FF * WIDTH; i++) weights[i] = (float)((i * 37) % 101 - 50) / 256.0f;
    static const char *const backends[] = {"ref", "cpu"};
    for (int b = 0; b < 2; b++) {
        bw24_ctx *ctx = open_context(backends[b]);
        test_round_trip(ctx);
        test_refusals(ctx);
        test_damage(ctx);
        bw24_close(ctx);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
