/* Backend "cuda": what weights and work memory will take on the card (bw24_predict). The sums follow load.cu, backend.cu and experts.cu, which make
 * what is counted here. Asks no device. */
#include <cstring>
#include "cuda.h"
#include "forward.h"
#include "gemm_fast.h"

namespace bw {

/* The driver gives memory in pieces of 2 MiB; smaller requests share them. FIXED: the slices of weights on their way (load.cu), the code of the kernels
 * that a model uses, graphs of a few widths. */
enum : uint64_t { PIECE_BYTES = 2 << 20, FIXED = 2 * (uint64_t)STAGE_BYTES + (64 << 20) };
static uint64_t granted(uint64_t bytes) { return bytes < PIECE_BYTES / 2 ? bytes : (bytes + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES; }

size_t cu_slab_pages(const bw24_model *m, int klass) {
    size_t bytes = (m->class_page_bytes[klass] + 255) & ~(size_t)255, n = bytes ? ((size_t)64 << 20) / bytes : 1;
    return n < 1 ? 1 : n > 64 ? 64 : n;
}

static uint64_t acts_bytes(uint64_t rows, uint64_t cols) { return rows * cols + rows * (cols / 32) * 12; }

static bool of_experts(const bw24_model *m, const bw_tensor *t) {
    for (int k = 0; k < m->n_lists && t->linear; k++)
        for (int j = 0; j < m->lists[k]->n_ops; j++)
            for (int w = 0; w < 3 && m->lists[k]->ops[j].code == BW_OP_EXPERTS; w++)
                if (m->lists[k]->ops[j].w[w] == t) return true;
    return false;
}

static uint64_t weights(const bw24_model *m, uint64_t *experts) {
    uint64_t total = 0;
    for (int i = 0; i < m->n_tensors; i++) {
        const bw_tensor *t = m->tensors[i];
        bool embed = false;
        for (int k = 0; k < m->n_lists && !t->linear && t->used; k++)
            for (int j = 0; j < m->lists[k]->n_ops; j++) embed |= m->lists[k]->ops[j].code == BW_OP_EMBED && m->lists[k]->ops[j].w[0] == t;
        uint64_t packed = t->linear || embed ? granted((uint64_t)t->parts * cu_part_bytes(t)) : 0;
        total += packed;
        if (of_experts(m, t)) *experts += packed;
        if (packed) continue;
        if (t->used) total += (uint64_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]) * sizeof(float);
    }
    return total;
}

/* whether the card, where there is one, has matrix instructions of warp groups: the context of a prediction has not opened it */
static bool warp_groups(const bw24_model *m) {
    const int card = m->ctx->device_index;
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, card) || cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, card))
        cudaGetLastError();
    return has_warp_groups(major, minor);
}

/* scratch of EXPERTS and PERHEAD, shared by layers */
static uint64_t moe(const bw24_model *m, bool groups) {
    uint64_t h = 0, d = 0, mid = 0, heads = 0;
    for (int k = 0; k < m->n_lists; k++) {
        const bw_list *l = m->lists[k];
        for (int i = 0; i < l->n_ops; i++) {
            const bw_op *op = &l->ops[i];
            if (op->code == BW_OP_PERHEAD && cu_perhead_bytes(m, op) > heads) heads = cu_perhead_bytes(m, op);
            if (op->code != BW_OP_EXPERTS) continue;
            int part;
            const bw_tensor *scale, *gate = bw_expert_part(op, BW_EXP_GATE, 0, &part, &scale), *up = bw_expert_part(op, BW_EXP_UP, 0, &part, &scale),
                            *down = bw_expert_part(op, BW_EXP_DOWN, 0, &part, &scale);
            uint64_t pairs = ((uint64_t)m->max_rows * (uint64_t)(l->bufs[op->buf[2]].width / 2) + EXPERT_ROWS + 127) / 128 * 128, ff = (uint64_t)down->ne[0];
            bool apart = gate->type != up->type, floats = down->type->form == BW_FLOAT;
            uint64_t need = (apart ? 2 : floats ? 1 : 0) * pairs * ff * 4;
            if (!need && groups && m->max_rows > EXPERT_ROWS) need = cu_tile_rows_bytes(pairs, op->experts, (int)(gate->ne[0] > down->ne[0] ? gate->ne[0] : down->ne[0]));
            h = need > h ? need : h;
            need = floats || m->max_rows > EXPERT_ROWS ? pairs * (uint64_t)bw_part_rows(down) * 4 + pairs * 4 + (pairs / EXPERT_TILE + 1024) * sizeof(ExpertTile) : 0;
            d = need > d ? need : d;
            need = floats ? 0 : acts_bytes(pairs, ff);
            mid = need > mid ? need : mid;
        }
    }
    return granted(h) + granted(d) + granted(mid) + granted(heads);
}

