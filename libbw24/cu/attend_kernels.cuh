/* Instantiates ATTEND for one pair of KV formats: included by the attend_*.cu files. Owns the choice of block shapes. */
#ifndef BW24_CU_ATTEND_KERNELS_CUH
#define BW24_CU_ATTEND_KERNELS_CUH

#include "launch.h"
#include "op_attend.cuh"

namespace bw {

/* chunks of heads so that a chunk has at most n */
inline int head_chunks(int share, int n) {
    int chunks = (share + n - 1) / n;
    while (share % chunks) chunks++;
    return chunks;
}

template <int K, int V, int D, int NQ, bool SPLIT> void attend_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    typedef AttendShared<K, V, D, NQ> Sh;
    int share = a.heads / a.kv.heads, chunks = head_chunks(share, NQ), rows = NQ / (share / chunks), tiles = (a.rows + rows - 1) / rows * chunks, warps = 4;
    while (warps > 1 && warps * sizeof(Sh) > (size_t)q.shared_max) warps--;
    dim3 grid((unsigned)((tiles + warps - 1) / warps), (unsigned)a.kv.heads);
    if (SPLIT) {
        int resident = (int)((size_t)q.shared_max / (warps * sizeof(Sh) + 1024)), most = (a.max_pieces + warps - 1) / warps;
        int x = (q.sms * (resident < 1 ? 1 : resident > 8 ? 8 : resident) + a.kv.heads * tiles - 1) / (a.kv.heads * tiles);
        grid = dim3((unsigned)(x < most ? x : most), (unsigned)a.kv.heads, (unsigned)tiles);
    }
    launch(q, k_attend<K, V, D, NQ, SPLIT>, grid, 32 * warps, warps * sizeof(Sh), a, s, chunks, tiles);
}

template <int K, int V, int D> void attend_dim(Queue &q, const AttendArgs &a, const StepRows &s, bool split) {
    if (!split) attend_launch<K, V, D, 8, false>(q, a, s);
    else if (a.rows * (a.heads / a.kv.heads) <= 4) attend_launch<K, V, D, 4, true>(q, a, s);
    else attend_launch<K, V, D, 8, true>(q, a, s);
}

template <int K, int V> bool attend_run(Queue &q, const AttendArgs &a, const StepRows &s, bool split) {
    switch (a.kv.dim) {
    case 64: attend_dim<K, V, 64>(q, a, s, split); return true;
    case 128: attend_dim<K, V, 128>(q, a, s, split); return true;
    case 256: attend_dim<K, V, 256>(q, a, s, split); return true;
    default: return false;
    }
}

} // namespace bw
#endif
