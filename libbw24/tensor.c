/* Models: named tensors, lists and preparation. Owns the tensor table and the work buffers; knows no op's mathematics. */
#define _GNU_SOURCE /* strdup, madvise */
#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "spill.h"

bw_tensor *bw_find_tensor(bw24_model *m, const char *name) {
    for (int i = 0; i < m->n_tensors; i++)
        if (!strcmp(m->tensors[i]->name, name)) return m->tensors[i];
    return NULL;
}

/* "q8_0" or "q8_0/q5_1" -> the K and V formats */
static int parse_kv_format(const char *what, const char *s, const bw_type_info *kv[2]) {
    static const struct { const char *name; const char *type; } names[] = {{"f32", "F32"}, {"f16", "F16"}, {"q8_0", "Q8_0"}, {"q5_1", "Q5_1"}, {"e4m3", "E4M3"}};
    char part[2][16];
    const char *slash = strchr(s, '/');
    snprintf(part[0], sizeof part[0], "%.*s", slash ? (int)(slash - s) : (int)strlen(s), s);
    snprintf(part[1], sizeof part[1], "%s", slash ? slash + 1 : part[0]);
    for (int i = 0; i < 2; i++) {
        kv[i] = NULL;
        for (size_t j = 0; j < sizeof names / sizeof *names; j++)
            if (!strcmp(names[j].name, part[i])) kv[i] = bw_type_by_name(names[j].type);
        if (!kv[i]) return bw_fail(BW24_E_UNSUPPORTED, "KV format '%s' of %s: expected f32, f16, q8_0, q5_1 or e4m3, or two of them as K/V", s, what);
    }
    return 0;
}

int bw24_model_new(bw24_model **out, bw24_ctx *ctx, const bw24_model_params *p) {
    if (!out || !ctx || !p || p->size != sizeof *p)
        return bw_fail(BW24_E_ARG, "bw24_model_new: params of size %u, expected %zu", p ? p->size : 0, sizeof *p);
    if (p->max_rows < 1 || p->max_rows > 4096) return bw_fail(BW24_E_ARG, "max_rows=%d is outside 1..4096", p->max_rows);
    if (p->max_context < 1 || p->max_context > INT32_MAX) return bw_fail(BW24_E_ARG, "max_context=%lld is outside 1..%d", (long long)p->max_context, INT32_MAX);
    bw24_model *m = calloc(1, sizeof *m);
    if (!m) return bw_fail(BW24_E_MEMORY, "out of memory for a model");
    m->ctx = ctx;
    m->max_rows = p->max_rows;
    m->max_context = p->max_context;
    int rc = parse_kv_format("full-attention layers", p->kv_full ? p->kv_full : "f16", m->kv_type[0]);
    if (!rc) rc = parse_kv_format("sliding-window layers", p->kv_window ? p->kv_window : p->kv_full ? p->kv_full : "f16", m->kv_type[1]);
    if (rc) free(m);
    else *out = m;
    return rc;
}

static void free_list_mem(bw_list *l) {
    for (int i = 0; l->mem && i < l->n_bufs; i++) free(l->mem[i]);
    free(l->mem);
    l->mem = NULL;
}

void bw24_model_free(bw24_model *m) {
    if (!m) return;
    if (!m->ctx->plan_only) m->ctx->backend->free_model(m);
    for (int i = 0; i < m->n_tensors; i++) {
        bw_tensor *t = m->tensors[i];
        if (t->packed) m->ctx->backend->free_tensor(t);
        free(t->dense);
        free(t->places);
        free(t->name);
        free(t);
    }
    for (int i = 0; i < m->n_lists; i++) {
        free_list_mem(m->lists[i]);
        bw_list_free(m->lists[i]);
    }
    bw_fold_free_spares(m);
    bw_spill_free(m->spill);
    free(m->tensors);
    free(m->step_mem);
    free(m->round_mem);
    free(m);
}

