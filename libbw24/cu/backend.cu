/* Backend "cuda": opening a card, device memory, KV pages, resolving a plan into launches. Owns what the device holds; forward.cu runs it,
 * load.cu fills weights. The CUDA runtime is linked statically and finds the driver at run time, so the library loads without one. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "cuda.h"
#include "gemm_fast.h"

namespace bw {

/* ---- errors */
int cu_fail(bw24_ctx *c, cudaError_t e, const char *what) {
    CuCtx *x = (CuCtx *)c->priv;
    if (e == cudaErrorMemoryAllocation) { cudaGetLastError(); return bw_fail(BW24_E_MEMORY, "out of memory on the CUDA device for %s", what); }
    if (x) x->dead = e;
    return bw_fail(BW24_E_DEVICE, "the CUDA device failed (%s) at %s; the context is unusable from now on", cudaGetErrorString(e), what);
}
int cu_alive(bw24_ctx *c) {
    CuCtx *x = (CuCtx *)c->priv;
    if (x->dead) return bw_fail(BW24_E_DEVICE, "the CUDA device failed earlier (%s); the context is unusable", cudaGetErrorString(x->dead));
    cudaError_t e = cudaSetDevice(x->device);
    return e ? cu_fail(c, e, "cudaSetDevice") : 0;
}

int cu_alloc(bw24_model *m, void **out, size_t bytes, const char *what) {
    cudaError_t e = cudaMalloc(out, bytes ? bytes : 16);
    if (!e) return 0;
    if (e != cudaErrorMemoryAllocation) return cu_fail(m->ctx, e, what);
    cudaGetLastError();
    size_t room = 0, total = 0;
    cudaMemGetInfo(&room, &total);
    return bw_fail(BW24_E_MEMORY, "out of memory on the CUDA device: %s needs %zu MiB, %zu of %zu MiB are free", what, (bytes >> 20) + 1, room >> 20, total >> 20);
}

/* device memory that lives as long as the model */
int cu_model_alloc(bw24_model *m, void **out, size_t bytes, const char *what) {
    int rc = cu_alloc(m, out, bytes, what);
    if (rc) return rc;
    model_of(m)->owned.push_back(*out);
    m->work_bytes += bytes;
    return 0;
}

int cu_share(bw24_model *m, void **mem, size_t *have, size_t need, const char *what) {
    if (need <= *have) return 0;
    int rc = cu_model_alloc(m, mem, need, what);
    if (!rc) *have = need;
    return rc;
}

/* ---- opening */
static int open_error(cudaError_t e, int index) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();
    if (!driver) return bw_fail(BW24_E_DEVICE, "no CUDA device: there is no NVIDIA driver on this machine");
    if (e == cudaErrorInsufficientDriver)
        return bw_fail(BW24_E_DEVICE, "the NVIDIA driver is too old: it has CUDA %d.%d, this build needs %d.%d", driver / 1000, driver % 1000 / 10,
               runtime / 1000, runtime % 1000 / 10);
    if (e == cudaErrorNoDevice) return bw_fail(BW24_E_DEVICE, "no CUDA device: the NVIDIA driver finds none");
    return bw_fail(BW24_E_DEVICE, "CUDA device %d cannot be used: %s", index, cudaGetErrorString(e));
}

int cu_check_card(int index, cudaDeviceProp *p) {
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (!e && !count) e = cudaErrorNoDevice;
    if (e) return open_error(e, index);
    if (index < 0 || index >= count) return bw_fail(BW24_E_ARG, "cuda:%d: this machine has devices 0..%d", index, count - 1);
    if ((e = cudaSetDevice(index)) || (e = cudaGetDeviceProperties(p, index))) return open_error(e, index);
    cudaFuncAttributes a;
    e = cudaFuncGetAttributes(&a, probe_kernel());
    if (e == cudaErrorInvalidDeviceFunction || e == cudaErrorNoKernelImageForDevice) {
        cudaGetLastError();
        return bw_fail(BW24_E_UNSUPPORTED, "this build has no code for %s (compute capability %d.%d)", p->name, p->major, p->minor);
    }
    return e ? open_error(e, index) : 0;
}

