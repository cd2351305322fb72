/* The numeric program's elementary functions, one text for C and CUDA. Owns every transcendental that reaches an op;
 * refuses libm, tables and approximate instructions. Only add, mul, fma, div, sqrt, rint and integer operations appear,
 * so equal inputs give equal bits on every device. Vector code repeats these sequences operation by operation.
 * Build rules: C -ffp-contract=off; CUDA -fmad=false -ftz=false -prec-div=true -prec-sqrt=true. */
#ifndef BW24_CANON_H
#define BW24_CANON_H

#ifdef __CUDACC__
#define BW_FN static __host__ __device__ __forceinline__
#else
#include <math.h>
#define BW_FN static inline
#endif
#include <stdint.h>

typedef union { float f; int32_t i; uint32_t u; } bw_f32;
typedef union { double f; int64_t i; uint64_t u; } bw_f64;

/* 2^n as a float; n in [-126, 127] */
BW_FN float bw_pow2i(int n) { bw_f32 v; v.u = (uint32_t)(n + 127) << 23; return v.f; }

/* 2^x. Relative error below 2e-7 for x in [-125, 127]; x < -125 gives +0 (no subnormal result), x > 127 is taken as 127. */
BW_FN float bw_exp2(float x) {
    float z = x > 127.0f ? 127.0f : (x < -125.0f ? -125.0f : x);
    float n = rintf(z), f = z - n;
    float p = 0.00015453163f;
    p = fmaf(p, f, 0.0013390863f);
    p = fmaf(p, f, 0.009618083f);
    p = fmaf(p, f, 0.05550357f);
    p = fmaf(p, f, 0.24022651f);
    p = fmaf(p, f, 0.6931472f);
    p = fmaf(p, f, 1.0f);
    float y = p * bw_pow2i((int)n);
    return x < -125.0f ? 0.0f : y;
}

/* e^x. Relative error below 2e-7 for x in [-86, 88]; x < -86 gives +0, x > 88 is taken as 88. */
BW_FN float bw_exp(float x) {
    float z = x > 88.0f ? 88.0f : (x < -86.0f ? -86.0f : x);
    float n = rintf(z * 1.44269504f);
    float r = fmaf(-n, 0.693145752f, z);
    r = fmaf(-n, 1.42860677e-6f, r);
    float p = 0.0013926182f;
    p = fmaf(p, r, 0.008363178f);
    p = fmaf(p, r, 0.041666556f);
    p = fmaf(p, r, 0.16666576f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r * r, r);
    p = p + 1.0f;
    float y = p * bw_pow2i((int)n);
    return x < -86.0f ? 0.0f : y;
}

BW_FN float bw_sigmoid(float x) { return 1.0f / (1.0f + bw_exp(-x)); }
BW_FN float bw_silu(float x) { return x / (1.0f + bw_exp(-x)); }

/* the tanh form of GELU, written as x * sigmoid(2u) */
BW_FN float bw_gelu(float x) {
    float u = (0.7978845608f * x) * fmaf(0.044715f * x, x, 1.0f);
    return x / (1.0f + bw_exp(-2.0f * u));
}

/* absolute error below 2e-7 */
BW_FN float bw_tanh(float x) {
    float a = x < 0.0f ? -x : x;
    float t = bw_exp(-2.0f * a);
    float y = (1.0f - t) / (1.0f + t);
    return x < 0.0f ? -y : y;
}