static int check_tensor(const char *name, const bw_type_info *t, int32_t type, int32_t n_dims, const int64_t *ne, uint64_t nbytes, int64_t full[4]) {
    if (!t) return bw_fail(BW24_E_UNSUPPORTED, "tensor %s: unknown type id %d", name, type);
    if (n_dims < 0 || n_dims > 4) return bw_fail(BW24_E_SHAPE, "tensor %s: %d dimensions, at most 4 are possible", name, n_dims);
    __int128 values = 1;
    for (int i = 0; i < 4; i++) {
        full[i] = i < n_dims ? ne[i] : 1;
        if (full[i] < 1 || full[i] > INT32_MAX) return bw_fail(BW24_E_SHAPE, "tensor %s: dimension %d is %lld", name, i, (long long)full[i]);
        values *= full[i];
        if (values > ((__int128)1 << 44)) return bw_fail(BW24_E_SHAPE, "tensor %s: more than 2^44 values", name);
    }
    if (full[0] % t->block) return bw_fail(BW24_E_SHAPE, "tensor %s: %lld columns are not a multiple of %s's block of %d", name, (long long)full[0], t->name, t->block);
    uint64_t expects = (uint64_t)(values / t->block) * (uint64_t)t->bytes;
    if (nbytes != expects) return bw_fail(BW24_E_SHAPE, "tensor %s: expected %llu bytes, found %llu", name, (unsigned long long)expects, (unsigned long long)nbytes);
    return 0;
}

/* a new entry of the model's table, its bytes not yet there */
static int add_tensor(bw24_model *m, const char *name, const bw_type_info *info, int32_t n_dims, const int64_t full[4], float scale, bw_tensor **out) {
    if (m->n_tensors == m->cap_tensors) {
        int cap = m->cap_tensors * 2 + 64;
        bw_tensor **grown = realloc(m->tensors, (size_t)cap * sizeof *grown);
        if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for %d tensors", cap);
        m->tensors = grown;
        m->cap_tensors = cap;
    }
    bw_tensor *t = calloc(1, sizeof *t);
    if (!t || !(t->name = strdup(name))) { free(t); return bw_fail(BW24_E_MEMORY, "out of memory for tensor %s", name); }
    t->type = info;
    t->n_dims = n_dims;
    memcpy(t->ne, full, 4 * sizeof *full);
    t->scale = scale;
    t->parts = 1;
    m->tensors[m->n_tensors++] = t;
    *out = t;
    return 0;
}

static int check_new(bw24_model *m, const char *name, float scale) {
    if (m->n_lists) return bw_fail(BW24_E_ARG, "tensor %s: tensors are loaded before lists are set", name);
    if (!(scale - scale == 0)) return bw_fail(BW24_E_NUMERIC, "tensor %s: its scale is not finite", name);
    return bw_find_tensor(m, name) ? bw_fail(BW24_E_ARG, "tensor %s: loaded twice", name) : 0;
}

int bw24_tensor_load(bw24_model *m, const char *name, int32_t type, int32_t n_dims, const int64_t *ne, const void *data, uint64_t nbytes,
                     float scale, int32_t mapped) {
    if (!m || !name || !*name || strlen(name) > 127 || !ne || !data) return bw_fail(BW24_E_ARG, "bw24_tensor_load: NULL argument or a name outside 1..127 bytes");
    BW_TRY(check_new(m, name, scale));
    int64_t full[4];
    bw_tensor *t = NULL;
    BW_TRY(check_tensor(name, bw_type(type), type, n_dims, ne, nbytes, full));
    BW_TRY(add_tensor(m, name, bw_type(type), n_dims, full, scale, &t));
    t->data = data;
    t->bytes = nbytes;
    t->mapped = mapped != 0;
    return 0;
}

/* one matrix of a spilled tensor: its type fits the columns, its bytes the file */
static int check_place(bw24_model *m, const char *name, int index, const bw24_place *p, int64_t cols, int64_t rows, bw_place *out) {
    const bw_type_info *info = bw_type(p->type);
    if (!info) return bw_fail(BW24_E_UNSUPPORTED, "tensor %s, matrix %d: unknown type id %d", name, index, p->type);
    if (cols % info->block) return bw_fail(BW24_E_SHAPE, "tensor %s: %lld columns are not a multiple of %s's block of %d", name, (long long)cols, info->name, info->block);
    *out = (bw_place){p->file < 0 ? -1 : p->file, info, p->offset};
    return p->file < 0 ? 0 : bw_spill_check(m->spill, name, index, p->file, p->offset, (uint64_t)(rows * bw_row_bytes(info, cols)));
}

