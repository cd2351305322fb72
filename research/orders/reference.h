/* docs/numerics.md in scalar C for the harness: LINEAR, NORM, ATTEND on the group form, and the packing of groups into units.
 * Knows nothing of CUDA. Build with -ffp-contract=off. */
#ifndef ORDERS_REFERENCE_H
#define ORDERS_REFERENCE_H
#include <cmath>
#include <cstring>
#include <vector>
#include <cuda_fp16.h>
#include "../../libbw24/canon.h"

struct Rng {
    uint64_t s;
    uint32_t next() { s = bw_mix64(s + 0x9e3779b97f4a7c15ull); return (uint32_t)(s >> 32); }
    float normal() { float a = 0; for (int i = 0; i < 6; i++) a += (float)(next() >> 8) * 0x1p-24f; return (a - 3.0f) * 1.4142f; }
};

struct Group { int8_t q[32]; float s[2], m[2]; };
struct QuantRow { std::vector<int8_t> q; std::vector<float> d, a; };

static QuantRow ref_quantise(const float *x, int n) {
    QuantRow r; r.q.resize(n); r.d.resize(n / 32); r.a.resize(n / 32);
    for (int g = 0; g < n / 32; g++) {
        uint32_t top = 0; int sum = 0; float recip;
        for (int e = 0; e < 32; e++) { bw_f32 v; v.f = x[g * 32 + e]; v.u &= 0x7fffffffu; if (v.u > top) top = v.u; }
        bw_q8_scale(top, &r.d[g], &recip);
        for (int e = 0; e < 32; e++) { int c = bw_q8_code(x[g * 32 + e], recip); r.q[g * 32 + e] = (int8_t)c; sum += c; }
        r.a[g] = (float)sum;
    }
    return r;
}

enum { R_S1, R_S1M, R_S2 };
static float ref_linear(const Group *w, int form, const QuantRow &x, int cols) {
    float y = 0.0f, p = 0.0f;
    int groups = cols / 32;
    for (int g = 0; g < groups; g++) {
        int i0 = 0, i1 = 0;
        for (int e = 0; e < 16; e++) { i0 += w[g].q[e] * x.q[g * 32 + e]; i1 += w[g].q[16 + e] * x.q[g * 32 + 16 + e]; }
        float t;
        if (form == R_S2) t = fmaf(w[g].s[1], (float)i1, w[g].s[0] * (float)i0);
        else { t = w[g].s[0] * (float)(i0 + i1); if (form == R_S1M) t = fmaf(w[g].m[0], x.a[g], t); }
        p = fmaf(x.d[g], t, p);
        if ((g & 7) == 7 || g == groups - 1) { y = y + p; p = 0.0f; }
    }
    return y;
}

static float ref_tree32(float *v) {
    for (int o = 16; o; o >>= 1) { float t[32]; for (int l = 0; l < 32; l++) t[l] = v[l] + v[l ^ o]; memcpy(v, t, sizeof t); }
    return v[0];
}
static void ref_norm(const float *x, const float *w, int n, float eps, float *y) {
    float total = 0.0f;
    for (int s = 0; s < n; s += 256) {
        float v[32] = {0};
        for (int c = s; c < n && c < s + 256; c++) v[c & 31] = fmaf(x[c], x[c], v[c & 31]);
        total = total + ref_tree32(v);
    }
    float r = 1.0f / sqrtf(total / (float)n + eps);
    for (int c = 0; c < n; c++) y[c] = (x[c] * r) * w[c];
}

/* kv: decoded V [keys][D]; scores given as a function of (key) */
static void ref_attend(const std::vector<float> &u, const float *v, int keys, int D, float *out) {
    float N = 0, L = 0;
    std::vector<float> O(D), o(D);
    for (int k0 = 0; k0 < keys; k0 += 64) {
        int n = keys - k0 < 64 ? keys - k0 : 64;
        float top = u[k0], e[64] = {0}, t[32];
        for (int j = 1; j < n; j++) top = u[k0 + j] > top ? u[k0 + j] : top;
        float m = ceilf(top);
        for (int j = 0; j < n; j++) e[j] = bw_exp2(u[k0 + j] - m);
        for (int j = 0; j < 32; j++) t[j] = e[j] + e[j + 32];
        float l = ref_tree32(t);
        for (int d = 0; d < D; d++) { float a = 0.0f; for (int j = 0; j < n; j++) a = fmaf(e[j], v[(size_t)(k0 + j) * D + d], a); o[d] = a; }
        if (!k0) { N = m; L = l; O = o; continue; }
        float M = N > m ? N : m, f = N - M < -126.0f ? 0.0f : bw_pow2i((int)(N - M)), g = m - M < -126.0f ? 0.0f : bw_pow2i((int)(m - M));
        L = fmaf(l, g, L * f);
        for (int d = 0; d < D; d++) O[d] = fmaf(o[d], g, O[d] * f);
        N = M;
    }
    for (int d = 0; d < D; d++) out[d] = O[d] * (1.0f / L);
}

