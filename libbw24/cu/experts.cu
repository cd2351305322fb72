/* EXPERTS on the host's side: from a list's op to matrices and scratch, and the launches of a pass. Owns the choice of kernels; nothing here waits for
 * the device. */
#include <cstdio>
#include "forward.h"
#include "op_experts_any.cuh"
#include "op_gemm_codes.cuh"
#include "op_experts_sum.cuh"

namespace bw {

static const ExpertKernels *const tables[] = {&experts_q4_0, &experts_q4_k, &experts_nvfp4, &experts_q8_0, &experts_q6_k, &experts_iq4_xs, &experts_int8, &experts_int8h};

const ExpertKernels *cu_expert_kernels(const LinearKernels *k) {
    for (auto t : tables)
        if (t->linear == k) return t;
    return NULL;
}

/* ---- resolving */
static int resolve_matrix(bw24_model *m, const bw_op *op, int which, CuExperts *x) {
    int part, next;
    const bw_tensor *scale, *t = bw_expert_part(op, which, 0, &part, &scale);
    bw_expert_part(op, which, 1, &next, &scale);
    CuSplit *split = model_of(m)->split;
    const CuMatrix *c = x->layer >= 0 ? &split->layers[(size_t)x->layer].m[which] : (const CuMatrix *)t->packed;
    ExpertMatrix &e = x->m[which];
    if (x->layer >= 0) e = {split->set, 256, split->layers[(size_t)x->layer].at + which * x->experts, NULL, c->scale, c->rows, c->cols, c->segs, c->blocks};
    else e = {c->w + (size_t)part * c->bytes, (size_t)(next - part) * c->bytes, NULL, NULL, c->scale, c->rows, c->cols, c->segs, c->blocks};
    x->k[which] = c->k ? cu_expert_kernels(c->k) : NULL;
    x->float_type[which] = c->float_type;
    if (c->k && !x->k[which]) return bw_fail(BW24_E_UNSUPPORTED, "tensor %s: backend cuda has no EXPERTS kernel over units %s", t->name, c->k->name);
    return cu_upload_dense(m, scale, &e.scales);
}

static size_t acts_bytes(size_t rows, size_t cols) { return rows * cols + rows * (cols / 32) * 12; }
/* the shared expert makes one more of a row where rows are few */
static size_t pair_room(const bw24_model *m, const CuExperts &x) { return ((size_t)m->max_rows * (size_t)x.top + EXPERT_ROWS + 127) / 128 * 128; }
static size_t tile_room(size_t pairs) { return pairs / EXPERT_TILE + MOST_EXPERTS; }

/* blocks of 32 rows of all tiles at most, and what their rows of `cols` columns take where a GEMM of warp groups reads them */
static size_t block_room(size_t pairs, int experts) { return pairs / 32 + (size_t)experts; }
size_t cu_tile_rows_bytes(size_t pairs, int experts, int cols) { return block_room(pairs, experts) * ((size_t)group_stages(cols) * GG_BLOCK + 32 * sizeof(float)); }

static int resolve_scratch(bw24_model *m, CuList *s, const CuExperts &x) {
    CuMoe &all = model_of(m)->moe;
    size_t pairs = pair_room(m, x), ff = (size_t)x.m[BW_EXP_DOWN].cols, out = (size_t)x.m[BW_EXP_DOWN].rows, need[MOE_PARTS] = {};
    bool apart = x.k[BW_EXP_GATE] != x.k[BW_EXP_UP], many = m->max_rows > EXPERT_ROWS;
    if (apart || !x.k[BW_EXP_DOWN]) need[MOE_H] = pairs * ff * sizeof(float);
    if (apart) need[MOE_U] = need[MOE_H];
    if (many || x.layer >= 0 || !x.k[BW_EXP_DOWN] || !downs_fit(x.top, x.m[BW_EXP_DOWN].segs)) need[MOE_D] = pairs * out * sizeof(float);
    if (x.k[BW_EXP_DOWN]) need[MOE_MID] = acts_bytes(pairs, ff);
    if (many && !apart && x.k[BW_EXP_DOWN] && ctx_of(m)->q.warp_groups)
        need[MOE_H] = cu_tile_rows_bytes(pairs, x.experts, x.m[BW_EXP_GATE].cols > x.m[BW_EXP_DOWN].cols ? x.m[BW_EXP_GATE].cols : x.m[BW_EXP_DOWN].cols);
    if (many) need[MOE_ORDER] = (pairs + 1) * sizeof(int) + tile_room(pairs) * sizeof(ExpertTile);
    for (int i = 0; i < MOE_PARTS; i++) {
        int rc = cu_share(m, &all.mem[i], &all.bytes[i], need[i], "experts");
        if (rc) return rc;
    }
    s->moe = all;
    return 0;
}

int cu_resolve_experts(bw24_model *m, bw_list *l, int index, CuStep *c) {
    CuList *s = list_of(l);
    const bw_op *op = &l->ops[index];
    CuExperts x = {};
    x.experts = op->experts;
    x.top = (int)l->bufs[op->buf[2]].width / 2;
    x.gelu = op->i[0] == 1;
    x.y = op->buf[0];
    x.x = op->buf[1];
    x.route = op->buf[2];
    x.layer = -1;
    if (op->w[BW_EXP_DOWN]->places) {
        int rc = cu_split_layer(m, l, index, &x);
        if (rc) return rc;
    }
    for (int i = 0; i < 3; i++) {
        int rc = resolve_matrix(m, op, i, &x);
        if (rc) return rc;
    }
    c->at = (int)s->experts.size();
    s->experts.push_back(x);
    return resolve_scratch(m, s, x);
}

/* ---- running */
void run_products(Pass &p, const ExpertKernels *k, ExpertArgs a, int pairs) {
    enum { MOST = 32768 }; /* blocks along y */
    if (!k) {
        size_t shared = (size_t)a.n_mats * (size_t)((a.m[0].cols + 255) / 256) * 32 * sizeof(float);
        for (int at = 0; at < pairs; at += MOST) { /* more than MOST pairs come in an order */
            launch(*p.q, k_experts_float, dim3((unsigned)((a.m[0].rows + 31) / 32), (unsigned)(pairs - at < MOST ? pairs - at : MOST)), 256, shared, a);
            if (a.order) a.order += MOST;
        }
        return;
    }
    for (int at = 0; at < pairs; at += MOST) {
        k->product(*p.q, a, pairs - at < MOST ? pairs - at : MOST);
        if (a.order) a.order += MOST;
    }
}

static ExpertArgs args_for(Pass &p, const CuExperts &x, int op, const int *order) {
    ExpertArgs a = {};
    a.route = buf_of(p, x.route);
    a.order = order;
    a.top = a.slots = x.top;
    a.gelu = x.gelu;
    a.fault = p.rows.fault;
    a.op = op;
    return a;
}

/* act(gate x) * up x of every pair, as floats in h or quantised in mid, as the last matrix wants it */
static void gate_up(Pass &p, const CuExperts &x, ExpertArgs a, int n, int pairs, float *h, const Acts &mid) {
    const bool apart = x.k[BW_EXP_GATE] != x.k[BW_EXP_UP];
    const int ff = x.m[0].rows;
    a.xf = buf_of(p, x.x);
    if (x.k[BW_EXP_GATE]) a.x = acts_of(p, x.x, n);
    a.m[0] = x.m[BW_EXP_GATE];
    a.m[1] = x.m[BW_EXP_UP];
    a.type[0] = x.float_type[BW_EXP_GATE];
    a.type[1] = x.float_type[BW_EXP_UP];
    a.y = h;
    if (!apart) {
        a.n_mats = 2;
        a.yo = mid;
        return run_products(p, x.k[BW_EXP_GATE], a, pairs);
    }
    float *u = (float *)p.s->moe.mem[MOE_U];
    a.n_mats = 1;
    run_products(p, x.k[BW_EXP_GATE], a, pairs);
    a.m[0] = a.m[1];
    a.y = u;
    run_products(p, x.k[BW_EXP_UP], a, pairs);
    launch(*p.q, k_experts_glu, dim3((unsigned)((ff + 255) / 256), (unsigned)pairs), 256, 0, h, (const float *)u, (const int *)a.order, mid, ff, a.gelu, a.fault,
           a.op);
}

Acts cu_pair_acts(const Pass &p, const CuExperts &x, int pairs) {
    return x.k[BW_EXP_DOWN] ? acts_in((int8_t *)p.s->moe.mem[MOE_MID], pair_room(p.m, x), x.m[BW_EXP_DOWN].cols, (pairs + 3) / 4 * 4) : Acts();
}

static void first_products(Pass &p, const CuStep &c, const CuExperts &x, const int *order, int pairs) {
    const int n = rows_of(p, c);
    bool floats = x.k[BW_EXP_GATE] != x.k[BW_EXP_UP] || !x.k[BW_EXP_DOWN];
    if (x.k[BW_EXP_GATE]) want_quantised(p, x.x, n, c.first);
    gate_up(p, x, args_for(p, x, c.first, order), n, pairs, floats ? (float *)p.s->moe.mem[MOE_H] : NULL, cu_pair_acts(p, x, n * x.top));
}

static void down_products(Pass &p, const CuStep &c, const CuExperts &x, const int *order, int pairs) {
    ExpertArgs a = args_for(p, x, c.first, order);
    a.n_mats = a.per_pair = 1;
    a.m[0] = x.m[BW_EXP_DOWN];
    a.type[0] = x.float_type[BW_EXP_DOWN];
    a.x = cu_pair_acts(p, x, rows_of(p, c) * x.top);
    a.xf = (float *)p.s->moe.mem[MOE_H];
    a.y = (float *)p.s->moe.mem[MOE_D];
    run_products(p, x.k[BW_EXP_DOWN], a, pairs);
}

void run_expert_products(Pass &p, const CuStep &c, const CuExperts &x, const int *order, int pairs) {
    first_products(p, c, x, order, pairs);
    down_products(p, c, x, order, pairs);
}

bool expert_gemm_fits(const Pass &p, const CuExperts &x) {
    const ExpertKernels *gate = x.k[BW_EXP_GATE], *down = x.k[BW_EXP_DOWN];
    return gate && down && gate == x.k[BW_EXP_UP] && gate->gemm_fits(*p.q) && down->gemm_fits(*p.q);
}

int *expert_tiles_at(const Pass &p, const CuExperts &x) { return (int *)p.s->moe.mem[MOE_ORDER] + pair_room(p.m, x); }

void run_expert_tiles(Pass &p, const CuStep &c, const CuExperts &x, const int *order, const int *n_tiles, const ExpertTile *tiles, int most) {
    const int n = rows_of(p, c);
    want_quantised(p, x.x, n, c.first);
    ExpertGemmArgs a = {{x.m[BW_EXP_GATE], x.m[BW_EXP_UP]}, 2, x.top, 1, x.gelu, order, n_tiles, most, tiles, acts_of(p, x.x, n)};
    a.factor = (const float *)p.s->moe.mem[MOE_H];
    a.rows = (const uint8_t *)(a.factor + block_room(pair_room(p.m, x), x.experts) * 32);
    a.yo = cu_pair_acts(p, x, n * x.top);
    a.fault = p.rows.fault;
    a.op = c.first;
    x.k[BW_EXP_GATE]->gemm(*p.q, a);
    a.m[0] = x.m[BW_EXP_DOWN];
    a.n_mats = 1;
    a.gather = 0;
    a.x = a.yo;
    a.y = (float *)p.s->moe.mem[MOE_D];
    x.k[BW_EXP_DOWN]->gemm(*p.q, a);
}

static void run_gemm(Pass &p, const CuStep &c, int *order) {
    const CuExperts &x = p.s->experts[(size_t)c.at];
    const int pairs = rows_of(p, c) * x.top;
    int *n_tiles = expert_tiles_at(p, x);
    run_expert_tiles(p, c, x, order, n_tiles, (ExpertTile *)(n_tiles + 1), pairs / EXPERT_TILE + (x.experts < pairs ? x.experts : pairs));
}

void run_experts(Pass &p, const CuStep &c) {
    const CuExperts &x = p.s->experts[(size_t)c.at];
    const int n = rows_of(p, c), pairs = n * x.top, out = x.m[BW_EXP_DOWN].rows;
    const ExpertKernels *gate = x.k[BW_EXP_GATE], *down = x.k[BW_EXP_DOWN];
    const bool many = n > EXPERT_ROWS, gemm = many && expert_gemm_fits(p, x);
    if (x.layer >= 0 && run_split(p, c)) return;
    int *order = many ? (int *)p.s->moe.mem[MOE_ORDER] : NULL;
    const float *route = buf_of(p, x.route);
    p.quantised[(size_t)x.y] = 0;
    if (gate) want_quantised(p, x.x, n, c.first);
    if (many) launch(*p.q, k_experts_order, dim3(1), 1024, 0, route, pairs, x.top, order, (ExpertTile *)(expert_tiles_at(p, x) + 1), expert_tiles_at(p, x));
    if (gemm) run_gemm(p, c, order);
    else {
        first_products(p, c, x, order, pairs);
        if (down && !many && downs_fit(x.top, x.m[BW_EXP_DOWN].segs)) {
            DownArgs a = {x.m[BW_EXP_DOWN], route, x.top, cu_pair_acts(p, x, pairs), buf_of(p, x.y)};
            a.slots = x.top;
            a.early = gate && gate == x.k[BW_EXP_UP];
            return down->down(*p.q, a, n);
        }
        down_products(p, c, x, order, pairs);
    }
    const ExpertsSum sum = {NULL, 0, NULL, (const float *)p.s->moe.mem[MOE_D], route, buf_of(p, x.y), out, x.top};
    launch(*p.q, k_experts_sum, dim3((unsigned)((out + SUM_COLS - 1) / SUM_COLS), (unsigned)n), 256, 0, sum);
}

} // namespace bw
