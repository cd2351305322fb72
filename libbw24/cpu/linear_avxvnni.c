/* LINEAR for AVX-VNNI: 8 output rows a register, u8 x s8 dot products of 4 values in one instruction. */
#if defined(__x86_64__)
#include "linear_v256.h"

#define V_SIGNED 0
#define LINEAR_FN linear_avxvnni
/* of 16 registers: the sums, as many p, one weight, the scales */
#define GEMM_TILES 1
#define GEMM_SUMS 6
#define GEMM_ROWS(form) ((form) == BW_S2 || (form) == BW_S2M ? 4 : 6)
#define GEMM_LIST2(X) X(1) X(2) X(3) X(4)
#define GEMM_LIST(X) GEMM_LIST2(X) X(5) X(6)

/* the same instruction has two encodings; a machine with AVX-512 VL and VNNI can run this file through the other one */
#if defined(__AVXVNNI__)
#define v_dot(i, w, q) _mm256_dpbusd_avx_epi32(i, w, q)
#else
#define v_dot(i, w, q) _mm256_dpbusd_epi32(i, w, q)
#endif
/* i + the dot products of w with the 4 bytes at q */
INL vi v_dot_at(vi i, vi w, const int8_t *q) { return v_dot(i, w, v_set32(word_at(q))); }

#include "linear_tmpl.h"
#else
typedef int linear_avxvnni_unused;
#endif
