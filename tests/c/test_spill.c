/* Experts read from files, with reads that fail on purpose: short, interrupted, refused, slow, broken, a second drive that dies. Every step gives the
 * bits of the model in memory or an error that names the file. Also types that differ from expert to expert, and experts that are not there. */
#define _GNU_SOURCE /* O_DIRECT, mkstemp */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "internal.h"
#include "spill.h"

enum { WIDTH = 256, FF = 256, EXPERTS = 6, TOP = 2, LAYERS = 2, VOCAB = 16, STEPS = 12, GAP = 96 };

static bw24_ctx *ctx;
static float table[VOCAB * WIDTH], router[LAYERS][EXPERTS * WIDTH], bias[EXPERTS];
static char path[2][64];
static uint8_t *image;
static size_t image_bytes;

static uint64_t state = 7;
static uint32_t bits(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33);
}
static float uniform(void) { return (float)(bits() >> 8) * 0x1p-23f - 1.0f; }

/* ---- the file: for each type, layer and matrix all experts, at offsets that no drive likes */
static const char *const types[] = {"Q8_0", "Q4_K", "Q2_K", "F16"}; /* packed, packed, used as it lies, float */
enum { TYPES = 4 };
static size_t place[TYPES][LAYERS][3];

static size_t part_bytes(int t) { return (size_t)bw_row_bytes(bw_type_by_name(types[t]), WIDTH) * FF; }

static void make_file(void) {
    for (int t = 0; t < TYPES; t++)
        for (int l = 0; l < LAYERS; l++)
            for (int m = 0; m < 3; m++) {
                place[t][l][m] = image_bytes + GAP;
                image_bytes += GAP + EXPERTS * part_bytes(t);
            }
    image = calloc(1, image_bytes + 77);
    float *row = malloc(WIDTH * sizeof *row);
    for (int t = 0; t < TYPES; t++) {
        const bw_type_info *info = bw_type_by_name(types[t]);
        for (int i = 0; i < LAYERS * 3 * EXPERTS * FF; i++) {
            for (int c = 0; c < WIDTH; c++) row[c] = uniform() * 0.1f;
            uint8_t *to = image + place[t][i / (3 * EXPERTS * FF)][i / (EXPERTS * FF) % 3] + (size_t)(i % (EXPERTS * FF)) * (size_t)bw_row_bytes(info, WIDTH);
            if (info->encode) info->encode(row, to, WIDTH);
            else for (int64_t b = 0; b < bw_row_bytes(info, WIDTH); b++) to[b] = (uint8_t)(b % 84 < 80 ? bits() & 0x55 : b % 2 ? 0x1c : 0);
        }
    }
    free(row);
    for (int f = 0; f < 2; f++) {
        snprintf(path[f], sizeof path[f], "./bw24-spill-%d-XXXXXX", f);
        int fd = mkstemp(path[f]);
        if (fd < 0 || write(fd, image, image_bytes) != (ssize_t)image_bytes || close(fd)) exit(2);
    }
}

/* ---- reads that fail */
enum mode { PLAIN, SHORT, INTERRUPTED, ONCE, ALWAYS, REFUSED, ENDS, SLOW, SECOND_DIES, HANGS };
static _Atomic int mode, calls;
static ino_t second;

static ssize_t faulty(int fd, void *buf, size_t n, off_t at) {
    int call = mode == PLAIN ? 0 : ++calls;
    struct stat st;
    if (mode == SHORT && n > 4096) n = 4096;
    if (mode == INTERRUPTED && call % 3 == 0) { errno = EINTR; return -1; }
    if (mode == ALWAYS || (mode == ONCE && call == 5)) { errno = EIO; return -1; }
    if (mode == REFUSED && fcntl(fd, F_GETFL) & O_DIRECT) { errno = EINVAL; return -1; }
    if (mode == ENDS && call > 3) return 0;
    if (mode == SLOW) usleep((unsigned)call * 7919u % 900u);
    if (mode == SECOND_DIES && !fstat(fd, &st) && st.st_ino == second) { errno = ENXIO; return -1; }
    while (mode == HANGS) usleep(1000);
    return pread(fd, buf, n, at);
}

