/* Operands of a chain of row ops (op_chain.cuh). Knows no kernel. */
#ifndef BW24_CU_CHAIN_CUH
#define BW24_CU_CHAIN_CUH

#include "device.cuh"
#include "rows.cuh"

namespace bw {

enum { CHAIN_PASSES = 4, CHAIN_WARPS = 24 };

/* value = a or the value so far; NORM; + b or the value before a was read; * c. y gets it. */
struct ChainPass {
    const float *a;         /* [rows][n] or NULL: the value so far */
    const float *w;         /* weights of NORM [n] or NULL */
    const float *b;         /* [rows][n] or NULL: the value before the pass */
    float *y;               /* [rows][n]; NULL: nobody reads it */
    const float *c;         /* factor of SCALE, or NULL: f */
    float f, eps;
    int norm, l2, add, scale;
};
struct ChainArgs {
    ChainPass pass[CHAIN_PASSES];
    Acts o;             /* of the last value; o.q NULL: not wanted */
    const float *still; /* n floats that nothing writes */
    int n, n_passes, turn; /* turn: 0 goes through the instructions once before the dependency wait, 1 does not */
    int *fault, quant_op;
};

} // namespace bw
#endif