static int cuda_open(bw24_ctx *c) {
    CuCtx *x = new CuCtx();
    cudaDeviceProp p;
    int rc = cu_check_card(x->device = c->device_index, &p);
    cudaError_t e = rc ? cudaSuccess : cudaStreamCreateWithFlags(&x->q.stream, cudaStreamNonBlocking);
    if (e) rc = open_error(e, x->device);
    if (rc) { delete x; return rc; }
    size_t total = 0;
    if (cudaMemGetInfo(&x->room, &total)) cudaGetLastError();
    x->q.pdl = p.major >= 9;
    x->q.warp_groups = has_warp_groups(p.major, p.minor);
    x->q.sms = p.multiProcessorCount;
    x->q.shared_max = (int)p.sharedMemPerBlockOptin;
    snprintf(c->isa_name, sizeof c->isa_name, "sm_%d%d", p.major, p.minor);
    snprintf(c->device, sizeof c->device, "cuda:%d %.60s", x->device, p.name);
    c->priv = x;
    return 0;
}

static void cuda_close(bw24_ctx *c) {
    CuCtx *x = (CuCtx *)c->priv;
    for (int i = 0; i < 2; i++) {
        if (x->stage[i]) cudaFreeHost(x->stage[i]);
        if (x->raw[i]) cudaFree(x->raw[i]);
        if (x->staged[i]) cudaEventDestroy(x->staged[i]);
    }
    for (cudaEvent_t e : {x->side.after, x->side.done})
        if (e) cudaEventDestroy(e);
    if (x->side.stream) cudaStreamDestroy(x->side.stream);
    cudaStreamDestroy(x->q.stream);
    delete x;
}

/* ---- KV pages */
bool cu_kv_format(const bw_type_info *t, int *format) {
    static const struct { const char *name; int f; } names[] = {{"F32", KV_F32}, {"F16", KV_F16}, {"Q8_0", KV_Q8_0}, {"Q5_1", KV_Q5_1}, {"E4M3", KV_E4M3}};
    for (auto &n : names)
        if (!strcmp(n.name, t->name)) { *format = n.f; return true; }
    return false;
}
KvPlace cu_kv_place(const bw_kv *kv) {
    KvPlace p = {kv->offset, kv->klass, kv->desc.heads, kv->desc.dim, 0, 0, kv->desc.shared};
    cu_kv_format(kv->desc.kt, &p.k);
    cu_kv_format(kv->desc.vt, &p.v);
    return p;
}
static bool cuda_kv_supported(const bw_kv_desc *d) {
    int k, v;
    if (!cu_kv_format(d->kt, &k) || !cu_kv_format(d->vt, &v) || d->dim < 1 || d->dim > ATTEND_MAX_DIM) return false;
    bool blocks = k == KV_Q8_0 || k == KV_Q5_1 || v == KV_Q8_0 || v == KV_Q5_1;
    return !blocks || d->dim % 32 == 0;
}
static size_t cuda_kv_page_bytes(const bw_kv_desc *d) {
    int k = 0, v = 0;
    if (!cuda_kv_supported(d)) return 0;
    cu_kv_format(d->kt, &k);
    cu_kv_format(d->vt, &v);
    return (size_t)d->heads * ((size_t)kv_bytes(k, d->dim) + (d->shared ? 0 : kv_bytes(v, d->dim)));
}

static uint8_t *cuda_page_new(bw24_model *m, int klass) {
    CuModel *s = model_of(m);
    size_t bytes = (m->class_page_bytes[klass] + 255) & ~(size_t)255;
    if (cu_alive(m->ctx)) return NULL;
    if (s->free_pages[klass].empty()) {
        size_t n = cu_slab_pages(m, klass);
        uint8_t *slab = NULL;
        while (n && cudaMalloc(&slab, n * bytes)) { cudaGetLastError(); n /= 2; }
        if (!n) return NULL;
        s->slabs.push_back(slab);
        for (size_t i = n; i--;) s->free_pages[klass].push_back(slab + i * bytes);
    }
    uint8_t *p = s->free_pages[klass].back();
    if (cudaMemsetAsync(p, 0, m->class_page_bytes[klass], ctx_of(m)->q.stream)) return NULL;
    s->free_pages[klass].pop_back();
    return p;
}
static void cuda_page_free(bw24_model *m, int klass, uint8_t *data) { model_of(m)->free_pages[klass].push_back(data); }
static void cuda_page_copy(bw24_model *m, int klass, uint8_t *dst, const uint8_t *src) {
    cudaError_t e = cudaMemcpyAsync(dst, src, m->class_page_bytes[klass], cudaMemcpyDeviceToDevice, ctx_of(m)->q.stream);
    if (e) cu_fail(m->ctx, e, "copying a KV page");
}

