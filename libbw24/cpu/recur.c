/* Dispatch of CONV and DELTA to the kernels of an instruction set. Knows no mathematics. */
#include "recur.h"

static const recur_kernels *kernels_of(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_AVX512VNNI) return &cpu_recur_avx512;
    if (isa == CPU_AVX2 || isa == CPU_AVXVNNI) return &cpu_recur_avx2;
#endif
    (void)isa;
    return &cpu_recur_portable;
}

void cpu_conv(enum cpu_isa isa, const float *const *x, const float *w, int taps, float *y, int64_t n, int64_t c0, int64_t c1) {
    kernels_of(isa)->conv(x, w, taps, y, n, c0, c1);
}

void cpu_delta(enum cpu_isa isa, const float *from, float *to, bool far, int dk, int cols, const float *k, const float *q, const float *v,
               float decay, float beta, float *out) {
    kernels_of(isa)->delta(from, to, far, dk, cols, k, q, v, decay, beta, out);
}

void cpu_far_done(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}
