/* Operands of EXPERTS. Knows no kernel. */
#ifndef BW24_CU_MOE_CUH
#define BW24_CU_MOE_CUH

#include "device.cuh"

namespace bw {

/* the same matrix of every expert */
struct ExpertMatrix {
    const uint8_t *w;     /* expert 0's: units [2 * blocks][segs], or float rows */
    size_t stride;        /* bytes to the next expert's */
    const uint32_t *at;   /* where experts lie, in units of stride, or NULL: one behind the other */
    const float *scales;  /* one an expert, or NULL: scale */
    float scale;
    int rows, cols, segs, blocks;
};

/* products of pairs (row, slot), each with the expert that the route gives it */
struct ExpertArgs {
    ExpertMatrix m[2];    /* gate and up, or one */
    const float *route;   /* [rows][2 top]: weights, then ids */
    const int *order;     /* the pairs to be computed, by expert, or NULL: all as they come */
    int n_mats, top, per_pair; /* per_pair: x has a row a pair, else a row a row */
    Acts x;
    const float *xf;      /* float weights: x as floats */
    float *y;             /* [pairs][m[0].rows]: the product, or act(gate) * up where there are two; NULL: not wanted */
    Acts yo;              /* the same quantised; q NULL: not wanted */
    int gelu, type[2];    /* FloatType of float weights */
    int *fault, op;
};

__device__ __forceinline__ const uint8_t *expert_at(const ExpertMatrix &m, int id) { return m.w + (size_t)(m.at ? __ldg(m.at + id) : (uint32_t)id) * m.stride; }

/* y[row] = sum over the slots, ascending, of w_s * (down h_s) */
struct DownArgs {
    ExpertMatrix m;
    const float *route;
    int top;
    Acts x;               /* [pairs] */
    float *y;             /* [rows][m.rows] */
};

/* kernels of one unit type; one file experts_*.cu each. pairs, rows: how many */
struct Queue;
struct LinearKernels;
struct ExpertKernels {
    const LinearKernels *linear; /* the unit's */
    void (*product)(Queue &q, const ExpertArgs &a, int pairs);
    void (*down)(Queue &q, const DownArgs &a, int rows);
};
extern const ExpertKernels experts_q4_0, experts_q4_k, experts_nvfp4, experts_q8_0, experts_q6_k, experts_iq4_xs, experts_int8, experts_int8h;

} // namespace bw
#endif
