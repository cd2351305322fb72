/* The set of experts that a backend keeps in memory of its own, a card's: which they are, where they lie, and reading them there. Owns the layout of the
 * set; what a matrix looks like there is the backend's, how files are read is spill_io.c's. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "spill_impl.h"

enum { SET_ALIGN = 256 };
/* An expert that leaves the set and is not in RAM is read again when it is used, which takes 10 to 20 times what the newcomer gains by a use: it goes only
 * to one that was used so many times as often, and so many times more. */
enum { LOST_TIMES = 4, LOST_USES = 8 };

const uint8_t *bw_spill_in_set(const bw_spill *s, int layer) { return s->layers[layer].in_set; }
uint64_t bw_spill_set_bytes(const bw_spill *s) { return s->set_room; }

static uint64_t matrix_bytes(const bw_spill *s, const spill_layer *l, int expert, int matrix) {
    spill_span at;
    spill_span_of(s, &l->entries[expert], matrix, &at);
    const bw_tensor *t = l->w[matrix];
    uint64_t n = s->model->ctx->backend->set->bytes(s->model, at.type, bw_part_rows(t), t->ne[0]);
    return (n + SET_ALIGN - 1) & ~(uint64_t)(SET_ALIGN - 1);
}

uint64_t bw_spill_set_at(const bw_spill *s, int layer, int expert, int matrix) {
    const spill_layer *l = &s->layers[layer];
    uint64_t at = l->set_at[expert];
    for (int m = 0; m < matrix; m++) at += matrix_bytes(s, l, expert, m);
    return at;
}

/* ---- lists of a layer's experts in the set: 0 probation, 1 protected */
static void take_out(spill_layer *l, int e) {
    spill_place *p = &l->place[e];
    *(p->prev < 0 ? &l->set_head[p->list] : &l->place[p->prev].next) = p->next;
    *(p->next < 0 ? &l->set_tail[p->list] : &l->place[p->next].prev) = p->prev;
    l->set_n[p->list]--;
}

static void put_first(spill_layer *l, int e, int list) {
    l->place[e] = (spill_place){-1, l->set_head[list], list};
    *(l->set_head[list] < 0 ? &l->set_tail[list] : &l->place[l->set_head[list]].prev) = e;
    l->set_head[list] = e;
    l->set_n[list]++;
}

void spill_set_add(spill_layer *l, int expert) { put_first(l, expert, 0); }

/* used again: protected, whose last ones make room beyond four fifths */
void spill_set_touch(spill_layer *l, int expert) {
    if (l->place[expert].list < 0) return;
    take_out(l, expert);
    put_first(l, expert, 1);
    while (5 * l->set_n[1] > 4 * (l->set_n[0] + l->set_n[1]) && l->set_n[1] > 1) {
        int last = l->set_tail[1];
        take_out(l, last);
        put_first(l, last, 0);
    }
}

static bool same_room(const bw_spill *s, const spill_layer *l, int a, int b) {
    for (int m = 0; m < 3; m++)
        if (matrix_bytes(s, l, a, m) != matrix_bytes(s, l, b, m)) return false;
    return true;
}

bool bw_spill_swap(bw_spill *s, int layer, int expert, const int *uses) {
    spill_layer *l = &s->layers[layer];
    if (s->policy == BW24_POLICY_FROZEN || l->in_set[expert]) return false;
    for (int pass = 0; pass < 4; pass++) /* those that RAM has as well first */
        for (int old = l->set_tail[pass & 1]; old >= 0; old = l->place[old].prev) {
            bool kept = l->entries[old].state == SPILL_READY;
            if (uses[old] || !same_room(s, l, old, expert) || (pass < 2 && !kept)) continue;
            if (!kept && l->entries[expert].uses < LOST_TIMES * l->entries[old].uses + LOST_USES) continue;
            take_out(l, old);
            l->place[old].list = -1;
            put_first(l, expert, 0);
            l->in_set[old] = 0;
            l->in_set[expert] = 1;
            l->set_at[expert] = l->set_at[old];
            spill_relink(s, &l->entries[old], false);
            s->c.swaps++;
            return true;
        }
    return false;
}

