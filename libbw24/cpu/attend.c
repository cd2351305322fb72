/* ATTEND on the CPU: walks rows, KV heads and pages, and hands tiles of queries to the kernels. Owns the scratch memory's layout and the
 * merge of pieces; knows the insides of a page only through views, and no instruction set.
 *
 * Queries (a row's query head) of one KV head are taken in blocks of at most BLOCK_QUERIES, so that their state and one decoded page
 * stay in the second-level cache; a page is decoded to f32 (codes for q5_1's K) when EXPAND_FROM or more queries of the block see it. */
#include "attend.h"
#include <string.h>
#include "../canon.h"
#include "attend_impl.h"

enum { BLOCK_QUERIES = 128, EXPAND_FROM = 8 };

typedef struct active { int query, j0, j1; } active; /* query sees keys [j0, j1) of the page in hand */

/* scratch of one call, carved from `work` */
typedef struct scratch {
    float *k, *v;          /* one decoded page: [dim][64], tiles */
    float *s;              /* [MAX_TILE][64] scores, then p */
    float *o;              /* [MAX_TILE][dim_p] of the piece in hand */
    float *sum;            /* [queries][dim_p] O */
    float *nl;             /* [queries][2] N, L; L = 0: no piece yet */
    attend_query *query;   /* [queries] */
    int8_t *code;          /* [queries][dim] */
    float *delta, *alpha;  /* [queries][dim/32] */
    int32_t *isum;
    active *list;          /* [queries] */
} scratch;

typedef struct call {
    const attend_kernels *kernel;
    const bw_kv_desc *kv;
    uint8_t *const *pages;
    const int64_t *lo, *hi;
    enum kv_kind kk, vk;
    kv_planes kp, vp;
    int dim, dim_p, group; /* group: query heads a KV head */
    float c;
    scratch w;
    float *acc;            /* pieces go here instead of being merged, or NULL */
    int64_t acc_first;     /* page of acc's first piece */
    int q_heads;
} call;

static const attend_kernels *kernels_of(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_AVX512VNNI) return &cpu_attend_avx512;
    if (isa == CPU_AVX2 || isa == CPU_AVXVNNI) return &cpu_attend_avx2;
#endif
    (void)isa;
    return &cpu_attend_portable;
}

/* ---- scratch */
static int block_rows(int group) { return group < BLOCK_QUERIES ? BLOCK_QUERIES / group : 1; }

static void *carve(uint8_t *base, size_t *at, size_t bytes) {
    void *p = base ? base + *at : NULL;
    *at += (bytes + 63) & ~(size_t)63;
    return p;
}

/* with base NULL only counts; queries: most at a time */
static size_t carve_scratch(scratch *w, uint8_t *base, int dim, int queries) {
    size_t at = 0, n = (size_t)queries, d = (size_t)dim, dp = (size_t)kv_dim_p(dim), g = (d + GROUP - 1) / GROUP;
    w->k = carve(base, &at, 4 * d * PAGE);
    w->v = carve(base, &at, 4 * dp * PAGE);
    w->s = carve(base, &at, 4 * MAX_TILE * PAGE);
    w->o = carve(base, &at, 4 * MAX_TILE * dp);
    w->sum = carve(base, &at, 4 * n * dp);
    w->nl = carve(base, &at, 8 * n);
    w->query = carve(base, &at, n * sizeof(attend_query));
    w->code = carve(base, &at, n * d);
    w->delta = carve(base, &at, 4 * n * g);
    w->alpha = carve(base, &at, 4 * n * g);
    w->isum = carve(base, &at, 4 * n * g);
    w->list = carve(base, &at, n * sizeof(active));
    return at;
}

static int most_queries(int n_rows, int group) { return (n_rows < block_rows(group) ? n_rows : block_rows(group)) * group; }

size_t cpu_attend_work(const bw_kv_desc *kv, int n_rows, int q_heads) {
    scratch w;
    return carve_scratch(&w, NULL, kv->dim, most_queries(n_rows, q_heads / kv->heads)) + 64;
}

