/* Experts that a step with many rows takes through the card though the set lacks them: from backend cpu's packed form in RAM over pinned memory to the
 * card's units, on a stream of its own, while the products of those before are made. Owns the slots and their order; which experts, split.cu decides. */
#include <algorithm>
#include <cstring>
#include "../cpu/host.h"
extern "C" {
#include "../cpu/linear.h"
}
#include "../spill.h"
#include "forward.h"

namespace bw {

static const struct { const LinearKernels *k; int kind, block, bytes; } kinds[] = {
    {&linear_q4_0, UNTILE_Q4_0, 1, 18}, {&linear_q8_0, UNTILE_Q8_0, 1, 34}, {&linear_q4_k, UNTILE_Q4_K, 8, 144},
    {&linear_q6_k, UNTILE_Q6_K, 8, 210}, {&linear_iq4_xs, UNTILE_IQ4_XS, 8, 136}, {&linear_nvfp4, UNTILE_NVFP4, 2, 36},
};

static const bw_type_info *type_of(const CuSplitLayer &y, int matrix) {
    int part;
    const bw_tensor *scale;
    return bw_expert_part(y.op, matrix, 0, &part, &scale)->type;
}

static bw_untile untile_of(const CuMatrix &x, const bw_type_info *t) {
    bw_untile u = {};
    for (auto &k : kinds)
        if (x.k && x.k == k.k && x.k->packs && cpu_tile_layout(t, &u.head, &u.codes, &u.per)) u = {k.kind, u.head, u.codes, u.per, k.block, k.bytes};
    return u;
}

size_t cu_lift_packed(const CuSplitLayer &y) {
    size_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        if (!untile_of(y.m[i], type_of(y, i)).kind) return 0;
        bytes += cpu_pack_bytes(type_of(y, i), y.m[i].rows, y.m[i].cols);
    }
    return bytes <= STAGE_BYTES ? bytes : 0;
}

/* the first step that lifts makes what it needs, for the largest layer */
int cu_lift_make(bw24_model *m) {
    CuSplit *all = model_of(m)->split;
    CuLift *s = &all->lift;
    if (s->stream[1]) return 0;
    s->own_rate = CU_WIDE_OPS * m->ctx->threads;
    for (auto &y : all->layers) {
        size_t bytes = 0;
        for (int i = 0; i < 3 && y.packed; i++) bytes += (y.m[i].bytes + 255) & ~(size_t)255;
        if (bytes > s->slot_bytes) s->slot_bytes = bytes;
    }
    int rc = cu_make_stage(m);
    if (!rc) rc = cu_model_alloc(m, (void **)&s->slots, LIFT_SLOTS * s->slot_bytes, "experts");
    if (!rc) rc = cu_model_alloc(m, (void **)&s->at, 3 * all->experts * sizeof(uint32_t), "experts");
    if (rc) return rc;
    cudaError_t e = cudaHostAlloc(&s->at_host, 3 * all->experts * sizeof(uint32_t), cudaHostAllocDefault);
    for (int i = 0; i < 2 && !e; i++) e = cudaStreamCreateWithFlags(&s->stream[i], cudaStreamNonBlocking);
    for (int i = 0; i < LIFT_SLOTS && !e; i++) {
        e = cudaEventCreateWithFlags(&s->ready[i], cudaEventDisableTiming);
        if (!e) e = cudaEventCreateWithFlags(&s->freed[i], cudaEventDisableTiming);
    }
    return e ? cu_fail(m->ctx, e, "a stream for experts") : 0;
}

void cu_lift_free(CuLift *s) {
    for (int i = 0; i < LIFT_SLOTS; i++) {
        if (s->ready[i]) cudaEventDestroy(s->ready[i]);
        if (s->freed[i]) cudaEventDestroy(s->freed[i]);
    }
    for (cudaStream_t q : s->stream)
        if (q) cudaStreamDestroy(q);
    if (s->at_host) cudaFreeHost(s->at_host);
}

/* Where the packed matrices stand behind the first's copy: as in RAM where they are neighbours there, so that one copy brings all; else end to end. */
static bool neighbours(const bw_host_lifted &e, size_t (&at)[4]) {
    bool one = e.pinned;
    for (int i = 1; i < 3; i++) one = one && e.data[i] >= e.data[i - 1] + e.bytes[i - 1] && e.data[i] - e.data[i - 1] <= (ptrdiff_t)e.bytes[i - 1] + (64 << 10);
    one = one && e.data[2] - e.data[0] + (ptrdiff_t)e.bytes[2] <= (ptrdiff_t)STAGE_BYTES;
    at[0] = 0;
    for (int i = 1; i < 3; i++) at[i] = one ? (size_t)(e.data[i] - e.data[0]) : at[i - 1] + e.bytes[i - 1];
    at[3] = at[2] + e.bytes[2];
    return one;
}

cudaError_t cu_lift_copy(cudaStream_t stream, uint8_t *to, const bw_host_lifted &e) {
    size_t at[4];
    if (neighbours(e, at)) return cudaMemcpyAsync(to, e.data[0], at[3], cudaMemcpyHostToDevice, stream);
    cudaError_t err = cudaSuccess;
    for (int i = 0; i < 3 && !err; i++) err = cudaMemcpyAsync(to + at[i], e.data[i], e.bytes[i], cudaMemcpyHostToDevice, stream);
    return err;
}

