/* What the FOLD ops work on: the sequences of a step and the versions of their state, as the device sees them. Knows no kernel. */
#ifndef BW24_CU_FOLD_CUH
#define BW24_CU_FOLD_CUH

#include <stddef.h>

namespace bw {

/* rows of one sequence, as bw_seq_rows: rows before the last n_log lead from live to mid, those from mid (live, if there is none) to out */
struct FoldSeq {
    const float *live;
    float *mid, *out, *log; /* mid NULL: all rows are logged; log NULL: none is */
    int first, n, n_log;    /* first: index into order */
};
struct FoldRows {
    const FoldSeq *seqs;
    const int *n_seqs;      /* read on the device, for a graph serves any number */
    const int *order;       /* rows grouped by sequence, ascending in each */
    const int *seq_of;      /* of each entry of order */
    int n;
};

/* state and log: offsets in floats inside a version and inside a log, whose rows are log_width apart */
struct ConvArgs {
    const float *x, *w; /* [rows][n]; [n][taps] */
    float *y;
    int n, taps;
    size_t state, log;
};
struct DeltaArgs {
    const float *q, *k, *v, *g, *b; /* rows ldq, ldk, ...  apart */
    float *y;                       /* [rows][heads * dv] */
    int ldq, ldk, ldv, ldg, ldb;
    int heads, kheads, dk, dv, grouped;
    size_t state, log;
    int log_width;
    int *fault, op;
};
/* Values of DELTA's state that lie side by side: a key's in the (at most) 8 columns of column c, keys ascending. A warp's 8 columns and four strands are one line. */
__host__ __device__ inline int delta_width(int dv, int c) { return dv - (c & ~7) < 8 ? dv - (c & ~7) : 8; }
/* where value `key` of column c of a head lies in a version */
__host__ __device__ inline size_t delta_place(const DeltaArgs &a, int head, int key, int c) {
    return a.state + (size_t)head * a.dk * a.dv + (size_t)(c & ~7) * a.dk + key * delta_width(a.dv, c) + (c & 7);
}
/* an op to replay from a log: CONV where delta is false */
struct ReplayOp { bool delta; ConvArgs conv; DeltaArgs d; };

enum { DELTA_MAX_DK = 128, FOLD_THREADS = 128 };
enum { CONV_RUN = 8 }; /* rows of a thread */

} // namespace bw
#endif
