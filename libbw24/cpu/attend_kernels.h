/* The kernels of ATTEND, one text for every instruction set: a kernel file includes vec.h, defines V(name), VW and ATTEND_TABLE, then
 * includes this. Owns the inner loops; the order of operations is docs/numerics.md §6. Knows pages only as views (attend_impl.h).
 *
 * Scores keep up to MAX_TILE queries by a few vectors of keys in registers and walk down the dims: each key's serial fma chain is one
 * lane. Values keep queries by vectors of dims and walk over the keys. Both load a vector of the page once for all the queries. */
#include "attend_impl.h"

/* vectors of keys or dims a query: enough accumulators to hide the latency of fma, few enough to be registers */
enum { INT_VECS = 2, MAX_VECS = 64 / VW };
VEC_FN int vecs_for(int rows) { return VW == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#define UNROLL _Pragma("GCC unroll 8")

/* ---- scores */
VEC_FN V(f) load_value(enum kv_kind kind, const uint8_t *data, size_t i) {
    if (kind == KV_F32) return V(load)((const float *)data + i);
    if (kind == KV_F16) return V(load_f16)((const uint16_t *)data + i);
    return V(load_e4m3)(data + i);
}

/* Decoding of one row is bound by memory latency: pages do not follow each other and hardware prefetchers stop at 4 KiB. So while
 * kernels compute they fetch the plane of the page ahead, front to back: step i of a loop whose steps read `chunk` bytes each fetches
 * chunk i of the plane, whatever the order of its own reads, so that the memory is asked at an even rate. */
VEC_FN void fetch_ahead(const kv_view *k, const void *plane, int i, int chunk) {
    if (!k->ahead) return;
    uintptr_t at = (uintptr_t)plane + (uintptr_t)k->ahead + (uintptr_t)(i * chunk);
    if (chunk >= 64)
        for (int b = 0; b < chunk; b += 64) __builtin_prefetch((const void *)(at + (uintptr_t)b));
    else if (i * chunk % 64 == 0)
        __builtin_prefetch((const void *)at);
}
VEC_FN int value_bytes(enum kv_kind kind) { return kind == KV_F32 ? 4 : kind == KV_F16 ? 2 : 1; }

VEC_FN void score_float(enum kv_kind kind, int rows, const kv_view *k, int dim, const attend_query *const *q, float *s) {
    const int vecs = vecs_for(rows);
    for (int lane = 0; lane < PAGE; lane += vecs * VW) {
        for (int d0 = 0; d0 < dim; d0 += SEGMENT) {
            int d1 = d0 + SEGMENT < dim ? d0 + SEGMENT : dim;
            V(f) acc[MAX_TILE][MAX_VECS];
            const float *x[MAX_TILE];
            UNROLL for (int r = 0; r < rows; r++) {
                x[r] = q[r]->x;
                UNROLL for (int i = 0; i < vecs; i++) acc[r][i] = V(zero)();
            }
            for (int d = d0; d < d1; d++) {
                V(f) w[MAX_VECS];
                UNROLL for (int i = 0; i < vecs; i++) w[i] = load_value(kind, k->data, (size_t)(d * PAGE + lane + i * VW));
                fetch_ahead(k, k->data, lane / (vecs * VW) * dim + d, vecs * VW * value_bytes(kind));
                UNROLL for (int r = 0; r < rows; r++) {
                    V(f) a = V(set1)(x[r][d]);
                    UNROLL for (int i = 0; i < vecs; i++) acc[r][i] = V(fma)(w[i], a, acc[r][i]);
                }
            }
            UNROLL for (int r = 0; r < rows; r++) {
                UNROLL for (int i = 0; i < vecs; i++) {
                    float *y = s + r * PAGE + lane + i * VW;
                    V(store)(y, V(add)(d0 ? V(load)(y) : V(zero)(), acc[r][i]));
                }
            }
        }
    }
}

/* 4 dims (step of group g) of VW keys from `lane` as code bytes */
VEC_FN V(i) load_codes(enum kv_kind kind, const kv_view *k, int g, int step, int lane) {
    if (kind != KV_Q5_1) return V(load_i)(k->data + ((size_t)(g * 8 + step) * PAGE + (size_t)lane) * 4);
    V(i) low = V(load_i)(k->data + ((size_t)(g * 4 + step / 2) * PAGE + (size_t)lane) * 4);
    V(i) high = V(load_i)(k->high + g * PAGE + lane);
    if (step & 1) low = V(shr_i)(low, 4);
    high = step < 4 ? V(shl_i)(high, 4 - step) : V(shr_i)(high, step - 4);
    return V(or_i)(V(and_i)(low, V(set1_i)(0x0f0f0f0f)), V(and_i)(high, V(set1_i)(0x10101010)));
}

VEC_FN V(i) four_codes(const int8_t *a) { int v; memcpy(&v, a, 4); return V(set1_i)(v); }

VEC_FN void int_group(enum kv_kind kind, int rows, const kv_view *k, int groups, const attend_query *const *q, int g, int lane,
                      V(f) p[][INT_VECS]) {
    int bias = kind == KV_Q8_0 ? 128 : 0, at = lane / (INT_VECS * VW) * groups + g;
    V(i) dot[MAX_TILE][INT_VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < INT_VECS; i++) dot[r][i] = V(dot_start)(bias, q[r]->isum[g]);
    UNROLL for (int step = 0; step < 8; step++) {
        V(i) w[INT_VECS];
        UNROLL for (int i = 0; i < INT_VECS; i++) w[i] = V(kcode)(load_codes(kind, k, g, step, lane + i * VW), bias);
        if (kind == KV_Q5_1 && step % 2 == 0) fetch_ahead(k, k->data, at * 4 + step / 2, INT_VECS * VW * 4);
        if (kind != KV_Q5_1) fetch_ahead(k, k->data, at * 8 + step, INT_VECS * VW * 4);
        UNROLL for (int r = 0; r < rows; r++) {
            V(i) a = four_codes(q[r]->code + g * GROUP + step * 4);
            UNROLL for (int i = 0; i < INT_VECS; i++) dot[r][i] = V(dot)(dot[r][i], w[i], a);
        }
    }
    fetch_ahead(k, k->s, at, INT_VECS * VW * 2);
    if (kind == KV_Q5_1) fetch_ahead(k, k->m, at, INT_VECS * VW * 2);
    if (kind == KV_Q5_1) fetch_ahead(k, k->high, at, INT_VECS * VW * 4);
    UNROLL for (int i = 0; i < INT_VECS; i++) {
        int key = g * PAGE + lane + i * VW;
        V(f) s = V(load_f16)(k->s + key), m = kind == KV_Q8_0 ? V(zero)() : V(load_f16)(k->m + key);
        UNROLL for (int r = 0; r < rows; r++) {
            p[r][i] = V(fma)(s, V(mul)(V(set1)(q[r]->delta[g]), V(flt)(dot[r][i])), p[r][i]);
            if (kind != KV_Q8_0) p[r][i] = V(fma)(m, V(set1)(q[r]->alpha[g]), p[r][i]);
        }
    }
}

VEC_FN void score_int(enum kv_kind kind, int rows, const kv_view *k, int dim, const attend_query *const *q, float *s) {
    for (int lane = 0; lane < PAGE; lane += INT_VECS * VW) {
        for (int g0 = 0; g0 < dim / GROUP; g0 += SEGMENT / GROUP) {
            int g1 = g0 + SEGMENT / GROUP < dim / GROUP ? g0 + SEGMENT / GROUP : dim / GROUP;
            V(f) p[MAX_TILE][INT_VECS];
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int i = 0; i < INT_VECS; i++) p[r][i] = V(zero)();
            for (int g = g0; g < g1; g++) int_group(kind, rows, k, dim / GROUP, q, g, lane, p);
            UNROLL for (int r = 0; r < rows; r++) {
                UNROLL for (int i = 0; i < INT_VECS; i++) {
                    float *y = s + r * PAGE + lane + i * VW;
                    V(store)(y, V(add)(g0 ? V(load)(y) : V(zero)(), p[r][i]));
                }
            }
        }
    }
}