static void open_call(call *a, enum cpu_isa isa, const bw_kv_desc *kv, uint8_t *const *pages, int n_rows, int q_heads, float c,
                      void *work) {
    *a = (call){.kernel = kernels_of(isa), .kv = kv, .pages = pages, .c = c, .q_heads = q_heads};
    a->kk = kv_kind_of(kv->kt);
    a->vk = kv_kind_of(kv->vt);
    a->kp = kv_k_planes(a->kk, kv->dim);
    a->vp = kv_v_planes(a->vk, kv->dim, a->kp.end);
    a->dim = kv->dim;
    a->dim_p = kv_dim_p(kv->dim);
    a->group = q_heads / kv->heads;
    uint8_t *base = (uint8_t *)(((uintptr_t)work + 63) & ~(uintptr_t)63);
    carve_scratch(&a->w, base, kv->dim, most_queries(n_rows, a->group));
}

/* ---- queries */
static int quantise_query(const float *x, int8_t *code, float *delta, int32_t *isum, float *alpha) {
    uint32_t amax = 0;
    float recip;
    for (int i = 0; i < GROUP; i++) {
        bw_f32 v = {.f = x[i]};
        amax = (v.u & 0x7fffffffu) > amax ? v.u & 0x7fffffffu : amax;
    }
    if (amax >= BW_ACT_LIMIT) return -1;
    bw_act_scale(amax, delta, &recip);
    *isum = 0;
    for (int i = 0; i < GROUP; i++) *isum += code[i] = (int8_t)bw_act_code(x[i], recip);
    *alpha = *delta * (float)*isum;
    return 0;
}

static int open_query(call *a, int m, const float *x) {
    int groups = a->dim / GROUP, block_keys = a->kk == KV_Q8_0 || a->kk == KV_Q5_1;
    scratch *w = &a->w;
    w->nl[2 * m] = w->nl[2 * m + 1] = 0.0f;
    w->query[m] = (attend_query){x, w->code + m * a->dim, w->delta + m * groups, w->alpha + m * groups, w->isum + m * groups};
    for (int g = 0; block_keys && g < groups; g++) {
        int at = m * groups + g;
        if (quantise_query(x + g * GROUP, w->code + m * a->dim + g * GROUP, w->delta + at, w->isum + at, w->alpha + at)) return -1;
    }
    return 0;
}

/* ---- pieces */
/* 2^e of an integral e <= 0; +0 below 2^-126 */
static float power(float e) { return e < -126.0f ? 0.0f : bw_pow2i((int)e); }

/* piece (n, l, o) into the running (N, L, O); L > 0 once there is a piece */
static void merge_piece(const attend_kernels *kernel, int dim_p, float *nl, float *sum, const float *piece_nl, const float *o) {
    if (nl[1] == 0.0f) {
        memcpy(nl, piece_nl, 8);
        memcpy(sum, o, 4 * (size_t)dim_p);
        return;
    }
    float n = piece_nl[0] > nl[0] ? piece_nl[0] : nl[0], f = power(nl[0] - n), g = power(piece_nl[0] - n);
    nl[0] = n;
    nl[1] = fmaf(piece_nl[1], g, nl[1] * f);
    kernel->merge(sum, o, f, g, dim_p);
}

/* out = O * (1 / L); nonzero on Inf or NaN */
static int finish(int dim, const float *nl, const float *sum, float *out) {
    float r = 1.0f / nl[1];
    uint32_t top = 0;
    for (int d = 0; d < dim; d++) {
        bw_f32 y = {.f = sum[d] * r};
        out[d] = y.f;
        top = (y.u & 0x7fffffffu) > top ? y.u & 0x7fffffffu : top;
    }
    return top >= 0x7f800000u ? -1 : 0;
}

/* o of a tile. The keys that all n queries see go through the kernel together; what only some see goes alone, before or after, so
 * that every query meets exactly its own keys in ascending order. */
