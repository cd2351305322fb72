/* ATTEND (docs/numerics.md §6) of few rows at a short context over float keys, in one launch. A block has one query (a head of a row) and all pieces that it
 * sees, so that no blocks need meet: two warps take a piece, each with the scores of half of the keys and the products of half of the columns; (n, l, o)
 * of the pieces stay in shared memory, where the block folds them in order. Owns the mapping of work; refuses to know sequences beyond a row's page table. */
#ifndef BW24_CU_OP_ATTEND_SHORT_CUH
#define BW24_CU_OP_ATTEND_SHORT_CUH

#include "op_attend_few.cuh"

namespace bw {

enum { SHORT_PIECES = 16, SHORT_SLOTS = 8 }; /* most pieces of a query; most of them in shared memory at a time */

/* Shared memory of a block: this, then the slots of the launch, then o of as many pieces as a query may have. A lane has CT columns of V. */
template <int K, int V, int D> struct alignas(16) ShortBlock {
    typedef FewBlock<K, V, D> Few;
    typedef typename Few::Slot Slot;
    static_assert(D <= 128, "a warp brings a query at once");
    static constexpr int FK = K, FV = V, DIM = D, COLS = D, KB = Few::KB, VB = kv_bytes(V, D) / PIECE, FOUR = Few::FOUR, CT = D / 64;
    float q[SHORT_SLOTS][D]; /* a copy for the two warps of each slot; where the block makes it itself, the first alone */
    float u[SHORT_SLOTS][PIECE], p[2 * SHORT_SLOTS][PIECE];
    float2 nl[SHORT_PIECES];
    uint64_t full[SHORT_SLOTS][2]; /* of a slot: its K, its V have come */
    __device__ __forceinline__ static int key_at(int j) { return Few::key_at(j); }
    __device__ __forceinline__ Slot &slot(int i) { return *(Slot *)((uint8_t *)this + sizeof(ShortBlock) + i * sizeof(Slot)); }
    static constexpr size_t bytes(int slots, int pieces) { return sizeof(ShortBlock) + slots * sizeof(Slot) + (size_t)pieces * D * sizeof(float); }
};

/* The first `have` keys of a page into a slot: K by the slot's first warp, V by its second. */
template <class S> __device__ __forceinline__ void short_load(S &sh, int slot, int member, const uint8_t *page, int have, int lane) {
    typename S::Slot &to = sh.slot(slot);
    uint64_t *full = &sh.full[slot][member];
    if (!lane) bar_expect(full, have * (member ? S::VB : S::KB));
    __syncwarp();
    if (member) {
        if (!lane && have) bulk_copy(to.v, page + kv_bytes(S::FK, S::DIM), have * S::VB, full);
    } else {
        const int n = min(4, have - 4 * lane);
        if (n > 0) bulk_copy(to.k + lane * S::FOUR, page + lane * 4 * S::KB, n * S::KB, full);
    }
    bar_issued_by_warp(full);
}

/* Keys from .. to - 1 of a page, which the step itself writes, on their way by one warp */
template <class S> __device__ __forceinline__ void short_fresh(S &sh, int slot, const uint8_t *page, int from, int to, int lane) {
    constexpr int KC = S::KB / 16, VC = S::VB / 16;
    typename S::Slot &sl = sh.slot(slot);
    const uint8_t *v = page + kv_bytes(S::FK, S::DIM);
#pragma unroll 1
    for (int i = lane; i < (to - from) * (KC + VC); i += 32) {
        const int j = from + i / (KC + VC), w = i % (KC + VC), at = j * S::VB + 16 * (w - KC);
        cp16(w < KC ? sl.k + S::Few::key_at(j) + 16 * w : sl.v + at, w < KC ? page + j * S::KB + 16 * w : v + at);
    }
}

/* score of one key, times c */
template <class S> __device__ __forceinline__ float short_score(const uint8_t *k, const float *q, float c) {
    static_assert(S::DIM <= 256, "one segment");
    float p = 0.0f;
#pragma unroll 4
    for (int d = 0; d < S::DIM; d += 8) {
        float w[8], x[8];
        floats8<S::FK>(k + d * (S::KB / S::DIM), w);
        get_columns<4>(q + d, x);
        get_columns<4>(q + d + 4, x + 4);
#pragma unroll
        for (int i = 0; i < 8; i++) p = fmaf(w[i], x[i], p);
    }
    return (0.0f + p) * c;
}

/* weights of the keys [j0, j1) in place of their scores, +0 elsewhere: of keys lane and lane + 32; true where one is not finite */
__device__ __forceinline__ bool short_softmax(float (&u)[2], int j0, int j1, int lane, float2 &nl) {
    const uint32_t in0 = lane >= j0 && lane < j1 ? ~0u : 0, in1 = lane + 32 >= j0 && lane + 32 < j1 ? ~0u : 0;
    const uint32_t worst = max(magnitude(u[0]) & in0, magnitude(u[1]) & in1);
    nl.x = ceilf(warp_max(fmaxf(in0 ? u[0] : -INFINITY, in1 ? u[1] : -INFINITY)));
    u[0] = keep(bw_exp2(keep(u[0] - nl.x, in0)), in0);
    u[1] = keep(bw_exp2(keep(u[1] - nl.x, in1)), in1);
    nl.y = warp_tree(u[0] + u[1]);
    return worst >= 0x7f800000u;
}

/* o of columns c0 .. c0 + CT - 1 over the keys [j0, j1), ascending: sixteen at a time, the rest in eights of which some are left out */
template <class S> __device__ __forceinline__ void short_products(const typename S::Slot &sl, const float *p, int c0, int j0, int j1, float (&o)[S::CT]) {
#pragma unroll
    for (int e = 0; e < S::CT; e++) o[e] = 0.0f;
#pragma unroll 1
    for (int j = j0 & ~7; j < j1;) {
        float x[16], v[S::CT];
        if (j >= j0 && j + 16 <= j1) {
#pragma unroll
            for (int k = 0; k < 16; k += 4) get_columns<4>(p + j + k, x + k);
#pragma unroll
            for (int k = 0; k < 16; k++) {
                float_columns<S::FV, S::COLS, S::CT>(sl.v, j + k, c0, v);
#pragma unroll
                for (int e = 0; e < S::CT; e++) o[e] = fmaf(x[k], v[e], o[e]);
            }
            j += 16;
            continue;
        }
#pragma unroll
        for (int k = 0; k < 8; k += 4) get_columns<4>(p + j + k, x + k);
#pragma unroll
        for (int k = 0; k < 8; k++) { /* the +0 of a key that is not seen would lose a -0 */
            float_columns<S::FV, S::COLS, S::CT>(sl.v, j + k, c0, v);
#pragma unroll
            for (int e = 0; e < S::CT; e++) { const float y = fmaf(x[k], v[e], o[e]); o[e] = j + k >= j0 && j + k < j1 ? y : o[e]; }
        }
        j += 8;
    }
}

/* the pieces of the query, folded in order: groups of 32 columns, a warp each */
template <class S> __device__ __forceinline__ void short_fold(const AttendArgs &a, const S &sh, const float *os, int *fault, int row, int head, int pieces, int warp, int warps) {
    constexpr int D = S::DIM;
    const int lane = threadIdx.x & 31;
    for (int g = warp; g < D / 32; g += warps) {
        float N = -INFINITY, L = -0.0f, O = -0.0f; /* to which the first piece adds itself as it is */
#pragma unroll 2
        for (int i = 0; i < pieces; i++) {
            const float2 nl = sh.nl[i];
            const float o = os[i * D + g * 32 + lane], with = fmaxf(N, nl.x), k = pow2_factor(nl.x - with), f = pow2_factor(N - with);
            O = fmaf(o, k, O * f);
            L = fmaf(nl.y, k, L * f);
            N = with;
        }
        const float y = O * (1.0f / L);
        if (not_finite(y)) report_fault(fault, a.op);
        a.y[((size_t)row * a.heads + head) * D + g * 32 + lane] = y;
        if (a.yo.q) quant_group(a.yo, row, head * (D / 32) + g, lane, y, fault, a.op);
    }
}

/* The pieces `first`, first - slots, ... of the query q (piece 0 begins at page b0), which this warp's slot takes; the first one is on its way or there. part: of
 * the KV head in a page. true: a score is not finite */
template <class S>
__device__ __forceinline__ bool short_pieces(S &sh, const AttendRow &r, const float *q, float c, float *os, size_t part, int b0, int first, int slots, int warp, int lane) {
    const int slot = warp >> 1, member = warp & 1, key = few_key_of(lane);
    typename S::Slot &sl = sh.slot(slot);
    bool bad = false; /* Inf and NaN of a query are found in its scores */
    int phase = 0;
#pragma unroll 1
    for (int i = first; i >= 0; i -= slots, phase ^= 1) {
        const int b = b0 + i, j0 = max(0, r.lo - b * PIECE), j1 = min((int)PIECE, r.hi - b * PIECE);
        bar_wait(&sh.full[slot][0], phase);
        sh.u[slot][key + 32 * member] = short_score<S>(sl.k + S::key_at(key) + member * 8 * S::FOUR, q, c);
        team_sync(slot, 2); /* all scores are there, K is free */
        if (i >= slots && !member) short_load(sh, slot, 0, r.pages[b - slots] + part, PIECE, lane);
        float u[2] = {sh.u[slot][lane], sh.u[slot][lane + 32]}, o[S::CT];
        float2 nl;
        bad |= short_softmax(u, j0, j1, lane, nl);
        sh.p[warp][lane] = u[0];
        sh.p[warp][lane + 32] = u[1];
        __syncwarp();
        bar_wait(&sh.full[slot][1], phase);
        const int c0 = member * (S::DIM / 2) + lane * S::CT;
        short_products<S>(sl, sh.p[warp], c0, j0, j1, o);
        put_columns<S::CT>(os + i * S::DIM + c0, o);
        if (!member && !lane) sh.nl[i] = nl;
        if (i < slots) break;
        team_sync(slot, 2); /* V is free, and the scores */
        if (member) short_load(sh, slot, 1, r.pages[b - slots] + part, PIECE, lane);
    }
    return bad;
}

/* x: heads that share a KV head, y: KV heads, z: rows. slots: pieces in shared memory at a time, two warps each, the last pieces first: at least two, so that all
 * keys that the step writes are among the first of a slot. Pages are asked for before the dependency wait, but for these keys. */
template <class S> __global__ void __launch_bounds__(64 * SHORT_SLOTS, 1) k_attend_short(AttendArgs a, StepRows s, int slots) {
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int lane = threadIdx.x & 31, warp = few_warp(), slot = warp >> 1, member = warp & 1, head = blockIdx.y * gridDim.x + blockIdx.x, row = blockIdx.z;
    pdl_trigger();
    const AttendRow r = attend_row(a, s, row); /* positions and page tables do not come from an earlier kernel */
    const int of = a.want ? s.want_row[row] : row, fresh = s.pos[of] - of; /* the first key that the step may write */
    const int b0 = r.lo / PIECE, pieces = (r.hi - 1) / PIECE - b0 + 1, first = pieces - 1 - slot, from = (b0 + first) * PIECE;
    const size_t part = (size_t)(kv_bytes(S::FK, S::DIM) + kv_bytes(S::FV, S::DIM)) * blockIdx.y + a.kv.offset;
    float *os = (float *)&sh.slot(slots);
    if (!lane) bar_init(&sh.full[slot][member], 1);
    bar_fence();
    __syncwarp();
    const bool mine = first >= 0;
    const uint8_t *page = mine ? r.pages[b0 + first] + part : nullptr;
    const int end = min((int)PIECE, r.hi - from), have = max(0, min(end, fresh - from));
    if (mine) short_load(sh, slot, member, page, have, lane);
    pdl_wait();
    if (mine && member) short_fresh(sh, slot, page, have, end, lane);
    else if (mine && lane < S::DIM / 4) cp16(&sh.q[slot][4 * lane], a.q + ((size_t)row * a.heads + head) * S::DIM + 4 * lane);
    asm volatile("cp.async.wait_all;");
    team_sync(slot, 2);
    if (short_pieces(sh, r, sh.q[slot], a.c, os, part, b0, first, slots, warp, lane)) report_fault(s.fault, a.op);
    __syncthreads();
    short_fold(a, sh, os, s.fault, row, head, pieces, warp, 2 * slots);
}

} // namespace bw
#endif