/* ---- resolving a list */
/* A copy from memory that the driver does not know may return while its bytes are on their way, and steps run on a stream that does not wait for it. */
int cu_put(const bw24_model *m, void *to, const void *from, size_t bytes, const char *what) {
    cudaError_t e = cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
    if (!e) e = cudaStreamSynchronize(cudaStreamLegacy);
    return e ? cu_fail(m->ctx, e, what) : 0;
}

int cu_upload_dense(bw24_model *m, const bw_tensor *t, const float **out) {
    CuModel *s = model_of(m);
    float *&d = s->dense[t];
    *out = NULL;
    if (!t) return 0;
    if (!d) {
        size_t n = (size_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]) * sizeof(float);
        int rc = cu_model_alloc(m, (void **)&d, n, t->name);
        if (rc) return rc;
        rc = cu_put(m, d, t->dense, n, t->name);
        if (rc) return rc;
    }
    *out = d;
    return 0;
}

static int add_rope(bw24_model *m, const bw_list *l, const bw_op *op, const float **cs) {
    CuList *s = list_of(l);
    for (auto &r : s->ropes)
        if (r.rot == op->i[2] && r.base == op->f[0] && r.scale == op->f[1] && r.ff == op->w[0]) { *cs = r.cs; return 0; }
    if (s->ropes.size() == 8) return bw_fail(BW24_E_UNSUPPORTED, "backend cuda: more than 8 different rotations");
    CuRope r = {op->i[2], op->f[0], op->f[1], op->w[0], NULL, NULL};
    int half = r.rot / 2;
    std::vector<double> inv((size_t)half);
    for (int i = 0; i < half; i++) inv[(size_t)i] = bw_inv_freq(r.base, i, r.rot) / (double)(r.ff ? r.ff->dense[i] : 1.0f);
    int rc = cu_model_alloc(m, (void **)&r.inv, (size_t)half * sizeof(double), "a rotation");
    if (!rc) rc = cu_model_alloc(m, (void **)&r.cs, (size_t)m->max_rows * (size_t)r.rot * sizeof(float), "a rotation");
    if (rc) return rc;
    rc = cu_put(m, r.inv, inv.data(), (size_t)half * sizeof(double), "a rotation");
    if (rc) return rc;
    s->ropes.push_back(r);
    *cs = r.cs;
    return 0;
}

static int refuse(const bw_list *l, int op) {
    char label[256];
    bw_op_label(l, op, label, sizeof label);
    return bw_fail(BW24_E_UNSUPPORTED, "%s: backend cuda does not run this op yet; backend cpu does", label);
}

enum { NORM_MAX = 16384 };
static int refuse_width(const bw_list *l, int op) {
    char label[256];
    bw_op_label(l, op, label, sizeof label);
    return bw_fail(BW24_E_UNSUPPORTED, "%s: backend cuda normalises rows of at most %d values", label, (int)NORM_MAX);
}

