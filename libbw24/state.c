/* Sequences: positions, KV pages and FOLD state. Owns page tables, sharing by reference count, copy on write, window release and truncation.
 * Knows the size of a page, nothing of its layout. Page i of a class holds positions [64 i, 64 i + 64) of every KV cache of that class. */
#define _GNU_SOURCE /* madvise, MAP_ANONYMOUS */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fault.h"
#include "internal.h"

/* Host pages hold numbers everywhere, because slots past the position are read by vector code and masked. Large ones are mappings of their own:
 * zeroed by the system as they are touched, in huge pages where it grants them (10-20 % of decode at long contexts). */
enum { OWN_MAPPING = 1 << 20 };
static uint8_t *host_page(size_t bytes) {
    if (bytes < OWN_MAPPING) {
        uint8_t *small = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (small) memset(small, 0, bytes);
        return small;
    }
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}
static void host_page_free(uint8_t *data, size_t bytes) {
    if (bytes < OWN_MAPPING) free(data);
    else munmap(data, bytes);
}

static void page_unref(bw24_model *m, int klass, bw_page *p) {
    if (!p || atomic_fetch_sub(&p->refs, 1) != 1) return;
    atomic_fetch_sub(&m->kv_bytes, (long long)m->class_page_bytes[klass]);
    if (m->ctx->backend->page_free) m->ctx->backend->page_free(m, klass, p->data);
    else host_page_free(p->data, m->class_page_bytes[klass]);
    free(p);
}

static bw_page *page_new(bw24_model *m, int klass) {
    size_t bytes = m->class_page_bytes[klass];
    bw_page *p = malloc(sizeof *p);
    if (!p) return NULL;
    p->data = m->ctx->backend->page_new ? m->ctx->backend->page_new(m, klass) : host_page(bytes);
    if (!p->data) { free(p); return NULL; }
    atomic_init(&p->refs, 1);
    atomic_fetch_add(&m->kv_bytes, (long long)bytes);
    return p;
}

/* a sequence has pages of its own list's classes; the other slots stay NULL */
static bool holds(const bw24_seq *s, int klass) { return s->model->class_list[klass] == s->list->index; }

/* ---- FOLD state (of the first list: others carry none) */
enum { STATE, LOG };
static size_t fold_bytes(const bw24_model *m, int kind) {
    size_t n = (kind == LOG ? m->lists[0]->log_floats : m->lists[0]->state_floats) * sizeof(float);
    return (n + 63) & ~(size_t)63;
}

static float *fold_data(bw24_model *m, int kind) {
    return m->ctx->backend->fold_new ? m->ctx->backend->fold_new(m, fold_bytes(m, kind)) : (float *)(void *)host_page(fold_bytes(m, kind));
}

static bw_fold *fold_take(bw24_model *m, int kind) {
    bw_fold *f = m->spare[kind];
    if (f) m->spare[kind] = f->next;
    else if ((f = calloc(1, sizeof *f)) && !(f->data = fold_data(m, kind))) {
        free(f);
        f = NULL;
    }
    if (!f) { bw_fail(BW24_E_MEMORY, "out of memory for a sequence's state of %zu bytes", fold_bytes(m, kind)); return NULL; }
    atomic_init(&f->refs, 1);
    atomic_fetch_add(&m->kv_bytes, (long long)fold_bytes(m, kind));
    return f;
}

static void fold_unref(bw24_model *m, int kind, bw_fold *f) {
    if (!f || atomic_fetch_sub(&f->refs, 1) != 1) return;
    atomic_fetch_sub(&m->kv_bytes, (long long)fold_bytes(m, kind));
    f->next = m->spare[kind];
    m->spare[kind] = f;
}

static bw_fold *fold_ref(bw_fold *f) {
    if (f) atomic_fetch_add(&f->refs, 1);
    return f;
}

void bw_fold_free_spares(bw24_model *m) {
    for (int k = 0; k < 2; k++)
        for (bw_fold *f = m->spare[k], *next; f; f = next) {
            next = f->next;
            if (m->ctx->backend->fold_free) m->ctx->backend->fold_free(f->data);
            else host_page_free((uint8_t *)f->data, fold_bytes(m, k));
            free(f);
        }
}

static void fold_forget(bw24_seq *s) {
    fold_unref(s->model, STATE, s->live);
    fold_unref(s->model, STATE, s->saved);
    fold_unref(s->model, LOG, s->log);
    s->live = s->saved = s->log = NULL;
    s->log_n = 0;
}

int bw_seq_fold_begin(bw_seq_rows *r) {
    bw24_model *m = r->seq->model;
    if (!r->seq->live) {
        if (!(r->seq->live = fold_take(m, STATE))) return BW24_E_MEMORY;
        if (m->ctx->backend->fold_clear) BW_TRY(m->ctx->backend->fold_clear(m, r->seq->live->data, fold_bytes(m, STATE)));
        else memset(r->seq->live->data, 0, fold_bytes(m, STATE));
    }
    r->n_log = r->n < BW_LOG_ROWS ? r->n : BW_LOG_ROWS;
    r->live = fold_ref(r->seq->live);
    if (r->n > r->n_log && !(r->mid = fold_take(m, STATE))) return BW24_E_MEMORY;
    if (!(r->out = fold_take(m, STATE)) || !(r->log = fold_take(m, LOG))) return BW24_E_MEMORY;
    return 0;
}

