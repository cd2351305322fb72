/* What backend "cuda" keeps per context, model and list. Private to the host files of this folder. */
#ifndef BW24_CU_CUDA_H
#define BW24_CU_CUDA_H

#include <map>
#include <vector>
#include "../internal.h"
#include "heads.cuh"
#include "launch.h"
#include "rows.cuh"

namespace bw {

enum { GRAPH_ROWS = 32, SMALL_ROWS = 32, STAGE_BYTES = 32 << 20, WANT_CHUNK = 32, SPLIT_ROWS = 32, SPLIT_BYTES = 512 << 20 };

struct CuCtx {
    int device;
    Queue q;
    cudaError_t dead; /* a device fault: every later call says so */
    uint8_t *stage[2]; /* pinned, for loading; made at the first tensor */
    cudaEvent_t staged[2];
    uint8_t *raw[2];   /* on the device */
};

/* one matrix of a tensor */
struct CuMatrix {
    const LinearKernels *k; /* NULL: float weights as in the file */
    int float_type, minima; /* minima: the type's values have a minimum */
    uint8_t *w;
    int rows, cols, segs, blocks;
    float scale;
    size_t bytes;
};

struct CuRope { int rot; double base, scale; const bw_tensor *ff; double *inv; float *cs; };

/* one launch of a step, resolved; a plan step is one or several */
enum CuKind { CU_EMBED, CU_ROWS, CU_HEADS, CU_LINEARS, CU_ATTEND, CU_PICK };
struct CuStep {
    CuKind kind;
    const bw_step *step;
    int first, n;      /* ops covered, for CU_EMBED, CU_ROWS, CU_ATTEND, CU_PICK */
    int rows_at;       /* CU_ROWS: index into the model's RowOps; CU_HEADS: into its HeadArgs */
    bool want;         /* runs on the wanted rows */
    int out;           /* buffer written, -1 none or several */
    bool quant_out;    /* the next reader of `out` wants it quantised */
};

struct CuGraph { cudaGraphExec_t exec; int uses; };

struct CuModel {
    bw_list *list;
    std::vector<float *> buf;     /* device [max_rows][width]; the logits' is made for as many rows as were wanted so far */
    std::vector<int8_t *> acts;   /* device memory of a buffer's quantised form, or NULL */
    std::vector<CuStep> steps;
    std::vector<RowOp> row_ops;
    std::vector<HeadArgs> heads;
    RowOp *row_mem;
    std::vector<CuRope> ropes;
    std::map<const bw_tensor *, float *> dense;
    CuGraph graph[GRAPH_ROWS + 1];
    /* ATTEND of few rows: (n, l, o) of every piece, for split_rows rows */
    float *pieces;
    float2 *piece_nl;
    int split_rows;
    /* the step's rows */
    uint8_t *step_host, *step_dev;
    size_t step_cap;
    float *logits_host;           /* pinned [WANT_CHUNK][vocab] */
    int logits_rows;
    /* KV pages: slabs cut into pages */
    std::vector<uint8_t *> slabs;
    std::vector<uint8_t *> free_pages[BW_MAX_CLASS];
    std::vector<void *> owned;    /* all other device memory */
    cudaEvent_t pace[2];          /* bound how far the host runs ahead of the device, so that a cancellation is heard */
};

inline CuCtx *ctx_of(const bw24_model *m) { return (CuCtx *)m->ctx->priv; }
inline CuModel *model_of(const bw24_model *m) { return (CuModel *)m->priv; }

/* device memory, or a message that says for what and how much */
int cu_alloc(bw24_model *m, void **out, size_t bytes, const char *what);
int cu_fail(bw24_ctx *c, cudaError_t e, const char *what);
int cu_alive(bw24_ctx *c);
int cu_check_card(int index, cudaDeviceProp *p); /* makes it the thread's device; an error says why it cannot be used */
int cu_pack_tensor(bw24_model *m, bw_tensor *t);
int cu_max_pieces(const bw24_model *m, const bw_kv *kv);
bool cu_kv_format(const bw_type_info *t, int *format);
KvPlace cu_kv_place(const bw_kv *kv);
int cu_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits);
int cu_greedy(bw24_model *m, bw_list *l, const bw_batch *b, int32_t *tokens);
void cu_drop_graphs(CuModel *s);

} // namespace bw
#endif