int bw24_spill_tensor(bw24_model *m, const char *name, int32_t n_dims, const int64_t *ne, const bw24_place *places, int32_t n, float scale) {
    if (!m || !name || !*name || strlen(name) > 127 || !ne || !places) return bw_fail(BW24_E_ARG, "bw24_spill_tensor: NULL argument or a name outside 1..127 bytes");
    if (!m->spill) return bw_fail(BW24_E_ARG, "tensor %s: bw24_spill_open comes first", name);
    BW_TRY(check_new(m, name, scale));
    int64_t full[4], rows;
    bw_tensor *t = NULL;
    if (n_dims < 0 || n_dims > 4) return bw_fail(BW24_E_SHAPE, "tensor %s: %d dimensions, at most 4 are possible", name, n_dims);
    for (int i = 0; i < 4; i++) {
        full[i] = i < n_dims ? ne[i] : 1;
        if (full[i] < 1 || full[i] > 1 << 24) return bw_fail(BW24_E_SHAPE, "tensor %s: dimension %d is %lld", name, i, (long long)full[i]);
    }
    if (full[3] != 1 || n < 1 || n > full[1] * full[2] || full[1] * full[2] % n)
        return bw_fail(BW24_E_SHAPE, "tensor %s: %d matrices of %lld rows in all", name, n, (long long)(full[1] * full[2]));
    rows = full[1] * full[2] / n;
    bw_place *own = calloc((size_t)n, sizeof *own);
    if (!own) return bw_fail(BW24_E_MEMORY, "out of memory for tensor %s", name);
    int rc = 0;
    uint64_t bytes = 0;
    for (int i = 0; i < n && !rc; i++) {
        rc = check_place(m, name, i, &places[i], full[0], rows, &own[i]);
        if (!rc) bytes += (uint64_t)(rows * bw_row_bytes(own[i].type, full[0]));
    }
    if (!rc) rc = add_tensor(m, name, own[0].type, n_dims, full, scale, &t);
    if (rc) { free(own); return rc; }
    t->places = own;
    t->n_places = n;
    t->bytes = bytes;
    return 0;
}

int bw24_tensor_touch(bw24_model *m, const char *name, int64_t first, int64_t n) {
    bw_tensor *t = m && name ? bw_find_tensor(m, name) : NULL;
    if (!t || !m->prepared) return bw_fail(BW24_E_MISSING, "bw24_tensor_touch: no tensor '%s', or the model is not prepared", name ? name : "(null)");
    if (t->mapped || t->parts != 1 || first < 0 || n < 1 || first + n > t->ne[1])
        return bw_fail(BW24_E_ARG, "tensor %s: rows %lld..%lld cannot be changed; it has %lld%s", name, (long long)first, (long long)(first + n - 1),
                       (long long)t->ne[1], t->mapped ? " over a file mapping" : "");
    if (!m->ctx->backend->repack) return bw_fail(BW24_E_UNSUPPORTED, "tensor %s: backend %s cannot change a prepared tensor", name, m->ctx->backend->name);
    return m->ctx->backend->repack(m, t, first, n);
}

float *bw_dense(bw_tensor *t) {
    if (t->dense) return t->dense;
    if (!t->data) { bw_fail(BW24_E_SHAPE, "tensor %s: it is spilled, but an op reads it as a vector", t->name); return NULL; }
    int64_t n = t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    if (n > 1 << 24) { bw_fail(BW24_E_SHAPE, "tensor %s: %lld values are too many for a norm weight or a bias", t->name, (long long)n); return NULL; }
    t->dense = malloc((size_t)n * sizeof *t->dense);
    if (!t->dense) { bw_fail(BW24_E_MEMORY, "out of memory for tensor %s", t->name); return NULL; }
    const uint8_t *p = t->data;
    for (int64_t i = 0; i < n; i += t->type->block, p += t->type->bytes) t->type->decode(p, t->dense + i);
    return t->dense;
}