static int row_op(bw24_model *m, const bw_list *l, int index) {
    CuList *s = list_of(l);
    const bw_op *op = &l->ops[index];
    RowOp r = {};
    auto buf = [&](int i) { return op->buf[i] >= 0 ? s->buf[(size_t)op->buf[i]] : NULL; };
    auto width = [&](int i) { return op->buf[i] >= 0 ? (int)l->bufs[op->buf[i]].width : 0; };
    r.op = index;
    r.y = buf(0); r.a = buf(1); r.b = buf(2);
    r.n = width(0); r.na = width(1); r.nb = width(2);
    r.f = (float)op->f[0];
    switch (op->code) {
    case BW_OP_NORM: r.code = ROW_NORM; r.i[0] = op->i[0]; r.i[1] = op->i[1]; break;
    case BW_OP_ADD: r.code = ROW_ADD; break;
    case BW_OP_SCALE: r.code = ROW_SCALE; break;
    case BW_OP_GLU: r.code = ROW_GLU; r.i[0] = op->i[0] == 1; break;
    case BW_OP_SOFTCAP: r.code = ROW_SOFTCAP; break;
    case BW_OP_GATE: r.code = ROW_GATE; break;
    case BW_OP_SIGMOID: r.code = ROW_SIGMOID; break;
    case BW_OP_SLICE: r.code = ROW_SLICE; r.i[0] = op->i[0]; r.i[1] = op->i[1]; break;
    case BW_OP_ROPE: {
        r.code = ROW_ROPE;
        for (int i = 0; i < 4; i++) r.i[i] = op->i[i];
        int rc = add_rope(m, l, op, &r.cs);
        if (rc) return rc;
        break;
    }
    case BW_OP_DECAY: {
        r.code = ROW_DECAY;
        int rc = cu_upload_dense(m, op->w[1], &r.cs);
        if (rc) return rc;
        break;
    }
    case BW_OP_CONCAT: r.code = ROW_CONCAT; r.i[0] = op->i[0]; break;
    case BW_OP_HIDDEN: r.code = ROW_SLICE; r.i[0] = 1; r.a = s->hidden; r.na = r.n; break;
    case BW_OP_ROUTE: r.code = ROW_ROUTE; for (int i = 0; i < 4; i++) r.i[i] = op->i[i + 1]; break;
    case BW_OP_KV_APPEND: r.code = ROW_APPEND; r.kv = cu_kv_place(&l->kvs[op->kv]); r.a = buf(0); r.b = buf(1); r.na = width(0); r.nb = width(1); r.y = NULL; break;
    default: return refuse(l, index);
    }
    if (op->code == BW_OP_NORM || op->code == BW_OP_SCALE || op->code == BW_OP_DECAY || op->code == BW_OP_ROUTE) {
        int rc = cu_upload_dense(m, op->w[0], &r.w);
        if (rc) return rc;
    }
    s->row_ops.push_back(r);
    return 0;
}

static bool is_want(const bw_list *l, const bw_op *op) { return l->bufs[op->buf[0]].rows == BW_ROWS_WANT; }

/* ---- runs of row ops that k_heads can do: norms by head, rotations and appends of up to three buffers */
static HeadChain *chain_of(HeadArgs *a, int *bufs, int buf) {
    for (int i = 0; i < a->n; i++)
        if (bufs[i] == buf) return &a->c[i];
    if (a->n == HEAD_CHAINS) return NULL;
    bufs[a->n] = buf;
    a->c[a->n] = {};
    a->c[a->n].buf = buf;
    return &a->c[a->n++];
}
static bool shape_chain(HeadChain *c, int heads, int dim) {
    if (c->heads && (c->heads != heads || c->dim != dim)) return false;
    if (!c->heads) c->pitch = dim;
    c->heads = heads;
    c->dim = dim;
    return dim % 32 == 0 && dim <= 512;
}

static bool chain_op(const bw_list *l, const RowOp &r, const bw_op *op, HeadArgs *a, int *bufs) {
    HeadChain *c = r.code == ROW_APPEND ? NULL : chain_of(a, bufs, op->buf[0]);
    if (r.code == ROW_SLICE) {
        if (!c || c->heads || !shape_chain(c, r.i[0], r.n / r.i[0])) return false;
        for (int i = 0; i < a->n; i++)
            if (bufs[i] == op->buf[1]) return false;
        c->x = r.a; c->y = r.y; c->pitch = r.na / r.i[0]; c->from = r.i[1]; c->copy = 1; c->op = r.op;
        return true;
    }
    if (r.code == ROW_NORM) {
        if (c && c->copy && op->buf[1] != op->buf[0]) return false;
        if (!c || c->norm || c->rot || c->append || !shape_chain(c, r.i[0], r.n / r.i[0])) return false;
        for (int i = 0; i < a->n; i++)
            if (op->buf[1] != op->buf[0] && bufs[i] == op->buf[1]) return false;
        if (!c->copy) c->x = r.a;
        c->y = r.y; c->w = r.w; c->eps = r.f; c->norm = 1; c->l2 = r.i[1]; c->op = r.op;
        return true;
    }
    if (r.code == ROW_ROPE) {
        int half = r.i[2] / 2;
        if (!c || c->rot || c->append || !shape_chain(c, r.i[0], r.i[1]) || r.n != r.i[0] * r.i[1] || (!r.i[3] && (half % 32 || (half > 128 && half != 256)))) return false;
        if (!c->norm && !c->copy) c->x = r.y;
        c->op = r.op;
        c->y = r.y; c->cs = r.cs; c->rot = r.i[2]; c->interleaved = r.i[3];
        return true;
    }
    if (r.code != ROW_APPEND) return false;
    for (int i = 0; i < 2; i++) {
        if (!(c = chain_of(a, bufs, op->buf[i])) || c->append || !shape_chain(c, r.kv.heads, r.kv.dim)) return false;
        if (!c->norm && !c->rot && !c->copy) c->x = i ? r.b : r.a;
        c->append = i ? APPEND_V : APPEND_K;
        c->kv = r.kv;
        c->op = r.op;
    }
    (void)l;
    return true;
}