/* ---- models */
/* type of expert e's matrices; -1: the file lacks it */
typedef int (*kind_fn)(int e);
static int all_of_0(int e) { (void)e; return 0; }
static int all_of_1(int e) { (void)e; return 1; }
static int all_of_2(int e) { (void)e; return 2; }
static int all_of_3(int e) { (void)e; return 3; }
static int mixed(int e) { return e % TYPES; }
static int pruned(int e) { return e % 2 ? -1 : 1; }

static void add_experts(bw24_model *m, int layer, kind_fn kind, bool spilled) {
    static const char *const names[] = {"g", "u", "d"};
    char name[16];
    for (int k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "%s%d", names[k], layer);
        int64_t ne[3] = {WIDTH, FF, EXPERTS};
        if (!spilled) {
            CHECK(bw24_tensor_load(m, name, bw_type_by_name(types[kind(0)])->id, 3, ne, image + place[kind(0)][layer][k], EXPERTS * part_bytes(kind(0)), 1.0f, 0) == 0);
            continue;
        }
        bw24_place at[EXPERTS];
        for (int e = 0; e < EXPERTS; e++) {
            int t = kind(e) < 0 ? 0 : kind(e);
            at[e] = (bw24_place){kind(e) < 0 ? -1 : 0, bw_type_by_name(types[t])->id, place[t][layer][k] + (size_t)e * part_bytes(t)};
        }
        CHECK(bw24_spill_tensor(m, name, 3, ne, at, EXPERTS, 1.0f) == 0);
    }
}

static bw24_model *model(kind_fn kind, const bw24_spill_params *spill, bool mirror) {
    bw24_model_params p = {.size = sizeof p, .max_rows = 40, .max_context = 400, .kv_full = "f32"};
    bw24_model *m = NULL;
    char list[2048];
    int n = 0;
    CHECK(bw24_model_new(&m, ctx, &p) == 0);
    if (spill) CHECK(bw24_spill_open(m, spill) == 0 && bw24_spill_file(m, path[0], mirror ? path[1] : NULL) == 0);
    CHECK(bw24_tensor_load(m, "emb", 0, 2, (int64_t[]){WIDTH, VOCAB}, table, sizeof table, 1.0f, 0) == 0);
    CHECK(bw24_tensor_load(m, "bias", 0, 1, (int64_t[]){EXPERTS}, bias, sizeof bias, 1.0f, 0) == 0);
    n += snprintf(list + n, sizeof list - (size_t)n, "BUF x %d\nBUF y %d\nBUF l %d\nBUF r %d\nBUF logits %d\nEMBED y=x w=emb\n", WIDTH, WIDTH, EXPERTS, 2 * TOP, WIDTH);
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        CHECK(bw24_tensor_load(m, name, 0, 2, (int64_t[]){WIDTH, EXPERTS}, router[i], sizeof router[i], 1.0f, 0) == 0);
        add_experts(m, i, kind, spill != NULL);
        n += snprintf(list + n, sizeof list - (size_t)n, "LINEAR y=l x=x w=w%d\nROUTE y=r x=l b=bias top=%d kind=sigmoid\n"
                      "EXPERTS y=y x=x r=r g=g%d u=u%d d=d%d act=silu\nADD y=x a=x b=y\n", i, TOP, i, i, i);
    }
    snprintf(list + n, sizeof list - (size_t)n, "PICK_ROWS y=logits x=x\n");
    CHECK(bw24_list_set(m, "trunk", list) == 0);
    for (int i = 0; i <= m->n_tensors; i++) CHECK(bw24_prepare(m, i) == 0);
    return m;
}