/* ---- lists */
static int assign_classes(bw24_model *m, bw_list *l) {
    for (int i = 0; i < l->n_kvs; i++) {
        bw_kv *kv = &l->kvs[i];
        if (kv->borrowed) continue;
        if (!m->ctx->backend->kv_supported(&kv->desc))
            return bw_fail(BW24_E_UNSUPPORTED, "KV cache %s: format %s/%s with %d values a head is not supported by backend %s", kv->name,
                           kv->desc.kt->name, kv->desc.vt->name, kv->desc.dim, m->ctx->backend->name);
        int c = 0;
        while (c < m->n_classes && (m->class_window[c] != kv->window || m->class_list[c] != m->n_lists)) c++;
        if (c == BW_MAX_CLASS) return bw_fail(BW24_E_UNSUPPORTED, "KV cache %s: more than %d different windows", kv->name, BW_MAX_CLASS);
        if (c == m->n_classes) {
            m->class_list[c] = m->n_lists;
            m->class_window[m->n_classes++] = kv->window;
        }
        kv->klass = c;
        kv->offset = m->class_page_bytes[c];
        m->class_page_bytes[c] += (m->ctx->backend->kv_page_bytes(&kv->desc) + 63) & ~(size_t)63;
    }
    return 0;
}

static int mark_matrix(const bw_list *l, int op, bw_tensor *t, int parts) {
    char label[256];
    if (t->linear && t->parts != parts) {
        bw_op_label(l, op, label, sizeof label);
        return bw_fail(BW24_E_SHAPE, "%s: tensor %s holds %d matrices for another op, here %d", label, t->name, t->parts, parts);
    }
    if (t->places && (l->ops[op].code != BW_OP_EXPERTS || parts % t->n_places)) {
        bw_op_label(l, op, label, sizeof label);
        return bw_fail(BW24_E_SHAPE, "%s: tensor %s is spilled as %d matrices, the op reads %d", label, t->name, t->n_places, parts);
    }
    t->linear = true;
    t->parts = parts;
    return 0;
}

/* which tensors a backend may pack, and as how many matrices */
static int mark_matrices(const bw_list *l, int index) {
    const bw_op *op = &l->ops[index];
    if (op->code == BW_OP_LINEAR || op->code == BW_OP_PERHEAD) return mark_matrix(l, index, op->w[0], op->code == BW_OP_LINEAR ? 1 : op->i[0]);
    for (int m = 0; m < BW_OP_W && op->code != BW_OP_EXPERTS; m++)
        if (op->w[m] && op->w[m]->places) return mark_matrix(l, index, op->w[m], 1); /* refuses */
    if (op->code != BW_OP_EXPERTS) return 0;
    for (int m = 0; m < 3; m++)
        if (op->w[m]) BW_TRY(mark_matrix(l, index, op->w[m], m == BW_EXP_GATE && !op->w[BW_EXP_UP] ? 2 * op->experts : op->experts));
    return 0;
}

/* what a list shares with the first one: the backend's ability, and the width of hidden rows */
static int check_role(const bw24_model *m, const bw_list *l) {
    if (m->n_lists && !m->ctx->backend->roles)
        return bw_fail(BW24_E_UNSUPPORTED, "list %s: backend %s runs one list a model", l->role, m->ctx->backend->name);
    if (m->n_lists && l->n_states)
        return bw_fail(BW24_E_UNSUPPORTED, "list %s: only the first list of a model carries state, here %s", l->role, l->states[0].name);
    if (l->borrows && !m->ctx->backend->borrows)
        return bw_fail(BW24_E_UNSUPPORTED, "list %s: backend %s reads no other list's KV caches", l->role, m->ctx->backend->name);
    if (m->n_lists && l->bufs[l->logits].width > m->vocab)
        return bw_fail(BW24_E_SHAPE, "list %s: %lld logits, list %s has %d", l->role, (long long)l->bufs[l->logits].width, m->lists[0]->role, m->vocab);
    const bw_list *first = m->n_lists ? m->lists[0] : l;
    int64_t width = first->hidden >= 0 ? first->bufs[first->hidden].width : 0;
    if (m->n_lists && l->hidden >= 0 && l->bufs[l->hidden].width != width)
        return bw_fail(BW24_E_SHAPE, "list %s: hidden rows of %lld values, those of list %s have %lld", l->role,
                       (long long)l->bufs[l->hidden].width, first->role, (long long)width);
    for (int i = 0; i < l->n_ops; i++) {
        int64_t takes = l->ops[i].code == BW_OP_HIDDEN ? l->bufs[l->ops[i].buf[0]].width : width;
        if (takes != width)
            return bw_fail(BW24_E_SHAPE, "list %s: HIDDEN takes rows of %lld values, list %s hands on %lld", l->role, (long long)takes, first->role,
                           (long long)width);
    }
    return 0;
}

