/* LINEAR for AVX2 without VNNI. The u8 x s8 pair product saturates at 16 bits, so codes below 64 are multiplied unsigned and a few
 * pairs summed in 16 bits (8 words of codes below 16, 4 below 32, 2 below 64: at most 2 * 127 * 15 * 8 = 30480, 31496, 32004);
 * larger codes are kept signed and multiplied as |w| x sign(a, w), at most 2 * 127 * 128 = 32512. Every sum is exact. */
#if defined(__x86_64__)
#include "../canon.h"
#include "linear_v256.h"

#define V_SIGNED 1
#define LINEAR_FN linear_avx2
/* of 16 registers: the 8 words of a group, p, two temporaries */
#define GEMM_TILES 1
#define GEMM_SUMS 4
#define GEMM_ROWS(form) 4
#define GEMM_LIST2(X) X(1) X(2) X(3) X(4)
#define GEMM_LIST(X) GEMM_LIST2(X)

/* products of one word, pairs summed to 16 bits */
INL vi pair_products(vi w, vi a, int top) {
    return top < 64 ? _mm256_maddubs_epi16(w, a) : _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
}

/* i + the dot products of n words */
INL vi dot_one(vi i, const vi *w, const int8_t *q, int n, int top) {
    const int step = top < 16 ? 8 : top < 32 ? 4 : top < 64 ? 2 : 1;
    _Pragma("GCC unroll 8") for (int k = 0; k < n; k += step) {
        vi sum = v_zero();
        _Pragma("GCC unroll 8") for (int j = k; j < (k + step < n ? k + step : n); j++)
            sum = _mm256_add_epi16(sum, pair_products(w[j], _mm256_set1_epi32(word_at(q + 4 * j)), top));
        i = _mm256_add_epi32(i, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    }
    return i;
}

/* words [w0, w1) of nr rows; codes are [8 words][16 rows][4] */
INL void dot_rows(vi *i, const uint8_t *codes, const act_line *l, int w0, int w1, int nt, int nr, int top) {
    vi w[8];
    (void)nt;
    _Pragma("GCC unroll 8") for (int k = w0; k < w1; k++) w[k - w0] = v_load(codes + 64 * k);
    _Pragma("GCC unroll 16") for (int r = 0; r < nr; r++) i[r] = dot_one(i[r], w, l[r].q + 4 * w0, w1 - w0, top);
}

#include "linear_tmpl.h"

/* one row of groups; amax compared as integers, codes by round to nearest even */
int quant_avx2(const float *x, int64_t groups, act_line *out, int64_t stride) {
    int fault = 0;
    vi magnitude = v_set32(0x7fffffff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t g = 0; g < groups; g++, x += GROUP, out += stride) {
        vf v[4];
        vi top = v_zero(), q[4];
        for (int i = 0; i < 4; i++) {
            v[i] = v_loadf(x + 8 * i);
            top = _mm256_max_epi32(top, v_and(_mm256_castps_si256(v[i]), magnitude));
        }
        __m128i m = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
        uint32_t bits = (uint32_t)_mm_cvtsi128_si32(m);
        int bad = bits >= BW_ACT_LIMIT;
        float recip;
        if (bad) fault = -1;
        bw_act_scale(bad ? 0 : bits, &out->d, &recip);
        for (int i = 0; i < 4; i++) q[i] = v_int(v_mul(bad ? v_setf(0.0f) : v[i], v_setf(recip)));
        vi packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        v_store(out->q, _mm256_permutevar8x32_epi32(packed, order));
        __m256i lo = v_add32(q[0], q[1]), hi = v_add32(q[2], q[3]);
        __m256i s = _mm256_hadd_epi32(lo, hi);
        s = _mm256_hadd_epi32(s, s);
        __m128i half = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
        act_line_sums(out, _mm_cvtsi128_si32(half), _mm_extract_epi32(half, 1));
    }
    return fault;
}
#else
typedef int linear_avx2_unused;
#endif
