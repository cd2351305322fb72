/* The CPU's KV page: sizes of its planes and KV_APPEND into it (layout: attend_impl.h, quantisers: docs/numerics.md §8). Knows nothing of
 * attention and of page tables. */
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif
#include "../canon.h"
#include "attend_impl.h"

/* ---- sizes */
enum kv_kind kv_kind_of(const bw_type_info *t) {
    switch (t ? t->id : -1) {
    case 0: return KV_F32;
    case 1: return KV_F16;
    case 7: return KV_Q5_1;
    case 8: return KV_Q8_0;
    case 256: return KV_E4M3;
    default: return KV_NONE;
    }
}

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

/* K and V planes have equal sizes but for V's pad; values counts the pad */
static kv_planes planes(enum kv_kind kind, size_t values, size_t start) {
    kv_planes p = {.data = start};
    size_t groups = values / GROUP;
    size_t bytes = kind == KV_F32 ? 4 * values : kind == KV_F16 ? 2 * values : kind == KV_Q5_1 ? values / 2 : values;
    p.high = align64(start + bytes);
    p.s = align64(p.high + (kind == KV_Q5_1 ? 4 * groups : 0));
    p.m = align64(p.s + (kind == KV_Q5_1 || kind == KV_Q8_0 ? 2 * groups : 0));
    p.end = align64(p.m + (kind == KV_Q5_1 ? 2 * groups : 0));
    return p;
}

kv_planes kv_k_planes(enum kv_kind kind, int dim) { return planes(kind, (size_t)dim * PAGE, 0); }
kv_planes kv_v_planes(enum kv_kind kind, int dim, size_t start) { return planes(kind, (size_t)kv_dim_p(dim) * PAGE, start); }

size_t cpu_kv_page_bytes(const bw_kv_desc *kv) {
    enum kv_kind k = kv_kind_of(kv->kt), v = kv_kind_of(kv->vt);
    if (k == KV_NONE || v == KV_NONE || kv->heads < 1 || kv->dim < 1 || kv->dim > CPU_KV_MAX_DIM) return 0;
    if (kv->dim % kv->kt->block || kv->dim % kv->vt->block) return 0;
    return (size_t)kv->heads * kv_v_planes(v, kv->dim, kv_k_planes(k, kv->dim).end).end;
}

/* ---- quantisers */
static uint32_t magnitude(float x) { bw_f32 v; v.f = x; return v.u & 0x7fffffffu; }
static int half_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

static int all_finite(const float *x, int n) {
    uint32_t top = 0;
    for (int i = 0; i < n; i++) top = magnitude(x[i]) > top ? magnitude(x[i]) : top;
    return top < 0x7f800000u;
}

/* n values to f16; nonzero if one overflows */
static int half_row(const float *x, int n, uint16_t *h) {
    int i = 0, bad = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(h + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) h[i] = bw_f32_to_f16(x[i]);
    for (i = 0; i < n; i++) bad |= !half_finite(h[i]);
    return bad;
}

/* 32 values by §8 */
typedef struct block { int8_t q[GROUP]; uint16_t s, m; } block;

static int quantise_q8_0(const float *x, block *b) {
    uint32_t amax = 0;
    for (int i = 0; i < GROUP; i++) amax = magnitude(x[i]) > amax ? magnitude(x[i]) : amax;
    float scale, recip;
    bw_q8_scale(amax, &scale, &recip);
    for (int i = 0; i < GROUP; i++) b->q[i] = (int8_t)bw_q8_code(x[i], recip);
    b->s = bw_f32_to_f16(scale);
    b->m = 0;
    return !half_finite(b->s);
}

static int quantise_q5_1(const float *x, block *b) {
    float lo = x[0], hi = x[0];
    for (int i = 1; i < GROUP; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
    }
    float range = hi - lo, unit = range / 31.0f;
    int flat = range < 0x1p-100f;
    float recip = flat ? 0.0f : 31.0f / range;
    b->s = bw_f32_to_f16(flat ? 0.0f : unit);
    b->m = bw_f32_to_f16(lo);
    if (!half_finite(b->s) || !half_finite(b->m)) return -1;
    for (int i = 0; i < GROUP; i++) b->q[i] = (int8_t)(flat ? 0 : (int)fmaf(x[i] - lo, recip, 0.5f));
    return 0;
}

static int quantise(enum kv_kind kind, const float *x, block *b) { return kind == KV_Q8_0 ? quantise_q8_0(x, b) : quantise_q5_1(x, b); }

