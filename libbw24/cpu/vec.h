/* Vectors of f32 and i32 lanes under one set of names, for kernels written once and compiled for each instruction set:
 * v16_ (AVX-512), v8_ (AVX2 and FMA), p8_ (any machine; eight lanes in plain C). Owns the lane operations; vec_math.h adds the
 * elementary functions of canon.h. Lane by lane each name is exactly the scalar operation it stands for.
 * A kernel file includes this, defines V(name) and VW (lanes), then includes its kernel text. Knows no op. */
#ifndef BW24_CPU_VEC_H
#define BW24_CPU_VEC_H

#include <string.h>
#include "../canon.h"
#include "../formats/formats.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define BW24_HAVE_V8 1
#endif
#if defined(BW24_HAVE_V8) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define BW24_HAVE_V16 1
#endif

#define VEC_FN static inline __attribute__((always_inline, unused))

/* Names, besides the evident ones:
 *   fma a*b + c; fms a*b - c; fnma c - a*b, one rounding each     cvt truncating f32 -> i32; flt i32 -> f32
 *   stream a store past the caches, to an aligned place
 *   pow2 bits of 2^n from an integral i32                          unless_lt x < bound ? +0 : y
 *   neg_if sign of y flipped where x < 0                           range lane l keeps x if j0 <= base + l < j1, else gets fill
 *   load_f16, load_e4m3, load_i8 widen VW stored values; load_u8d widens VW bytes to i32. An e4m3 code moved to the places of an f16 is its
 *   value times 2^-8, subnormals included
 *   dup_lo, dup_hi: lanes 0 0 1 1 .. of the lower or upper half    swap: lanes 1 0 3 2 ..
 *   hmax largest lane; hsum adds lanes l and l xor o for o = VW/2 .. 1
 *   kcode prepares 4*VW codes u8 (value + bias, bias 128 or 0); dot_start, dot: acc + sum over 4 of code * a, exactly */

