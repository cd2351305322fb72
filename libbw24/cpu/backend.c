/* Backend "cpu": opening, packing weights, resolving a plan into steps. Owns the memory of the backend; forward.c runs it. */
#define _GNU_SOURCE /* madvise, MAP_ANONYMOUS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../canon.h"
#include "../fault.h"
#include "../ref/fold.h"
#include "../ref/recur.h"
#include "state.h"

static const enum cpu_isa all_isas[] = {CPU_PORTABLE, CPU_AVX2, CPU_AVXVNNI, CPU_AVX512VNNI};

static int find_isa(const char *name, enum cpu_isa *out) {
    for (size_t i = 0; i < sizeof all_isas / sizeof *all_isas; i++)
        if (!strcmp(cpu_isa_name(all_isas[i]), name)) { *out = all_isas[i]; return 0; }
    return bw_fail(BW24_E_ARG, "isa '%s': expected portable, avx2, avxvnni or avx512vnni", name);
}

int bw24_isa_supported(const char *name) {
    enum cpu_isa isa = CPU_PORTABLE;
    if (!name) return bw_fail(BW24_E_ARG, "bw24_isa_supported: NULL argument");
    int rc = find_isa(name, &isa);
    return rc ? rc : cpu_isa_supported(isa) != 0;
}

static int cpu_open(bw24_ctx *c) {
    enum cpu_isa isa = cpu_isa_best();
    if (c->isa_name[0]) BW_TRY(find_isa(c->isa_name, &isa));
    if (!cpu_isa_supported(isa)) return bw_fail(BW24_E_UNSUPPORTED, "isa %s: this processor does not have it", cpu_isa_name(isa));
    cpu_ctx *p = calloc(1, sizeof *p);
    if (p) p->pool = cpu_pool_new(c->threads);
    if (!p || !p->pool) { free(p); return bw_fail(BW24_E_MEMORY, "%d threads cannot be started", c->threads); }
    p->isa = isa;
    c->priv = p;
    snprintf(c->isa_name, sizeof c->isa_name, "%s", cpu_isa_name(isa));
    snprintf(c->device, sizeof c->device, "cpu %s, %d thread%s", c->isa_name, c->threads, c->threads == 1 ? "" : "s");
    return 0;
}

static void cpu_close(bw24_ctx *c) {
    cpu_ctx *p = c->priv;
    cpu_pool_free(p->pool);
    free(p);
}

/* ---- weights */
/* bytes of one matrix of the tensor in packed form, 0 if it has none */
static size_t part_packed(const bw_tensor *t) { return (cpu_pack_bytes(t->type, bw_part_rows(t), t->ne[0]) + 63) & ~(size_t)63; }
static bool packs(const bw24_model *m, const bw_tensor *t) { return m->ctx->repack && t->linear && !t->places && part_packed(t) > 0; }

static cpu_weights *weights_of(bw24_model *m) {
    if (!m->priv) m->priv = calloc(1, sizeof(cpu_weights));
    return m->priv;
}

/* one mapping for all packed weights: many small ones would waste the tails of huge pages */
static int make_arena(bw24_model *m, cpu_weights *s) {
    size_t total = 0;
    for (int i = 0; i < m->n_tensors; i++)
        if (packs(m, m->tensors[i])) total += (size_t)m->tensors[i]->parts * part_packed(m->tensors[i]);
    total = (total + (1 << 21) - 1) & ~(size_t)((1 << 21) - 1);
    void *p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return bw_fail(BW24_E_MEMORY, "out of memory for %zu MiB of packed weights", total >> 20);
    madvise(p, total, MADV_HUGEPAGE);
    s->arena = p;
    s->arena_bytes = total;
    return 0;
}

typedef struct pack_job { cpu_mat *mat; const uint8_t *src; int64_t t0, t1; } pack_job;
static void pack_part(void *arg, int tid, int n) {
    const pack_job *j = arg;
    int64_t span = j->t1 - j->t0;
    cpu_pack_tiles(j->mat, j->src, j->t0 + span * tid / n, j->t0 + span * (tid + 1) / n);
}

/* gives consumed whole pages of a file mapping back; the page cache keeps the bytes */
static void drop_consumed(const bw_tensor *t, uint64_t from, uint64_t to) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t a = ((uintptr_t)t->data + from + page - 1) & ~(page - 1), b = ((uintptr_t)t->data + to) & ~(page - 1);
    if (t->mapped && b > a) madvise((void *)a, b - a, MADV_DONTNEED);
}

