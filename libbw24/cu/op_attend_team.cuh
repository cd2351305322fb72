/* ATTEND (docs/numerics.md §6) of few rows over heads of 64 and 128. A block is alone on its multiprocessor. Teams of four warps take its pieces (64 keys of
 * one KV head) in turn, each through rings of K and of V of its own, so that what is being read, scored and multiplied are different pieces. Two barriers of a team
 * a piece; none of the block. (n, l, o) of each piece go to memory, k_attend_merge folds them in order.
 *   scores:   float K: a lane has a key, two warps share out the queries; q8_0: a warp has a tile of 16 keys on int8 matrix units.
 *   softmax:  a warp has one or two queries.
 *   products: a warp has a quarter of the columns; V in a block format is decoded first, 16 keys at a time, into a strip of the warp's own.
 * Owns the mapping of work; refuses to know sequences beyond a row's page table. */
#ifndef BW24_CU_OP_ATTEND_TEAM_CUH
#define BW24_CU_OP_ATTEND_TEAM_CUH

#include "op_attend_deep.cuh"

namespace bw {

/* A lane's key is team_key_of(lane), or that + 4: eight lanes side by side read from eight groups of eight keys. */
__device__ __forceinline__ int team_key_of(int lane) { return (lane & 7) << 3 | lane >> 3; }

/* ---- scores, times c. 16 bytes of a row of float K */
template <int F, int N> __device__ __forceinline__ void team_floats(const uint8_t *k, float (&w)[N]) {
    const uint4 v = *(const uint4 *)k;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const uint32_t x = word_of(v, F == KV_F16 ? i : i >> 1);
        const float2 f = F == KV_F16 ? __half22float2(as_half2(x)) : e4m3x2(i & 1 ? x >> 16 : x & 0xffff);
        w[2 * i] = f.x; w[2 * i + 1] = f.y;
    }
}
/* key `key` x QG queries from q0 on */
template <class S, int QG> __device__ __forceinline__ void team_scores_float(const S &sh, const uint8_t *keys, int key, int q0, float c, float (*u)[S::PITCH]) {
    const uint8_t *k = keys + S::key_at(key);
    float p[QG];
#pragma unroll
    for (int q = 0; q < QG; q++) p[q] = 0.0f;
#pragma unroll(QG < 4 ? 4 : 2)
    for (int d = 0; d < S::DIM; d += S::STEP) {
        float w[S::STEP];
        team_floats<S::FK>(k + d * (S::KB / S::DIM), w);
#pragma unroll
        for (int i = 0; i < S::STEP; i += 4) {
            float x[QG][4];
#pragma unroll
            for (int q = 0; q < QG; q++) get_columns<4>(&sh.q[q0 + q][d + i], x[q]);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int q = 0; q < QG; q++) p[q] = fmaf(w[i + e], x[q][e], p[q]);
        }
    }
#pragma unroll
    for (int q = 0; q < QG; q++) u[q0 + q][key] = (0.0f + p[q]) * c;
}
/* keys 8 gid + member and those + 4 x all 8 queries */
template <class S> __device__ __forceinline__ void team_scores_int8(const S &sh, const uint8_t *keys, int member, int lane, float c, float (*u)[S::PITCH]) {
    constexpr int groups = S::DIM / 32;
    const int gid = lane >> 2, tig = lane & 3, key = 8 * gid + member;
    const uint8_t *k = keys + gid * S::EIGHT + member * S::KB + tig * 8;
    const uint16_t *kd = (const uint16_t *)(keys + S::SCALES) + key * groups;
    float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < groups; g++) {
        const uint2 k0 = *(const uint2 *)(k + g * 32), k1 = *(const uint2 *)(k + 4 * S::KB + g * 32), b = *(const uint2 *)(sh.code[gid] + g * 32 + tig * 8);
        const float4 d = *(const float4 *)&sh.delta[g][4 * tig];
        const GroupScale d0(d.x, d.z), d1(d.y, d.w);
        const float s0 = half_of(kd[g], 0), s1 = half_of(kd[4 * groups + g], 0);
        score_group(p, k0, k1, b, s0, s1, d0, d1);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) u[2 * tig + (i & 1)][key + 2 * (i & 2)] = (0.0f + p[i]) * c;
}