/* ---- K: lanes = keys */
static void put_k_codes(enum kv_kind kind, const kv_planes *p, uint8_t *page, int slot, int g, const block *b) {
    uint8_t *data = page + p->data;
    size_t at = (size_t)(g * PAGE + slot);
    memcpy(page + p->s + 2 * at, &b->s, 2);
    if (kind == KV_Q8_0) {
        for (int i = 0; i < GROUP; i++) data[((g * 8 + i / 4) * PAGE + slot) * 4 + i % 4] = (uint8_t)(b->q[i] + 128);
        return;
    }
    memcpy(page + p->m + 2 * at, &b->m, 2);
    uint8_t high[4] = {0};
    for (int i = 0; i < GROUP; i++) high[i % 4] |= (uint8_t)((b->q[i] >> 4) << (i / 4));
    memcpy(page + p->high + 4 * at, high, 4);
    for (int i = 0; i < GROUP / 8; i++)
        for (int e = 0; e < 4; e++)
            data[((g * 4 + i) * PAGE + slot) * 4 + e] = (uint8_t)((b->q[8 * i + e] & 15) | (b->q[8 * i + 4 + e] & 15) << 4);
}

static int append_k(enum kv_kind kind, int dim, uint8_t *page, int slot, const float *x) {
    kv_planes p = kv_k_planes(kind, dim);
    uint8_t *data = page + p.data;
    uint16_t h[CPU_KV_MAX_DIM];
    block b;
    switch (kind) {
    case KV_F32:
        for (int d = 0; d < dim; d++) memcpy(data + 4 * (size_t)(d * PAGE + slot), x + d, 4);
        return 0;
    case KV_F16:
        if (half_row(x, dim, h)) return -1;
        for (int d = 0; d < dim; d++) memcpy(data + 2 * (size_t)(d * PAGE + slot), h + d, 2);
        return 0;
    case KV_E4M3:
        for (int d = 0; d < dim; d++) data[d * PAGE + slot] = bw_f32_to_e4m3(x[d]);
        return 0;
    default:
        for (int g = 0; g < dim / GROUP; g++) {
            if (quantise(kind, x + g * GROUP, &b)) return -1;
            put_k_codes(kind, &p, page, slot, g, &b);
        }
        return 0;
    }
}

/* ---- V: lanes = dims */
/* codes of dims d .. d+31 of a tile of w dims whose planes begin `at` values in, this key's row included */
static void put_v_codes(enum kv_kind kind, const kv_planes *p, uint8_t *page, size_t at, const block *b) {
    memcpy(page + p->s + at / GROUP * 2, &b->s, 2);
    if (kind == KV_Q8_0) {
        memcpy(page + p->data + at, b->q, GROUP);
        return;
    }
    uint32_t high = 0;
    uint8_t low[16];
    for (int e = 0; e < GROUP; e++) high |= (uint32_t)(b->q[e] >> 4) << e;
    for (int e = 0; e < 16; e++) low[e] = (uint8_t)((b->q[e] & 15) | (b->q[e + 16] & 15) << 4);
    memcpy(page + p->m + at / GROUP * 2, &b->m, 2);
    memcpy(page + p->high + at / GROUP * 4, &high, 4);
    memcpy(page + p->data + at / 2, low, 16);
}

/* w values of one tile; x is padded with zeros to a multiple of 16 */
static int append_v_tile(enum kv_kind kind, const kv_planes *p, uint8_t *page, size_t at, int w, const float *x) {
    uint16_t h[TILE_DIMS];
    block b;
    switch (kind) {
    case KV_F32: memcpy(page + p->data + 4 * at, x, 4 * (size_t)w); return 0;
    case KV_F16:
        if (half_row(x, w, h)) return -1;
        memcpy(page + p->data + 2 * at, h, 2 * (size_t)w);
        return 0;
    case KV_E4M3:
        for (int d = 0; d < w; d++) page[p->data + at + (size_t)d] = bw_f32_to_e4m3(x[d]);
        return 0;
    default:
        for (int d = 0; d < w; d += GROUP) {
            if (quantise(kind, x + d, &b)) return -1;
            put_v_codes(kind, p, page, at + (size_t)d, &b);
        }
        return 0;
    }
}

static int append_v(enum kv_kind kind, int dim, size_t start, uint8_t *page, int slot, const float *x) {
    kv_planes p = kv_v_planes(kind, dim, start);
    int dim_p = kv_dim_p(dim);
    for (int d = 0; d < dim_p; d += TILE_DIMS) {
        int w = kv_tile_width(dim_p, d / TILE_DIMS), left = dim - d < w ? dim - d : w;
        float row[TILE_DIMS] = {0};
        memcpy(row, x + d, 4 * (size_t)left);
        if (append_v_tile(kind, &p, page, (size_t)(d * PAGE + slot * w), w, row)) return -1;
    }
    return 0;
}

int cpu_kv_append(const bw_kv_desc *kv, uint8_t *page, int slot, const float *k, const float *v) {
    enum kv_kind kk = kv_kind_of(kv->kt), vk = kv_kind_of(kv->vt);
    size_t v_start = kv_k_planes(kk, kv->dim).end, block_bytes = kv_v_planes(vk, kv->dim, v_start).end;
    for (int h = 0; h < kv->heads; h++, page += block_bytes, k += kv->dim, v += kv->dim) {
        if (!all_finite(k, kv->dim) || !all_finite(v, kv->dim)) return -1;
        if (append_k(kk, kv->dim, page, slot, k) || append_v(vk, kv->dim, v_start, page, slot, v)) return -1;
    }
    return 0;
}
