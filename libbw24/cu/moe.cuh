/* Operands of EXPERTS. Knows no kernel. */
#ifndef BW24_CU_MOE_CUH
#define BW24_CU_MOE_CUH

#include "op_linear.cuh"
#include "rows.cuh"

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

/* NORM of rows, the router's LINEAR over float weights and perhaps one more over the same rows, ROUTE */
struct RouterArgs {
    const float *x, *w;   /* [rows][cols]; the norm's weights */
    const float *own;     /* weights of the norm whose rows the experts read, NULL: w */
    float *h;             /* the experts' rows */
    Acts o;               /* the same quantised */
    int cols, l2, norm_op; /* norm_op: what a fault of the quantisation names */
    float eps, factor;    /* factor: of the router's rows */
    LinearPart part[2];   /* the router; the shared expert's gate, n = 0: none */
    int type[2];          /* FloatType */
    RowOp route;
    int *count;           /* [rows] blocks that are done, 0 between launches; NULL: EXPERTS makes the ROUTE */
    int *fault;
};

/* products of pairs (row, slot), each with the expert that the route gives it; slot `top`, where there is one, is the shared expert's */
struct ExpertArgs {
    ExpertMatrix m[2];    /* gate and up, or one */
    ExpertMatrix shared[2];
    int slots;            /* pairs a row: top, or one more */
    const float *route;   /* [rows][2 top]: weights, then ids; NULL: slot s has expert s (PERHEAD) */
    const int *order;     /* the pairs to be computed, by expert, or NULL: all as they come */
    int n_mats, top, per_pair; /* per_pair: x has a row a pair, else a row a row */
    Acts x;
    const float *xf;      /* float weights: x as floats */
    float *y;             /* [pairs][m[0].rows]: the product, or act(gate) * up where there are two; NULL: not wanted */
    Acts yo;              /* the same quantised; q NULL: not wanted */
    int gelu, type[2];    /* FloatType of float weights */
    int *fault, op;
    int depth;            /* tasks of a warp that are on their way at once */
    uint32_t by_pairs;    /* one_reciprocal of the pairs of segments */
    RouteChoice choice;
};

__device__ __forceinline__ const uint8_t *expert_at(const ExpertMatrix &m, int id) { return m.w + (size_t)(m.at ? __ldg(m.at + id) : (uint32_t)id) * m.stride; }

/* y[row] = sum over the slots, ascending, of w_s * (down h_s); then + the shared expert's, which its gate scales where there is one; sum = res + y */
struct DownArgs {
    ExpertMatrix m;
    const float *route;
    int top;
    Acts x;               /* [pairs] */
    float *y;             /* [rows][m.rows]; NULL: not wanted */
    ExpertMatrix shared;
    int slots;            /* as above */
    const float *gate;    /* [rows], before the sigmoid, or NULL */
    const float *res;     /* [rows][m.rows] or NULL */
    float *sum;           /* may be res */
    int early;            /* route, gate and res are complete when the kernel before this one has begun */
    int depth;            /* as above */
    uint32_t by_pairs;
    RouteChoice choice;   /* early only */
    int *fault;
};
enum { EXPERT_SLOTS = 32 };
/* whether one launch sums the downs of so many slots of a row */
inline bool downs_fit(int slots, int segs) { return slots <= EXPERT_SLOTS && slots * ((segs + 1) / 2) <= 64; }

/* Many rows: products of the pairs of an expert in tiles. x has a row a row of the step, which pair order[i] names (gather), or row i for pair order[i]. */
enum { EXPERT_TILE = 128 };
struct ExpertTile { int expert, first, n, at; }; /* pairs order[first .. first + n); at: the blocks of 32 rows that the tiles before it have */
/* rows that a tile of n pairs has where they are packed for the GEMM of warp groups */
__host__ __device__ inline int tile_height(int n) { return (n + 31) & ~31; }
struct ExpertGemmArgs {
    ExpertMatrix m[2];
    int n_mats, top, gather, gelu;
    const int *order, *n_tiles;
    int most;             /* tiles at most, whatever n_tiles says */
    const ExpertTile *tiles;
    Acts x;
    Acts yo;              /* gate and up: act(gate) * up, quantised */
    float *y;             /* one matrix: the product */
    int *fault, op;
    const uint8_t *rows;  /* warp groups: x's rows by tile (op_gemm_codes.cuh), and their factors */
    const float *factor;
    int halves;           /* set at launch (op_experts_gemm.cuh) */
};

/* kernels of one unit type; a file experts_*.cu each, one for both generic types. pairs, rows: how many */
struct Queue;
struct LinearKernels;
struct ExpertKernels {
    const LinearKernels *linear; /* the unit's */
    void (*product)(Queue &q, const ExpertArgs &a, int pairs);
    void (*down)(Queue &q, const DownArgs &a, int rows);
    bool (*gemm_fits)(const Queue &q);
    void (*gemm)(Queue &q, const ExpertGemmArgs &a);
};
extern const ExpertKernels experts_q4_0, experts_q4_k, experts_nvfp4, experts_q8_0, experts_q6_k, experts_iq4_xs, experts_int8, experts_int8h;

} // namespace bw
#endif
