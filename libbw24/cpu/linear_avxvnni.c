/* LINEAR for AVX-VNNI: 8 output rows a register, u8 x s8 dot products of 4 values in one instruction. */
#if defined(__x86_64__)
#include "linear_v256.h"

#define V_SIGNED 0
#define LINEAR_FN linear_avxvnni
/* of 16 registers: the sums, as many p, one weight, the scales */
#define GEMM_ROWS(form) ((form) == BW_S2 || (form) == BW_S2M ? 4 : 6)
#define GEMM_LIST2(X) X(1) X(2) X(3) X(4)
#define GEMM_LIST(X) GEMM_LIST2(X) X(5) X(6)

/* the same instruction has two encodings; a machine with AVX-512 VL and VNNI can run this file through the other one */
#if defined(__AVXVNNI__)
#define v_dot(i, w, q) _mm256_dpbusd_avx_epi32(i, w, q)
#else
#define v_dot(i, w, q) _mm256_dpbusd_epi32(i, w, q)
#endif

/* i + the dot products of n words */
INL vi dot_one(vi i, const vi *w, const int8_t *q, int n, int top) {
    (void)top;
    _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) i = v_dot(i, w[k], _mm256_set1_epi32(word_at(q + 4 * k)));
    return i;
}

/* words [w0, w1) of nr rows; codes are [8 words][16 rows][4] */
INL void dot_rows(vi *i, const uint8_t *codes, const act_line *l, int w0, int w1, int nr, int top) {
    (void)top;
    _Pragma("GCC unroll 8") for (int k = w0; k < w1; k++) {
        vi w = v_load(codes + 64 * k);
        _Pragma("GCC unroll 16") for (int r = 0; r < nr; r++) i[r] = v_dot(i[r], w, _mm256_set1_epi32(word_at(l[r].q + 4 * k)));
    }
}

#include "linear_tmpl.h"
#else
typedef int linear_avxvnni_unused;
#endif