/* (n, l, o) of attention's pieces for the rows that fit SPLIT_BYTES */
static uint64_t pieces(const bw24_model *m, const bw_list *l) {
    uint64_t most = 0, heads = 0;
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code != BW_OP_ATTEND) continue;
        uint64_t n = (uint64_t)cu_max_pieces(m, &l->kvs[op->kv]) * (uint64_t)op->i[0], bytes = n * (uint64_t)l->kvs[op->kv].desc.dim * sizeof(float);
        most = bytes > most ? bytes : most;
        heads = n > heads ? n : heads;
    }
    if (!most) return 0;
    uint64_t rows = SPLIT_BYTES / most;
    rows = rows < 1 ? 1 : rows > SPLIT_ROWS ? SPLIT_ROWS : rows;
    if (rows > (uint64_t)m->max_rows) rows = (uint64_t)m->max_rows;
    return granted(rows * most) + granted(rows * heads * sizeof(float2));
}

static bool reads_quantised(const bw_list *l, int buf) {
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code == BW_OP_LINEAR && op->buf[1] == buf && op->w[0]->type->form != BW_FLOAT) return true;
        if (op->code == BW_OP_EXPERTS && op->buf[1] == buf && op->w[0]->type->form != BW_FLOAT) return true;
        if (op->code == BW_OP_ATTEND && op->buf[1] == buf && cu_kv_place(&l->kvs[op->kv]).k == KV_Q8_0) return true;
    }
    return false;
}

/* what DELTA of the class fast keeps for a chunk of rows; shared by all lists */
static uint64_t chunks(const bw24_model *m) {
    uint64_t most = 0;
    if (!m->ctx->fast_prefill) return 0;
    for (int k = 0; k < m->n_lists; k++)
        for (int i = 0; i < m->lists[k]->n_ops; i++) {
            const bw_list *l = m->lists[k];
            const bw_op *op = &l->ops[i];
            if (op->code != BW_OP_DELTA) continue;
            const int dk = (int)(l->bufs[op->buf[2]].width / op->i[1]), dv = (int)(l->bufs[op->buf[3]].width / op->i[0]);
            const uint64_t n = cu_delta_chunks(dk, dv) ? cu_chunk_bytes(m->max_rows, op->i[0]) : 0;
            most = n > most ? n : most;
        }
    return granted(most);
}

static uint64_t work(const bw24_model *m, const bw_list *l) {
    const bool groups = warp_groups(m);
    uint64_t rows = (uint64_t)m->max_rows, padded = (rows + 127) / 128 * 128, want = rows < WANT_CHUNK ? rows : WANT_CHUNK, bytes = 0;
    for (int i = 0; i < l->n_bufs; i++) {
        uint64_t width = (uint64_t)l->bufs[i].width;
        bytes += granted((i == l->logits ? want : rows) * width * sizeof(float));
        if (reads_quantised(l, i)) bytes += granted(acts_bytes(padded, width) + gemm_acts_bytes(groups, m->ctx->fast_prefill, padded, width));
    }
    uint64_t pages = (uint64_t)(m->max_context / BW_PAGE_TOKENS + 2) * BW_MAX_CLASS;
    return bytes + granted(rows * 192 + 128 * pages);
}

int cu_predict(bw24_model *m, bw24_memory *out) {
    uint64_t split = 0;
    out->weights = weights(m, &out->experts);
    for (int i = 0; i < m->n_lists; i++) {
        uint64_t p = pieces(m, m->lists[i]);
        out->work += work(m, m->lists[i]);
        split = p > split ? p : split;
    }
    out->work += moe(m, warp_groups(m)) + split + chunks(m);
    out->fixed = FIXED;
    out->device = out->weights + out->work + out->kv + out->state + out->fixed;
    out->host = 2 * (uint64_t)STAGE_BYTES + (uint64_t)WANT_CHUNK * (uint64_t)m->vocab * sizeof(float);
    return 0;
}

} // namespace bw
