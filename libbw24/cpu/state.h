/* What backend "cpu" keeps per context, model and list. Private to cpu/backend.c and cpu/forward.c. */
#ifndef BW24_CPU_STATE_H
#define BW24_CPU_STATE_H

#include "../internal.h"
#include "../spill.h"
#include "attend.h"
#include "linear.h"
#include "pool.h"

/* per context */
typedef struct cpu_ctx { enum cpu_isa isa; cpu_pool *pool; } cpu_ctx;

/* one rotation that some ROPE ops share: rows' tables are computed once a step */
typedef struct cpu_rope_cfg {
    int rot;
    double base, scale;
    const bw_tensor *ff;
    double *inv;  /* [rot/2] inverse frequency / factor */
    float *table; /* [max_rows][rot] cosines, sines */
} cpu_rope_cfg;

/* active experts [from, to) of a spilled layer are computed together; landed: they are in memory */
typedef struct cpu_wave { int from, to; int64_t pairs; bool landed; } cpu_wave;

/* one step of the plan with everything resolved */
typedef struct cpu_step {
    cpu_mat *mats;      /* [n_lin], biases bound; EXPERTS: gate, up, down of each expert, scales bound; PERHEAD: one a head */
    bool quant, floats; /* which forms of the input its matrices read */
    int64_t tiles;      /* of all matrices; of one when a GLU joins two */
    float *conv;        /* CONV: the weights [taps][channels] */
    int n_active;       /* EXPERTS: experts with rows in the pass in hand; a step's own, because late threads still ask for it */
    int phase;          /* first of its phases in cpu_model.phases */
    int spill;          /* EXPERTS: layer of the spill, -1: all in memory */
    bool away;          /* another device computes the experts of the set and sums the slots (host.h) */
    int hits, n_waves;  /* of the pass in hand: active experts in RAM, all in one wave; waves */
    int lift;           /* an expert outside the set with as many pairs is left to the other device as well; 0: none is */
    const uint8_t *lifts; /* [experts] where it is not NULL: 1 where it is, instead */
    int n_own, n_lift;  /* active experts that are computed here, the first ones, their pairs in the first places; behind them those that are lifted */
    int64_t own_pairs;
    cpu_wave *waves;
} cpu_step;

/* what a waiting thread fetches: lines `at` of streams of `len` bytes, which step `step` reads */
enum { CPU_AHEAD_STREAMS = 16 };
typedef struct cpu_ahead {
    const uint8_t *p[CPU_AHEAD_STREAMS];
    int n, step;
    size_t at, len, spent;
    bool on, stopped;   /* on: in a pass of few rows over several threads */
} cpu_ahead;

/* per thread */
typedef struct cpu_thread {
    cpu_ahead ahead;
    void *work;         /* CPU_LINEAR_WORK and cpu_attend_work */
    uint8_t *tile;      /* rows of one tile of a spilled matrix, while it is packed in place */
    float *row;         /* one row of the widest buffer */
    float *state;       /* one block of columns of the largest DELTA state; NULL where the list has none */
    cpu_act act_q, act_f; /* one-row activations of the widest input */
    uint8_t **pages;
    int cap_pages;
} cpu_thread;

/* one phase of a step: own ranges taken (bit t: thread t's), small ranges claimed, items done */
typedef struct cpu_phase { _Alignas(64) atomic_ullong taken; atomic_llong next, done; } cpu_phase;
static inline void cpu_phase_reset(cpu_phase *p) {
    atomic_store_explicit(&p->taken, 0, memory_order_relaxed);
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
}
enum { CPU_OWNERS = 64 }; /* threads that have a range of their own */
/* Items of each thread's own range: 7/8 of an even share; the rest goes in one small range a thread, which evens out the finish. More and smaller
 * ranges cost more than they even out: 8 % of a step at twice the rest in four times the ranges (two threads, nothing else running). */