void bw_seq_fold_end(bw_seq_rows *r, bool ok) {
    bw24_seq *s = r->seq;
    if (ok) {
        fold_forget(s);
        s->live = fold_ref(r->out);
        s->saved = fold_ref(r->mid ? r->mid : r->live);
        s->log = fold_ref(r->log);
        s->log_n = r->n_log;
        s->log_from = s->pos + r->n - r->n_log;
    }
    fold_unref(s->model, STATE, r->live);
    fold_unref(s->model, STATE, r->mid);
    fold_unref(s->model, STATE, r->out);
    fold_unref(s->model, LOG, r->log);
}

/* the state at *pos, or at 0 where that one is out of reach */
static int fold_truncate(bw24_seq *s, int64_t *pos) {
    bw24_model *m = s->model;
    if (!s->list->n_states || (*pos == s->pos && *pos)) return 0;
    int64_t n = *pos - s->log_from;
    if (!*pos || !s->log || n < 0 || n > s->log_n) {
        fold_forget(s);
        *pos = 0;
        return 0;
    }
    bw_fold *to = n ? fold_take(m, STATE) : fold_ref(s->saved);
    if (!to) return BW24_E_MEMORY;
    int rc = n ? m->ctx->backend->replay(m, m->lists[0], s->saved->data, s->log->data, (int)n, to->data) : 0;
    fold_unref(m, STATE, rc ? to : s->live);
    if (rc) return rc;
    s->live = to;
    s->log_n = (int)n;
    return 0;
}

/* ---- sequences */
static int seq_new(bw24_seq **out, bw24_model *m, bw_list *l) {
    if (!out || !m) return bw_fail(BW24_E_ARG, "bw24_seq_new: NULL argument");
    if (!m->prepared) return bw_fail(BW24_E_ARG, "bw24_seq_new: the model is not prepared");
    bw24_seq *s = calloc(1, sizeof *s);
    if (!s) return bw_fail(BW24_E_MEMORY, "out of memory for a sequence");
    s->model = m;
    s->list = l;
    *out = s;
    return 0;
}

int bw24_seq_new(bw24_seq **out, bw24_model *m) { return seq_new(out, m, m && m->n_lists ? m->lists[0] : NULL); }

int bw24_seq_new_role(bw24_seq **out, bw24_model *m, const char *role) {
    bw_list *l = bw_find_list(m, role);
    if (m && !l) return bw_fail(BW24_E_MISSING, "bw24_seq_new_role: no list '%s'", role ? role : "(null)");
    if (l && l->borrows) return bw_fail(BW24_E_ARG, "bw24_seq_new_role: list %s reads another sequence's keys; bw24_seq_new_over names it", role);
    return seq_new(out, m, l);
}

int bw24_seq_new_over(bw24_seq **out, bw24_seq *source, const char *role) {
    bw_list *l = source ? bw_find_list(source->model, role) : NULL;
    if (!l) return bw_fail(BW24_E_MISSING, "bw24_seq_new_over: no sequence, or no list '%s'", role ? role : "(null)");
    if (!l->borrows || source->list->index) return bw_fail(BW24_E_ARG, "bw24_seq_new_over: list %s does not read the keys of list %s", role, source->list->role);
    BW_TRY(seq_new(out, source->model, l));
    (*out)->source = source;
    return 0;
}

void bw24_seq_free(bw24_seq *s) {
    if (!s) return;
    for (int c = 0; c < s->model->n_classes; c++) {
        for (int i = 0; i < s->n_pages; i++) page_unref(s->model, c, s->pages[c][i]);
        free(s->pages[c]);
        free(s->data[c]);
    }
    if (s->model->n_lists) fold_forget(s);
    free(s);
}

int64_t bw24_seq_pos(bw24_seq *s) { return s ? s->pos : -1; }

static int grow_tables(bw24_seq *s, int need) {
    if (need <= s->cap_pages) return 0;
    int cap = need + need / 2 + 8;
    for (int c = 0; c < s->model->n_classes; c++) {
        bw_page **p = realloc(s->pages[c], (size_t)cap * sizeof *p);
        if (p) s->pages[c] = p;
        uint8_t **d = realloc(s->data[c], (size_t)cap * sizeof *d);
        if (d) s->data[c] = d;
        if (!p || !d) return bw_fail(BW24_E_MEMORY, "out of memory for a table of %d KV pages", cap);
    }
    s->cap_pages = cap;
    return 0;
}

