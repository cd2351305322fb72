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
/* of 32 registers: GEMM_ROWS sums (of one tile, or half as many rows of two tiles) and as many p, the weights, the scales; two sums a row
 * for the forms with half-group scales. Two tiles at once read every activation line half as often. */
#define GEMM_TILES 2
#define GEMM_SUMS 12
#define GEMM_ROWS(form) ((form) == BW_S2 || (form) == BW_S2M ? 8 : 12)
#define GEMM_PAIR2(X) X(1) X(2) X(3) X(4)
#define GEMM_PAIR(X) GEMM_PAIR2(X) X(5) X(6)
#define GEMM_LIST2(X) GEMM_PAIR(X) X(7) X(8)
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

/* c + a * b[0], v * b[0] + c[0], and i + the dot products of w with the 4 bytes at q, the broadcast being part of the instruction: the compiler would
 * spend a register and an instruction on each, and both are scarce in gemm (measured: 3 % of a prompt) */
typedef int32_t __attribute__((may_alias)) any32;
INL vf v_fma_at(vf a, const float *b, vf c) {
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
    return c;
}
INL vf v_scale_at(vf v, const float *b, const float *c) {
    __asm__("vfmadd132ps %2%{1to16%}, %1, %0" : "+v"(v) : "v"(v_bcastf(c)), "m"(*b));
    return v;
}
INL vi v_dot_at(vi i, vi w, const int8_t *q) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(i) : "v"(w), "m"(*(const any32 *)(const void *)q));
    return i;
}

#include "linear_tmpl.h"

/* ---- activations: four groups at a time, so that maxima, divisions and sums are worked out side by side ---- */

/* largest lane of each of four vectors of non-negative integers */
INL __m128i max_of_four(const vi *m) {
    vi a = _mm512_max_epi32(_mm512_unpacklo_epi32(m[0], m[1]), _mm512_unpackhi_epi32(m[0], m[1]));
    vi b = _mm512_max_epi32(_mm512_unpacklo_epi32(m[2], m[3]), _mm512_unpackhi_epi32(m[2], m[3]));
    vi c = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    __m256i d = _mm256_max_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

/* bw_act_scale of four maxima */
INL void four_scales(__m128i bits, __m128 *d, __m128 *recip) {
    __mmask8 some = _mm_cmpge_epi32_mask(bits, _mm_set1_epi32(0x0d800000));
    __m128i v = _mm_castps_si128(_mm_mul_ps(_mm_castsi128_ps(bits), _mm_set1_ps(1.0f / 127.0f)));
    v = _mm_maskz_and_epi32(some, _mm_add_epi32(v, _mm_set1_epi32(0xfffff)), _mm_set1_epi32((int)0xfff00000));
    *d = _mm_castsi128_ps(v);
    *recip = _mm_maskz_div_ps(some, _mm_set1_ps(1.0f), *d);
}

/* codes of two groups of 32; no clamp is needed: |x| / scale stays below 127.5 */
INL vi codes_of(const float *x, const float *y, float rx, float ry) {
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    vf r = v_setf(rx), s = v_setf(ry);
    vi a = _mm512_packs_epi32(v_int(v_mul(v_loadf(x), r)), v_int(v_mul(v_loadf(x + 16), r)));
    vi b = _mm512_packs_epi32(v_int(v_mul(v_loadf(y), s)), v_int(v_mul(v_loadf(y + 16), s)));
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
}

/* the second halves of two lines: d; d times the sums of the codes; MAGIC less 128 times the sums; -d * MAGIC_F */
INL vi line_tails(vi codes, __m128 d, int first) {
    const vi take = _mm512_setr_epi32(0, 16, 0, 4, 16, 0, 4, 0, 0, 24, 8, 12, 24, 8, 12, 0);
    vi s = _mm512_dpbusd_epi32(v_zero(), v_set8(1), codes);
    s = v_add32(s, _mm512_shuffle_epi32(s, 0x4e));
    s = v_add32(s, _mm512_shuffle_epi32(s, 0xb1)); /* each quarter: the sum of a half group */
    vi v = _mm512_permutex2var_epi32(s, take, v_add32(s, _mm512_shuffle_i32x4(s, s, 0xb1)));
    const vf ones = _mm512_setr_ps(1, 0, 0, 0, 0, 0, 0, -MAGIC_F, 1, 0, 0, 0, 0, 0, 0, -MAGIC_F);
    vi scales = _mm512_mask_mov_epi32(v_set32(first), 0xff00, v_set32(first + 1));
    vf f = v_mul(_mm512_mask_cvtepi32_ps(ones, 0x0e0e, v), _mm512_permutexvar_ps(scales, _mm512_castps128_ps512(d)));
    return _mm512_mask_sub_epi32(_mm512_castps_si512(f), 0x7070, v_set32(MAGIC), v_sll(v, 7));
}

/* n = 4 or 1 groups; with an Inf, a NaN or 2^100 and more among them 1 is returned and nothing written */
INL int quant_groups(const float *x, int n, act_line *out, int64_t stride) {
    vi m[4], magnitude = v_set32(0x7fffffff);
    UNROLL for (int i = 0; i < 4; i++) {
        const float *g = x + GROUP * (i < n ? i : 0);
        m[i] = _mm512_max_epi32(v_and(v_load(g), magnitude), v_and(v_load(g + 16), magnitude));
    }
    __m128i bits = max_of_four(m);
    if (_mm_cmpge_epi32_mask(bits, _mm_set1_epi32(BW_ACT_LIMIT))) return 1;
    __m128 d, rv;
    float recip[4];
    four_scales(bits, &d, &rv);
    _mm_storeu_ps(recip, rv);
    UNROLL for (int k = 0; k < n; k += 2) {
        int next = k + 1 < n ? k + 1 : k;
        vi q = codes_of(x + GROUP * k, x + GROUP * next, recip[k], recip[next]);
        vi tails = line_tails(q, d, k);
        act_line *a = out + k * stride, *b = out + next * stride;
        v_store(a, _mm512_shuffle_i64x2(q, tails, 0x44));
        if (next > k) v_store(b, _mm512_shuffle_i64x2(q, tails, 0xee));
    }
    return 0;
}

int quant_avx512(const float *x, int64_t groups, act_line *out, int64_t stride) {
    int fault = 0;
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4)
        if (quant_groups(x + g * GROUP, 4, out + g * stride, stride)) fault |= quant_portable(x + g * GROUP, 4, out + g * stride, stride);
    for (; g < groups; g++)
        if (quant_groups(x + g * GROUP, 1, out + g * stride, stride)) fault |= quant_portable(x + g * GROUP, 1, out + g * stride, stride);
    return fault;
}
#else
typedef int linear_avx512_unused;
#endif
