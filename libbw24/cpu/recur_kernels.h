/* The kernels of CONV and DELTA, one text for every instruction set: a kernel file includes vec.h, defines V(name), VW and RECUR_TABLE, then
 * includes this. Owns the loops; the order of operations is docs/numerics.md §11. Lanes are columns, so a lane's sums are the scalar ones. */
#include "recur.h"

static void conv(const float *const *x, const float *w, int taps, float *y, int64_t n, int64_t c0, int64_t c1) {
    int64_t c = c0;
    for (; c + VW <= c1; c += VW) {
        V(f) p = V(zero)();
        for (int t = 0; t < taps; t++) p = V(fma)(V(load)(w + t * n + c), V(load)(x[t] + c), p);
        V(store)(y + c, V(silu)(p));
    }
    for (; c < c1; c++) {
        float p = 0.0f;
        for (int t = 0; t < taps; t++) p = fmaf(w[t * n + c], x[t][c], p);
        y[c] = bw_silu(p);
    }
}

enum { STRANDS = 4 };

/* NV vectors of columns; 4 NV chains of fma are under way at once. The second pass, which finds the state in the cache, fetches what lies behind it:
 * in most cases the next block. */
#define DELTA_COLUMNS(NV, STORE) \
    V(f) e = V(set1)(decay), sum[STRANDS][NV]; \
    for (int j = 0; j < STRANDS; j++) for (int n = 0; n < NV; n++) sum[j][n] = V(zero)(); \
    int i = 0; \
    for (; i + STRANDS <= dk; i += STRANDS) \
        for (int j = 0; j < STRANDS; j++) for (int n = 0; n < NV; n++) \
            sum[j][n] = V(fma)(V(mul)(V(load)(from + (i + j) * cols + n * VW), e), V(set1)(k[i + j]), sum[j][n]); \
    for (int j = 0; i + j < dk; j++) for (int n = 0; n < NV; n++) \
        sum[j][n] = V(fma)(V(mul)(V(load)(from + (i + j) * cols + n * VW), e), V(set1)(k[i + j]), sum[j][n]); \
    V(f) d[NV]; \
    for (int n = 0; n < NV; n++) { \
        V(f) p = V(add)(V(add)(sum[0][n], sum[2][n]), V(add)(sum[1][n], sum[3][n])); \
        d[n] = V(mul)(V(set1)(beta), V(sub)(V(load)(v + n * VW), p)); \
        for (int j = 0; j < STRANDS; j++) sum[j][n] = V(zero)(); \
    } \
    for (i = 0; i < dk; i += STRANDS) \
        for (int j = 0; j < STRANDS && i + j < dk; j++) for (int n = 0; n < NV; n++) { \
            if (n * VW % 16 == 0) __builtin_prefetch(from + (dk + i + j) * cols + n * VW); \
            V(f) s = V(fma)(V(set1)(k[i + j]), d[n], V(mul)(V(load)(from + (i + j) * cols + n * VW), e)); \
            STORE(to + (i + j) * cols + n * VW, s); \
            if (q) sum[j][n] = V(fma)(s, V(set1)(q[i + j]), sum[j][n]); \
        } \
    if (q) for (int n = 0; n < NV; n++) \
        V(store)(out + n * VW, V(add)(V(add)(sum[0][n], sum[2][n]), V(add)(sum[1][n], sum[3][n])));

#define DELTA_ARGS const float *from, float *to, int dk, int cols, const float *k, const float *q, const float *v, float decay, float beta, float *out
static void delta2(DELTA_ARGS) { DELTA_COLUMNS(2, V(store)) }
static void delta2_far(DELTA_ARGS) { DELTA_COLUMNS(2, V(stream)) }
static void delta1(DELTA_ARGS) { DELTA_COLUMNS(1, V(store)) }

/* one column by itself */
static void delta0(DELTA_ARGS) {
    float a[STRANDS] = {0}, o[STRANDS] = {0};
    for (int i = 0; i < dk; i++) a[i % STRANDS] = fmaf(from[i * cols] * decay, k[i], a[i % STRANDS]);
    float d = beta * (v[0] - ((a[0] + a[2]) + (a[1] + a[3])));
    for (int i = 0; i < dk; i++) {
        float s = fmaf(k[i], d, from[i * cols] * decay);
        to[i * cols] = s;
        if (q) o[i % STRANDS] = fmaf(s, q[i], o[i % STRANDS]);
    }
    if (q) out[0] = (o[0] + o[2]) + (o[1] + o[3]);
}

static void delta(const float *from, float *to, bool far, int dk, int cols, const float *k, const float *q, const float *v, float decay, float beta,
                  float *out) {
    int c = 0;
    far = far && (uintptr_t)to % 64 == 0 && cols % 16 == 0; /* whole cache lines only */
    for (; c + 2 * VW <= cols; c += 2 * VW) (far ? delta2_far : delta2)(from + c, to + c, dk, cols, k, q, v + c, decay, beta, out + c);
    for (; c + VW <= cols; c += VW) delta1(from + c, to + c, dk, cols, k, q, v + c, decay, beta, out + c);
    for (; c < cols; c++) delta0(from + c, to + c, dk, cols, k, q, v + c, decay, beta, out + c);
}

const recur_kernels RECUR_TABLE = {conv, delta};
