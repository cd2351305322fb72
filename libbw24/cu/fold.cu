/* CONV, DELTA and the versions of their state on the host's side: memory, launches of a pass, the way back. State and logs never leave the device;
 * the context's stream orders everything, with the way back on a second one that it waits for before the next step; so nothing here waits. */
#include <algorithm>
#include "forward.h"
#include "gemm_fast.h"
#include "op_delta_fast.cuh"
#include "op_fold.cuh"

namespace bw {

/* ---- memory of versions and logs */
float *cu_fold_new(bw24_model *m, size_t bytes) {
    void *p = NULL;
    if (cu_alive(m->ctx) || cu_alloc(m, &p, bytes, "a sequence's state")) return NULL;
    return (float *)p;
}
void cu_fold_free(float *data) { cudaFree(data); }
int cu_fold_clear(bw24_model *m, float *data, size_t bytes) {
    cudaError_t e = cu_side_join(ctx_of(m));
    if (!e) e = cudaMemsetAsync(data, 0, bytes, ctx_of(m)->q.stream);
    return e ? cu_fail(m->ctx, e, "a sequence's state") : 0;
}

/* ---- resolving */
static int conv_args(bw24_model *m, bw_list *l, const bw_op *op, ConvArgs *a) {
    CuList *s = list_of(l);
    const bw_state *st = &l->states[op->state];
    *a = {s->buf[(size_t)op->buf[1]], NULL, s->buf[(size_t)op->buf[0]], (int)l->bufs[op->buf[0]].width, (int)op->w[0]->ne[0], st->offset, st->log_offset};
    return cu_upload_dense(m, op->w[0], &a->w);
}

static int delta_args(bw_list *l, int index, DeltaArgs *a) {
    CuList *s = list_of(l);
    const bw_op *op = &l->ops[index];
    const bw_state *st = &l->states[op->state];
    auto buf = [&](int i) { return s->buf[(size_t)op->buf[i]]; };
    auto width = [&](int i) { return (int)l->bufs[op->buf[i]].width; };
    *a = {buf(1), buf(2), buf(3), buf(4), buf(5), buf(0), width(1), width(2), width(3), width(4), width(5), op->i[0], op->i[1], width(2) / op->i[1], width(3) / op->i[0],
          op->i[2], st->offset, st->log_offset, (int)st->log_width, NULL, index};
    if (a->dk <= DELTA_MAX_DK) return 0;
    char label[256];
    bw_op_label(l, index, label, sizeof label);
    return bw_fail(BW24_E_UNSUPPORTED, "%s: backend cuda has keys of at most %d values a head, here %d", label, (int)DELTA_MAX_DK, a->dk);
}

int cu_resolve_fold(bw24_model *m, bw_list *l, int index, CuStep *c) {
    CuList *s = list_of(l);
    const bw_op *op = &l->ops[index];
    if (op->code == BW_OP_CONV) {
        c->at = (int)s->convs.size();
        s->convs.push_back({});
        return conv_args(m, l, op, &s->convs.back());
    }
    c->at = (int)s->deltas.size();
    s->deltas.push_back({});
    DeltaArgs &a = s->deltas.back();
    int rc = delta_args(l, index, &a);
    CuModel *all = model_of(m);
    if (rc || !m->ctx->fast_prefill || !cu_delta_chunks(a.dk, a.dv)) return rc;
    return cu_share(m, (void **)&all->chunk_facts, &all->chunk_facts_bytes, cu_chunk_bytes(m->max_rows, a.heads), "delta nets of the class fast");
}

/* DELTA of the class fast */
bool cu_delta_chunks(int dk, int dv) { return dk == CHUNK_KEY && dv % 32 == 0; }
size_t cu_chunk_bytes(int64_t rows, int heads) { return (size_t)((rows + CHUNK - 1) / CHUNK) * (size_t)heads * sizeof(ChunkFacts); }
static bool run_chunks(Pass &p, const DeltaArgs &a) {
    ChunkFacts *facts = (ChunkFacts *)model_of(p.m)->chunk_facts;
    const bool aligned = a.ldq % 4 == 0 && a.ldk % 4 == 0 && a.ldv % 4 == 0;
    if (!p.m->ctx->fast_prefill || p.rows.n < FAST_LEAST_ROWS || p.n_seqs != 1 || !cu_delta_chunks(a.dk, a.dv) || !aligned) return false;
    if (sizeof(ChunkShared) > (size_t)p.q->shared_max) return false;
    launch(*p.q, k_delta_facts, dim3((unsigned)a.heads, (unsigned)((p.rows.n + CHUNK - 1) / CHUNK)), CHUNK_THREADS, 0, a, p.fold, facts);
    launch(*p.q, k_delta_chunks, dim3((unsigned)(a.heads * (a.dv / 32))), CHUNK_THREADS, sizeof(ChunkShared), a, p.fold, (const ChunkFacts *)facts);
    return true;
}

int cu_resolve_replay(bw24_model *m, bw_list *l) {
    CuModel *s = model_of(m);
    std::vector<ReplayOp> ops;
    for (int i = 0; i < l->n_states; i++) {
        if (l->states[i].op < 0) continue;
        ReplayOp r = {};
        const bw_op *op = &l->ops[l->states[i].op];
        r.delta = op->code == BW_OP_DELTA;
        int rc = r.delta ? delta_args(l, l->states[i].op, &r.d) : conv_args(m, l, op, &r.conv);
        if (rc) return rc;
        int items = r.delta ? r.d.heads * ((r.d.dv + 31) / 32) : (r.conv.n + FOLD_THREADS - 1) / FOLD_THREADS;
        if (items > s->replay_items) s->replay_items = items;
        ops.push_back(r);
    }
    s->n_replay = (int)ops.size();
    if (ops.empty()) return 0;
    int rc = cu_model_alloc(m, (void **)&s->replay, ops.size() * sizeof(ReplayOp), "FOLD ops");
    if (rc) return rc;
    return cu_put(m, s->replay, ops.data(), ops.size() * sizeof(ReplayOp), "FOLD ops");
}

/* ---- running */
void run_conv(Pass &p, const CuStep &c) {
    const ConvArgs &a = p.s->convs[(size_t)c.at];
    launch(*p.q, k_conv, dim3((unsigned)((a.n + 255) / 256), (unsigned)((p.rows.n + CONV_RUN - 1) / CONV_RUN)), 256, 0, a, p.fold);
    p.quantised[(size_t)c.out] = 0;
}

void run_delta(Pass &p, const CuStep &c) {
    DeltaArgs a = p.s->deltas[(size_t)c.at];
    dim3 grid((unsigned)(a.heads * ((a.dv + 31) / 32)), (unsigned)p.n_seqs);
    a.fault = p.rows.fault;
    const int logged = run_chunks(p, a);
    launch(*p.q, k_delta, grid, FOLD_THREADS, 0, a, p.fold, logged);
    p.quantised[(size_t)c.out] = 0;
}

static cudaError_t open_side(CuCtx *c) {
    CuSide *x = &c->side;
    if (x->stream) return cudaSuccess;
    int least = 0, most = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &most);
    if (!e) e = cudaEventCreateWithFlags(&x->after, cudaEventDisableTiming);
    if (!e) e = cudaEventCreateWithFlags(&x->done, cudaEventDisableTiming);
    return e ? e : cudaStreamCreateWithPriority(&x->stream, cudaStreamNonBlocking, least);
}

