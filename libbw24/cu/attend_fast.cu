/* ATTEND of the numeric class `fast` */
#include "launch.h"
#include "op_attend_fast.cuh"

namespace bw {

template <int D> static void fast_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    typedef FastBlock<D> S;
    static_assert(sizeof(S) <= SHARED_LEAST, "a block must fit the smallest card");
    int share = a.heads / a.kv.heads, chunks = head_chunks(share, S::QUERIES), rows = S::QUERIES / (share / chunks), tiles = (a.rows + rows - 1) / rows * chunks;
    size_t part = kv_head_bytes(a.kv);
    bool staged = sizeof(S) + part <= (size_t)q.shared_max && part % 16 == 0;
    launch(q, k_attend_fast<D>, dim3((unsigned)a.kv.heads, (unsigned)tiles), S::THREADS, sizeof(S) + (staged ? part : 0), a, s, chunks, tiles, (int)staged);
}

bool attend_class_fast(Queue &q, const AttendArgs &a, const StepRows &s) {
    switch (a.kv.dim) {
    case 64: fast_launch<64>(q, a, s); return true;
    case 128: fast_launch<128>(q, a, s); return true;
    case 256: fast_launch<256>(q, a, s); return true;
    default: return false;
    }
}

} // namespace bw
