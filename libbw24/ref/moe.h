/* Reference of ROUTE and of EXPERTS for one row: the numeric program literally (docs/numerics.md §10). Knows no list and no thread. */
#ifndef BW24_REF_MOE_H
#define BW24_REF_MOE_H

#include "../route.h"
#include "dot.h"
#include "elementwise.h"

/* l: [experts] logits; bias: [experts] or NULL, for the selection only; out: [top] weights, [top] ids. -1 on Inf or NaN, else 0 */
int ref_route(const bw_route *r, const float *l, const float *bias, float *out);

/* one matrix of one expert */
typedef struct ref_matrix {
    const bw_type_info *type;
    const uint8_t *data; /* row 0 */
    int64_t rows, cols;
    float scale;         /* multiplies its products */
} ref_matrix;
typedef struct ref_expert { ref_matrix gate, up, down; } ref_expert;

/* scratch: aq [widest], ad [widest / 32], h [gate.rows + up.rows + down.rows]; floats: activations stay f32 for quantised weights too.
 * y[j] = fma(w, d[j], y[j]) with d = down(act(gate x) * up x). -1 on Inf, NaN or 2^100 and more at a quantisation, else 0 */
int ref_expert_add(const ref_expert *e, const float *x, float w, enum bw_act act, int floats, int8_t *aq, float *ad, float *h, float *y);

#endif
