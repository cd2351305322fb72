/* LINEAR for many activation rows at once: the program of dot.h for each of them, bit for bit, with every weight row decoded once. Owns the
 * blocking over activation rows; knows no op, no tensor scale and no thread. */
#ifndef BW24_REF_LINEAR_H
#define BW24_REF_LINEAR_H

#include "dot.h"

enum { REF_BLOCK = 16 }; /* activation rows that advance together */

/* n activation rows in blocks of REF_BLOCK (absent rows are zeros), transposed so that the rows of a block lie side by side */
typedef struct ref_acts {
    int64_t cols;
    int n, floats;
    float *x;          /* [blocks][cols][REF_BLOCK]: values, or int8 codes as floats */
    float *d;          /* [blocks][cols / 32][REF_BLOCK] scales; NULL with floats */
    float *alpha;      /* [blocks][cols / 32][2][REF_BLOCK] scale times the sum of the codes of each half, exact */
    float *w;          /* scratch of ref_linear_rows: decoded weight rows */
} ref_acts;

/* x: [n][cols]. floats: keep f32 values, else quantise (cols a multiple of 32). 0, 1 out of memory, -1 Inf, NaN or 2^100 and more in a quantised row.
 * ref_acts_free in every case. */
int ref_acts_init(ref_acts *a, const float *x, int n, int64_t cols, int floats);
void ref_acts_free(ref_acts *a);

/* y[r * ldy + j] for all r < n and weight rows j in [j0, j1); w is row 0 */
void ref_linear_rows(ref_acts *a, const bw_type_info *t, const uint8_t *w, int64_t j0, int64_t j1, float *y, int64_t ldy);

#endif