/* turns the step just built from CU_ROWS into CU_HEADS where all of its ops fit */
static void try_heads(CuList *s, const bw_list *l) {
    CuStep &c = s->steps.back();
    HeadArgs a = {};
    int bufs[HEAD_CHAINS];
    if (c.kind != CU_ROWS || c.want) return;
    for (int i = 0; i < c.n; i++)
        if (!chain_op(l, s->row_ops[(size_t)(c.at + i)], &l->ops[c.first + i], &a, bufs)) return;
    for (int i = 0; i < a.n; i++) {
        for (int j = 0; j < a.n; j++) {
            if (i == j || a.c[i].x != a.c[j].y) continue;
            if (!a.c[j].append || !cu_dead_after(l, c.first + c.n, a.c[j].buf)) return; /* one warp would overwrite what another reads */
            a.c[j].y = NULL;
        }
        a.heads += a.c[i].heads;
    }
    c.kind = CU_HEADS;
    c.out = -1;
    c.at = (int)s->heads.size();
    s->heads.push_back(a);
}

/* EMBED stands alone; the other row ops of the step form runs */
static int resolve_rows(bw24_model *m, bw_list *l, const bw_step *st) {
    CuList *s = list_of(l);
    for (int i = st->first; i < st->first + st->n; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code == BW_OP_EMBED) {
            if (!op->w[0]->packed) { int rc = cu_pack_tensor(m, op->w[0]); if (rc) return rc; }
            s->steps.push_back({CU_EMBED, st, i, 1, 0, false, op->buf[0], false, i});
            continue;
        }
        bool joins = !s->steps.empty() && s->steps.back().kind == CU_ROWS && s->steps.back().step == st;
        if (!joins) s->steps.push_back({CU_ROWS, st, i, 0, (int)s->row_ops.size(), is_want(l, op), -1, false, i});
        s->steps.back().n++;
        s->steps.back().out = op->code == BW_OP_KV_APPEND ? -1 : op->buf[0];
        int rc = row_op(m, l, i);
        if (rc) return rc;
    }
    try_heads(s, l);
    return 0;
}

static int resolve_step(bw24_model *m, bw_list *l, const bw_step *st) {
    CuList *s = list_of(l);
    const bw_op *op = &l->ops[st->first];
    const float *unused;
    if (st->kind == BW_STEP_ROWS) return resolve_rows(m, l, st);
    if (st->kind == BW_STEP_LINEARS) {
        if (st->norm >= 0 && l->bufs[l->ops[st->norm].buf[0]].width > NORM_MAX) return refuse_width(l, st->norm);
        int last = st->glu >= 0 ? st->glu : st->add >= 0 ? st->add : st->lin0 + st->n_lin - 1, rc = 0;
        for (int i = 0; i < st->n_lin && !rc; i++) rc = cu_upload_dense(m, l->ops[st->lin0 + i].w[1], &unused);
        if (!rc && st->norm >= 0) rc = cu_upload_dense(m, l->ops[st->norm].w[0], &unused);
        s->steps.push_back({CU_LINEARS, st, st->first, st->n, 0, is_want(l, &l->ops[st->lin0]), l->ops[last].buf[0], false, st->first});
        return rc;
    }
    if (op->code == BW_OP_ATTEND && l->borrows && l->kvs[op->kv].window == 1) return refuse(l, st->first); /* such a row sees no key */
    CuStep c = {CU_ATTEND, st, st->first, 1, 0, is_want(l, op), op->buf[0], false, st->first};
    int rc = 0;
    switch (op->code) {
    case BW_OP_ATTEND: break;
    case BW_OP_PICK_ROWS: {
        CuStep *last = s->steps.empty() ? NULL : &s->steps.back();
        c.kind = CU_PICK;
        if (!last || last->kind != CU_PICK || last->first + last->n != st->first || last->n == PICKS) break;
        last->n++; /* one launch for neighbours */
        last->out = -1;
        return 0;
    }
    case BW_OP_CONV: c.kind = CU_CONV; rc = cu_resolve_fold(m, l, st->first, &c); break;
    case BW_OP_DELTA: c.kind = CU_DELTA; rc = cu_resolve_fold(m, l, st->first, &c); break;
    case BW_OP_PERHEAD: c.kind = CU_PERHEAD; rc = cu_resolve_perhead(m, l, st->first); break;
    case BW_OP_EXPERTS: c.kind = CU_EXPERTS; rc = cu_resolve_experts(m, l, st->first, &c); break;
    default: return refuse(l, st->first);
    }
    s->steps.push_back(c);
    return rc;
}

