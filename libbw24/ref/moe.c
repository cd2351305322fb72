/* ROUTE and EXPERTS as docs/numerics.md §10 states them. Owns their order of operations; knows nothing of lists, tensors or threads. */
#include "moe.h"

/*
 * ROUTE  y = (weights, ids) of the experts that a row goes to
 *
 * x: [experts] logits; y: [2 top]. p = sigmoid(x), or p = e / total with e = exp(x - max x) and total over 32 strands (strand l takes
 * experts l, l + 32, ... ascending from +0) by tree32. Selection score c = p, or p + bias. With groups: the score of a group is the sum of
 * its two largest c; the experts of the `keep` best groups remain. Then top times the largest remaining c; ties go to the lowest index.
 * Weight = p of the chosen; norm: p / max(sum over the slots ascending from +0, 2^-14); times scale.
 */
int ref_route(const bw_route *r, const float *l, const float *bias, float *out) {
    float p[BW_ROUTE_MAX], c[BW_ROUTE_MAX], strand[32] = {0}, top = l[0];
    for (int i = 0; i < r->experts; i++) {
        if (!(l[i] - l[i] == 0)) return -1;
        top = l[i] > top ? l[i] : top;
    }
    for (int i = 0; i < r->experts; i++) {
        p[i] = r->kind == BW_ROUTE_SIGMOID ? bw_sigmoid(l[i]) : bw_exp(l[i] - top);
        strand[i % 32] = strand[i % 32] + p[i];
    }
    for (int o = 16; o >= 1; o /= 2)
        for (int i = 0; i < o; i++) strand[i] = strand[i] + strand[i + o];
    for (int i = 0; i < r->experts; i++) {
        if (r->kind == BW_ROUTE_SOFTMAX) p[i] = p[i] / strand[0];
        c[i] = bias ? p[i] + bias[i] : p[i];
    }
    bw_route_select(r, p, c, out);
    return 0;
}

static int product(const ref_matrix *m, const float *x, int floats, int8_t *aq, float *ad, float *y) {
    int64_t stride = bw_row_bytes(m->type, m->cols);
    floats |= m->type->form == BW_FLOAT;
    if (!floats && ref_quant_row(x, m->cols, aq, ad)) return -1;
    for (int64_t j = 0; j < m->rows; j++) {
        const uint8_t *row = m->data + j * stride;
        y[j] = (floats ? ref_dot_row_f32(m->type, row, m->cols, x) : ref_dot_row(m->type, row, m->cols, aq, ad)) * m->scale;
    }
    return 0;
}

/*
 * EXPERTS  y = sum over the slots s of r, ascending, of w_s * down_e(act(gate_e x) * up_e x),  e = id_s
 *
 * The three products are LINEARs (§2, §3) with the expert's scale; y = fma(w_s, d, y) from +0. A row that no expert is chosen for is +0.
 */
int ref_expert_add(const ref_expert *e, const float *x, float w, enum bw_act act, int floats, int8_t *aq, float *ad, float *h, float *y) {
    float *u = h + e->gate.rows, *d = u + e->up.rows;
    if (product(&e->gate, x, floats, aq, ad, h) || product(&e->up, x, floats, aq, ad, u)) return -1;
    ref_glu(act, h, u, h, e->gate.rows);
    if (product(&e->down, h, floats, aq, ad, d)) return -1;
    for (int64_t j = 0; j < e->down.rows; j++) y[j] = fmaf(w, d[j], y[j]);
    return 0;
}
