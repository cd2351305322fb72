/* EXPERTS divided between the card and the processor: the card computes those of its set (spill.h), backend cpu's kernels the others from memory or
 * files (cpu/host.h), at the same time; one kernel sums the slots in their order. Owns the set's memory, the exchange through pinned memory and the wait
 * for the router's choice; knows no policy and no file. */
#include <climits>
#include <cstring>
#include "../cpu/host.h"
#include "../spill.h"
#include "forward.h"
#include "op_experts_sum.cuh"

namespace bw {

enum { UNIT = 256 }; /* bytes: what places in the set are counted in */

/* Pairs from which on an expert is sooner done over the bus and through the card than by the processor: a fixed part of 120 us for launches and copies and
 * its bytes at the bus's measured rate, against the processor's operations at 62.5 a ns and thread (int8 products of many rows). 16 threads, 50 GB/s: an expert
 * of 10.6 MB from 9 pairs on, one of 0.9 MB from 44; with a limit of 8 a prompt over those took 1.2 to 1.7 times as long as on the processor. */
static int lift_from(const bw24_model *m, const CuSplitLayer &y, double bus_rate) {
    double ops = 0;
    for (auto &x : y.m) ops += 2.0 * x.rows * x.cols;
    return 1 + (int)((120e-6 + (double)y.packed / bus_rate) * CU_WIDE_OPS * m->ctx->threads / ops);
}

/* ---- making */
static int pin(bw24_model *m, void **out, size_t bytes) {
    cudaError_t e = cudaHostAlloc(out, bytes ? bytes : 16, cudaHostAllocDefault);
    return e ? cu_fail(m->ctx, e, "pinned memory for experts") : 0;
}

static int make_split(bw24_model *m) {
    CuSplit *s = model_of(m)->split = new CuSplit();
    size_t bytes = (size_t)bw_spill_set_bytes(m->spill);
    int rc = bw_host_new(m, &s->host);
    if (!rc) rc = cu_alloc(m, (void **)&s->set, bytes, "the card's experts");
    if (rc) return rc;
    model_of(m)->owned.push_back(s->set);
    cudaError_t e = cudaEventCreateWithFlags(&s->event, cudaEventDisableTiming);
    return e ? cu_fail(m->ctx, e, "an event") : 0;
}

/* buffers for the widest op of the lists so far */
static int make_buffers(bw24_model *m, const bw_list *l, CuSplit *s) {
    size_t x = s->x_floats, route = s->route_floats, rows = (size_t)m->max_rows, experts = 0;
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code != BW_OP_EXPERTS) continue;
        size_t a = rows * (size_t)l->bufs[op->buf[1]].width, b = rows * (size_t)l->bufs[op->buf[2]].width;
        x = a > x ? a : x;
        route = b > route ? b : route;
        experts = (size_t)op->experts > experts ? (size_t)op->experts : experts;
    }
    if (x == s->x_floats && route == s->route_floats && experts <= s->experts) return 0;
    s->experts = experts > s->experts ? experts : s->experts;
    for (void *p : {(void *)s->x, (void *)s->route, (void *)s->ints, (void *)s->tiles})
        if (p) cudaFreeHost(p);
    s->x = s->route = NULL;
    s->ints = s->tiles = NULL;
    s->x_floats = x;
    s->route_floats = route;
    s->pairs = route / 2;
    int rc = pin(m, (void **)&s->x, x * sizeof(float));
    if (!rc) rc = pin(m, (void **)&s->route, route * sizeof(float));
    if (!rc) rc = pin(m, (void **)&s->ints, 2 * s->pairs * sizeof(int));
    if (!rc) rc = pin(m, (void **)&s->tiles, sizeof(int) + (s->pairs / EXPERT_TILE + s->experts) * sizeof(ExpertTile));
    return rc ? rc : cu_model_alloc(m, (void **)&s->dev_ints, 2 * s->pairs * sizeof(int), "experts");
}

