/* Dispatch of the row ops to the kernels of an instruction set. Knows no mathematics. */
#include "vecops.h"

static const vecops_kernels *kernels_of(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_AVX512VNNI) return &cpu_vecops_avx512;
    if (isa == CPU_AVX2 || isa == CPU_AVXVNNI) return &cpu_vecops_avx2;
#endif
    (void)isa;
    return &cpu_vecops_portable;
}

void cpu_norm(enum cpu_isa isa, const float *x, const float *w, float *y, int64_t n, float eps, int l2) {
    kernels_of(isa)->norm(x, w, y, n, eps, l2);
}

void cpu_rope(enum cpu_isa isa, const float *x, float *y, int heads, int dim, int rot, enum bw_rope_style style, const float *cs) {
    const vecops_kernels *kernel = kernels_of(isa);
    for (int h = 0; h < heads; h++) kernel->rope(x + (int64_t)h * dim, y + (int64_t)h * dim, dim, rot, style, cs);
}

void cpu_glu(enum cpu_isa isa, enum bw_act act, const float *g, const float *u, float *y, int64_t n) {
    kernels_of(isa)->glu(act, g, u, y, n);
}

void cpu_add(enum cpu_isa isa, const float *a, const float *b, float *y, int64_t n) { kernels_of(isa)->add(a, b, y, n); }
void cpu_scale(enum cpu_isa isa, const float *x, float c, float *y, int64_t n) { kernels_of(isa)->scale(x, c, y, n); }
void cpu_gate(enum cpu_isa isa, const float *x, const float *g, float *y, int64_t n, int64_t groups) {
    const vecops_kernels *kernel = kernels_of(isa);
    if (groups == n) { kernel->gate(x, g, y, n); return; }
    for (int64_t i = 0, size = n / groups; i < groups; i++) kernel->scale(x + i * size, bw_sigmoid(g[i]), y + i * size, size);
}
void cpu_softcap(enum cpu_isa isa, const float *x, float cap, float *y, int64_t n) { kernels_of(isa)->softcap(x, cap, y, n); }
void cpu_map(enum cpu_isa isa, enum cpu_fn f, const float *x, float *y, int64_t n) { kernels_of(isa)->map(f, x, y, n); }
