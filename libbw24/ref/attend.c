/* KV formats, KV_APPEND and ATTEND as docs/numerics.md §6 and §8 state them, one key after the other. Owns their order of
 * operations; knows nothing of page tables, threads or vectors. */
#include "attend.h"
#include "../canon.h"
#include "dot.h"
#include <string.h>

enum { F32 = 0, F16 = 1, Q5_1 = 7, Q8_0 = 8, E4M3 = 256, PAGE = 64 };

static uint32_t magnitude(float x) { bw_f32 v; v.f = x; return v.u & 0x7fffffffu; }
static int finite(float x) { return magnitude(x) < 0x7f800000u; }
static int all_finite(const float *x, int n) {
    int ok = 1;
    for (int i = 0; i < n; i++) ok &= finite(x[i]);
    return ok;
}

static int is_kv_type(const bw_type_info *t) {
    return t && (t->id == F32 || t->id == F16 || t->id == Q8_0 || t->id == Q5_1 || t->id == E4M3);
}

size_t ref_kv_page_bytes(const bw_kv_desc *kv) {
    if (!is_kv_type(kv->kt) || !is_kv_type(kv->vt) || kv->heads < 1 || kv->dim < 1 || kv->dim > REF_KV_MAX_DIM) return 0;
    int64_t k = bw_row_bytes(kv->kt, kv->dim), v = bw_row_bytes(kv->vt, kv->dim);
    if (k < 0 || v < 0) return 0;
    return (size_t)PAGE * (size_t)kv->heads * (size_t)(kv->shared ? k : k + v);
}

/* ---- KV formats */
static int half_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }
static void put16(uint8_t *dst, uint16_t v) { dst[0] = (uint8_t)v; dst[1] = (uint8_t)(v >> 8); }

/* block {f16 d; int8 q[32]}: value = d * q */
static int encode_q8_0(const float *x, uint8_t *dst) {
    uint32_t amax = 0;
    for (int i = 0; i < 32; i++) amax = magnitude(x[i]) > amax ? magnitude(x[i]) : amax;
    float scale, recip;
    bw_q8_scale(amax, &scale, &recip);
    uint16_t d = bw_f32_to_f16(scale);
    if (!half_finite(d)) return -1;
    put16(dst, d);
    for (int i = 0; i < 32; i++) dst[2 + i] = (uint8_t)bw_q8_code(x[i], recip);
    return 0;
}

/* block {f16 d; f16 m; u32 bit 4 of every code; u8 low nibbles of codes e | e + 16 << 4}: value = d * q + m */
static int encode_q5_1(const float *x, uint8_t *dst) {
    float lo = x[0], hi = x[0];
    for (int i = 1; i < 32; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
    }
    float range = hi - lo;
    int flat = range < 0x1p-100f;
    float recip = flat ? 0.0f : 31.0f / range;
    uint16_t d = flat ? 0 : bw_f32_to_f16(range / 31.0f), m = bw_f32_to_f16(lo);
    if (!half_finite(d) || !half_finite(m)) return -1;
    uint32_t high = 0;
    memset(dst, 0, 24);
    for (int e = 0; e < 32; e++) {
        uint32_t q = flat ? 0 : (uint32_t)(int)fmaf(x[e] - lo, recip, 0.5f);
        dst[8 + e % 16] |= (uint8_t)((q & 15) << (e < 16 ? 0 : 4));
        high |= (q >> 4) << e;
    }
    put16(dst, d);
    put16(dst + 2, m);
    put16(dst + 4, (uint16_t)high);
    put16(dst + 6, (uint16_t)(high >> 16));
    return 0;
}

int ref_kv_encode(const bw_type_info *t, const float *x, int n, uint8_t *dst) {
    if (!all_finite(x, n)) return -1;
    for (int i = 0; i < n; i += t->block, dst += t->bytes) {
        uint16_t h;
        switch (t->id) {
        case F32: memcpy(dst, x + i, 4); break;
        case F16:
            h = bw_f32_to_f16(x[i]);
            if (!half_finite(h)) return -1;
            put16(dst, h);
            break;
        case E4M3: dst[0] = bw_f32_to_e4m3(x[i]); break;
        case Q8_0: if (encode_q8_0(x + i, dst)) return -1; break;
        case Q5_1: if (encode_q5_1(x + i, dst)) return -1; break;
        default: return -1;
        }
    }
    return 0;
}

static uint8_t *k_row(const bw_kv_desc *kv, uint8_t *page, int slot, int head) {
    return page + (size_t)(slot * kv->heads + head) * (size_t)bw_row_bytes(kv->kt, kv->dim);
}
static uint8_t *v_row(const bw_kv_desc *kv, uint8_t *page, int slot, int head) {
    if (kv->shared) return k_row(kv, page, slot, head);
    uint8_t *v = page + (size_t)(PAGE * kv->heads) * (size_t)bw_row_bytes(kv->kt, kv->dim);
    return v + (size_t)(slot * kv->heads + head) * (size_t)bw_row_bytes(kv->vt, kv->dim);
}

/*
 * KV_APPEND  slot of the cache = (k, v) in the cache's formats
 *
 * k, v: [heads][dim]. Quantisers: §8. They are not the encoders of files, which round as files demand. shared: the key as it is kept is the value.
 */