int cu_split_list(bw24_model *m, bw_list *l) {
    int rc = model_of(m)->split ? 0 : make_split(m);
    CuSplit *s = model_of(m)->split;
    if (!rc) rc = bw_host_list(s->host, l);
    if (!rc) rc = make_buffers(m, l, s);
    void *d = NULL;
    size_t bytes = rc ? 0 : bw_host_results(s->host, l, &d);
    if (!bytes) return rc;
    cudaError_t e = cudaHostRegister(d, bytes, cudaHostRegisterDefault);
    if (e) return cu_fail(m->ctx, e, "pinned memory for experts");
    s->pinned.push_back(d);
    return 0;
}

int cu_split_layer(bw24_model *m, const bw_list *l, int index, CuExperts *x) {
    CuSplit *s = model_of(m)->split;
    const bw_op *op = &l->ops[index];
    x->layer = bw_host_layer(s->host, l, index);
    s->layers.resize((size_t)x->layer + 1);
    CuSplitLayer &y = s->layers[(size_t)x->layer];
    y.op = op;
    for (int k = 0; k < 3; k++) {
        int part;
        const bw_tensor *scale, *t = bw_expert_part(op, k, 0, &part, &scale);
        for (int e = 0; e < op->experts; e++)
            if (bw_spill_type(op, e, k) != t->type)
                return bw_fail(BW24_E_UNSUPPORTED, "tensor %s: backend cuda wants all experts of a layer in one type, found %s and %s", t->name, t->type->name,
                               bw_spill_type(op, e, k)->name);
        cu_describe(t, &y.m[k]);
    }
    y.packed = cu_lift_packed(y);
    return cu_model_alloc(m, (void **)&y.at, 3 * (size_t)op->experts * sizeof(uint32_t), "experts");
}

void cu_split_free(CuModel *all) {
    CuSplit *s = all->split;
    if (!s) return;
    for (void *p : s->pinned) cudaHostUnregister(p);
    for (void *p : {(void *)s->x, (void *)s->route, (void *)s->ints, (void *)s->tiles, (void *)s->seen, (void *)s->at})
        if (p) cudaFreeHost(p);
    if (s->event) cudaEventDestroy(s->event);
    cu_bus_free(&s->bus);
    cu_lift_free(&s->lift);
    bw_host_free(s->host);
    delete s;
    all->split = NULL;
}

int cu_warm(bw24_model *m, int layer, const int *experts, int n) { return bw_host_warm(model_of(m)->split->host, layer, experts, n); }

/* ---- the set */
static size_t set_bytes(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols) {
    (void)m;
    return cu_matrix_bytes(t, rows, cols);
}

static int set_put(bw24_model *m, int layer, int expert, int matrix, uint64_t offset, const uint8_t *raw) {
    CuSplit *s = model_of(m)->split;
    const CuSplitLayer &y = s->layers[(size_t)layer];
    int part, rc = cu_alive(m->ctx);
    const bw_tensor *scale, *t = bw_expert_part(y.op, matrix, expert, &part, &scale);
    return rc ? rc : cu_fill_part(m, t, &y.m[matrix], s->set + offset, raw, bw_spill_pinned(m->spill, layer, expert));
}

static int set_wait(bw24_model *m) {
    cudaError_t e = cudaStreamSynchronize(ctx_of(m)->q.stream);
    return e ? cu_fail(m->ctx, e, "experts") : 0;
}

/* one area for the routes of layers whose choice the host does not wait for */
static int make_seen(bw24_model *m, CuSplit *s) { return s->seen ? 0 : pin(m, (void **)&s->seen, s->layers.size() * s->route_floats * sizeof(float)); }

static int make_places(bw24_model *m, CuSplit *s) {
    size_t n = 0;
    for (auto &y : s->layers) n += 3 * (size_t)y.op->experts;
    int rc = s->at ? 0 : pin(m, (void **)&s->at, n * sizeof(uint32_t));
    n = 0;
    for (auto &y : s->layers) {
        y.at_host = s->at + n;
        n += 3 * (size_t)y.op->experts;
    }
    return rc;
}