/* a wide step, then single rows; out: [STEPS + 1][WIDTH]. Returns the first error */
static int run(bw24_model *m, float *out, int64_t *pos) {
    bw24_seq *s;
    bw24_row rows[33];
    CHECK(bw24_seq_new(&s, m) == 0);
    for (int i = 0; i < 33; i++) rows[i] = (bw24_row){s, i * 5 % VOCAB, i == 32};
    int rc = bw24_step(m, rows, 33, out);
    for (int i = 0; i < STEPS && !rc; i++) {
        bw24_row one = {s, i * 7 % VOCAB, 1};
        rc = bw24_step(m, &one, 1, out + (i + 1) * WIDTH);
    }
    *pos = bw24_seq_pos(s);
    bw24_seq_free(s);
    return rc;
}

static float want[(STEPS + 1) * WIDTH], got[(STEPS + 1) * WIDTH];
static bw24_spill_counts counts;

static bool same(bw24_model *m) {
    int64_t pos;
    memset(got, 0, sizeof got);
    int rc = run(m, got, &pos);
    counts.size = sizeof counts;
    CHECK(bw24_spill_stats(m, &counts) == 0);
    CHECK(counts.peak <= (counts.budget > counts.floor ? counts.budget : counts.floor));
    return !rc && pos == 33 + STEPS && !memcmp(want, got, sizeof want);
}

static void reference(kind_fn kind) {
    int64_t pos;
    bw24_model *m = model(kind, NULL, false);
    CHECK(run(m, want, &pos) == 0);
    bw24_model_free(m);
}

static bw24_spill_params params(int policy, uint64_t ram) {
    return (bw24_spill_params){.size = sizeof(bw24_spill_params), .policy = policy, .ram = ram, .readers = 5, .trace = 64};
}

static void test_budgets(void) {
    static const kind_fn kinds[] = {all_of_0, all_of_1, all_of_2, all_of_3};
    for (int k = 0; k < TYPES; k++) {
        reference(kinds[k]);
        for (int policy = 0; policy < 3; policy++)
            for (uint64_t ram = 0; ram < 8u << 20; ram = ram * 6 + 700000) {
                bw24_spill_params p = params(policy, ram);
                bw24_model *m = model(kinds[k], &p, ram > 1000000);
                CHECK(same(m));
                CHECK(counts.trace_lost > 0 && counts.visits == (33 + STEPS) * TOP * LAYERS);
                bw24_model_free(m);
            }
    }
}

static void test_faults(void) {
    static const enum mode harmless[] = {SHORT, INTERRUPTED, ONCE, REFUSED, SLOW};
    reference(all_of_1);
    for (int i = 0; i < 5; i++)
        for (int mirror = 0; mirror < 2; mirror++) {
            bw24_spill_params p = params(0, 0);
            bw24_model *m = model(all_of_1, &p, mirror);
            calls = 0;
            mode = harmless[i];
            CHECK(same(m));
            mode = PLAIN;
            CHECK(harmless[i] != SHORT || counts.short_reads > 0);
            CHECK(harmless[i] != ONCE || (counts.fallbacks > 0 && counts.bytes_read > 0));
            CHECK(harmless[i] != REFUSED || counts.direct == 0);
            bw24_model_free(m);
        }
    static const enum mode harmful[] = {ALWAYS, ENDS};
    for (int i = 0; i < 2; i++) {
        bw24_spill_params p = params(0, 0);
        bw24_model *m = model(all_of_1, &p, false);
        int64_t pos;
        calls = 0;
        mode = harmful[i];
        CHECK(run(m, got, &pos) == BW24_E_IO && strstr(bw24_last_error(), path[0]));
        CHECK(pos == 0);
        CHECK(bw24_spill_warm(m, (int32_t[]){1, 3}, 1) == BW24_E_IO);
        mode = PLAIN;
        CHECK(same(m)); /* nothing of the failed reads is kept */
        CHECK(counts.errors > 0);
        bw24_model_free(m);
    }
}

