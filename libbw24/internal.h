/* Structs shared inside the library. Owns the nouns of docs/design.md (tensor, list, plan, row, sequence, backend) as C types;
 * knows no file format, no model by name and no instruction set. */
#ifndef BW24_INTERNAL_H
#define BW24_INTERNAL_H

#ifdef __cplusplus /* the CUDA backend is C++: the same layout under the same names */
#include <atomic>
using std::atomic_int;
using std::atomic_llong;
extern "C" {
#else
#include <stdatomic.h>
#endif
#include <stdbool.h>
#include <stdint.h>

#include "bw24.h"
#include "formats/formats.h"
#include "kv.h"

enum { BW_MAX_BUF = 256, BW_MAX_KV = 512, BW_OP_BUFS = 6, BW_OP_W = 6, BW_OP_I = 5, BW_OP_F = 2, BW_CONV_TAPS = 8 };

/* ---- errors (abi.c): set the thread's message and return the code */
int bw_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define BW_TRY(expr) do { int bw_rc_ = (expr); if (bw_rc_) return bw_rc_; } while (0)

/* ---- tensors */
typedef struct bw_tensor {
    char *name;
    const bw_type_info *type;
    int n_dims;
    int64_t ne[4];       /* ne[0] = columns (fastest), ne[1] = rows, ne[2] = experts */
    const uint8_t *data; /* raw rows as in the file; borrowed while the model lives; NULL where the tensor is spilled (spill.h) */
    struct bw_place *places; /* spilled: where its n_places matrices lie, owned */
    int n_places;
    uint64_t bytes;
    bool mapped;         /* data is a read-only file mapping: consumed pages may be given back to the system */
    float scale;         /* multiplies products with this tensor; 1 where the file has none */
    bool used;           /* some list names it */
    bool linear;         /* some LINEAR or EXPERTS reads it as matrices, so a backend may pack it */
    int parts;           /* the matrices it holds, of equally many consecutive rows: 1, or experts, or twice the experts where gate and up are fused */
    void *packed;        /* the backend's own form, owned */
    uint64_t packed_bytes;
    float *dense;        /* small float tensors (norm weights, biases) decoded to f32, owned; NULL otherwise */
} bw_tensor;

/* ---- list */
enum bw_opcode {
#define OP(name, operands, state) BW_OP_##name,
#include "ops.def"
#undef OP
    BW_N_OPS
};
enum bw_state_class { BW_NONE, BW_APPEND, BW_FOLD };
enum bw_rows_class { BW_ROWS_UNSET, BW_ROWS_ALL, BW_ROWS_WANT }; /* which rows of the step a buffer holds */

typedef struct bw_buf { char *name; int64_t width; enum bw_rows_class rows; } bw_buf;

typedef struct bw_kv {
    char *name;
    bw_kv_desc desc;
    int64_t window;  /* 0: full attention; else keys older than `window` positions are never read */
    bool borrowed;   /* the cache of this name of the model's first list, read only */
    int klass;       /* 0 full, 1.. window classes: which page table of a sequence holds it */
    size_t offset;   /* of this cache inside a page of its class */
} bw_kv;

/* what an op of class FOLD carries from row to row, and what it logs to be able to go back (state.c) */
typedef struct bw_state {
    char *name;
    int64_t floats;
    int op;             /* index of the op that owns it, -1 while there is none */
    size_t offset;      /* in floats, inside a sequence's state */
    int64_t log_width;  /* floats logged a row */
    size_t log_offset;  /* in floats, of its [BW_LOG_ROWS][log_width] inside a log */
} bw_state;

typedef struct bw_op {
    enum bw_opcode code;
    int buf[BW_OP_BUFS];        /* indices into list->bufs in operand order, -1 absent */
    bw_tensor *w[BW_OP_W];
    int kv, state;              /* -1 absent */
    int i[BW_OP_I];
    double f[BW_OP_F];
    int experts;                /* EXPERTS: how many its tensors hold */
    char *where;                /* file:line of the append, for messages */
} bw_op;

typedef struct bw_list {
    char *role;
    int n_bufs, n_kvs, n_states, n_ops;
    bw_buf bufs[BW_MAX_BUF];
    bw_kv *kvs;
    bw_state *states;
    size_t state_floats, log_floats; /* of one sequence */
    bw_op *ops;
    int logits;                 /* buffer of the result */
    int hidden;                 /* buffer of the rows handed on, those of the picked rows; -1: none */
    bool takes_hidden;          /* an op HIDDEN reads rows of the caller's */
    bool borrows;               /* its KV caches are the first list's: it appends nothing and attends to the keys before its rows' position */
    int32_t *ids;               /* token of each column of the logits, -1: none; owned; NULL: column i is token i */
    unsigned ids_set;           /* how often they were set, for backends that keep a copy */
    int index;                  /* in model->lists */
    int64_t known;              /* run.c: tokens below it are known to the list; 0: not looked at yet */
    void *priv;                 /* the backend's */
    float **mem;                /* each buffer's [max_rows][width], owned; NULL before prepare; logits go to the caller's memory */
    struct bw_plan *plan;
    char *text, *plan_text;     /* printed forms, made on demand */
} bw_list;

/* ---- plan (lower.c): what a backend runs; steps cover the list's ops in order */
enum bw_step_kind {
    BW_STEP_OP,      /* one op alone, split over threads by the backend */
    BW_STEP_LINEARS, /* LINEARs over one input, with the NORM before and the GLU or ADD after folded in */
    BW_STEP_ROWS     /* a run of row-local ops (NORM, ROPE, KV_APPEND, ADD, ...): each row goes through all of them at once */
};
typedef struct bw_step {
    enum bw_step_kind kind;
    int first, n;               /* ops covered: [first, first + n) */
    int norm;                   /* op index of the folded NORM or -1 */
    int lin0, n_lin;            /* the LINEAR ops */
    int glu, add;               /* op index of the folded GLU / ADD or -1 */
} bw_step;
typedef struct bw_plan { int n_steps; bw_step *steps; } bw_plan;
int bw_lower(bw_list *list, bool fuse, bw_plan **out);
void bw_plan_free(bw_plan *p);

/* ---- sequences and steps */
enum { BW_PAGE_TOKENS = 64, BW_MAX_CLASS = 4 };
typedef struct bw_page { atomic_int refs; uint8_t *data; } bw_page;
/* One version of a sequence's FOLD state, or a log of inputs. Versions are never changed once a step has ended: a step reads one and writes another,
 * so forks share them and a failed step leaves nothing behind. */
typedef struct bw_fold { atomic_int refs; struct bw_fold *next; float *data; } bw_fold;
enum { BW_LOG_ROWS = 32 }; /* rows of the last step that can be taken back one by one */

struct bw24_seq {
    bw24_model *model;
    bw_list *list;              /* its rows run through this list; it has pages of this list's classes only */
    bw24_seq *source;           /* of a list that borrows: the sequence whose keys its rows see and at whose position they stand; else NULL */
    int64_t pos;
    bw_fold *live;              /* state at pos; NULL: zeros */
    bw_fold *saved, *log;       /* state at log_from and the inputs of the log_n rows since; NULL: none */
    int64_t log_from;
    int log_n;
    int n_pages;                /* page slots in use per class: ceil(pos / 64) */
    int cap_pages;
    bw_page **pages[BW_MAX_CLASS]; /* NULL where a window page was released */
    uint8_t **data[BW_MAX_CLASS];  /* the same pages' bytes, for kernels */
    int64_t floor[BW_MAX_CLASS];   /* first position still stored, per class */
};

/* consecutive rows of one sequence */
typedef struct bw_run { bw24_seq *seq; int first, n; } bw_run;
typedef struct bw_rowset {
    int n;
    int32_t *row;     /* index in the step */
    int64_t *pos;
    int n_runs;
    bw_run *runs;     /* first, n: indices into this set */
} bw_rowset;
/* the rows of one sequence in a step, and its state: rows before the last n_log lead from live to mid, those from mid (live, if there is none) to out */
typedef struct bw_seq_rows {
    bw24_seq *seq;
    int first, n;     /* indices into bw_batch.order */
    int n_log;
    bw_fold *live, *mid, *out, *log;
} bw_seq_rows;
typedef struct bw_batch {
    int n;
    int n_seqs;           /* 0 where the list has no FOLD state */
    bw_seq_rows *seqs;
    int32_t *order;       /* rows grouped by sequence, ascending in each */
    const int32_t *token;
    const float *hidden;  /* [n][width of HIDDEN], NULL where the list has no such op */
    bool hands;           /* bw_backend.hidden is asked for the wanted rows after this pass */
    bw_rowset all, want;
} bw_batch;

/* one draw: the token, and the candidates that the filters left, as a number and a mass (temperature 0: 1 and 2^40) */
typedef struct bw_drawn { int32_t token, kept; uint64_t mass; } bw_drawn;
/* A round in one go: draft steps of one list, then the judging step of the first. Row i of a step belongs to request of[i] and stands after depth[i]
 * drafts of it: its token is the last of them (depth 0: batch.token), and where `from` is set it takes the hidden row that the wanted row from[i] of
 * the step before handed on. Wanted row w of draft step s gives draft s of its request. The host reads nothing before the last step has run. */
typedef struct bw_round_step {
    const bw24_row *rows;
    int n;
    const float *hidden;        /* [n][width] of the first step of a list with HIDDEN, else NULL */
    const int32_t *of, *depth, *from;
    bw_batch batch;             /* run.c */
} bw_round_step;
typedef struct bw_round {
    int n, n_steps;             /* requests; steps, the judging one last */
    bw_round_step steps[BW24_MAX_DRAFTS + 1];
    const bw24_pick *picks;     /* [n], checked, with histories up to the newest token; NULL: the largest logit as it is */
    const int64_t *pos;         /* [n]: where the newest token stands */
    int32_t (*drafts)[BW24_MAX_DRAFTS]; /* results. [n]: -1 where a column stands for no token */
    int32_t *tokens;            /* of the judged rows */
    float *hidden;              /* [judged rows][width]; a backend may name rows of its own instead, good until its next step */
    double draft_share;         /* of the round's time until the judging step began */
} bw_round;

/* sample.c: arguments of a pick, and the draw of one row at a position */
uint64_t bw_state_bytes(const bw_list *l); /* predict.c: of one sequence */
int bw_check_pick(const bw24_pick *p, int32_t n_vocab);
int bw_draw_row(const float *logits, int32_t n_vocab, const bw24_pick *p, uint64_t position, bw_drawn *out);
/* run.c: bw24_step_sample with all of its result */
int bw_step_drawn(bw24_model *m, const bw24_row *rows, int32_t n, const bw24_pick *picks, bw_drawn *out);

/* ---- models and backends */
typedef struct bw_backend {
    const char *name;
    size_t (*kv_page_bytes)(const bw_kv_desc *d);
    bool (*kv_supported)(const bw_kv_desc *d);
    /* where KV pages live; all NULL: in host memory (state.c). page_new gives zeroed bytes of the class, NULL when there is no room */
    uint8_t *(*page_new)(bw24_model *m, int klass);
    void (*page_free)(bw24_model *m, int klass, uint8_t *data);
    void (*page_copy)(bw24_model *m, int klass, uint8_t *dst, const uint8_t *src);
    /* where versions of FOLD state and logs live; all NULL: in host memory (state.c). fold_new: NULL and a message where there is no room */
    float *(*fold_new)(bw24_model *m, size_t bytes);
    void (*fold_free)(float *data);
    int (*fold_clear)(bw24_model *m, float *data, size_t bytes);
    int (*open)(bw24_ctx *ctx);
    void (*close)(bw24_ctx *ctx);
    int (*prepare_tensor)(bw24_model *m, bw_tensor *t); /* pack one tensor */
    int (*prepare_list)(bw24_model *m, bw_list *l);     /* work buffers, plan */
    /* packs rows [first, first + n) of a tensor again; NULL: not possible */
    int (*repack)(bw24_model *m, bw_tensor *t, int64_t first, int64_t n);
    void (*free_tensor)(bw_tensor *t);
    void (*free_model)(bw24_model *m);
    /* FOLD state after n rows of a log: from -> to, both of one sequence */
    int (*replay)(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to);
    int (*forward)(bw24_model *m, bw_list *l, const bw_batch *b, float *logits);
    /* the same, but the likeliest token of each wanted row instead of its logits; NULL: run.c takes them from the logits */
    int (*greedy)(bw24_model *m, bw_list *l, const bw_batch *b, int32_t *tokens);
    /* the same, but a token drawn from each wanted row; NULL: run.c draws from the logits. The picks are checked. */
    int (*draw)(bw24_model *m, bw_list *l, const bw_batch *b, const bw24_pick *picks, bw_drawn *out);
    /* bw24_predict: weights, work, fixed, host and device; kv and state are set */
    int (*predict)(bw24_model *m, bw24_memory *out);
    /* a round's steps one after the other, none waiting for the host; NULL: round.c drives each. Batches are made, pages and state reserved. */
    int (*round)(bw24_model *m, bw_round *r);
    int (*probe)(bw24_ctx *c, bool all, bw24_rates *out); /* NULL: memory by the context's threads alone. all: not only memory */
    size_t (*page_slab)(const bw24_model *m, int klass); /* pages that are taken at once; NULL: one */
    uint64_t (*device_used)(const bw24_model *m);        /* bytes of a card's memory taken since the context was opened; NULL: no card */
    /* runs several lists of a model, hands on the rows of `hidden`, and takes logits NULL: ops that write them are left out */
    bool roles;
    bool borrows; /* runs lists that read another list's KV caches */
    /* the first n rows of `hidden` of the pass just run; NULL: they are in bw_list.mem */
    int (*hidden)(bw24_model *m, bw_list *l, int n, float *out);
    /* runs EXPERTS whose tensors are spilled; reads experts of one layer ahead of use. NULL: every expert is in memory */
    int (*warm)(bw24_model *m, int layer, const int *experts, int n);
    const struct bw_spill_set *set; /* spill.h: experts in memory of the backend's own; NULL: none */
} bw_backend;
extern const bw_backend bw_backend_ref, bw_backend_cpu;
#ifdef BW24_CUDA
extern const bw_backend bw_backend_cuda;
int bw_cuda_query(int index, bw24_device_facts *out); /* bw24_device_query of a build with CUDA */
#endif

struct bw24_ctx {
    const bw_backend *backend;
    int threads;
    int device_index; /* of several devices of one kind */
    bool fuse, repack, float_act, plan_only, fast_prefill;
    atomic_int cancel;
    char isa_name[16];
    char device[96];
    void *priv;       /* the backend's */
};

enum { BW_MAX_ROLES = 4 };
struct bw24_model {
    bw24_ctx *ctx;
    int max_rows;
    int64_t max_context;
    const bw_type_info *kv_type[2][2]; /* [full, window][K, V] */
    int n_tensors, cap_tensors;
    bw_tensor **tensors;
    int n_lists;
    bw_list *lists[BW_MAX_ROLES];
    int n_classes;
    int64_t class_window[BW_MAX_CLASS];
    size_t class_page_bytes[BW_MAX_CLASS];
    int class_list[BW_MAX_CLASS]; /* the list whose caches it holds */
    uint64_t work_bytes;
    atomic_llong kv_bytes;  /* KV pages, FOLD states and logs in use */
    bw_fold *spare[2];      /* states, logs: given back, to be used again */
    int32_t vocab;
    bool prepared;
    /* scratch of run.c for the step in hand */
    void *step_mem;
    size_t step_mem_bytes;
    struct bw_spill *spill; /* NULL: every tensor is in memory */
    void *round_mem; /* of round.c for the round in hand */
    size_t round_mem_bytes;
    void *priv;           /* the backend's */
};

bw_tensor *bw_find_tensor(bw24_model *m, const char *name);
bw_list *bw_find_list(bw24_model *m, const char *role);
void bw_list_free(bw_list *l);
int bw_list_parse(bw24_model *m, const char *role, const char *text, bw_list **out);
int bw_list_print(const bw_list *l, char **out);
int bw_plan_print(const bw_list *l, char **out);
const char *bw_op_name(enum bw_opcode c);
void bw_op_label(const bw_list *l, int op, char *out, size_t size); /* "op 137 LINEAR blk.4.ffn_down.weight (qwen3.py:58)" */

/* state.c: make pages for positions [pos, pos + n) writable; undone by truncate */
int bw_seq_reserve(bw24_seq *s, int64_t n);
void bw_seq_trim_windows(bw24_seq *s);
/* FOLD state of a step: begin takes the versions that the step writes, end keeps them (ok) or gives them back */
int bw_seq_fold_begin(bw_seq_rows *r);
void bw_seq_fold_end(bw_seq_rows *r, bool ok);
void bw_fold_free_spares(bw24_model *m);
/* the numeric program's floating-point environment: round to nearest, subnormals kept (abi.c) */
typedef struct bw_fpenv { uint64_t saved; } bw_fpenv;
bw_fpenv bw_fpenv_enter(void);
void bw_fpenv_leave(bw_fpenv e);
/* run.c: one step, all or nothing. hidden: [n][width] for a list with HIDDEN, else NULL. Results go where they are wanted: logits or the likeliest
 * tokens (by the list's ids) of the wanted rows, their hidden rows */
typedef struct bw_outputs { float *logits; int32_t *tokens; float *hidden; const bw24_pick *picks; bw_drawn *drawn; } bw_outputs;
int bw_run_rows(bw24_model *m, const bw24_row *rows, int32_t n, const float *hidden, bw_outputs out);
int bw_run_round(bw24_model *m, bw_round *r); /* all steps or none; rows of drafts have any token */
int bw_round_by_steps(bw24_model *m, bw_round *r); /* round_once.c: bw_backend.round that waits after each step */
/* sample.c: bw24_sample over logits [n] of the tokens ids[0 .. n) below vocab (-1: none); ids NULL: token i is column i */
int bw_sample(const float *logits, int32_t n, const int32_t *ids, int32_t vocab, const bw24_sampler *p, const int32_t *history, int32_t n_history,
              uint64_t position, const uint32_t *mask, int32_t *token, float *logprob);
/* helpers of op execution */
static inline int64_t bw_key_hi(const bw_list *l, int64_t pos) { return l->borrows ? pos : pos + 1; } /* keys seen end before it */
static inline int64_t bw_key_lo(const bw_kv *kv, int64_t pos) { return kv->window && pos + 1 > kv->window ? pos + 1 - kv->window : 0; }
static inline const bw_rowset *bw_rows_of(const bw_list *l, const bw_batch *b, int buf) {
    return l->bufs[buf].rows == BW_ROWS_WANT ? &b->want : &b->all;
}
void *bw_work_alloc(size_t bytes); /* page-aligned, without huge pages; free() gives it back */
float *bw_dense(bw_tensor *t); /* f32 view of a small tensor; NULL and message on failure */
/* rows of one of the matrices that a tensor holds, and bytes of the raw form of one */
static inline int64_t bw_part_rows(const bw_tensor *t) { return t->ne[1] * t->ne[2] / t->parts; }
static inline int64_t bw_part_bytes(const bw_tensor *t) { return bw_part_rows(t) * bw_row_bytes(t->type, t->ne[0]); }
/* DELTA: the key head of value head h */
static inline int bw_delta_key(const bw_op *op, int h) { return op->i[2] ? h / (op->i[0] / op->i[1]) : h % op->i[1]; }
/* EXPERTS: matrix m (0 gate, 1 up, 2 down) of expert e is part *part of the tensor returned; *scale its per-expert scale tensor or NULL */
enum { BW_EXP_GATE, BW_EXP_UP, BW_EXP_DOWN };
static inline bw_tensor *bw_expert_part(const bw_op *op, int m, int e, int *part, const bw_tensor **scale) {
    bool fused = !op->w[BW_EXP_UP] && m != BW_EXP_DOWN;
    *scale = op->w[3 + (fused ? BW_EXP_GATE : m)];
    *part = fused ? 2 * e + m : e;
    return op->w[fused ? BW_EXP_GATE : m];
}

/* growable text (list.c) */
typedef struct bw_text { char *s; size_t n, cap; } bw_text;
int bw_textf(bw_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif
#endif