/* in slices of about 4 MB of the file, whose pages are given back one slice after the other */
static void pack_matrix(bw24_model *m, const bw_tensor *t, cpu_mat *mat, uint64_t from) {
    int64_t tiles = cpu_tiles(mat->rows), row = bw_row_bytes(t->type, mat->cols), slice = 1 + (4 << 20) / (row * CPU_TILE);
    for (int64_t at = 0; at < tiles; at += slice) {
        int64_t end = at + slice < tiles ? at + slice : tiles;
        pack_job job = {mat, t->data + from, at, end};
        cpu_pool_run(((cpu_ctx *)m->ctx->priv)->pool, pack_part, &job);
        drop_consumed(t, from + (uint64_t)(at * CPU_TILE * row), from + (uint64_t)(end == tiles ? mat->rows * row : end * CPU_TILE * row));
    }
}

static int cpu_prepare_tensor(bw24_model *m, bw_tensor *t) {
    cpu_weights *s = weights_of(m);
    if (!s) return bw_fail(BW24_E_MEMORY, "out of memory for a model");
    cpu_mat *mat = calloc((size_t)t->parts, sizeof *mat);
    if (!mat) return bw_fail(BW24_E_MEMORY, "out of memory for tensor %s", t->name);
    t->packed = mat;
    bool pack = packs(m, t);
    if (pack && !s->arena) BW_TRY(make_arena(m, s));
    for (int p = 0; p < t->parts; p++) {
        uint64_t from = (uint64_t)p * (uint64_t)bw_part_bytes(t);
        mat[p] = (cpu_mat){.type = t->type, .rows = bw_part_rows(t), .cols = t->ne[0], .scale = BW_SEEDED(4, 1.0f, t->scale)};
        if (!pack) { mat[p].raw = t->data + from; continue; }
        mat[p].data = s->arena + s->arena_used;
        s->arena_used += part_packed(t);
        t->packed_bytes += cpu_pack_bytes(t->type, mat[p].rows, mat[p].cols);
        pack_matrix(m, t, &mat[p], from);
    }
    return 0;
}

static int cpu_repack(bw24_model *m, bw_tensor *t, int64_t first, int64_t n) {
    cpu_mat *mat = t->packed;
    (void)m;
    if (mat && mat->data) cpu_pack_tiles(mat, t->data, first / CPU_TILE, (first + n + CPU_TILE - 1) / CPU_TILE);
    return 0;
}

static void cpu_free_tensor(bw_tensor *t) { free(t->packed); }

/* ---- the plan, resolved */
static bool same_rope(const cpu_rope_cfg *c, const bw_op *op) {
    return c->rot == op->i[2] && c->base == op->f[0] && c->scale == op->f[1] && c->ff == op->w[0];
}

static int add_rope(bw24_model *m, cpu_model *s, const bw_op *op, int *index) {
    for (*index = 0; *index < s->n_ropes; ++*index)
        if (same_rope(&s->ropes[*index], op)) return 0;
    cpu_rope_cfg *grown = realloc(s->ropes, (size_t)(s->n_ropes + 1) * sizeof *grown);
    if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for a rotation");
    s->ropes = grown;
    cpu_rope_cfg *c = &s->ropes[s->n_ropes++];
    int half = op->i[2] / 2;
    *c = (cpu_rope_cfg){op->i[2], op->f[0], op->f[1], op->w[0], malloc((size_t)half * sizeof(double)), NULL};
    c->table = malloc((size_t)m->max_rows * (size_t)op->i[2] * sizeof(float));
    if (!c->inv || !c->table) return bw_fail(BW24_E_MEMORY, "out of memory for a rotation of %d rows", m->max_rows);
    m->work_bytes += (uint64_t)m->max_rows * (uint64_t)op->i[2] * sizeof(float);
    for (int i = 0; i < half; i++) c->inv[i] = bw_inv_freq(c->base, i, c->rot) / (double)(c->ff ? c->ff->dense[i] : 1.0f);
    return 0;
}

/* a spilled layer: where its matrices are changes from step to step, what they are does not */
static int resolve_spilled(bw24_model *m, cpu_moe *moe, const bw_op *op, cpu_step *out) {
    cpu_weights *w = weights_of(m);
    if (!w) return bw_fail(BW24_E_MEMORY, "out of memory for a model");
    BW_TRY(bw_spill_layer(m, op, cpu_spill_room, &out->spill));
    cpu_mat **grown = realloc(w->spilled, (size_t)(out->spill + 1) * sizeof *grown);
    out->waves = calloc((size_t)cpu_max_waves(op->experts), sizeof *out->waves);
    if (grown) w->spilled = grown;
    if (!grown || !out->waves) return bw_fail(BW24_E_MEMORY, "out of memory for a layer's experts");
    w->spilled[out->spill] = out->mats;
    w->n_spilled = out->spill + 1;
    for (int i = 0; i < 3 * op->experts; i++) {
        const bw_type_info *t = out->mats[i].type;
        size_t tile = (size_t)(CPU_TILE * bw_row_bytes(t, out->mats[i].cols));
        if (tile > moe->max_tile) moe->max_tile = tile;
    }
    return 0;
}

