/* Inside of ATTEND on the CPU: the page layout, what a kernel sees of a page, and the table of kernels. Not for callers of attend.h.
 *
 * A page is [heads] blocks, a block K's planes then V's, each plane aligned to 64 bytes. dim_p = dim rounded up to 16; V's pad is zero.
 *   K, lanes = keys   f32, f16, e4m3: values [dim][64]
 *                     q8_0: codes + 128 as u8 [dim/4][64][4]; scales f16 [dim/32][64]
 *                     q5_1: codes' low nibbles [dim/8][64][4], byte b = dim 8i + b | dim 8i + 4 + b << 4; bit 4 of every code
 *                     [dim/32][64] u32, bit i of byte b = dim 4i + b; scales, minima f16 [dim/32][64]
 *   V, lanes = dims, in tiles of 64 dims (the last narrower, w = 16, 32, 48 or 64), each tile [64 keys][w]
 *                     f32, f16, e4m3: values; q8_0: codes s8; scales f16 [64][w/32] by tile
 *                     q5_1: byte e of block b = dim 32b + e | dim 32b + 16 + e << 4, [64][w/2]; bit 4 of the codes u32 [64][w/32],
 *                     bit e = dim 32b + e; scales, minima f16 [64][w/32]
 * A key's bytes in a tile plane begin at (tile * 64 * 64 + key * w) values. */
#ifndef BW24_CPU_ATTEND_IMPL_H
#define BW24_CPU_ATTEND_IMPL_H

#include "attend.h"

enum { PAGE = 64, TILE_DIMS = 64, MAX_TILE = 4, GROUP = 32, SEGMENT = 256 };
enum kv_kind { KV_F32, KV_F16, KV_E4M3, KV_Q8_0, KV_Q5_1, KV_U8 /* K only: q5_1 unpacked to codes u8 [dim/4][64][4] */, KV_NONE };

typedef struct kv_view {
    enum kv_kind kind;
    const uint8_t *data;
    const uint32_t *high;
    const uint16_t *s, *m;
    int64_t ahead; /* from these bytes to the same bytes of the page that comes next, to be fetched meanwhile; 0: none. Set where
                      few queries share a page; many keep it in the cache long enough by themselves */
} kv_view;

/* offsets of the planes from the block's start */
typedef struct kv_planes { size_t data, high, s, m, end; } kv_planes;

typedef struct attend_query {
    const float *x;      /* [dim] */
    const int8_t *code;  /* [dim], block K formats only; so are the next three, [dim/32] */
    const float *delta;
    const float *alpha;  /* delta times the sum of the codes, exact */
    const int32_t *isum;
} attend_query;

/* n = 1 .. MAX_TILE queries at a time; p and s: [n][64]; o: [n][ldo] */
typedef struct attend_kernels {
    void (*score)(const kv_view *k, int dim, int n, const attend_query *const *q, float *s);
    /* s -> p for keys [j0, j1) (others +0), nl[0] = n, nl[1] = l; nonzero if a visible u is Inf or NaN */
    int (*softmax)(float *s, int j0, int j1, float c, float *nl);
    /* o = fma(p_j, v_j, o) for j0 <= j < j1 */
    void (*values)(const kv_view *v, int dim_p, int n, const float *p, int j0, int j1, float *o, int64_t ldo);
    /* sum = fma(o, g, sum * f), count a multiple of 16 */
    void (*merge)(float *sum, const float *o, float f, float g, int count);
    /* K: a float format -> f32 [dim][64], q5_1 -> codes of KV_U8; V: any -> f32 tiles */
    void (*expand_k)(const kv_view *k, int dim, void *dst);
    void (*expand_v)(const kv_view *v, int dim_p, float *dst);
} attend_kernels;

extern const attend_kernels cpu_attend_portable, cpu_attend_avx2, cpu_attend_avx512;

enum kv_kind kv_kind_of(const bw_type_info *t);
static inline int kv_dim_p(int dim) { return (dim + 15) & ~15; }
static inline int kv_tile_width(int dim_p, int tile) { return dim_p - tile * TILE_DIMS < TILE_DIMS ? dim_p - tile * TILE_DIMS : TILE_DIMS; }
kv_planes kv_k_planes(enum kv_kind kind, int dim);
kv_planes kv_v_planes(enum kv_kind kind, int dim, size_t start);

static inline kv_view kv_view_at(enum kv_kind kind, const kv_planes *p, const uint8_t *block) {
    return (kv_view){.kind = kind, .data = block + p->data, .high = (const uint32_t *)(block + p->high),
                     .s = (const uint16_t *)(block + p->s), .m = (const uint16_t *)(block + p->m)};
}

#endif
