/* bw24: the public C ABI. Owns every name that crosses the library's edge; refuses C++ types, callbacks, globals and printing.
 *
 * Status: functions return 0 or a negative BW24_E_* code; text comes from bw24_last_error() (thread-local, one line).
 * Ownership: constructors take the output pointer first; free functions accept NULL. Strings returned belong to the object they came from.
 * Threads: one thread per context at a time; bw24_cancel may be called from any thread. The library never prints, never exits, reads no
 * environment. Every entry sets round-to-nearest and clears flush-to-zero for its work and restores the caller's settings.
 * Structs that may grow begin with `size`: set it to sizeof.
 * The text between the two BW24_CFFI marks is parsed by the Python layer: plain declarations only, no preprocessor. */
#ifndef BW24_H
#define BW24_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BW24_API __attribute__((visibility("default")))
#else
#define BW24_API
#endif

#define BW24_ABI 1

#pragma GCC visibility push(default)
/* BW24_CFFI_BEGIN */
enum bw24_status {
    BW24_OK = 0,
    BW24_E_ARG = -1,         /* an argument is outside its documented range */
    BW24_E_MEMORY = -2,      /* out of memory; the message says how much was asked for */
    BW24_E_UNSUPPORTED = -3, /* an op, type or backend that this build does not have */
    BW24_E_MISSING = -4,     /* a tensor, buffer or role that the list names does not exist */
    BW24_E_SHAPE = -5,       /* a tensor or buffer does not fit its op */
    BW24_E_CONTEXT = -6,     /* the sequence would pass the context length */
    BW24_E_NUMERIC = -7,     /* Inf or NaN where the numeric program forbids it */
    BW24_E_IO = -8,
    BW24_E_DEVICE = -9,      /* the device failed; the context is poisoned */
    BW24_E_CANCELLED = -10,
    BW24_E_SYNTAX = -11      /* the list text is malformed */
};

typedef struct bw24_ctx bw24_ctx;     /* a device and its threads */
typedef struct bw24_model bw24_model; /* tensors and lists; mutable state lives in sequences */
typedef struct bw24_seq bw24_seq;     /* one timeline of one list: position and KV pages */
typedef struct bw24_drafter bw24_drafter; /* a draft list's timeline beside a sequence of the first list */

typedef struct bw24_open_params {
    uint32_t size;
    int32_t threads;      /* 0: the physical cores this process may use */
    const char *backend;  /* "ref", "cpu", "cuda" or "cuda:N" */
    const char *isa;      /* NULL: the best this machine has; "portable", "avx2", "avxvnni", "avx512vnni" force one */
    int32_t fuse;         /* 0: the plan keeps one step an op (rollback seam) */
    int32_t repack;       /* 0: weights stay in the file's layout (rollback seam, slow) */
    int32_t float_act;    /* 1: float activations (diagnostic; backend "ref" only) */
    int32_t plan_only;    /* 1: for bw24_predict alone: starts no thread and needs no device */
    int32_t fast_prefill; /* 1: numeric class `fast` for steps of many rows, approximate (backend "cuda" only) */
    int32_t reserved;
} bw24_open_params;

typedef struct bw24_model_params {
    uint32_t size;
    int32_t max_rows;     /* most rows of one step, 1..4096 */
    int64_t max_context;  /* most tokens of one sequence */
    const char *kv_full;  /* "f32", "f16", "q8_0", "q5_1", "e4m3", or "K/V" of two of them: KV format of full-attention layers */
    const char *kv_window;/* the same for sliding-window layers */
} bw24_model_params;

/* one token of one sequence; rows of the same sequence come in order and append at its position */
typedef struct bw24_row {
    bw24_seq *seq;
    int32_t token;
    int32_t want;         /* 1: this row's logits are wanted */
} bw24_row;

typedef struct bw24_sampler {
    uint32_t size;
    float temperature;        /* 0: argmax, ties to the lowest id */
    int32_t top_k;            /* 0: off */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1: off; over the history given */
    float presence_penalty;
    float frequency_penalty;
    uint64_t seed;
    int32_t n_bias;
    const int32_t *bias_ids;
    const float *bias_values;
} bw24_sampler;