/* one instance for every number of queries, so that their accumulators are registers */
#define SCORE(function, kind) \
    switch (n) { \
    case 1: function(kind, 1, k, dim, q, s); break; \
    case 2: function(kind, 2, k, dim, q, s); break; \
    case 3: function(kind, 3, k, dim, q, s); break; \
    default: function(kind, 4, k, dim, q, s); break; \
    } \
    break

static void score(const kv_view *k, int dim, int n, const attend_query *const *q, float *s) {
    switch (k->kind) {
    case KV_F32: SCORE(score_float, KV_F32);
    case KV_F16: SCORE(score_float, KV_F16);
    case KV_E4M3: SCORE(score_float, KV_E4M3);
    case KV_Q8_0: SCORE(score_int, KV_Q8_0);
    case KV_Q5_1: SCORE(score_int, KV_Q5_1);
    default: SCORE(score_int, KV_U8);
    }
}

/* ---- softmax of one query over one piece */
static int softmax(float *s, int j0, int j1, float c, float *nl) {
    enum { N = PAGE / VW };
    V(f) u[N], check = V(zero)(), top = V(set1)(-3.402823466e38f);
    int whole = j0 == 0 && j1 == PAGE;
    UNROLL for (int i = 0; i < N; i++) {
        u[i] = V(mul)(V(load)(s + i * VW), V(set1)(c));
        if (!whole) u[i] = V(range)(u[i], i * VW, j0, j1, -3.402823466e38f);
        top = V(max)(top, u[i]);
        check = V(fma)(u[i], V(zero)(), check); /* NaN from the first Inf or NaN on */
    }
    float n = ceilf(V(hmax)(top));
    V(f) base = V(set1)(n), v[32 / VW];
    UNROLL for (int i = 0; i < N; i++) {
        u[i] = V(exp2)(V(sub)(u[i], base));
        if (!whole) u[i] = V(range)(u[i], i * VW, j0, j1, 0.0f);
        V(store)(s + i * VW, u[i]);
    }
    UNROLL for (int i = 0; i < 32 / VW; i++) v[i] = V(add)(u[i], u[i + 32 / VW]);
    nl[0] = n;
    nl[1] = V(tree32)(v);
    return V(hsum)(check) == 0.0f ? 0 : -1;
}

