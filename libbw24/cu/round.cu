/* Rounds in one go on the device: everything that the host knows goes up in one block, all steps run as one graph, and the last kernel writes tokens and
 * hidden rows into the host's memory. Owns the block and the graphs of rounds; what a step launches is forward.cu's, who is accepted round.c's.
 *
 * The block: for each step its rows, drawn rows and where their tokens come from, at places that depend on numbers of rows alone, so that a graph
 * serves every position; then edits, biases, page tables and the first step's hidden rows, which are read through indices from the block's
 * beginning. Two graphs make a round: its first step, by the rows that are owed, and the rest, by its depth; so their number stays small. */
#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "forward.h"
#include "op_round.cuh"
#include "sample.h"

namespace bw {

/* graphs that are kept, beyond all are dropped; bytes of a block at first, for what grows takes the graphs with it */
enum { ROUND_GRAPHS = 96, ROUND_BYTES = 1 << 20, LEAVE_BLOCKS = 8, FETCH_BLOCKS = 32 };
enum DrawMode { DRAW_LARGEST = 0, DRAW_RACE = 1, DRAW_FILTERS = 2, DRAW_EDITS = 4 };

struct Memory { uint8_t *dev, *host; size_t cap; };
/* the tokens of a list's columns and the column of each token, on the device; set: how often they had been set */
struct Columns { int *ids, *column; unsigned set; };
struct CuRound {
    Memory block;
    uint8_t *out;           /* pinned: the word that says done, stamps, tokens, fault words */
    size_t out_cap;
    float *hidden_host;     /* pinned [rows][width], of the judged rows */
    size_t hidden_rows;
    RaceBest *slots;
    size_t n_slots;
    std::map<const bw_list *, Columns> columns; /* of lists with ids */
    CuSampler sampler;
    std::map<std::vector<int>, CuGraph> graphs;
};

/* one step of the round in hand: where its parts stand in the block */
struct Part {
    Pass p;
    size_t rows, state, draw, value, from;
    int mode;
    SampleArgs draw_args;
};
struct Layout {
    bw_round *r;
    std::vector<Part> part;
    size_t values, began, tail, end; /* began: when the steps did, and the count of k_leave */
    int n_values, width;
    Columns columns;        /* of the draft list; NULL: it has none, or nothing is drafted */
};

static size_t place(size_t *at, size_t bytes) {
    size_t here = *at;
    *at = (here + bytes + 255) & ~(size_t)255;
    return here;
}

/* ---- memory */
static void free_memory(Memory *x) {
    if (x->dev) cudaFree(x->dev);
    if (x->host) cudaFreeHost(x->host);
    *x = {};
}

static int grow(bw24_model *m, Memory *mem, size_t bytes) {
    if (bytes <= mem->cap) return 0;
    cu_round_drop(model_of(m));
    free_memory(mem);
    size_t room = bytes + bytes / 2 < ROUND_BYTES ? (size_t)ROUND_BYTES : bytes + bytes / 2;
    int rc = cu_alloc(m, (void **)&mem->dev, room, "a round");
    if (rc) return rc;
    cudaError_t e = cudaHostAlloc((void **)&mem->host, room, cudaHostAllocDefault);
    if (e) return cu_fail(m->ctx, e, "pinned memory");
    mem->cap = room;
    return 0;
}

static int grow_out(bw24_model *m, CuRound *x, size_t bytes) {
    if (bytes <= x->out_cap) return 0;
    cu_round_drop(model_of(m));
    if (x->out) cudaFreeHost(x->out);
    x->out = NULL;
    x->out_cap = 0;
    cudaError_t e = cudaHostAlloc((void **)&x->out, 2 * bytes, cudaHostAllocDefault);
    if (e) return cu_fail(m->ctx, e, "pinned memory");
    x->out_cap = 2 * bytes;
    return 0;
}

static int grow_slots(bw24_model *m, CuRound *x, size_t slots) {
    if (slots <= x->n_slots) return 0;
    cu_round_drop(model_of(m));
    if (x->slots) cudaFree(x->slots);
    x->slots = NULL;
    x->n_slots = 0;
    int rc = cu_alloc(m, (void **)&x->slots, slots * sizeof(RaceBest), "sampling");
    if (!rc) x->n_slots = slots;
    return rc;
}

static int grow_hidden(bw24_model *m, CuRound *x, size_t rows, size_t width) {
    if (rows <= x->hidden_rows) return 0;
    cu_round_drop(model_of(m));
    if (x->hidden_host) cudaFreeHost(x->hidden_host);
    x->hidden_host = NULL;
    x->hidden_rows = 0;
    cudaError_t e = cudaHostAlloc((void **)&x->hidden_host, rows * width * sizeof(float), cudaHostAllocDefault);
    if (e) return cu_fail(m->ctx, e, "pinned memory");
    x->hidden_rows = rows;
    return 0;
}

/* those of a list, sent up where they have changed; without ids: none */
static int put_ids(bw24_model *m, CuRound *x, const bw_list *l, Columns *out) {
    *out = {};
    if (!l->ids) return 0;
    Columns &c = x->columns[l];
    size_t n = (size_t)l->bufs[l->logits].width, vocab = (size_t)m->vocab;
    const bool have = c.column != NULL;
    int rc = c.ids ? 0 : cu_alloc(m, (void **)&c.ids, n * sizeof(int), "the tokens of a cut head");
    if (!rc && !have) rc = cu_alloc(m, (void **)&c.column, vocab * sizeof(int), "the tokens of a cut head");
    if (rc) return rc;
    *out = c;
    if (have && c.set == l->ids_set) return 0;
    std::vector<int> column(vocab, -1);
    for (size_t i = 0; i < n; i++)
        if (l->ids[i] >= 0) column[(size_t)l->ids[i]] = (int)i;
    rc = cu_put(m, c.ids, l->ids, n * sizeof(int), "the tokens of a cut head");
    if (!rc) rc = cu_put(m, c.column, column.data(), vocab * sizeof(int), "the tokens of a cut head");
    if (rc) return rc;
    c.set = l->ids_set;
    return 0;
}

void cu_round_drop(CuModel *s) {
    if (!s->round) return;
    for (auto &g : s->round->graphs)
        if (g.second.exec) cudaGraphExecDestroy(g.second.exec);
    s->round->graphs.clear();
}

void cu_round_free(CuModel *s) {
    CuRound *x = s->round;
    if (!x) return;
    cu_round_drop(s);
    free_memory(&x->block);
    if (x->out) cudaFreeHost(x->out);
    if (x->hidden_host) cudaFreeHost(x->hidden_host);
    if (x->slots) cudaFree(x->slots);
    for (auto &c : x->columns) {
        if (c.second.ids) cudaFree(c.second.ids);
        if (c.second.column) cudaFree(c.second.column);
    }
    delete x;
    s->round = NULL;
}

/* ---- the block */
static int draw_mode(const bw_round *r) {
    int mode = r->picks ? DRAW_RACE : DRAW_LARGEST;
    for (int i = 0; i < r->n && r->picks; i++) {
        const bw24_sampler *q = r->picks[i].params;
        if (cu_sample_filters(cu_sample_row(&r->picks[i], 0, 0, 0))) mode |= DRAW_FILTERS;
        if (q->n_bias || (cu_penalised(q) && r->picks[i].n_history)) mode |= DRAW_EDITS;
    }
    return mode;
}

/* room for the first step of up to GRAPH_ROWS rows */
static size_t first_bytes(const CuList *s, int mode, size_t at) {
    place(&at, rows_bytes(s, GRAPH_ROWS));
    if (mode) place(&at, GRAPH_ROWS * sizeof(SampleState));
    if (mode) place(&at, GRAPH_ROWS * sizeof(SampleRow));
    for (int i = 0; i < 2; i++) place(&at, GRAPH_ROWS * sizeof(int));
    return at;
}

/* the places that depend on numbers of rows alone */
static void lay_out(bw24_model *m, Layout *y) {
    bw_round *r = y->r;
    size_t at = 0;
    y->began = place(&at, (BW24_MAX_DRAFTS + 2) * sizeof(u64)); /* in front, for the first step's graph serves every depth */
    const size_t from = at;
    for (int s = 0; s < r->n_steps; s++) {
        const bw_batch *b = &r->steps[s].batch;
        bw_list *l = r->steps[s].rows[0].seq->list;
        size_t n = (size_t)b->n, want = (size_t)b->want.n;
        Part x = {{m, l, list_of(l), &ctx_of(m)->q, {}, {}, {}, b->n_seqs, true, std::vector<char>((size_t)l->n_bufs, 0), 0, false, NULL}, 0, 0, 0, 0, 0, draw_mode(r), {}};
        x.rows = place(&at, rows_bytes(x.p.s, n));
        x.state = place(&at, x.mode ? want * sizeof(SampleState) : 0);
        x.draw = place(&at, x.mode ? want * sizeof(SampleRow) : 0);
        x.value = place(&at, n * sizeof(int));
        x.from = place(&at, n * sizeof(int));
        y->part.push_back(x);
        if (!s && r->n_steps > 1 && n <= GRAPH_ROWS) at = first_bytes(x.p.s, x.mode, from); /* the rest stands where it does for any number of owed rows */
    }
    const bw_batch *judged = &r->steps[r->n_steps - 1].batch;
    y->n_values = r->n * VALUES_A_REQUEST + judged->n;
    y->values = place(&at, (size_t)y->n_values * sizeof(RoundValue));
    y->tail = at;
}

/* edits of each request, once for all of its rows; from and n by request */
static void collect_edits(const bw24_model *m, const bw_round *r, CuSampler *s, std::vector<int> *from, std::vector<int> *n) {
    std::vector<int> count;
    s->edits.clear();
    s->bias.clear();
    for (int i = 0; i < r->n; i++) {
        const bw24_sampler *q = r->picks[i].params;
        from->push_back((int)s->edits.size());
        if (q->n_bias || (cu_penalised(q) && r->picks[i].n_history)) {
            count.resize((size_t)m->vocab, 0);
            cu_add_edits(s, &r->picks[i], count);
        }
        n->push_back((int)s->edits.size() - from->back());
    }
}

static void fill_draws(const Layout &y, int s, uint8_t *h, const std::vector<int> &from, const std::vector<int> &n) {
    const bw_round_step *t = &y.r->steps[s];
    SampleRow *rows = (SampleRow *)(h + y.part[(size_t)s].draw);
    for (int w = 0; w < t->batch.want.n; w++) {
        int row = t->batch.want.row[w], of = t->of[row], depth = t->depth[row];
        const bw24_pick *p = &y.r->picks[of];
        rows[w] = cu_sample_row(p, (uint64_t)(y.r->pos[of] + 1 + depth), (int)(y.tail / sizeof(SampleEdit)) + from[(size_t)of], n[(size_t)of]);
        rows[w].drafts_from = of * VALUES_A_REQUEST;
        rows[w].drafts_n = cu_penalised(p->params) && p->n_history ? depth : 0;
    }
}

static void fill_step(const Layout &y, int s, uint8_t *h, RoundValue *values, bool ids, int hidden) {
    const bw_round_step *t = &y.r->steps[s];
    const Part &x = y.part[(size_t)s];
    int *value = (int *)(h + x.value), *from = (int *)(h + x.from);
    bool judges = s == y.r->n_steps - 1;
    for (int i = 0; i < t->n; i++) {
        value[i] = t->depth[i] ? t->of[i] * VALUES_A_REQUEST + t->depth[i] - 1 : -1;
        from[i] = t->from ? t->from[i] : hidden + i;
    }
    for (int w = 0; w < t->batch.want.n; w++) {
        RoundValue v = {(unsigned)(x.rows + 64 + 8 * (size_t)w), !judges && ids ? VALUE_COLUMN : VALUE_BEST};
        if (x.mode) v = {(unsigned)(x.state + (size_t)w * sizeof(SampleState)), VALUE_STATE};
        values[judges ? y.r->n * VALUES_A_REQUEST + w : t->of[t->batch.want.row[w]] * VALUES_A_REQUEST + s] = v;
    }
}

/* what has no fixed place, and the bytes of all of it. Everything is found by its distance from the block's beginning */
struct Tail { size_t edits, bias, hidden, pages; };
static Tail tail_of(const bw24_model *m, const CuRound *x, const Layout &y, size_t *bytes) {
    const bw_round *r = y.r;
    const size_t row = (size_t)y.width * sizeof(float);
    Tail t = {y.tail, 0, 0, 0};
    t.bias = t.edits + (r->picks ? x->sampler.edits.size() * sizeof(SampleEdit) : 0);
    size_t at = t.bias + (r->picks ? x->sampler.bias.size() * sizeof(float) : 0);
    t.hidden = (at + row - 1) / row * row;
    at = r->steps[0].hidden ? t.hidden + (size_t)r->steps[0].n * row : at;
    t.pages = (at + 15) & ~(size_t)15;
    *bytes = t.pages;
    for (int s = 0; s < r->n_steps; s++) *bytes += table_bytes(m, &r->steps[s].batch);
    return t;
}

/* The deepest step decides for those beside it, so that a round that crosses from one class to the next needs no graphs of its own. */
static void level_reach(Layout *y) {
    int most = 0;
    for (Part &x : y->part)
        if (x.p.s->short_most && x.p.rows.n <= SHORT_ROWS) most = !x.p.reach || most < 0 ? -1 : x.p.reach > most ? x.p.reach : most;
    for (Part &x : y->part)
        if (x.p.reach) x.p.reach = most < 0 ? 0 : most;
}

static int fill(bw24_model *m, CuRound *x, Layout *y) {
    bw_round *r = y->r;
    std::vector<int> from, n;
    if (r->picks) collect_edits(m, r, &x->sampler, &from, &n);
    size_t bytes;
    const Tail t = tail_of(m, x, *y, &bytes);
    int rc = grow(m, &x->block, bytes);
    if (rc) return rc;
    uint8_t *h = x->block.host, *d = x->block.dev;
    if (t.bias > t.edits) memcpy(h + t.edits, x->sampler.edits.data(), t.bias - t.edits);
    for (SampleEdit *e = (SampleEdit *)(h + t.edits); (uint8_t *)e < h + t.bias; e++) e->bias_from += (int)(t.bias / sizeof(float));
    if (r->picks && !x->sampler.bias.empty()) memcpy(h + t.bias, x->sampler.bias.data(), x->sampler.bias.size() * sizeof(float));
    if (r->steps[0].hidden) memcpy(h + t.hidden, r->steps[0].hidden, (size_t)r->steps[0].n * (size_t)y->width * sizeof(float));
    RoundValue *values = (RoundValue *)(h + y->values);
    for (int i = 0; i < y->n_values; i++) values[i] = {0, -1};
    RowsPlace to = {NULL, NULL, (uint8_t **)(h + t.pages), (uint8_t *const *)d, (int)(t.pages / sizeof(uint8_t *)), 0, {}};
    for (int s = 0; s < r->n_steps; s++) {
        Part &p = y->part[(size_t)s];
        to.host = h + p.rows;
        to.dev = d + p.rows;
        fill_rows(m, p.p.s, &r->steps[s].batch, &to, &p.p);
        fill_step(*y, s, h, values, p.p.l->ids != NULL, (int)(t.hidden / ((size_t)y->width * sizeof(float))));
        if (p.mode) fill_draws(*y, s, h, from, n);
        if (p.mode && p.p.l->ids) p.p.ids = y->columns.ids;
    }
    level_reach(y);
    memset(h + y->began, 0, (BW24_MAX_DRAFTS + 2) * sizeof(u64));
    y->end = t.pages + (size_t)to.n_pages * sizeof(uint8_t *);
    return 0;
}

/* ---- running */
static SampleArgs draw_args(const Layout &y, const CuRound *x, const Part &p, bool first) {
    uint8_t *d = x->block.dev;
    SampleArgs a = {};
    a.logits = buf_of(p.p, p.p.l->logits);
    a.best = p.p.rows.best;
    a.rows = (const SampleRow *)(d + p.draw);
    a.edits = (const SampleEdit *)d;
    a.bias = (const float *)d;
    a.state = (SampleState *)(d + p.state);
    a.slots = x->slots;
    a.vocab = width_of(p.p, p.p.l->logits);
    a.ids = p.p.ids;
    a.column = p.p.ids ? y.columns.column : NULL;
    a.block = d;
    a.values = first ? NULL : (const RoundValue *)(d + y.values); /* the first step stands after no draft */
    return a;
}

static void run_draws(const Layout &y, const CuRound *x, Part &p) {
    Queue &q = *p.p.q;
    SampleArgs a = draw_args(y, x, p, &p == &y.part[0] && y.r->n_steps > 1);
    cu_sample_edit(q, a, p.p.rows.n_want, p.p.rows.best);
    if (p.mode & DRAW_EDITS) run_finish(p.p);
    cu_sample_race(q, a, p.p.rows.n_want, p.mode & DRAW_FILTERS);
}

static void run_feed(const Layout &y, const CuRound *x, int s) {
    const Part &p = y.part[(size_t)s];
    const bw_round_step *t = &y.r->steps[s];
    uint8_t *d = x->block.dev;
    FeedArgs a = {};
    a.block = d;
    a.values = s ? (const RoundValue *)(d + y.values) : NULL;
    a.ids = y.columns.ids;
    a.value = (const int *)(d + p.value);
    a.token = (int *)p.p.rows.token;
    a.stamp = (u64 *)(d + y.began) + s;
    a.width = y.width;
    if (t->from || t->hidden) {
        a.from = (const int *)(d + p.from);
        a.handed = s ? buf_of(y.part[(size_t)s - 1].p, y.part[(size_t)s - 1].p.l->hidden) : (const float *)d;
        a.hidden = p.p.s->hidden;
    }
    p.p.q->barrier = true;
    launch(*p.p.q, k_feed, dim3((unsigned)t->n, (unsigned)(a.from ? (y.width + 1023) / 1024 : 1)), 256, 0, a);
    p.p.q->barrier = true;
}

/* the word that says done and the stamps, then tokens and fault words */
static size_t out_at() { return (BW24_MAX_DRAFTS + 3) * sizeof(u64); }

static void run_leave(const Layout &y, const CuRound *x, Queue &q) {
    LeaveArgs a = {};
    const Pass &last = y.part.back().p;
    a.block = x->block.dev;
    a.values = (const RoundValue *)(x->block.dev + y.values);
    a.ids = y.columns.ids;
    a.n_values = y.n_values;
    a.n_steps = y.r->n_steps;
    a.n_hidden = last.rows.n * y.width;
    for (int s = 0; s < a.n_steps; s++) a.fault[s] = (unsigned)y.part[(size_t)s].rows;
    a.began = (const u64 *)(x->block.dev + y.began);
    a.count = (unsigned *)((u64 *)(x->block.dev + y.began) + BW24_MAX_DRAFTS + 1);
    a.done = (unsigned *)x->out;
    a.stamp = (u64 *)x->out + 1;
    a.out = (int *)(x->out + out_at());
    a.hidden = buf_of(last, last.l->hidden);
    a.hidden_out = x->hidden_host;
    q.barrier = true;
    launch(q, k_leave, dim3(LEAVE_BLOCKS), 256, 0, a);
}

/* steps [from, to); the last one of the round is followed by what leaves */
static int run_range(Layout &y, CuRound *x, int from, int to) {
    for (int s = from; s < to; s++) {
        Part &p = y.part[(size_t)s];
        std::fill(p.p.quantised.begin(), p.p.quantised.end(), 0);
        run_feed(y, x, s);
        int rc = run_steps(p.p, false);
        if (rc) return rc;
        if (p.mode) run_draws(y, x, p);
    }
    if (to == y.r->n_steps) run_leave(y, x, *y.part[0].p.q);
    return 0;
}

/* what the graph of a range depends on beside the lists */
static std::vector<int> key_of(const Layout &y, int from, int to) {
    std::vector<int> key = {from, to - from, y.r->n, y.part[0].p.l->index};
    for (int s = from; s < to; s++) {
        const Part &p = y.part[(size_t)s];
        key.push_back(p.p.l->index * 2 + (p.p.n_seqs == 1));
        key.push_back(p.p.rows.n);
        key.push_back(p.p.rows.n_want);
        key.push_back(p.mode);
        key.push_back(p.p.reach);
    }
    return key;
}

/* the first round of a form runs launch by launch, the second is captured */
static int launch_range(bw24_model *m, Layout &y, CuRound *x, int from, int to) {
    Queue &q = ctx_of(m)->q;
    bool small = m->ctx->fuse && y.part[0].p.rows.n <= GRAPH_ROWS; /* else the rest has no fixed place */
    for (int s = from; s < to; s++) small &= y.part[(size_t)s].p.rows.n <= GRAPH_ROWS;
    if (!small) return run_range(y, x, from, to);
    if (x->graphs.size() >= ROUND_GRAPHS) cu_round_drop(model_of(m));
    CuGraph &g = x->graphs[key_of(y, from, to)];
    for (int s = from; s < to; s++)
        if (y.part[(size_t)s].p.n_seqs > 1) y.part[(size_t)s].p.n_seqs = y.part[(size_t)s].p.rows.n;
    if (!g.uses++) return run_range(y, x, from, to);
    cudaError_t e = cudaSuccess;
    if (!g.exec) {
        cudaGraph_t graph = NULL;
        if ((e = cudaStreamBeginCapture(q.stream, cudaStreamCaptureModeThreadLocal))) return cu_fail(m->ctx, e, "a graph");
        run_range(y, x, from, to);
        e = cudaStreamEndCapture(q.stream, &graph);
        if (!e && !q.error) e = cudaGraphInstantiate(&g.exec, graph, 0);
        if (graph) cudaGraphDestroy(graph);
        if (e || q.error) return cu_fail(m->ctx, e ? e : q.error, "a graph");
    }
    e = cudaGraphLaunch(g.exec, q.stream);
    return e ? cu_fail(m->ctx, e, "a graph") : 0;
}

static int launch_all(bw24_model *m, Layout &y, CuRound *x) {
    int first = y.r->n_steps > 1;
    Queue &q = ctx_of(m)->q;
    const bool apart = first && !y.part[0].p.l->n_states; /* the first drafts need no state, so its way back runs beside them */
    if (!apart && !q.error) q.error = cu_side_join(ctx_of(m));
    const unsigned blocks = (unsigned)((y.end + 4095) / 4096);
    launch(q, k_fetch, dim3(blocks < FETCH_BLOCKS ? blocks : (unsigned)FETCH_BLOCKS), 256, 0, (uint4 *)x->block.dev, (const uint4 *)x->block.host,
           (int)((y.end + 15) / 16));
    int rc = first ? launch_range(m, y, x, 0, 1) : 0;
    if (!q.error) q.error = cu_side_join(ctx_of(m));
    return rc ? rc : launch_range(m, y, x, first, y.r->n_steps);
}

static int prepare(bw24_model *m, CuRound *x, Layout *y) {
    bw_round *r = y->r;
    size_t slots = 0;
    for (int s = 0; s < r->n_steps; s++) {
        const bw_batch *b = &r->steps[s].batch;
        bw_list *l = r->steps[s].rows[0].seq->list;
        size_t rows = b->want.n < GRAPH_ROWS ? (size_t)GRAPH_ROWS : (size_t)b->want.n;
        size_t n = rows * (size_t)((l->bufs[l->logits].width + RACE_CHUNK - 1) / RACE_CHUNK);
        int rc = grow_logits(m, list_of(l), b->want.n);
        if (!rc && s + 1 < r->n_steps) rc = put_ids(m, x, l, &y->columns);
        if (rc) return rc;
        slots = n > slots ? n : slots;
    }
    size_t rows = (size_t)r->steps[r->n_steps - 1].n;
    int rc = r->picks ? grow_slots(m, x, slots) : 0;
    if (!rc) rc = grow_hidden(m, x, rows, (size_t)y->width);
    if (rc) return rc;
    lay_out(m, y);
    if (!(rc = grow_out(m, x, out_at() + (size_t)(y->n_values + r->n_steps) * sizeof(int)))) rc = fill(m, x, y);
    return rc;
}

/* tokens and shares of time out of what came down */
static int read_out(const Layout &y, const CuRound *x) {
    bw_round *r = y.r;
    const u64 *stamp = (const u64 *)x->out + 1;
    const int *out = (const int *)(x->out + out_at()), *fault = out + y.n_values;
    for (int s = 0; s < r->n_steps; s++) {
        int rc = verdict(y.part[(size_t)s].p.l, fault[s]);
        if (rc) return rc;
    }
    memcpy(r->drafts, out, (size_t)r->n * VALUES_A_REQUEST * sizeof(int));
    const size_t judged = (size_t)r->steps[r->n_steps - 1].n;
    memcpy(r->tokens, out + r->n * VALUES_A_REQUEST, judged * sizeof(int));
    r->hidden = x->hidden_host;
    double all = (double)(stamp[r->n_steps] - stamp[0]);
    r->draft_share = all > 0 ? (double)(stamp[r->n_steps - 1] - stamp[0]) / all : 0.0;
    return 0;
}

/* until the last kernel's word is there. A stream that ends or fails without it is looked at now and then */
static cudaError_t wait_done(const CuRound *x, Queue &q) {
    enum { LOOKS = 1 << 13 }; /* a tenth of a millisecond or more */
    for (int i = 1; !__atomic_load_n((const unsigned *)x->out, __ATOMIC_ACQUIRE); i++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        if (i % LOOKS) continue;
        cudaError_t e = cudaStreamQuery(q.stream);
        if (e == cudaErrorNotReady) continue;
        return e ? e : __atomic_load_n((const unsigned *)x->out, __ATOMIC_ACQUIRE) ? cudaSuccess : cudaErrorUnknown;
    }
    return cudaSuccess;
}

int cu_round(bw24_model *m, bw_round *r) {
    static_assert((int)VALUES_A_REQUEST == (int)BW24_MAX_DRAFTS, "a request's values are its drafts");
    CuModel *cm = model_of(m);
    Queue &q = ctx_of(m)->q;
    int rc = cu_alive(m->ctx);
    if (rc) return rc;
    if (!cm->round) cm->round = new CuRound();
    CuRound *x = cm->round;
    Layout y = {};
    y.r = r;
    y.width = (int)m->lists[0]->bufs[m->lists[0]->hidden].width;
    if ((rc = prepare(m, x, &y))) return rc;
    q.error = cudaSuccess;
    q.barrier = true;
    __atomic_store_n((unsigned *)x->out, 0u, __ATOMIC_RELEASE);
    rc = launch_all(m, y, x);
    if (!rc && q.error) rc = cu_fail(m->ctx, q.error, "a round");
    cudaError_t e = rc ? cudaStreamSynchronize(q.stream) : wait_done(x, q);
    if (e && !ctx_of(m)->dead) return cu_fail(m->ctx, e, "a round");
    return rc ? rc : read_out(y, x);
}

} // namespace bw