static int set_settle(bw24_model *m) {
    CuSplit *s = model_of(m)->split;
    int rc = cu_alive(m->ctx);
    if (!rc) rc = make_places(m, s);
    for (size_t i = 0; i < s->layers.size() && !rc; i++) {
        CuSplitLayer &y = s->layers[i];
        const uint8_t *in = bw_spill_in_set(m->spill, (int)i);
        int n = y.op->experts, have = 0;
        memset(y.at_host, 0, 3 * (size_t)n * sizeof(uint32_t));
        for (int e = 0; e < n; e++) {
            have += in[e];
            for (int k = 0; k < 3 && in[e]; k++) y.at_host[(size_t)(k * n + e)] = (uint32_t)(bw_spill_set_at(m->spill, (int)i, e, k) / UNIT);
        }
        y.whole = have == n;
        if (y.whole) rc = make_seen(m, s);
        const int put = cu_put(m, y.at, y.at_host, 3 * (size_t)n * sizeof(uint32_t), "experts");
        if (put) rc = put;
    }
    cudaError_t e = cudaStreamSynchronize(ctx_of(m)->q.stream);
    return e && !rc ? cu_fail(m->ctx, e, "experts") : rc;
}

/* memory of the budget, for copies by the card (bus.cu): without it they would go through a second place. 10 MiB take half a millisecond. */
static bool set_pin(bw24_model *m, void *at, size_t bytes) {
    cudaError_t e = cu_alive(m->ctx) ? cudaErrorUnknown : cudaHostRegister(at, bytes, cudaHostRegisterDefault);
    if (e) cudaGetLastError();
    return !e;
}
static void set_unpin(bw24_model *m, void *at) {
    (void)m;
    if (cudaHostUnregister(at)) cudaGetLastError();
}

const bw_spill_set cu_set = {set_bytes, set_put, set_wait, set_settle, set_pin, set_unpin, true};

/* ---- running */
bool cu_split_waits(const bw24_model *m, const CuList *s) {
    for (auto &x : s->experts)
        if (x.layer >= 0 && !model_of(m)->split->layers[(size_t)x.layer].whole) return true;
    return false;
}

void split_begin(Pass &p) {
    const CuSplit *s = model_of(p.m)->split;
    if (s && p.l->index == 0 && !s->layers.empty() && s->layers[0].whole) bw_spill_step(p.m->spill);
}

void split_count(Pass &p) {
    CuSplit *s = model_of(p.m)->split;
    if (!s) return;
    for (auto &c : p.s->steps) {
        if (c.kind != CU_EXPERTS) continue;
        const CuExperts &x = p.s->experts[(size_t)c.at];
        if (x.layer < 0 || !s->layers[(size_t)x.layer].whole) continue;
        std::vector<int> uses((size_t)x.experts, 0), list;
        const float *route = s->seen + (size_t)x.layer * s->route_floats;
        for (int i = 0; i < rows_of(p, c) * x.top; i++) {
            int e = (int)route[(size_t)(i / x.top) * 2 * (size_t)x.top + (size_t)(x.top + i % x.top)];
            if (!uses[(size_t)e]++) list.push_back(e);
        }
        bw_spill_set_uses(p.m->spill, x.layer, list.data(), (int)list.size(), uses.data());
    }
}

static void fetch_async(Pass &p, void *to, const void *from, size_t bytes) {
    if (!p.q->error) p.q->error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, p.q->stream);
}

/* The op's rows and the router's choice come to the host, which waits for them; for the choice alone where many rows come, so that it may divide them
 * meanwhile: whoever reads the rows synchronises the stream first. */
static bool bring(Pass &p, CuSplit *s, const CuExperts &x, int n, bool narrow) {
    const size_t rows = (size_t)n * (size_t)width_of(p, x.x) * sizeof(float);
    int64_t begun = bw_spill_clock();
    if (narrow) fetch_async(p, s->x, buf_of(p, x.x), rows);
    fetch_async(p, s->route, buf_of(p, x.route), (size_t)n * (size_t)width_of(p, x.route) * sizeof(float));
    if (!p.q->error) p.q->error = cudaEventRecord(s->event, p.q->stream);
    if (!narrow) fetch_async(p, s->x, buf_of(p, x.x), rows);
    if (!p.q->error) p.q->error = cudaEventSynchronize(s->event);
    bw_spill_card_time(p.m->spill, bw_spill_clock() - begun);
    return !p.q->error;
}

