/* LINEAR for one weight row: docs/numerics.md sections 2 and 3 as code. Owns the order of operations of a dot product;
 * knows one row of blocks and one row of activations, and nothing of matrices, threads or tensor scales.
 *
 * Activations, per group of 32:  amax = max |x|; d = amax * f32(1/127) rounded up to four significant bits; q = rint(x * (1 / d)), |q| <= 127;
 *                                amax < 2^-100 gives d = 0 and q = 0, amax >= 2^100 is a fault.
 * Of a group, exactly: i = d * I, alpha = d * A, with I = sum q a, A = sum a (i0, i1, alpha0, alpha1 over the halves).
 * A segment of 256 columns, from p = +0, groups ascending:
 *   S1   p = fma(s, i, p)                       S2   p = fma(s1, i1, fma(s0, i0, p))
 *   S1M  p = fma(m, alpha, fma(s, i, p))        S2M  p = fma(m1, alpha1, fma(m0, alpha0, fma(s1, i1, fma(s0, i0, p))))
 * The result:                y = +0, then y = y + p, segments ascending. */
#ifndef BW24_REF_DOT_H
#define BW24_REF_DOT_H

#include "../formats/formats.h"

/* One activation row of cols values (a multiple of 32) -> int8 codes q[cols] and scales d[cols / 32].
 * 0, or -1 if a value is Inf, NaN or 2^100 and more; the codes of that group and of the later ones are then not written. */
int ref_quant_row(const float *x, int64_t cols, int8_t *q, float *d);

/* Dot product of a quantised weight row with a quantised activation row. cols is a multiple of the type's block. */
float ref_dot_row(const bw_type_info *t, const uint8_t *row, int64_t cols, const int8_t *aq, const float *ad);

/* Dot product of a weight row with f32 activations x[cols]: in a segment of 256 columns p = fma(w, x, p) ascending, y = y + p.
 * For FLOAT types this is section 3, any cols; for quantised types each block is decoded first (the diagnostic mode of float
 * activations), cols a multiple of the block. */
float ref_dot_row_f32(const bw_type_info *t, const uint8_t *row, int64_t cols, const float *x);

#endif