/* What a block knows of a tile: pages; its pieces, first, first + step, .. up to last; w0 .. w1 - 1 are seen whole by all queries; first key that the step
 * may write */
struct TeamTile { uint8_t *const *pages; size_t head; int first, last, step, w0, w1, queries, fresh; };

/* ---- softmax of queries member, member + 4, .. (N of them): weights in place of scores, +0 where a key is not seen; (n, l) to memory */
template <class S, int N>
__device__ __forceinline__ bool team_softmax(const AttendArgs &a, const S &sh, const TeamTile &t, int b, int member, int lane, float (*p)[S::PITCH]) {
    uint32_t worst = 0;
    float u[2][N], n[N], l[N];
#pragma unroll
    for (int i = 0; i < N; i++) { u[0][i] = p[member + TEAM_WARPS * i][lane]; u[1][i] = p[member + TEAM_WARPS * i][lane + 32]; }
#pragma unroll
    for (int i = 0; i < N; i++) { /* masks, not branches: the queries' chains of shuffles and exponentials overlap */
        const int q = member + TEAM_WARPS * i, j0 = sh.lo[q] - b * PIECE, j1 = sh.hi[q] - b * PIECE;
        const uint32_t in0 = lane >= j0 && lane < j1 ? ~0u : 0, in1 = lane + 32 >= j0 && lane + 32 < j1 ? ~0u : 0;
        worst = max(worst, max(magnitude(u[0][i]) & in0, magnitude(u[1][i]) & in1));
        n[i] = ceilf(warp_max(fmaxf(in0 ? u[0][i] : -INFINITY, in1 ? u[1][i] : -INFINITY)));
        u[0][i] = keep(bw_exp2(keep(u[0][i] - n[i], in0)), in0);
        u[1][i] = keep(bw_exp2(keep(u[1][i] - n[i], in1)), in1);
        l[i] = warp_tree(u[0][i] + u[1][i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int q = member + TEAM_WARPS * i;
        p[q][lane] = u[0][i];
        p[q][lane + 32] = u[1][i];
        if (lane == i && q < t.queries && max(0, sh.lo[q] - b * PIECE) < min((int)PIECE, sh.hi[q] - b * PIECE)) a.nl[sh.at[q] + (int64_t)b * a.heads] = make_float2(n[i], l[i]);
    }
    return worst >= 0x7f800000u;
}

/* ---- products: o of QT queries and CT columns of a lane */
template <int QT> struct TeamSeen { int from[QT], to[QT]; }; /* of the piece, by query */
/* Four keys from j on. Unless all see all, each query is told for each key: the +0 of a key that it does not see would lose a -0. */
template <class S, int QT, bool WHOLE>
__device__ __forceinline__ void team_four(const float *p, const float (&v)[4][S::CT], int j, const TeamSeen<QT> &seen, float (&o)[QT][S::CT]) {
    float x[QT][4];
#pragma unroll
    for (int q = 0; q < QT; q++) get_columns<4>(p + q * S::PITCH + j, x[q]);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int q = 0; q < QT; q++)
#pragma unroll
            for (int e = 0; e < S::CT; e++) {
                const float y = fmaf(x[q][k], v[k][e], o[q][e]);
                o[q][e] = WHOLE || (j + k >= seen.from[q] && j + k < seen.to[q]) ? y : o[q][e];
            }
}
/* V in a float format, columns from c0 on */
template <class S, int QT, bool WHOLE>
__device__ __forceinline__ void team_direct(const uint8_t *values, const float *p, int c0, int from, int to, const TeamSeen<QT> &seen, float (&o)[QT][S::CT]) {
#pragma unroll(WHOLE ? 4 : 1)
    for (int j = WHOLE ? 0 : from & ~3; j < (WHOLE ? (int)PIECE : to); j += 4) {
        float v[4][S::CT];
#pragma unroll
        for (int k = 0; k < 4; k++) float_columns<S::FV, S::DIM, S::CT>(values, j + k, c0, v[k]);
        team_four<S, QT, WHOLE>(p, v, j, seen, o);
    }
}

/* TEAM_CHUNK keys at a time through the warp's strip; the next ones' codes are read before these are multiplied */
template <class S, int F, int QT, bool WHOLE>
__device__ __forceinline__ void team_through(const uint8_t *values, float (*strip)[S::COLUMNS], const float *p, int member, int lane, int from, int to,
                                            const TeamSeen<QT> &seen, float (&o)[QT][S::CT]) {
    constexpr int KEYS = 32 / S::LANES, N = TEAM_CHUNK / KEYS; /* keys that a warp decodes at a time */
    const int quad = lane % S::LANES, c = member * (S::COLUMNS / 4) + quad, j0 = lane / S::LANES, end = WHOLE ? (int)PIECE : to;
    float *mine = &strip[j0][4 * quad];
    const uint32_t mask = c & 1 ? 0xf0 : 0x0f, spread = c & 1 ? 0x00208041u : 0x02080410u;
    int j = WHOLE ? 0 : from & ~(TEAM_CHUNK - 1);
    TeamStored<F, S::DIM> at(values, j + j0, c);
    TeamQuad raw[N];
#pragma unroll
    for (int k = 0; k < N; k++) raw[k] = at.quad(k * KEYS);
#pragma unroll 1
    for (; j < end; j += TEAM_CHUNK) {
#pragma unroll
        for (int k = 0; k < N; k++) *(float4 *)(mine + k * KEYS * S::COLUMNS) = team_decoded<F>(raw[k], mask, spread);
        __syncwarp();
        at.forward(j + TEAM_CHUNK < PIECE ? (int)TEAM_CHUNK : 0); /* past the end: any */
#pragma unroll
        for (int k = 0; k < N; k++) raw[k] = at.quad(k * KEYS);
#pragma unroll
        for (int i = 0; i < TEAM_CHUNK; i += 4) {
            float v[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++) get_columns<4>(&strip[i + k][4 * quad], v[k]);
            team_four<S, QT, WHOLE>(p, v, j + i, seen, o);
        }
        __syncwarp(); /* the strip is free */
    }
}
/* the warp's columns of o for QN queries, t.queries of which are there */
template <class S, int QN, bool WHOLE>
__device__ __forceinline__ void team_products(const AttendArgs &a, S &sh, const TeamTile &t, const uint8_t *values, const float (*p)[S::PITCH], int b, int warp, int lane) {
    constexpr int QT = QN > S::GROUPS ? QN / S::GROUPS : 1;
    const int q0 = lane / S::LANES * QT, member = warp % TEAM_WARPS, c0 = member * S::COLUMNS + lane % S::LANES * S::CT;
    float o[QT][S::CT];
    TeamSeen<QT> seen;
#pragma unroll
    for (int q = 0; q < QT; q++) {
        seen.from[q] = WHOLE ? 0 : max(0, sh.lo[q0 + q] - b * PIECE);
        seen.to[q] = WHOLE ? (int)PIECE : min((int)PIECE, sh.hi[q0 + q] - b * PIECE);
#pragma unroll
        for (int e = 0; e < S::CT; e++) o[q][e] = 0.0f;
    }
    /* the first row sees the earliest, the last the latest key */
    const int from = WHOLE ? 0 : max(0, sh.lo[0] - b * PIECE), to = WHOLE ? (int)PIECE : min((int)PIECE, sh.hi[t.queries - 1] - b * PIECE);
    if constexpr (S::DECODED_V) {
        if (S::EITHER && a.kv.v == KV_Q8_0) team_through<S, KV_Q8_0, QT, WHOLE>(values, sh.wide[warp], p[q0], member, lane, from, to, seen, o);
        else team_through<S, S::FV, QT, WHOLE>(values, sh.wide[warp], p[q0], member, lane, from, to, seen, o);
    } else team_direct<S, QT, WHOLE>(values, p[q0], c0, from, to, seen, o);
#pragma unroll
    for (int q = 0; q < QT; q++)
        if (q0 + q < t.queries && seen.from[q] < seen.to[q]) put_columns<S::CT>(a.o + (sh.at[q0 + q] + (int64_t)b * a.heads) * S::DIM + c0, o[q]);
}

/* Pieces team, team + teams, .. of the block's. A slot of K is asked for again when its scores are there, a slot of V when the team has the next piece's
 * scores, behind the barrier that stands there anyway. */
template <class S, int QN> __device__ __forceinline__ bool team_walk(const AttendArgs &a, S &sh, const TeamTile &t, TeamRing &k, TeamRing &v, int team, int teams) {
    const int lane = threadIdx.x & 31, warp = few_warp(), member = warp % TEAM_WARPS, q0 = (member >> 1) * (QN / 2);
    const int step = teams * t.step;
    int b = t.first + team * t.step, before = -1, buf = 0;
    const bool asks = member == team; /* warps of the same number share a scheduler */
    bool bad = false;
#pragma unroll 1
    for (; b <= t.last; b += step) {
        const int bk = b + k.slots * step, bv = b + (v.slots - 1) * step; /* to ask for: V into the slot of the piece before */
        const bool more_k = asks && bk <= t.last, more_v = asks && before >= 0 && bv <= t.last;
        const uint8_t *page_k = more_k ? t.pages[bk] : nullptr, *page_v = more_v ? t.pages[bv] : nullptr;
        float (*p)[S::PITCH] = sh.p[team][buf];
        k.wait();
        if constexpr (S::INT_K) team_scores_int8(sh, k.here(), member, lane, a.c, p);
        else if (q0 < t.queries) team_scores_float<S, QN / 2>(sh, k.here(), team_key_of(lane) + 4 * (member & 1), q0, a.c, p);
        team_sync(team, TEAM_WARPS); /* scores are there, K and what the piece before used are free */
        if (more_k) team_keys<S>(k.here(), k.full + k.slot, team_page(page_k) + t.head, lane);
        if (more_v) team_values<S>(v.at + before * v.bytes, v.full + before, team_page(page_v) + t.head, v.bytes, lane);
        if (QN > TEAM_WARPS || member < t.queries) bad |= team_softmax<S, QN / TEAM_WARPS>(a, sh, t, b, member, lane, p);
        team_sync(team, TEAM_WARPS); /* weights are there */
        v.wait();
        if (b >= t.w0 && b < t.w1) team_products<S, QN, true>(a, sh, t, v.here(), p, b, warp, lane);
        else team_products<S, QN, false>(a, sh, t, v.here(), p, b, warp, lane);
        before = v.slot;
        buf ^= 1;
        k.next();
        v.next();
    }
    return bad;
}

/* The block's pieces of a tile: a team's first is asked for before the dependency wait, unless the step itself writes it; after it the queries come before
 * the others. */
template <class S> __device__ __forceinline__ bool team_tile(const AttendArgs &a, S &sh, const TeamTile &t, TeamRing &k, TeamRing &v, int teams, bool &waited) {
    const int lane = threadIdx.x & 31, warp = few_warp(), team = warp / TEAM_WARPS, b = t.first + team * t.step;
    const bool mine = team < teams && b <= t.last, asks = mine && warp % TEAM_WARPS == team;
    bool asked = false;
    if (asks && !waited && (b + 1) * PIECE <= t.fresh) {
        const uint8_t *page = team_page(t.pages[b]) + t.head;
        team_keys<S>(k.here(), k.full + k.slot, page, lane);
        team_values<S>(v.here(), v.full + v.slot, page, v.bytes, lane);
        asked = true;
    }
    if (!waited) { pdl_wait(); waited = true; }
    const bool bad = team_queries(a, sh, t.queries);
    if (asks)
#pragma unroll 1
        for (int c = asked, sk = k.slot + c, sv = v.slot + c; c < max(k.slots, v.slots) && b + c * teams * t.step <= t.last; c++, sk++, sv++) {
            const uint8_t *page = team_page(t.pages[b + c * teams * t.step]) + t.head;
            if (sk >= k.slots) sk -= k.slots;
            if (sv >= v.slots) sv -= v.slots;
            if (c < k.slots) team_keys<S>(k.at + sk * k.bytes, k.full + sk, page, lane);
            if (c < v.slots) team_values<S>(v.at + sv * v.bytes, v.full + sv, page, v.bytes, lane);
        }
    __syncthreads();
    if (!mine) return bad;
    return bad | (t.queries > 4 ? team_walk<S, 8>(a, sh, t, k, v, team, teams) : team_walk<S, 4>(a, sh, t, k, v, team, teams));
}

/* x: blocks that share the pieces of a tile, y: KV heads, z: tiles. A tile has `per` heads (all that share the KV head, in chunks of at most 8) of
 * 8 / per rows. */
template <class S> __global__ void __launch_bounds__(S::THREADS, 1) k_attend_team(AttendArgs a, StepRows s, TeamShape f) {
    constexpr bool deep = S::DEEP && (S::INT_K || !SMALL_CARD); /* six slots of f16 do not fit a small card */
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int n = gridDim.x, z = blockIdx.z, rows0 = z * f.by_chunks >> 16, chunk = z - rows0 * f.chunks, end = min(a.rows, (rows0 + 1) * f.rows);
    bool waited = false, bad = false; /* positions and page tables do not come from an earlier kernel */
    pdl_trigger();
    if (threadIdx.x < 2 * TEAMS * TEAM_DEEP) bar_init(&sh.full[0][0][0] + threadIdx.x, 1);
    else if (deep && threadIdx.x < 2 * TEAMS * TEAM_DEEP + sizeof(DeepBars) / 8) bar_init(&sh.deep.keys[0] + (threadIdx.x - 2 * TEAMS * TEAM_DEEP), 1);
    bar_fence();
    const int team = few_warp() / TEAM_WARPS, value = S::value_bytes(a.kv.v);
    TeamRing k = {sh.rings() + team * (f.keys * S::K_SLOT + f.values * value), sh.full[team][0], f.keys, 0, 0, S::K_SLOT};
    TeamRing v = {k.at + f.keys * S::K_SLOT, sh.full[team][1], f.values, 0, 0, value};
    for (int r = rows0 * f.rows, x = blockIdx.x; r < end;) { /* x: the first of the pieces that is this block's */
        const AttendTile tile = {r, same_table(a, s, r, end - r), (int)blockIdx.y * f.share + chunk * f.per, f.per};
        team_place(a, s, tile, f.by_per, sh);
        const int queries = tile.rows * f.per, b0 = sh.lo[0] / PIECE, b1 = (sh.hi[queries - 1] - 1) / PIECE; /* the first row sees the earliest, the last the latest key */
        const int row = a.want ? s.want_row[r] : r;
        const TeamTile t = {attend_row(a, s, r).pages, kv_head_bytes(a.kv) * (size_t)blockIdx.y + a.kv.offset, b0 + x, b1, n,
                           (sh.lo[queries - 1] + PIECE - 1) / PIECE, sh.hi[0] / PIECE, queries, s.pos[row] - row};
        if (deep && f.deep.keys && b1 - b0 + 1 >= DEEP_LEAST * n) { /* one row, at most four queries: the block's only tile */
            if constexpr (deep) bad |= deep_tile(a, sh, {t.pages, t.head, t.first, n, (b1 - t.first) / n + 1, queries}, f.deep);
            waited = true;
        } else if (t.first <= b1) bad |= team_tile(a, sh, t, k, v, f.teams, waited);
        r += tile.rows;
        if (r >= end) break;
        x = (x + n - (b1 - b0 + 1) % n) % n; /* the pieces of all rows of the tile go round the blocks */
        __syncthreads();
    }
    if (bad) report_fault(s.fault, a.op);
    if (!waited) pdl_wait();
}

} // namespace bw
#endif
