/* LINEAR for one weight row (dot.h states the mathematics). Plain loops in the order of the numeric program; refuses every shortcut. */
#include "dot.h"

#include <math.h>
#include <string.h>

enum { GROUP = 32, SEGMENT = 256 };

/* bit pattern of the largest magnitude, compared as an integer: 0x7f800000 and more mean Inf or NaN */
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
        if (bits >= 0x7f800000u) return -1;
        float amax;
        memcpy(&amax, &bits, 4);
        if (amax < 0x1p-100f) {
            d[g] = 0.0f;
            memset(q, 0, GROUP);
            continue;
        }
        float r = 127.0f / amax;
        d[g] = amax / 127.0f;
        for (int i = 0; i < GROUP; i++) {
            float v = rintf(x[i] * r);
            q[i] = (int8_t)(v > 127.0f ? 127.0f : (v < -127.0f ? -127.0f : v));
        }
    }
    return 0;
}

/* value t of one group; a = 32 activation codes */
static float group_value(enum bw_form form, const bw_group *w, const int8_t *a) {
    int32_t dot[2] = {0, 0}, sum[2] = {0, 0};
    for (int e = 0; e < GROUP; e++) {
        dot[e >> 4] += w->q[e] * a[e];
        sum[e >> 4] += a[e];
    }
    if (form == BW_S1) return w->s[0] * (float)(dot[0] + dot[1]);
    if (form == BW_S1M) return fmaf(w->m[0], (float)(sum[0] + sum[1]), w->s[0] * (float)(dot[0] + dot[1]));
    float t = fmaf(w->s[1], (float)dot[1], w->s[0] * (float)dot[0]);
    if (form == BW_S2) return t;
    return fmaf(w->m[1], (float)sum[1], fmaf(w->m[0], (float)sum[0], t));
}

/*
 * LINEAR  y_j = sum over the columns of w_jc x_c, times the tensor's scale, plus b_j
 *
 * Quantised w: x as int8 in groups of 32 (ref_quant_row); the value of a group is an exact integer dot times scales (group_value); inside a
 * segment of 256 columns p = fma(value, activation scale, p) ascending from +0; segments ascending: y = y + p. Float w: p = fma(w, x, p) in the same segments.
 */
float ref_dot_row(const bw_type_info *t, const uint8_t *row, int64_t cols, const int8_t *aq, const float *ad) {
    float y = 0.0f, p = 0.0f;
    for (int64_t c = 0; c < cols; c += GROUP) {
        bw_group w;
        t->group(row + c / t->block * t->bytes, (int)(c % t->block / GROUP), &w);
        p = fmaf(ad[c / GROUP], group_value(t->form, &w, aq + c), p);
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
