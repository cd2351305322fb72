/* What the two sampling modes share: logits after bias and penalties become integer masses of the tokens that the filters leave.
 * Owns the form of a distribution; knows no draw. */
#ifndef BW24_SAMPLE_H
#define BW24_SAMPLE_H

#include "internal.h"

typedef struct bw_mass { float l; int32_t id; uint64_t w; } bw_mass;

/* where a distribution comes from: logits [n], row r of token ids[r] (-1: none; NULL: r) of a vocabulary of n_vocab; mask: packed bits of
 * allowed ids */
typedef struct bw_dist_in {
    const float *logits;
    int32_t n;
    const int32_t *ids;
    int32_t n_vocab;
    const bw24_sampler *p;
    const int32_t *history;
    int32_t n_history;
    const uint32_t *mask;
} bw_dist_in;

/* variates of one (seed, position): those of the token draw have the token's id, the others stand above every id */
enum bw_stream { BW_STREAM_TOKEN = 0, BW_STREAM_DRAFT = 1, BW_STREAM_ACCEPT = 2, BW_STREAM_RESIDUAL = 3 };

/* argument checks, for the entry `who` */
int bw_dist_check(const bw_dist_in *in, const char *who);
/* the survivors: *out [*m], owned by the caller; at temperature 0 the largest logit alone. The largest has mass 2^40 */
int bw_dist_make(const bw_dist_in *in, bw_mass **out, int32_t *m);
/* the survivor with the least E / w, ties to the lowest id; -1 where no mass is left */
int32_t bw_dist_race(const bw_mass *c, int32_t m, uint64_t seed, uint64_t position, enum bw_stream stream);

#endif
