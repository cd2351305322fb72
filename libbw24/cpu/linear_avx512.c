/* LINEAR for AVX-512 with VNNI: 16 output rows a register, u8 x s8 dot products of 4 values in one instruction. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#include "linear_impl.h"

typedef __m512i vi;
typedef __m512 vf;
#define VL 16
#define V_SIGNED 0
#define LINEAR_FN linear_avx512
/* registers: GEMM_ROWS sums and as many p, one weight, the scales; two sums a row for the forms with half-group scales */
#define GEMM_ROWS(form) ((form) == BW_S2 || (form) == BW_S2M ? 8 : 12)
#define GEMM_LIST2(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define GEMM_LIST(X) GEMM_LIST2(X) X(9) X(10) X(11) X(12)


INL vi v_load(const void *p) { return _mm512_loadu_si512(p); }
INL void v_store(void *p, vi v) { _mm512_storeu_si512(p, v); }
INL vi v_zero(void) { return _mm512_setzero_si512(); }
INL vi v_set8(int c) { return _mm512_set1_epi8((char)c); }
INL vi v_set32(int c) { return _mm512_set1_epi32(c); }
INL vi v_bcast(const int32_t *p) { return _mm512_set1_epi32(*p); }
INL vi v_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INL vi v_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INL vi v_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INL vi v_add8(vi a, vi b) { return _mm512_add_epi8(a, b); }
INL vi v_add32(vi a, vi b) { return _mm512_add_epi32(a, b); }
INL vi v_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
#define v_srl(v, n) _mm512_srli_epi32(v, n)
#define v_sll(v, n) _mm512_slli_epi32(v, n)
#define v_sra(v, n) _mm512_srai_epi32(v, n)
INL vi v_sllv(vi a, vi n) { return _mm512_sllv_epi32(a, n); }
INL vi v_shuf(vi table, vi i) { return _mm512_shuffle_epi8(table, i); }
INL vi v_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)p)); }
INL vi v_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
INL vi v_i8(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
typedef __mmask16 vm;
INL vm v_lt(vi a, vi b) { return _mm512_cmplt_epi32_mask(a, b); }
/* a where the mask is clear, else b: v_blend(m, a, b) */
INL vi v_blend(vm m, vi a, vi b) { return _mm512_mask_blend_epi32(m, a, b); }

INL vf v_loadf(const float *p) { return _mm512_loadu_ps(p); }
INL void v_storef(float *p, vf v) { _mm512_storeu_ps(p, v); }
INL vf v_setf(float c) { return _mm512_set1_ps(c); }
INL vf v_bcastf(const float *p) { return _mm512_set1_ps(*p); }
INL vf v_asf(vi v) { return _mm512_castsi512_ps(v); }
INL vf v_float(vi v) { return _mm512_cvtepi32_ps(v); }
INL vi v_int(vf v) { return _mm512_cvtps_epi32(v); }
INL vf v_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INL vf v_half32(vi v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }
INL vf v_bf16(const uint8_t *p) {
    return v_asf(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
INL vf v_neg(vf v) { return v_asf(_mm512_xor_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0x80000000u))); }
INL vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INL vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INL vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INL vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INL vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INL vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INL vf v_rint(vf v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* +0 where x < bound, else y */
INL vf v_zero_below(vf x, vf bound, vf y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), y); }

INL int32_t word_at(const int8_t *q) { int32_t v; __builtin_memcpy(&v, q, 4); return v; }

/* i + the dot products of n words */
INL vi dot_one(vi i, const vi *w, const int8_t *q, int n, int top) {
    (void)top;
    _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) i = _mm512_dpbusd_epi32(i, w[k], _mm512_set1_epi32(word_at(q + 4 * k)));
    return i;
}

/* words [w0, w1) of nr rows; codes are [8 words][16 rows][4] */
INL void dot_rows(vi *i, const uint8_t *codes, const act_line *l, int w0, int w1, int nr, int top) {
    (void)top;
    _Pragma("GCC unroll 8") for (int k = w0; k < w1; k++) {
        vi w = v_load(codes + 64 * k);
        _Pragma("GCC unroll 16") for (int r = 0; r < nr; r++)
            i[r] = _mm512_dpbusd_epi32(i[r], w, _mm512_set1_epi32(word_at(l[r].q + 4 * k)));
    }
}

#include "linear_tmpl.h"

/* one row of groups; amax compared as integers, codes by round to nearest even and clamp */
int quant_avx512(const float *x, int64_t groups, act_line *out, int64_t stride) {
    int fault = 0;
    __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m256i ones = _mm256_set1_epi8(1);
    for (int64_t g = 0; g < groups; g++, x += GROUP, out += stride) {
        __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        __m512i top = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude), _mm512_and_si512(_mm512_castps_si512(b), magnitude));
        uint32_t bits = (uint32_t)_mm512_reduce_max_epi32(top);
        float recip;
        if (bits >= 0x7f800000u) { fault = -1; bits = 0; a = b = _mm512_setzero_ps(); }
        bw_q8_scale(bits, &out->d, &recip);
        __m512 r = _mm512_set1_ps(recip), most = _mm512_set1_ps(127.0f), least = _mm512_set1_ps(-127.0f);
        a = _mm512_max_ps(_mm512_min_ps(v_rint(_mm512_mul_ps(a, r)), most), least);
        b = _mm512_max_ps(_mm512_min_ps(v_rint(_mm512_mul_ps(b, r)), most), least);
        __m128i qa = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)), qb = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(b));
        __m256i q = _mm256_inserti128_si256(_mm256_castsi128_si256(qa), qb, 1);
        _mm256_store_si256((void *)out->q, q);
        __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, q); /* 4 partial sums a half */
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
        int32_t s0 = _mm256_cvtsi256_si32(sums), s1 = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        act_line_sums(out, s0, s1);
    }
    return fault;
}
#else
typedef int linear_avx512_unused;
#endif