/* how to draw from one row's logits */
typedef struct bw24_pick {
    const bw24_sampler *params;
    const int32_t *history;   /* ids that the penalties look at, NULL where they are off */
    int32_t n_history;
    int32_t reserved;
} bw24_pick;
/* one reply of bw24_decode */
typedef struct bw24_decode_request {
    uint32_t size;
    int32_t token;              /* the newest token; it is not in the sequence yet */
    bw24_seq *seq;
    bw24_drafter *drafter;      /* that of `seq`, or NULL; it follows without drafting */
    bw24_pick pick;             /* as bw24_step_sample; its history ends with `token` */
    const int32_t *stop;        /* ids that end the call */
    int32_t *tokens;            /* result: room for `most` tokens */
    int32_t n_stop;
    int32_t us;                 /* result, in the first request: microseconds that the steps took */
} bw24_decode_request;
/* one reply in a round (bw24_round) */
enum { BW24_MAX_DRAFTS = 16 };
typedef struct bw24_round_request {
    uint32_t size;
    int32_t token;              /* the newest token: it stands at the drafter's position and is not in the sequence yet */
    bw24_drafter *drafter;
    const bw24_sampler *sampler;
    const int32_t *history;     /* the tokens up to and with `token`; NULL where no penalty looks at them */
    int32_t n_history;
    int32_t k;                  /* drafts wanted, 0..BW24_MAX_DRAFTS */
    const int32_t *stop;        /* ids after which nothing is accepted */
    int32_t n_stop;
    const int32_t *ids;         /* tokens of the draft list's columns for this reply, as bw24_list_ids; NULL: the list's own */
    int32_t n_ids;
    int32_t reject;             /* 1: rejection sampling instead of the shared race */
    float synthetic;            /* above 0: drafts are accepted with this probability whatever they are, for measuring; the tokens mean nothing */
    int32_t drafted, accepted;  /* results: drafts made, those that were the next tokens */
    int32_t drafts[16];
    int32_t tokens[17];         /* the next accepted + 1 tokens; all but the last are in the sequence now */
} bw24_round_request;

typedef struct bw24_round_times { double draft, verify, commit; } bw24_round_times; /* seconds */
/* what the rounds of one reply gave (bw24_rounds) */
enum { BW24_MAX_ROUNDS = 16 };
typedef struct bw24_rounds_log {
    uint32_t size;
    int32_t rounds, n_tokens;
    int32_t drafted[16], accepted[16]; /* round by round */
    int32_t tokens[272];               /* of all rounds; all but the last are in the sequence now */
} bw24_rounds_log;

typedef struct bw24_memory {
    uint32_t size;
    uint32_t reserved;
    uint64_t weights;         /* bytes held for weights (packed copies, not the caller's mapping) */
    uint64_t work;            /* activation buffers for max_rows */
    uint64_t kv;              /* KV pages now in use */
    uint64_t kv_page_full;    /* bytes of one page of 64 tokens, all full-attention layers */
    uint64_t kv_page_window;  /* the same of the sliding-window layers */
    uint64_t state;           /* recurrent state of one sequence: three versions of it and two logs of the rows that it can go back over */
    /* bw24_predict alone fills these, but for `device`: */
    uint64_t fixed;           /* what does not depend on the model: staging buffers, code, graphs */
    uint64_t host;            /* all of it that is in the host's memory */
    uint64_t device;          /* all of it on the card; bw24_model_memory: bytes taken there since the context was opened, 0 without a card */
    uint64_t experts;         /* of `weights` on a card, the matrices of EXPERTS ops */
} bw24_memory;

enum bw24_device_state {
    BW24_DEVICE_NONE = 0,     /* there is no such device */
    BW24_DEVICE_USABLE = 1,
    BW24_DEVICE_UNUSABLE = 2  /* there is one, and this library cannot use it */
};
typedef struct bw24_device_facts {
    uint32_t size;
    int32_t state;            /* BW24_DEVICE_* */
    int32_t count;            /* devices that the driver shows */
    int32_t capability;       /* 10 * major + minor of its compute capability */
    int32_t driver;           /* CUDA version of the driver, 1000 * major + 10 * minor; 0: none */
    int32_t reserved;
    uint64_t total, free;     /* bytes of its memory */
    char name[96];
    char reason[240];         /* one line: why it is not usable */
} bw24_device_facts;
enum bw24_policy {
    BW24_POLICY_LRU = 0,
    BW24_POLICY_SLRU = 1,     /* a share of the budget for each layer, of it four fifths for experts used again */
    BW24_POLICY_FROZEN = 2    /* what bw24_spill_warm loaded stays; the rest of the budget is LRU */
};