static void tile_values(const call *a, const kv_view *v, const active *t, int n) {
    float *o = a->w.o;
    int j0 = 0, j1 = PAGE;
    for (int r = 0; r < n; r++) {
        j0 = t[r].j0 > j0 ? t[r].j0 : j0;
        j1 = t[r].j1 < j1 ? t[r].j1 : j1;
    }
    int common = j0 < j1;
    memset(o, 0, 4 * (size_t)(n * a->dim_p));
    for (int r = 0; r < n; r++) {
        int end = common ? j0 : t[r].j1;
        if (t[r].j0 < end) a->kernel->values(v, a->dim_p, 1, a->w.s + r * PAGE, t[r].j0, end, o + r * a->dim_p, a->dim_p);
    }
    if (!common) return;
    a->kernel->values(v, a->dim_p, n, a->w.s, j0, j1, o, a->dim_p);
    for (int r = 0; r < n; r++)
        if (j1 < t[r].j1) a->kernel->values(v, a->dim_p, 1, a->w.s + r * PAGE, j1, t[r].j1, o + r * a->dim_p, a->dim_p);
}

/* up to MAX_TILE queries over one page */
static int run_tile(const call *a, const kv_view *k, const kv_view *v, const active *t, int n, float *acc) {
    const attend_query *q[MAX_TILE];
    float nl[MAX_TILE][2];
    for (int r = 0; r < n; r++) q[r] = a->w.query + t[r].query;
    a->kernel->score(k, a->dim, n, q, a->w.s);
    for (int r = 0; r < n; r++)
        if (a->kernel->softmax(a->w.s + r * PAGE, t[r].j0, t[r].j1, a->c, nl[r])) return -1;
    tile_values(a, v, t, n);
    for (int r = 0; r < n; r++) {
        int m = t[r].query;
        const float *o = a->w.o + r * a->dim_p;
        if (acc) {
            float *piece = acc + (size_t)m * cpu_attend_piece_floats(a->kv);
            memcpy(piece, o, 4 * (size_t)a->dim_p);
            memcpy(piece + a->dim_p, nl[r], 8);
        } else {
            merge_piece(a->kernel, a->dim_p, a->w.nl + 2 * m, a->w.sum + m * a->dim_p, nl[r], o);
        }
    }
    return 0;
}

static int see_page(const call *a, int64_t b, int r0, int r1) {
    int n = 0;
    for (int r = r0; r < r1; r++) {
        int64_t j0 = a->lo[r] - b * PAGE, j1 = a->hi[r] - b * PAGE;
        j0 = j0 < 0 ? 0 : j0;
        j1 = j1 > PAGE ? PAGE : j1;
        for (int g = 0; j0 < j1 && g < a->group; g++) a->w.list[n++] = (active){(r - r0) * a->group + g, (int)j0, (int)j1};
    }
    return n;
}

/* ahead: page b + 1 will be read next */
static int run_page(const call *a, int head, int64_t b, int ahead, int r0, int r1) {
    int n = see_page(a, b, r0, r1);
    if (n == 0) return 0;
    const uint8_t *block = a->pages[b] + (size_t)head * a->vp.end;
    kv_view k = kv_view_at(a->kk, &a->kp, block), v = kv_view_at(a->vk, &a->vp, block);
    if (n < EXPAND_FROM && ahead && a->pages[b + 1]) k.ahead = v.ahead = (int64_t)((uintptr_t)a->pages[b + 1] - (uintptr_t)a->pages[b]);
    if (n >= EXPAND_FROM && a->kk != KV_F32 && a->kk != KV_Q8_0) {
        a->kernel->expand_k(&k, a->dim, a->w.k);
        k.kind = a->kk == KV_Q5_1 ? KV_U8 : KV_F32;
        k.data = (const uint8_t *)a->w.k;
    }
    if (n >= EXPAND_FROM && a->vk != KV_F32) {
        a->kernel->expand_v(&v, a->dim_p, a->w.v);
        v = (kv_view){.kind = KV_F32, .data = (const uint8_t *)a->w.v};
    }
    float *acc = NULL;
    if (a->acc) {
        size_t piece = (size_t)(b - a->acc_first) * (size_t)a->q_heads + (size_t)(head * a->group);
        acc = a->acc + piece * cpu_attend_piece_floats(a->kv);
    }
    for (int i = 0; i < n; i += MAX_TILE)
        if (run_tile(a, &k, &v, a->w.list + i, n - i < MAX_TILE ? n - i : MAX_TILE, acc)) return -1;
    return 0;
}

