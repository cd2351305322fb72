/* ATTEND of few rows at a short context: which heads have a kernel that attends and merges in one launch, and the shape of its blocks */
#include "launch.h"
#include "op_attend_short.cuh"

namespace bw {

/* as many slots as the pieces need; fewer where there are more blocks than multiprocessors, so that two or more are on each at a time */
template <class S> static bool short_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    static_assert(S::bytes(2, SHORT_PIECES) <= SHARED_LEAST, "a block must fit the smallest card");
    const int beside = (a.heads * a.rows + q.sms - 1) / q.sms, room = (q.shared_max + 1024) / beside - 1024; /* a block takes 1 KB beside its own */
    int slots = SHORT_SLOTS < a.reach ? SHORT_SLOTS : a.reach;
    while (slots && (int)S::bytes(slots, a.reach) > room) slots--;
    if (slots < 2) return false; /* one piece after the other would take longer than blocks that share them */
    launch(q, k_attend_short<S>, dim3((unsigned)(a.heads / a.kv.heads), (unsigned)a.kv.heads, (unsigned)a.rows), 64 * slots, S::bytes(slots, a.reach), a, s, slots);
    return true;
}

bool attend_has_short(const KvPlace &kv) { return kv.k == KV_F16 && kv.v == KV_F16 && !kv.shared && (kv.dim == 64 || kv.dim == 128); }

bool attend_short(Queue &q, const AttendArgs &a, const StepRows &s) {
    if (a.reach < 1 || a.reach > SHORT_PIECES || !attend_has_short(a.kv)) return false;
    return a.kv.dim == 64 ? short_launch<ShortBlock<KV_F16, KV_F16, 64>>(q, a, s) : short_launch<ShortBlock<KV_F16, KV_F16, 128>>(q, a, s);
}

} // namespace bw
