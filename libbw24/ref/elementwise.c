/* The row ops as docs/numerics.md §4, §5 and §7 state them, one value after the other. Owns their order of operations;
 * knows nothing of lists, threads or vectors. */
#include "elementwise.h"
#include <string.h>

static float tree32(float v[32]) {
    for (int o = 16; o >= 1; o /= 2)
        for (int l = 0; l < o; l++) v[l] = v[l] + v[l + o];
    return v[0];
}

/*
 * NORM  y = (x * r) * w,  r = 1 / sqrt(sum(x^2) / n + eps);  kind l2: r = 1 / sqrt(sum(x^2) + eps)
 *
 * x, y: [n]; w: [n], absent: y = x * r. The sum runs over segments of 256 columns: 32 strands a segment, each an ascending
 * fma chain from +0 over columns l, l + 32, ...; the strands by tree32; the segments ascending from +0.
 */
void ref_norm(const float *x, const float *w, float *y, int64_t n, float eps, int l2) {
    float total = 0.0f;
    for (int64_t c0 = 0; c0 < n; c0 += 256) {
        float v[32] = {0};
        int64_t c1 = c0 + 256 < n ? c0 + 256 : n;
        for (int64_t c = c0; c < c1; c++) v[(c - c0) % 32] = fmaf(x[c], x[c], v[(c - c0) % 32]);
        total = total + tree32(v);
    }
    float r = 1.0f / sqrtf((l2 ? total : total / (float)n) + eps);
    for (int64_t c = 0; c < n; c++) y[c] = w ? (x[c] * r) * w[c] : x[c] * r;
}

/*
 * ROPE  (y0, y1) = (x0 c - x1 s, x1 c + x0 s)  for the rot/2 pairs of every head
 *
 * x, y: [heads][dim]; c and s: the row's table, angles as in rope.h. y0 = fma(x0, c, -(x1 * s)), y1 = fma(x1, c, x0 * s).
 */
void ref_rope(const float *x, float *y, int heads, int dim, int rot, enum bw_rope_style style, const float *cs) {
    int half = rot / 2;
    for (int h = 0; h < heads; h++, x += dim, y += dim) {
        for (int i = 0; i < half; i++) {
            int a = style == BW_ROPE_NEOX ? i : 2 * i, b = style == BW_ROPE_NEOX ? i + half : 2 * i + 1;
            float x0 = x[a], x1 = x[b], c = cs[i], s = cs[half + i];
            y[a] = fmaf(x0, c, -(x1 * s));
            y[b] = fmaf(x1, c, x0 * s);
        }
        for (int i = rot; i < dim; i++) y[i] = x[i];
    }
}

/*
 * GLU  y = act(g) * u   act: silu or gelu (tanh form) of canon.h;  g, u, y: [n]
 */
void ref_glu(enum bw_act act, const float *g, const float *u, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = (act == BW_ACT_SILU ? bw_silu(g[i]) : bw_gelu(g[i])) * u[i];
}

/*
 * ADD  y = a + b   [n]
 */
void ref_add(const float *a, const float *b, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

/*
 * SCALE  y = x * c   [n]; c may come from a tensor of one value; EMBED scales its decoded row by it
 */
void ref_scale(const float *x, float c, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * c;
}

/*
 * GATE  y = x * sigmoid(g)   x, y: [n]; g: [groups], one value for n / groups consecutive values
 */
void ref_gate(const float *x, const float *g, float *y, int64_t n, int64_t groups) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * bw_sigmoid(g[i / (n / groups)]);
}

/*
 * SLICE  y[h] = x[h][from .. from + size)   x: [heads][stride]; y: [heads][size]
 */
void ref_slice(const float *x, float *y, int heads, int64_t stride, int64_t from, int64_t size) {
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < size; i++) y[h * size + i] = x[h * stride + from + i];
}

/*
 * CONCAT  y[h] = a[h] then b[h]   a: [heads][na]; b: [heads][nb]; y: [heads][na + nb]
 */
void ref_concat(const float *a, const float *b, float *y, int heads, int64_t na, int64_t nb) {
    for (int h = 0; h < heads; h++, y += na + nb) {
        memcpy(y, a + h * na, (size_t)na * sizeof *y);
        memcpy(y + na, b + h * nb, (size_t)nb * sizeof *y);
    }
}

/*
 * SOFTCAP  y = cap * tanh(x * (1 / cap))   [n]
 */
void ref_softcap(const float *x, float cap, float *y, int64_t n) {
    float inv = 1.0f / cap;
    for (int64_t i = 0; i < n; i++) y[i] = cap * bw_tanh(x[i] * inv);
}