/* a device that does not answer: the step ends with an error, what comes late changes nothing, and a model can be freed meanwhile */
static void test_hanging_device(void) {
    static bw_spill *volatile kept[2]; /* their readers still use them */
    const int64_t patience = bw_spill_sys.patience_ns;
    int64_t pos;
    reference(all_of_1);
    for (int i = 0; i < 2; i++) {
        bw24_spill_params p = params(0, 400000);
        bw24_model *m = model(all_of_1, &p, i == 1);
        bw_spill_sys.patience_ns = 150000000;
        mode = HANGS;
        int64_t begun = bw_spill_clock();
        CHECK(run(m, got, &pos) == BW24_E_IO && strstr(bw24_last_error(), "hang") && strstr(bw24_last_error(), path[0]) && pos == 0);
        CHECK(bw_spill_clock() - begun < 3000000000);
        mode = PLAIN;
        bw_spill_sys.patience_ns = patience;
        CHECK(same(m));
        CHECK(same(m));
        bw_spill_sys.patience_ns = 150000000;
        mode = HANGS;
        CHECK(run(m, got, &pos) == BW24_E_IO);
        kept[i] = m->spill;
        begun = bw_spill_clock();
        bw24_model_free(m);
        CHECK(bw_spill_clock() - begun < 6000000000 && kept[i] != NULL);
        mode = PLAIN;
        bw_spill_sys.patience_ns = patience;
        usleep(20000); /* the readers leave */
    }
}

static void test_second_drive(void) {
    struct stat st;
    stat(path[1], &st);
    second = st.st_ino;
    reference(all_of_0);
    bw24_spill_params p = params(0, 0);
    bw24_model *m = model(all_of_0, &p, true);
    CHECK(same(m) && counts.mirrors == 1 && counts.mirror_bytes > counts.bytes_read / 4 && counts.errors == 0);
    mode = SECOND_DIES;
    CHECK(same(m) && counts.mirrors == 0 && counts.errors > 0 && counts.fallbacks > 0);
    uint64_t errors = counts.errors;
    CHECK(same(m) && counts.errors == errors); /* it is not asked again */
    mode = PLAIN;
    bw24_model_free(m);
}

/* ---- a set as a card has it: memory of its own, and of the budget what was pinned may be copied from directly */
static uint8_t *area;
static size_t matrix_size;
static int puts_made, pins, unpins;
static bool refuse_pin;

static size_t area_bytes(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols) {
    (void)m;
    return matrix_size = (size_t)(rows * bw_row_bytes(t, cols));
}
static int area_put(bw24_model *m, int layer, int expert, int matrix, uint64_t offset, const uint8_t *raw) {
    CHECK(bw_spill_pinned(m->spill, layer, expert) == !refuse_pin);
    CHECK(bw_spill_set_at(m->spill, layer, expert, matrix) == offset);
    memcpy(area + offset, raw, matrix_size);
    puts_made++;
    return 0;
}
static int area_settle(bw24_model *m) { (void)m; return 0; }
static bool area_pin(bw24_model *m, void *at, size_t bytes) {
    (void)m;
    volatile uint8_t *p = at;
    for (size_t i = 0; i < bytes; i += 4096) (void)p[i];
    if (!refuse_pin) __atomic_fetch_add(&pins, 1, __ATOMIC_RELAXED);
    return !refuse_pin;
}
static void area_unpin(bw24_model *m, void *at) { (void)m; (void)at; unpins++; }