/* ---- values */
typedef struct v_tile { const kv_view *v; size_t base; int w; } v_tile; /* a tile of w dims begins `base` values into the planes */

/* scale (and minimum) of the block that holds dim `col` of key j */
VEC_FN size_t v_block(const v_tile *t, int j, int col) { return (t->base + (size_t)(j * t->w)) / GROUP + (size_t)(col / GROUP); }

VEC_FN V(f) load_v(enum kv_kind kind, const v_tile *t, int j, int col) {
    size_t at = t->base + (size_t)(j * t->w);
    if (kind == KV_Q8_0) return V(mul)(V(load_i8)((const int8_t *)t->v->data + at + col), V(set1_f16)(t->v->s[v_block(t, j, col)]));
    if (kind == KV_Q5_1) {
        size_t b = v_block(t, j, col);
        int e = col % GROUP;
        V(i) low = V(load_u8d)(t->v->data + b * 16 + (size_t)(e & 15));
        V(i) q = V(or_i)(V(and_i)(V(shr_i)(low, e & 16 ? 4 : 0), V(set1_i)(15)), V(bit4)(t->v->high[b], e));
        return V(fma)(V(set1_f16)(t->v->s[b]), V(flt)(q), V(set1_f16)(t->v->m[b]));
    }
    return load_value(kind, t->v->data, at + (size_t)col);
}

/* step i of a loop whose steps read `dims` values each */
VEC_FN void fetch_values(enum kv_kind kind, const v_tile *t, int i, int dims) {
    const kv_view *v = t->v;
    if (kind == KV_Q5_1) fetch_ahead(v, v->data + t->base / 2, i, dims / 2);
    else fetch_ahead(v, v->data + t->base * (size_t)value_bytes(kind), i, dims * value_bytes(kind));
    if (kind == KV_Q8_0 || kind == KV_Q5_1) fetch_ahead(v, v->s + t->base / GROUP, i, dims / 16);
    if (kind == KV_Q5_1) fetch_ahead(v, v->m + t->base / GROUP, i, dims / 16);
    if (kind == KV_Q5_1) fetch_ahead(v, v->high + t->base / GROUP, i, dims / 8);
}

