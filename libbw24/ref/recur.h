/* Reference of the ops that carry state from row to row: CONV and DELTA, one step at a time, and DECAY and SIGMOID (docs/numerics.md §11).
 * Owns the layout of the states; knows no list, no sequence and no log. */
#ifndef BW24_REF_RECUR_H
#define BW24_REF_RECUR_H

#include <stdint.h>

/* columns of a head's state that lie together: [blocks of 32 columns, the last may be narrower][dk][columns of the block] */
enum { BW_DELTA_COLS = 32 };
static inline int bw_delta_cols(int dv, int block) { int left = dv - block * BW_DELTA_COLS; return left < BW_DELTA_COLS ? left : BW_DELTA_COLS; }
static inline int bw_delta_blocks(int dv) { return (dv + BW_DELTA_COLS - 1) / BW_DELTA_COLS; }

/* x[t]: rows of n channels, t = 0 (oldest) .. taps - 1 (the row itself); w: [n][taps]; y: [n] */
void ref_conv(const float *const *x, const float *w, int taps, float *y, int64_t n);

/* One row of one head. from, to: [dk x dv] in the layout above, equal or disjoint; k, q: [dk]; v, out: [dv]. q NULL: the state alone. */
void ref_delta(const float *from, float *to, int dk, int dv, const float *k, const float *q, const float *v, float decay, float beta, float *out);

void ref_decay(const float *x, const float *a, const float *dt, float *y, int64_t n);
void ref_sigmoid(const float *x, float *y, int64_t n);

#endif