void bw_spill_set_uses(bw_spill *s, int layer, const int *experts, int n, const int *uses) {
    for (int i = 0; i < n; i++) {
        uint64_t count = (uint64_t)uses[experts[i]];
        s->layers[layer].entries[experts[i]].uses += count;
        s->c.visits += count;
        s->c.vram_visits += count;
        spill_note(s, layer << 16 | experts[i] | INT32_MIN);
        if (4 * n <= s->layers[layer].experts) spill_set_touch(&s->layers[layer], experts[i]); /* a step that uses most says nothing about them */
    }
}

void bw_spill_step(bw_spill *s) { spill_note(s, -1); }
void bw_spill_card_time(bw_spill *s, int64_t ns) { s->c.card_ns += (uint64_t)ns; }

static int put_expert(bw_spill *s, int layer, int expert) {
    bw24_model *m = s->model;
    uint8_t *base, *raw[3];
    bool there = true;
    int rc = 0;
    for (int k = 0; k < 3; k++) there &= bw_spill_wait(s, layer, expert, k, &base, &raw[k]);
    for (int k = 0; k < 3 && there && !rc; k++) rc = m->ctx->backend->set->put(m, layer, expert, k, bw_spill_set_at(s, layer, expert, k), raw[k]);
    return rc;
}

static int wait_for_puts(bw24_model *m) {
    int (*wait)(bw24_model *) = m->ctx->backend->set->wait;
    return wait ? wait(m) : 0;
}

int bw_spill_to_set(bw_spill *s, int layer, const int *experts, int n) {
    int rc = 0;
    if (!s->keeping) return 0;
    for (int i = 0; i < n && !rc; i++) rc = put_expert(s, layer, experts[i]);
    int waited = wait_for_puts(s->model);
    return rc ? rc : waited;
}

/* experts of one layer, through memory of the budget to the set */
static int pass_through(bw_spill *s, int layer, int *experts, int n) {
    int hits, rc = 0;
    s->passing = true;
    bw_spill_begin(s, layer, experts, n, 1, NULL, experts, &hits);
    for (int i = 0; i < n; i++) {
        if (i % BW_SPILL_WAVE == 0) {
            int waited = wait_for_puts(s->model);
            rc = rc ? rc : waited;
            bw_spill_next(s, i, i + BW_SPILL_WAVE < n ? i + BW_SPILL_WAVE : n);
        }
        if (!rc) rc = put_expert(s, layer, experts[i]);
    }
    int waited = wait_for_puts(s->model);
    rc = rc ? rc : waited;
    bw_spill_end(s);
    s->passing = false;
    const char *lost = bw_spill_error(s);
    return !rc && lost ? bw_fail(BW24_E_IO, "%s", lost) : rc;
}

/* the same, and they stay in RAM where `keep` allows; those that the file lacks are left out before */
static int fill_part(bw_spill *s, int layer, int *experts, int n, bool keep) {
    if (!n) return 0;
    for (int i = 0; i < n; i++)
        if (s->layers[layer].entries[experts[i]].state == SPILL_READY) spill_drop(s, &s->layers[layer].entries[experts[i]]);
    s->keeping = keep;
    int rc = keep ? s->model->ctx->backend->warm(s->model, layer, experts, n) : pass_through(s, layer, experts, n);
    s->keeping = false;
    for (int i = 0; i < n && !rc; i++) {
        s->layers[layer].in_set[experts[i]] = 1;
        spill_relink(s, &s->layers[layer].entries[experts[i]], true);
        spill_set_add(&s->layers[layer], experts[i]);
    }
    s->c.vram_experts += rc ? 0 : (uint64_t)n;
    return rc;
}

static bool in_file(const bw_spill *s, const spill_entry *e) {
    for (int m = 0; m < 3; m++) {
        spill_span at;
        spill_span_of(s, e, m, &at);
        if (at.file < 0) return false;
    }
    return true;
}

