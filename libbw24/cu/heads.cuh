/* Operands of k_heads: what happens to each head of a buffer. Knows no kernel. */
#ifndef BW24_CU_HEADS_CUH
#define BW24_CU_HEADS_CUH

#include "kv.cuh"

namespace bw {

enum HeadAppend { APPEND_NONE, APPEND_K, APPEND_V };
/* a part of each head, norm, then rotation, then append, each where present */
struct HeadChain {
    const float *x; /* [rows][heads][pitch], the head's values from `from` on */
    float *y;       /* the same shape; may be x; NULL: not wanted */
    const float *w; /* [dim] or NULL */
    const float *cs; /* rotation table */
    float eps;
    Acts o;         /* quantised result, [rows][heads * dim]; q NULL: not wanted */
    int pitch, from, copy; /* copy: y is written even without norm or rotation */
    int heads, dim, norm, l2, rot, interleaved, append, op, buf; /* buf: the buffer in the list */
    KvPlace kv;
    size_t place; /* of the part of head 0 in a page, filled in at launch as the next two */
    int stride, format; /* bytes from one head to the next */
};
enum { HEAD_CHAINS = 4 };
struct HeadArgs { HeadChain c[HEAD_CHAINS]; int n, heads; };

} // namespace bw
#endif