#ifdef BW24_HAVE_V16
typedef __m512 v16_f;
typedef __m512i v16_i;
VEC_FN v16_f v16_set1(float x) { return _mm512_set1_ps(x); }
VEC_FN v16_f v16_set1_f16(uint16_t h) { return _mm512_set1_ps(_cvtsh_ss(h)); }
VEC_FN v16_f v16_zero(void) { return _mm512_setzero_ps(); }
VEC_FN v16_f v16_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_FN void v16_store(float *p, v16_f x) { _mm512_storeu_ps(p, x); }
VEC_FN void v16_stream(float *p, v16_f x) { _mm512_stream_ps(p, x); }
VEC_FN v16_f v16_add(v16_f a, v16_f b) { return _mm512_add_ps(a, b); }
VEC_FN v16_f v16_sub(v16_f a, v16_f b) { return _mm512_sub_ps(a, b); }
VEC_FN v16_f v16_mul(v16_f a, v16_f b) { return _mm512_mul_ps(a, b); }
VEC_FN v16_f v16_div(v16_f a, v16_f b) { return _mm512_div_ps(a, b); }
VEC_FN v16_f v16_min(v16_f a, v16_f b) { return _mm512_min_ps(a, b); }
VEC_FN v16_f v16_max(v16_f a, v16_f b) { return _mm512_max_ps(a, b); }
VEC_FN v16_f v16_fma(v16_f a, v16_f b, v16_f c) { return _mm512_fmadd_ps(a, b, c); }
VEC_FN v16_f v16_fms(v16_f a, v16_f b, v16_f c) { return _mm512_fmsub_ps(a, b, c); }
VEC_FN v16_f v16_fnma(v16_f a, v16_f b, v16_f c) { return _mm512_fnmadd_ps(a, b, c); }
VEC_FN v16_f v16_rint(v16_f x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VEC_FN v16_i v16_cvt(v16_f x) { return _mm512_cvttps_epi32(x); }
VEC_FN v16_f v16_flt(v16_i x) { return _mm512_cvtepi32_ps(x); }
VEC_FN v16_f v16_pow2(v16_i n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
VEC_FN v16_f v16_unless_lt(v16_f x, float bound, v16_f y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_NLT_UQ), y);
}
VEC_FN v16_f v16_neg(v16_f x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }
VEC_FN v16_f v16_abs(v16_f x) { return _mm512_abs_ps(x); }
VEC_FN v16_f v16_neg_if(v16_f x, v16_f y) {
    return _mm512_mask_xor_ps(y, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), y, _mm512_set1_ps(-0.0f));
}
VEC_FN v16_f v16_range(v16_f x, int base, int j0, int j1, float fill) {
    uint64_t m = (j1 < 64 ? (1ull << j1) - 1 : ~0ull) & ~((1ull << j0) - 1);
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)(m >> base), x);
}
VEC_FN v16_f v16_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
VEC_FN v16_f v16_load_e4m3(const uint8_t *p) {
    __m256i c = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_and_si256(c, _mm256_set1_epi16((short)0xbfff))), _mm512_set1_ps(256.0f));
}
VEC_FN v16_f v16_load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
VEC_FN v16_i v16_load_u8d(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
VEC_FN v16_i v16_load_i(const void *p) { return _mm512_loadu_si512(p); }
VEC_FN void v16_store_i(void *p, v16_i x) { _mm512_storeu_si512(p, x); }
VEC_FN v16_i v16_set1_i(int x) { return _mm512_set1_epi32(x); }
VEC_FN v16_i v16_and_i(v16_i a, v16_i b) { return _mm512_and_si512(a, b); }
VEC_FN v16_i v16_or_i(v16_i a, v16_i b) { return _mm512_or_si512(a, b); }
VEC_FN v16_i v16_shl_i(v16_i a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
VEC_FN v16_i v16_shr_i(v16_i a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
/* bit (first + l) of x in bit 4 of lane l */
VEC_FN v16_i v16_bit4(uint32_t x, int first) { return _mm512_maskz_set1_epi32((__mmask16)(x >> first), 16); }
VEC_FN v16_f v16_dup_lo(v16_f x) { return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), x); }
VEC_FN v16_f v16_dup_hi(v16_f x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), x);
}
VEC_FN v16_f v16_swap(v16_f x) { return _mm512_permute_ps(x, 0xb1); }
/* the sign of the even lanes flipped */
VEC_FN v16_f v16_neg_even(v16_f x) { return _mm512_mask_xor_ps(x, 0x5555, x, _mm512_set1_ps(-0.0f)); }
VEC_FN float v16_hmax(v16_f x) {
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_cvtss_f32(_mm512_max_ps(x, _mm512_permute_ps(x, 0xb1)));
}
VEC_FN float v16_hsum(v16_f x) {
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_cvtss_f32(_mm512_add_ps(x, _mm512_permute_ps(x, 0xb1)));
}
VEC_FN v16_i v16_kcode(v16_i k, int bias) { (void)bias; return k; }
VEC_FN v16_i v16_dot_start(int bias, int sum) { return _mm512_set1_epi32(-bias * sum); }
VEC_FN v16_i v16_dot(v16_i acc, v16_i k, v16_i a) { return _mm512_dpbusd_epi32(acc, k, a); }
#endif

