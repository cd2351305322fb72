/* LINEAR for one weight row: docs/numerics.md sections 2 and 3 as code. Owns the order of operations of a dot product;
 * knows one row of blocks and one row of activations, and nothing of matrices, threads or tensor scales.
 *
 * Activations, per group of 32:  amax = max |x|; d = amax / 127; q = clamp(rint(x * (127 / amax)), -127, 127);
 *                                amax < 2^-100 gives d = 0 and q = 0.
 * Group value t, I and A exact integers (I0, I1, A0, A1 over the halves):
 *   S1   t = s * I                              S2   t = fma(s1, I1, s0 * I0)
 *   S1M  t = fma(m, A, s * I)                   S2M  t = fma(m1, A1, fma(m0, A0, fma(s1, I1, s0 * I0)))
 * A segment of 256 columns:  p = +0, then p = fma(d, t, p), groups ascending.
 * The result:                y = +0, then y = y + p, segments ascending. */
#ifndef BW24_REF_DOT_H
#define BW24_REF_DOT_H

#include "../formats/formats.h"

/* One activation row of cols values (a multiple of 32) -> int8 codes q[cols] and scales d[cols / 32].
 * 0, or -1 if a value is Inf or NaN; the codes of that group and of the later ones are then not written. */
int ref_quant_row(const float *x, int64_t cols, int8_t *q, float *d);

/* Dot product of a quantised weight row with a quantised activation row. cols is a multiple of the type's block. */
float ref_dot_row(const bw_type_info *t, const uint8_t *row, int64_t cols, const int8_t *aq, const float *ad);

/* Dot product of a weight row with f32 activations x[cols]: in a segment of 256 columns p = fma(w, x, p) ascending, y = y + p.
 * For FLOAT types this is section 3, any cols; for quantised types each block is decoded first (the diagnostic mode of float
 * activations), cols a multiple of the block. */
float ref_dot_row_f32(const bw_type_info *t, const uint8_t *row, int64_t cols, const float *x);

#endif
