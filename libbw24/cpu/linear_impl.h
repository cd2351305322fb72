/* Private to the linear_*.c and pack.c files: the packed layouts, the layout of activations, the table each instruction set fills. */
#ifndef BW24_CPU_LINEAR_IMPL_H
#define BW24_CPU_LINEAR_IMPL_H

#include "linear.h"

enum { GROUP = 32, SEGMENT = 256, SEGMENT_GROUPS = 8 };

/* Packed layouts of a tile of 16 rows. A "word" is 4 consecutive values; word w of a group holds values 4w..4w+3.
 *   nib    4 x 64 bytes a group: byte (n, row, b) = code of word n in the low nibble, of word n + 4 in the high nibble
 *   high1  64 bytes a group: bit w of byte (row, b) = fifth bit of value 4w + b
 *   high2  2 x 64 bytes a group: bits 2c, 2c + 1 of byte (j, row, b) = bits 4, 5 of value 4(4j + c) + b
 *   bytes  8 x 64 bytes a group: byte (w, row, b) = int8 code + 128
 * A tile is a sequence of records, one linear stream of memory: a head with the scales, then the codes of its groups. The last record
 * may hold fewer groups. f16 and byte scales are [16 rows].
 *   type         codes        groups  head
 *   Q4_0 IQ4_NL  nib          2       d f16 [2]
 *   Q4_1         nib          1       d f16, m f16
 *   Q5_0         nib, high1   2       d f16 [2]
 *   Q5_1         nib, high1   1       d f16, m f16
 *   Q8_0         bytes        2       d f16 [2]
 *   MXFP4        nib          4       e u8 [4]
 *   NVFP4        nib          2       (s0, s1) u8 [2]
 *   Q4_K         nib          8       the 12 scale bytes, d f16, dmin f16
 *   Q5_K         nib, high1   8       the same
 *   Q6_K         nib, high2   8       scales i8 [16], d f16, 32 bytes of nothing
 *   IQ4_XS       nib          8       d f16, scales_h u16, scales_l u8 [4]
 * F32, F16, BF16: [column][16 rows]. */
enum pack_kind {
    PACK_NONE, PACK_Q4_0, PACK_Q4_1, PACK_Q5_0, PACK_Q5_1, PACK_Q8_0, PACK_Q4_K, PACK_Q5_K, PACK_Q6_K,
    PACK_IQ4_NL, PACK_IQ4_XS, PACK_MXFP4, PACK_NVFP4, PACK_F32, PACK_F16, PACK_BF16, PACK_KINDS
};
enum { NIB = 256, HIGH1 = 64, HIGH2 = 128 };

enum pack_kind pack_kind_of(const bw_type_info *t);

#if defined(__GNUC__)
#define INL static inline __attribute__((always_inline))
#else
#define INL static inline
#endif

/* facts of the packed kinds, folded where the kind is constant */
INL enum bw_form form_of(int k) {
    if (k == PACK_Q4_1 || k == PACK_Q5_1 || k == PACK_Q4_K || k == PACK_Q5_K) return BW_S1M;
    return k == PACK_Q6_K || k == PACK_NVFP4 ? BW_S2 : BW_S1;
}
/* bytes of a group's codes */
INL int64_t code_bytes(int k) {
    switch (k) {
    case PACK_Q8_0: return 512;
    case PACK_Q5_0: case PACK_Q5_1: case PACK_Q5_K: return NIB + HIGH1;
    case PACK_Q6_K: return NIB + HIGH2;
    default: return NIB;
    }
}
/* bytes of a record's head, and the groups it serves */
INL int64_t head_bytes(int k) {
    return k == PACK_Q4_K || k == PACK_Q5_K ? 256 : k == PACK_Q6_K ? 320 : k == PACK_IQ4_XS ? 128 : 64;
}
INL int head_groups(int k) {
    switch (k) {
    case PACK_Q4_1: case PACK_Q5_1: return 1;
    case PACK_MXFP4: return 4;
    case PACK_Q4_K: case PACK_Q5_K: case PACK_Q6_K: case PACK_IQ4_XS: return 8;
    default: return 2;
    }
}
/* where the head that serves group g begins, and the group's codes */
INL int64_t head_at(int k, int64_t g) { return g / head_groups(k) * (head_bytes(k) + head_groups(k) * code_bytes(k)); }
INL int64_t codes_at(int k, int64_t g) { return head_at(k, g) + head_bytes(k) + g % head_groups(k) * code_bytes(k); }