typedef struct bw24_spill_params {
    uint32_t size;
    int32_t policy;
    uint64_t ram;             /* budget of the experts held in RAM, bytes; raised to the least that works (bw24_spill_stats.floor) */
    int32_t readers;          /* threads that read, 1..64; 0: 8, or 16 where a file has a mirror */
    int32_t buffered;         /* 1: no O_DIRECT */
    int32_t trace;            /* uses of experts kept for bw24_spill_trace, 0: none */
    int32_t reserved;
    uint64_t vram;            /* bytes of a card's memory for experts that bw24_spill_card puts there. Backend cpu keeps them in memory of their own, for tests */
    const char *root;         /* NULL: this system; else a folder that holds proc and sys/fs/cgroup, for the memory limits */
} bw24_spill_params;

/* where one matrix of a spilled tensor lies; file -1: the file has no such expert, and a router that chooses it fails the step */
typedef struct bw24_place { int32_t file, type; uint64_t offset; } bw24_place;

typedef struct bw24_spill_counts {
    uint32_t size;
    int32_t direct;           /* 1: all files are read with O_DIRECT; 0: at least one is not */
    int32_t layers, mirrors;  /* mirrors: files whose second copy is in use */
    uint64_t budget, floor, limit;  /* asked for; the least that works; what memory pressure leaves at the moment */
    uint64_t used, peak;      /* bytes of experts in RAM */
    uint64_t bank;            /* bytes of all experts as they would lie in RAM */
    uint64_t visits, visit_hits;    /* (row, slot) pairs routed; those whose expert was in RAM */
    uint64_t wanted, hits;    /* experts asked for, once a step and layer; those in RAM */
    uint64_t bytes_read, mirror_bytes, reads;
    uint64_t short_reads, errors, fallbacks, evictions, backoffs, trace_lost;
    uint64_t wait_ns, compute_ns;   /* of EXPERTS: waiting for reads and unpacking; computing on the processor */
    uint64_t vram, vram_used, vram_experts; /* the card's set: its room, bytes and experts in it */
    uint64_t vram_visits;           /* of `visits`, those whose expert was on the card */
    uint64_t card_ns;               /* waiting for the card in a layer whose experts are divided */
    uint64_t lifted, swaps;         /* of `visit_hits`, those that the card took over the bus in a narrow step; experts that took another's place in the set */
} bw24_spill_counts;

typedef struct bw24_type_facts { const char *name; int32_t id, block, bytes, can_encode; } bw24_type_facts;
typedef struct bw24_op_facts { const char *name, *operands, *state; } bw24_op_facts;

/* what a device can do; 0 where it has no such thing */
typedef struct bw24_rates {
    uint32_t size;
    uint32_t reserved;
    double read_gbps, copy_gbps;             /* its memory; copied bytes count twice */
    double to_device_gbps, from_device_gbps; /* over the bus, from and to pinned host memory */
    double launch_us, graph_node_us, pdl_node_us, barrier_us; /* an empty kernel launched, in a graph, with programmatic edges; all blocks meeting */
    double int8_tops, bf16_tflops;           /* matrix units by mma.sync; a multiply and an add are two */
} bw24_rates;

typedef struct bw24_check_result {
    uint32_t size;
    int32_t status;           /* 1 equal, 0 different, 2 skipped */
    char name[160];           /* op, type, shape, isa */
    char detail[160];         /* first difference, or why it was skipped */
} bw24_check_result;

int bw24_abi(void);
const char *bw24_version(void);        /* "REVISION" the library was built from */
const char *bw24_last_error(void);
uint64_t bw24_struct_size(const char *name); /* sizeof of a struct of this header, 0 if unknown */

/* device `index` of backend cuda, whether or not this build has that backend; 0 also where there is none */
int bw24_device_query(int32_t index, bw24_device_facts *out);

int bw24_open(bw24_ctx **out, const bw24_open_params *params);
void bw24_close(bw24_ctx *ctx);
const char *bw24_device(bw24_ctx *ctx);      /* "cpu avx512vnni, 2 threads" */
int bw24_isa_supported(const char *isa);     /* 1 yes, 0 no, negative: unknown name */
int bw24_threads(bw24_ctx *ctx);
void bw24_cancel(bw24_ctx *ctx);             /* the running step ends with BW24_E_CANCELLED */

