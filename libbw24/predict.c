/* What a model will take, from its lists and the shapes of its tensors alone: before anything is packed, and without a device. Owns what every
 * backend has (KV pages, state); weights and work are the backend's to say (bw_backend.predict). */
#include <string.h>

#include "internal.h"

/* pages of a class that one sequence of max_context tokens holds: a window keeps what a step needs around it */
static uint64_t class_pages(const bw24_model *m, int c) {
    int64_t tokens = m->max_context, kept = m->class_window[c] + 32 + 2 * (int64_t)m->max_rows + 2 * BW_PAGE_TOKENS;
    if (m->class_window[c] && kept < tokens) tokens = kept;
    return (uint64_t)((tokens + BW_PAGE_TOKENS - 1) / BW_PAGE_TOKENS);
}

/* three versions of the state and two logs: what a step reads, what it writes, and where the last one can be taken back to */
uint64_t bw_state_bytes(const bw_list *l) { return (3 * (uint64_t)l->state_floats + 2 * (uint64_t)l->log_floats) * sizeof(float); }

/* a backend that computes from the file's layout */
static int plain(const bw24_model *m, bw24_memory *out) {
    for (int i = 0; i < m->n_tensors; i++)
        if (m->tensors[i]->used) out->weights += m->tensors[i]->bytes;
    for (int k = 0; k < m->n_lists; k++)
        for (int i = 0; i < m->lists[k]->n_bufs; i++) out->work += (uint64_t)m->max_rows * (uint64_t)m->lists[k]->bufs[i].width * sizeof(float);
    out->host = out->weights + out->work + out->kv + out->state;
    return 0;
}

int bw24_predict(bw24_model *m, bw24_memory *out) {
    if (!m || !out || out->size != sizeof *out)
        return bw_fail(BW24_E_ARG, "bw24_predict: NULL argument, or a struct of size %u, expected %zu", out ? out->size : 0, sizeof *out);
    if (!m->n_lists || m->prepared) return bw_fail(BW24_E_ARG, "bw24_predict: the model has no list, or is prepared already");
    const bw_backend *b = m->ctx->backend;
    *out = (bw24_memory){.size = sizeof *out};
    for (int c = 0; c < m->n_classes; c++) {
        uint64_t page = m->class_page_bytes[c], pages = class_pages(m, c) + 1 /* the last one of a fork */, slab = b->page_slab ? b->page_slab(m, c) : 1;
        *(m->class_window[c] ? &out->kv_page_window : &out->kv_page_full) += page;
        if (b->page_slab) page = (page + 255) & ~(uint64_t)255;
        out->kv += (pages + slab - 1) / slab * slab * page;
    }
    for (int i = 0; i < m->n_lists; i++) out->state += bw_state_bytes(m->lists[i]);
    return b->predict ? b->predict(m, out) : plain(m, out);
}
