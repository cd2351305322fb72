/* Weights on the device: from the file's blocks to units, slice by slice through pinned memory. The hot types are rearranged by the device, the
 * others decoded to int8 codes and f32 scales by the host's threads. Owns the staging buffers; knows no op. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include "cuda.h"

namespace bw {

static const struct { const char *type; const LinearKernels *k; } hot[] = {
    {"Q4_0", &linear_q4_0}, {"Q4_K", &linear_q4_k}, {"NVFP4", &linear_nvfp4}, {"Q8_0", &linear_q8_0}, {"Q6_K", &linear_q6_k},
    {"IQ4_XS", &linear_iq4_xs},
};
static const char *const float_names[] = {"F32", "F16", "BF16", "E4M3"};

int cu_make_stage(bw24_model *m) {
    CuCtx *c = ctx_of(m);
    if (c->stage[0]) return 0;
    for (int i = 0; i < 2; i++) {
        cudaError_t e = cudaHostAlloc(&c->stage[i], STAGE_BYTES, cudaHostAllocDefault);
        if (!e) e = cudaMalloc(&c->raw[i], STAGE_BYTES);
        if (!e) e = cudaEventCreateWithFlags(&c->staged[i], cudaEventDisableTiming);
        if (e) return cu_fail(m->ctx, e, "staging memory for weights");
    }
    return 0;
}

/* one row of the group form into its place in the units of a tile */
static void put_row(const bw_tensor *t, const uint8_t *src, int64_t cols, int row, uint8_t *units, int unit_bytes, bool halves) {
    int per = t->type->block / 32;
    for (int64_t g = 0; g < cols / 32; g++) {
        bw_group v;
        t->type->group(src + g / per * t->type->bytes, (int)(g % per), &v);
        uint8_t *u = units + (g / 8) * unit_bytes;
        int j = (int)(g % 8), c = j & 3;
        for (int e = 0; e < 32; e++) u[(j >> 2) * 2048 + int8_place(c, row, e)] = (uint8_t)v.q[e];
        float *s = (float *)(u + 4096) + row * (halves ? 32 : 16);
        if (halves) { s[2 * j] = v.s[0]; s[2 * j + 1] = v.s[1]; s[16 + 2 * j] = v.m[0]; s[17 + 2 * j] = v.m[1]; }
        else { s[j] = v.s[0]; s[8 + j] = v.m[0]; }
    }
}

/* tiles [t0, t1) of the matrix into `out`, by the context's threads */
static void host_units(const bw24_model *m, const bw_tensor *t, const CuMatrix *x, const uint8_t *src, int t0, int t1, uint8_t *out) {
    int64_t stride = bw_row_bytes(t->type, x->cols);
    bool halves = x->k == &linear_int8h;
    auto work = [=](int from, int to) {
        for (int tile = from; tile < to; tile++) {
            uint8_t *units = out + (size_t)(tile - t0) * x->segs * x->k->unit;
            memset(units, 0, (size_t)x->segs * x->k->unit);
            for (int r = 0; r < 16 && tile * 16 + r < x->rows; r++) put_row(t, src + (int64_t)(tile * 16 + r) * stride, x->cols, r, units, x->k->unit, halves);
        }
    };
    int n = m->ctx->threads, tiles = t1 - t0;
    if (n > tiles) n = tiles;
    if (n <= 1 || (int64_t)tiles * x->cols < 1 << 16) return work(t0, t1);
    std::vector<std::thread> pool;
    for (int i = 0; i < n; i++) pool.emplace_back(work, t0 + tiles * i / n, t0 + tiles * (i + 1) / n);
    for (auto &p : pool) p.join();
}

/* the file's bytes into the stage: mapped pages come from the system more slowly than the bus takes them */
static void copy_to_stage(const bw24_model *m, uint8_t *to, const uint8_t *from, size_t bytes) {
    size_t n = bytes >> 20;
    if (n > (size_t)m->ctx->threads) n = (size_t)m->ctx->threads;
    if (n > 8) n = 8;
    std::vector<std::thread> pool;
    for (size_t i = 1; i < n; i++) pool.emplace_back([=] { memcpy(to + bytes * i / n, from + bytes * i / n, bytes * (i + 1) / n - bytes * i / n); });
    memcpy(to, from, n > 1 ? bytes / n : bytes);
    for (auto &p : pool) p.join();
}

