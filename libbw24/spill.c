/* The RAM tier of experts: a byte budget, three policies, and the protocol of a step (spill.h). Reading is spill_io.c's. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fault.h"
#include "spill_impl.h"

static const int64_t PRESSURE_NS = 100000000; /* how often the system's free memory is looked at: a tenth of a second */

int64_t bw_spill_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t up(uint64_t n) { return (n + SPILL_PAGE - 1) & ~(uint64_t)(SPILL_PAGE - 1); }

int bw24_spill_open(bw24_model *m, const bw24_spill_params *p) {
    if (!m || !p || p->size != sizeof *p) return bw_fail(BW24_E_ARG, "bw24_spill_open: params of size %u, expected %zu", p ? p->size : 0, sizeof *p);
    if (m->spill || m->n_tensors) return bw_fail(BW24_E_ARG, "bw24_spill_open: once, and before any tensor");
    if (!m->ctx->backend->warm) return bw_fail(BW24_E_UNSUPPORTED, "backend %s keeps every expert in memory; backend cpu reads them from files", m->ctx->backend->name);
    if (p->policy < BW24_POLICY_LRU || p->policy > BW24_POLICY_FROZEN) return bw_fail(BW24_E_ARG, "bw24_spill_open: policy=%d is outside 0..2", p->policy);
    if (p->readers < 0 || p->readers > SPILL_READERS_MAX) return bw_fail(BW24_E_ARG, "bw24_spill_open: readers=%d is outside 0..%d", p->readers, SPILL_READERS_MAX);
    if (p->vram && !m->ctx->backend->set) return bw_fail(BW24_E_UNSUPPORTED, "backend %s has no set of experts of its own", m->ctx->backend->name);
    if (p->trace < 0 || p->trace > 1 << 26) return bw_fail(BW24_E_ARG, "bw24_spill_open: trace=%d is outside 0..2^26", p->trace);
    bw_spill *s = calloc(1, sizeof *s);
    if (s) s->root = strdup(p->root ? p->root : "");
    if (s && p->trace) s->trace = malloc((size_t)p->trace * sizeof *s->trace);
    if (!s || !s->root || (p->trace && !s->trace)) {
        if (s) { free(s->root); free(s->trace); }
        free(s);
        return bw_fail(BW24_E_MEMORY, "out of memory for the tiers of a model");
    }
    s->model = m;
    s->policy = p->policy;
    s->budget = s->limit = p->ram;
    s->set_room = p->vram;
    s->readers_wanted = p->readers;
    s->buffered = p->buffered != 0;
    s->trace_cap = p->trace;
    s->c.direct = !s->buffered;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    for (int i = 0; i < SPILL_DOORS; i++) pthread_cond_init(&s->done[i], &attr);
    pthread_condattr_destroy(&attr);
    m->spill = s;
    return 0;
}

/* ---- layers and layout */
bool bw_spilled(const bw_op *op) { return op->w[BW_EXP_GATE]->places || op->w[BW_EXP_DOWN]->places; }

static const bw_place *place_of(const bw_tensor *t, int part, uint64_t *skip) {
    int per = t->parts / t->n_places;
    const bw_place *p = &t->places[part / per];
    *skip = (uint64_t)(part % per) * (uint64_t)(bw_part_rows(t) * bw_row_bytes(p->type, t->ne[0]));
    return p;
}

const bw_type_info *bw_spill_type(const bw_op *op, int expert, int matrix) {
    int part;
    uint64_t skip;
    const bw_tensor *scale, *t = bw_expert_part(op, matrix, expert, &part, &scale);
    return place_of(t, part, &skip)->type;
}

/* room for the packed form and for the aligned range that covers the file's rows; those end at or behind the packed form's end, so that tiles may be
 * packed in place, first to last */
