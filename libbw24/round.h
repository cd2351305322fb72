/* A drafter's fields, for rounds. Owns the form; the rules stand in drafter.c. */
#ifndef BW24_ROUND_H
#define BW24_ROUND_H

#include "internal.h"

struct bw24_drafter {
    bw24_seq *trunk;    /* of the first list; borrowed */
    bw24_seq *seq;      /* of the draft list */
    int64_t base, pos;  /* where the drafter began; tokens given. Between verify and commit the trunk holds rows after pos */
    int64_t made;       /* rows of the draft list from true hidden rows; the sequence may hold drafts' rows after them */
    float *last;        /* hidden row of token pos - 1 */
    int n_owed, cap_owed;
    int32_t *owed;      /* tokens of the next true rows, and the hidden row before each */
    float *owed_rows;
    int open;           /* rows in the trunk after pos: 1 + drafts; 0: none */
    float *rows;        /* room for their hidden rows */
    const float *judged; /* their hidden rows: in `rows`, or where the round that is being committed left them */
};

int bw_drafter_owe(bw24_drafter *d, int32_t token, const float *row);
void bw_drafter_paid(bw24_drafter *d, int n); /* the first n owed rows were made */
int bw_drafter_pay(bw24_drafter *d, int left);
int bw_drafter_reset(bw24_drafter *d);
void bw_drafter_forget(bw24_drafter *d); /* most of the owed rows, where many wait because nothing is drafted */

double bw_round_clock(void); /* seconds */
/* round_once.c: drafts and judging step of requests that have begun, in one go. owed: the hidden rows of all owed rows, request
 * by request. tokens and hidden: room for the k + 1 judged rows of each request; the tokens of its drafted + 1 rows come back, one after the other; its hidden
 * rows are the drafter's `judged` until the model's next step.
 * greedy: all take the largest logit as it is. draft_share: of the time, until the judging step began. */
int bw_round_once(bw24_model *m, bw24_round_request *r, int n, bool greedy, const float *owed, int32_t *tokens, float *hidden, double *draft_share);

#endif
