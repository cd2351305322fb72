/* LINEAR for one weight row (dot.h states the mathematics). Plain loops in the order of the numeric program; refuses every shortcut. */
#include "dot.h"
#include "../canon.h"

#include <math.h>
#include <string.h>

enum { GROUP = 32, SEGMENT = 256 };

/* bit pattern of the largest magnitude, compared as an integer, so that Inf and NaN are found */
static uint32_t amax_bits(const float *x) {
    uint32_t top = 0;
    for (int i = 0; i < GROUP; i++) {
        uint32_t u;
        memcpy(&u, &x[i], 4);
        u &= 0x7fffffffu;
        if (u > top) top = u;
    }
    return top;
}

int ref_quant_row(const float *x, int64_t cols, int8_t *q, float *d) {
    for (int64_t g = 0; g < cols / GROUP; g++, x += GROUP, q += GROUP) {
        uint32_t bits = amax_bits(x);
        float r;
        if (bits >= BW_ACT_LIMIT) return -1;
        bw_act_scale(bits, &d[g], &r);
        for (int i = 0; i < GROUP; i++) q[i] = (int8_t)bw_act_code(x[i], r);
    }
    return 0;
}

/* p after one group; a = 32 activation codes, d = their scale. d has four significant bits, so its products with the sums are exact */
static float add_group(enum bw_form form, const bw_group *w, const int8_t *a, float d, float p) {
    int32_t dot[2] = {0, 0}, sum[2] = {0, 0};
    for (int e = 0; e < GROUP; e++) {
        dot[e >> 4] += w->q[e] * a[e];
        sum[e >> 4] += a[e];
    }
    if (form == BW_S1 || form == BW_S1M) {
        p = fmaf(w->s[0], d * (float)(dot[0] + dot[1]), p);
        return form == BW_S1 ? p : fmaf(w->m[0], d * (float)(sum[0] + sum[1]), p);
    }
    p = fmaf(w->s[1], d * (float)dot[1], fmaf(w->s[0], d * (float)dot[0], p));
    return form == BW_S2 ? p : fmaf(w->m[1], d * (float)sum[1], fmaf(w->m[0], d * (float)sum[0], p));
}

/*
 * LINEAR  y_j = sum over the columns of w_jc x_c, times the tensor's scale, plus b_j
 *
 * Quantised w: x as int8 in groups of 32 (ref_quant_row); of a group the integer dot times the activations' scale is exact and is folded into p by one
 * fma a weight scale and minimum (add_group); inside a segment of 256 columns from p = +0, groups ascending; segments ascending: y = y + p.
 * Float w: p = fma(w, x, p) in the same segments.
 */
float ref_dot_row(const bw_type_info *t, const uint8_t *row, int64_t cols, const int8_t *aq, const float *ad) {
    float y = 0.0f, p = 0.0f;
    for (int64_t c = 0; c < cols; c += GROUP) {
        bw_group w;
        t->group(row + c / t->block * t->bytes, (int)(c % t->block / GROUP), &w);
        p = add_group(t->form, &w, aq + c, ad[c / GROUP], p);
        if ((c + GROUP) % SEGMENT == 0 || c + GROUP == cols) {
            y = y + p;
            p = 0.0f;
        }
    }
    return y;
}

float ref_dot_row_f32(const bw_type_info *t, const uint8_t *row, int64_t cols, const float *x) {
    float y = 0.0f, p = 0.0f, w[SEGMENT];
    for (int64_t c = 0; c < cols; c++) {
        int e = (int)(c % t->block);
        if (e == 0) t->decode(row + c / t->block * t->bytes, w);
        p = fmaf(w[e], x[c], p);
        if ((c + 1) % SEGMENT == 0 || c + 1 == cols) {
            y = y + p;
            p = 0.0f;
        }
    }
    return y;
}