/* rows [r0, r1), at most block_rows, over pages [b0, b1) */
static int run_block(call *a, int head, int r0, int r1, const float *q, int64_t ldq, int64_t b0, int64_t b1) {
    for (int r = r0; r < r1; r++)
        for (int g = 0; g < a->group; g++)
            if (open_query(a, (r - r0) * a->group + g, q + r * ldq + (int64_t)(head * a->group + g) * a->dim)) return -1;
    for (int64_t b = b0; b < b1; b++)
        if (run_page(a, head, b, b + 1 < b1, r0, r1)) return -1;
    return 0;
}

static int block_pages(const call *a, int r0, int r1, int64_t *b0, int64_t *b1) {
    *b0 = INT64_MAX;
    *b1 = 0;
    for (int r = r0; r < r1; r++) {
        if (a->lo[r] < 0 || a->lo[r] >= a->hi[r]) return -1;
        *b0 = a->lo[r] / PAGE < *b0 ? a->lo[r] / PAGE : *b0;
        *b1 = (a->hi[r] - 1) / PAGE >= *b1 ? (a->hi[r] - 1) / PAGE + 1 : *b1;
    }
    return 0;
}

int cpu_attend(enum cpu_isa isa, const bw_kv_desc *kv, uint8_t *const *pages, int n_rows, const int64_t *lo, const int64_t *hi,
               const float *q, int64_t ldq, int q_heads, float c, float *out, int64_t ldo, int h0, int h1, void *work) {
    call a;
    open_call(&a, isa, kv, pages, n_rows, q_heads, c, work);
    a.lo = lo;
    a.hi = hi;
    int step = block_rows(a.group);
    for (int head = h0; head < h1; head++) {
        for (int r0 = 0; r0 < n_rows; r0 += step) {
            int r1 = r0 + step < n_rows ? r0 + step : n_rows;
            int64_t b0, b1;
            if (block_pages(&a, r0, r1, &b0, &b1) || run_block(&a, head, r0, r1, q, ldq, b0, b1)) return -1;
            for (int r = r0; r < r1; r++) {
                for (int g = 0; g < a.group; g++) {
                    int m = (r - r0) * a.group + g;
                    float *y = out + r * ldo + (int64_t)(head * a.group + g) * a.dim;
                    if (finish(a.dim, a.w.nl + 2 * m, a.w.sum + m * a.dim_p, y)) return -1;
                }
            }
        }
    }
    return 0;
}

/* ---- one row in two steps */
size_t cpu_attend_piece_floats(const bw_kv_desc *kv) { return (size_t)kv_dim_p(kv->dim) + 16; }

int cpu_attend_pieces(enum cpu_isa isa, const bw_kv_desc *kv, uint8_t *const *pages, int64_t b0, int64_t b1, int64_t lo, int64_t hi,
                      const float *q, int q_heads, float c, float *acc, int h0, int h1, void *work) {
    call a;
    if (lo < 0 || lo >= hi) return -1;
    open_call(&a, isa, kv, pages, 1, q_heads, c, work);
    a.lo = &lo;
    a.hi = &hi;
    a.acc = acc;
    a.acc_first = lo / PAGE;
    for (int head = h0; head < h1; head++)
        if (run_block(&a, head, 0, 1, q, 0, b0, b1)) return -1;
    return 0;
}

int cpu_attend_merge(enum cpu_isa isa, const bw_kv_desc *kv, int64_t n_pieces, const float *acc, int q_heads, float *out, int h0, int h1) {
    const attend_kernels *kernel = kernels_of(isa);
    int group = q_heads / kv->heads, dim_p = kv_dim_p(kv->dim);
    size_t stride = cpu_attend_piece_floats(kv);
    float sum[CPU_KV_MAX_DIM], nl[2];
    for (int h = h0 * group; h < h1 * group; h++) {
        nl[0] = nl[1] = 0.0f;
        for (int64_t i = 0; i < n_pieces; i++) {
            const float *piece = acc + ((size_t)i * (size_t)q_heads + (size_t)h) * stride;
            merge_piece(kernel, dim_p, nl, sum, piece + dim_p, piece);
        }
        if (finish(kv->dim, nl, sum, out + (int64_t)h * kv->dim)) return -1;
    }
    return 0;
}
