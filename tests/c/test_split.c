/* The processor's share of EXPERTS beside a card (cpu/host.h), with this test as the card: it sums the slots from its own products and the host's rows, as
 * cu/op_experts_sum.cuh does, and every sum has the bits of the op in memory. Forced sets: none, some at random, all but one, all; steps of 1 to 33 rows. */
#define _GNU_SOURCE /* mkstemp */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cpu/host.h"
#include "cpu/linear.h"
#include "cu/untile.h"
#include "spill_impl.h"

enum { WIDTH = 256, FF = 512, EXPERTS = 7, TOP = 3, MOST = 33, VOCAB = 2 };
static int checks, failures;
#define CHECK(cond) do { checks++; if (!(cond)) { failures++; printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #cond, bw24_last_error()); } } while (0)

static uint64_t state = 11;
static float uniform(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)((uint32_t)(state >> 33) >> 8) * 0x1p-22f - 1.0f;
}

static char path[] = "./bw24-split-XXXXXX";
static uint8_t *image;
static const bw_type_info *type;
static size_t at[3], bytes;
static float embed[VOCAB * WIDTH], router[EXPERTS * WIDTH];

static size_t part(int m) { return (size_t)bw_row_bytes(type, m == 2 ? FF : WIDTH) * (m == 2 ? WIDTH : FF); }

static void make_file(void) {
    float row[FF];
    bytes = 0;
    for (int m = 0; m < 3; m++) { at[m] = bytes; bytes += EXPERTS * part(m); }
    image = malloc(bytes);
    for (int m = 0; m < 3; m++) {
        int cols = m == 2 ? FF : WIDTH;
        size_t stride = (size_t)bw_row_bytes(type, cols);
        for (size_t r = 0; r < EXPERTS * part(m) / stride; r++) {
            for (int c = 0; c < cols; c++) row[c] = uniform() * 0.2f;
            if (type->encode) type->encode(row, image + at[m] + r * stride, cols);
            else for (size_t b = 0; b < stride; b++) image[at[m] + r * stride + b] = (uint8_t)(uniform() * 64); /* codes and scales that are finite */
        }
    }
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(image, 1, bytes, f) != bytes || fclose(f)) exit(2);
}

/* spilled: without a list of the backend's own, for the test stands in for the backend */
static bw24_model *model(bw24_ctx *ctx, bool spilled, uint64_t ram) {
    bw24_model_params p = {.size = sizeof p, .max_rows = MOST, .max_context = 400, .kv_full = "f32"};
    bw24_spill_params s = {.size = sizeof s, .ram = ram, .readers = 3, .vram = 64 << 20};
    bw24_model *m = NULL;
    char list[512];
    CHECK(bw24_model_new(&m, ctx, &p) == 0);
    if (spilled) CHECK(bw24_spill_open(m, &s) == 0 && bw24_spill_file(m, path, NULL) == 0);
    CHECK(bw24_tensor_load(m, "emb", 0, 2, (int64_t[]){WIDTH, VOCAB}, embed, sizeof embed, 1.0f, 0) == 0);
    CHECK(bw24_tensor_load(m, "w", 0, 2, (int64_t[]){WIDTH, EXPERTS}, router, sizeof router, 1.0f, 0) == 0);
    for (int k = 0; k < 3; k++) {
        static const char *const names[] = {"g", "u", "d"};
        int64_t ne[3] = {k == 2 ? FF : WIDTH, k == 2 ? WIDTH : FF, EXPERTS};
        bw24_place places[EXPERTS];
        for (int e = 0; e < EXPERTS; e++) places[e] = (bw24_place){0, type->id, at[k] + (size_t)e * part(k)};
        if (spilled) CHECK(bw24_spill_tensor(m, names[k], 3, ne, places, EXPERTS, 1.0f) == 0);
        else CHECK(bw24_tensor_load(m, names[k], type->id, 3, ne, image + at[k], EXPERTS * part(k), 1.0f, 0) == 0);
    }
    snprintf(list, sizeof list, "BUF x %d\nBUF y %d\nBUF l %d\nBUF r %d\nBUF logits %d\nEMBED y=x w=emb\nLINEAR y=l x=x w=w\nROUTE y=r x=l top=%d kind=softmax\n"
             "EXPERTS y=y x=x r=r g=g u=u d=d act=silu\nPICK_ROWS y=logits x=y\n", WIDTH, WIDTH, EXPERTS, 2 * TOP, WIDTH, TOP);
    CHECK(bw24_list_set(m, "trunk", list) == 0);
    for (int i = 0; i <= m->n_tensors && !spilled; i++) CHECK(bw24_prepare(m, i) == 0);
    return m;
}