int bw24_list_set(bw24_model *m, const char *role, const char *text) {
    if (!m || !role || !*role || strlen(role) > 31 || !text) return bw_fail(BW24_E_ARG, "bw24_list_set: NULL argument or a role outside 1..31 bytes");
    if (m->prepared) return bw_fail(BW24_E_ARG, "list %s: the model is prepared already", role);
    if (m->n_lists == BW_MAX_ROLES) return bw_fail(BW24_E_ARG, "list %s: a model has at most %d lists", role, BW_MAX_ROLES);
    for (int i = 0; i < m->n_lists; i++)
        if (!strcmp(m->lists[i]->role, role)) return bw_fail(BW24_E_ARG, "list %s: set twice", role);
    bw_list *l;
    int mode = fegetround(); /* strtod rounds by it; on x86 it is another register than the one that bw_fpenv sets */
    fesetround(FE_TONEAREST);
    int rc = bw_list_parse(m, role, text, &l);
    fesetround(mode);
    if (rc) return rc;
    l->index = m->n_lists;
    rc = check_role(m, l);
    if (!rc) rc = assign_classes(m, l);
    if (rc) { bw_list_free(l); return rc; }
    for (int i = 0; i < l->n_ops && !rc; i++) rc = mark_matrices(l, i);
    if (rc) { bw_list_free(l); return rc; }
    if (!m->n_lists) m->vocab = (int32_t)l->bufs[l->logits].width;
    m->lists[m->n_lists++] = l;
    return 0;
}

bw_list *bw_find_list(bw24_model *m, const char *role) {
    for (int i = 0; m && role && i < m->n_lists; i++)
        if (!strcmp(m->lists[i]->role, role)) return m->lists[i];
    return NULL;
}

int bw24_list_ids(bw24_model *m, const char *role, const int32_t *ids, int32_t n) {
    bw_list *l = bw_find_list(m, role);
    if (!l || !ids) return bw_fail(BW24_E_MISSING, "bw24_list_ids: no list '%s', or no ids", role ? role : "(null)");
    if (n != l->bufs[l->logits].width)
        return bw_fail(BW24_E_SHAPE, "list %s: %d ids for %lld columns of logits", role, n, (long long)l->bufs[l->logits].width);
    uint8_t *seen = calloc((size_t)m->vocab, 1);
    int32_t *own = malloc((size_t)n * sizeof *own);
    int rc = seen && own ? 0 : bw_fail(BW24_E_MEMORY, "out of memory for %d ids", n);
    for (int32_t i = 0; i < n && !rc; i++) {
        if (ids[i] < -1 || ids[i] >= m->vocab) rc = bw_fail(BW24_E_ARG, "list %s: id %d of column %d is outside 0..%d", role, ids[i], i, m->vocab - 1);
        else if (ids[i] >= 0 && seen[ids[i]]++) rc = bw_fail(BW24_E_ARG, "list %s: id %d stands for two columns", role, ids[i]);
    }
    free(seen);
    if (rc) { free(own); return rc; }
    memcpy(own, ids, (size_t)n * sizeof *own);
    free(l->ids);
    l->ids = own;
    l->ids_set++;
    return 0;
}

int32_t bw24_list_logits(bw24_model *m, const char *role) {
    const bw_list *l = bw_find_list(m, role);
    return l ? (int32_t)l->bufs[l->logits].width : 0;
}

/* ---- preparation */
/* Activation buffers are made for max_rows and mostly used by one row: without huge pages only the rows in use take memory. */
void *bw_work_alloc(size_t bytes) {
    bytes = (bytes + 4095) & ~(size_t)4095;
    void *p = aligned_alloc(4096, bytes);
    if (p) madvise(p, bytes, MADV_NOHUGEPAGE);
    return p;
}

static int make_buffers(bw24_model *m, bw_list *l) {
    l->mem = calloc((size_t)l->n_bufs, sizeof *l->mem);
    if (!l->mem) return bw_fail(BW24_E_MEMORY, "out of memory for %d buffers", l->n_bufs);
    for (int i = 0; i < l->n_bufs; i++) {
        if (i == l->logits) continue;
        size_t bytes = ((size_t)m->max_rows * (size_t)l->bufs[i].width * sizeof(float) + 63) & ~(size_t)63;
        l->mem[i] = bw_work_alloc(bytes);
        if (!l->mem[i]) return bw_fail(BW24_E_MEMORY, "out of memory for buffer %s: %zu bytes", l->bufs[i].name, bytes);
        m->work_bytes += bytes;
    }
    return 0;
}