static bool choices_exist(const CuSplit *s, const CuExperts &x, int n) {
    for (int i = 0; i < n * x.top; i++) {
        float e = s->route[(size_t)(i / x.top) * 2 * (size_t)x.top + (size_t)(x.top + i % x.top)];
        if (!(e >= 0 && e < (float)x.experts)) return false;
    }
    return true;
}

/* Many rows: tiles over the pairs of one expert, by place; tile_at: the first tile of place i or of a place behind it. Their number is the launches'. */
static void make_tiles(Pass &p, CuSplit *s, const CuExperts &x, const bw_host_step &h) {
    ExpertTile *tiles = (ExpertTile *)(s->tiles + 1);
    int n = 0, blocks = 0;
    s->tile_at.assign((size_t)h.pairs + 1, 0);
    auto expert = [&](int at) { return (int)s->route[(size_t)(h.pair[at] / x.top) * 2 * (size_t)x.top + (size_t)(x.top + h.pair[at] % x.top)]; };
    for (int at = h.own, end; at < h.pairs; at = end) {
        for (end = at + 1; end < h.pairs && end < at + EXPERT_TILE && expert(end) == expert(at);) end++;
        for (int i = at; i < end; i++) s->tile_at[(size_t)i] = i == at ? n : n + 1;
        tiles[n++] = {expert(at), at, end - at, blocks};
        blocks += tile_height(end - at) / 32;
    }
    s->tile_at[(size_t)h.pairs] = n;
    s->tiles[0] = INT_MAX;
    if (!p.q->error) p.q->error = cudaMemcpyAsync(expert_tiles_at(p, x), s->tiles, sizeof(int) + (size_t)n * sizeof(ExpertTile), cudaMemcpyHostToDevice, p.q->stream);
}

void run_placed(Pass &p, const CuStep &c, const CuExperts &x, const int *order, int first, int n) {
    const CuSplit *s = model_of(p.m)->split;
    if (rows_of(p, c) <= EXPERT_ROWS || !expert_gemm_fits(p, x)) return run_expert_products(p, c, x, order + first, n);
    const int *tiles = expert_tiles_at(p, x), from = s->tile_at[(size_t)first], to = s->tile_at[(size_t)(first + n)];
    run_expert_tiles(p, c, x, order, tiles, (const ExpertTile *)(tiles + 1) + from, to - from);
}

/* products of the set's experts and of those that come from RAM; order: the pairs by place, on the device */
static void card_products(Pass &p, const CuStep &c, const CuExperts &x, const bw_host_step &h) {
    CuSplit *s = model_of(p.m)->split;
    memcpy(s->ints, h.place, (size_t)h.pairs * sizeof(int));
    memcpy(s->ints + h.pairs, h.pair, (size_t)h.pairs * sizeof(int));
    if (!p.q->error) p.q->error = cudaMemcpyAsync(s->dev_ints, s->ints, 2 * (size_t)h.pairs * sizeof(int), cudaMemcpyHostToDevice, p.q->stream);
    if (rows_of(p, c) > EXPERT_ROWS && expert_gemm_fits(p, x)) make_tiles(p, s, x, h);
    const int *order = s->dev_ints + h.pairs;
    if (h.first_set < h.pairs) run_placed(p, c, x, order, h.first_set, h.pairs - h.first_set);
    if (s->bus.n) cu_bus_products(p, c, x, order + h.own);
    else if (h.lifted) run_lifted(p, c, h, order);
}

int split_finish(Pass &p) {
    if (!p.open) return p.rc;
    CuSplit *s = model_of(p.m)->split;
    const CuStep &c = *p.open;
    const CuExperts &x = p.s->experts[(size_t)c.at];
    const bw_host_step &h = s->step;
    const int n = rows_of(p, c), out = x.m[BW_EXP_DOWN].rows;
    p.open = NULL;
    const int64_t joined = bw_spill_clock();
    int rc = bw_host_work(s->host, p.l, c.first);
    if (!p.rc) p.rc = rc;
    cu_lift_time(p.m, s, joined);
    cu_bus_time(s, (double)s->layers[(size_t)x.layer].packed, s->begun);
    const ExpertsSum sum = {h.d, h.own, s->dev_ints, (const float *)p.s->moe.mem[MOE_D], buf_of(p, x.route), buf_of(p, x.y), out, x.top};
    launch(*p.q, k_experts_sum, dim3((unsigned)((out + SUM_COLS - 1) / SUM_COLS), (unsigned)n), 256, 0, sum);
    p.quantised[(size_t)x.y] = 0;
    return p.rc;
}