/* d of each expert for each row, from models in memory whose route is forced: what a card would compute */
static float x[MOST * WIDTH], route[MOST * 2 * TOP], alone[EXPERTS][MOST][WIDTH], want[MOST][WIDTH];
static int op_index(const bw_list *l) {
    int i = 0;
    while (l->ops[i].code != BW_OP_EXPERTS) i++;
    return i;
}

static void sum(const bw_host_step *h, int n, float (*y)[WIDTH]) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < WIDTH; c++) {
            float v = 0;
            for (int s = 0; s < TOP; s++) {
                int pair = i * TOP + s, place = h ? h->place[pair] : 0, e = (int)route[i * 2 * TOP + TOP + s];
                float d = h && place < h->own ? h->d[(size_t)place * WIDTH + (size_t)c] : alone[e][i][c];
                v = fmaf(route[i * 2 * TOP + s], d, v);
            }
            y[i][c] = v;
        }
}

static void draw_step(int n) {
    for (int i = 0; i < n * WIDTH; i++) x[i] = uniform();
    for (int i = 0; i < n; i++) {
        int first = (int)((uniform() + 1) * 0.5f * EXPERTS) % EXPERTS;
        for (int s = 0; s < TOP; s++) {
            route[i * 2 * TOP + s] = uniform();
            route[i * 2 * TOP + TOP + s] = (float)((first + s * 2) % EXPERTS);
        }
    }
}

static bool begin(bw_host *h, const bw_list *l) {
    bw_host_begin(h, l, op_index(l));
    return true;
}

/* every expert's d for every row, by the host with an empty set: one expert a step */
static void all_products(bw_host *h, const bw_list *l, int n) {
    float keep[MOST * 2 * TOP];
    memcpy(keep, route, sizeof keep);
    for (int e = 0; e < EXPERTS; e++) {
        bw_host_step step;
        for (int i = 0; i < n * TOP; i++) route[i / TOP * 2 * TOP + TOP + i % TOP] = (float)e;
        CHECK(bw_host_plan(h, l, op_index(l), x, route, n, 0, NULL, &step) == 0 && step.own == n * TOP && begin(h, l) && bw_host_work(h, l, op_index(l)) == 0);
        for (int i = 0; i < n; i++) memcpy(alone[e][i], step.d + (size_t)step.place[i * TOP] * WIDTH, sizeof alone[e][i]);
    }
    memcpy(route, keep, sizeof keep);
}

/* ---- lifted experts: their packed matrices give back the file's rows */
static bw_untile layout(void) {
    static const struct { const char *name; int kind, block; } kinds[] = {{"Q4_0", UNTILE_Q4_0, 1}, {"Q8_0", UNTILE_Q8_0, 1}, {"Q4_K", UNTILE_Q4_K, 8},
        {"Q6_K", UNTILE_Q6_K, 8}, {"IQ4_XS", UNTILE_IQ4_XS, 8}, {"NVFP4", UNTILE_NVFP4, 2}};
    bw_untile u = {0};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i].name, type->name) && cpu_tile_layout(type, &u.head, &u.codes, &u.per)) {
            u.kind = kinds[i].kind;
            u.block = kinds[i].block;
            u.bytes = type->bytes;
        }
    return u;
}