#ifdef BW24_HAVE_V8
typedef __m256 v8_f;
typedef __m256i v8_i;
VEC_FN v8_f v8_set1(float x) { return _mm256_set1_ps(x); }
VEC_FN v8_f v8_set1_f16(uint16_t h) { return _mm256_set1_ps(_cvtsh_ss(h)); }
VEC_FN v8_f v8_zero(void) { return _mm256_setzero_ps(); }
VEC_FN v8_f v8_load(const float *p) { return _mm256_loadu_ps(p); }
VEC_FN void v8_store(float *p, v8_f x) { _mm256_storeu_ps(p, x); }
VEC_FN void v8_stream(float *p, v8_f x) { _mm256_stream_ps(p, x); }
VEC_FN v8_f v8_add(v8_f a, v8_f b) { return _mm256_add_ps(a, b); }
VEC_FN v8_f v8_sub(v8_f a, v8_f b) { return _mm256_sub_ps(a, b); }
VEC_FN v8_f v8_mul(v8_f a, v8_f b) { return _mm256_mul_ps(a, b); }
VEC_FN v8_f v8_div(v8_f a, v8_f b) { return _mm256_div_ps(a, b); }
VEC_FN v8_f v8_min(v8_f a, v8_f b) { return _mm256_min_ps(a, b); }
VEC_FN v8_f v8_max(v8_f a, v8_f b) { return _mm256_max_ps(a, b); }
VEC_FN v8_f v8_fma(v8_f a, v8_f b, v8_f c) { return _mm256_fmadd_ps(a, b, c); }
VEC_FN v8_f v8_fms(v8_f a, v8_f b, v8_f c) { return _mm256_fmsub_ps(a, b, c); }
VEC_FN v8_f v8_fnma(v8_f a, v8_f b, v8_f c) { return _mm256_fnmadd_ps(a, b, c); }
VEC_FN v8_f v8_rint(v8_f x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VEC_FN v8_i v8_cvt(v8_f x) { return _mm256_cvttps_epi32(x); }
VEC_FN v8_f v8_flt(v8_i x) { return _mm256_cvtepi32_ps(x); }
VEC_FN v8_f v8_pow2(v8_i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
VEC_FN v8_f v8_unless_lt(v8_f x, float bound, v8_f y) { return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_NLT_UQ), y); }
VEC_FN v8_f v8_neg(v8_f x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
VEC_FN v8_f v8_abs(v8_f x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
VEC_FN v8_f v8_neg_if(v8_f x, v8_f y) {
    __m256 lt = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ);
    return _mm256_xor_ps(y, _mm256_and_ps(lt, _mm256_set1_ps(-0.0f)));
}
VEC_FN v8_f v8_range(v8_f x, int base, int j0, int j1, float fill) {
    __m256i j = _mm256_add_epi32(_mm256_set1_epi32(base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(j0), j), _mm256_cmpgt_epi32(_mm256_set1_epi32(j1), j));
    return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(in));
}
VEC_FN v8_f v8_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
VEC_FN v8_f v8_load_e4m3(const uint8_t *p) {
    __m128i c = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_and_si128(c, _mm_set1_epi16((short)0xbfff))), _mm256_set1_ps(256.0f));
}
VEC_FN v8_f v8_load_i8(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
VEC_FN v8_i v8_load_u8d(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
VEC_FN v8_i v8_load_i(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
VEC_FN void v8_store_i(void *p, v8_i x) { _mm256_storeu_si256((__m256i *)p, x); }
VEC_FN v8_i v8_set1_i(int x) { return _mm256_set1_epi32(x); }
VEC_FN v8_i v8_and_i(v8_i a, v8_i b) { return _mm256_and_si256(a, b); }
VEC_FN v8_i v8_or_i(v8_i a, v8_i b) { return _mm256_or_si256(a, b); }
VEC_FN v8_i v8_shl_i(v8_i a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
VEC_FN v8_i v8_shr_i(v8_i a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
VEC_FN v8_i v8_bit4(uint32_t x, int first) {
    __m256i b = _mm256_srlv_epi32(_mm256_set1_epi32((int)(x >> first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_slli_epi32(_mm256_and_si256(b, _mm256_set1_epi32(1)), 4);
}
VEC_FN v8_f v8_dup_lo(v8_f x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)); }
VEC_FN v8_f v8_dup_hi(v8_f x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)); }
VEC_FN v8_f v8_swap(v8_f x) { return _mm256_permute_ps(x, 0xb1); }
VEC_FN v8_f v8_neg_even(v8_f x) { return _mm256_xor_ps(x, _mm256_setr_ps(-0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f, 0)); }
VEC_FN float v8_hmax(v8_f x) {
    x = _mm256_max_ps(x, _mm256_permute2f128_ps(x, x, 1));
    x = _mm256_max_ps(x, _mm256_permute_ps(x, 0x4e));
    return _mm256_cvtss_f32(_mm256_max_ps(x, _mm256_permute_ps(x, 0xb1)));
}
VEC_FN float v8_hsum(v8_f x) {
    x = _mm256_add_ps(x, _mm256_permute2f128_ps(x, x, 1));
    x = _mm256_add_ps(x, _mm256_permute_ps(x, 0x4e));
    return _mm256_cvtss_f32(_mm256_add_ps(x, _mm256_permute_ps(x, 0xb1)));
}
/* |a| as the unsigned factor: |code| <= 127 keeps every pair sum below 2^15, so the saturation of maddubs is never reached */
VEC_FN v8_i v8_kcode(v8_i k, int bias) { return bias ? _mm256_xor_si256(k, _mm256_set1_epi8((char)0x80)) : k; }
VEC_FN v8_i v8_dot_start(int bias, int sum) { (void)bias; (void)sum; return _mm256_setzero_si256(); }
VEC_FN v8_i v8_dot(v8_i acc, v8_i k, v8_i a) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(k, a));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#include "vec_portable.h"

#ifdef BW24_HAVE_V16
#define V(name) v16_##name
#define VW 16
#include "vec_math.h"
#undef V
#undef VW
#endif
#ifdef BW24_HAVE_V8
#define V(name) v8_##name
#define VW 8
#include "vec_math.h"
#undef V
#undef VW
#endif
#define V(name) p8_##name
#define VW 8
#include "vec_math.h"
#undef V
#undef VW

#endif
