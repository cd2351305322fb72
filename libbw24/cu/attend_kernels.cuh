/* Instantiates ATTEND for one pair of KV formats: included by the attend_*.cu files. Owns the choice of block shapes. */
#ifndef BW24_CU_ATTEND_KERNELS_CUH
#define BW24_CU_ATTEND_KERNELS_CUH

#include "launch.h"
#include "op_attend.cuh"
#include "op_attend_few.cuh"
#include "op_attend_many.cuh"
#include "op_attend_team.cuh"

namespace bw {

template <class S> bool attend_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    static_assert(S::DIM > 256 || sizeof(S) <= SHARED_LEAST, "a block must fit the smallest card");
    const size_t bytes = S::bytes(a.kv.v);
    if (bytes > (size_t)q.shared_max) return false;
    int share = a.heads / a.kv.heads, chunks = head_chunks(share, S::QUERIES), rows = S::QUERIES / (share / chunks), tiles = (a.rows + rows - 1) / rows * chunks;
    dim3 grid((unsigned)a.kv.heads, (unsigned)tiles);
    if (S::SPLIT) {
        int resident = (int)((size_t)q.shared_max / (bytes + 1024)), most = a.max_pieces * rows;
        int x = (q.sms * (resident < 1 ? 1 : resident > S::BLOCKS ? S::BLOCKS : resident) + a.kv.heads * tiles - 1) / (a.kv.heads * tiles);
        grid = dim3((unsigned)(x < most ? x : most), (unsigned)a.kv.heads, (unsigned)tiles);
    }
    launch(q, k_attend<S>, grid, S::THREADS, bytes, a, s, chunks, tiles);
    return true;
}

template <class S> bool many_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    static_assert(sizeof(S) <= SHARED_LEAST, "a block must fit the smallest card");
    int share = a.heads / a.kv.heads, chunks = head_chunks(share, S::QUERIES), rows = S::QUERIES / (share / chunks), tiles = (a.rows + rows - 1) / rows * chunks;
    launch(q, k_attend_many<S>, dim3((unsigned)a.kv.heads, (unsigned)tiles), S::THREADS, sizeof(S), a, s, chunks, tiles);
    return true;
}

/* few rows over float keys: as many slots as the card has room for, the warps shared out among them; the block of a multiprocessor is alone there */
template <class S> bool few_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    static_assert(sizeof(S) + sizeof(typename S::Slot) <= SHARED_LEAST, "a block must fit the smallest card");
    int slots = (q.shared_max - (int)sizeof(S)) / (int)sizeof(typename S::Slot), team = slots >= S::WARPS ? 1 : S::WARPS / slots;
    if (team < S::QUERIES / S::MOST) team = S::QUERIES / S::MOST;
    int used = slots < S::WARPS / team ? slots : S::WARPS / team;
    int share = a.heads / a.kv.heads, chunks = head_chunks(share, S::QUERIES), rows = S::QUERIES / (share / chunks), tiles = (a.rows + rows - 1) / rows * chunks;
    int x = q.sms / (a.kv.heads * tiles), most = a.max_pieces * rows;
    dim3 grid((unsigned)(x < 1 ? 1 : x < most ? x : most), (unsigned)a.kv.heads, (unsigned)tiles);
    launch(q, k_attend_few<S>, grid, S::THREADS, sizeof(S) + used * sizeof(typename S::Slot), a, s, chunks, used, team);
    return true;
}

/* few rows, heads of 64 and 128: rings as deep as the card has room for; the block of a multiprocessor is alone there */
template <class S> bool team_launch(Queue &q, const AttendArgs &a, const StepRows &s) {
    static_assert(sizeof(S) + S::K_SLOT + S::value_bytes(KV_Q8_0) <= SHARED_LEAST, "a block must fit the smallest card");
    const int room = q.shared_max - (int)sizeof(S), value = S::value_bytes(a.kv.v), both = S::K_SLOT + value;
    int teams = TEAMS;
    while (room / teams < both) teams /= 2;
    int values = room / teams / both, keys = values;
    if (room / teams - values * both >= value) values++;
    if (values > TEAM_DEEP) values = TEAM_DEEP; /* more is not faster, and keeps the merge from waiting beside this block */
    if (keys > TEAM_DEEP) keys = TEAM_DEEP;
    int share = a.heads / a.kv.heads, chunks = head_chunks(share, S::QUERIES), rows = S::QUERIES / (share / chunks), tiles = (a.rows + rows - 1) / rows * chunks;
    int x = q.sms / (a.kv.heads * tiles), most = a.max_pieces * rows;
    dim3 grid((unsigned)(x < 1 ? 1 : x < most ? x : most), (unsigned)a.kv.heads, (unsigned)tiles);
    const DeepSlots deep = S::DEEP && a.rows == 1 && share / chunks <= DEEP_QUERIES ? S::deep_slots(room, value) : DeepSlots{0, 0};
    const int rings = teams * (keys * S::K_SLOT + values * value), deeper = deep.keys * S::K_SLOT + deep.values * value;
    TeamShape f = team_shape(share, chunks, S::QUERIES, teams, keys, values, deep);
    launch(q, k_attend_team<S>, grid, S::THREADS, sizeof(S) + (size_t)(deeper > rings ? deeper : rings), a, s, f);
    return true;
}

/* f16 heads of 256 fill the shared memory of a small card with 16 queries; heads of 512 do not fit it */
template <int K, int V, int D> bool attend_dim(Queue &q, const AttendArgs &a, const StepRows &s, bool split) {
    constexpr bool floats = (K == KV_F16 || K == KV_E4M3) && K == V;
    if constexpr (floats && D <= 256)
        if (!split) return many_launch<ManyBlock<K, D>>(q, a, s);
    constexpr bool large = D > 256 || (D == 256 && (K == KV_F16 || V == KV_F16));
    constexpr int many = large ? 16 : 32, loop = large ? 16 : D == 256 ? 32 : 64, threads = large ? 128 : 256;
    if constexpr (!floats || D > 256)
        if (!split) return attend_launch<AttendBlock<K, block_v(V, D, loop), D, loop, threads, false>>(q, a, s);
    if constexpr (floats && D == 256) return few_launch<FewBlock<K, V, D>>(q, a, s);
    else {
        if constexpr (!floats && D > 64 && D <= 256) /* heads of 64: 4 to 8 rows took 8.1 to 8.8 us so, 6.1 to 6.4 in tiles of 8 queries */
            if (a.rows * (a.heads / a.kv.heads) > 8) return attend_launch<AttendBlock<K, block_v(V, D, many), D, many, 128, true>>(q, a, s);
        if constexpr (D <= 128) return team_launch<TeamBlock<K, block_v(V, D, 8), D>>(q, a, s);
        else return attend_launch<AttendBlock<K, block_v(V, D, 8), D, 8, 128, true>>(q, a, s);
    }
}

template <int K, int V> bool attend_run(Queue &q, const AttendArgs &a, const StepRows &s, bool split) {
    switch (a.kv.dim) {
    case 64: return attend_dim<K, V, 64>(q, a, s, split);
    case 128: return attend_dim<K, V, 128>(q, a, s, split);
    case 256: return attend_dim<K, V, 256>(q, a, s, split);
    case 512: /* the pairs that models with such heads use */
        if constexpr (V == KV_F16 || V == KV_Q5_1) return attend_dim<K, V, 512>(q, a, s, split);
        return false;
    default: return false;
    }
}

} // namespace bw
#endif
