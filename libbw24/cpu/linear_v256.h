/* The 8-lane operations of linear_tmpl.h, shared by the AVX2 and AVX-VNNI files. Knows vectors only. */
#include <immintrin.h>
#include <stdint.h>

#include "linear_impl.h"

typedef __m256i vi;
typedef __m256 vf;
#define VL 8

INL vi v_load(const void *p) { return _mm256_loadu_si256(p); }
INL void v_store(void *p, vi v) { _mm256_storeu_si256(p, v); }
INL vi v_zero(void) { return _mm256_setzero_si256(); }
INL vi v_set8(int c) { return _mm256_set1_epi8((char)c); }
INL vi v_set32(int c) { return _mm256_set1_epi32(c); }
INL vi v_bcast(const int32_t *p) { return _mm256_set1_epi32(*p); }
INL vi v_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INL vi v_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INL vi v_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
INL vi v_add8(vi a, vi b) { return _mm256_add_epi8(a, b); }
INL vi v_add32(vi a, vi b) { return _mm256_add_epi32(a, b); }
INL vi v_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
#define v_srl(v, n) _mm256_srli_epi32(v, n)
#define v_sll(v, n) _mm256_slli_epi32(v, n)
#define v_sra(v, n) _mm256_srai_epi32(v, n)
INL vi v_sllv(vi a, vi n) { return _mm256_sllv_epi32(a, n); }
INL vi v_shuf(vi table, vi i) { return _mm256_shuffle_epi8(table, i); }
INL vi v_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)p)); }
INL vi v_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
INL vi v_i8(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)); }
typedef __m256i vm;
INL vm v_lt(vi a, vi b) { return _mm256_cmpgt_epi32(b, a); }
/* b where the mask is set, else a */
INL vi v_blend(vm m, vi a, vi b) { return _mm256_blendv_epi8(a, b, m); }

INL vf v_loadf(const float *p) { return _mm256_loadu_ps(p); }
INL void v_storef(float *p, vf v) { _mm256_storeu_ps(p, v); }
INL vf v_setf(float c) { return _mm256_set1_ps(c); }
INL vf v_bcastf(const float *p) { return _mm256_broadcast_ss(p); }
INL vf v_asf(vi v) { return _mm256_castsi256_ps(v); }
INL vf v_float(vi v) { return _mm256_cvtepi32_ps(v); }
INL vi v_int(vf v) { return _mm256_cvtps_epi32(v); }
INL vf v_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
/* f16 bits in the low half of each lane */
INL vf v_half32(vi v) {
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
INL vf v_bf16(const uint8_t *p) {
    return v_asf(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
INL vf v_neg(vf v) { return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f)); }
INL vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INL vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INL vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INL vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INL vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INL vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* c + a * b[0] */
INL vf v_fma_at(vf a, const float *b, vf c) { return _mm256_fmadd_ps(a, _mm256_broadcast_ss(b), c); }
/* v * b[0] + c[0] */
INL vf v_scale_at(vf v, const float *b, const float *c) { return _mm256_fmadd_ps(v, _mm256_broadcast_ss(b), _mm256_broadcast_ss(c)); }
INL vf v_rint(vf v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* +0 where x < bound, else y */
INL vf v_zero_below(vf x, vf bound, vf y) { return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_NLT_UQ), y); }

INL int32_t word_at(const int8_t *q) { int32_t v; __builtin_memcpy(&v, q, 4); return v; }
