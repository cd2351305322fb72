/* The row ops NORM, ROPE, GLU, ADD, SCALE (and EMBED's factor), GATE and SOFTCAP on the CPU: one row a call, y may be the same row as any input.
 * Results are those of ref/elementwise.h bit for bit. Knows no list and no thread. */
#ifndef BW24_CPU_VECOPS_H
#define BW24_CPU_VECOPS_H

#include "../ref/elementwise.h"
#include "isa.h"

/* w: [n] or NULL; l2: the sum of squares instead of its mean */
void cpu_norm(enum cpu_isa isa, const float *x, const float *w, float *y, int64_t n, float eps, int l2);
/* x, y: [heads][dim], the same row or disjoint; cs: [rot] from bw_rope_table; rot even, <= dim; values from rot on are copied */
void cpu_rope(enum cpu_isa isa, const float *x, float *y, int heads, int dim, int rot, enum bw_rope_style style, const float *cs);
void cpu_glu(enum cpu_isa isa, enum bw_act act, const float *g, const float *u, float *y, int64_t n);
void cpu_add(enum cpu_isa isa, const float *a, const float *b, float *y, int64_t n);
void cpu_scale(enum cpu_isa isa, const float *x, float c, float *y, int64_t n);
/* g: [groups], one value for n / groups consecutive values */
void cpu_gate(enum cpu_isa isa, const float *x, const float *g, float *y, int64_t n, int64_t groups);
void cpu_softcap(enum cpu_isa isa, const float *x, float cap, float *y, int64_t n);

/* y = f(x), the functions of canon.h */
enum cpu_fn { CPU_FN_EXP, CPU_FN_EXP2, CPU_FN_SIGMOID, CPU_FN_SILU, CPU_FN_GELU, CPU_FN_TANH };
void cpu_map(enum cpu_isa isa, enum cpu_fn f, const float *x, float *y, int64_t n);

/* inside of vecops: what a kernel file provides */
typedef struct vecops_kernels {
    void (*norm)(const float *x, const float *w, float *y, int64_t n, float eps, int l2);
    void (*rope)(const float *x, float *y, int dim, int rot, enum bw_rope_style style, const float *cs); /* one head */
    void (*glu)(enum bw_act act, const float *g, const float *u, float *y, int64_t n);
    void (*add)(const float *a, const float *b, float *y, int64_t n);
    void (*scale)(const float *x, float c, float *y, int64_t n);
    void (*softcap)(const float *x, float cap, float *y, int64_t n);
    void (*gate)(const float *x, const float *g, float *y, int64_t n);
    void (*map)(enum cpu_fn f, const float *x, float *y, int64_t n);
} vecops_kernels;
extern const vecops_kernels cpu_vecops_portable, cpu_vecops_avx2, cpu_vecops_avx512;

#endif