static bool writes_buf(const bw_list *l, const CuStep &c, int buf) {
    for (int i = c.first; i < c.first + c.n; i++)
        if (l->ops[i].code != BW_OP_KV_APPEND && l->ops[i].buf[0] == buf) return true;
    return false;
}
static bool step_quants(const bw_list *l, const bw_step *st) {
    for (int i = 0; i < st->n_lin; i++)
        if (l->ops[st->lin0 + i].w[0]->type->form != BW_FLOAT) return true;
    return false;
}
static int linear_input(const bw_list *l, const CuStep &c) { return l->ops[c.step->lin0].buf[1]; }

/* the buffer that a step reads quantised, -1: none */
static int quant_input(const bw_list *l, const CuStep &c) {
    if (c.kind == CU_LINEARS && step_quants(l, c.step)) return linear_input(l, c);
    const CuList *s = list_of(l);
    return c.kind == CU_EXPERTS && s->experts[(size_t)c.at].k[BW_EXP_GATE] ? s->experts[(size_t)c.at].x : -1;
}

static int make_acts(bw24_model *m, bw_list *l, int buf, const char *what) {
    CuList *s = list_of(l);
    size_t rows = ((size_t)m->max_rows + 127) / 128 * 128, w = (size_t)l->bufs[buf].width;
    const size_t wide = gemm_acts_bytes(ctx_of(m)->q.warp_groups, m->ctx->fast_prefill, rows, w); /* behind the quantised form */
    return s->acts[(size_t)buf] ? 0 : cu_model_alloc(m, (void **)&s->acts[(size_t)buf], rows * w + rows * (w / 32) * 12 + wide, what);
}

/* which buffers need a quantised form, and which producers should make it */
static int resolve_acts(bw24_model *m, bw_list *l) {
    CuList *s = list_of(l);
    for (auto &c : s->steps) {
        int x = quant_input(l, c), rc = x < 0 ? 0 : make_acts(m, l, x, "quantised activations");
        if (rc) return rc;
    }
    for (auto &c : s->steps) { /* queries over q8_0 keys */
        if (c.kind != CU_ATTEND) continue;
        const bw_op *op = &l->ops[c.first];
        int dim = l->kvs[op->kv].desc.dim;
        if (cu_kv_place(&l->kvs[op->kv]).k != KV_Q8_0 || (dim != 64 && dim != 128 && dim != 256 && dim != 512)) continue;
        int rc = make_acts(m, l, op->buf[1], "quantised queries");
        if (rc) return rc;
    }
    for (size_t i = 0; i < s->steps.size(); i++) {
        CuStep &c = s->steps[i];
        if (c.out < 0 || !s->acts[(size_t)c.out]) continue;
        for (size_t j = i + 1; j < s->steps.size(); j++) {
            const CuStep &r = s->steps[j];
            bool norm = r.kind == CU_LINEARS && r.step->norm >= 0;
            if (!norm && quant_input(l, r) == c.out) {
                c.quant_out = true;
                c.quant_op = r.kind == CU_LINEARS ? r.step->lin0 : r.first;
                break;
            }
            if (writes_buf(l, r, c.out)) break;
        }
    }
    return 0;
}

int cu_max_pieces(const bw24_model *m, const bw_kv *kv) {
    int64_t all = m->max_context / PIECE + 2, window = kv->window / PIECE + 2;
    return (int)(kv->window && window < all ? window : all);
}

