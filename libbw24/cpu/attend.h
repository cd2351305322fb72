/* KV_APPEND and ATTEND on the CPU. Owns the page layout (attend_impl.h) and the kernels for each instruction set; knows no page table, no
 * sequence and no thread: a caller splits work by rows, KV heads or pieces. Results are ref_attend's, bit for bit, for every split. */
#ifndef BW24_CPU_ATTEND_H
#define BW24_CPU_ATTEND_H

#include <stddef.h>
#include <stdint.h>
#include "../kv.h"
#include "isa.h"

enum { CPU_KV_MAX_DIM = 1024 };

/* bytes of one page (a multiple of 64; pages are best aligned to 64); 0 if a format is no KV format, or dim is not a multiple of its
 * block or not in 1 .. CPU_KV_MAX_DIM */
size_t cpu_kv_page_bytes(const bw_kv_desc *kv);

/* k, v: [heads][dim] into slot 0..63 of a page. Nonzero if a value is Inf or NaN or leaves the format's range. Slots of one page may not
 * be written by two threads at once (they share cache lines and, in q5_1, nothing else). */
int cpu_kv_append(const bw_kv_desc *kv, uint8_t *page, int slot, const float *k, const float *v);

/* bytes of scratch for one call (and thread) with at most n_rows rows; 64-byte alignment is best */
size_t cpu_attend_work(const bw_kv_desc *kv, int n_rows, int q_heads);

/* n_rows query rows of one sequence, KV heads h0 .. h1-1. Row i sees keys lo[i] <= j < hi[i], at least one; pages[j / 64] holds key j
 * (a page that no row sees may be NULL). Row i of q and out: q + i * ldq, out + i * ldo, [q_heads][dim]; q_heads is a multiple of
 * kv->heads; only the query heads of h0 .. h1-1 are read and written. c = scale * log2 e as f32. Nonzero on Inf or NaN or an empty
 * range; out is then undefined. */
int cpu_attend(enum cpu_isa isa, const bw_kv_desc *kv, uint8_t *const *pages, int n_rows, const int64_t *lo, const int64_t *hi,
               const float *q, int64_t ldq, int q_heads, float c, float *out, int64_t ldo, int h0, int h1, void *work);

/* The same for one row in two steps, so that threads may share its keys: first any split of the pages lo/64 .. (hi-1)/64 and of the KV
 * heads over cpu_attend_pieces, then cpu_attend_merge over any split of the KV heads. acc: [n_pieces][q_heads] pieces of
 * cpu_attend_piece_floats(kv) floats, n_pieces = (hi-1)/64 - lo/64 + 1. Pages b0 .. b1-1 are indices into pages[], within
 * lo/64 .. (hi-1)/64. */
size_t cpu_attend_piece_floats(const bw_kv_desc *kv);
int cpu_attend_pieces(enum cpu_isa isa, const bw_kv_desc *kv, uint8_t *const *pages, int64_t b0, int64_t b1, int64_t lo, int64_t hi,
                      const float *q, int q_heads, float c, float *acc, int h0, int h1, void *work);
int cpu_attend_merge(enum cpu_isa isa, const bw_kv_desc *kv, int64_t n_pieces, const float *acc, int q_heads, float *out, int h0, int h1);

#endif