/* gate, up and down of each expert; the MoE scratch grows to the largest layer */
static int resolve_experts(bw24_model *m, cpu_moe *moe, const bw_list *l, const bw_op *op, cpu_step *out) {
    bool spilled = bw_spilled(op);
    out->mats = calloc(3 * (size_t)op->experts, sizeof *out->mats);
    if (!out->mats) return bw_fail(BW24_E_MEMORY, "out of memory for %d experts", op->experts);
    for (int i = 0; i < 3 * op->experts; i++) {
        int part;
        const bw_tensor *scale, *t = bw_expert_part(op, i % 3, i / 3, &part, &scale);
        if (spilled) out->mats[i] = (cpu_mat){.type = bw_spill_type(op, i / 3, i % 3), .rows = bw_part_rows(t), .cols = t->ne[0], .scale = t->scale};
        else out->mats[i] = ((cpu_mat *)t->packed)[part];
        if (scale) out->mats[i].scale = scale->dense[i / 3];
        if (out->mats[i].type->form == BW_FLOAT) out->floats = true;
        else out->quant = true;
    }
#define GROW(field, value) if ((value) > moe->field) moe->field = (value)
    GROW(max_experts, op->experts);
    GROW(max_top, (int)l->bufs[op->buf[2]].width / 2);
    GROW(max_in, out->mats[0].cols);
    GROW(max_ff, out->mats[BW_EXP_DOWN].cols);
    GROW(max_out, out->mats[BW_EXP_DOWN].rows);
#undef GROW
    return spilled ? resolve_spilled(m, moe, op, out) : 0;
}

static int resolve_conv(const bw_op *op, cpu_step *out) {
    int64_t taps = op->w[0]->ne[0], n = op->w[0]->ne[1];
    out->conv = malloc((size_t)(taps * n) * sizeof *out->conv);
    if (!out->conv) return bw_fail(BW24_E_MEMORY, "out of memory for the weights of a convolution");
    for (int64_t c = 0; c < n; c++)
        for (int64_t t = 0; t < taps; t++) out->conv[t * n + c] = op->w[0]->dense[c * taps + t];
    return 0;
}

/* one matrix a head; room for the activations grows to the largest op */
static int resolve_perhead(const bw24_model *m, cpu_model *s, const bw_op *op, cpu_step *out) {
    size_t heads = (size_t)op->i[0], need = heads * cpu_head_bytes(m, op);
    out->mats = malloc(heads * sizeof *out->mats);
    if (!out->mats) return bw_fail(BW24_E_MEMORY, "out of memory for %zu heads", heads);
    memcpy(out->mats, op->w[0]->packed, heads * sizeof *out->mats);
    if (need > s->head_bytes) s->head_bytes = need;
    return 0;
}

static int resolve_step(bw24_model *m, cpu_model *s, const bw_list *l, const bw_step *st, cpu_step *out) {
    const bw_op *first = &l->ops[st->first];
    bool moe = first->code == BW_OP_EXPERTS;
    out->phase = s->n_phases;
    out->spill = -1;
    s->n_phases += !moe ? 2 : bw_spilled(first) ? 4 + CPU_WAVE_PHASES * cpu_max_waves(first->experts) : CPU_MOE_PHASES;
    if (first->code == BW_OP_CONV) return resolve_conv(first, out);
    if (first->code == BW_OP_PERHEAD) return resolve_perhead(m, s, first, out);
    if (moe) return resolve_experts(m, &s->moe, l, first, out);
    out->mats = calloc((size_t)(st->n_lin ? st->n_lin : 1), sizeof *out->mats);
    if (!out->mats) return bw_fail(BW24_E_MEMORY, "out of memory for a step of the plan");
    for (int i = 0; i < st->n_lin; i++) {
        const bw_op *op = &l->ops[st->lin0 + i];
        out->mats[i] = *(cpu_mat *)op->w[0]->packed;
        out->mats[i].bias = op->w[1] ? op->w[1]->dense : NULL;
        if (op->w[0]->type->form == BW_FLOAT) out->floats = true;
        else out->quant = true;
        if (st->glu < 0 || i == 0) out->tiles += cpu_tiles(out->mats[i].rows);
    }
    return 0;
}