static bool rows_again(const bw_untile *u, const uint8_t *tiles, size_t packed, const uint8_t *raw, int rows, int cols) {
    size_t row = (size_t)bw_row_bytes(type, cols), tile = packed / (size_t)cpu_tiles(rows);
    uint8_t *back = calloc((size_t)rows, row);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < cols / 32; g += u->block)
            bw_untile_block(u, tiles + (size_t)(r / UNTILE_ROWS) * tile, g, r % UNTILE_ROWS, back + (size_t)r * row + (size_t)(g / u->block * u->bytes));
    bool same = !memcmp(back, raw, (size_t)rows * row);
    free(back);
    return same;
}

static void lift_all(bw_host *h, const bw_list *l, const bw_host_step *step) {
    const bw_untile u = layout();
    int next = step->own;
    for (int k = 0; k < step->lifted; k++) {
        bw_host_lifted e;
        bw_host_lift(h, l, op_index(l), &e);
        CHECK(e.n >= 3 && e.first >= step->own && e.first + e.n <= step->first_set);
        for (int p = e.first; p < e.first + e.n; p++) CHECK((int)route[step->pair[p] / TOP * 2 * TOP + TOP + step->pair[p] % TOP] == e.expert);
        for (int m = 0; m < 3 && u.kind; m++)
            CHECK(rows_again(&u, e.data[m], e.bytes[m], image + at[m] + (size_t)e.expert * part(m), m == 2 ? WIDTH : FF, m == 2 ? FF : WIDTH));
        next += e.n;
    }
    CHECK(next == step->first_set && (!step->lifted || bw_host_lift_end(h) == 0));
}

static void divided(bw24_ctx *ctx, uint64_t ram, unsigned set) {
    bw24_model *m = model(ctx, true, ram), *none = model(ctx, true, 8 << 20);
    bw_host *h = NULL, *base = NULL;
    CHECK(bw_host_new(m, &h) == 0 && bw_host_list(h, m->lists[0]) == 0 && bw_host_new(none, &base) == 0 && bw_host_list(base, none->lists[0]) == 0);
    const bw_list *l = m->lists[0];
    uint8_t *in = (uint8_t *)bw_spill_in_set(m->spill, 0);
    for (int e = 0; e < EXPERTS; e++) in[e] = set >> e & 1;
    static float got[MOST][WIDTH];
    uint64_t card = 0, all = 0;
    for (int n = 1; n <= MOST; n = n * 2 + 1) {
        bw_host_step step;
        draw_step(n);
        all_products(base, none->lists[0], n);
        sum(NULL, n, want);
        CHECK(bw_host_plan(h, l, op_index(l), x, route, n, n > 7 ? 3 : 0, NULL, &step) == 0 && step.pairs == n * TOP);
        for (int p = 0; p < step.pairs; p++) {
            bool own = !in[(int)route[p / TOP * 2 * TOP + TOP + p % TOP]];
            CHECK(step.pair[step.place[p]] == p && own == (step.place[p] < step.first_set));
            card += !own;
        }
        all += (uint64_t)step.pairs;
        lift_all(h, l, &step);
        CHECK(begin(h, l) && bw_host_work(h, l, op_index(l)) == 0);
        sum(&step, n, got);
        CHECK(!memcmp(want, got, (size_t)n * sizeof *got));
    }
    bw24_spill_counts c = {.size = sizeof c};
    CHECK(bw24_spill_stats(m, &c) == 0 && c.vram_visits == card && c.visits == all);
    x[5] = INFINITY;
    bw_host_step step;
    CHECK(bw_host_plan(h, l, op_index(l), x, route, 1, 0, NULL, &step) == 0);
    CHECK(begin(h, l) && bw_host_work(h, l, op_index(l)) == (step.own && type->form != BW_FLOAT ? BW24_E_NUMERIC : 0));
    bw_host_free(h);
    bw_host_free(base);
    bw24_model_free(m);
    bw24_model_free(none);
}

/* ---- a set that moves: experts in RAM are held, take the place of others that the step does not use, and count as the card's */
static int held[EXPERTS], n_held;

