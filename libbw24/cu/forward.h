/* What the files of a pass share: the pass in hand and its buffers. Private to the host files of this folder that launch ops. */
#ifndef BW24_CU_FORWARD_H
#define BW24_CU_FORWARD_H

#include "cuda.h"

namespace bw {

struct Pass {
    bw24_model *m;
    bw_list *l;
    CuList *s;
    Queue *q;
    StepRows rows;
    StepRows keys;               /* the same with the position of the last key that a row may see */
    FoldRows fold;
    int n_seqs;                  /* of FOLD state, of the step in hand; a graph serves one, or as many as it has rows */
    bool logits;                 /* somebody wants them: else ops that write them are left out */
    std::vector<char> quantised; /* per buffer: its quantised form is current */
    int rc;                      /* a failure of the host's share of the pass */
    bool unrouted;               /* a choice of no expert: after Inf or NaN, which the fault word says */
    const CuStep *open;          /* EXPERTS whose processor's share is under way (split_finish) */
    const int *ids;              /* tokens of the logits' columns, where the best keys are to hold tokens; else NULL */
    int reach;                   /* no row of the step sees more pieces of keys (AttendArgs.reach); 0: not known */
    uint8_t *const *near;        /* device [classes][rows][SHORT_REACH], with `reach`: the first pages of each row */
};

/* where the rows of a step go on the host, and where the device finds them after the upload; the tables of its sequences stand apart, each once */
struct RowsPlace {
    uint8_t *host, *dev;
    uint8_t **pages;
    uint8_t *const *pages_dev;
    int first_page, n_pages;     /* of `pages` in pages_dev; entries of `pages` so far */
    std::vector<std::pair<const bw24_seq *, int>> seqs;
};

inline float *buf_of(const Pass &p, int b) { return p.s->buf[(size_t)b]; }
inline int width_of(const Pass &p, int b) { return (int)p.l->bufs[b].width; }
inline int rows_of(const Pass &p, const CuStep &c) { return c.want ? p.rows.n_want : p.rows.n; }

/* the quantised form of a buffer for n rows: codes, then scales and sums */
Acts acts_of(const Pass &p, int b, int n);
/* the same in memory of `cap` rows */
Acts acts_in(int8_t *mem, size_t cap, int cols, int ld);
/* makes it where it is not current; op: what a fault names */
void want_quantised(Pass &p, int b, int n, int op);

/* forward.cu: bytes of a step's rows, which depend on their number alone, and of its page tables at most; the rows with the pass that reads them */
size_t rows_bytes(const CuList *s, size_t n);
size_t table_bytes(const bw24_model *m, const bw_batch *b);
void fill_rows(const bw24_model *m, CuList *s, const bw_batch *b, RowsPlace *to, Pass *p);
int grow_logits(bw24_model *m, CuList *s, int want);
/* all launches of a pass. Eager: looks at the cancel flag */
int run_steps(Pass &p, bool eager);
void run_finish(Pass &p); /* the best keys of the wanted rows, from their logits */
int verdict(const bw_list *l, int fault);

/* chain.cu: the run of n row ops as one kernel of other form; false: the interpreter's. Faults and the quantised form are the caller's. */
enum { CHAIN_TURN_ROWS = 32 }; /* most rows of a step whose chains go through their instructions once before */
bool cu_chain_of(const bw_list *l, const RowOp *ops, int n, ChainArgs *a);
void launch_chain(Pass &p, const CuStep &c, ChainArgs a); /* of step c, whose result it leaves quantised where that is wanted */
bool cu_pair_of(const bw_list *l, const RowOp *ops, int n, QuantArgs *a);

/* fold.cu */
void run_conv(Pass &p, const CuStep &c);
void run_delta(Pass &p, const CuStep &c);
/* forward.cu: arguments of step c, but for where its quantised result goes; PICK_ROWS of step c but of the buffers a and b */
AttendArgs attend_args(const Pass &p, const CuStep &c);
void run_pick_but(Pass &p, const CuStep &c, int a, int b);
/* attend_gated.cu: step i is ATTEND, and the one behind it GATE of its result, which nobody else reads; as run_gdn, heads, ATTEND and GATE */
bool gate_behind(const Pass &p, size_t i);
void gate_args(Pass &p, const CuStep &gate, AttendArgs *a); /* for ATTEND with step `gate` in its launch */
int run_gated(Pass &p, size_t i);
/* attend_short.cu: the same of heads and ATTEND */
int run_attend_heads(Pass &p, size_t i);
/* gdn.cu: the steps that step i and its followers were run as, 0: not in this form */
int run_gdn(Pass &p, size_t i);
/* experts.cu. products: act(gate x) * up x of the pairs of `order` (NULL: all), then down of it, to MOE_D by pair */
void run_experts(Pass &p, const CuStep &c);
void run_expert_products(Pass &p, const CuStep &c, const CuExperts &x, const int *order, int pairs);
/* The same for many rows, as GEMM where that fits: gate and up of each tile's pairs, in the order of the pairs; then down, to MOE_D by pair. order, n_tiles,
 * tiles: device; most: tiles at most. tiles_at: room for a step's number of tiles and the tiles behind it */
bool expert_gemm_fits(const Pass &p, const CuExperts &x);
int *expert_tiles_at(const Pass &p, const CuExperts &x);
void run_expert_tiles(Pass &p, const CuStep &c, const CuExperts &x, const int *order, const int *n_tiles, const ExpertTile *tiles, int most);
/* k's products of pairs, in launches of at most 32768 */
void run_products(Pass &p, const ExpertKernels *k, ExpertArgs a, int pairs);
/* perhead.cu */
void run_perhead(Pass &p, const CuStep &c);
/* split.cu: an EXPERTS op of which the processor computes a part; false: the card has all that the step wants */
bool run_split(Pass &p, const CuStep &c);
/* split.cu: products of the pairs with places [first, first + n), those of whole experts; order: device, the pairs by place */
void run_placed(Pass &p, const CuStep &c, const CuExperts &x, const int *order, int first, int n);
/* lift.cu: holds the experts outside the set with at least `from` pairs but for the processor's share, if RAM has them all, and marks them in CuBus.lifts;
 * the processor's part of such a step ended, which it was waited for from `joined` on */
void cu_lift_hold(Pass &p, CuSplit *s, const CuExperts &x, int n, int from);
void cu_lift_time(const bw24_model *m, CuSplit *s, int64_t joined);
/* lift.cu: products of experts that come from RAM for this step; order: device, the pairs by place */
void run_lifted(Pass &p, const CuStep &c, const struct bw_host_step &h, const int *order);
/* bus.cu: which experts come over the bus, held until cu_bus_end; their copies; their products, order: device, their pairs */
int cu_bus_choose(Pass &p, const CuExperts &x, int n);
void cu_bus_bring(Pass &p, const CuStep &c, const CuExperts &x);
void cu_bus_products(Pass &p, const CuStep &c, const CuExperts &x, const int *order);
/* split.cu: the layer in hand whose processor's share is still under way: it is waited for, and the slots are summed; may stay open over a step that
 * neither reads its result nor changes what it reads */
int split_finish(Pass &p);
bool split_open_over(const Pass &p, const CuStep &c);
void split_begin(Pass &p);                  /* of a pass */
void split_count(Pass &p);                  /* after it: the uses that the host did not see */
Acts cu_pair_acts(const Pass &p, const CuExperts &x, int pairs); /* room for what their gates make */
/* mixture.cu: as run_gdn */
int run_mixture(Pass &p, size_t i);

} // namespace bw
#endif
