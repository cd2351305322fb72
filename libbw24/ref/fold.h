/* The FOLD ops of backend "ref" over whole lists. Knows no page and no thread. */
#ifndef BW24_REF_FOLD_H
#define BW24_REF_FOLD_H

#include "../internal.h"

/* where a buffer's row i lies */
typedef struct fold_rows { float *(*row)(const void *arg, int buf, int64_t i); const void *arg; } fold_rows;

/* CONV or DELTA over the rows of one sequence. 0, or BW24_E_NUMERIC */
int ref_fold(const bw_list *l, const bw_op *op, const bw_seq_rows *s, const int32_t *order, const fold_rows *r);
/* bw_backend.replay */
int ref_replay(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to);

#endif