int bw24_model_new(bw24_model **out, bw24_ctx *ctx, const bw24_model_params *params);
void bw24_model_free(bw24_model *model);
/* data must stay readable while the model lives. mapped: 1 if it is a read-only private file mapping, whose pages the library may give back to
 * the system once it has packed them. scale multiplies the products with the tensor (1: none). ne[0] is the number of columns. */
int bw24_tensor_load(bw24_model *model, const char *name, int32_t type, int32_t n_dims, const int64_t *ne, const void *data, uint64_t nbytes,
                     float scale, int32_t mapped);
/* Experts beyond memory (docs/abi.md): open before any tensor, then each file, then bw24_spill_tensor in place of bw24_tensor_load for the matrices
 * of EXPERTS ops. Results are those of a model in memory, bit for bit, whatever the budget. */
int bw24_spill_open(bw24_model *model, const bw24_spill_params *params);
/* a file to read from, and a byte-identical copy on another drive or NULL. Returns its index, or an error. Neither may change while the model lives */
int bw24_spill_file(bw24_model *model, const char *path, const char *mirror);
int bw24_spill_tensor(bw24_model *model, const char *name, int32_t n_dims, const int64_t *ne, const bw24_place *places, int32_t n_places, float scale);
/* after bw24_prepare: reads experts (layer, expert) into RAM, as many as the budget holds; returns how many. Policy FROZEN keeps them. */
int bw24_spill_warm(bw24_model *model, const int32_t *pairs, int32_t n);
/* after bw24_prepare: reads experts (layer, expert) into the card's set, which keeps them, as many as its room holds; returns how many are there */
int bw24_spill_card(bw24_model *model, const int32_t *pairs, int32_t n);
int bw24_spill_stats(bw24_model *model, bw24_spill_counts *out);
/* uses since the last call, oldest first: layer << 16 | expert, bit 31 set where it was in RAM; between steps stands -1. Returns how many of `room` */
int bw24_spill_trace(bw24_model *model, int32_t *out, int32_t room);
/* how many (row, slot) pairs went to each expert of a layer since the model was made: uses[experts] */
int bw24_spill_uses(bw24_model *model, int32_t layer, uint64_t *uses);
/* layer `index`: the name of its down tensor and how many experts it has; BW24_E_ARG past the end */
int bw24_spill_layer(bw24_model *model, int32_t index, const char **down, int32_t *experts);
uint64_t bw24_available_memory(int32_t reserve); /* bytes the system and its cgroups grant; reserve 1: less max(4 GiB, 8 %) */

/* the caller has changed the bytes of rows first .. first + n of a tensor whose memory is its own: they hold from the next step on */
int bw24_tensor_touch(bw24_model *model, const char *name, int64_t first, int64_t n);
int bw24_list_set(bw24_model *model, const char *role, const char *text);
/* after the tensors and lists: index 0..tensors-1 packs one tensor each (so that the caller can show progress), index = tensors makes the plans
 * and work buffers and ends preparation */
int bw24_prepare(bw24_model *model, int32_t index);
/* the tokens that a list's logits stand for, one a column, -1 for none; they may be set again between steps. A list without has one column a token. */
int bw24_list_ids(bw24_model *model, const char *role, const int32_t *ids, int32_t n);
int32_t bw24_list_logits(bw24_model *model, const char *role); /* columns of a list's logits */
int bw24_explain(bw24_model *model, const char *role, int32_t what, const char **text); /* what 0: list, 1: plan */
int bw24_model_memory(bw24_model *model, bw24_memory *out);
/* what the model will take once it is prepared and one sequence has max_context tokens; after its tensors (whose data is not read) and lists are set */
int bw24_predict(bw24_model *model, bw24_memory *out);
int32_t bw24_model_vocab(bw24_model *model);
int32_t bw24_model_hidden(bw24_model *model); /* width of the rows that lists hand on, their buffer "hidden"; 0: the first list has none */

int bw24_seq_new(bw24_seq **out, bw24_model *model); /* of the first list */
int bw24_seq_new_role(bw24_seq **out, bw24_model *model, const char *role);
/* a sequence of a list whose KV caches are the first list's (KV ... of=trunk): its rows stand at the position of `source`, see the keys before it and
 * append nothing. `source` must outlive it. */
