/* What the sampling kernels read and write, as host and device see it. */
#ifndef BW24_CU_SAMPLE_ARGS_H
#define BW24_CU_SAMPLE_ARGS_H

#include <stdint.h>

namespace bw {

typedef unsigned long long u64;
enum { SAMPLE_BINS = 2048, SAMPLE_LIST = 1024, RACE_CHUNK = 2048, RACE_THREADS = 256, BOUND_THREADS = 1024 };

/* where a token stands that an earlier kernel of the same round gives, in bytes from the round's block (round.cu): the low half of a best key, the id
 * of the column in it, or a SampleState */
enum ValueKind { VALUE_BEST, VALUE_COLUMN, VALUE_STATE };
struct RoundValue { unsigned at; int kind; };
enum { VALUES_A_REQUEST = 16 };

/* one id whose logit changes: its biases, then the penalties for `count` occurrences (0: none) */
struct SampleEdit { int id, count, bias_from, bias_n; };
/* how one row is drawn */
struct SampleRow {
    u64 seed, pos;
    float k;                 /* log2 e / T; 0: temperature 0 */
    float top_p, min_p;
    int top_k;               /* 0: off */
    float rep, presence, freq;
    int edit_from, edit_n;
    int drafts_from, drafts_n; /* values that belong to the history as well; 0: none, or no penalty looks at them */
};
/* what the kernels find for a row; the host reads token, kept and mass */
struct SampleState { int token, kept; u64 mass; u64 bound, fail; unsigned ticket; unsigned unused; };
struct RaceBest { double key; int id; int unused; };

struct SampleArgs {
    float *logits;           /* [rows][vocab] */
    const u64 *best;         /* largest (ordered logit, ~id) of each row */
    const SampleRow *rows;
    const SampleEdit *edits;
    const float *bias;
    SampleState *state;
    RaceBest *slots;         /* [rows][chunks] */
    int vocab;
    const int *ids;          /* the token of each column, -1: none; NULL: column i is token i. `best` holds tokens where it is set */
    const int *column;       /* the column of each token, -1: none; NULL where ids is */
    const uint8_t *block;    /* what values point into */
    const RoundValue *values;
};

} // namespace bw
#endif