/* every expert's rows are in the area; the model's own copies, where all stay in RAM, give the bits of the model in memory */
static void fill_set(int type, kind_fn kind, uint64_t ram, int policy, int kept) {
    bw24_spill_params p = params(policy, ram);
    p.vram = 64u << 20;
    puts_made = pins = unpins = 0;
    bw24_model *m = model(kind, &p, false);
    int32_t pairs[2 * LAYERS * EXPERTS];
    for (int i = 0; i < LAYERS * EXPERTS; i++) { pairs[2 * i] = i / EXPERTS; pairs[2 * i + 1] = i % EXPERTS; }
    CHECK(bw24_spill_card(m, pairs, LAYERS * EXPERTS) == LAYERS * EXPERTS && puts_made == 3 * LAYERS * EXPERTS);
    counts.size = sizeof counts;
    CHECK(bw24_spill_stats(m, &counts) == 0 && counts.errors == 0);
    const int64_t off = (int64_t)(counts.used - (uint64_t)kept * (counts.bank / (LAYERS * EXPERTS)));
    CHECK(off < 8192 * LAYERS * EXPERTS && -off < 8192 * LAYERS * EXPERTS && counts.peak <= (ram > counts.floor ? ram : counts.floor));
    for (int i = 0; i < LAYERS * EXPERTS; i++)
        for (int k = 0; k < 3; k++)
            CHECK(!memcmp(area + bw_spill_set_at(m->spill, i / EXPERTS, i % EXPERTS, k),
                          image + place[type][i / EXPERTS][k] + (size_t)(i % EXPERTS) * part_bytes(type), part_bytes(type)));
    if (kept == LAYERS * EXPERTS) {
        CHECK(counts.reads > 0 && same(m) && counts.vram_visits == counts.visits);
    } else CHECK(kept || pins == unpins);
    CHECK(bw24_spill_card(m, pairs, LAYERS * EXPERTS) == LAYERS * EXPERTS && puts_made == 3 * LAYERS * EXPERTS); /* there already */
    bw24_model_free(m);
    CHECK(pins == unpins && (pins > 0) == !refuse_pin);
}

static void test_card_set(void) {
    const bw_backend *own = ctx->backend;
    bw_backend stand_in = *own;
    const bw_spill_set set = {area_bytes, area_put, NULL, area_settle, area_pin, area_unpin, true};
    const kind_fn kinds[TYPES] = {all_of_0, all_of_1, all_of_2, all_of_3};
    area = calloc(1, 64u << 20);
    for (int t = 0; t < TYPES; t++)
        for (int refuse = 0; refuse < 2; refuse++) {
            reference(kinds[t]);
            refuse_pin = refuse;
            stand_in.set = &set;
            ctx->backend = &stand_in;
            fill_set(t, kinds[t], 64u << 20, BW24_POLICY_LRU, LAYERS * EXPERTS);
            fill_set(t, kinds[t], counts.bank / 2, BW24_POLICY_LRU, LAYERS * EXPERTS / 2 - 2);
            fill_set(t, kinds[t], 64u << 20, BW24_POLICY_FROZEN, 0);
            fill_set(t, kinds[t], 0, BW24_POLICY_SLRU, 0);
            ctx->backend = own;
        }
    refuse_pin = false;
    free(area);
}

/* experts of different types in one tensor, some absent: the router's bias keeps to those of one kind, so that a model in memory can be compared */
static void test_types_by_expert(void) {
    for (int t = 0; t < TYPES; t++) {
        for (int e = 0; e < EXPERTS; e++) bias[e] = e % TYPES == t || e % TYPES == (t ^ 1) ? 0.0f : -INFINITY;
        bw24_spill_params p = params(0, 400000);
        bw24_model *m = model(mixed, &p, false);
        int64_t pos;
        CHECK(run(m, got, &pos) == 0);
        bw24_model *twice = model(mixed, &(bw24_spill_params){.size = sizeof p, .ram = 8u << 20}, false);
        memcpy(want, got, sizeof want);
        CHECK(same(twice));
        bw24_model_free(m);
        bw24_model_free(twice);
    }
    for (int e = 0; e < EXPERTS; e++) bias[e] = e % 2 ? -INFINITY : 0.0f;
    reference(all_of_1);
    bw24_spill_params p = params(1, 300000);
    bw24_model *m = model(pruned, &p, false);
    CHECK(same(m));
    bw24_model_free(m);
    memset(bias, 0, sizeof bias);
    m = model(pruned, &p, false); /* without the mask */
    int64_t pos;
    CHECK(run(m, got, &pos) == BW24_E_IO && strstr(bw24_last_error(), "the router chose expert") && pos == 0);
    bw24_model_free(m);
}

