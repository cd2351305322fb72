/* What the ATTEND kernels share: arguments, tiles of queries, the visible keys of a row, factors of the merge. Knows no work mapping. */
#ifndef BW24_CU_ATTEND_CUH
#define BW24_CU_ATTEND_CUH

#include "kv.cuh"

namespace bw {

struct AttendArgs {
    KvPlace kv;
    const float *q;   /* [rows][heads][dim] */
    float *y;         /* [rows][heads][dim] */
    float *o;         /* split pieces: [rows][max_pieces][heads][dim] */
    float2 *nl;       /* split pieces: [rows][max_pieces][heads] (n, l) */
    Acts xq;          /* q8_0 K: the queries quantised, [rows][heads * dim] */
    Acts yo;          /* quantised result; q NULL: not wanted */
    int heads, window, want, op, rows;
    int max_pieces;
    int reach;        /* no row sees more pieces; 0: not known */
    float c;          /* scale * log2 e */
    const float *gate; /* GATE of the result, [rows][heads][dim], of k_attend_merge<true> */
    int quant_op;     /* what a fault of the quantised result names */
};

/* pages and visible keys of a row of the step */
struct AttendRow { uint8_t *const *pages; int lo, hi; };
__device__ __forceinline__ AttendRow attend_row(const AttendArgs &a, const StepRows &s, int i) {
    AttendRow r;
    int pos = a.want ? s.want_pos[i] : s.pos[i];
    r.pages = s.pages + (a.want ? s.want_table[a.kv.klass * s.n_want + i] : s.table[a.kv.klass * s.n + i]);
    r.hi = pos + 1;
    r.lo = a.window && pos + 1 > a.window ? pos + 1 - a.window : 0;
    return r;
}

/* a tile: queries q = (row r0 + q / per, head h0 + q % per), rows of one sequence in order */
struct AttendTile { int r0, rows, h0, per; };

/* rows from r0 on, at most `most`, with the page table of r0 */
__device__ __forceinline__ int same_table(const AttendArgs &a, const StepRows &s, int r0, int most) {
    const int *t = a.want ? s.want_table + a.kv.klass * s.n_want : s.table + a.kv.klass * s.n;
    int n = 1;
    while (n < most && r0 + n < a.rows && t[r0 + n] == t[r0]) n++;
    return n;
}
/* no row of this step is in pages before this one: the step's rows of a sequence end with its last row */
__device__ __forceinline__ bool before_step(const AttendArgs &a, const StepRows &s, int r0, int page) {
    int row = a.want ? s.want_row[r0] : r0;
    return page * PIECE + PIECE <= s.pos[row] - row;
}

__device__ __forceinline__ float pow2_factor(float e) { return e < -126.0f ? 0.0f : bw_pow2i((int)e); }
/* order of floats as order of integers; its own inverse */
__device__ __forceinline__ int float_order(int i) { return i ^ ((i >> 31) & 0x7fffffff); }
__device__ __forceinline__ float warp_max(float v) {
    return __int_as_float(float_order(__reduce_max_sync(~0u, float_order(__float_as_int(v)))));
}

} // namespace bw
#endif
