/* The kernels of the row ops, one text for every instruction set: a kernel file includes vec.h, defines V(name), VW and VECOPS_TABLE, then
 * includes this. Owns the loops; the order of operations is docs/numerics.md §4, §5, §7. What is left over after whole vectors is done by
 * the scalar functions of canon.h, which have the same bits. */
#include <string.h>
#include "vecops.h"

enum { STRANDS = 32, SEGMENT = 256, VECS = STRANDS / VW };

/* sum of squares of one segment, cols = 1 .. 256; a short last group is padded with +0, which leaves a strand as it is */
VEC_FN float segment_squares(const float *x, int cols) {
    V(f) v[VECS];
    float pad[STRANDS] = {0};
    for (int i = 0; i < VECS; i++) v[i] = V(zero)();
    for (; cols > 0; cols -= STRANDS, x += STRANDS) {
        if (cols < STRANDS) {
            memcpy(pad, x, sizeof(float) * (size_t)cols);
            x = pad;
        }
        for (int i = 0; i < VECS; i++) {
            V(f) a = V(load)(x + i * VW);
            v[i] = V(fma)(a, a, v[i]);
        }
    }
    return V(tree32)(v);
}

static void norm(const float *x, const float *w, float *y, int64_t n, float eps, int l2) {
    float total = 0.0f;
    for (int64_t c = 0; c < n; c += SEGMENT) total = total + segment_squares(x + c, n - c < SEGMENT ? (int)(n - c) : SEGMENT);
    float r = 1.0f / sqrtf((l2 ? total : total / (float)n) + eps);
    int64_t c = 0;
    for (; c + VW <= n; c += VW) {
        V(f) a = V(mul)(V(load)(x + c), V(set1)(r));
        V(store)(y + c, w ? V(mul)(a, V(load)(w + c)) : a);
    }
    for (; c < n; c++) y[c] = w ? (x[c] * r) * w[c] : x[c] * r;
}

VEC_FN void rotate_one(float *y0, float *y1, float x0, float x1, float c, float s) {
    *y0 = fmaf(x0, c, -(x1 * s));
    *y1 = fmaf(x1, c, x0 * s);
}

static int rope_neox(const float *x, float *y, int half, const float *cs) {
    int i = 0;
    for (; i + VW <= half; i += VW) {
        V(f) x0 = V(load)(x + i), x1 = V(load)(x + half + i), c = V(load)(cs + i), s = V(load)(cs + half + i);
        V(store)(y + i, V(fms)(x0, c, V(mul)(x1, s)));
        V(store)(y + half + i, V(fma)(x1, c, V(mul)(x0, s)));
    }
    return i;
}

/* pairs in neighbouring lanes: even lanes x0 c - x1 s, odd lanes x1 c + x0 s */
VEC_FN V(f) rotate_pairs(V(f) x, V(f) c, V(f) s) { return V(fma)(x, c, V(neg_even)(V(mul)(V(swap)(x), s))); }

static int rope_norm(const float *x, float *y, int half, const float *cs) {
    int i = 0;
    for (; i + VW <= half; i += VW) {
        V(f) a = V(load)(x + 2 * i), b = V(load)(x + 2 * i + VW), c = V(load)(cs + i), s = V(load)(cs + half + i);
        V(store)(y + 2 * i, rotate_pairs(a, V(dup_lo)(c), V(dup_lo)(s)));
        V(store)(y + 2 * i + VW, rotate_pairs(b, V(dup_hi)(c), V(dup_hi)(s)));
    }
    return i;
}

static void rope(const float *x, float *y, int dim, int rot, enum bw_rope_style style, const float *cs) {
    int half = rot / 2, neox = style == BW_ROPE_NEOX;
    for (int i = neox ? rope_neox(x, y, half, cs) : rope_norm(x, y, half, cs); i < half; i++) {
        int a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1;
        rotate_one(y + a, y + b, x[a], x[b], cs[i], cs[half + i]);
    }
    if (y != x && rot < dim) memcpy(y + rot, x + rot, sizeof(float) * (size_t)(dim - rot));
}

static void glu(enum bw_act act, const float *g, const float *u, float *y, int64_t n) {
    int64_t i = 0;
    if (act == BW_ACT_SILU) {
        for (; i + VW <= n; i += VW) V(store)(y + i, V(mul)(V(silu)(V(load)(g + i)), V(load)(u + i)));
        for (; i < n; i++) y[i] = bw_silu(g[i]) * u[i];
    } else {
        for (; i + VW <= n; i += VW) V(store)(y + i, V(mul)(V(gelu)(V(load)(g + i)), V(load)(u + i)));
        for (; i < n; i++) y[i] = bw_gelu(g[i]) * u[i];
    }
}

static void add(const float *a, const float *b, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) V(store)(y + i, V(add)(V(load)(a + i), V(load)(b + i)));
    for (; i < n; i++) y[i] = a[i] + b[i];
}

static void scale(const float *x, float c, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) V(store)(y + i, V(mul)(V(load)(x + i), V(set1)(c)));
    for (; i < n; i++) y[i] = x[i] * c;
}

static void softcap(const float *x, float cap, float *y, int64_t n) {
    float inv = 1.0f / cap;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) V(store)(y + i, V(mul)(V(set1)(cap), V(tanh)(V(mul)(V(load)(x + i), V(set1)(inv)))));
    for (; i < n; i++) y[i] = cap * bw_tanh(x[i] * inv);
}

static void gate(const float *x, const float *g, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) V(store)(y + i, V(mul)(V(load)(x + i), V(sigmoid)(V(load)(g + i))));
    for (; i < n; i++) y[i] = x[i] * bw_sigmoid(g[i]);
}

#define MAP(name) \
    do { \
        for (; i + VW <= n; i += VW) V(store)(y + i, V(name)(V(load)(x + i))); \
        for (; i < n; i++) y[i] = bw_##name(x[i]); \
    } while (0)

static void map(enum cpu_fn f, const float *x, float *y, int64_t n) {
    int64_t i = 0;
    switch (f) {
    case CPU_FN_EXP: MAP(exp); break;
    case CPU_FN_EXP2: MAP(exp2); break;
    case CPU_FN_SIGMOID: MAP(sigmoid); break;
    case CPU_FN_SILU: MAP(silu); break;
    case CPU_FN_GELU: MAP(gelu); break;
    case CPU_FN_TANH: MAP(tanh); break;
    }
}

const vecops_kernels VECOPS_TABLE = {norm, rope, glu, add, scale, softcap, gate, map};
