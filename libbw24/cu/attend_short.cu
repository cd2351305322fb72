/* ATTEND of few rows at a short context: which heads have a kernel that attends and merges in one launch, also with norms, rotations and appends before it
 * where the list has these alone there, and the shape of its blocks */
#include "forward.h"
#include "op_attend_heads.cuh"

namespace bw {

/* as many slots as the pieces need; fewer where there are more blocks than multiprocessors, so that two or more are on each at a time. 0: one piece after the
 * other would take longer than blocks that share them */
template <class S> static int slots_of(const Queue &q, const AttendArgs &a) {
    static_assert(S::bytes(2, SHORT_PIECES) <= SHARED_LEAST, "a block must fit the smallest card");
    const int beside = (a.heads * a.rows + q.sms - 1) / q.sms, room = (q.shared_max + 1024) / beside - 1024; /* a block takes 1 KB beside its own */
    int slots = SHORT_SLOTS < a.reach ? SHORT_SLOTS : a.reach;
    while (slots && (int)S::bytes(slots, a.reach) > room) slots--;
    return slots < 2 ? 0 : slots;
}
static dim3 grid_of(const AttendArgs &a) { return dim3((unsigned)(a.heads / a.kv.heads), (unsigned)a.kv.heads, (unsigned)a.rows); }

template <class S> static bool short_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    const int slots = slots_of<S>(q, a);
    if (slots) launch(q, k_attend_short<S>, grid_of(a), 64 * slots, S::bytes(slots, a.reach), a, s, slots);
    return slots;
}

bool attend_has_short(const KvPlace &kv) { return kv.k == KV_F16 && kv.v == KV_F16 && !kv.shared && (kv.dim == 64 || kv.dim == 128); }

bool attend_short(Queue &q, const AttendArgs &a, const StepRows &s) {
    if (a.reach < 1 || a.reach > SHORT_PIECES || !attend_has_short(a.kv)) return false;
    return a.kv.dim == 64 ? short_launch<ShortBlock<KV_F16, KV_F16, 64>>(q, a, s) : short_launch<ShortBlock<KV_F16, KV_F16, 128>>(q, a, s);
}

/* ---- with the heads before it */
/* the layer's queries, keys and values, whole heads that turn, and nobody else reads them */
static bool take_heads(const Pass &p, const CuStep &heads, const CuStep &attend, BlockHeads *g) {
    const bw_op *op = &p.l->ops[attend.first];
    const HeadArgs &a = p.s->heads[(size_t)heads.at];
    const KvPlace kv = cu_kv_place(&p.l->kvs[op->kv]);
    int seen = 0;
    for (int i = 0; i < a.n; i++) {
        const HeadChain &x = a.c[i];
        const int what = x.append == APPEND_NONE ? 0 : x.append == APPEND_K ? 1 : 2;
        if (x.dim != kv.dim || x.heads != (what ? kv.heads : op->i[0]) || (what && (x.kv.offset != kv.offset || x.kv.klass != kv.klass))) return false;
        if (what == 2 ? x.norm || x.rot : x.l2 || (x.norm && !x.w) || x.rot != kv.dim) return false;
        if (!what && x.buf != op->buf[1]) return false;
        const CuStep &reader = what ? heads : attend;
        if (!cu_dead_after(p.l, reader.first + reader.n, x.buf)) return false;
        g->c[what] = x;
        seen |= 1 << what;
    }
    return seen == 7 && a.n == 3 && g->c[0].norm == g->c[1].norm && g->c[0].interleaved == g->c[1].interleaved;
}

/* a warp for each head that a block makes, else one would make two, one after the other, and the launch saved would be lost: so all blocks at once, too */
template <int D, bool NORM, bool PAIRS> static bool heads_launch(Queue &q, const AttendArgs &a, const StepRows &s, BlockHeads &g) {
    typedef HeadsBlock<ShortBlock<KV_F16, KV_F16, D>, NORM, PAIRS> S;
    if (a.kv.dim != D || !g.c[0].norm != !NORM || !g.c[0].interleaved != !PAIRS || a.rows >= SHORT_SLOTS || a.heads * a.rows > q.sms) return false;
    g.slots = slots_of<S>(q, a);
    g.slots = g.slots > a.rows ? g.slots : a.rows + 1;
    if ((int)S::bytes(g.slots, a.reach) > q.shared_max) return false;
    launch(q, k_attend_heads<S>, grid_of(a), 64 * g.slots, S::bytes(g.slots, a.reach), a, s, g);
    return true;
}

int run_attend_heads(Pass &p, size_t i) {
    const std::vector<CuStep> &steps = p.s->steps;
    if (!p.reach || p.l->borrows || i + 1 >= steps.size() || steps[i].kind != CU_HEADS || steps[i + 1].kind != CU_ATTEND || steps[i + 1].want) return 0;
    const CuStep &attend = steps[i + 1];
    BlockHeads g = {};
    AttendArgs a = attend_args(p, attend);
    if (a.reach > SHORT_PIECES || !attend_has_short(a.kv) || !take_heads(p, steps[i], attend, &g)) return 0;
    if (attend.quant_out) a.yo = acts_of(p, attend.out, a.rows);
    if (!heads_launch<128, true, false>(*p.q, a, p.rows, g) && !heads_launch<64, false, true>(*p.q, a, p.rows, g) &&
        !heads_launch<128, false, true>(*p.q, a, p.rows, g))
        return 0;
    for (const HeadChain &x : g.c) p.quantised[(size_t)x.buf] = 0;
    p.quantised[(size_t)attend.out] = attend.quant_out;
    return 2;
}

} // namespace bw