/* the page is written next: a shared one is copied first */
static int make_writable(bw24_seq *s, int klass, int i) {
    bw_page *old = s->pages[klass][i];
    if (atomic_load(&old->refs) <= BW_SEEDED(12, 2, 1)) return 0;
    bw_page *p = page_new(s->model, klass);
    if (!p) return bw_fail(BW24_E_MEMORY, "out of memory for a KV page of %zu bytes", s->model->class_page_bytes[klass]);
    if (s->model->ctx->backend->page_copy) s->model->ctx->backend->page_copy(s->model, klass, p->data, old->data);
    else memcpy(p->data, old->data, s->model->class_page_bytes[klass]);
    page_unref(s->model, klass, old);
    s->pages[klass][i] = p;
    s->data[klass][i] = p->data;
    return 0;
}

static void drop_pages(bw24_seq *s, int keep) {
    for (int c = 0; c < s->model->n_classes; c++)
        for (int i = keep; i < s->n_pages; i++) page_unref(s->model, c, s->pages[c][i]);
    if (keep < s->n_pages) s->n_pages = keep;
}

int bw_seq_reserve(bw24_seq *s, int64_t n) {
    int need = (int)((s->pos + n + BW_PAGE_TOKENS - 1) / BW_PAGE_TOKENS), had = s->n_pages;
    BW_TRY(grow_tables(s, need));
    if (s->pos % BW_PAGE_TOKENS)
        for (int c = 0; c < s->model->n_classes; c++)
            if (holds(s, c)) BW_TRY(make_writable(s, c, (int)(s->pos / BW_PAGE_TOKENS)));
    while (s->n_pages < need) {
        int i = s->n_pages++;
        for (int c = 0; c < s->model->n_classes; c++) {
            s->pages[c][i] = NULL;
            s->data[c][i] = NULL;
        }
        for (int c = 0; c < s->model->n_classes; c++) {
            if (!holds(s, c)) continue;
            bw_page *p = page_new(s->model, c);
            if (!p) {
                drop_pages(s, had);
                return bw_fail(BW24_E_MEMORY, "out of memory for a KV page of %zu bytes", s->model->class_page_bytes[c]);
            }
            s->pages[c][i] = p;
            s->data[c][i] = p->data;
        }
    }
    return 0;
}

/* A window class keeps its window, 32 rows to step back over, the rows of one step and one page. */
void bw_seq_trim_windows(bw24_seq *s) {
    bw24_model *m = s->model;
    for (int c = 0; c < m->n_classes; c++) {
        if (!m->class_window[c] || !holds(s, c)) continue;
        int64_t keep_from = s->pos - m->class_window[c] - 32 - m->max_rows - BW_PAGE_TOKENS;
        int last = keep_from > 0 ? (int)(keep_from / BW_PAGE_TOKENS) : 0;
        for (int i = (int)(s->floor[c] / BW_PAGE_TOKENS); i < last; i++) {
            page_unref(m, c, s->pages[c][i]);
            s->pages[c][i] = NULL;
            s->data[c][i] = NULL;
        }
        if ((int64_t)last * BW_PAGE_TOKENS > s->floor[c]) s->floor[c] = (int64_t)last * BW_PAGE_TOKENS;
    }
}

int bw24_seq_truncate(bw24_seq *s, int64_t pos, int64_t *actual) {
    if (!s || pos < 0 || pos > s->pos)
        return bw_fail(BW24_E_ARG, "bw24_seq_truncate: position %lld is outside 0..%lld", (long long)pos, s ? (long long)s->pos : -1LL);
    for (int c = 0; c < s->model->n_classes; c++) {
        int64_t w = s->model->class_window[c], lo = w && pos > w ? pos - w : 0;
        if (w && s->floor[c] > lo) pos = 0; /* the window before pos is gone: only the beginning can be restored */
    }
    bw_fpenv e = bw_fpenv_enter();
    int rc = fold_truncate(s, &pos);
    bw_fpenv_leave(e);
    if (rc) return rc;
    drop_pages(s, (int)BW_SEEDED(13, s->n_pages, (pos + BW_PAGE_TOKENS - 1) / BW_PAGE_TOKENS));
    s->pos = pos;
    if (!pos) memset(s->floor, 0, sizeof s->floor);
    if (actual) *actual = pos;
    return 0;
}

int bw24_seq_fork(bw24_seq **out, bw24_seq *s) {
    if (!out || !s || s->source) return bw_fail(BW24_E_ARG, "bw24_seq_fork: NULL argument, or a sequence over another's keys");
    bw24_seq *f = NULL;
    BW_TRY(seq_new(&f, s->model, s->list));
    int rc = grow_tables(f, s->n_pages ? s->n_pages : 1);
    if (rc) { bw24_seq_free(f); return rc; }
    f->pos = s->pos;
    f->live = fold_ref(s->live);
    f->saved = fold_ref(s->saved);
    f->log = fold_ref(s->log);
    f->log_from = s->log_from;
    f->log_n = s->log_n;
    memcpy(f->floor, s->floor, sizeof f->floor);
    f->n_pages = s->n_pages;
    for (int c = 0; c < s->model->n_classes; c++)
        for (int i = 0; i < s->n_pages; i++) {
            f->pages[c][i] = s->pages[c][i];
            f->data[c][i] = s->data[c][i];
            if (f->pages[c][i]) atomic_fetch_add(&f->pages[c][i]->refs, 1);
        }
    *out = f;
    return 0;
}
