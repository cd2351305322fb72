/* CONV, DELTA, DECAY and SIGMOID as docs/numerics.md §11 states them. Owns their order of operations; knows nothing of lists or threads. */
#include "recur.h"
#include "../canon.h"

/*
 * CONV  y[c] = silu(sum over t of w[c][t] * x_t[c])   causal, depthwise; x_{taps-1} is the row itself
 *
 * State: the last taps - 1 rows of x, oldest first; zeros before the first token. The sum is an fma chain over t ascending from +0.
 */
void ref_conv(const float *const *x, const float *w, int taps, float *y, int64_t n) {
    for (int64_t c = 0; c < n; c++) {
        float p = 0.0f;
        for (int t = 0; t < taps; t++) p = fmaf(w[c * taps + t], x[t][c], p);
        y[c] = bw_silu(p);
    }
}

/*
 * DELTA  S = decay * S;  d = beta * (v - S^T k);  S = S + k d^T;  y = S^T q      per value head, row after row
 *
 * S: [dk][dv]. Column by column: s_i = S_i * decay; the product S^T k has four strands, strand j taking i = j, j + 4, ... ascending:
 * a_j = fma(s_i, k_i, a_j) from +0, then (a_0 + a_2) + (a_1 + a_3). d = beta * (v - that). S_i' = fma(k_i, d, s_i). S'^T q as S^T k.
 * Value head h reads key head h mod kheads (order tiled) or h / (heads / kheads) (order grouped). The order is the same in every phase.
 */
void ref_delta(const float *from, float *to, int dk, int dv, const float *k, const float *q, const float *v, float decay, float beta, float *out) {
    for (int c = 0; c < dv; c++) {
        int block = c / BW_DELTA_COLS, cols = bw_delta_cols(dv, block);
        int64_t at = (int64_t)block * BW_DELTA_COLS * dk + c % BW_DELTA_COLS;
        float a[4] = {0}, o[4] = {0};
        for (int i = 0; i < dk; i++) a[i % 4] = fmaf(from[at + (int64_t)i * cols] * decay, k[i], a[i % 4]);
        float d = beta * (v[c] - ((a[0] + a[2]) + (a[1] + a[3])));
        for (int i = 0; i < dk; i++) {
            float s = fmaf(k[i], d, from[at + (int64_t)i * cols] * decay);
            to[at + (int64_t)i * cols] = s;
            if (q) o[i % 4] = fmaf(s, q[i], o[i % 4]);
        }
        if (q) out[c] = (o[0] + o[2]) + (o[1] + o[3]);
    }
}

/*
 * DECAY  y = exp(a * softplus(x + dt))   [n]; a is negative
 */
void ref_decay(const float *x, const float *a, const float *dt, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = bw_exp(a[i] * bw_softplus(x[i] + dt[i]));
}

/*
 * SIGMOID  y = 1 / (1 + exp(-x))   [n]
 */
void ref_sigmoid(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = bw_sigmoid(x[i]);
}