static bool touches(const bw_op *op, int buf) {
    for (int b : op->buf)
        if (b == buf) return true;
    return false;
}

bool split_open_over(const Pass &p, const CuStep &c) {
    const CuExperts &x = p.s->experts[(size_t)p.open->at];
    if ((c.kind != CU_LINEARS && c.kind != CU_ROWS) || c.short_n) return false;
    int from = c.kind == CU_ROWS ? c.first : c.step->norm >= 0 ? c.step->norm : c.step->lin0;
    int to = c.kind == CU_ROWS ? c.first + c.n : c.step->lin0 + c.step->n_lin;
    if (c.kind == CU_LINEARS && c.step->glu >= to) to = c.step->glu + 1;
    if (c.kind == CU_LINEARS && c.step->add >= to) to = c.step->add + 1;
    for (int i = from; i < to; i++)
        if (touches(&p.l->ops[i], x.y) || p.l->ops[i].buf[0] == x.route) return false;
    return true;
}

/* The processor begins, the bus and the card follow, where what comes over the bus is held in RAM; else those that the card lifts are read first. */
static void divide(Pass &p, const CuStep &c, const CuExperts &x, const bw_host_step &h, bool narrow) {
    CuSplit *s = model_of(p.m)->split;
    const bool together = narrow || !s->lift.held.empty();
    if (together) {
        bw_host_begin(s->host, p.l, c.first);
        bw_host_start(s->host, p.l, c.first);
        if (s->bus.n) cu_bus_bring(p, c, x);
    }
    card_products(p, c, x, h);
    if (!together) bw_host_begin(s->host, p.l, c.first);
    p.open = &c;
    if (!narrow) split_finish(p);
}

bool run_split(Pass &p, const CuStep &c) {
    CuSplit *s = model_of(p.m)->split;
    const CuExperts &x = p.s->experts[(size_t)c.at];
    const int n = rows_of(p, c);
    const bool narrow = n <= EXPERT_ROWS;
    if (s->layers[(size_t)x.layer].whole) {
        fetch_async(p, s->seen + (size_t)x.layer * s->route_floats, buf_of(p, x.route), (size_t)n * (size_t)width_of(p, x.route) * sizeof(float));
        return false;
    }
    if (!bring(p, s, x, n, narrow)) return true;
    cu_bus_end(p.m, false);
    if (!choices_exist(s, x, n)) return p.unrouted = true;
    const CuSplitLayer &y = s->layers[(size_t)x.layer];
    s->bus.missing = 0;
    s->lift.own = 0;
    p.rc = narrow ? cu_bus_choose(p, x, n) : y.packed ? cu_bus_make(p.m) : 0;
    bw_host_step &h = s->step;
    const int lift = narrow || p.rc || !y.packed ? 0 : lift_from(p.m, y, s->bus.bus_rate);
    if (lift) cu_lift_hold(p, s, x, n, lift);
    const bool marked = s->bus.n || !s->lift.held.empty();
    if (!p.rc) p.rc = bw_host_plan(s->host, p.l, c.first, s->x, s->route, n, marked ? 0 : lift, marked ? s->bus.lifts.data() : NULL, &h);
    if (!narrow && !p.q->error) p.q->error = cudaStreamSynchronize(p.q->stream);
    if (p.rc || p.q->error) return true;
    s->begun = bw_spill_clock();
    if (h.first_set) {
        divide(p, c, x, h, narrow);
        return true;
    }
    bw_host_begin(s->host, p.l, c.first);
    p.rc = bw_host_work(s->host, p.l, c.first);
    return p.rc != 0;
}

} // namespace bw