/* of the pairs from the first on, those of one layer that the set lacks and has room for, with their places; *taken: pairs looked at */
static int gather(bw_spill *s, const int32_t *pairs, int n, int *batch, int *taken, bool *full) {
    spill_layer *l = &s->layers[pairs[0]];
    int count = 0;
    for (*taken = 0; *taken < n && pairs[2 * *taken] == pairs[0] && count < s->cap_order; ++*taken) {
        int e = pairs[2 * *taken + 1];
        bool have = l->in_set[e] || !in_file(s, &l->entries[e]);
        for (int k = 0; k < count; k++) have |= batch[k] == e;
        if (have) continue;
        uint64_t bytes = 0;
        for (int m = 0; m < 3; m++) bytes += matrix_bytes(s, l, e, m);
        if ((*full = s->set_used + bytes > s->set_room)) break;
        l->set_at[e] = s->set_used;
        s->set_used += bytes;
        batch[count++] = e;
    }
    return count;
}

/* The share of the pairs that may stay in RAM after they have passed to the set: of its limit what is left by those that are neither in the set nor
 * among the pairs, which have nowhere else to be. */
static double share_to_keep(const bw_spill *s, const int32_t *pairs, int n) {
    if (s->policy == BW24_POLICY_FROZEN || !s->model->ctx->backend->set->both) return 0;
    uint64_t outside = 0, passing = 0;
    for (int i = 0; i < s->n_layers; i++)
        for (int e = 0; e < s->layers[i].experts; e++) outside += s->layers[i].in_set[e] ? 0 : s->layers[i].entries[e].bytes;
    for (int i = 0; i < n; i++) passing += s->layers[pairs[2 * i]].in_set[pairs[2 * i + 1]] ? 0 : s->layers[pairs[2 * i]].entries[pairs[2 * i + 1]].bytes;
    outside -= passing < outside ? passing : outside;
    if (!passing || s->limit >= outside + s->c.used + passing) return 1;
    const uint64_t way = BW_SPILL_WAVE * s->largest; /* the others pass through */
    if (outside < way) outside = way;
    return s->limit > outside + s->c.used ? (double)(s->limit - outside - s->c.used) / (double)passing : 0;
}

int bw24_spill_card(bw24_model *m, const int32_t *pairs, int32_t n) {
    bw_spill *s = m ? m->spill : NULL;
    if (!s || !m->prepared || !pairs || n < 0) return bw_fail(BW24_E_ARG, "bw24_spill_card: a prepared model that was opened with bw24_spill_open is needed");
    if (n && !s->set_room) return bw_fail(BW24_E_ARG, "bw24_spill_card: the model was opened with vram=0");
    for (int i = 0; i < n; i++)
        if (pairs[2 * i] < 0 || pairs[2 * i] >= s->n_layers || pairs[2 * i + 1] < 0 || pairs[2 * i + 1] >= s->layers[pairs[2 * i]].experts)
            return bw_fail(BW24_E_ARG, "bw24_spill_card: there is no layer %d with an expert %d", pairs[2 * i], pairs[2 * i + 1]);
    int *batch = malloc(((size_t)s->cap_order + 1) * sizeof *batch), trace = s->trace_cap, rc = 0;
    if (!batch) return bw_fail(BW24_E_MEMORY, "out of memory for %d experts", s->cap_order);
    bw24_spill_counts before = s->c;
    s->trace_cap = 0;
    s->checked = 0;
    spill_look_at_memory(s);
    bool full = false;
    double share = share_to_keep(s, pairs, n), owed = 0; /* alike in all layers */
    for (int i = 0, taken; i < n && !full && !rc; i += taken) {
        int count = gather(s, pairs + 2 * i, n - i, batch, &taken, &full), kept = (int)((owed += share * count) + 1e-6);
        owed -= kept;
        rc = fill_part(s, pairs[2 * i], batch, kept, true);
        if (!rc) rc = fill_part(s, pairs[2 * i], batch + kept, count - kept, false);
    }
    spill_drop_spares(s);
    int settled = m->ctx->backend->set->settle(m);
    free(batch);
    s->trace_cap = trace;
    s->c.wanted = before.wanted;
    s->c.hits = before.hits;
    return rc ? rc : settled ? settled : (int)s->c.vram_experts;
}
