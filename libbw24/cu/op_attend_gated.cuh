/* What stands between the products of an attending layer's queries and `output`, of few rows at a short context and of models whose attention has a gate, in one
 * launch: norms and rotations by head, appends, ATTEND (docs/numerics.md §6), GATE. A block has one query (a head of a row), all pieces that it sees, and
 * some of V's columns; it makes the query and the step's own keys and values before it anew, and so do the blocks beside it, so that none need meet. Two warps
 * take a piece, as in op_attend_short.cuh. Owns the mapping of work; refuses to know windows. */
#ifndef BW24_CU_OP_ATTEND_GATED_CUH
#define BW24_CU_OP_ATTEND_GATED_CUH

#include "op_attend_heads.cuh"

namespace bw {

enum { GATED_SLOTS = 4, GATED_PIECES = 4, GATED_ROT = 64 }; /* most pieces in shared memory at a time; most of a query; columns of a head that turn */

struct GatedArgs : BlockHeads {
    uint8_t *const *near; /* [classes][rows][GATED_PIECES] first pages of each row */
    const float *gate;    /* a part of each head, as HeadChain.x */
    int gate_pitch, gate_from;
};

/* Shared memory of a block: this, then the slots of the launch, then o of the pieces. VC: columns of V; a lane has CT of them. */
template <int D, int VC> struct alignas(16) GatedBlock {
    static constexpr bool NORM = true, PAIRS = false;
    static constexpr int FK = KV_F16, FV = KV_F16, DIM = D, COLS = VC, PARTS = D / VC, ROT = GATED_ROT, KB = 2 * D, VB = 2 * VC, FOUR = 4 * KB + 16, CT = VC / 64;
    struct alignas(16) Slot { uint8_t k[PIECE / 4 * FOUR], v[PIECE * VB]; };
    float q[D], gate[VC];
    float u[GATED_SLOTS][PIECE], p[2 * GATED_SLOTS][PIECE];
    float2 nl[GATED_PIECES];
    uint64_t full[GATED_SLOTS][2]; /* of a slot: its K, its V have come */
    __device__ __forceinline__ static int key_at(int j) { return (j >> 2) * FOUR + (j & 3) * KB; }
    __device__ __forceinline__ Slot &slot(int i) { return *(Slot *)((uint8_t *)this + sizeof(GatedBlock) + i * sizeof(Slot)); }
    static constexpr size_t bytes(int slots, int pieces) { return sizeof(GatedBlock) + slots * sizeof(Slot) + (size_t)pieces * VC * sizeof(float); }
};

/* an arrival of this thread when all of its copies so far have come; the barrier's count has it */
__device__ __forceinline__ void gated_copied(uint64_t *b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_at(b)) : "memory");
}

/* The first `have` keys or values of a page on their way into a slot, by a warp: BYTES of each row of the page, four rows FOUR bytes apart. A bulk copy has
 * one lane at a time and comes later. */
template <int BYTES, int PITCH, int FOUR> __device__ __forceinline__ void gated_load(uint8_t *to, const uint8_t *page, int have, int lane) {
    constexpr int LANES = BYTES / 16, ROWS = 32 / LANES; /* a row; rows of a copy of all lanes */
    const int r = lane / LANES, at = lane % LANES * 16;
    to += r * BYTES + at;
    page += r * PITCH + at;
#pragma unroll 1
    for (int j = r; j < have + r; j += 4, to += FOUR, page += 4 * PITCH)
#pragma unroll
        for (int i = 0; i < 4; i += ROWS)
            if (j + i < have) cp16(to + i * BYTES, page + i * PITCH);
}
template <class S> __device__ __forceinline__ void gated_keys(typename S::Slot &sl, const uint8_t *page, int have, int lane) {
    gated_load<S::KB, S::KB, S::FOUR>(sl.k, page, have, lane);
}
template <class S> __device__ __forceinline__ void gated_values(typename S::Slot &sl, const uint8_t *page, int part, int have, int lane) {
    gated_load<S::VB, 2 * S::DIM, 4 * S::VB>(sl.v, page + kv_bytes(S::FK, S::DIM) + part * S::VB, have, lane);
}

/* the pieces of the query, folded in order, and their GATE: groups of 32 columns, a warp each */
template <class S> __device__ __forceinline__ void gated_fold(const AttendArgs &a, const S &sh, const float *os, int *fault, int row, int col, int pieces, int warp, int warps) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int g = warp; g < S::COLS / 32; g += warps) {
        float N = -INFINITY, L = -0.0f, O = -0.0f; /* to which the first piece adds itself as it is */
#pragma unroll 1
        for (int i = 0; i < pieces; i++) {
            const float2 nl = sh.nl[i];
            const float o = os[i * S::COLS + g * 32 + lane], with = fmaxf(N, nl.x), k = pow2_factor(nl.x - with), f = pow2_factor(N - with);
            O = fmaf(o, k, O * f);
            L = fmaf(nl.y, k, L * f);
            N = with;
        }
        float y = O * (1.0f / L);
        if (not_finite(y)) report_fault(fault, a.op);
        y = y * bw_sigmoid(sh.gate[g * 32 + lane]);
        a.y[row * a.heads * S::DIM + col + g * 32 + lane] = y;
        if (a.yo.q) quant_group(a.yo, row, col / 32 + g, lane, y, fault, a.quant_op);
    }
}

