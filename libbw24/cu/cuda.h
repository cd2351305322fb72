/* What backend "cuda" keeps per context, model and list. Private to the host files of this folder. */
#ifndef BW24_CU_CUDA_H
#define BW24_CU_CUDA_H

#include <map>
#include <vector>
#include "../cpu/host.h"
#include "../internal.h"
#include "chain.cuh"
#include "fold.cuh"
#include "gdn.cuh"
#include "heads.cuh"
#include "moe.cuh"
#include "launch.h"
#include "rows.cuh"

namespace bw {

enum { GRAPH_ROWS = 32, SMALL_ROWS = 32, STAGE_BYTES = 32 << 20, WANT_CHUNK = 32, EXPERT_ROWS = 32, SPLIT_ROWS = 32, SPLIT_BYTES = 512 << 20 };

/* A second stream, for what the next drafts need not wait for: the way back of a sequence's state. Made when first used. waiting: ways back that are not
 * launched yet, so that the first drafts stand before them in the card's queues */
struct CuBack { bw24_model *m; FoldSeq seq; };
struct CuSide { cudaStream_t stream; cudaEvent_t after, done; bool open; std::vector<CuBack> waiting; };

struct CuCtx {
    int device;
    Queue q;
    CuSide side;
    size_t room;       /* bytes free when it was opened */
    cudaError_t dead; /* a device fault: every later call says so */
    uint8_t *stage[2]; /* pinned, for loading; made at the first tensor */
    int turn;          /* the half to fill next */
    cudaEvent_t staged[2];
    uint8_t *raw[2];   /* on the device */
};

/* a tensor: one matrix, or those of all experts */
struct CuMatrix {
    const LinearKernels *k; /* NULL: float weights as in the file */
    int float_type, minima; /* minima: the type's values have a minimum */
    int parts;              /* matrices of this shape, one behind the other */
    uint8_t *w;
    int rows, cols, segs, blocks;
    float scale;
    size_t bytes;           /* of one part */
};

struct CuRope { int rot; double base, scale; const bw_tensor *ff; double *inv; float *cs; };

/* one launch of a step, resolved; a plan step is one or several */
enum CuKind { CU_EMBED, CU_ROWS, CU_HEADS, CU_LINEARS, CU_ATTEND, CU_PICK, CU_CONV, CU_DELTA, CU_EXPERTS, CU_PERHEAD };
struct CuStep {
    CuKind kind;
    const bw_step *step;
    int first, n;      /* ops covered, for CU_EMBED, CU_ROWS, CU_ATTEND, CU_PICK */
    int at;            /* where its operands stand: CU_ROWS in the list's row_ops, CU_HEADS in heads, CU_CONV in convs, ... */
    bool want;         /* runs on the wanted rows */
    int out;           /* buffer written, -1 none or several */
    bool quant_out;    /* the next reader of `out` wants it quantised */
    int quant_op;      /* CU_ROWS: the op that a fault of that names */
    int short_n, short_at; /* how many steps one of the list's gdns (CU_CONV) or mixes (CU_LINEARS) stands for where rows are few; 0: none */
};

/* EXPERTS: gate, up, down */
struct CuExperts {
    ExpertMatrix m[3];
    const ExpertKernels *k[3]; /* NULL: float weights */
    int float_type[3];
    int experts, top, gelu, x, route, y; /* buffers */
    int layer;                 /* of the spill, -1: all are on the card */
};
/* a mixture's layer where rows are few: router, gates and ups, downs and what is added to them */
struct CuMix {
    RouterArgs router;         /* but for the quantised rows, which depend on their number */
    int h;                     /* buffer of the normed rows */
    int at, slots;             /* in the list's experts; slots: one more than theirs where the shared expert is among them */
    ExpertMatrix shared[3];
    const float *gate, *res;   /* as DownArgs; res NULL: y alone */
    float *sum;
    int out;                   /* buffer of sum or y */
    ChainArgs tail;            /* row ops after the experts as one chain; n_passes 0: none */
};
/* scratch of EXPERTS, shared by the layers and lists of a model; a pair is (row, slot) */
enum MoePart { MOE_H /* or rows by tile, for warp groups */, MOE_U, MOE_D, MOE_MID, MOE_ORDER, MOE_COUNT, MOE_HEADS /* inputs of PERHEAD */, MOE_PARTS };
struct CuMoe { void *mem[MOE_PARTS]; size_t bytes[MOE_PARTS]; };

/* one layer of the spill */
struct CuSplitLayer {
    const bw_op *op;
    CuMatrix m[3];
    uint32_t *at;              /* device [3][experts]: where the set has their matrices, in units of 256 bytes */
    size_t packed;             /* bytes of an expert as backend cpu packs it, if the card can take it from there; else 0 */
    bool whole;                /* the set has all of them */
    uint32_t *at_host;         /* pinned: what `at` holds */
};
/* experts on their way through the card for one step's rows (lift.cu): slots for as many at once */
enum { LIFT_SLOTS = 6, LIFT_GROUP = 3 }; /* so many are multiplied at once, while the others come */
struct CuLift {
    cudaStream_t stream[2];    /* one copies while the other unpacks */
    uint8_t *slots;
    size_t slot_bytes;
    uint32_t *at_host, *at;    /* pinned, device: [3][experts] of the layer in hand, as CuSplitLayer.at, from `slots` on */
    cudaEvent_t ready[LIFT_SLOTS], freed[LIFT_SLOTS]; /* its bytes are there; its products are made */
    int turn, layer;
    std::vector<int> held;     /* of the layer in hand, ascending, where RAM has all that a wide step lifts */
    double own_rate, own;      /* the processor's operations a second in wide steps; seconds that its share of the layer in hand should take, 0: no share */
};
constexpr double CU_WIDE_OPS = 62.5e9; /* int8 products of many rows: operations a second and thread, before any was timed */
/* experts that a narrow step takes over the bus (bus.cu); BUS_MOST: of a layer. stays: in the set, else in a slot of CuLift */
enum { BUS_MOST = 32 };
struct CuBusExpert { int expert; bool stays; int slot; };
struct CuBus {
    cudaEvent_t ready[2];      /* what its stream of CuLift brought is there */
    double cpu_rate, bus_rate; /* bytes a second */
    /* of the layer in hand */
    int layer, missing, n;     /* experts that the set lacked at first; held ones, ascending */
    bool there;                /* all missing ones are in RAM */
    CuBusExpert expert[BUS_MOST];
    std::vector<int> uses;
    std::vector<uint8_t> lifts;
};
/* experts divided between the card and the processor (split.cu). x, route, ints, tiles, seen, at are pinned */
struct CuSplit {
    struct bw_host *host;      /* cpu/host.h */
    uint8_t *set;
    std::vector<CuSplitLayer> layers;
    float *x, *route, *seen;   /* rows of the op in hand; routes of layers that are whole, to be counted after the step */
    int *ints, *dev_ints;      /* places of the pairs, then pairs of the places */
    int *tiles;                /* of a step of many rows: more than there are, then the tiles (moe.cuh) */
    std::vector<int> tile_at;  /* [pairs + 1] by place: the first tile from there on */
    size_t x_floats, route_floats, pairs, experts;
    uint32_t *at;              /* [layers][3][experts], CuSplitLayer.at_host */
    std::vector<void *> pinned; /* memory of the processor's side */
    cudaEvent_t event;
    bw_host_step step;         /* the layer in hand, and when its processor's share began */
    int64_t begun;
    CuLift lift;
    CuBus bus;
};

struct CuGraph { cudaGraphExec_t exec; int uses; };

/* per list: bw_list.priv. Device memory belongs to the model. */
struct CuList {
    bw_list *list;
    std::vector<float *> buf;     /* device [max_rows][width]; the logits' is made for as many rows as were wanted so far */
    std::vector<int8_t *> acts;   /* device memory of a buffer's quantised form, or NULL */
    std::vector<CuStep> steps;
    std::vector<RowOp> row_ops;
    std::vector<HeadArgs> heads;
    std::vector<ConvArgs> convs;
    std::vector<DeltaArgs> deltas;
    std::vector<GdnArgs> gdns;
    std::vector<CuExperts> experts;
    std::vector<CuMix> mixes;
    CuMoe moe;
    RowOp *row_mem;
    std::vector<CuRope> ropes;
    std::map<int, CuGraph> graphs; /* by graph_key */
    /* ATTEND of few rows: (n, l, o) of every piece, for split_rows rows */
    float *pieces;
    float2 *piece_nl;
    int split_rows;
    int short_most;               /* the most AttendArgs.reach that some ATTEND has a use for */
    /* the step's rows */
    uint8_t *step_host, *step_dev;
    size_t step_cap;
    float *hidden;                /* the caller's hidden rows; NULL where the list takes none */
    float *hidden_host;           /* pinned [GRAPH_ROWS][width of the rows handed on]; NULL where the list hands none on */
    int handed;                   /* rows that the last pass left there */
    float *logits_host;           /* pinned [WANT_CHUNK][vocab] */
    int logits_rows;
    cudaEvent_t pace[2];          /* bound how far the host runs ahead of the device, so that a cancellation is heard */
};

/* per model */
struct CuModel {
    std::map<const bw_tensor *, float *> dense;
    /* KV pages: slabs cut into pages */
    std::vector<uint8_t *> slabs;
    std::vector<uint8_t *> free_pages[BW_MAX_CLASS];
    std::vector<void *> owned;    /* all other device memory */
    /* lists run one at a time: they share what they need while they run */
    CuMoe moe;
    ReplayOp *replay;             /* of the first list */
    int n_replay, replay_items;
    float *pieces;
    float2 *piece_nl;
    size_t pieces_bytes, piece_nl_bytes;
    int *gdn_count;               /* GdnArgs.count of every net */
    size_t gdn_count_bytes;
    void *chunk_facts;            /* of the class fast: ChunkFacts of one DELTA */
    size_t chunk_facts_bytes;
    struct CuSampler *sampler;    /* sample.cu; NULL before the first draw */
    CuSplit *split;               /* NULL: no expert is spilled */
    struct CuRound *round;        /* round.cu; NULL before the first round */
};

inline CuCtx *ctx_of(const bw24_model *m) { return (CuCtx *)m->ctx->priv; }
inline CuModel *model_of(const bw24_model *m) { return (CuModel *)m->priv; }
inline CuList *list_of(const bw_list *l) { return (CuList *)l->priv; }

/* device memory, or a message that says for what and how much */
int cu_alloc(bw24_model *m, void **out, size_t bytes, const char *what);
/* the same, given back with the model and counted as work memory */
int cu_model_alloc(bw24_model *m, void **out, size_t bytes, const char *what);
/* for a pointer that lists share: made again where `need` exceeds what it has, for graphs of earlier lists still name the old */
int cu_share(bw24_model *m, void **mem, size_t *have, size_t need, const char *what);
/* bytes to the card, there when it returns */
int cu_put(const bw24_model *m, void *to, const void *from, size_t bytes, const char *what);
/* the f32 form of a small tensor on the device; NULL for NULL */
int cu_upload_dense(bw24_model *m, const bw_tensor *t, const float **out);
int cu_fail(bw24_ctx *c, cudaError_t e, const char *what);
int cu_alive(bw24_ctx *c);
const void *probe_kernel(); /* whose code a card has where the build has any for it */
int cu_check_card(int index, cudaDeviceProp *p); /* makes it the thread's device; an error says why it cannot be used */
int cu_pack_tensor(bw24_model *m, bw_tensor *t);
int cu_max_pieces(const bw24_model *m, const bw_kv *kv);
bool cu_kv_format(const bw_type_info *t, int *format);
KvPlace cu_kv_place(const bw_kv *kv);
int cu_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits);
int cu_greedy(bw24_model *m, bw_list *l, const bw_batch *b, int32_t *tokens);
int cu_hidden(bw24_model *m, bw_list *l, int n, float *out);
/* fold.cu: FOLD state in device memory (bw_backend.fold_*) */
float *cu_fold_new(bw24_model *m, size_t bytes);
void cu_fold_free(float *data);
int cu_fold_clear(bw24_model *m, float *data, size_t bytes);
cudaError_t cu_side_start(CuCtx *c); /* launches what waits for the second stream */
cudaError_t cu_side_join(CuCtx *c);  /* the same, and what the queue runs from now on comes after what the second stream has */
void cu_side_drop(CuCtx *c, const bw24_model *m); /* what waits and is of this model will not run: its state is gone */
int cu_replay(bw24_model *m, bw_list *l, const float *from, const float *log, int n, float *to);
int cu_resolve_fold(bw24_model *m, bw_list *l, int op, CuStep *c);
bool cu_delta_chunks(int dk, int dv); /* DELTA of the class fast has heads of these sizes */
size_t cu_chunk_bytes(int64_t rows, int heads);
int cu_resolve_replay(bw24_model *m, bw_list *l);
/* gdn.cu: after the list's steps and their quantised outputs are known */
int cu_resolve_gdn(bw24_model *m, bw_list *l);
/* mixture.cu: no op from `from` on reads `buf` before one overwrites it */
bool cu_dead_after(const bw_list *l, int from, int buf);
/* mixture.cu: after the list's steps and their quantised outputs are known */
int cu_resolve_mixtures(bw24_model *m, bw_list *l);
/* perhead.cu; bytes: of scratch */
int cu_resolve_perhead(bw24_model *m, bw_list *l, int op);
uint64_t cu_perhead_bytes(const bw24_model *m, const bw_op *op);
/* experts.cu; kernels: NULL where units have none; bytes: of the pairs' rows as a GEMM of warp groups reads them */
size_t cu_tile_rows_bytes(size_t pairs, int experts, int cols);
const ExpertKernels *cu_expert_kernels(const LinearKernels *k);
int cu_resolve_experts(bw24_model *m, bw_list *l, int op, CuStep *c);
void cu_drop_graphs(CuList *s);
int cu_probe(bw24_ctx *c, bool all, bw24_rates *out); /* probe.cu */
/* predict.cu */
int cu_predict(bw24_model *m, bw24_memory *out);
size_t cu_slab_pages(const bw24_model *m, int klass);
/* load.cu: one matrix of a tensor on the device; what a tensor's matrices are there; writing one, slice by slice: src may go once it returns */
size_t cu_matrix_bytes(const bw_type_info *t, int64_t rows, int64_t cols);
size_t cu_part_bytes(const bw_tensor *t);
void cu_describe(const bw_tensor *t, CuMatrix *x);
int cu_make_stage(bw24_model *m);
/* pinned: the source is, and must stay as it is until the stream has come by */
int cu_fill_part(bw24_model *m, const bw_tensor *t, const CuMatrix *x, uint8_t *w, const uint8_t *src, bool pinned);
/* split.cu. list: before its ops are resolved; layer: one of them */
int cu_split_list(bw24_model *m, bw_list *l);
int cu_split_layer(bw24_model *m, const bw_list *l, int op, CuExperts *x);
bool cu_split_waits(const bw24_model *m, const CuList *s); /* some step of the list waits for the processor's experts */
void cu_split_free(CuModel *s);
/* bus.cu */
int cu_bus_make(bw24_model *m);                            /* what the bus needs, and its rate, once */
void cu_bus_free(CuBus *b);
void cu_bus_time(CuSplit *s, double bytes, int64_t begun); /* the processor's part of the layer in hand took until now */
void cu_bus_end(bw24_model *m, bool failed);               /* the device is done with what it took */
/* lift.cu. copy: packed tiles from RAM; unpack: what copy brought to units */
cudaError_t cu_lift_copy(cudaStream_t stream, uint8_t *to, const struct bw_host_lifted &e);
void cu_lift_unpack(Queue &q, const CuSplitLayer &y, const struct bw_host_lifted &e, const uint8_t *tiles, uint8_t *slot);
size_t cu_lift_packed(const CuSplitLayer &y);
int cu_lift_make(bw24_model *m);
void cu_lift_release(bw24_model *m);  /* experts held for a wide step */
void cu_lift_free(CuLift *s);
int cu_warm(bw24_model *m, int layer, const int *experts, int n);
extern const struct bw_spill_set cu_set;
/* sample.cu */
int cu_draw(bw24_model *m, bw_list *l, const bw_batch *b, const bw24_pick *picks, bw_drawn *out);
void cu_sample_free(CuModel *s);
/* round.cu */
int cu_round(bw24_model *m, bw_round *r);
void cu_round_drop(CuModel *s); /* its graphs: something that they point to has moved */
void cu_round_free(CuModel *s);

} // namespace bw
#endif