/* ---- units ---- */
enum { T_Q4_0, T_NVFP4, T_Q4_K, T_Q8_0, T_Q6_K, T_COUNT };
static const char *const type_name[] = {"Q4_0", "NVFP4", "Q4_K", "Q8_0", "Q6_K"};
static const int type_form[] = {R_S1, R_S2, R_S1M, R_S1, R_S2};
static const int type_half[] = {1024, 1024, 1024, 2048, 1536}, type_scale[] = {256, 256, 256, 256, 288};
static const double type_bits[] = {4.5, 4.5, 4.5, 8.5, 6.5625};
static int unit_bytes(int t) { return 2 * type_half[t] + type_scale[t]; }
static const int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* random f16 of magnitude about 0.01 .. 0.02 */
static uint16_t rand_half(Rng &r, bool sign) { return (uint16_t)(0x2100 + r.next() % 0x400 + (sign && (r.next() & 1) ? 0x8000 : 0)); }
static float half_float(uint16_t h) { return __half2float(__ushort_as_half(h)); }

/* fills unit u with random weights and writes the same as groups w[row][8] (stride groups per row) */
static void make_unit(int type, uint8_t *u, Group *w, size_t stride, int groups, Rng &r) {
    int H = type_half[type];
    memset(u, 0, unit_bytes(type));
    for (int row = 0; row < 16; row++) {
        uint8_t *sc = u + 2 * H + row * 16;
        uint16_t d = rand_half(r, true), dm = rand_half(r, false);
        if (type == T_Q4_K) {
            memcpy(sc, &d, 2); memcpy(sc + 2, &dm, 2);
            for (int i = 0; i < 12; i++) sc[4 + i] = (uint8_t)r.next();
        }
        if (type == T_Q6_K) memcpy(u + 2 * H + 256 + row * 2, &d, 2);
        for (int j = 0; j < groups; j++) {
            Group g = {};
            int half = j >> 2, c = j & 3, rr = row >> 3, gid = row & 7;
            if (type == T_Q4_0 || type == T_Q8_0) { uint16_t h = rand_half(r, true); memcpy(sc + 2 * j, &h, 2); g.s[0] = g.s[1] = half_float(h); }
            if (type == T_NVFP4)
                for (int k = 0; k < 2; k++) { uint8_t b = (uint8_t)(r.next() % 0x7f); sc[2 * j + k] = b; bw_f32 v; v.u = (uint32_t)b << 20; g.s[k] = v.f * 0x1p119f; }
            if (type == T_Q4_K) {
                const uint8_t *b = sc + 4;
                int s = j < 4 ? b[j] & 63 : (b[j + 4] & 15) | (b[j - 4] >> 6) << 4, m = j < 4 ? b[j + 4] & 63 : (b[j + 4] >> 4) | (b[j] >> 6) << 4;
                g.s[0] = g.s[1] = half_float(d) * (float)s; g.m[0] = g.m[1] = -half_float(dm) * (float)m;
            }
            if (type == T_Q6_K)
                for (int k = 0; k < 2; k++) { int8_t b = (int8_t)r.next(); sc[2 * j + k] = (uint8_t)b; g.s[k] = half_float(d) * (float)b; }
            for (int e = 0; e < 32; e++) {
                int word = e >> 2, tig = word & 3, hi = word >> 2, lane = gid * 4 + tig, b = e & 3;
                uint8_t *p = u + half * H + rr * 512 + lane * 16 + c * 4;
                uint32_t x = r.next();
                if (type == T_Q4_0) { int n = x & 15; g.q[e] = (int8_t)(n - 8); p[b] |= (uint8_t)((n ^ 8) << (4 * hi)); }
                if (type == T_Q4_K) { int n = x & 15; g.q[e] = (int8_t)n; p[b] |= (uint8_t)(n << (4 * hi)); }
                if (type == T_NVFP4) { int n = x & 15; if (n == 8) n = 0; g.q[e] = e2m1[n]; p[hi * 2 + (b >> 1)] |= (uint8_t)(n << (4 * (b & 1))); }
                if (type == T_Q8_0) { g.q[e] = (int8_t)((int)(x % 255) - 127); u[half * H + ((c >> 1) * 2 + rr) * 512 + lane * 16 + (c & 1) * 8 + hi * 4 + b] = (uint8_t)g.q[e]; }
                if (type == T_Q6_K) {
                    int n = (x & 63) ^ 32; g.q[e] = (int8_t)((int)(x & 63) - 32);
                    p[b] |= (uint8_t)((n & 15) << (4 * hi));
                    u[half * H + 1024 + rr * 256 + lane * 8 + (c >> 1) * 4 + b] |= (uint8_t)((n >> 4) << (4 * (c & 1) + 2 * hi));
                }
            }
            w[row * stride + j] = g;
        }
    }
}
#endif