/* slices of whole tiles pass through the two halves of the stage; w: where the part's units go */
int cu_fill_part(bw24_model *m, const bw_tensor *t, const CuMatrix *x, uint8_t *w, const uint8_t *src, bool pinned) {
    CuCtx *c = ctx_of(m);
    int rc = cu_make_stage(m);
    if (rc) return rc;
    size_t row = x->k ? (size_t)bw_row_bytes(t->type, x->cols) : 0, unit_row = x->k ? (size_t)x->segs * x->k->unit : 0;
    bool raw = x->k && x->k->packs;
    size_t tile = raw ? 16 * row : unit_row, total = x->k ? (size_t)(x->rows + 15) / 16 : x->bytes, step = x->k ? STAGE_BYTES / tile : STAGE_BYTES;
    if (!step) return bw_fail(BW24_E_UNSUPPORTED, "tensor %s: rows of %d columns are too wide for backend cuda", t->name, x->cols);
    cudaError_t e = cudaMemsetAsync(w, 0, x->bytes, c->q.stream);
    for (size_t at = 0; at < total && !e; at += step, c->turn ^= 1) {
        const int turn = c->turn;
        size_t n = total - at < step ? total - at : step;
        if (!raw || !pinned) e = cudaEventSynchronize(c->staged[turn]);
        if (!x->k) {
            copy_to_stage(m, c->stage[turn], src + at, n);
            if (!e) e = cudaMemcpyAsync(w + at, c->stage[turn], n, cudaMemcpyHostToDevice, c->q.stream);
        } else if (raw) {
            size_t rows = (at + n) * 16 > (size_t)x->rows ? (size_t)x->rows - at * 16 : n * 16;
            const uint8_t *from = pinned ? src + at * 16 * row : c->stage[turn];
            if (!pinned) copy_to_stage(m, c->stage[turn], src + at * 16 * row, rows * row);
            if (!e) e = cudaMemcpyAsync(c->raw[turn], from, rows * row, cudaMemcpyHostToDevice, c->q.stream);
            Queue q = c->q;
            q.pdl = false;
            if (!e) pack_units(q, x->k, {c->raw[turn], w + at * unit_row, (int)rows, x->cols, x->segs, row});
            if (!e) e = q.error;
        } else {
            host_units(m, t, x, src, (int)at, (int)(at + n), c->stage[turn]);
            if (!e) e = cudaMemcpyAsync(w + at * unit_row, c->stage[turn], n * tile, cudaMemcpyHostToDevice, c->q.stream);
        }
        if (!e) e = cudaEventRecord(c->staged[turn], c->q.stream);
    }
    return e ? cu_fail(m->ctx, e, t->name) : 0;
}

/* NULL: float weights as in the file */
static const LinearKernels *kernels_for(const bw_type_info *t) {
    for (auto &h : hot)
        if (!strcmp(h.type, t->name)) return h.k;
    return t->form == BW_FLOAT ? NULL : t->form == BW_S1 || t->form == BW_S1M ? &linear_int8 : &linear_int8h;
}

size_t cu_matrix_bytes(const bw_type_info *t, int64_t rows, int64_t cols) {
    const LinearKernels *k = kernels_for(t);
    return k ? (size_t)((rows + 31) / 32 * 2 * ((cols + 255) / 256)) * (size_t)k->unit : (size_t)(rows * bw_row_bytes(t, cols));
}
size_t cu_part_bytes(const bw_tensor *t) { return cu_matrix_bytes(t->type, bw_part_rows(t), t->ne[0]); }

void cu_describe(const bw_tensor *t, CuMatrix *x) {
    x->parts = t->parts;
    x->rows = (int)bw_part_rows(t);
    x->cols = (int)t->ne[0];
    x->scale = t->scale;
    x->segs = (x->cols + 255) / 256;
    x->blocks = (x->rows + 31) / 32;
    x->minima = t->type->form == BW_S1M || t->type->form == BW_S2M;
    x->k = kernels_for(t->type);
    for (int i = 0; i < 4; i++)
        if (!strcmp(float_names[i], t->type->name)) x->float_type = i;
    x->bytes = cu_part_bytes(t);
}

int cu_pack_tensor(bw24_model *m, bw_tensor *t) {
    int rc = cu_alive(m->ctx);
    if (rc) return rc;
    CuMatrix *x = (CuMatrix *)calloc(1, sizeof *x);
    if (!x) return bw_fail(BW24_E_MEMORY, "out of memory for tensor %s", t->name);
    t->packed = x;
    cu_describe(t, x);
    char what[192];
    snprintf(what, sizeof what, "tensor %s", t->name);
    rc = cu_alloc(m, (void **)&x->w, x->bytes * (size_t)x->parts, what);
    if (rc) return rc;
    t->packed_bytes = x->bytes * (size_t)x->parts;
    for (int i = 0; i < x->parts && !rc; i++) rc = cu_fill_part(m, t, x, x->w + (size_t)i * x->bytes, t->data + (int64_t)i * bw_part_bytes(t), false);
    return rc;
}

} // namespace bw