int bw24_seq_new_over(bw24_seq **out, bw24_seq *source, const char *role);
void bw24_seq_free(bw24_seq *seq);
int bw24_seq_fork(bw24_seq **out, bw24_seq *seq);
int64_t bw24_seq_pos(bw24_seq *seq);
int bw24_seq_truncate(bw24_seq *seq, int64_t pos, int64_t *actual); /* back to the nearest restorable position <= pos */

/* logits: [wanted rows][columns of the list's logits] f32, in row order. All or nothing: on error no sequence has moved. */
int bw24_step(bw24_model *model, const bw24_row *rows, int32_t n, float *logits);
/* the same, with the likeliest token of each wanted row (ties: the lowest id) instead of its logits: 4 bytes a row leave the device */
int bw24_step_greedy(bw24_model *model, const bw24_row *rows, int32_t n, int32_t *tokens);
/* the same, with a token drawn as bw24_sample draws it at the row's position + 1: the same token, whatever the backend. picks: one for each wanted
 * row, in row order. An error in them leaves every sequence where it was. */
int bw24_step_sample(bw24_model *model, const bw24_row *rows, int32_t n, const bw24_pick *picks, int32_t *tokens);
/* the same for lists that take or hand on hidden rows; all rows are of one list. hidden_in: [n][hidden], for a list with HIDDEN, else NULL.
 * hidden_out: [wanted rows][hidden] or NULL. logits NULL: the wanted rows' logits are not computed. */
int bw24_step_hidden(bw24_model *model, const bw24_row *rows, int32_t n, const float *hidden_in, float *logits, float *hidden_out);
/* Speculative decoding. A drafter follows a sequence of the first list, which must outlive it, with a list of role `role` that drafts its next tokens
 * ("mtp": takes the hidden row of the token before; or one over the sequence's own keys). It begins where the sequence stands; tokens before that
 * it has not seen, which costs acceptance, never exactness. From then on the sequence moves by these calls alone. */
int bw24_drafter_new(bw24_drafter **out, bw24_seq *seq, const char *role);
void bw24_drafter_free(bw24_drafter *drafter);
int bw24_drafter_fork(bw24_drafter **out, bw24_drafter *drafter, bw24_seq *seq); /* seq: a fork of the drafter's sequence at the same position */
int64_t bw24_drafter_pos(bw24_drafter *drafter); /* tokens given; the sequence may hold drafts after them */
/* appends n tokens, 1..max_rows. logits: [n][vocab] or NULL */
int bw24_drafter_append(bw24_drafter *drafter, const int32_t *tokens, int32_t n, float *logits);
/* the same for several in one step: n[i] >= 1 tokens of drafters[i], max_rows in all; `tokens` has them one after the other. After an error those
 * whose position has not changed have not moved */
int bw24_drafters_append(bw24_drafter **drafters, const int32_t *n, int32_t drafters_n, const int32_t *tokens);
/* sequence and drafter back to the nearest restorable position <= pos. token: that at pos - 1, which is run again for its hidden row; -1: not known */
int bw24_drafter_truncate(bw24_drafter *drafter, int64_t pos, int32_t token, int64_t *actual);
/* One round: k drafts each, one step of the first list that judges them all, and the sequences moved over what was accepted. The tokens are those of
 * plain decoding with the same sampler (unless `reject`), whatever else is in the round. times: added to, or NULL. The rows of all
 * requests, k + 1 each, must fit one step. After an error the requests whose `accepted` is -1 have not moved. */
int bw24_round(bw24_model *model, bw24_round_request *requests, int32_t n, bw24_round_times *times);
/* Several rounds in the library: each request's last token begins its next round, with as many drafts, until `most` rounds (1..BW24_MAX_ROUNDS) were made,
 * some reply has one of its `stop`, a round's rows would stand beyond until[i] tokens of its sequence, or between two rounds `seconds` have passed
 * (0: no bound) or *end is not 0 (NULL: no flag; another thread may set it). The first round is made in any case. An error after the first round is left to
 * the next call; only where the step was cancelled it comes with what was made. */
int bw24_rounds(bw24_model *model, bw24_round_request *requests, int32_t n, int32_t most, double seconds, const int64_t *until, const int32_t *end,
                bw24_rounds_log *logs, bw24_round_times *times);