void cu_lift_unpack(Queue &q, const CuSplitLayer &y, const bw_host_lifted &e, const uint8_t *tiles, uint8_t *slot) {
    size_t at[4];
    neighbours(e, at);
    for (int i = 0; i < 3; i++) {
        const CuMatrix &x = y.m[i];
        lift_units(q, x.k, {untile_of(x, type_of(y, i)), tiles + at[i], slot, x.rows, x.cols, x.segs, (size_t)(e.bytes[i] / (size_t)cpu_tiles(x.rows))});
        slot += (x.bytes + 255) & ~(size_t)255;
    }
}

/* copies from RAM are done: experts may leave it */
static cudaError_t copied(const CuCtx *c) {
    cudaError_t e = cudaEventSynchronize(c->staged[0]);
    return e ? e : cudaEventSynchronize(c->staged[1]);
}

/* one expert to the next slot; from pinned memory as it lies there */
static void bring(Pass &p, CuLift *s, Queue *q, const CuSplitLayer &y, const bw_host_lifted &e) {
    CuCtx *c = ctx_of(p.m);
    const int half = c->turn;
    c->turn ^= 1;
    q->stream = s->stream[half];
    q->error = e.pinned ? cudaSuccess : cudaEventSynchronize(c->staged[half]);
    bw_host_lifted from = e;
    for (int i = 0; i < 3 && !e.pinned; i++) {
        from.data[i] = i ? from.data[i - 1] + e.bytes[i - 1] : c->stage[half];
        bw_host_copy(model_of(p.m)->split->host, (void *)from.data[i], e.data[i], e.bytes[i]);
    }
    if (!q->error) q->error = cu_lift_copy(q->stream, c->raw[half], from);
    if (!q->error) q->error = cudaEventRecord(c->staged[half], q->stream);
    if (!q->error) q->error = cudaStreamWaitEvent(q->stream, s->freed[s->turn], 0);
    cu_lift_unpack(*q, y, e, c->raw[half], s->slots + (size_t)s->turn * s->slot_bytes);
    if (!q->error) q->error = cudaEventRecord(s->ready[s->turn], q->stream);
    if (!q->error) q->error = cudaStreamWaitEvent(p.q->stream, s->ready[s->turn], 0);
    if (q->error && !p.q->error) p.q->error = q->error;
}

/* where the slots' matrices will be, for all lifted experts of the layer: the k-th comes to slot turn + k */
static void tell_slots(Pass &p, CuLift *s, const CuSplitLayer &y, const int *experts, int n) {
    const size_t all = (size_t)y.op->experts;
    for (int k = 0; k < n; k++) {
        size_t at = (size_t)((s->turn + k) % LIFT_SLOTS) * s->slot_bytes;
        for (size_t i = 0; i < 3; at += (y.m[i++].bytes + 255) & ~(size_t)255) s->at_host[i * all + (size_t)experts[k]] = (uint32_t)(at / 256);
    }
    if (!p.q->error) p.q->error = cudaMemcpyAsync(s->at, s->at_host, 3 * all * sizeof(uint32_t), cudaMemcpyHostToDevice, p.q->stream);
}

/* products of the pairs of the n experts that came last, with places [first, first + pairs) */
static void multiply(Pass &p, CuLift *s, const CuStep &c, const CuExperts &x, const int *order, int n, int first, int pairs) {
    for (int i = 1; i <= n; i++)
        if (!p.q->error) p.q->error = cudaStreamWaitEvent(p.q->stream, s->ready[(s->turn + LIFT_SLOTS - i) % LIFT_SLOTS], 0);
    run_placed(p, c, x, order, first, pairs);
    for (int i = 1; i <= n; i++)
        if (!p.q->error) p.q->error = cudaEventRecord(s->freed[(s->turn + LIFT_SLOTS - i) % LIFT_SLOTS], p.q->stream);
}

/* What the processor computes of a wide step while the bus brings the others: `few`, experts of few pairs, and of those to be lifted the ones with the
 * fewest, as long as it ends no later. Its seconds an expert: operations at the rate that it showed, at least its bytes. */
static void leave_to_processor(const CuSplit *s, CuLift *l, const CuSplitLayer &y, const std::vector<int> &few, std::vector<int> &lifted) {
    const std::vector<int> &uses = s->bus.uses;
    double ops = 0;
    for (auto &x : y.m) ops += 2.0 * x.rows * x.cols;
    auto seconds = [&](int pairs) { return std::max(pairs * ops / l->own_rate, (double)y.packed / s->bus.cpu_rate); };
    l->own = 0;
    for (int e : few) l->own += seconds(uses[(size_t)e]);
    std::sort(lifted.begin(), lifted.end(), [&](int a, int b) { return uses[(size_t)a] != uses[(size_t)b] ? uses[(size_t)a] < uses[(size_t)b] : a < b; });
    size_t left = 0;
    for (; left < lifted.size(); left++) {
        double own = l->own + seconds(uses[(size_t)lifted[left]]);
        if (own > (double)(lifted.size() - left - 1) * (double)y.packed / s->bus.bus_rate) break;
        l->own = own;
    }
    /* only a share that arithmetic bounds says something about the rate */
    if (!left || uses[(size_t)lifted[left - 1]] * ops / l->own_rate < (double)y.packed / s->bus.cpu_rate) l->own = 0;
    lifted.erase(lifted.begin(), lifted.begin() + (ptrdiff_t)left);
    std::sort(lifted.begin(), lifted.end());
}