/* room for the pieces of as many rows as fit SPLIT_BYTES */
static int make_pieces(bw24_model *m, bw_list *l) {
    CuModel *all = model_of(m);
    CuList *s = list_of(l);
    size_t most = 0, heads = 0;
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code != BW_OP_ATTEND) continue;
        size_t n = (size_t)cu_max_pieces(m, &l->kvs[op->kv]) * (size_t)op->i[0], bytes = n * (size_t)l->kvs[op->kv].desc.dim * sizeof(float);
        const KvPlace kv = cu_kv_place(&l->kvs[op->kv]);
        const int reach = attend_has_short(kv) ? SHORT_REACH : attend_has_gated(kv, (int)l->kvs[op->kv].window) ? SHORT_REACH_LEAST : 0;
        if (reach > s->short_most) s->short_most = reach;
        if (bytes > most) most = bytes;
        if (n > heads) heads = n;
    }
    if (!most) return 0;
    size_t rows = SPLIT_BYTES / most;
    s->split_rows = (int)(rows < 1 ? 1 : rows > SPLIT_ROWS ? SPLIT_ROWS : rows);
    if (s->split_rows > m->max_rows) s->split_rows = m->max_rows;
    size_t bytes = (size_t)s->split_rows * most, nl_bytes = (size_t)s->split_rows * heads * sizeof(float2);
    int rc = cu_share(m, (void **)&all->pieces, &all->pieces_bytes, bytes, "attention over many keys");
    if (!rc) rc = cu_share(m, (void **)&all->piece_nl, &all->piece_nl_bytes, nl_bytes, "attention over many keys");
    s->pieces = all->pieces;
    s->piece_nl = all->piece_nl;
    return rc;
}

static int make_memory(bw24_model *m, bw_list *l) {
    CuList *s = list_of(l);
    s->buf.assign((size_t)l->n_bufs, NULL);
    s->acts.assign((size_t)l->n_bufs, NULL);
    for (int i = 0; i < l->n_bufs; i++) {
        free(l->mem[i]); /* activations live on the device */
        l->mem[i] = NULL;
        if (i == l->logits) continue;
        m->work_bytes -= ((size_t)m->max_rows * (size_t)l->bufs[i].width * sizeof(float) + 63) & ~(size_t)63;
        int rc = cu_model_alloc(m, (void **)&s->buf[(size_t)i], (size_t)m->max_rows * (size_t)l->bufs[i].width * sizeof(float), l->bufs[i].name);
        if (rc) return rc;
    }
    for (int i = 0; i < l->n_ops; i++) {
        if (l->ops[i].code != BW_OP_HIDDEN || s->hidden) continue;
        int rc = cu_model_alloc(m, (void **)&s->hidden, (size_t)m->max_rows * (size_t)l->bufs[l->ops[i].buf[0]].width * sizeof(float), "hidden rows");
        if (rc) return rc;
    }
    s->logits_rows = m->max_rows < WANT_CHUNK ? m->max_rows : WANT_CHUNK;
    size_t vocab = (size_t)l->bufs[l->logits].width, pages = (size_t)(m->max_context / BW_PAGE_TOKENS + 2) * BW_MAX_CLASS;
    int rc = cu_model_alloc(m, (void **)&s->buf[(size_t)l->logits], (size_t)s->logits_rows * vocab * sizeof(float), "logits");
    if (rc) return rc;
    s->step_cap = 512 + (size_t)m->max_rows * (8 + 4 * (6 + 2 * BW_MAX_CLASS) + sizeof(FoldSeq) + 2 * sizeof(int)) + 16 * pages * 8 +
                  sizeof(uint8_t *) * BW_MAX_CLASS * SHORT_ROWS * SHORT_REACH_LEAST;
    if ((rc = cu_model_alloc(m, (void **)&s->step_dev, s->step_cap, "the rows of a step"))) return rc;
    cudaError_t e = cudaHostAlloc(&s->step_host, s->step_cap, cudaHostAllocDefault);
    if (!e) e = cudaHostAlloc(&s->logits_host, (size_t)s->logits_rows * vocab * sizeof(float), cudaHostAllocDefault);
    if (!e && l->hidden >= 0) e = cudaHostAlloc(&s->hidden_host, GRAPH_ROWS * (size_t)l->bufs[l->hidden].width * sizeof(float), cudaHostAllocDefault);
    for (int i = 0; i < 2 && !e; i++) e = cudaEventCreateWithFlags(&s->pace[i], cudaEventDisableTiming);
    return e ? cu_fail(m->ctx, e, "pinned memory") : 0;
}

static CuModel *state_of(bw24_model *m) {
    if (!m->priv) m->priv = new CuModel();
    return model_of(m);
}

static int cuda_prepare_tensor(bw24_model *m, bw_tensor *t) {
    state_of(m);
    return cu_pack_tensor(m, t);
}