typedef struct widths { int64_t buf, in, state; size_t attend; } widths;
static widths find_widths(const bw24_model *m, const bw_list *l) {
    widths w = {64, 64, 0, 0};
    for (int i = 0; i < l->n_bufs; i++)
        if (i != l->logits && l->bufs[i].width > w.buf) w.buf = l->bufs[i].width;
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code == BW_OP_LINEAR && op->w[0]->ne[0] > w.in) w.in = op->w[0]->ne[0];
        if (op->code == BW_OP_DELTA && l->bufs[op->buf[2]].width / op->i[1] > w.state) w.state = l->bufs[op->buf[2]].width / op->i[1];
        if (op->code != BW_OP_ATTEND) continue;
        size_t need = cpu_attend_work(&l->kvs[op->kv].desc, m->max_rows, op->i[0]);
        if (need > w.attend) w.attend = need;
    }
    return w;
}

static void *aligned(bw24_model *m, size_t bytes) {
    m->work_bytes += bytes;
    return bw_work_alloc(bytes);
}

static int make_threads(bw24_model *m, cpu_model *s, const widths *w) {
    s->threads = calloc((size_t)m->ctx->threads, sizeof *s->threads);
    if (!s->threads) return bw_fail(BW24_E_MEMORY, "out of memory for %d threads", m->ctx->threads);
    for (int t = 0; t < m->ctx->threads; t++) {
        cpu_thread *th = &s->threads[t];
        th->work = aligned(m, CPU_LINEAR_WORK + w->attend);
        th->row = aligned(m, (size_t)w->buf * sizeof(float));
        th->tile = s->moe.max_tile ? aligned(m, s->moe.max_tile) : NULL;
        th->state = w->state ? aligned(m, (size_t)w->state * BW_DELTA_COLS * sizeof(float)) : NULL;
        void *q = aligned(m, cpu_act_bytes(1, w->in, 0)), *f = aligned(m, cpu_act_bytes(1, w->in, 1));
        th->act_q.mem = q;
        th->act_f.mem = f;
        if (!th->work || !th->row || !q || !f || (s->moe.max_tile && !th->tile) || (w->state && !th->state)) return bw_fail(BW24_E_MEMORY, "out of memory for a thread's scratch");
    }
    return 0;
}

static int make_moe(bw24_model *m, cpu_moe *s, bool quant, bool floats) {
    if (!s->max_experts) return 0;
    int pairs = m->max_rows * s->max_top;
    size_t n = (size_t)pairs;
    s->start = calloc((size_t)s->max_experts, sizeof *s->start);
    s->count = calloc((size_t)s->max_experts, sizeof *s->count);
    s->active = calloc((size_t)s->max_experts, sizeof *s->active);
    s->place = calloc(n, sizeof *s->place);
    s->pair = calloc(n, sizeof *s->pair);
    s->h = aligned(m, n * (size_t)s->max_ff * sizeof(float));
    s->d = aligned(m, n * (size_t)s->max_out * sizeof(float));
    if (quant) s->in_q = aligned(m, cpu_act_bytes(pairs, s->max_in, 0));
    if (quant) s->mid_q = aligned(m, cpu_act_bytes(pairs, s->max_ff, 0));
    if (floats) s->in_f = aligned(m, cpu_act_bytes(pairs, s->max_in, 1));
    if (floats) s->mid_f = aligned(m, cpu_act_bytes(pairs, s->max_ff, 1));
    bool have = s->start && s->count && s->active && s->place && s->pair && s->h && s->d && (!quant || (s->in_q && s->mid_q)) && (!floats || (s->in_f && s->mid_f));
    return have ? 0 : bw_fail(BW24_E_MEMORY, "out of memory for the experts of %d rows", m->max_rows);
}

static void free_moe(cpu_moe *s) {
    free(s->start);
    free(s->count);
    free(s->active);
    free(s->place);
    free(s->pair);
    free(s->h);
    free(s->d);
    free(s->in_q);
    free(s->in_f);
    free(s->mid_q);
    free(s->mid_f);
}