static void span_in(const bw_spill *s, const spill_layer *l, int expert, int m, uint64_t base, spill_span *out) {
    const bw_tensor *t = l->w[m];
    uint64_t skip;
    const bw_place *p = place_of(t, l->ratio[m] * BW_SEEDED(24, m == 2 ? expert ^ 1 : expert, expert) + l->shift[m], &skip);
    uint64_t raw = (uint64_t)(bw_part_rows(t) * bw_row_bytes(p->type, t->ne[0])), packed = s->room(s->model, p->type, bw_part_rows(t), t->ne[0]);
    uint64_t offset = p->offset + skip, from = offset & ~(uint64_t)(SPILL_PAGE - 1);
    out->base = base;
    out->into = base + up(packed > raw ? packed - raw : 0);
    out->from = from;
    out->span = up(offset + raw) - from;
    out->raw = out->into + (offset - from);
    out->bytes = raw;
    out->file = p->file;
    out->type = p->type;
}

void spill_span_of(const bw_spill *s, const spill_entry *e, int matrix, spill_span *out) {
    uint64_t base = 0;
    for (int m = 0; m <= matrix; m++) {
        span_in(s, &s->layers[e->layer], e->expert, m, base, out);
        base = out->into + out->span;
    }
}

static uint64_t entry_bytes(const bw_spill *s, const spill_entry *e) {
    spill_span p;
    spill_span_of(s, e, 2, &p);
    return p.into + p.span;
}

static int fill_layer(bw_spill *s, const bw_op *op, spill_layer *l) {
    for (int m = 0; m < 3; m++) {
        int p0, p1;
        const bw_tensor *scale;
        l->w[m] = bw_expert_part(op, m, 0, &p0, &scale);
        bw_expert_part(op, m, op->experts > 1, &p1, &scale);
        l->ratio[m] = op->experts > 1 ? p1 - p0 : 1;
        l->shift[m] = p0;
        if (!l->w[m]->places) return bw_fail(BW24_E_ARG, "tensor %s is in memory, the other matrices of its experts are spilled", l->w[m]->name);
    }
    l->entries = calloc((size_t)op->experts, sizeof *l->entries);
    l->in_set = calloc((size_t)op->experts, sizeof *l->in_set);
    l->set_at = calloc((size_t)op->experts, sizeof *l->set_at);
    l->place = calloc((size_t)op->experts, sizeof *l->place);
    for (int i = 0; i < 2; i++) l->set_head[i] = l->set_tail[i] = -1;
    if (!l->entries || !l->in_set || !l->set_at || !l->place) return bw_fail(BW24_E_MEMORY, "out of memory for %d experts", op->experts);
    l->experts = op->experts;
    for (int e = 0; e < op->experts; e++) {
        spill_entry *n = &l->entries[e];
        *n = (spill_entry){.layer = s->n_layers, .expert = e};
        l->place[e].list = -1;
        n->bytes = entry_bytes(s, n);
        s->c.bank += n->bytes;
        if (n->bytes > s->largest) s->largest = n->bytes;
    }
    return 0;
}

/* what stands in for an expert that could not be had: never written, so that it takes no memory */
static int make_zeros(bw_spill *s) {
    if (s->zeros_bytes >= s->largest) return 0;
    if (s->zeros) munmap(s->zeros, s->zeros_bytes);
    s->zeros_bytes = s->largest;
    s->zeros = mmap(NULL, s->largest, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s->zeros != MAP_FAILED) return 0;
    s->zeros = NULL;
    s->zeros_bytes = 0;
    return bw_fail(BW24_E_MEMORY, "out of address space for an expert of %llu bytes", (unsigned long long)s->largest);
}

int bw_spill_layer(bw24_model *m, const bw_op *op, bw_spill_room room, int *index) {
    bw_spill *s = m->spill;
    s->room = room;
    spill_layer *grown = realloc(s->layers, (size_t)(s->n_layers + 1) * sizeof *grown);
    if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for a layer's experts");
    s->layers = grown;
    s->layers[s->n_layers] = (spill_layer){.experts = 0};
    *index = s->n_layers;
    if (op->experts > s->cap_order) {
        int *order = realloc(s->step_order, (size_t)op->experts * sizeof *order);
        if (!order) return bw_fail(BW24_E_MEMORY, "out of memory for %d experts", op->experts);
        s->step_order = order;
        s->cap_order = op->experts;
    }
    int rc = fill_layer(s, op, &s->layers[*index]);
    s->n_layers++; /* after a failure too: what there is of the layer is freed with the model */
    if (!rc) rc = make_zeros(s);
    return rc;
}