/* Plain decoding in the library: each request's token is appended and the next drawn, in one step for all, then on with those, until each has `most`, one
 * of them drew one of its `stop`, or between two steps `seconds` have passed (0: no bound) or *end is not 0 (NULL: no flag; another thread may set it).
 * *made: tokens that each has now, at least one; all but the last are in its sequence. The tokens are those of single steps. An error after the first
 * token is left to the next call, which meets it again; only where the step was cancelled it comes with what was made. */
int bw24_decode(bw24_model *model, bw24_decode_request *requests, int32_t n, int32_t most, double seconds, const int32_t *end, int32_t *made);
/* the same, and the logits [most][n][vocab] that each token was drawn from, for a host that may take back what was drawn: with several rows of them
 * a token that it refuses costs no step of its own. They come to the host, so it draws; the tokens are those of bw24_decode. NULL: as bw24_decode. */
int bw24_decode_logits(bw24_model *model, bw24_decode_request *requests, int32_t n, int32_t most, double seconds, const int32_t *end, float *logits,
                       int32_t *made);
/* rounds in three parts, for a host that picks the tokens: draft makes drafts and drafted; verify gives the logits [sum of (drafted + 1)][vocab];
 * the host sets accepted; commit moves the sequences to token and the first `accepted` drafts. Another draft gives a round up that was not committed. */
int bw24_round_draft(bw24_model *model, bw24_round_request *requests, int32_t n);
int bw24_round_verify(bw24_model *model, bw24_round_request *requests, int32_t n, float *logits);
int bw24_round_commit(bw24_model *model, bw24_round_request *requests, int32_t n);
int bw24_sample(const float *logits, int32_t n_vocab, const bw24_sampler *params, const int32_t *history, int32_t n_history,
                uint64_t position, const uint32_t *mask, int32_t *token, float *logprob);
/* the same over the logits of a list with ids */
int bw24_sample_ids(const float *logits, int32_t n, const int32_t *ids, int32_t n_vocab, const bw24_sampler *params, const int32_t *history,
                    int32_t n_history, uint64_t position, int32_t *token);
/* rejection sampling, the second mode. A draft is drawn from the draft's logits [n_rows], row r of token ids[r] (-1: none; NULL: row = token), with the
 * filters and penalties of the reply; variates of its own make it independent of the judgement. */
int bw24_sample_draft(const float *logits, int32_t n_rows, const int32_t *ids, int32_t n_vocab, const bw24_sampler *params,
                      const int32_t *history, int32_t n_history, uint64_t position, const uint32_t *mask, int32_t *token);
/* ... and judged once the target's logits [n_vocab] are known: *token is the draft where it is accepted, else a draw from what the target gives
 * more mass than the draft does. Tokens are distributed as the target's own. The other arguments must be those that the draft was drawn with. */
int bw24_sample_reject(const float *logits, int32_t n_vocab, const float *draft_logits, int32_t n_rows, const int32_t *ids,
                       const bw24_sampler *params, const int32_t *history, int32_t n_history, uint64_t position, const uint32_t *mask,
                       int32_t draft, int32_t *token);

int bw24_dequantize(int32_t type, const void *src, float *dst, int64_t n);
int bw24_quantize(int32_t type, const float *src, void *dst, int64_t n);
int bw24_type_info(int32_t index, bw24_type_facts *out);  /* BW24_E_ARG past the end */
int bw24_op_info(int32_t index, bw24_op_facts *out);
/* kernel-check, case `index`; -1 returns the number of cases; BW24_E_ARG past the end */
int bw24_check(bw24_ctx *ctx, bw24_model *model, int32_t index, bw24_check_result *out);
int bw24_probe(bw24_ctx *ctx, double *read_gbps, double *copy_gbps); /* of the memory where weights live; copied bytes count twice */
int bw24_probe_rates(bw24_ctx *ctx, bw24_rates *out);                 /* everything that this context's device has; about a second */
/* the numeric program's scalar functions, for tests: name is "exp", "exp2", "silu", "gelu", "tanh", "sigmoid", "softplus" */
int bw24_canon(const char *name, const float *x, float *y, int64_t n);
/* BW24_CFFI_END */
#pragma GCC visibility pop

#endif