/* ln x for finite x > 0, f64, absolute error below 1e-15 relative to max(1, |ln x|); subnormal x is not supported */
BW_FN double bw_log_f64(double x) {
    bw_f64 v; v.f = x;
    int e = (int)((v.u >> 52) & 2047) - 1023;
    v.u = (v.u & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    if (v.f > 1.4142135623730951) { v.f = v.f * 0.5; e = e + 1; }
    double f = (v.f - 1.0) / (v.f + 1.0), s = f * f;
    double p = 1.0 / 21.0;
    p = fma(p, s, 1.0 / 19.0);
    p = fma(p, s, 1.0 / 17.0);
    p = fma(p, s, 1.0 / 15.0);
    p = fma(p, s, 1.0 / 13.0);
    p = fma(p, s, 1.0 / 11.0);
    p = fma(p, s, 1.0 / 9.0);
    p = fma(p, s, 1.0 / 7.0);
    p = fma(p, s, 1.0 / 5.0);
    p = fma(p, s, 1.0 / 3.0);
    p = fma(p, s, 1.0);
    return fma((double)e, 0.6931471805599453, (2.0 * f) * p);
}

/* e^x for x in [-700, 700], f64, relative error below 1e-15 */
BW_FN double bw_exp_f64(double x) {
    double n = rint(x * 1.4426950408889634);
    double r = fma(-n, 6.93147180369123816490e-01, x);
    r = fma(-n, 1.90821492927058770002e-10, r);
    double p = 1.0 / 6227020800.0;
    p = fma(p, r, 1.0 / 479001600.0);
    p = fma(p, r, 1.0 / 39916800.0);
    p = fma(p, r, 1.0 / 3628800.0);
    p = fma(p, r, 1.0 / 362880.0);
    p = fma(p, r, 1.0 / 40320.0);
    p = fma(p, r, 1.0 / 5040.0);
    p = fma(p, r, 1.0 / 720.0);
    p = fma(p, r, 1.0 / 120.0);
    p = fma(p, r, 1.0 / 24.0);
    p = fma(p, r, 1.0 / 6.0);
    p = fma(p, r, 0.5);
    p = fma(p, r, 1.0);
    p = fma(p, r, 1.0);
    bw_f64 v; v.u = (uint64_t)((int64_t)n + 1023) << 52;
    return p * v.f;
}

/* ln(1 + e^x), absolute error below 2e-7 relative to max(1, |x|) */
BW_FN float bw_softplus(float x) {
    if (x > 20.0f) return x;
    float t = bw_exp(x);
    return (float)bw_log_f64(1.0 + (double)t);
}

/* sin and cos of an angle in radians, |x| < 2^30, f64 inside, rounded to f32 once */
BW_FN void bw_sincos(double x, float *sin_out, float *cos_out) {
    double n = rint(x * 0.63661977236758134);
    double r = fma(-n, 1.5707963267948966, x);
    r = fma(-n, 6.123233995736766e-17, r);
    double s = r * r;
    double a = -1.0 / 1307674368000.0;
    a = fma(a, s, 1.0 / 6227020800.0);
    a = fma(a, s, -1.0 / 39916800.0);
    a = fma(a, s, 1.0 / 362880.0);
    a = fma(a, s, -1.0 / 5040.0);
    a = fma(a, s, 1.0 / 120.0);
    a = fma(a, s, -1.0 / 6.0);
    a = fma(a * s, r, r);
    double b = -1.0 / 87178291200.0;
    b = fma(b, s, 1.0 / 479001600.0);
    b = fma(b, s, -1.0 / 3628800.0);
    b = fma(b, s, 1.0 / 40320.0);
    b = fma(b, s, -1.0 / 720.0);
    b = fma(b, s, 1.0 / 24.0);
    b = fma(b, s, -0.5);
    b = fma(b, s, 1.0);
    int64_t q = (int64_t)n & 3;
    double sn = (q & 1) ? b : a, cs = (q & 1) ? a : b;
    *sin_out = (float)((q & 2) ? -sn : sn);
    *cos_out = (float)(((q + 1) & 2) ? -cs : cs);
}

/* base^(-2i/n) in f64: the i-th inverse frequency of a rotation over n dimensions */
BW_FN double bw_inv_freq(double base, int i, int n) {
    return bw_exp_f64(-((double)(2 * i) / (double)n) * bw_log_f64(base));
}

/* int8 activations of LINEAR, 32 values: bits of the largest magnitude, below BW_ACT_LIMIT = 2^100 (from there on, so Inf and NaN too, a fault) ->
 * (scale, reciprocal); zero below 2^-100. The scale is amax / 127 rounded up to four significant bits, so that scale times code and scale times a
 * group's integer sum are exact floats and no code passes 127. */
#define BW_ACT_LIMIT 0x71800000u
BW_FN void bw_act_scale(uint32_t amax_bits, float *scale, float *recip) {
    bw_f32 a, d;
    a.u = amax_bits;
    int zero = amax_bits < 0x0d800000u; /* 2^-100 */
    d.f = (zero ? 1.0f : a.f) * (1.0f / 127.0f);
    d.u = (d.u + 0xfffffu) & 0xfff00000u;
    *scale = zero ? 0.0f : d.f;
    *recip = zero ? 0.0f : 1.0f / d.f;
}
BW_FN int bw_act_code(float x, float recip) { return (int)rintf(x * recip); }

/* int8 quantisation of 32 values of the KV cache (q8_0): bits of the largest magnitude -> (scale, reciprocal); zero below 2^-100 */
BW_FN void bw_q8_scale(uint32_t amax_bits, float *scale, float *recip) {
    bw_f32 a; a.u = amax_bits;
    int zero = amax_bits < 0x0d800000u; /* 2^-100 */
    float m = zero ? 1.0f : a.f;
    *scale = zero ? 0.0f : m / 127.0f;
    *recip = zero ? 0.0f : 127.0f / m;
}
BW_FN int bw_q8_code(float x, float recip) {
    float v = rintf(x * recip);
    v = v > 127.0f ? 127.0f : (v < -127.0f ? -127.0f : v);
    return (int)v;
}

/* counter-based random bits: a 64-bit mix of (seed, position, id); the same triple gives the same bits for ever */
BW_FN uint64_t bw_mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
BW_FN uint64_t bw_draw(uint64_t seed, uint64_t pos, uint64_t id) {
    uint64_t z = bw_mix64(seed + 0x9e3779b97f4a7c15ull);
    z = bw_mix64(z ^ (pos * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull));
    return bw_mix64(z ^ (id * 0xaf251af3b0f025b5ull + 0x2545f4914f6cdd1dull));
}
/* exponential variate of the race: -ln of a uniform in (0, 1) */
BW_FN double bw_race(uint64_t seed, uint64_t pos, uint64_t id) {
    double u = ((double)(bw_draw(seed, pos, id) >> 12) + 0.5) * 0x1p-52;
    return -bw_log_f64(u);
}

#endif