static void check_places(const bw_spill *s, int size) {
    const spill_layer *l = &s->layers[0];
    bool seen[EXPERTS] = {false};
    int in = 0;
    for (int e = 0; e < EXPERTS; e++) {
        if (!l->in_set[e]) continue;
        CHECK(l->set_at[e] % 1024 == 0 && l->set_at[e] < EXPERTS * 1024 && !seen[l->set_at[e] / 1024]);
        seen[l->set_at[e] / 1024] = true;
        in++;
    }
    CHECK(in == size && l->set_n[0] + l->set_n[1] == size);
    bool behind = false; /* RAM gives up first what the set has as well */
    for (const spill_entry *e = s->lru.head; e; e = e->next) {
        CHECK(l->in_set[e->expert] || !behind);
        behind |= l->in_set[e->expert];
    }
}

static void move_some(bw24_model *m, bw_host *h, int n, uint8_t *lifts) {
    const bw_list *l = m->lists[0];
    const bw_untile u = layout();
    int uses[EXPERTS] = {0};
    for (int i = 0; i < n * TOP; i++) uses[(int)route[i / TOP * 2 * TOP + TOP + i % TOP]]++;
    n_held = 0;
    memset(lifts, 0, EXPERTS);
    for (int e = 0; e < EXPERTS; e++) {
        bool missing = uses[e] && !bw_spill_in_set(m->spill, 0)[e], there = bw_spill_in_ram(m->spill, 0, e);
        if (!missing || uniform() < -0.3f) continue;
        bool ok = bw_spill_hold(m->spill, 0, e);
        CHECK(!ok || there);
        if (!ok) continue;
        CHECK(!bw_spill_hold(m->spill, 0, e));
        lifts[e] = 1;
        held[n_held++] = e;
        uint8_t before[EXPERTS];
        memcpy(before, bw_spill_in_set(m->spill, 0), sizeof before);
        bool swapped = bw_spill_swap(m->spill, 0, e, uses);
        for (int old = 0; old < EXPERTS && swapped; old++) /* what RAM lacks leaves for an expert of many uses alone */
            CHECK(!before[old] || bw_spill_in_set(m->spill, 0)[old] || bw_spill_in_ram(m->spill, 0, old) || m->spill->layers[0].entries[e].uses >= 8);
        CHECK(bw_spill_in_set(m->spill, 0)[e] == swapped && (!swapped || !bw_spill_swap(m->spill, 0, e, uses)));
        bw_host_lifted packed;
        bw_host_held(h, l, op_index(l), e, &packed);
        for (int k = 0; k < 3 && u.kind; k++)
            CHECK(packed.expert == e && rows_again(&u, packed.data[k], packed.bytes[k], image + at[k] + (size_t)e * part(k), k == 2 ? WIDTH : FF, k == 2 ? FF : WIDTH));
    }
}

/* wanted: the experts outside the set were used so often that any of the set makes room for them, though RAM lacks it */
static void moving(bw24_ctx *ctx, uint64_t ram, int size, int policy, bool wanted) {
    bw24_model *m = model(ctx, true, ram), *none = model(ctx, true, 8 << 20);
    bw_host *h = NULL, *base = NULL;
    CHECK(bw_host_new(m, &h) == 0 && bw_host_list(h, m->lists[0]) == 0 && bw_host_new(none, &base) == 0 && bw_host_list(base, none->lists[0]) == 0);
    const bw_list *l = m->lists[0];
    spill_layer *layer = &m->spill->layers[0];
    m->spill->policy = policy;
    for (int e = 0; e < size; e++) {
        layer->in_set[e] = 1;
        layer->set_at[e] = (uint64_t)e * 1024;
        spill_set_add(layer, e);
    }
    for (int e = size; e < EXPERTS && wanted; e++) layer->entries[e].uses = 1 << 20;
    static float got[MOST][WIDTH];
    uint8_t lifts[EXPERTS];
    uint64_t all = 0;
    bool bus = false;
    for (int k = 0; k < 24; k++) {
        bw_host_step step;
        int n = 1 + k % 3 * 2;
        draw_step(n);
        all_products(base, none->lists[0], n);
        sum(NULL, n, want);
        move_some(m, h, n, lifts);
        CHECK(bw_host_plan(h, l, op_index(l), x, route, n, 0, lifts, &step) == 0);
        for (int p = 0; p < step.pairs; p++) {
            int e = (int)route[p / TOP * 2 * TOP + TOP + p % TOP], place = step.place[p];
            CHECK(lifts[e] ? place >= step.own && place < step.first_set : layer->in_set[e] ? place >= step.first_set : place < step.own);
        }
        bw_host_begin(h, l, op_index(l));
        bw_host_start(h, l, op_index(l));
        CHECK(bw_host_work(h, l, op_index(l)) == 0);
        sum(&step, n, got);
        CHECK(!memcmp(want, got, (size_t)n * sizeof *got));
        for (int i = 0; i < n_held; i++) bw_spill_release(m->spill, 0, held[i]);
        check_places(m->spill, size);
        all += (uint64_t)step.pairs;
        bus |= n_held > 0;
    }
    bw24_spill_counts c = {.size = sizeof c};
    CHECK(bw24_spill_stats(m, &c) == 0 && c.visits == all && c.lifted <= c.visit_hits && c.peak <= (c.budget > c.floor ? c.budget : c.floor));
    bool swaps = bus && size > 0 && size < EXPERTS && policy != BW24_POLICY_FROZEN;
    CHECK(bus == (c.lifted > 0) && (wanted ? (c.swaps > 0) == swaps : !c.swaps || swaps));
    CHECK(bus == (ram > 8 * c.floor && size < EXPERTS) || ram <= 8 * c.floor);
    bw_host_free(h);
    bw_host_free(base);
    bw24_model_free(m);
    bw24_model_free(none);
}