static int cuda_prepare_list(bw24_model *m, bw_list *l) {
    state_of(m);
    CuList *s = new CuList();
    l->priv = s;
    s->list = l;
    int rc = cu_alive(m->ctx);
    if (!rc) rc = make_memory(m, l);
    if (!rc && m->spill) rc = cu_split_list(m, l);
    for (int i = 0; i < l->plan->n_steps && !rc; i++) rc = resolve_step(m, l, &l->plan->steps[i]);
    if (!rc) rc = resolve_acts(m, l);
    if (!rc) rc = make_pieces(m, l);
    if (!rc && l->n_states) rc = cu_resolve_replay(m, l);
    if (!rc) rc = cu_resolve_gdn(m, l);
    if (!rc) rc = cu_resolve_mixtures(m, l);
    size_t bytes = s->row_ops.size() * sizeof(RowOp);
    if (!rc && bytes) rc = cu_model_alloc(m, (void **)&s->row_mem, bytes, "row ops");
    if (rc || !bytes) return rc;
    return cu_put(m, s->row_mem, s->row_ops.data(), bytes, "row ops");
}

static void cuda_free_tensor(bw_tensor *t) {
    CuMatrix *x = (CuMatrix *)t->packed;
    if (x->w) cudaFree(x->w);
    free(x);
}

/* others' use of the card counts too: only the driver knows what it took itself */
static uint64_t cuda_used(const bw24_model *m) {
    size_t room = 0, total = 0;
    CuCtx *c = ctx_of(m);
    if (cudaSetDevice(c->device) || cudaMemGetInfo(&room, &total)) { cudaGetLastError(); return 0; }
    return c->room > room ? c->room - room : 0;
}

void cu_drop_graphs(CuList *s) {
    for (auto &g : s->graphs)
        if (g.second.exec) cudaGraphExecDestroy(g.second.exec);
    s->graphs.clear();
}

static void free_list(bw_list *l) {
    CuList *s = list_of(l);
    if (!s) return;
    cu_drop_graphs(s);
    if (s->step_host) cudaFreeHost(s->step_host);
    if (s->logits_host) cudaFreeHost(s->logits_host);
    if (s->hidden_host) cudaFreeHost(s->hidden_host);
    for (auto &e : s->pace)
        if (e) cudaEventDestroy(e);
    delete s;
    l->priv = NULL;
}

static void cuda_free_model(bw24_model *m) {
    CuModel *s = model_of(m);
    cudaSetDevice(ctx_of(m)->device);
    cu_side_drop(ctx_of(m), m);
    cudaStreamSynchronize(ctx_of(m)->q.stream);
    for (int i = 0; i < m->n_lists; i++) free_list(m->lists[i]);
    if (!s) return;
    cu_sample_free(s);
    cu_split_free(s);
    cu_round_free(s);
    for (void *p : s->owned) cudaFree(p);
    for (uint8_t *p : s->slabs) cudaFree(p);
    delete s;
    m->priv = NULL;
}

} // namespace bw

static bw_backend make_backend() {
    bw_backend b = {};
    b.name = "cuda";
    b.kv_page_bytes = bw::cuda_kv_page_bytes;
    b.kv_supported = bw::cuda_kv_supported;
    b.page_new = bw::cuda_page_new;
    b.page_free = bw::cuda_page_free;
    b.page_copy = bw::cuda_page_copy;
    b.open = bw::cuda_open;
    b.close = bw::cuda_close;
    b.prepare_tensor = bw::cuda_prepare_tensor;
    b.prepare_list = bw::cuda_prepare_list;
    b.free_tensor = bw::cuda_free_tensor;
    b.free_model = bw::cuda_free_model;
    b.fold_new = bw::cu_fold_new;
    b.fold_free = bw::cu_fold_free;
    b.fold_clear = bw::cu_fold_clear;
    b.replay = bw::cu_replay;
    b.hidden = bw::cu_hidden;
    b.roles = true;
    b.borrows = true;
    b.forward = bw::cu_forward;
    b.greedy = bw::cu_greedy;
    b.draw = bw::cu_draw;
    b.round = bw::cu_round;
    b.predict = bw::cu_predict;
    b.probe = bw::cu_probe;
    b.warm = bw::cu_warm;
    b.set = &bw::cu_set;
    b.page_slab = bw::cu_slab_pages;
    b.device_used = bw::cuda_used;
    return b;
}
extern "C" const bw_backend bw_backend_cuda = make_backend();
