/* ATTEND of few rows at a short context with the GATE behind it in its launch, and with the heads before it: where the list has them in this order and nobody
 * else reads what stands between. Owns these conditions and the shape of the blocks. */
#include "forward.h"
#include "op_attend_gated.cuh"

namespace bw {

typedef GatedBlock<256, 128> Gated; /* half of V's columns: all four pieces fit a block */
static_assert(GATED_PIECES == (int)SHORT_REACH_LEAST, "steps of the first class of reach");

/* as many slots as there are pieces, fewer where several blocks are on a multiprocessor; 0: the step's keys might not lie in them */
static int slots_of(const Queue &q, const AttendArgs &a) {
    static_assert(Gated::bytes(1, GATED_PIECES) <= SHARED_LEAST, "a block must fit the smallest card");
    const int blocks = a.heads * a.rows * Gated::PARTS, beside = (blocks + q.sms - 1) / q.sms, room = (q.shared_max + 1024) / beside - 1024; /* a block takes 1 KB beside its own */
    int slots = a.reach < GATED_SLOTS ? a.reach : GATED_SLOTS;
    while (slots && (int)Gated::bytes(slots, a.reach) > room) slots--;
    return slots < 2 ? 0 : slots;
}

bool attend_has_gated(const KvPlace &kv, int window) { return kv.k == KV_F16 && kv.v == KV_F16 && !kv.shared && kv.dim == 256 && !window; }

/* The steps of an attending layer from its heads on: heads, perhaps PICK_ROWS where all rows are wanted, ATTEND, GATE */
struct Layer {
    const CuStep *heads, *pick, *attend, *gate;
    int steps;
};
/* the buffer that PICK_ROWS copies to `buf` */
static int before_pick(const Pass &p, const Layer &y, int buf) {
    for (int i = 0; y.pick && i < y.pick->n; i++)
        if (p.l->ops[y.pick->first + i].buf[0] == buf) return p.l->ops[y.pick->first + i].buf[1];
    return buf;
}
static bool dead_after_step(const Pass &p, const CuStep &c, int buf) { return cu_dead_after(p.l, c.first + c.n, buf); }

bool gate_behind(const Pass &p, size_t i) {
    const std::vector<CuStep> &steps = p.s->steps;
    if (i + 1 >= steps.size() || steps[i].kind != CU_ATTEND || steps[i + 1].kind != CU_ROWS) return false;
    const CuStep &attend = steps[i], &c = steps[i + 1];
    const bw_op *op = &p.l->ops[c.first];
    if (c.n != 1 || c.want != attend.want || op->code != BW_OP_GATE || op->buf[1] != attend.out || op->buf[2] == attend.out) return false;
    return width_of(p, op->buf[2]) == width_of(p, op->buf[0]) && (op->buf[0] == attend.out || dead_after_step(p, c, attend.out));
}

static bool find_layer(const Pass &p, size_t i, Layer *y) {
    const std::vector<CuStep> &steps = p.s->steps;
    size_t at = i + 1;
    *y = {};
    if (steps[i].kind != CU_HEADS) return false;
    if (at < steps.size() && steps[at].kind == CU_PICK && p.rows.n_want == p.rows.n) y->pick = &steps[at++];
    if (!gate_behind(p, at) || steps[at].want != (y->pick != NULL)) return false;
    y->heads = &steps[i];
    y->attend = &steps[at];
    y->gate = &steps[at + 1];
    y->steps = (int)(at + 2 - i);
    return true;
}

/* the heads are the layer's queries, keys, values and gate, a plain copy, and nobody else reads them */
static bool take_heads(const Pass &p, const Layer &y, GatedArgs *g) {
    const bw_op *op = &p.l->ops[y.attend->first];
    const HeadArgs &a = p.s->heads[(size_t)y.heads->at];
    const KvPlace kv = cu_kv_place(&p.l->kvs[op->kv]);
    const int q = before_pick(p, y, op->buf[1]), gate = before_pick(p, y, p.l->ops[y.gate->first].buf[2]);
    const CuStep &reader = y.pick ? *y.pick : *y.attend;
    int seen = 0;
    for (int i = 0; i < a.n; i++) {
        const HeadChain &x = a.c[i];
        const int what = x.append == APPEND_NONE ? 0 : x.append == APPEND_K ? 1 : 2;
        if (x.dim != kv.dim || x.heads != (what ? kv.heads : op->i[0]) || (what && (x.kv.offset != kv.offset || x.kv.klass != kv.klass))) return false;
        if (!what && x.buf == gate) {
            if (!x.copy || x.norm || x.rot || x.pitch % 4 || x.from % 4 || !dead_after_step(p, y.pick ? *y.pick : *y.gate, gate)) return false;
            g->gate = x.x;
            g->gate_pitch = x.pitch;
            g->gate_from = x.from;
            seen |= 8;
            continue;
        }
        if (what < 2 ? !x.norm || x.l2 || !x.w || x.rot != GATED_ROT || x.interleaved : x.norm || x.rot) return false; /* what the kernel has text for */
        if ((!what && x.buf != q) || !dead_after_step(p, what ? *y.heads : reader, x.buf)) return false;
        g->c[what] = x;
        seen |= 1 << what;
    }
    if (y.pick && (!dead_after_step(p, *y.attend, op->buf[1]) || !dead_after_step(p, *y.gate, p.l->ops[y.gate->first].buf[2]))) return false;
    return seen == 15 && a.n == 4;
}

/* the result's place and quantised form are GATE's */
void gate_args(Pass &p, const CuStep &gate, AttendArgs *a) {
    const bw_op *op = &p.l->ops[gate.first];
    a->y = buf_of(p, op->buf[0]);
    a->gate = buf_of(p, op->buf[2]);
    a->quant_op = gate.quant_op;
    a->yo = gate.quant_out ? acts_of(p, gate.out, a->rows) : Acts{};
}

int run_gated(Pass &p, size_t i) {
    Layer y;
    GatedArgs g = {};
    if (!p.reach || p.reach > GATED_PIECES || p.l->borrows || !find_layer(p, i, &y)) return 0;
    const bw_op *op = &p.l->ops[y.attend->first], *gate = &p.l->ops[y.gate->first];
    if (!attend_has_gated(cu_kv_place(&p.l->kvs[op->kv]), (int)p.l->kvs[op->kv].window) || !take_heads(p, y, &g)) return 0;
    AttendArgs a = attend_args(p, *y.attend);
    gate_args(p, *y.gate, &a);
    g.near = p.near;
    g.slots = slots_of(*p.q, a);
    if (!g.slots) return 0;
    for (const HeadChain &x : g.c) p.quantised[(size_t)x.buf] = 0;
    if (y.pick) run_pick_but(p, *y.pick, op->buf[1], gate->buf[2]);
    const dim3 grid((unsigned)(a.heads / a.kv.heads * Gated::PARTS), (unsigned)a.kv.heads, (unsigned)a.rows);
    launch(*p.q, k_attend_gated<Gated>, grid, 64 * g.slots, Gated::bytes(g.slots, a.reach), a, p.rows, g);
    p.quantised[(size_t)y.attend->out] = 0;
    p.quantised[(size_t)y.gate->out] = y.gate->quant_out;
    return y.steps;
}

} // namespace bw
