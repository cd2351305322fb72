/* Reference of the KV formats, KV_APPEND and ATTEND (docs/numerics.md §6, §8). Owns the reference page:
 * [64 slots][heads][dim values in K's format], then the same for V. Knows no page table and no sequence. */
#ifndef BW24_REF_ATTEND_H
#define BW24_REF_ATTEND_H

#include <stddef.h>
#include "../kv.h"

enum { REF_KV_MAX_DIM = 1024 };

/* bytes of one page; 0 if a format is no KV format, or dim is not a multiple of its block or not in 1 .. REF_KV_MAX_DIM */
size_t ref_kv_page_bytes(const bw_kv_desc *kv);

/* n values (a multiple of the block) into format t by §8. Nonzero if a value is Inf or NaN or leaves the format's range. */
int ref_kv_encode(const bw_type_info *t, const float *x, int n, uint8_t *dst);

/* k, v: [heads][dim] into slot 0..63. Nonzero as ref_kv_encode; the slot is then undefined. */
int ref_kv_append(const bw_kv_desc *kv, uint8_t *page, int slot, const float *k, const float *v);

/* One query row. q, out: [q_heads][dim], q_heads a multiple of heads; keys lo <= j < hi are visible, at least one; pages[j / 64] holds
 * key j (pages wholly below lo may be NULL); c = scale * log2 e as f32. Nonzero on Inf or NaN (or, K in blocks, a query of 2^100 and more) or an empty range. */
int ref_attend(const bw_kv_desc *kv, uint8_t *const *pages, int64_t lo, int64_t hi, const float *q, int q_heads, float c, float *out);

#endif