/* the codebooks plus their offset: IQ4 + 128 (or signed), twice E2M1 + 16 */
static const uint8_t pack_table_iq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t pack_table_fp4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};


/* bytes of one packed tile, a multiple of 64 */
int64_t pack_tile_bytes(enum pack_kind k, int64_t cols);

/* One group of one activation row: a cache line. Integer sums begin at MAGIC, the bits of the float 1.5 * 2^23: a sum I then reads as the float
 * MAGIC_F + I, and fma(that, d, c) is d * I exactly, d having four significant bits. n, n0, n1 = MAGIC - 128 * (sum of the codes, of the halves):
 * a dot product with codes + 128 that begins there has the 128 taken back; sum_start (linear_tmpl.h) makes the starts of smaller powers of two of it. */
typedef struct act_line {
    int8_t q[GROUP];
    float d, a, a0, a1; /* scale; scale times the sum of the codes, of the halves, exact */
    int32_t n, n0, n1;
    float c;            /* -d * MAGIC_F, exact */
} act_line;
#define MAGIC 0x4b400000
#define MAGIC_F 12582912.0f

/* Rows lie in blocks of ACT_BLOCK (the last one smaller): [block][group][row in block], so a kernel walks one contiguous range */
enum { ACT_BLOCK = 24 };

static inline act_line *act_line_at(const cpu_act *a, int r, int64_t *stride) {
    int b = r - r % ACT_BLOCK, n = a->rows - b < ACT_BLOCK ? a->rows - b : ACT_BLOCK;
    *stride = n;
    return (act_line *)a->mem + (int64_t)b * (a->cols / GROUP) + (r - b);
}
/* f32 activations: [block][column][row in block] */
static inline float *act_float_at(const cpu_act *a, int r, int64_t *stride) {
    int b = r - r % ACT_BLOCK, n = a->rows - b < ACT_BLOCK ? a->rows - b : ACT_BLOCK;
    *stride = n;
    return (float *)a->mem + (int64_t)b * a->cols + (r - b);
}

/* what follows from d and the sums of the codes of the halves */
static inline void act_line_sums(act_line *l, int32_t s0, int32_t s1) {
    l->a0 = l->d * (float)s0;
    l->a1 = l->d * (float)s1;
    l->a = l->d * (float)(s0 + s1);
    l->n0 = MAGIC - 128 * s0;
    l->n1 = MAGIC - 128 * s1;
    l->n = MAGIC - 128 * (s0 + s1);
    l->c = -l->d * MAGIC_F;
}

/* Groups [g0, g0 + n) of the raw rows of tile t -> codes [n][8 words][16 rows][4], each plus `zero` (0 or 128), and scales [n][..][16]:
 * S1 {s}, S1M {s, m}, S2 {s0, s1}, S2M {s0, s1, m0, m1}. Absent rows have scale 0. */
void linear_raw_panel(const cpu_mat *m, int64_t t, int64_t g0, int64_t n, int zero, uint8_t *codes, float *scales);
/* columns [c0, c0 + n) of the raw float rows of tile t -> [n][16] */
void linear_raw_floats(const cpu_mat *m, int64_t t, int64_t c0, int64_t n, float *panel);

typedef void linear_fn(const cpu_mat *m, const cpu_act *a, int r0, int r1, float *y, int64_t ldy, int64_t t0, int64_t t1,
                       const cpu_epi *e, void *work);
/* one row of groups -> lines at the given stride; -1 if a value is Inf, NaN or 2^100 and more */
typedef int quant_fn(const float *x, int64_t groups, act_line *out, int64_t stride);

linear_fn linear_portable, linear_avx2, linear_avxvnni, linear_avx512;
quant_fn quant_portable, quant_avx2, quant_avx512;

#endif
