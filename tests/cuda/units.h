/* Random units of weights, and a matrix's outputs by plain loops over them, for the tests of kernels in emulation. Knows no kernel. */
#ifndef BW24_TESTS_CUDA_UNITS_H
#define BW24_TESTS_CUDA_UNITS_H

#include <type_traits>
#include "emulate.h"
#include "unit.cuh"

using namespace bw;

static uint64_t state = 7;
static uint32_t random32() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (uint32_t)(state >> 32); }
static float unit() { return (float)(int)(random32() >> 8) * 0x1p-23f - 1.0f; }
static int bad;
static void report(const char *name, bool equal) { printf("%s %s\n", equal ? "PASS" : "FAIL", name); bad |= !equal; }
static bool same(const std::vector<float> &a, const std::vector<float> &b) { return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * 4); }

/* a byte of codes as packing writes it: the nibble of NVFP4's -0 is never there */
template <class U> uint8_t code_byte(uint32_t v) {
    if (std::is_same_v<U, U_NVFP4> && (v & 15) == 8) v ^= 1;
    if (std::is_same_v<U, U_NVFP4> && (v >> 4 & 15) == 8) v ^= 16;
    return (uint8_t)v;
}

/* the scales of 16 rows, tame */
template <class U> void fill_scales(uint8_t *s) {
    for (int i = 0; i < U::SCALE; i++) s[i] = (uint8_t)random32();
    for (int r = 0; r < 16; r++) {
        if constexpr (U::SCALE >= 1024) for (int k = 0; k < U::SCALE / 64; k++) { float v = 0.01f * unit(); memcpy(s + r * (U::SCALE / 16) + 4 * k, &v, 4); }
        else if constexpr (std::is_same_v<U, U_Q4_K>) for (int k = 0; k < 2; k++) { __half h = __float2half_rn(0.01f + 0.002f * unit()); memcpy(s + r * 8 + 2 * k, &h, 2); }
        else if constexpr (std::is_same_v<U, U_NVFP4>) for (int k = 0; k < 16; k++) s[r * 16 + k] &= 0x3f;
        else if constexpr (std::is_same_v<U, U_Q6_K>) { __half h = __float2half_rn(0.01f + 0.002f * unit()); memcpy(s + 256 + r * 2, &h, 2); }
        else if constexpr (std::is_same_v<U, U_Q8_0> || std::is_same_v<U, U_Q4_0>)
            for (int k = 0; k < 8; k++) { __half h = __float2half_rn(0.01f + 0.002f * unit()); memcpy(s + r * 16 + 2 * k, &h, 2); }
        else for (int k = 0; k < 4; k++) {
            __half h = __float2half_rn(0.01f + 0.002f * unit());
            memcpy(s + r * 16 + 4 * k, &h, 2);
            s[r * 16 + 4 * k + 2] &= 63;
            s[r * 16 + 4 * k + 3] &= 63;
        }
    }
}

/* one output of one row by plain loops, before the matrix's scale */
template <class U> float plain_output(const uint8_t *w, int segs, int n, const Acts &x, int row) {
    float y = 0.0f;
    for (int seg = 0; seg < segs; seg++) {
        const uint8_t *u = w + ((size_t)(n / 16) * segs + seg) * U::UNIT;
        const int r16 = n % 16;
        float p = 0.0f;
        for (int g = 0; g < 8 && seg * 8 + g < x.cols / 32; g++) {
            int lo = 0, hi = 0;
            const int8_t *q = x.q + (size_t)row * x.cols + (seg * 8 + g) * 32;
            for (int tig = 0; tig < 4; tig++) {
                typename U::Pack pk = U::template load_pack<true>(u + (g >> 2) * U::HALF, (g & 3) / U::GP, r16 >> 3, (r16 & 7) * 4 + tig);
                uint32_t l, h;
                U::unpack(pk, (g & 3) % U::GP, l, h);
                for (int b = 0; b < 4; b++) {
                    int cl = U::UNSIGNED ? (int)(l >> 8 * b & 255) : (int8_t)(l >> 8 * b), ch = U::UNSIGNED ? (int)(h >> 8 * b & 255) : (int8_t)(h >> 8 * b);
                    lo += cl * q[tig * 8 + b]; /* stored words: 0 4 1 5 .. */
                    hi += ch * q[tig * 8 + 4 + b];
                }
            }
            float a[2], b[2], m0[2], m1[2];
            const typename U::Pair s = U::fetch(u + 2 * U::HALF, r16, g >> 1);
            U::pair(s, g >> 1, a, b);
            unit_mins<U>(s, m0, m1);
            const int e = g & 1;
            const size_t at = (size_t)(seg * 8 + g) * x.ld + row;
            const bool halves = U::FORM == FORM_S2 || U::FORM == FORM_S2M;
            const float d = x.delta[at];
            int first = 0, all = 0; /* sums of codes */
            for (int i = 0; i < 32; i++) {
                all += q[i];
                first += i & 4 ? 0 : q[i];
            }
            p = fmaf(a[e], d * (float)(halves ? lo : lo + hi), p);
            if (U::FORM == FORM_S1M) p = fmaf(b[e], d * (float)all, p);
            if (halves) p = fmaf(b[e], d * (float)hi, p);
            if (U::FORM == FORM_S2M) p = fmaf(m1[e], d * (float)(all - first), fmaf(m0[e], d * (float)first, p));
        }
        y = y + p;
    }
    return y;
}

#endif
