/* LINEAR on the CPU: choice of the instruction set and the decoding of raw rows, common to all kernels. */
#include "linear_impl.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
/* CPUID leaf 7.1, EAX bit 4; the operating system saves ymm wherever avx2 is reported */
static int cpu_has_avxvnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

int cpu_isa_supported(enum cpu_isa isa) {
    if (isa == CPU_PORTABLE) return 1;
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == CPU_AVX2) return avx2;
    if (isa == CPU_AVXVNNI) return avx2 && cpu_has_avxvnni();
    if (isa == CPU_AVX512VNNI)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#endif
    return 0;
}

enum cpu_isa cpu_isa_best(void) {
    static const enum cpu_isa order[] = {CPU_AVX512VNNI, CPU_AVXVNNI, CPU_AVX2};
    for (int i = 0; i < 3; i++)
        if (cpu_isa_supported(order[i])) return order[i];
    return CPU_PORTABLE;
}

const char *cpu_isa_name(enum cpu_isa isa) {
    static const char *const names[] = {"portable", "avx2", "avxvnni", "avx512vnni"};
    return names[isa];
}

/* one group of one row into column r of the panel; flip = 0x80 in every byte adds 128 to every code */
static void put_group(enum bw_form form, const bw_group *v, uint32_t flip, int r, uint8_t *codes, float *scales) {
    for (int w = 0; w < 8; w++) {
        uint32_t word;
        memcpy(&word, v->q + 4 * w, 4);
        word ^= flip;
        memcpy(codes + 64 * w + 4 * r, &word, 4);
    }
    scales[r] = v->s[0];
    if (form == BW_S2 || form == BW_S2M) scales[CPU_TILE + r] = v->s[1];
    if (form == BW_S1M) scales[CPU_TILE + r] = v->m[0];
    if (form == BW_S2M) {
        scales[2 * CPU_TILE + r] = v->m[0];
        scales[3 * CPU_TILE + r] = v->m[1];
    }
}

void linear_raw_panel(const cpu_mat *m, int64_t t, int64_t g0, int64_t n, int zero, uint8_t *codes, float *scales) {
    const bw_type_info *ty = m->type;
    const int ns = ty->form == BW_S1 ? 1 : ty->form == BW_S2M ? 4 : 2;
    int64_t row_bytes = bw_row_bytes(ty, m->cols), per = ty->block / GROUP;
    for (int r = 0; r < CPU_TILE; r++) {
        int64_t row = t * CPU_TILE + r;
        const uint8_t *src = row < m->rows ? m->raw + row * row_bytes : NULL;
        for (int64_t g = 0; g < n; g++) {
            bw_group v;
            if (src) ty->group(src + (g0 + g) / per * ty->bytes, (int)((g0 + g) % per), &v);
            else memset(&v, 0, sizeof v);
            put_group(ty->form, &v, zero ? 0x80808080u : 0, r, codes + g * 512, scales + g * ns * CPU_TILE);
        }
    }
}

void linear_raw_floats(const cpu_mat *m, int64_t t, int64_t c0, int64_t n, float *panel) {
    const bw_type_info *ty = m->type;
    int64_t row_bytes = bw_row_bytes(ty, m->cols);
    for (int r = 0; r < CPU_TILE; r++) {
        int64_t row = t * CPU_TILE + r;
        for (int64_t c = 0; c < n; c++) {
            float v = 0.0f;
            if (row < m->rows) ty->decode(m->raw + row * row_bytes + (c0 + c) * ty->bytes, &v);
            panel[c * CPU_TILE + r] = v;
        }
    }
}

void cpu_linear(enum cpu_isa isa, const cpu_mat *m, const cpu_act *a, int r0, int r1, float *y, int64_t ldy, int64_t t0, int64_t t1,
                const cpu_epi *e, void *work) {
    linear_fn *fn = linear_portable;
#if defined(__x86_64__)
    if (isa == CPU_AVX512VNNI) fn = linear_avx512;
    if (isa == CPU_AVXVNNI) fn = linear_avxvnni;
    if (isa == CPU_AVX2) fn = linear_avx2;
#else
    (void)isa;
#endif
    fn(m, a, r0, r1, y, ldy, t0, t1, e, work);
}