static int cpu_prepare_list(bw24_model *m, bw_list *l) {
    cpu_model *s = l->priv = calloc(1, sizeof *s);
    if (!s) return bw_fail(BW24_E_MEMORY, "out of memory for a list");
    widths w = find_widths(m, l);
    bool quant = false, floats = false, moe_quant = false, moe_floats = false;
    s->n_phases = 2;
    s->steps = calloc((size_t)l->plan->n_steps, sizeof *s->steps);
    s->rope_of = calloc((size_t)l->n_ops, sizeof *s->rope_of);
    s->bounds = calloc((size_t)m->max_rows * (2 * BW_MAX_CLASS + 2), sizeof *s->bounds);
    s->groups = calloc((size_t)m->max_rows + 1, sizeof *s->groups);
    if (!s->steps || !s->rope_of || !s->bounds || !s->groups) return bw_fail(BW24_E_MEMORY, "out of memory for a plan of %d steps", l->plan->n_steps);
    for (int i = 0; i < l->n_ops; i++)
        if (l->ops[i].code == BW_OP_ROPE) BW_TRY(add_rope(m, s, &l->ops[i], &s->rope_of[i]));
    for (int i = 0; i < l->plan->n_steps; i++) {
        BW_TRY(resolve_step(m, s, l, &l->plan->steps[i], &s->steps[i]));
        bool moe = l->ops[l->plan->steps[i].first].code == BW_OP_EXPERTS;
        *(moe ? &moe_quant : &quant) |= s->steps[i].quant;
        *(moe ? &moe_floats : &floats) |= s->steps[i].floats;
    }
    s->phases = aligned_alloc(64, (size_t)s->n_phases * sizeof *s->phases);
    if (!s->phases) return bw_fail(BW24_E_MEMORY, "out of memory for a plan of %d steps", l->plan->n_steps);
    BW_TRY(make_threads(m, s, &w));
    BW_TRY(make_moe(m, &s->moe, moe_quant, moe_floats));
    if (s->head_bytes && !(s->head_acts = aligned(m, s->head_bytes))) return bw_fail(BW24_E_MEMORY, "out of memory for the heads of %d rows", m->max_rows);
    if (quant && !(s->act_q_mem = aligned(m, cpu_act_bytes(m->max_rows, w.in, 0)))) return bw_fail(BW24_E_MEMORY, "out of memory for activations of %d rows", m->max_rows);
    if (floats && !(s->act_f_mem = aligned(m, cpu_act_bytes(m->max_rows, w.in, 1)))) return bw_fail(BW24_E_MEMORY, "out of memory for activations of %d rows", m->max_rows);
    return 0;
}

static void free_list(bw24_model *m, bw_list *l) {
    cpu_model *s = l->priv;
    if (!s) return;
    for (int i = 0; s->steps && l->plan && i < l->plan->n_steps; i++) {
        free(s->steps[i].mats);
        free(s->steps[i].waves);
        free(s->steps[i].conv);
    }
    for (int i = 0; i < s->n_ropes; i++) {
        free(s->ropes[i].inv);
        free(s->ropes[i].table);
    }
    for (int t = 0; s->threads && t < m->ctx->threads; t++) {
        free(s->threads[t].work);
        free(s->threads[t].row);
        free(s->threads[t].state);
        free(s->threads[t].tile);
        free(s->threads[t].act_q.mem);
        free(s->threads[t].act_f.mem);
        free(s->threads[t].pages);
    }
    free_moe(&s->moe);
    free(s->ropes);
    free(s->rope_of);
    free(s->steps);
    free(s->phases);
    free(s->bounds);
    free(s->groups);
    free(s->threads);
    free(s->act_q_mem);
    free(s->act_f_mem);
    free(s->head_acts);
    free(s->acc);
    free(s);
    l->priv = NULL;
}

static void cpu_free_model(bw24_model *m) {
    cpu_weights *s = m->priv;
    for (int i = 0; i < m->n_lists; i++) free_list(m, m->lists[i]);
    if (s && s->arena) munmap(s->arena, s->arena_bytes);
    if (s) free(s->spilled);
    if (s && s->set) munmap(s->set, s->set_bytes);
    free(s);
    m->priv = NULL;
}

static bool cpu_kv_supported(const bw_kv_desc *d) { return cpu_kv_page_bytes(d) > 0; }

const bw_backend bw_backend_cpu = {
    .name = "cpu", .kv_page_bytes = cpu_kv_page_bytes, .kv_supported = cpu_kv_supported, .open = cpu_open, .close = cpu_close,
    .prepare_tensor = cpu_prepare_tensor, .repack = cpu_repack, .prepare_list = cpu_prepare_list, .free_tensor = cpu_free_tensor, .free_model = cpu_free_model,
    .replay = cpu_replay, .forward = cpu_forward, .roles = true, .borrows = true, .warm = cpu_warm, .set = &cpu_set, .predict = cpu_predict,
};