static inline int64_t cpu_share(int64_t n, int threads) { return threads > 1 ? 7 * n / (8 * threads) : n; }
enum { CPU_CONV_COLS = 512 }; /* channels of an item of CONV */

enum { CPU_MOE_PHASES = 6, CPU_WAVE_PHASES = 5 }; /* spilled: 4, and 5 for each wave */
/* scratch of EXPERTS, one for all layers. A pair is (row, slot); pairs are sorted by expert, the order in a row's own sum stays the slots' */
typedef struct cpu_moe {
    int max_experts, max_top;
    int64_t max_in, max_ff, max_out;
    int *start, *count; /* [experts] first place of each expert's pairs, and how many they are */
    int *place;         /* [rows x top] pair -> place in the sorted order */
    int *pair;          /* place -> pair */
    int *active;        /* experts with pairs, ascending */
    float *h;           /* [places][ff] act(gate x) * up x */
    float *d;           /* [places][out] down h */
    size_t max_tile;    /* bytes of 16 rows of the widest spilled matrix */
    int64_t wave_begun; /* clock; written by the phase between waves alone */
    atomic_llong unpacked; /* clock of the last matrix of the wave in hand */
    void *in_q, *in_f, *mid_q, *mid_f; /* activations of the pairs: inputs, and h; NULL where no matrix reads that form */
} cpu_moe;

/* per model */
typedef struct cpu_weights {
    uint8_t *arena;     /* all packed weights; huge pages where the system grants them */
    size_t arena_bytes, arena_used;
    cpu_mat **spilled;  /* [layers of the spill] matrices of their steps */
    int n_spilled;
    uint8_t *set;       /* experts of the set (spill.h), `set_bytes` of them */
    size_t set_bytes;
} cpu_weights;

/* per list: bw_list.priv */
typedef struct cpu_model {
    cpu_rope_cfg *ropes;
    int n_ropes;
    int *rope_of;       /* [ops of the list] index into ropes or -1 */
    cpu_step *steps;
    cpu_thread *threads;
    void *act_q_mem, *act_f_mem; /* shared activations, max_rows x widest input */
    uint8_t *head_acts; /* activations of PERHEAD, head by head, head_bytes in all */
    size_t head_bytes;
    float *acc;         /* pieces of a long ATTEND shared by threads */
    size_t acc_floats;
    int64_t *bounds;    /* visible keys of the step's rows: lo [classes][all, want][max_rows], then hi [all, want][max_rows] */
    int *groups;        /* starts of row groups that may be worked on apart: no two share a KV page */
    int n_groups;
    cpu_phase *phases;  /* rope tables, logits check, then those of each step */
    int n_phases;
    cpu_moe moe;
    atomic_int fault;   /* first op that met Inf or NaN, plus one */
    atomic_int cancelled;
    atomic_int memory_fault;
} cpu_model;

/* Packs a matrix in place from the rows at raw, which end at or behind the packed form's end; `tile` holds 16 rows */
void cpu_unpack_spilled(cpu_mat *mat, bool pack, uint8_t *base, uint8_t *raw, uint8_t *tile);
size_t cpu_spill_room(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols);
int cpu_warm(bw24_model *m, int layer, const int *experts, int n);
extern const struct bw_spill_set cpu_set;
/* the waves of experts of the set and in RAM, and those of the others */
static inline int cpu_max_waves(int experts) { return 2 + (experts + BW_SPILL_WAVE - 1) / BW_SPILL_WAVE; }
/* bytes of one head's activations of PERHEAD, a multiple of 64 */
static inline size_t cpu_head_bytes(const bw24_model *m, const bw_op *op) {
    return (cpu_act_bytes(m->max_rows, op->w[0]->ne[0], op->w[0]->type->form == BW_FLOAT) + 63) & ~(size_t)63;
}
int cpu_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits);
int cpu_replay(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to); /* bw_backend.replay */

int cpu_predict(bw24_model *m, bw24_memory *out); /* predict.c */

#endif