int ref_kv_append(const bw_kv_desc *kv, uint8_t *page, int slot, const float *k, const float *v) {
    for (int h = 0; h < kv->heads; h++) {
        if (ref_kv_encode(kv->kt, k + h * kv->dim, kv->dim, k_row(kv, page, slot, h))) return -1;
        if (!kv->shared && ref_kv_encode(kv->vt, v + h * kv->dim, kv->dim, v_row(kv, page, slot, h))) return -1;
    }
    return 0;
}

/* ---- ATTEND */
typedef struct query {
    const float *x; /* [dim] */
    int8_t code[REF_KV_MAX_DIM];
    float delta[REF_KV_MAX_DIM / 32];
} query;

/* LINEAR of the query over one key row: §3 for float formats, §2 for block formats */
static float score(const bw_type_info *t, const uint8_t *row, const query *q, int dim) {
    if (t->form == BW_FLOAT) return ref_dot_row_f32(t, row, dim, q->x);
    return ref_dot_row(t, row, dim, q->code, q->delta);
}

typedef struct piece { float n, l, o[REF_KV_MAX_DIM]; } piece;

/* the visible keys [j0, j1) of one page into a fresh accumulator */
static int attend_piece(const bw_kv_desc *kv, uint8_t *page, int head, int j0, int j1, const query *q, float c, piece *out) {
    float p[PAGE] = {0}, v[32], row[REF_KV_MAX_DIM], top = 0.0f;
    for (int j = j0; j < j1; j++) {
        p[j] = score(kv->kt, k_row(kv, page, j, head), q, kv->dim) * c;
        if (!finite(p[j])) return -1;
        top = j == j0 || p[j] > top ? p[j] : top;
    }
    out->n = ceilf(top);
    for (int j = j0; j < j1; j++) p[j] = bw_exp2(p[j] - out->n);
    for (int l = 0; l < 32; l++) v[l] = p[l] + p[l + 32];
    for (int o = 16; o >= 1; o /= 2)
        for (int l = 0; l < o; l++) v[l] = v[l] + v[l + o];
    out->l = v[0];
    for (int d = 0; d < kv->dim; d++) out->o[d] = 0.0f;
    for (int j = j0; j < j1; j++) {
        const uint8_t *src = v_row(kv, page, j, head);
        for (int d = 0; d < kv->dim; d += kv->vt->block) kv->vt->decode(src + d / kv->vt->block * kv->vt->bytes, row + d);
        for (int d = 0; d < kv->dim; d++) out->o[d] = fmaf(p[j], row[d], out->o[d]);
    }
    return 0;
}

/* 2^e of an integral e <= 0; +0 below 2^-126 */
static float power(float e) { return e < -126.0f ? 0.0f : bw_pow2i((int)e); }

static void merge(piece *sum, const piece *x, int dim) {
    float n = x->n > sum->n ? x->n : sum->n, f = power(sum->n - n), g = power(x->n - n);
    sum->n = n;
    sum->l = fmaf(x->l, g, sum->l * f);
    for (int d = 0; d < dim; d++) sum->o[d] = fmaf(x->o[d], g, sum->o[d] * f);
}

/*
 * ATTEND  y = sum_j softmax_j(scale * q . k_j) v_j   over the visible keys of the row
 *
 * q, y: [q_heads][dim]; query head h reads KV head h / (q_heads / heads). K and V are read in the cache's format.
 * u_j = score_j * c, c = f32(scale * log2 e). Pieces of 64 keys from position 0; a piece without a visible key does not exist, absent
 * keys of a piece add +0 to the tree of l and nothing to o. Piece: n = ceil(max u), p = exp2(u - n), l = tree32 of p[j] + p[j + 32],
 * o = fma(p_j, v_j, o) ascending. Merge ascending: N' = max(N, n), f = 2^(N - N'), g = 2^(n - N'), L = fma(l, g, L f), O alike.
 * y = O * (1 / L). n is an integer, so that f and g are exact powers of two and rescaling rounds nothing.
 */
int ref_attend(const bw_kv_desc *kv, uint8_t *const *pages, int64_t lo, int64_t hi, const float *q, int q_heads, float c, float *out) {
    if (lo < 0 || lo >= hi) return -1;
    for (int h = 0; h < q_heads; h++) {
        query qq = {.x = q + h * kv->dim};
        piece sum = {0}, x;
        if (!all_finite(qq.x, kv->dim)) return -1;
        if (kv->kt->form != BW_FLOAT && ref_quant_row(qq.x, kv->dim, qq.code, qq.delta)) return -1;
        for (int64_t b = lo / PAGE; b * PAGE < hi; b++) {
            int j0 = b * PAGE < lo ? (int)(lo - b * PAGE) : 0, j1 = hi - b * PAGE < PAGE ? (int)(hi - b * PAGE) : PAGE;
            if (attend_piece(kv, pages[b], h / (q_heads / kv->heads), j0, j1, &qq, c, &x)) return -1;
            if (b == lo / PAGE) sum = x;
            else merge(&sum, &x, kv->dim);
        }
        float r = 1.0f / sum.l;
        for (int d = 0; d < kv->dim; d++) out[h * kv->dim + d] = sum.o[d] * r;
        if (!all_finite(out + h * kv->dim, kv->dim)) return -1;
    }
    return 0;
}