static int prepare_small(bw_list *l) {
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code == BW_OP_EMBED) continue;
        int first = op->code == BW_OP_LINEAR ? 1 : op->code == BW_OP_EXPERTS ? 3 : 0; /* past the matrices */
        for (int w = first; w < BW_OP_W; w++)
            if (op->w[w] && !bw_dense(op->w[w])) return BW24_E_MEMORY;
    }
    return 0;
}

static int prepare_end(bw24_model *m) {
    if (!m->n_lists) return bw_fail(BW24_E_MISSING, "bw24_prepare: the model has no list");
    for (int i = 0; i < m->n_lists; i++) {
        bw_list *l = m->lists[i];
        BW_TRY(prepare_small(l));
        BW_TRY(make_buffers(m, l));
        BW_TRY(bw_lower(l, m->ctx->fuse, &l->plan));
        BW_TRY(m->ctx->backend->prepare_list(m, l));
    }
    m->prepared = true;
    return 0;
}

int bw24_prepare(bw24_model *m, int32_t index) {
    if (!m || index < 0 || index > m->n_tensors) return bw_fail(BW24_E_ARG, "bw24_prepare: index %d is outside 0..%d", index, m ? m->n_tensors : 0);
    if (m->prepared) return bw_fail(BW24_E_ARG, "bw24_prepare: the model is prepared already");
    if (m->ctx->plan_only) return bw_fail(BW24_E_ARG, "bw24_prepare: the context was opened for plans only");
    bw_fpenv e = bw_fpenv_enter();
    int rc = 0;
    if (index == m->n_tensors) rc = prepare_end(m);
    else if (m->tensors[index]->linear && !m->tensors[index]->packed && !m->tensors[index]->places) rc = m->ctx->backend->prepare_tensor(m, m->tensors[index]);
    bw_fpenv_leave(e);
    return rc;
}

int bw24_explain(bw24_model *m, const char *role, int32_t what, const char **text) {
    bw_list *l = bw_find_list(m, role);
    if (!l || !text) return bw_fail(BW24_E_MISSING, "bw24_explain: no list '%s'", role ? role : "(null)");
    if (what == 0 && !l->text) BW_TRY(bw_list_print(l, &l->text));
    if (what == 1 && !l->plan) return bw_fail(BW24_E_ARG, "bw24_explain: the model is not prepared, so it has no plan");
    if (what == 1 && !l->plan_text) BW_TRY(bw_plan_print(l, &l->plan_text));
    if (what < 0 || what > 1) return bw_fail(BW24_E_ARG, "bw24_explain: what=%d, expected 0 (list) or 1 (plan)", what);
    *text = what ? l->plan_text : l->text;
    return 0;
}

int bw24_model_memory(bw24_model *m, bw24_memory *out) {
    if (!m || !out || out->size != sizeof *out) return bw_fail(BW24_E_ARG, "bw24_model_memory: struct of size %u, expected %zu", out ? out->size : 0, sizeof *out);
    *out = (bw24_memory){.size = sizeof *out};
    if (m->ctx->backend->device_used) out->device = m->ctx->backend->device_used(m);
    for (int i = 0; i < m->n_tensors; i++) out->weights += m->tensors[i]->packed_bytes;
    out->work = m->work_bytes;
    out->kv = (uint64_t)atomic_load(&m->kv_bytes);
    for (int i = 0; i < m->n_lists; i++) out->state += bw_state_bytes(m->lists[i]);
    for (int c = 0; c < m->n_classes; c++) *(m->class_window[c] ? &out->kv_page_window : &out->kv_page_full) += m->class_page_bytes[c];
    return 0;
}

int32_t bw24_model_vocab(bw24_model *m) { return m ? m->vocab : 0; }
int32_t bw24_model_hidden(bw24_model *m) {
    const bw_list *l = m && m->n_lists ? m->lists[0] : NULL;
    return l && l->hidden >= 0 && m->ctx->backend->roles ? (int32_t)l->bufs[l->hidden].width : 0;
}
