/* Reference of the row ops NORM, ROPE, GLU, ADD, SCALE (and EMBED's factor), GATE, SLICE, CONCAT and SOFTCAP: the numeric program literally.
 * A row is n f32 values; y may be the same row as any input. */
#ifndef BW24_REF_ELEMENTWISE_H
#define BW24_REF_ELEMENTWISE_H

#include "../rope.h"

enum bw_act { BW_ACT_SILU, BW_ACT_GELU };

/* w: [n] or NULL; l2: the sum of squares instead of its mean */
void ref_norm(const float *x, const float *w, float *y, int64_t n, float eps, int l2);
/* x, y: [heads][dim]; cs: [rot] from bw_rope_table; rot even, <= dim; values from rot on are copied */
void ref_rope(const float *x, float *y, int heads, int dim, int rot, enum bw_rope_style style, const float *cs);
void ref_glu(enum bw_act act, const float *g, const float *u, float *y, int64_t n);
void ref_add(const float *a, const float *b, float *y, int64_t n);
void ref_scale(const float *x, float c, float *y, int64_t n);
/* g: [groups], groups a divisor of n */
void ref_gate(const float *x, const float *g, float *y, int64_t n, int64_t groups);
void ref_slice(const float *x, float *y, int heads, int64_t stride, int64_t from, int64_t size);
/* y: [heads][na + nb], neither of the inputs */
void ref_concat(const float *a, const float *b, float *y, int heads, int64_t na, int64_t nb);
void ref_softcap(const float *x, float cap, float *y, int64_t n);

#endif
