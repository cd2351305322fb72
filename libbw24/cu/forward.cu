/* One forward pass on the device: the step's rows go up, the resolved steps are launched (or replayed as one graph), faults and logits come down.
 * Owns the choice of kernels and the graphs. Work of a step depends on its number of rows and on whether its context is short (Pass.reach): positions,
 * tokens and page tables are read from device memory, so a graph serves every context length of its class. */
#include <cstring>
#include "forward.h"
#include "gemm_fast.h"
#include "op_attend_any.cuh"
#include "op_attend_merge.cuh"
#include "op_attend_shared.cuh"
#include "op_chain.cuh"
#include "op_float_few.cuh"
#include "op_heads.cuh"
#include "op_rows.cuh"
#include "sample.h"

namespace bw {

static const float *dense_of(const Pass &p, const bw_tensor *t) { return t ? model_of(p.m)->dense.at(t) : NULL; }

Acts acts_in(int8_t *mem, size_t cap, int cols, int ld) {
    Acts a = {};
    a.cols = cols;
    a.ld = ld;
    a.q = mem;
    if (!mem) return a;
    a.delta = (float *)(mem + cap * (size_t)cols);
    a.sum = a.delta + cap * (size_t)(cols / 32);
    a.low = a.sum + cap * (size_t)(cols / 32);
    return a;
}
Acts acts_of(const Pass &p, int b, int n) {
    size_t cap = ((size_t)p.m->max_rows + 127) / 128 * 128;
    return acts_in(p.s->acts[(size_t)b], cap, width_of(p, b), n <= 8 ? 8 : n <= 32 ? 32 : (n + 127) / 128 * 128);
}
static void launch_quant(Pass &p, QuantArgs a, int width, int n) {
    a.n = width;
    a.fault = p.rows.fault;
    if (n > SMALL_ROWS && width % 32 == 0 && !a.size && (a.kind == QUANT_ONLY || a.ldu == width))
        return launch(*p.q, k_quant_wide, dim3((unsigned)((width + 2047) / 2048), (unsigned)n), 256, 0, a);
    launch(*p.q, k_quant, dim3((unsigned)((width + 255) / 256), (unsigned)n), 256, 0, a);
}
void want_quantised(Pass &p, int b, int n, int op) {
    if (p.quantised[(size_t)b]) return;
    QuantArgs a = {};
    a.x = buf_of(p, b);
    a.o = acts_of(p, b, n);
    a.op = op;
    launch_quant(p, a, width_of(p, b), n);
    p.quantised[(size_t)b] = 1;
}

/* it from row r0 on, a multiple of 8 */
static Acts acts_from(const Acts &a, int r0) {
    Acts b = a;
    b.q += (size_t)r0 * (size_t)a.cols;
    b.delta += r0; b.sum += r0; b.low += r0;
    return b;
}

/* ---- LINEAR */
static LinearPart linear_part(const Pass &p, const bw_op *op) {
    const CuMatrix *x = (const CuMatrix *)op->w[0]->packed;
    return {x->w, dense_of(p, op->w[1]), NULL, buf_of(p, op->buf[0]), x->scale, x->rows, x->blocks};
}
static const CuMatrix *matrix_of(const bw_op *op) { return (const CuMatrix *)op->w[0]->packed; }

static bool takes_fast(const Pass &p, const LinearKernels *k, int n) { return p.m->ctx->fast_prefill && n >= FAST_LEAST_ROWS && gemm_fast_fits(*p.q, k); }

/* parts over one input; many rows go to the GEMM, or in eights and sixteens where it does not fit the card */
static void run_parts(Pass &p, const LinearKernels *k, LinearArgs a, bool glu, int n) {
    const size_t cap = ((size_t)p.m->max_rows + 127) / 128 * 128;
    uint8_t *acts = (uint8_t *)a.x.q + cap * (size_t)(a.x.cols + a.x.cols / 32 * 12); /* behind the quantised form */
    if (!glu && takes_fast(p, k, n)) {
        a.rows = n;
        gemm_fast(*p.q, k, a, acts);
        return;
    }
    if (n > SMALL_ROWS && !glu && k->gemm_fits(*p.q)) {
        a.rows = n;
        k->gemm(*p.q, a, acts);
        return;
    }
    Acts x = a.x, xo = a.xo;
    LinearPart part[LINEAR_PARTS] = {a.part[0], a.part[1], a.part[2], a.part[3]};
    const int most = k->most(*p.q, a.segs);
    for (int r0 = 0; r0 < n; r0 += a.rows) {
        a.rows = n - r0 < most ? n - r0 : most;
        a.x = acts_from(x, r0);
        if (xo.q) a.xo = acts_from(xo, r0);
        for (int i = 0; i < a.n_parts; i++) {
            a.part[i].y = part[i].y + (size_t)r0 * (size_t)part[i].n;
            if (part[i].res) a.part[i].res = part[i].res + (size_t)r0 * (size_t)part[i].n;
        }
        k->small(*p.q, a, glu);
    }
}

/* few rows, or few outputs of many */
static void float_linear(Pass &p, const bw_op *op, const LinearPart &part, int n) {
    const CuMatrix *x = matrix_of(op);
    FloatArgs a = {part, buf_of(p, op->buf[1]), x->float_type, x->cols, n};
    const int rows = n < FEW_ROWS ? n : FEW_ROWS;
    if (n <= FLOAT_ROWS / 2 || x->rows <= 2 * FEW_OUTS)
        launch(*p.q, k_float_few, dim3((unsigned)((x->rows + FEW_OUTS - 1) / FEW_OUTS), (unsigned)((n + FEW_ROWS - 1) / FEW_ROWS)), 256,
               offsetof(FewShared, x) + (size_t)rows * sizeof(FewShared::x) / FEW_ROWS, a);
    else launch(*p.q, k_linear_float, dim3((unsigned)((x->rows + FLOAT_OUTS - 1) / FLOAT_OUTS), (unsigned)((n + FLOAT_ROWS - 1) / FLOAT_ROWS)), 256, 0, a);
}

/* the step's matrices from the i-th on that go side by side in one launch: those of the same units, or `any` quantised ones; what they are, in kinds */
static void take_parts(const Pass &p, const bw_step *st, int i, bool any, LinearArgs &a, const LinearKernels **kinds) {
    a.op = st->lin0 + i;
    a.n_parts = a.blocks = 0;
    for (; i < st->n_lin && a.n_parts < LINEAR_PARTS; i++, a.n_parts++) {
        const bw_op *op = &p.l->ops[st->lin0 + i];
        const LinearKernels *k = matrix_of(op)->k;
        if (a.n_parts && (!k || (!any && k != kinds[0]))) return;
        kinds[a.n_parts] = k;
        LinearPart &part = a.part[a.n_parts];
        part = linear_part(p, op);
        if (st->add >= 0) {
            const bw_op *add = &p.l->ops[st->add];
            part.res = buf_of(p, add->buf[1] == op->buf[0] ? add->buf[2] : add->buf[1]);
            part.y = buf_of(p, add->buf[0]);
        }
        a.blocks += part.blocks;
        if (!k) { a.n_parts = 1; return; }
    }
}

/* the step's matrices, those of one unit type side by side in one launch; small ones of one row whatever their types */
static void plain_linears(Pass &p, const CuStep &c, const Acts &x, const LinearNorm &norm, int n) {
    const bw_step *st = c.step;
    for (int i = 0; i < st->n_lin;) {
        const LinearKernels *kinds[LINEAR_PARTS];
        LinearArgs a = {};
        a.x = x;
        a.norm = norm;
        a.segs = matrix_of(&p.l->ops[st->lin0 + i])->segs;
        a.rows = n;
        a.fault = p.rows.fault;
        take_parts(p, st, i, true, a, kinds);
        if (!kinds[0]) float_linear(p, &p.l->ops[st->lin0 + i], a.part[0], n);
        else if (!linear_tiny(*p.q, kinds, a, false)) {
            take_parts(p, st, i, false, a, kinds);
            if (!linear_tiny(*p.q, kinds, a, false)) run_parts(p, kinds[0], a, false, n);
        }
        i += a.n_parts;
    }
}

static void glu_linears(Pass &p, const CuStep &c, const Acts &x, const LinearNorm &norm, int n) {
    const bw_step *st = c.step;
    const bw_op *g = &p.l->ops[st->lin0], *u = g + 1, *glu = &p.l->ops[st->glu];
    Acts out = {};
    if (c.quant_out) out = acts_of(p, glu->buf[0], n);
    const CuMatrix *gm = matrix_of(g), *um = matrix_of(u);
    if (gm->k && gm->k == um->k && (n <= SMALL_ROWS || !(gm->k->gemm_fits(*p.q) || takes_fast(p, gm->k, n)))) {
        LinearArgs a = {};
        a.part[0] = linear_part(p, g);
        a.part[1] = linear_part(p, u);
        a.part[0].y = buf_of(p, glu->buf[0]);
        a.x = x;
        a.norm = norm;
        a.xo = out;
        a.n_parts = 2;
        a.blocks = gm->blocks;
        a.segs = gm->segs;
        a.gelu = glu->i[0] == 1;
        a.fault = p.rows.fault;
        a.op = st->glu;
        a.rows = n;
        const LinearKernels *const kinds[] = {gm->k, um->k};
        if (!linear_tiny(*p.q, kinds, a, true)) run_parts(p, gm->k, a, true, n);
    } else {
        plain_linears(p, c, x, norm, n);
        int w = width_of(p, glu->buf[0]);
        QuantArgs a = {};
        a.x = buf_of(p, g->buf[0]);
        a.up = buf_of(p, u->buf[0]);
        a.y = buf_of(p, glu->buf[0]);
        a.o = out;
        a.kind = glu->i[0] == 1 ? QUANT_GELU : QUANT_SILU;
        a.ldu = w;
        a.op = st->glu;
        launch_quant(p, a, w, n);
    }
    p.quantised[(size_t)glu->buf[0]] = c.quant_out;
}

/* a row by four blocks, where the card has room for all at once */
static void launch_norm_whole(Pass &p, NormArgs a, int n) {
    const int segs = a.n / 256, parts = n * NORM_PARTS <= p.q->sms && segs >= NORM_PARTS ? (int)NORM_PARTS : 1;
    a.rows = n;
    a.part = (segs + parts - 1) / parts;
    launch(*p.q, k_norm_whole, dim3((unsigned)n, (unsigned)parts), 32 * segs, 0, a);
}

static void launch_norm(Pass &p, const bw_op *op, int index, const Acts &o, int n) {
    NormArgs a = {buf_of(p, op->buf[1]), dense_of(p, op->w[0]), buf_of(p, op->buf[0]), o, width_of(p, op->buf[0]), op->i[1], (float)op->f[0], p.rows.fault, index, 0, 0};
    int segs = (a.n + 255) / 256;
    if (a.n % 256 == 0 && segs <= NORM_SEGS) return launch_norm_whole(p, a, n);
    launch(*p.q, k_norm_quant, dim3((unsigned)n), 32 * (segs < 16 ? segs : 16), 0, a);
}

/* one row: the LINEARs normalise it themselves, if all of them can */
static bool norm_inside(const Pass &p, const bw_step *st, int n) {
    if (n != 1 || st->norm < 0) return false;
    for (int i = 0; i < st->n_lin; i++) {
        const CuMatrix *x = matrix_of(&p.l->ops[st->lin0 + i]);
        if (!x->k || !x->k->takes_norm(*p.q, x->segs)) return false;
    }
    return true;
}

/* the NORM of a step, which leaves its rows quantised where some step reads them so */
static void run_norm(Pass &p, const CuStep &c) {
    const bw_step *st = c.step;
    int n = rows_of(p, c), x = p.l->ops[st->lin0].buf[1];
    Acts a = acts_of(p, x, n);
    launch_norm(p, &p.l->ops[st->norm], st->lin0, a, n);
    p.quantised[(size_t)x] = a.q != NULL;
}

static void run_linears(Pass &p, const CuStep &c) {
    const bw_step *st = c.step;
    int n = rows_of(p, c), x = p.l->ops[st->lin0].buf[1];
    bool quant = false;
    for (int i = 0; i < st->n_lin; i++) quant |= matrix_of(&p.l->ops[st->lin0 + i])->k != NULL;
    LinearNorm norm = {};
    Acts a = acts_of(p, x, n); /* q NULL where nobody reads it quantised */
    if (!p.logits && p.l->ops[st->lin0].buf[0] == p.l->logits) { /* only the norm is left, whose rows may be handed on */
        if (st->norm >= 0) run_norm(p, c);
        return;
    }
    if (norm_inside(p, st, n)) {
        const bw_op *op = &p.l->ops[st->norm];
        norm = {buf_of(p, op->buf[1]), dense_of(p, op->w[0]), buf_of(p, x), (float)op->f[0], op->i[1], st->lin0};
        p.quantised[(size_t)x] = 0;
    } else if (st->norm >= 0) {
        run_norm(p, c);
    } else if (quant) want_quantised(p, x, n, st->lin0);
    if (st->glu >= 0) return glu_linears(p, c, a, norm, n);
    plain_linears(p, c, a, norm, n);
    for (int i = 0; i < st->n_lin; i++) p.quantised[(size_t)p.l->ops[st->lin0 + i].buf[0]] = 0;
    if (st->add >= 0) p.quantised[(size_t)p.l->ops[st->add].buf[0]] = 0;
}

/* ---- the other steps */
static void run_embed(Pass &p, const CuStep &c, const RopeTables &tables) {
    const bw_op *op = &p.l->ops[c.first];
    const CuMatrix *x = matrix_of(op);
    EmbedArgs a = {x->w, buf_of(p, op->buf[0]), x->cols, x->segs, x->k ? x->minima : x->float_type, (float)op->f[0]};
    begin_rows(*p.q, x->k, a, tables, p.rows);
    p.quantised[(size_t)op->buf[0]] = 0;
}

/* the rotation tables, together with EMBED where the list begins with it. Returns the steps that are done */
static size_t run_begin(Pass &p) {
    const std::vector<CuRope> &r = p.s->ropes;
    RopeTables t = {};
    for (const CuRope &x : r) t.t[t.n++] = {x.inv, x.cs, x.scale, x.rot};
    const bool embeds = !p.s->steps.empty() && p.s->steps[0].kind == CU_EMBED && rows_of(p, p.s->steps[0]);
    if (embeds) run_embed(p, p.s->steps[0], t);
    else if (t.n) begin_rows(*p.q, NULL, {}, t, p.rows);
    return embeds;
}

void launch_chain(Pass &p, const CuStep &c, ChainArgs a) {
    const int n = rows_of(p, c);
    if (c.quant_out) a.o = acts_of(p, c.out, n);
    if (c.quant_out) p.quantised[(size_t)c.out] = 1;
    a.quant_op = c.quant_op;
    a.fault = p.rows.fault;
    a.turn = n > CHAIN_TURN_ROWS || !a.still;
    launch(*p.q, k_chain, dim3((unsigned)n), (a.n + 255) / 256 * 32, 0, a);
}

/* An MTP block's input, NORM of a token's row beside NORM of a hidden row, which matrices alone read, all of them quantised: each norm leaves its half
 * of the quantised form, and no value is written. The op pairs are HIDDEN, NORM, NORM, CONCAT as the list has them. */
static bool run_joined(Pass &p, size_t at) {
    const CuStep &c = p.s->steps[at];
    if (c.n != 4 || c.want || !c.quant_out || at + 1 == p.s->steps.size()) return false;
    const RowOp *o = &p.s->row_ops[(size_t)c.at];
    const bw_op *op = &p.l->ops[c.first];
    const bool hidden = op[0].code == BW_OP_HIDDEN && op[1].code == BW_OP_NORM && op[2].code == BW_OP_NORM && op[3].code == BW_OP_CONCAT;
    if (!hidden || o[3].i[0] != 1 || o[1].i[0] != 1 || o[2].i[0] != 1) return false;
    if (op[2].buf[1] != op[0].buf[0] || op[3].buf[1] != op[1].buf[0] || op[3].buf[2] != op[2].buf[0] || op[1].buf[1] == op[0].buf[0]) return false;
    const CuStep &next = p.s->steps[at + 1];
    const int eh = op[3].buf[0], n = o[1].n, end = c.first + c.n, segs = n / 256;
    if (n != o[2].n || n % 256 || segs > NORM_SEGS || next.kind != CU_LINEARS || next.step->norm >= 0 || p.l->ops[next.step->lin0].buf[1] != eh) return false;
    for (int i = 0; i < next.step->n_lin; i++)
        if (!matrix_of(&p.l->ops[next.step->lin0 + i])->k) return false;
    if (!cu_dead_after(p.l, next.first + next.n, eh) || !cu_dead_after(p.l, end, op[1].buf[0]) || !cu_dead_after(p.l, end, op[2].buf[0])) return false;
    for (int i = 0; i < 2; i++) {
        Acts y = acts_of(p, eh, p.rows.n);
        y.q += i * n;
        y.delta += (size_t)(i * n / 32) * y.ld;
        y.sum += (size_t)(i * n / 32) * y.ld;
        y.low += (size_t)(i * n / 32) * y.ld;
        const RowOp &r = o[1 + i];
        launch_norm_whole(p, NormArgs{i ? o[0].a : r.a, r.w, NULL, y, n, r.i[1], r.f, p.rows.fault, c.quant_op, 0, 0}, p.rows.n);
    }
    p.quantised[(size_t)eh] = 1;
    return true;
}

static void run_rows(Pass &p, const CuStep &c) {
    int most = 256;
    RowsQuant z = {};
    for (int i = 0; i < c.n; i++) {
        const RowOp &o = p.s->row_ops[(size_t)(c.at + i)];
        if (o.n > most || o.na > most) most = o.n > o.na ? o.n : o.na;
        if (o.code != ROW_APPEND) p.quantised[(size_t)p.l->ops[c.first + i].buf[0]] = 0;
    }
    if (c.quant_out) z = {acts_of(p, c.out, rows_of(p, c)), buf_of(p, c.out), c.quant_op};
    if (c.quant_out) p.quantised[(size_t)c.out] = 1;
    const RowOp *ops = &p.s->row_ops[(size_t)c.at];
    const int n = rows_of(p, c);
    QuantArgs pair;
    ChainArgs chain;
    if (cu_pair_of(p.l, ops, c.n, &pair) && (!z.o.q || pair.n % 32 == 0)) {
        pair.o = z.o;
        pair.op = z.o.q ? z.op : ops->op;
        return launch_quant(p, pair, pair.n, n);
    }
    if (cu_chain_of(p.l, ops, c.n, &chain)) return launch_chain(p, c, chain);
    int threads = n > 132 || most <= 512 ? 256 : 512;
    launch(*p.q, k_rows, dim3((unsigned)n), threads, 0, (const RowOp *)(p.s->row_mem + c.at), c.n, (int)c.want, z, p.rows);
}

static void run_heads(Pass &p, const CuStep &c) {
    HeadArgs a = p.s->heads[(size_t)c.at];
    for (int i = c.first; i < c.first + c.n; i++)
        if (p.l->ops[i].code != BW_OP_KV_APPEND) p.quantised[(size_t)p.l->ops[i].buf[0]] = 0;
    for (int i = 0; i < a.n; i++) { /* queries of q8_0 keys leave quantised as well */
        HeadChain &h = a.c[i];
        size_t b = (size_t)h.buf;
        h.place = h.kv.offset + (size_t)(h.append == APPEND_V ? kv_bytes(h.kv.k, h.dim) : 0);
        h.stride = (int)kv_head_bytes(h.kv);
        h.format = h.append == APPEND_V ? h.kv.v : h.kv.k;
        if (a.c[i].append || !p.s->acts[b] || !(a.c[i].norm || a.c[i].rot)) continue;
        a.c[i].o = acts_of(p, (int)b, p.rows.n);
        p.quantised[b] = 1;
    }
    int dim = a.c[0].dim;
    for (int i = 1; i < a.n; i++)
        if (a.c[i].dim != dim) dim = 0;
    auto kernel = dim == 64 ? k_heads<2> : dim == 128 ? k_heads<4> : dim == 256 ? k_heads<8> : k_heads<0>;
    launch(*p.q, kernel, dim3((unsigned)p.rows.n, (unsigned)((a.heads + 3) / 4)), 128, 0, a, p.rows);
}

static bool attend_hot(Pass &p, const AttendArgs &a, bool split) {
    static const struct { int k, v; bool (*run)(Queue &, const AttendArgs &, const StepRows &, bool); } pairs[] = {
        {KV_Q8_0, KV_Q5_1, attend_q8_0}, {KV_Q8_0, KV_Q8_0, attend_q8_0}, {KV_F16, KV_F16, attend_f16_f16}, {KV_E4M3, KV_E4M3, attend_e4m3_e4m3},
    };
    for (auto &x : pairs)
        if (x.k == a.kv.k && x.v == a.kv.v) return x.run(*p.q, a, p.keys, split);
    return false;
}

/* keys that are values: few rows share their pieces out, else the plain kernel walks them */
static void attend_shared(Pass &p, const CuStep &c, AttendArgs &a, bool split) {
    const int n = a.rows, blocks = a.max_pieces < 64 ? a.max_pieces : 64;
    p.quantised[(size_t)c.out] = 0;
    if (!split || a.kv.dim % 32) return launch(*p.q, k_attend_any, dim3((unsigned)n, (unsigned)a.heads), 128, 0, a, p.keys);
    launch(*p.q, k_attend_shared, dim3((unsigned)blocks, (unsigned)a.heads, (unsigned)n), SHARED_THREADS, 0, a, p.keys);
    if (c.quant_out) a.yo = acts_of(p, c.out, n);
    launch(*p.q, k_attend_merge<false>, dim3((unsigned)(a.heads * a.kv.dim / 32), (unsigned)n), MERGE, 0, a, p.keys);
    p.quantised[(size_t)c.out] = c.quant_out;
}

AttendArgs attend_args(const Pass &p, const CuStep &c) {
    const bw_op *op = &p.l->ops[c.first];
    const bw_kv *kv = &p.l->kvs[op->kv];
    AttendArgs a = {};
    a.kv = cu_kv_place(kv);
    a.q = buf_of(p, op->buf[1]);
    a.y = buf_of(p, op->buf[0]);
    a.heads = op->i[0];
    a.window = (int)kv->window - (p.l->borrows && kv->window); /* from keys.pos, which is one less than the row's */
    a.want = c.want;
    a.op = c.first;
    a.rows = rows_of(p, c);
    a.c = (float)(op->f[0] * 1.4426950408889634);
    a.max_pieces = cu_max_pieces(p.m, kv);
    a.o = p.s->pieces;
    a.nl = p.s->piece_nl;
    a.reach = p.reach;
    return a;
}

/* the pieces of few rows into one; the GATE behind it too, where there is one: then true */
static bool merge_pieces(Pass &p, size_t i, AttendArgs a) {
    const bool gated = gate_behind(p, i);
    const CuStep &c = p.s->steps[i + gated];
    if (gated) gate_args(p, c, &a);
    else if (c.quant_out) a.yo = acts_of(p, c.out, a.rows);
    p.quantised[(size_t)p.s->steps[i].out] = 0;
    const dim3 grid((unsigned)(a.heads * a.kv.dim / 32), (unsigned)a.rows);
    launch(*p.q, gated ? k_attend_merge<true> : k_attend_merge<false>, grid, MERGE, 0, a, p.keys);
    p.quantised[(size_t)c.out] = c.quant_out;
    return gated;
}

/* true: with the GATE behind it */
static bool run_attend(Pass &p, size_t i) {
    const CuStep &c = p.s->steps[i];
    const bw_op *op = &p.l->ops[c.first];
    AttendArgs a = attend_args(p, c);
    int n = a.rows, out = op->buf[0];
    bool split = n <= p.s->split_rows;
    if (a.kv.shared) { attend_shared(p, c, a, split); return false; }
    if (!split && p.m->ctx->fast_prefill && attend_class_fast(*p.q, a, p.keys)) {
        p.quantised[(size_t)out] = 0;
        return false;
    }
    int qb = op->buf[1];
    if (p.s->acts[(size_t)qb] && a.kv.k == KV_Q8_0) {
        a.xq = acts_of(p, qb, n);
        want_quantised(p, qb, n, c.first);
    }
    p.quantised[(size_t)out] = c.quant_out && a.reach;
    if (a.reach && c.quant_out) a.yo = acts_of(p, out, n);
    if (attend_short(*p.q, a, p.keys)) return false;
    p.quantised[(size_t)out] = 0;
    a.yo = {};
    if (!attend_hot(p, a, split)) {
        launch(*p.q, k_attend_any, dim3((unsigned)n, (unsigned)a.heads), 128, 0, a, p.keys);
        return false;
    }
    return split && merge_pieces(p, i, a);
}

void run_pick_but(Pass &p, const CuStep &c, int b0, int b1) {
    PickArgs a = {};
    int widest = 0, n = 0;
    for (int i = 0; i < c.n; i++) {
        const bw_op *op = &p.l->ops[c.first + i];
        p.quantised[(size_t)op->buf[0]] = 0;
        if (op->buf[0] == b0 || op->buf[0] == b1) continue;
        a.y[n] = buf_of(p, op->buf[0]);
        a.x[n] = buf_of(p, op->buf[1]);
        a.n[n] = width_of(p, op->buf[0]);
        widest = a.n[n] > widest ? a.n[n] : widest;
        n++;
    }
    if (n) launch(*p.q, k_pick, dim3((unsigned)p.rows.n_want, (unsigned)((widest + PICK_COLS - 1) / PICK_COLS), (unsigned)n), 256, 0, a, p.rows);
}
static void run_pick(Pass &p, const CuStep &c) { run_pick_but(p, c, -1, -1); }

void run_finish(Pass &p) {
    int vocab = width_of(p, p.l->logits);
    const dim3 grid((unsigned)((vocab + FINISH_COLS - 1) / FINISH_COLS), (unsigned)p.rows.n_want);
    launch(*p.q, k_finish, grid, 256, 0, (const float *)buf_of(p, p.l->logits), vocab, p.ids, p.rows.best, p.rows.fault, p.l->n_ops - 1);
}

/* the steps that it was run as, if more than itself; else 0 */
static int run_step(Pass &p, size_t i) {
    const CuStep &c = p.s->steps[i];
    if (!rows_of(p, c) || (!p.logits && c.kind != CU_LINEARS && c.out == p.l->logits)) return 0;
    switch (c.kind) {
    case CU_EMBED: run_embed(p, c, {}); break;
    case CU_ROWS: run_rows(p, c); break;
    case CU_HEADS: run_heads(p, c); break;
    case CU_LINEARS: run_linears(p, c); break;
    case CU_ATTEND: return run_attend(p, i) ? 2 : 0;
    case CU_PICK: run_pick(p, c); break;
    case CU_CONV: run_conv(p, c); break;
    case CU_DELTA: run_delta(p, c); break;
    case CU_EXPERTS: run_experts(p, c); break;
    case CU_PERHEAD: run_perhead(p, c); break;
    }
    return 0;
}

/* all launches of a pass. Eager: looks at the cancel flag, at most 32 steps ahead of the device. */
int run_steps(Pass &p, bool eager) {
    int done = 0;
    for (size_t i = run_begin(p); i < p.s->steps.size();) {
        if (p.open && !split_open_over(p, p.s->steps[i]) && split_finish(p)) return p.rc;
        int n = run_gdn(p, i); /* several steps at once, where rows are few */
        if (!n) n = run_mixture(p, i);
        if (!n) n = run_gated(p, i);
        if (!n) n = run_attend_heads(p, i);
        if (!n && p.s->steps[i].kind == CU_ROWS) n = run_joined(p, i);
        if (!n) n = run_step(p, i);
        i += n ? (size_t)n : 1;
        if (p.rc) return split_finish(p);
        if (!eager || ++done % 16) continue;
        int turn = done / 16 & 1;
        if (!p.q->error && done > 16) p.q->error = cudaEventSynchronize(p.s->pace[turn]);
        if (!p.q->error) p.q->error = cudaEventRecord(p.s->pace[turn], p.q->stream);
        if (!atomic_load(&p.m->ctx->cancel)) continue;
        split_finish(p);
        return bw_fail(BW24_E_CANCELLED, "cancelled");
    }
    if (split_finish(p)) return p.rc;
    if (p.rows.n_want && p.logits) run_finish(p);
    return 0;
}

/* sequences, then rows grouped by sequence and the sequence of each; their number stands behind the fault word */
static void fill_fold(const RowsPlace &to, const bw_batch *b, size_t at, FoldRows *out) {
    const size_t n = (size_t)b->n;
    FoldSeq *seqs = (FoldSeq *)(to.host + at);
    int *order = (int *)(seqs + n), *seq_of = order + n;
    ((int *)to.host)[1] = b->n_seqs;
    memcpy(order, b->order, n * sizeof *order);
    for (int k = 0; k < b->n_seqs; k++) {
        const bw_seq_rows *r = &b->seqs[k];
        seqs[k] = {r->live->data, r->mid ? r->mid->data : NULL, r->out->data, r->log->data, r->first, r->n, r->n_log};
        for (int i = r->first; i < r->first + r->n; i++) seq_of[i] = k;
    }
    const FoldSeq *dev = (const FoldSeq *)(to.dev + at);
    const int *ints = (const int *)(dev + n);
    *out = {dev, (const int *)to.dev + 1, ints, ints + n, b->n};
}

static size_t ints_of(const CuList *s, size_t n) { return (4 + 2 * BW_MAX_CLASS + (s->list->borrows ? 2 : 0)) * n; }
static size_t fold_at(const CuList *s, size_t n) { return (64 + 8 * n + 4 * ints_of(s, n) + 63) & ~(size_t)63; }
static size_t near_at(const CuList *s, size_t n) { return (fold_at(s, n) + (s->list->n_states ? n * (sizeof(FoldSeq) + 2 * sizeof(int)) : 0) + 63) & ~(size_t)63; }
size_t rows_bytes(const CuList *s, size_t n) { /* never fewer for more rows */
    return near_at(s, n) + (s->short_most ? BW_MAX_CLASS * (n < SHORT_ROWS ? n : (size_t)SHORT_ROWS) * SHORT_REACH_LEAST * sizeof(uint8_t *) : 0);
}

size_t table_bytes(const bw24_model *m, const bw_batch *b) {
    size_t pages = 0;
    for (int i = 0; i < b->all.n_runs; i++) pages += (size_t)b->all.runs[i].seq->n_pages * (size_t)m->n_classes;
    return pages * sizeof(uint8_t *);
}

/* the first pages of each row, class by class, where a kernel finds them without a table */
static void fill_near(const bw24_model *m, const bw_batch *b, uint8_t **near) {
    for (int c = 0; c < m->n_classes; c++)
        for (int r = 0; r < b->all.n_runs; r++) {
            const bw_run *run = &b->all.runs[r];
            const size_t pages = (size_t)run->seq->n_pages < SHORT_REACH_LEAST ? (size_t)run->seq->n_pages : (size_t)SHORT_REACH_LEAST;
            for (int i = run->first; pages && i < run->first + run->n; i++)
                memcpy(near + ((size_t)c * (size_t)b->n + (size_t)i) * SHORT_REACH_LEAST, run->seq->data[c], pages * sizeof *near);
        }
}

/* where the page tables of a sequence begin, class by class; they are copied where they are not there yet */
static int put_pages(const bw24_model *m, RowsPlace *to, const bw24_seq *seq) {
    for (auto &p : to->seqs)
        if (p.first == seq) return p.second;
    int at = to->n_pages;
    to->seqs.push_back({seq, at});
    for (int c = 0; c < m->n_classes; c++, to->n_pages += seq->n_pages)
        if (seq->n_pages) memcpy(to->pages + to->n_pages, seq->data[c], (size_t)seq->n_pages * sizeof *to->pages);
    return at;
}

/* Pieces that no row of a narrow step exceeds, in a few classes so that graphs are few; 0: more, or the list has no use for it */
static int reach_of(const CuList *s, const bw_batch *b) {
    int64_t deepest = 0;
    if (!s->short_most || b->n > SHORT_ROWS) return 0;
    for (int i = 0; i < b->n; i++) deepest = b->all.pos[i] > deepest ? b->all.pos[i] : deepest;
    int reach = SHORT_REACH_LEAST;
    while (reach <= s->short_most && deepest >= (int64_t)reach * PIECE) reach *= 2;
    return reach <= s->short_most ? reach : 0;
}

/* ---- the step's rows: fault word, best tokens (zero), arrays of n entries (tables: one for each class), state */
void fill_rows(const bw24_model *m, CuList *s, const bw_batch *b, RowsPlace *to, Pass *p) {
    const size_t n = (size_t)b->n, C = BW_MAX_CLASS, head = 64 + 8 * n;
    uint8_t *h = to->host;
    int *token = (int *)(h + head), *pos = token + n, *want_pos = pos + n, *want_row = want_pos + n, *table = want_row + n, *want_table = table + C * n;
    memset(h, 0, head);
    *(int *)h = NO_FAULT;
    for (int r = 0; r < b->all.n_runs; r++) {
        const bw_run *run = &b->all.runs[r];
        const int at = put_pages(m, to, run->seq);
        for (int c = 0; c < m->n_classes; c++)
            for (int i = run->first; i < run->first + run->n; i++) table[(size_t)c * n + (size_t)i] = to->first_page + at + c * run->seq->n_pages;
    }
    for (size_t i = 0; i < n; i++) { token[i] = b->token[i]; pos[i] = (int)b->all.pos[i]; }
    for (int i = 0; i < b->want.n; i++) {
        want_pos[i] = (int)b->want.pos[i];
        want_row[i] = b->want.row[i];
        for (size_t c = 0; c < C; c++) want_table[c * (size_t)b->want.n + (size_t)i] = table[c * n + (size_t)b->want.row[i]];
    }
    int *before = want_table + C * n; /* positions of the last keys that rows of a list that borrows may see, then those of the wanted rows */
    for (size_t i = 0; i < n && s->list->borrows; i++) before[i] = pos[i] - 1;
    for (size_t i = 0; i < (size_t)b->want.n && s->list->borrows; i++) before[n + i] = want_pos[i] - 1;
    const ptrdiff_t d = to->dev - h;
    auto dev = [&](const int *x) { return (const int *)((const uint8_t *)x + d); };
    p->rows = {(int *)to->dev, (unsigned long long *)(to->dev + 64), dev(token), dev(pos), dev(want_pos), dev(want_row), dev(table),
           dev(want_table), to->pages_dev, b->n, b->want.n};
    p->reach = reach_of(s, b);
    if (p->reach) fill_near(m, b, (uint8_t **)(h + near_at(s, n)));
    p->near = (uint8_t *const *)(to->dev + near_at(s, n));
    p->keys = p->rows;
    if (s->list->borrows) { p->keys.pos = dev(before); p->keys.want_pos = dev(before + n); }
    if (s->list->n_states) fill_fold(*to, b, fold_at(s, n), &p->fold);
}

/* the rows and page tables of a step by itself, in the list's own memory */
static int place_rows(bw24_model *m, CuList *s, const bw_batch *b, Pass *p, size_t *bytes) {
    const size_t at = rows_bytes(s, (size_t)b->n);
    *bytes = at + table_bytes(m, b);
    if (*bytes > s->step_cap) return bw_fail(BW24_E_MEMORY, "the page tables of %d rows take %zu bytes, backend cuda has room for %zu", b->n, *bytes, s->step_cap);
    RowsPlace to = {s->step_host, s->step_dev, (uint8_t **)(s->step_host + at), (uint8_t *const *)(s->step_dev + at), 0, 0, {}};
    fill_rows(m, s, b, &to, p);
    return 0;
}

/* room for the wanted rows; what pointed at the old logits is pointed at the new */
int grow_logits(bw24_model *m, CuList *s, int want) {
    if (want <= s->logits_rows) return 0;
    bw_list *l = s->list;
    float *old = s->buf[(size_t)l->logits], *grown = NULL;
    int rc = cu_alloc(m, (void **)&grown, (size_t)want * (size_t)l->bufs[l->logits].width * sizeof(float), "logits");
    if (rc) return rc;
    for (auto &p : model_of(m)->owned)
        if (p == old) p = grown;
    cudaFree(old);
    s->buf[(size_t)l->logits] = grown;
    for (auto &o : s->row_ops) {
        if (o.y == old) o.y = grown;
        if (o.a == old) o.a = grown;
        if (o.b == old) o.b = grown;
    }
    cu_drop_graphs(s);
    cu_round_drop(model_of(m));
    s->logits_rows = want;
    return s->row_ops.empty() ? 0 : cu_put(m, s->row_mem, s->row_ops.data(), s->row_ops.size() * sizeof(RowOp), "row ops");
}

/* the first step of a width runs eagerly, the second is captured */
static cudaError_t run_graph(Pass &p, CuGraph &g) {
    if (!g.exec) {
        cudaGraph_t graph = NULL;
        cudaError_t e = cudaStreamBeginCapture(p.q->stream, cudaStreamCaptureModeThreadLocal);
        if (e) return e;
        run_steps(p, false);
        e = cudaStreamEndCapture(p.q->stream, &graph);
        if (!e && !p.q->error) e = cudaGraphInstantiate(&g.exec, graph, 0);
        if (graph) cudaGraphDestroy(graph);
        if (e || p.q->error) return e ? e : p.q->error;
    }
    return cudaGraphLaunch(g.exec, p.q->stream);
}

/* what a graph depends on beside the list: rows, how many pieces of keys they see, whether a single sequence carries state, whether there are logits */
static int graph_key(const Pass &p) { return ((p.reach * (GRAPH_ROWS + 1) + p.rows.n) * 2 + (p.n_seqs == 1)) * 2 + p.logits; }

static int launch_pass(Pass &p) {
    int n = p.rows.n;
    if (n > GRAPH_ROWS || p.rows.n_want != n || !p.m->ctx->fuse || cu_split_waits(p.m, p.s)) return run_steps(p, true);
    CuGraph &g = p.s->graphs[graph_key(p)];
    if (p.n_seqs > 1) p.n_seqs = n;
    if (!g.uses++) return run_steps(p, true);
    cudaError_t e = run_graph(p, g);
    return e ? cu_fail(p.m->ctx, e, "a graph") : 0;
}

int verdict(const bw_list *l, int fault) {
    char label[256];
    if (fault == NO_FAULT) return 0;
    bw_op_label(l, fault, label, sizeof label);
    return bw_fail(BW24_E_NUMERIC, "%s: Inf or NaN in its input (or beyond 2^100 or the KV format's range)", label);
}

/* few rows handed on come down behind the pass, so that nobody waits for them apart */
static cudaError_t fetch_hidden(const Pass &p, bool hands) {
    const size_t n = (size_t)p.rows.n_want;
    p.s->handed = hands && n <= GRAPH_ROWS && p.s->hidden_host ? (int)n : 0;
    if (!p.s->handed) return cudaSuccess;
    return cudaMemcpyAsync(p.s->hidden_host, buf_of(p, p.l->hidden), n * (size_t)width_of(p, p.l->hidden) * sizeof(float), cudaMemcpyDeviceToHost, p.q->stream);
}

/* the fault word, the best tokens and rows handed on, then the logits in pieces where they are wanted */
static int fetch(const Pass &p, bool hands, float *logits, int32_t *tokens) {
    size_t vocab = (size_t)width_of(p, p.l->logits), chunk = (size_t)p.s->logits_rows < WANT_CHUNK ? (size_t)p.s->logits_rows : WANT_CHUNK, n = (size_t)p.rows.n_want;
    cudaStream_t s = p.q->stream;
    cudaError_t e = cudaMemcpyAsync(p.s->step_host, p.rows.fault, 64 + 8 * n, cudaMemcpyDeviceToHost, s);
    if (!e) e = fetch_hidden(p, hands);
    for (size_t at = 0; !e && (at < n || !at); at += chunk) {
        size_t rows = !logits ? 0 : n - at < chunk ? n - at : chunk;
        if (rows) e = cudaMemcpyAsync(p.s->logits_host, buf_of(p, p.l->logits) + at * vocab, rows * vocab * sizeof(float), cudaMemcpyDeviceToHost, s);
        if (!e) e = cudaStreamSynchronize(s);
        if (e) break;
        int rc = verdict(p.l, *(const int *)p.s->step_host);
        if (rc) return rc;
        if (rows) memcpy(logits + at * vocab, p.s->logits_host, rows * vocab * sizeof(float));
        if (!logits) break;
    }
    if (e) return cu_fail(p.m->ctx, e, "a step");
    const unsigned long long *best = (const unsigned long long *)(p.s->step_host + 64);
    for (size_t i = 0; tokens && i < n; i++) tokens[i] = (int32_t)~(uint32_t)best[i];
    return 0;
}

/* the caller's hidden rows, which host memory holds until the step ends */
static cudaError_t put_hidden(const Pass &p, const bw_batch *b) {
    if (!b->hidden) return cudaSuccess;
    int i = 0;
    while (p.l->ops[i].code != BW_OP_HIDDEN) i++;
    size_t bytes = (size_t)b->n * (size_t)width_of(p, p.l->ops[i].buf[0]) * sizeof(float);
    return cudaMemcpyAsync(p.s->hidden, b->hidden, bytes, cudaMemcpyHostToDevice, p.q->stream);
}

/* tokens drawn from the logits that the pass leaves on the device */
static int launch_draws(Pass &p, const bw_batch *b, const bw24_pick *picks) {
    SampleArgs a = {};
    a.logits = buf_of(p, p.l->logits);
    a.best = p.rows.best;
    a.vocab = width_of(p, p.l->logits);
    int rc = cu_sample_upload(p.m, b, picks, &a);
    if (rc) return rc;
    cu_sample_edit(*p.q, a, p.rows.n_want, p.rows.best);
    if (cu_sample_edits(p.m)) run_finish(p);
    cu_sample_draw(p.m, a, p.rows.n_want);
    return 0;
}

static int run_pass(bw24_model *m, bw_list *l, const bw_batch *b, float *logits, int32_t *tokens, const bw24_pick *picks) {
    CuList *s = list_of(l);
    CuCtx *c = ctx_of(m);
    int rc = cu_alive(m->ctx);
    if (!rc) rc = grow_logits(m, s, b->want.n);
    if (rc) return rc;
    Pass p = {m, l, s, &c->q, {}, {}, {}, b->n_seqs, logits || tokens || picks, std::vector<char>((size_t)l->n_bufs, 0), 0, false, NULL, NULL};
    size_t bytes;
    if ((rc = place_rows(m, s, b, &p, &bytes))) return rc;
    c->q.error = cu_side_join(c);
    if (!c->q.error) c->q.error = cudaMemcpyAsync(s->step_dev, s->step_host, bytes, cudaMemcpyHostToDevice, c->q.stream);
    if (!c->q.error) c->q.error = put_hidden(p, b);
    split_begin(p);
    rc = launch_pass(p);
    if (!rc && picks) rc = launch_draws(p, b, picks);
    if (!rc && c->q.error) rc = cu_fail(m->ctx, c->q.error, "a launch");
    if (rc) {
        cudaError_t e = cudaStreamSynchronize(c->q.stream);
        cu_bus_end(m, true);
        return e && !c->dead ? cu_fail(m->ctx, e, "a step") : rc;
    }
    rc = fetch(p, b->hands, logits, tokens);
    cu_bus_end(m, rc != 0);
    if (!rc && p.unrouted) rc = bw_fail(BW24_E_DEVICE, "a router's choice is no expert, and no op met Inf or NaN");
    if (!rc) split_count(p);
    return rc;
}

int cu_forward(bw24_model *m, bw_list *l, const bw_batch *b, float *logits) { return run_pass(m, l, b, logits, NULL, NULL); }
int cu_greedy(bw24_model *m, bw_list *l, const bw_batch *b, int32_t *tokens) { return run_pass(m, l, b, NULL, tokens, NULL); }

int cu_draw(bw24_model *m, bw_list *l, const bw_batch *b, const bw24_pick *picks, bw_drawn *out) {
    int n = b->want.n, rc;
    bool plain = true;
    for (int i = 0; i < n; i++) plain &= cu_pick_plain(&picks[i]);
    std::vector<int32_t> tokens((size_t)n);
    if ((rc = run_pass(m, l, b, NULL, plain ? tokens.data() : NULL, plain ? NULL : picks))) return rc;
    if (!plain) cu_sample_read(m, n, out);
    for (int i = 0; i < n && plain; i++) out[i] = {tokens[(size_t)i], 1, 1ull << 40};
    return 0;
}

int cu_hidden(bw24_model *m, bw_list *l, int n, float *out) {
    size_t bytes = (size_t)n * (size_t)l->bufs[l->hidden].width * sizeof(float);
    if (list_of(l)->handed == n) {
        memcpy(out, list_of(l)->hidden_host, bytes);
        return 0;
    }
    cudaError_t e = cudaMemcpyAsync(out, list_of(l)->buf[(size_t)l->hidden], bytes, cudaMemcpyDeviceToHost, ctx_of(m)->q.stream);
    if (!e) e = cudaStreamSynchronize(ctx_of(m)->q.stream);
    return e ? cu_fail(m->ctx, e, "hidden rows") : 0;
}

} // namespace bw