static void test_refusals(void) {
    bw24_model_params mp = {.size = sizeof mp, .max_rows = 4, .max_context = 40, .kv_full = "f32"};
    bw24_spill_params p = params(0, 0);
    bw24_model *m;
    CHECK(bw24_model_new(&m, ctx, &mp) == 0);
    int64_t ne[3] = {WIDTH, FF, EXPERTS};
    bw24_place at[EXPERTS] = {{0}};
    CHECK(bw24_spill_tensor(m, "g", 3, ne, at, EXPERTS, 1.0f) == BW24_E_ARG);
    CHECK(bw24_spill_open(m, &(bw24_spill_params){.size = sizeof p, .policy = 3}) == BW24_E_ARG);
    CHECK(bw24_spill_open(m, &(bw24_spill_params){.size = 4}) == BW24_E_ARG);
    CHECK(bw24_spill_open(m, &p) == 0 && bw24_spill_open(m, &p) == BW24_E_ARG);
    CHECK(bw24_spill_file(m, "./no-such-file", NULL) == BW24_E_IO && bw24_spill_file(m, "/dev/null", NULL) == BW24_E_IO);
    CHECK(bw24_spill_file(m, path[0], path[0]) == BW24_E_ARG && bw24_spill_file(m, path[0], NULL) == 0);
    at[5] = (bw24_place){0, bw_type_by_name("F16")->id, image_bytes - 5};
    CHECK(bw24_spill_tensor(m, "g", 3, ne, at, EXPERTS, 1.0f) == BW24_E_IO);
    at[5] = (bw24_place){7, 0, 0};
    CHECK(bw24_spill_tensor(m, "g", 3, ne, at, EXPERTS, 1.0f) == BW24_E_ARG);
    at[5] = (bw24_place){0, 99, 0};
    CHECK(bw24_spill_tensor(m, "g", 3, ne, at, EXPERTS, 1.0f) == BW24_E_UNSUPPORTED);
    CHECK(bw24_spill_tensor(m, "g", 3, ne, at, 5, 1.0f) == BW24_E_SHAPE && bw24_spill_tensor(m, "g", 3, ne, at, 0, 1.0f) == BW24_E_SHAPE);
    CHECK(bw24_spill_warm(m, (int32_t[]){0, 0}, 1) == BW24_E_ARG); /* not prepared */
    bw24_model_free(m);
    m = model(all_of_0, &p, false);
    CHECK(bw24_spill_warm(m, (int32_t[]){0, EXPERTS}, 1) == BW24_E_ARG && bw24_spill_warm(m, (int32_t[]){LAYERS, 0}, 1) == BW24_E_ARG);
    CHECK(bw24_spill_warm(m, (int32_t[]){0, 1, 0, 1, 0, 2, 1, 1}, 4) == 2); /* two fit */
    int32_t trace[8];
    CHECK(bw24_spill_trace(m, trace, 8) == 0);
    const char *name;
    int32_t n;
    CHECK(bw24_spill_layer(m, 1, &name, &n) == 0 && !strcmp(name, "d1") && n == EXPERTS && bw24_spill_layer(m, LAYERS, &name, &n) == BW24_E_ARG);
    bw24_model_free(m);
}

int main(void) {
    bw24_open_params p = {.size = sizeof p, .threads = 3, .backend = "cpu", .fuse = 1, .repack = 1};
    if (bw24_open(&ctx, &p)) return 2;
    for (int i = 0; i < VOCAB * WIDTH; i++) table[i] = uniform();
    for (int i = 0; i < LAYERS * EXPERTS * WIDTH; i++) router[i / (EXPERTS * WIDTH)][i % (EXPERTS * WIDTH)] = uniform() * 0.2f;
    make_file();
    bw_spill_sys.pread = faulty;
    test_budgets();
    test_faults();
    test_second_drive();
    test_hanging_device();
    test_card_set();
    test_types_by_expert();
    test_refusals();
    for (int f = 0; f < 2; f++) unlink(path[f]);
    free(image);
    bw24_close(ctx);
    printf("spill: %d checks, %d failures\n", checks, failures);
    return failures ? 1 : 0;
}
