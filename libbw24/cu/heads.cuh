/* Operands of k_heads: what happens to each head of a buffer. Knows no kernel. */
#ifndef BW24_CU_HEADS_CUH
#define BW24_CU_HEADS_CUH

#include "kv.cuh"

namespace bw {

enum HeadAppend { APPEND_NONE, APPEND_K, APPEND_V };
/* norm, then rotation, then append, each where present */
struct HeadChain {
    const float *x; /* [rows][heads][dim] */
    float *y;       /* the same shape; may be x */
    const float *w; /* [dim] or NULL */
    const float *cs; /* rotation table */
    float eps;
    Acts o;         /* quantised result, [rows][heads * dim]; q NULL: not wanted */
    int heads, dim, norm, l2, rot, interleaved, append, op, buf; /* buf: the buffer in the list */
    KvPlace kv;
};
struct HeadArgs { HeadChain c[3]; int n, heads; };

} // namespace bw
#endif