/* x: heads that share a KV head times parts of V's columns, y: KV heads, z: rows. A slot has a piece at a time and two warps; the last pieces, with the keys of the
 * step, come first. Old keys are asked for before the dependency wait, values behind the inputs of the heads. */
template <class S> __global__ void __launch_bounds__(64 * GATED_SLOTS, 1)
k_attend_gated(const __grid_constant__ AttendArgs a, const __grid_constant__ StepRows s, const __grid_constant__ GatedArgs g) {
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int lane = threadIdx.x & 31, warp = few_warp(), slot = warp >> 1, member = warp & 1, row = blockIdx.z, slots = g.slots;
    const int part = blockIdx.x % S::PARTS, head = blockIdx.y * (gridDim.x / S::PARTS) + blockIdx.x / S::PARTS;
    pdl_trigger();
    const int end = s.pos[row] + 1; /* keys that the row sees; none of this comes from an earlier kernel */
    const uint64_t near = (uint64_t)g.near[(a.kv.klass * s.n + row) * GATED_PIECES + (lane & (GATED_PIECES - 1))];
    const int *table = s.table + a.kv.klass * s.n;
    const uint32_t mask = rows_before(table, row, lane);
    const int fresh = end - __popc(mask), pieces = (end - 1) / PIECE + 1, first = pieces - 1 - slot; /* the first key that the step writes; the slot's first piece */
    const size_t place = (size_t)(kv_bytes(S::FK, S::DIM) + kv_bytes(S::FV, S::DIM)) * blockIdx.y + a.kv.offset;
    const auto page_of = [&](int b) { return (uint8_t *)__shfl_sync(~0u, near, b & (GATED_PIECES - 1)) + place; }; /* of piece b, by a whole warp */
    typename S::Slot &sl = sh.slot(slot);
    float *os = (float *)&sh.slot(slots);
    bool bad = false; /* Inf and NaN of a query are found in its scores */
    uint64_t *full = sh.full[slot];
    if (!lane) bar_init(full + member, 32);
    bar_fence();
    __syncwarp();
    const int have = first < 0 ? 0 : max(0, min((int)PIECE, fresh - first * PIECE));
    uint8_t *page = page_of(first);
    if (!member) gated_keys<S>(sl, page, have, lane);
    block_heads(s, g, sh, sh.q, page_of(pieces - 1), row, head, part, mask, end, warp, [&] {
        const float *gate = g.gate + (row * a.heads + head) * g.gate_pitch + g.gate_from + part * S::COLS;
        if (warp == 1)
            for (int i = lane; i < S::COLS / 4; i += 32) cp16(&sh.gate[4 * i], gate + 4 * i);
        if (member) gated_values<S>(sl, page, part, have, lane);
        gated_copied(full + member);
    });
    __syncthreads();
    int phase = 0;
#pragma unroll 1
    for (int i = first; i >= 0; i -= slots, phase ^= 1) {
        const int j1 = min((int)PIECE, end - i * PIECE), key = few_key_of(lane);
        uint8_t *next = page_of(i - slots);
        bar_wait(full, phase);
        sh.u[slot][key + 32 * member] = short_score<S>(sl.k + S::key_at(key) + member * 8 * S::FOUR, sh.q, a.c);
        team_sync(slot, 2); /* all scores are there, K is free */
        if (i >= slots && !member) {
            gated_keys<S>(sl, next, PIECE, lane);
            gated_copied(full);
        }
        float u[2] = {sh.u[slot][lane], sh.u[slot][lane + 32]}, o[S::CT];
        float2 nl;
        bad |= short_softmax(u, 0, j1, lane, nl);
        sh.p[warp][lane] = u[0];
        sh.p[warp][lane + 32] = u[1];
        __syncwarp();
        bar_wait(full + 1, phase);
        const int c0 = member * (S::COLS / 2) + lane * S::CT;
        short_products<S>(sl, sh.p[warp], c0, 0, j1, o);
        put_columns<S::CT>(os + i * S::COLS + c0, o);
        if (!member && !lane) sh.nl[i] = nl;
        if (i < slots) break;
        team_sync(slot, 2); /* V is free, and the scores */
        if (!member) continue;
        gated_values<S>(sl, next, part, PIECE, lane);
        gated_copied(full + 1);
    }
    if (bad) report_fault(s.fault, a.op);
    __syncthreads();
    gated_fold(a, sh, os, s.fault, row, head * S::DIM + part * S::COLS, pieces, warp, 2 * slots);
}

} // namespace bw
#endif
