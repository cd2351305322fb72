/* What the ATTEND kernels share: arguments, the visible keys of a row, factors of the merge. Knows no work mapping. */
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
    float c;          /* scale * log2 e */
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

__device__ __forceinline__ float pow2_factor(float e) { return e < -126.0f ? 0.0f : bw_pow2i((int)e); }

} // namespace bw
#endif