int bw24_spill_layer(bw24_model *m, int32_t index, const char **down, int32_t *experts) {
    if (!m || !m->spill || index < 0 || index >= m->spill->n_layers || !down || !experts) return bw_fail(BW24_E_ARG, "bw24_spill_layer: no layer %d", index);
    *down = m->spill->layers[index].w[BW_EXP_DOWN]->name;
    *experts = m->spill->layers[index].experts;
    return 0;
}

/* ---- lists of entries that may be given up */
static spill_list *list_of(bw_spill *s, const spill_entry *e) {
    return s->policy == BW24_POLICY_SLRU ? &s->layers[e->layer].lists[e->list - 1] : &s->lru;
}

static void unlink_entry(bw_spill *s, spill_entry *e) {
    if (!e->list) return;
    spill_list *l = list_of(s, e);
    *(e->prev ? &e->prev->next : &l->head) = e->next;
    *(e->next ? &e->next->prev : &l->tail) = e->prev;
    if (s->policy == BW24_POLICY_SLRU && e->list == 2) s->layers[e->layer].protected_bytes -= e->bytes;
    e->prev = e->next = NULL;
    e->list = 0;
}

static void link_entry(bw_spill *s, spill_entry *e, int which, bool at_tail) {
    e->list = (uint8_t)which;
    spill_list *l = list_of(s, e);
    e->prev = at_tail ? l->tail : NULL;
    e->next = at_tail ? NULL : l->head;
    *(e->prev ? &e->prev->next : &l->head) = e;
    *(e->next ? &e->next->prev : &l->tail) = e;
    if (s->policy == BW24_POLICY_SLRU && which == 2) s->layers[e->layer].protected_bytes += e->bytes;
}

void spill_relink(bw_spill *s, spill_entry *e, bool at_tail) {
    if (!e->list) return;
    unlink_entry(s, e);
    link_entry(s, e, 1, at_tail);
}

static uint64_t share_of(const bw_spill *s) { return s->limit / (uint64_t)(s->n_layers ? s->n_layers : 1); }

/* a used entry becomes one that may be given up, at the place its policy gives it */
static void release(bw_spill *s, spill_entry *e, bool hit) {
    e->held = 0;
    if (e->frozen) return;
    spill_layer *l = &s->layers[e->layer];
    if (l->in_set[e->expert]) { link_entry(s, e, 1, true); return; } /* the set has it: the first to go costs nothing */
    if (s->policy != BW24_POLICY_SLRU) { link_entry(s, e, 1, s->scan && !hit); return; }
    link_entry(s, e, hit ? 2 : 1, s->scan && !hit);
    while (l->protected_bytes > share_of(s) / 5 * 4 && l->lists[1].tail != l->lists[1].head) { /* never the one just used */
        spill_entry *old = l->lists[1].tail;
        unlink_entry(s, old);
        link_entry(s, old, 1, false);
    }
}

/* the next to go when `layer` needs room: of its own where it has its share, else of the layer that has most */
static spill_entry *victim(bw_spill *s, int layer) {
    if (s->policy != BW24_POLICY_SLRU) return s->lru.tail;
    int from = layer;
    if (s->layers[layer].used + s->largest <= share_of(s) || (!s->layers[layer].lists[0].tail && !s->layers[layer].lists[1].tail))
        for (int i = 0; i < s->n_layers; i++) {
            const spill_layer *l = &s->layers[i], *best = &s->layers[from];
            bool some = l->lists[0].tail || l->lists[1].tail, best_some = best->lists[0].tail || best->lists[1].tail;
            if (some && (!best_some || l->used > best->used)) from = i;
        }
    spill_layer *l = &s->layers[from];
    return l->lists[0].tail ? l->lists[0].tail : l->lists[1].tail;
}

