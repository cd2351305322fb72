/* Experts outside the card's set that a step of few rows takes over the bus while the processor computes others: from backend cpu's packed form in RAM
 * straight to the card, into the place of another expert of the layer that the step does not use (spill.h), so that the set follows the text, or where
 * there is none into a slot for this step. Owns the choice of how many and their way; which place, spill_set.c decides. */
#include <algorithm>
#include <cstring>
#include "../cpu/host.h"
#include "../spill.h"
#include "forward.h"

namespace bw {

/* seconds of the bus's side beside its bytes: launches on two streams, unpacking of the last expert, its products */
static const double BUS_FIXED = 60e-6;
/* share of the bus's rate that is left beside a processor that reads memory, and the processor's bytes a second before any step was timed */
static const double BUS_BESIDE = 0.85, CPU_FIRST = 60e9;
/* seconds of the processor's side beside its bytes: threads woken and met, rows quantised */
static const double CPU_FIXED = 40e-6;

static double seconds_since(int64_t begun) { return (double)(bw_spill_clock() - begun) * 1e-9; }

/* the first step measures the bus: two copies of a slice of pinned memory */
int cu_bus_make(bw24_model *m) {
    CuBus *b = &model_of(m)->split->bus;
    if (b->bus_rate > 0) return 0;
    int rc = cu_lift_make(m);
    if (rc) return rc;
    CuCtx *c = ctx_of(m);
    cudaStream_t copies = model_of(m)->split->lift.stream[0];
    cudaError_t e = cudaStreamSynchronize(c->q.stream);
    for (int i = 0; i < 2 && !e; i++)
        if (!b->ready[i]) e = cudaEventCreateWithFlags(&b->ready[i], cudaEventDisableTiming);
    int64_t begun = bw_spill_clock();
    for (int i = 0; i < 2 && !e; i++) e = cudaMemcpyAsync(c->raw[i], c->stage[i], STAGE_BYTES, cudaMemcpyHostToDevice, copies);
    if (!e) e = cudaStreamSynchronize(copies);
    if (e) return cu_fail(m->ctx, e, "a stream for experts");
    b->bus_rate = 2 * (double)STAGE_BYTES / std::max(1e-4, seconds_since(begun));
    b->cpu_rate = CPU_FIRST;
    return 0;
}

void cu_bus_free(CuBus *b) {
    for (cudaEvent_t e : b->ready)
        if (e) cudaEventDestroy(e);
}

/* of `missing` experts, how many over the bus: the later of the two sides is to be earliest */
static int share_of_bus(const CuBus *b, double bytes, int missing) {
    int best = 0;
    double least = CPU_FIXED + missing * bytes / b->cpu_rate;
    for (int k = 1; k <= missing && k <= BUS_MOST; k++) {
        double own = k < missing ? CPU_FIXED + (missing - k) * bytes / b->cpu_rate : 0;
        double t = std::max(own, BUS_FIXED + k * bytes / (BUS_BESIDE * b->bus_rate));
        if (t < least) { least = t; best = k; }
    }
    return best;
}

/* the most used ones first: they are the likeliest to be wanted again */
static void pick(Pass &p, CuSplit *s, int layer, std::vector<int> &missing, int want) {
    CuBus *b = &s->bus;
    bw_spill *spill = p.m->spill;
    int slots = 0;
    std::sort(missing.begin(), missing.end(), [&](int x, int y) {
        uint64_t a = bw_spill_total_uses(spill, layer, x), c = bw_spill_total_uses(spill, layer, y);
        return a != c ? a > c : x < y;
    });
    for (int e : missing) {
        if (b->n == want || !bw_spill_hold(spill, layer, e)) continue;
        CuBusExpert &t = b->expert[b->n];
        t = {e, bw_spill_swap(spill, layer, e, b->uses.data()), 0};
        if (!t.stays && slots == LIFT_SLOTS) {
            bw_spill_release(spill, layer, e);
            break;
        }
        t.slot = t.stays ? 0 : slots++;
        b->lifts[(size_t)e] = 1;
        b->n++;
    }
    std::sort(b->expert, b->expert + b->n, [](const CuBusExpert &x, const CuBusExpert &y) { return x.expert < y.expert; });
}

int cu_bus_choose(Pass &p, const CuExperts &x, int n) {
    CuSplit *s = model_of(p.m)->split;
    CuBus *b = &s->bus;
    const CuSplitLayer &y = s->layers[(size_t)x.layer];
    const uint8_t *in = bw_spill_in_set(p.m->spill, x.layer);
    std::vector<int> missing;
    b->layer = x.layer;
    b->uses.assign((size_t)x.experts, 0);
    b->lifts.assign((size_t)x.experts, 0);
    for (int i = 0; i < n * x.top; i++) {
        int e = (int)s->route[(size_t)(i / x.top) * 2 * (size_t)x.top + (size_t)(x.top + i % x.top)];
        if (!b->uses[(size_t)e]++ && !in[e]) missing.push_back(e);
    }
    b->missing = (int)missing.size();
    if (!y.packed || missing.empty()) return 0;
    int rc = cu_bus_make(p.m);
    b->there = true;
    for (int e : missing) b->there &= bw_spill_in_ram(p.m->spill, x.layer, e);
    if (!rc) pick(p, s, x.layer, missing, share_of_bus(b, (double)y.packed, b->missing));
    return rc;
}

/* places of what moved into the set, for the kernels that follow on the main stream */
static void tell_places(Pass &p, CuSplit *s, const CuExperts &x) {
    CuSplitLayer &y = s->layers[(size_t)x.layer];
    const size_t n = (size_t)x.experts;
    bool moved = false;
    for (int i = 0; i < s->bus.n; i++) moved |= s->bus.expert[i].stays;
    if (!moved) return; /* nor are there places where the set never had an expert */
    for (int i = 0; i < s->bus.n; i++)
        for (int k = 0; k < 3 && s->bus.expert[i].stays; k++)
            y.at_host[(size_t)k * n + (size_t)s->bus.expert[i].expert] = (uint32_t)(bw_spill_set_at(p.m->spill, x.layer, s->bus.expert[i].expert, k) / 256);
    if (!p.q->error) p.q->error = cudaMemcpyAsync(y.at, y.at_host, 3 * n * sizeof(uint32_t), cudaMemcpyHostToDevice, p.q->stream);
}

static uint8_t *slot_of(const CuSplit *s, const bw24_model *m, int layer, const CuBusExpert &e) {
    return e.stays ? s->set + bw_spill_set_at(m->spill, layer, e.expert, 0) : s->lift.slots + (size_t)e.slot * s->lift.slot_bytes;
}

void cu_bus_bring(Pass &p, const CuStep &c, const CuExperts &x) {
    CuSplit *s = model_of(p.m)->split;
    CuBus *b = &s->bus;
    const CuSplitLayer &y = s->layers[(size_t)x.layer];
    CuCtx *ctx = ctx_of(p.m);
    Queue q = *p.q;
    q.pdl = q.barrier = false;
    for (int i = 0; i < b->n && !q.error; i++) { /* all copies first: the bus is what they wait for */
        bw_host_lifted e;
        const int half = i & 1;
        q.stream = s->lift.stream[half];
        bw_host_held(s->host, p.l, c.first, b->expert[i].expert, &e);
        if (!q.error) q.error = cu_lift_copy(q.stream, ctx->raw[half], e);
        cu_lift_unpack(q, y, e, ctx->raw[half], slot_of(s, p.m, x.layer, b->expert[i]));
    }
    for (int half = 0; half < 2 && half < b->n && !q.error; half++) q.error = cudaEventRecord(b->ready[half], s->lift.stream[half]);
    if (q.error && !p.q->error) p.q->error = q.error;
    if (b->n) tell_places(p, s, x);
}

void cu_bus_products(Pass &p, const CuStep &c, const CuExperts &x, const int *order) {
    CuSplit *s = model_of(p.m)->split;
    CuBus *b = &s->bus;
    const CuSplitLayer &y = s->layers[(size_t)x.layer];
    bool all_stay = true;
    int pairs = 0;
    for (int half = 0; half < 2 && half < b->n && !p.q->error; half++) p.q->error = cudaStreamWaitEvent(p.q->stream, b->ready[half], 0);
    for (int i = 0; i < b->n; i++) {
        all_stay &= b->expert[i].stays;
        pairs += b->uses[(size_t)b->expert[i].expert];
    }
    if (all_stay) return pairs ? run_expert_products(p, c, x, order, pairs) : void();
    for (int i = 0; i < b->n; i++) {
        CuExperts alone = x;
        uint8_t *slot = slot_of(s, p.m, x.layer, b->expert[i]);
        for (int k = 0; k < 3; slot += (y.m[k++].bytes + 255) & ~(size_t)255) {
            alone.m[k].w = slot;
            alone.m[k].at = NULL;
            alone.m[k].stride = 0;
        }
        run_expert_products(p, c, alone, order, b->uses[(size_t)b->expert[i].expert]);
        order += b->uses[(size_t)b->expert[i].expert];
    }
}

/* The processor's rate, from narrow steps' layers that no read held up. What held a thread up makes it too low, nothing makes it too high: it rises
 * faster than it falls, and where the bus took all it goes back to the first guess. */
void cu_bus_time(CuSplit *s, double bytes, int64_t begun) {
    CuBus *b = &s->bus;
    double own = (b->missing - b->n) * bytes, t = seconds_since(begun) - CPU_FIXED;
    if (!b->there || !b->missing) return;
    double seen = own > 0 && t > 0 ? own / t : CPU_FIRST;
    if (own > 0 || b->cpu_rate < CPU_FIRST) b->cpu_rate += (seen > b->cpu_rate ? own > 0 ? 0.2 : 0.02 : 0.05) * (seen - b->cpu_rate);
}

void cu_bus_end(bw24_model *m, bool failed) {
    CuSplit *s = model_of(m)->split;
    if (!s) return;
    for (int i = 0; i < 2 && failed && s->lift.stream[i]; i++) cudaStreamSynchronize(s->lift.stream[i]);
    for (int i = 0; i < s->bus.n; i++) bw_spill_release(m->spill, s->bus.layer, s->bus.expert[i].expert);
    s->bus.n = 0;
    cu_lift_release(m);
}

} // namespace bw
