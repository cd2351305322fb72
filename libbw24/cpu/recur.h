/* CONV and DELTA on the CPU: one row of channels, one row of 32 columns of a head's state. Results are those of ref/recur.h bit for bit.
 * Knows no list and no thread. */
#ifndef BW24_CPU_RECUR_H
#define BW24_CPU_RECUR_H

#include <stdbool.h>

#include "../ref/recur.h"
#include "isa.h"

/* channels [c0, c1) of y; w: [taps][n], transposed */
void cpu_conv(enum cpu_isa isa, const float *const *x, const float *w, int taps, float *y, int64_t n, int64_t c0, int64_t c1);

/* from, to: [dk][cols], cols <= BW_DELTA_COLS, equal or disjoint; k, q: [dk]; v, out: [cols]. q NULL: the state alone.
 * far: `to` is not read again soon and goes past the caches, which spares reading its lines first; then cpu_far_done before anyone is told. */
void cpu_delta(enum cpu_isa isa, const float *from, float *to, bool far, int dk, int cols, const float *k, const float *q, const float *v,
               float decay, float beta, float *out);
void cpu_far_done(void);

/* inside of recur: what a kernel file provides */
typedef struct recur_kernels {
    void (*conv)(const float *const *x, const float *w, int taps, float *y, int64_t n, int64_t c0, int64_t c1);
    void (*delta)(const float *from, float *to, bool far, int dk, int cols, const float *k, const float *q, const float *v, float decay, float beta,
                  float *out);
} recur_kernels;
extern const recur_kernels cpu_recur_portable, cpu_recur_avx2, cpu_recur_avx512;

#endif