static void unmap(const bw_spill *s, void *slot, uint64_t bytes, bool pinned) {
    const bw_spill_set *set = s->model->ctx->backend->set;
    if (pinned && set->unpin) set->unpin(s->model, slot);
    munmap(slot, bytes);
}

/* takes the entry's memory from it */
static uint8_t *vacate(bw_spill *s, spill_entry *e) {
    uint8_t *slot = e->slot;
    unlink_entry(s, e);
    e->slot = NULL;
    e->state = SPILL_ABSENT;
    s->c.used -= e->bytes;
    s->layers[e->layer].used -= e->bytes;
    return slot;
}

void spill_drop(bw_spill *s, spill_entry *e) {
    uint64_t bytes = e->bytes;
    if (e->frozen) s->frozen_bytes -= bytes;
    e->frozen = 0;
    unmap(s, vacate(s, e), bytes, e->pinned);
}

/* an expert that has passed to the set leaves its memory to the next one: to map and pin it takes longer than to read it */
static void set_aside(bw_spill *s, spill_entry *e) {
    if (s->n_spare == SPILL_SPARES) {
        spill_drop(s, e);
        return;
    }
    s->spare[s->n_spare].bytes = e->bytes;
    s->spare[s->n_spare].pinned = e->pinned;
    s->spare[s->n_spare++].slot = vacate(s, e);
    s->c.used += e->bytes;
}

static uint8_t *take_spare(bw_spill *s, spill_entry *e) {
    for (int i = 0; i < s->n_spare; i++) {
        if (s->spare[i].bytes != e->bytes) continue;
        uint8_t *slot = s->spare[i].slot;
        e->pinned = s->spare[i].pinned;
        s->spare[i] = s->spare[--s->n_spare];
        s->c.used -= e->bytes;
        return slot;
    }
    return NULL;
}

void spill_drop_spares(bw_spill *s) {
    while (s->n_spare) {
        s->n_spare--;
        s->c.used -= s->spare[s->n_spare].bytes;
        unmap(s, s->spare[s->n_spare].slot, s->spare[s->n_spare].bytes, s->spare[s->n_spare].pinned);
    }
}

static uint64_t floor_of(const bw_spill *s) { return BW_SPILL_WAVE * s->largest; }

/* the budget, less where the system has little left; what is over it is given back */
void spill_look_at_memory(bw_spill *s) {
    int64_t now = bw_spill_clock();
    if (s->checked && now - s->checked < PRESSURE_NS) return;
    s->checked = now;
    int64_t room = (int64_t)s->c.used + bw_memory_free(s->root, true);
    uint64_t limit = room < 0 ? 0 : s->budget < (uint64_t)room ? s->budget : (uint64_t)room;
    if (limit < floor_of(s)) limit = floor_of(s);
    if (limit < s->limit && limit < s->budget) s->c.backoffs++;
    s->limit = limit;
    for (spill_entry *e; s->c.used > s->limit && (e = victim(s, 0));) {
        spill_drop(s, e);
        s->c.evictions++;
    }
}