void cu_lift_hold(Pass &p, CuSplit *s, const CuExperts &x, int n, int from) {
    CuBus *b = &s->bus;
    const uint8_t *in = bw_spill_in_set(p.m->spill, x.layer);
    b->uses.assign((size_t)x.experts, 0);
    b->lifts.assign((size_t)x.experts, 0);
    for (int i = 0; i < n * x.top; i++) b->uses[(size_t)s->route[(size_t)(i / x.top) * 2 * (size_t)x.top + (size_t)(x.top + i % x.top)]]++;
    s->lift.layer = x.layer;
    std::vector<int> lifted, own;
    for (int e = 0; e < x.experts; e++) {
        if (in[e] || !b->uses[(size_t)e]) continue;
        (b->uses[(size_t)e] < from ? own : lifted).push_back(e);
    }
    leave_to_processor(s, &s->lift, s->layers[(size_t)x.layer], own, lifted);
    for (int e : lifted) {
        if (!bw_spill_hold(p.m->spill, x.layer, e)) {
            s->lift.own = 0;
            return cu_lift_release(p.m);
        }
        s->lift.held.push_back(e);
        b->lifts[(size_t)e] = 1;
    }
}

/* The processor's rate in wide steps, from those of which it ended last: what it was reckoned to take against what it took. Where it had ended before the
 * bus its share grows by a tenth. */
void cu_lift_time(const bw24_model *m, CuSplit *s, int64_t joined) {
    CuLift *l = &s->lift;
    const double first = CU_WIDE_OPS * m->ctx->threads, now = (double)bw_spill_clock();
    double took = (now - (double)s->begun) * 1e-9, waited = (now - (double)joined) * 1e-9;
    if (l->own > 0) l->own_rate *= waited < 100e-6 ? 1.1 : 1 + 0.3 * (std::max(0.5, std::min(2.0, l->own / took)) - 1);
    l->own_rate = std::max(first / 8, std::min(first * 8, l->own_rate));
    l->own = 0;
}

void cu_lift_release(bw24_model *m) {
    CuLift *s = &model_of(m)->split->lift;
    for (int e : s->held) bw_spill_release(m->spill, s->layer, e);
    s->held.clear();
}

/* the k-th lifted expert: of those held, or as the spill brings them */
static bw_host_lifted next_of(Pass &p, CuSplit *all, const CuStep &c, int k, int first) {
    bw_host_lifted e;
    if (all->lift.held.empty()) {
        if (bw_host_lift_lets_go(all->host)) p.q->error = copied(ctx_of(p.m));
        bw_host_lift(all->host, p.l, c.first, &e);
        return e;
    }
    bw_host_held(all->host, p.l, c.first, all->lift.held[(size_t)k], &e);
    e.first = first;
    e.n = all->bus.uses[(size_t)e.expert];
    return e;
}

void run_lifted(Pass &p, const CuStep &c, const bw_host_step &h, const int *order) {
    CuSplit *all = model_of(p.m)->split;
    CuLift *s = &all->lift;
    CuExperts x = p.s->experts[(size_t)c.at];
    const CuSplitLayer &y = all->layers[(size_t)x.layer];
    const bool held = !s->held.empty();
    int rc = cu_lift_make(p.m);
    if (rc) {
        p.rc = rc;
        return;
    }
    Queue q = *p.q;
    q.pdl = false;
    for (int i = 0; i < 3; i++) {
        x.m[i].w = s->slots;
        x.m[i].at = s->at + i * x.experts;
        x.m[i].stride = 256;
    }
    for (int k = 0, n = 0, first = 0, end = h.own; k < h.lifted && !p.q->error; k++) {
        bw_host_lifted e = next_of(p, all, c, k, end);
        if (k == 0) tell_slots(p, s, y, held ? s->held.data() : bw_host_lift_order(all->host, p.l, c.first), h.lifted);
        if (n && (n == LIFT_GROUP || e.first != end)) {
            multiply(p, s, c, x, order, n, first, end - first);
            n = 0;
        }
        if (!n++) first = e.first;
        end = e.first + e.n;
        bring(p, s, &q, y, e);
        s->turn = (s->turn + 1) % LIFT_SLOTS;
        if (k + 1 == h.lifted) multiply(p, s, c, x, order, n, first, end - first);
    }
    cudaError_t done = copied(ctx_of(p.m));
    if (done && !p.q->error) p.q->error = done;
    if (held) cu_lift_release(p.m);
    else p.rc = bw_host_lift_end(all->host);
}

} // namespace bw