VEC_FN void value_columns(enum kv_kind kind, int rows, int vecs, const v_tile *t, int col, const float *p, int j0, int j1, float *o,
                          int64_t ldo) {
    V(f) acc[MAX_TILE][MAX_VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vecs; i++) acc[r][i] = V(load)(o + r * ldo + i * VW);
    for (int j = j0; j < j1; j++) {
        V(f) w[MAX_VECS];
        UNROLL for (int i = 0; i < vecs; i++) w[i] = load_v(kind, t, j, col + i * VW);
        fetch_values(kind, t, col / (vecs * VW) * PAGE + j, vecs * VW);
        UNROLL for (int r = 0; r < rows; r++) {
            V(f) a = V(set1)(p[r * PAGE + j]);
            UNROLL for (int i = 0; i < vecs; i++) acc[r][i] = V(fma)(a, w[i], acc[r][i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vecs; i++) V(store)(o + r * ldo + i * VW, acc[r][i]);
}

VEC_FN void value_tiles(enum kv_kind kind, int rows, const kv_view *v, int dim_p, const float *p, int j0, int j1, float *o, int64_t ldo) {
    const int vecs = vecs_for(rows);
    for (int c0 = 0; c0 < dim_p; c0 += TILE_DIMS, o += TILE_DIMS) {
        v_tile t = {v, (size_t)c0 * PAGE, kv_tile_width(dim_p, c0 / TILE_DIMS)};
        int col = 0;
        for (; col + vecs * VW <= t.w; col += vecs * VW) value_columns(kind, rows, vecs, &t, col, p, j0, j1, o + col, ldo);
        for (; col < t.w; col += 16) value_columns(kind, rows, 16 / VW, &t, col, p, j0, j1, o + col, ldo);
    }
}

#define VALUES(kind) \
    switch (n) { \
    case 1: value_tiles(kind, 1, v, dim_p, p, j0, j1, o, ldo); break; \
    case 2: value_tiles(kind, 2, v, dim_p, p, j0, j1, o, ldo); break; \
    case 3: value_tiles(kind, 3, v, dim_p, p, j0, j1, o, ldo); break; \
    default: value_tiles(kind, 4, v, dim_p, p, j0, j1, o, ldo); break; \
    } \
    break

static void values(const kv_view *v, int dim_p, int n, const float *p, int j0, int j1, float *o, int64_t ldo) {
    switch (v->kind) {
    case KV_F32: VALUES(KV_F32);
    case KV_F16: VALUES(KV_F16);
    case KV_E4M3: VALUES(KV_E4M3);
    case KV_Q8_0: VALUES(KV_Q8_0);
    default: VALUES(KV_Q5_1);
    }
}

static void merge(float *sum, const float *o, float f, float g, int count) {
    V(f) ff = V(set1)(f), gg = V(set1)(g);
    for (int i = 0; i < count; i += VW) V(store)(sum + i, V(fma)(V(load)(o + i), gg, V(mul)(V(load)(sum + i), ff)));
}

/* ---- expansion: decoding a page once pays when many queries read it */
static void expand_k(const kv_view *k, int dim, void *dst) {
    if (k->kind == KV_Q5_1) {
        for (int g = 0; g < dim / GROUP; g++)
            for (int lane = 0; lane < PAGE; lane += VW)
                UNROLL for (int step = 0; step < 8; step++)
                    V(store_i)((uint8_t *)dst + ((size_t)(g * 8 + step) * PAGE + (size_t)lane) * 4, load_codes(KV_Q5_1, k, g, step, lane));
        return;
    }
    for (int i = 0; i < dim * PAGE; i += VW) {
        V(f) x = k->kind == KV_F16 ? load_value(KV_F16, k->data, (size_t)i) : load_value(KV_E4M3, k->data, (size_t)i);
        V(store)((float *)dst + i, x);
    }
}

VEC_FN void expand_tiles(enum kv_kind kind, const kv_view *v, int dim_p, float *dst) {
    for (int c0 = 0; c0 < dim_p; c0 += TILE_DIMS) {
        v_tile t = {v, (size_t)c0 * PAGE, kv_tile_width(dim_p, c0 / TILE_DIMS)};
        for (int j = 0; j < PAGE; j++)
            for (int col = 0; col < t.w; col += VW) V(store)(dst + t.base + j * t.w + col, load_v(kind, &t, j, col));
    }
}

static void expand_v(const kv_view *v, int dim_p, float *dst) {
    switch (v->kind) {
    case KV_F16: expand_tiles(KV_F16, v, dim_p, dst); break;
    case KV_E4M3: expand_tiles(KV_E4M3, v, dim_p, dst); break;
    case KV_Q8_0: expand_tiles(KV_Q8_0, v, dim_p, dst); break;
    default: expand_tiles(KV_Q5_1, v, dim_p, dst); break;
    }
}

const attend_kernels ATTEND_TABLE = {score, softmax, values, merge, expand_k, expand_v};