/* an area for slots from here on, of `bytes` at least; what of the one before was not cut goes back */
static spill_area *new_area(bw_spill *s, uint64_t bytes) {
    uint64_t room = s->limit > s->c.used ? s->limit - s->c.used : 0, want = room < SPILL_AREA ? room & ~(uint64_t)(SPILL_PAGE - 1) : SPILL_AREA;
    spill_area *last = s->n_areas ? &s->areas[s->n_areas - 1] : NULL;
    if (last && last->next < last->end) munmap(last->next, (size_t)(last->end - last->next));
    if (last) last->end = last->next;
    void *p = want > bytes ? mmap(NULL, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (p == MAP_FAILED) p = mmap(NULL, want = bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, want, MADV_HUGEPAGE);
    pthread_mutex_lock(&s->lock);
    if (s->n_areas == SPILL_AREAS) memmove(s->areas, s->areas + 1, (size_t)(--s->n_areas) * sizeof *s->areas); /* its slots were touched long ago, or are as they are read */
    last = &s->areas[s->n_areas++];
    *last = (spill_area){p, p, (uint8_t *)p + want, p};
    pthread_mutex_unlock(&s->lock);
    return last;
}

/* Slots are cut from large areas: to map each by itself stops the readers, who are given pages in the same address space meanwhile. They are given back
 * one by one. */
static uint8_t *new_slot(bw_spill *s, uint64_t bytes) {
    spill_area *a = s->n_areas ? &s->areas[s->n_areas - 1] : NULL;
    if (!a || (uint64_t)(a->end - a->next) < bytes) a = new_area(s, bytes);
    if (!a) return NULL;
    pthread_mutex_lock(&s->lock);
    uint8_t *slot = a->next;
    a->next += bytes;
    pthread_mutex_unlock(&s->lock);
    return slot;
}

/* memory for an entry; false: everything is held, or `gently` and an expert would have to go */
static bool make_room(bw_spill *s, spill_entry *e, bool gently) {
    const bw_spill_set *set = s->model->ctx->backend->set;
    uint8_t *slot = take_spare(s, e);
    if (!slot && s->c.used + e->bytes > s->limit) spill_drop_spares(s);
    e->fresh = 0;
    while (!slot && s->c.used + e->bytes > s->limit) {
        spill_entry *old = gently ? NULL : victim(s, e->layer);
        if (!old) return false;
        uint64_t bytes = old->bytes;
        uint8_t *freed = vacate(s, old);
        s->c.evictions++;
        if (bytes != e->bytes) unmap(s, freed, bytes, old->pinned);
        else { /* its pages are there already */
            slot = freed;
            e->pinned = old->pinned;
        }
    }
    if (!slot) {
        slot = new_slot(s, e->bytes);
        if (!slot) return false;
        e->fresh = set && set->pin; /* pinned once it is filled: the readers take its pages from the system side by side */
        e->pinned = set && !set->pin;
    }
    e->slot = slot;
    s->c.used += e->bytes;
    s->layers[e->layer].used += e->bytes;
    if (s->c.used > s->c.peak) s->c.peak = s->c.used;
    return true;
}

/* ---- a step */
static spill_entry *step_entry(const bw_spill *s, int i) { return &s->layers[s->step_layer].entries[s->step_order[i]]; }

/* memory beyond the budget for an entry that a step cannot do without: when the system refuses even that, the step fails with zeros from here */
static bool start(bw_spill *s, spill_entry *e, bool must) {
    spill_span at;
    if (!make_room(s, e, s->passing && !must)) { /* one on its way to the set pushes none out that stays */
        if (must) spill_fail(s, "out of memory for an expert of %llu bytes", (unsigned long long)e->bytes);
        return false;
    }
    e->held = 1;
    e->failed = e->hung = 0;
    e->state = SPILL_READING;
    memset(e->pending, 0, sizeof e->pending);
    for (int m = 0; m < 3 && !e->failed; m++) {
        spill_span_of(s, e, m, &at);
        if (at.file >= 0) continue;
        spill_fail(s, "tensor %s: the router chose expert %d, which the file does not have", s->layers[e->layer].w[m]->name, e->expert);
        e->failed = 1;
    }
    if (!e->failed) spill_read(s, e);
    return true;
}

static void read_ahead(bw_spill *s, int must) {
    while (s->step_read < s->step_n && start(s, step_entry(s, s->step_read), s->step_read < must)) s->step_read++;
}

void spill_note(bw_spill *s, int32_t use) {
    if (!s->trace_cap) return;
    if (s->trace_n == s->trace_cap) { s->c.trace_lost++; return; }
    s->trace[(s->trace_head + s->trace_n++) % s->trace_cap] = use;
}

void bw_spill_begin(bw_spill *s, int layer, const int *active, int n, int rows, const int *uses, int *order, int *hits) {
    spill_layer *l = &s->layers[layer];
    int there = 0, absent = n;
    spill_look_at_memory(s);
    if (layer == 0) spill_note(s, -1);
    if (layer == 0) s->hung_at = 0;
    s->step_layer = layer;
    s->step_n = n;
    s->scan = rows > 8 && n > l->experts / 2;
    for (int i = 0; i < n; i++) {
        spill_entry *e = &l->entries[active[i]];
        bool hit = e->state == SPILL_READY;
        uint64_t count = uses ? (uint64_t)uses[active[i]] : 0;
        s->c.visits += count;
        e->uses += count;
        s->c.visit_hits += hit ? count : 0;
        spill_note(s, layer << 16 | active[i] | (hit ? INT32_MIN : 0));
        if (!hit) continue;
        unlink_entry(s, e);
        e->held = 1;
        s->step_order[there++] = active[i];
    }
    for (int i = n - 1; i >= 0; i--)
        if (!l->entries[active[i]].held) s->step_order[--absent] = active[i];
    *hits = s->step_read = there;
    s->step_from = 0;
    s->c.wanted += (uint64_t)n;
    s->c.hits += (uint64_t)there;
    memcpy(order, s->step_order, (size_t)n * sizeof *order);
    read_ahead(s, 0);
}

int bw_spill_begun(const bw_spill *s) { return s->step_read; }
bool bw_spill_in_ram(const bw_spill *s, int layer, int expert) { return s->layers[layer].entries[expert].state == SPILL_READY; }
bool bw_spill_pinned(const bw_spill *s, int layer, int expert) { return s->layers[layer].entries[expert].pinned; }
uint64_t bw_spill_total_uses(const bw_spill *s, int layer, int expert) { return s->layers[layer].entries[expert].uses; }

bool bw_spill_hold(bw_spill *s, int layer, int expert) {
    spill_entry *e = &s->layers[layer].entries[expert];
    if (e->state != SPILL_READY || e->held || !e->pinned || s->held + e->bytes + floor_of(s) > s->limit) return false;
    unlink_entry(s, e);
    e->held = 1;
    s->held += e->bytes;
    return true;
}

void bw_spill_release(bw_spill *s, int layer, int expert) {
    spill_entry *e = &s->layers[layer].entries[expert];
    s->held -= e->bytes;
    release(s, e, true);
}

void bw_spill_held_uses(bw_spill *s, int layer, const int *experts, int n, const int *uses) {
    for (int i = 0; i < n; i++) {
        uint64_t count = (uint64_t)uses[experts[i]];
        s->layers[layer].entries[experts[i]].uses += count;
        s->c.visits += count;
        s->c.visit_hits += count;
        s->c.lifted += count;
        spill_note(s, layer << 16 | experts[i] | INT32_MIN);
    }
    s->c.wanted += (uint64_t)n;
    s->c.hits += (uint64_t)n;
}

/* an entry whose reads hang: the device may still write to its memory, which is never used again */
static void forsake(bw_spill *s, spill_entry *e) {
    vacate(s, e);
    e->pinned = e->fresh = 0;
    pthread_mutex_lock(&s->lock);
    e->turn++;
    memset(e->pending, 0, sizeof e->pending);
    pthread_mutex_unlock(&s->lock);
}

/* lets go of order[step_from .. to) */
static void let_go(bw_spill *s, int to) {
    for (; s->step_from < to; s->step_from++) {
        spill_entry *e = step_entry(s, s->step_from);
        if (!e->held) continue;
        bool hit = e->state == SPILL_READY;
        if (e->failed || s->passing) {
            if (e->hung) forsake(s, e);
            else if (e->failed) spill_drop(s, e);
            else set_aside(s, e);
            e->held = e->failed = 0;
            continue;
        }
        e->state = SPILL_READY;
        release(s, e, hit);
    }
}

void bw_spill_next(bw_spill *s, int from, int to) {
    let_go(s, from);
    read_ahead(s, to);
}

void bw_spill_end(bw_spill *s) { let_go(s, s->step_n); }

bool bw_spill_wait(bw_spill *s, int layer, int expert, int matrix, uint8_t **base, uint8_t **raw) {
    spill_entry *e = &s->layers[layer].entries[expert];
    spill_span at;
    spill_span_of(s, e, matrix, &at);
    *base = (e->slot ? e->slot : s->zeros) + at.base;
    *raw = *base + (at.raw - at.base);
    if (!e->slot) return false;
    bool failed;
    if (!spill_await(s, e, matrix, &failed)) { /* not its own memory, which a late read may change */
        *base = s->zeros + at.base;
        *raw = *base + (at.raw - at.base);
        return false;
    }
    if (failed) memset(*base, 0, at.into + at.span - at.base);
    return !failed;
}

void bw_spill_time(bw_spill *s, int64_t wait_ns, int64_t compute_ns) {
    s->c.wait_ns += (uint64_t)wait_ns;
    s->c.compute_ns += (uint64_t)compute_ns;
}

const char *bw_spill_error(bw_spill *s) {
    pthread_mutex_lock(&s->lock);
    bool failed = s->failed;
    s->failed = false;
    pthread_mutex_unlock(&s->lock);
    return failed ? s->error : NULL;
}

/* ---- loading ahead, and numbers */
static int warm_batch(bw_spill *s, int layer, const int *experts, int n) {
    BW_TRY(s->model->ctx->backend->warm(s->model, layer, experts, n));
    for (int i = 0; i < n && s->policy == BW24_POLICY_FROZEN; i++) {
        spill_entry *e = &s->layers[layer].entries[experts[i]];
        if (e->state != SPILL_READY || e->frozen) continue;
        unlink_entry(s, e);
        e->frozen = 1;
        s->frozen_bytes += e->bytes;
    }
    return 0;
}

/* whether one more expert may be loaded: frozen ones leave the least that works to the others, ordinary ones push none out */
static bool warm_fits(const bw_spill *s, const spill_entry *e, uint64_t planned) {
    uint64_t kept = s->policy == BW24_POLICY_FROZEN ? floor_of(s) : 0;
    return s->c.used + planned + e->bytes + kept <= s->limit;
}

/* whether RAM holds experts of the set, too: one that moves out of it need not be read again */
static bool stays_too(const bw_spill *s) { return s->policy != BW24_POLICY_FROZEN && s->model->ctx->backend->set->both; }

/* the experts of pairs[0 ..) of one layer that are not there and fit; *taken counts the pairs consumed, *full says that no more fit */
static int collect(bw_spill *s, const int32_t *pairs, int n, int *batch, int *taken, bool *full) {
    int count = 0, layer = pairs[0];
    uint64_t planned = 0;
    for (*taken = 0; *taken < n && pairs[2 * *taken] == layer && count < s->cap_order; ++*taken) {
        spill_entry *e = &s->layers[layer].entries[pairs[2 * *taken + 1]];
        bool twice = false;
        for (int k = 0; k < count; k++) twice |= batch[k] == e->expert;
        if (twice || e->state == SPILL_READY || (s->layers[layer].in_set[e->expert] && !stays_too(s))) continue;
        if ((*full = !warm_fits(s, e, planned))) break;
        planned += e->bytes;
        batch[count++] = e->expert;
    }
    return count;
}

static int warm_all(bw_spill *s, const int32_t *pairs, int n, int *batch, int *loaded) {
    bool full = false;
    for (int i = 0, taken, count; i < n && !full; i += taken) {
        count = collect(s, pairs + 2 * i, n - i, batch, &taken, &full);
        if (count) BW_TRY(warm_batch(s, pairs[2 * i], batch, count));
        *loaded += count;
    }
    return 0;
}

int bw24_spill_warm(bw24_model *m, const int32_t *pairs, int32_t n) {
    bw_spill *s = m ? m->spill : NULL;
    if (!s || !m->prepared || !pairs || n < 0) return bw_fail(BW24_E_ARG, "bw24_spill_warm: a prepared model that was opened with bw24_spill_open is needed");
    for (int i = 0; i < n; i++)
        if (pairs[2 * i] < 0 || pairs[2 * i] >= s->n_layers || pairs[2 * i + 1] < 0 || pairs[2 * i + 1] >= s->layers[pairs[2 * i]].experts)
            return bw_fail(BW24_E_ARG, "bw24_spill_warm: there is no layer %d with an expert %d", pairs[2 * i], pairs[2 * i + 1]);
    int *batch = malloc(((size_t)s->cap_order + 1) * sizeof *batch), loaded = 0, trace = s->trace_cap;
    if (!batch) return bw_fail(BW24_E_MEMORY, "out of memory for %d experts", s->cap_order);
    bw24_spill_counts before = s->c;
    s->trace_cap = 0;
    s->checked = 0;
    spill_look_at_memory(s);
    int rc = warm_all(s, pairs, n, batch, &loaded);
    free(batch);
    s->trace_cap = trace;
    s->c.wanted = before.wanted;
    s->c.hits = before.hits;
    s->c.visits = before.visits;
    s->c.visit_hits = before.visit_hits;
    return rc ? rc : loaded;
}

int bw24_spill_stats(bw24_model *m, bw24_spill_counts *out) {
    if (!m || !m->spill) return bw_fail(BW24_E_ARG, "bw24_spill_stats: a model without bw24_spill_open");
    if (!out || out->size != sizeof *out) return bw_fail(BW24_E_ARG, "bw24_spill_stats: struct of size %u, expected %zu", out ? out->size : 0, sizeof *out);
    bw_spill *s = m->spill;
    *out = s->c;
    out->size = sizeof *out;
    out->layers = s->n_layers;
    out->budget = s->budget;
    out->vram = s->set_room;
    out->vram_used = s->set_used;
    out->floor = floor_of(s);
    out->limit = s->limit > out->floor ? s->limit : out->floor;
    for (int i = 0; i < s->n_files; i++) {
        out->mirrors += s->files[i].drive[1].alive;
        if (s->files[i].drive[0].direct < 0 || (s->files[i].mirror && s->files[i].drive[1].direct < 0)) out->direct = 0;
    }
    return 0;
}

int bw24_spill_uses(bw24_model *m, int32_t layer, uint64_t *uses) {
    if (!m || !m->spill || layer < 0 || layer >= m->spill->n_layers || !uses) return bw_fail(BW24_E_ARG, "bw24_spill_uses: no layer %d", layer);
    for (int e = 0; e < m->spill->layers[layer].experts; e++) uses[e] = m->spill->layers[layer].entries[e].uses;
    return 0;
}

int bw24_spill_trace(bw24_model *m, int32_t *out, int32_t room) {
    if (!m || !m->spill || !out || room < 0) return bw_fail(BW24_E_ARG, "bw24_spill_trace: NULL argument, or a model without bw24_spill_open");
    bw_spill *s = m->spill;
    int n = 0;
    for (; n < room && s->trace_n; n++, s->trace_n--) {
        out[n] = s->trace[s->trace_head];
        s->trace_head = (s->trace_head + 1) % s->trace_cap;
    }
    return n;
}

void bw_spill_free(bw_spill *s) {
    if (!s) return;
    spill_close_files(s);
    if (s->abandoned) return;
    spill_drop_spares(s);
    for (int i = 0; i < s->n_layers; i++) {
        for (int e = 0; s->layers[i].entries && e < s->layers[i].experts; e++)
            if (s->layers[i].entries[e].slot) unmap(s, s->layers[i].entries[e].slot, s->layers[i].entries[e].bytes, s->layers[i].entries[e].pinned);
        free(s->layers[i].entries);
        free(s->layers[i].in_set);
        free(s->layers[i].set_at);
        free(s->layers[i].place);
    }
    if (s->zeros) munmap(s->zeros, s->zeros_bytes);
    const spill_area *last = s->n_areas ? &s->areas[s->n_areas - 1] : NULL;
    if (last && last->next < last->end) munmap(last->next, (size_t)(last->end - last->next));
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->work);
    for (int i = 0; i < SPILL_DOORS; i++) pthread_cond_destroy(&s->done[i]);
    free(s->layers);
    free(s->step_order);
    free(s->trace);
    free(s->root);
    free(s);
}
