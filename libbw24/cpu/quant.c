/* Activations of LINEAR: int8 lines or f32 columns, filled once for all matrices. Owns their sizes and the portable quantiser. */
#include "linear_impl.h"

#include <string.h>

#include "../canon.h"

size_t cpu_act_bytes(int rows, int64_t cols, int floats) {
    return floats ? (size_t)rows * (size_t)cols * sizeof(float) : (size_t)rows * (size_t)(cols / GROUP) * sizeof(act_line);
}

void cpu_act_init(cpu_act *a, void *mem, int rows, int64_t cols, int floats) {
    a->mem = mem;
    a->rows = rows;
    a->cols = cols;
    a->floats = floats;
}

int quant_portable(const float *x, int64_t groups, act_line *out, int64_t stride) {
    int fault = 0;
    for (int64_t g = 0; g < groups; g++, x += GROUP, out += stride) {
        uint32_t top = 0;
        int32_t sum[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            bw_f32 v = {.f = x[i]};
            v.u &= 0x7fffffffu;
            if (v.u > top) top = v.u;
        }
        int bad = top >= BW_ACT_LIMIT;
        float recip;
        bw_act_scale(bad ? 0 : top, &out->d, &recip);
        for (int i = 0; i < GROUP; i++) {
            out->q[i] = bad ? 0 : (int8_t)bw_act_code(x[i], recip);
            sum[i >> 4] += out->q[i];
        }
        act_line_sums(out, sum[0], sum[1]);
        if (bad) fault = -1;
    }
    return fault;
}

int cpu_act_fill(enum cpu_isa isa, cpu_act *a, const float *x, int64_t ldx, int r0, int r1) {
    int fault = 0;
    int64_t stride;
    quant_fn *quant = quant_portable;
#if defined(__x86_64__)
    if (isa == CPU_AVX512VNNI) quant = quant_avx512;
    else if (isa == CPU_AVX2 || isa == CPU_AVXVNNI) quant = quant_avx2;
#else
    (void)isa;
#endif
    for (int r = r0; r < r1; r++) {
        if (a->floats) {
            float *out = act_float_at(a, r, &stride);
            for (int64_t c = 0; c < a->cols; c++) out[c * stride] = x[r * ldx + c];
        } else {
            act_line *out = act_line_at(a, r, &stride);
            fault |= quant(x + r * ldx, a->cols / GROUP, out, stride);
        }
    }
    return fault;
}
