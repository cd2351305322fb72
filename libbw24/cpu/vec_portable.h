/* Eight lanes in plain C for machines without kernels of their own, under the names of vec.h, which includes it. Every operation is a
 * loop over lanes; a compiler may turn it into vectors, lane results are the same. Knows no op. */

typedef struct { float l[8]; } p8_f;
typedef struct { int32_t l[8]; } p8_i;

#define P8_MAP(type, name, args, expr) \
    VEC_FN type p8_##name args { type r; for (int i = 0; i < 8; i++) r.l[i] = (expr); return r; }

P8_MAP(p8_f, set1, (float x), x)
P8_MAP(p8_f, set1_f16, (uint16_t h), bw_f16_to_f32(h))
P8_MAP(p8_f, zero, (void), 0.0f)
P8_MAP(p8_f, load, (const float *p), p[i])
P8_MAP(p8_f, add, (p8_f a, p8_f b), a.l[i] + b.l[i])
P8_MAP(p8_f, sub, (p8_f a, p8_f b), a.l[i] - b.l[i])
P8_MAP(p8_f, mul, (p8_f a, p8_f b), a.l[i] * b.l[i])
P8_MAP(p8_f, div, (p8_f a, p8_f b), a.l[i] / b.l[i])
P8_MAP(p8_f, min, (p8_f a, p8_f b), a.l[i] < b.l[i] ? a.l[i] : b.l[i])
P8_MAP(p8_f, max, (p8_f a, p8_f b), a.l[i] > b.l[i] ? a.l[i] : b.l[i])
P8_MAP(p8_f, fma, (p8_f a, p8_f b, p8_f c), fmaf(a.l[i], b.l[i], c.l[i]))
P8_MAP(p8_f, fms, (p8_f a, p8_f b, p8_f c), fmaf(a.l[i], b.l[i], -c.l[i]))
P8_MAP(p8_f, fnma, (p8_f a, p8_f b, p8_f c), fmaf(-a.l[i], b.l[i], c.l[i]))
P8_MAP(p8_f, rint, (p8_f x), rintf(x.l[i]))
P8_MAP(p8_i, cvt, (p8_f x), (int32_t)x.l[i])
P8_MAP(p8_f, flt, (p8_i x), (float)x.l[i])
P8_MAP(p8_f, pow2, (p8_i n), bw_pow2i(n.l[i]))
P8_MAP(p8_f, unless_lt, (p8_f x, float bound, p8_f y), x.l[i] < bound ? 0.0f : y.l[i])
P8_MAP(p8_f, neg, (p8_f x), -x.l[i])
P8_MAP(p8_f, abs, (p8_f x), fabsf(x.l[i]))
P8_MAP(p8_f, neg_if, (p8_f x, p8_f y), x.l[i] < 0.0f ? -y.l[i] : y.l[i])
P8_MAP(p8_f, range, (p8_f x, int base, int j0, int j1, float fill), base + i >= j0 && base + i < j1 ? x.l[i] : fill)
P8_MAP(p8_f, load_f16, (const uint16_t *p), bw_f16_to_f32(p[i]))
P8_MAP(p8_f, load_e4m3, (const uint8_t *p), bw_e4m3_to_f32(p[i]))
P8_MAP(p8_f, load_i8, (const int8_t *p), (float)p[i])
P8_MAP(p8_i, load_u8d, (const uint8_t *p), p[i])
P8_MAP(p8_i, set1_i, (int x), x)
P8_MAP(p8_i, and_i, (p8_i a, p8_i b), a.l[i] & b.l[i])
P8_MAP(p8_i, or_i, (p8_i a, p8_i b), a.l[i] | b.l[i])
P8_MAP(p8_i, shl_i, (p8_i a, int n), (int32_t)((uint32_t)a.l[i] << n))
P8_MAP(p8_i, shr_i, (p8_i a, int n), (int32_t)((uint32_t)a.l[i] >> n))
P8_MAP(p8_i, bit4, (uint32_t x, int first), (int32_t)(x >> (first + i) & 1) << 4)
P8_MAP(p8_f, dup_lo, (p8_f x), x.l[i / 2])
P8_MAP(p8_f, dup_hi, (p8_f x), x.l[4 + i / 2])
P8_MAP(p8_f, swap, (p8_f x), x.l[i ^ 1])
P8_MAP(p8_f, neg_even, (p8_f x), i & 1 ? x.l[i] : -x.l[i])
#undef P8_MAP

VEC_FN void p8_store(float *p, p8_f x) { memcpy(p, x.l, 32); }
VEC_FN void p8_stream(float *p, p8_f x) { memcpy(p, x.l, 32); }
VEC_FN p8_i p8_load_i(const void *p) { p8_i r; memcpy(r.l, p, 32); return r; }
VEC_FN void p8_store_i(void *p, p8_i x) { memcpy(p, x.l, 32); }
VEC_FN float p8_hmax(p8_f x) {
    float m = x.l[0];
    for (int i = 1; i < 8; i++) m = x.l[i] > m ? x.l[i] : m;
    return m;
}
VEC_FN float p8_hsum(p8_f x) {
    for (int o = 4; o >= 1; o /= 2)
        for (int i = 0; i < o; i++) x.l[i] = x.l[i] + x.l[i + o];
    return x.l[0];
}
/* the signed code of every byte */
VEC_FN p8_i p8_kcode(p8_i k, int bias) {
    for (int i = 0; i < 8; i++) k.l[i] = (int32_t)((uint32_t)k.l[i] ^ (bias ? 0x80808080u : 0u));
    return k;
}
VEC_FN p8_i p8_dot_start(int bias, int sum) { (void)bias; (void)sum; return p8_set1_i(0); }
VEC_FN p8_i p8_dot(p8_i acc, p8_i k, p8_i a) {
    int8_t kb[32], ab[32];
    memcpy(kb, k.l, 32);
    memcpy(ab, a.l, 32);
    for (int i = 0; i < 32; i++) acc.l[i / 4] += kb[i] * ab[i];
    return acc;
}