/* the sums that the test takes for right are those of the op in memory */
static void against_memory(bw24_ctx *ctx) {
    bw24_model *m = model(ctx, false, 0), *none = model(ctx, true, 8 << 20);
    bw_host *h = NULL;
    bw24_seq *s;
    float y[WIDTH];
    CHECK(bw_host_new(none, &h) == 0 && bw_host_list(h, none->lists[0]) == 0 && bw24_seq_new(&s, m) == 0);
    for (int t = 0; t < VOCAB; t++) {
        bw24_row row = {s, t, 1};
        CHECK(bw24_step(m, &row, 1, y) == 0);
        const bw_list *l = m->lists[0];
        memcpy(x, embed + t * WIDTH, WIDTH * sizeof *x);
        memcpy(route, l->mem[l->ops[op_index(l)].buf[2]], 2 * TOP * sizeof *route);
        all_products(h, none->lists[0], 1);
        sum(NULL, 1, want);
        CHECK(!memcmp(want[0], y, sizeof y));
    }
    bw24_seq_free(s);
    bw_host_free(h);
    bw24_model_free(m);
    bw24_model_free(none);
}

int main(void) {
    static const char *const types[] = {"Q8_0", "Q4_0", "F16", "Q4_K", "Q6_K", "IQ4_XS", "NVFP4"};
    bw24_open_params p = {.size = sizeof p, .threads = 3, .backend = "cpu", .fuse = 1, .repack = 1};
    bw24_ctx *ctx;
    if (bw24_open(&ctx, &p) || mkstemp(path) < 0) return 2;
    for (int i = 0; i < VOCAB * WIDTH; i++) embed[i] = uniform();
    for (int i = 0; i < EXPERTS * WIDTH; i++) router[i] = uniform() * 0.3f;
    for (int k = 0; k < 7; k++) {
        type = bw_type_by_name(types[k]);
        make_file();
        against_memory(ctx);
        static const unsigned sets[] = {0, 1, 42, 85, 63, 127};
        for (int i = 0; i < 6; i++)
            for (uint64_t ram = 0; ram < 3000000; ram = ram * 5 + 400000) divided(ctx, ram, sets[i]);
        for (int size = 0; size <= EXPERTS; size += EXPERTS / 2 - !!size)
            for (uint64_t ram = 0; ram <= 32 << 20; ram = ram * 16 + (2 << 20)) moving(ctx, ram, size, size % 3, k > 1);
        free(image);
    }
    unlink(path);
    bw24_close(ctx);
    printf("split: %d checks, %d failures\n", checks, failures);
    return failures ? 1 : 0;
}