cudaError_t cu_side_start(CuCtx *c) {
    CuSide *x = &c->side;
    if (x->waiting.empty()) return cudaSuccess;
    Queue side = c->q;
    side.stream = x->stream;
    side.error = cudaStreamWaitEvent(x->stream, x->after, 0);
    for (const CuBack &b : x->waiting) {
        const CuModel *s = model_of(b.m);
        side.barrier = true;
        launch(side, k_replay, dim3((unsigned)s->replay_items, (unsigned)s->n_replay), FOLD_THREADS, 0, (const ReplayOp *)s->replay, b.seq);
    }
    x->waiting.clear();
    if (!side.error) side.error = cudaEventRecord(x->done, x->stream);
    x->open = x->open || !side.error;
    return side.error;
}

cudaError_t cu_side_join(CuCtx *c) {
    cudaError_t e = cu_side_start(c);
    if (e || !c->side.open) return e;
    c->side.open = false;
    return cudaStreamWaitEvent(c->q.stream, c->side.done, 0);
}

void cu_side_drop(CuCtx *c, const bw24_model *m) {
    std::vector<CuBack> &w = c->side.waiting;
    w.erase(std::remove_if(w.begin(), w.end(), [&](const CuBack &b) { return b.m == m; }), w.end());
}

/* beside what the queue does next, until cu_side_join: drafts need no state of the model's. Memory of states stays with the model, so that all that a way
 * back names is there when it is launched */
int cu_replay(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to) {
    CuCtx *c = ctx_of(m);
    int rc = cu_alive(m->ctx);
    (void)l;
    if (rc) return rc;
    cudaError_t e = open_side(c);
    if (!e) e = cudaEventRecord(c->side.after, c->q.stream);
    if (e) return cu_fail(m->ctx, e, "the way back of a sequence's state");
    c->side.waiting.push_back({m, {from, NULL, to, (float *)log, 0, n, n}});
    return 0;
}

} // namespace bw
