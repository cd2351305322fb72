/* ATTEND of few rows at a short context with the heads before it in its launch: norms and rotations by head, appends (docs/numerics.md §4, §5, §8). A block makes
 * its query and the step's own keys and values up to its row anew, and so do the blocks beside it, so that none need meet; they go to shared memory as the
 * cache holds them. Owns the heads of a block, also those of op_attend_gated.cuh; the pieces are op_attend_short.cuh's. */
#ifndef BW24_CU_OP_ATTEND_HEADS_CUH
#define BW24_CU_OP_ATTEND_HEADS_CUH

#include "op_attend_short.cuh"
#include "op_heads.cuh"

namespace bw {

/* of queries, keys, values. A block makes its query, and the keys and values that the step adds up to its row; two warps a slot */
struct BlockHeads { HeadChain c[3]; int slots; };

/* rows of the sequence of `row` up to this one; table: of the step's rows */
__device__ __forceinline__ uint32_t rows_before(const int *table, int row, int lane) { return __ballot_sync(~0u, lane <= row && table[min(lane, row)] == table[row]); }

/* What a block's heads have: ROT columns turn, neighbours where PAIRS, NORM with weights. PARTS: blocks that share a head's columns of V, COLS each */
template <class Block, bool NORM_, bool PAIRS_> struct HeadsBlock : Block {
    static constexpr bool NORM = NORM_, PAIRS = PAIRS_;
    static constexpr int ROT = Block::DIM, PARTS = 1;
};

/* cosines and sines of a row for this lane's columns; cs: the row's */
template <class S, int G> __device__ __forceinline__ void turns_load(HeadRegs<G> &v, const float *cs, int lane) {
#pragma unroll
    for (int i = 0; i < (S::PAIRS ? G : S::ROT / 64); i++) {
        const int k = S::PAIRS ? i * 16 + lane / 2 : i * 32 + lane;
        v.co[i] = __ldcg(cs + k);
        v.si[i] = __ldcg(cs + S::ROT / 2 + k);
    }
}

/* The heads of a block, a warp each: its query to q, then key and value of each row of its sequence that the step has up to its own, to the slot of their piece:
 * slot i holds the last piece but i. mask: these rows; end: keys that the block's row sees; page: the part of its last piece. The first block of those that share
 * a KV head writes the row's own into the page. then: what each warp asks for behind the first head's values */
template <class S, class Then>
__device__ __forceinline__ void block_heads(const StepRows &s, const BlockHeads &g, S &sh, float *q, uint8_t *page, int row, int head, int part, uint32_t mask, int end,
                                            int warp, const Then &then) {
    constexpr int G = S::DIM / 32;
    const int lane = threadIdx.x & 31, fresh = __popc(mask), last = (end - 1) / PIECE, warps = 2 * g.slots;
#pragma unroll 1
    for (int t = warp;; t += warps) {
        const int what = t ? 2 - (t & 1) : 0, k = max(0, (t - 1) >> 1), pos = end - fresh + k;
        const HeadChain &c = g.c[what];
        const int rank = __popc(mask & ((1u << lane) - 1)), of = t ? __ffs(__ballot_sync(~0u, (mask >> lane & 1) && rank == k)) - 1 : row;
        const bool mine = t <= 2 * fresh;
        const float *x = held(c.x + (max(of, 0) * c.heads + (what ? (int)blockIdx.y : head)) * c.pitch + c.from + lane), *cs = held(c.cs + max(of, 0) * S::ROT);
        HeadRegs<G> v;
        float w[G] = {};
        if (S::NORM && what < 2)
#pragma unroll
            for (int i = 0; i < G; i++) w[i] = load_now(c.w + i * 32 + lane);
        pdl_wait();
        if (mine) {
#pragma unroll
            for (int i = 0; i < G; i++) v.v[i] = __ldcg(x + i * 32);
            if (what < 2) turns_load<S>(v, cs, lane);
        }
        if (t == warp) then();
        if (!mine) return;
        if (what < 2) {
            if (S::NORM) head_norm<G>(v, w, false, c.eps, S::DIM);
            if (S::PAIRS) head_rope<G>(v, S::ROT, true, lane);
            else head_pairs<G, S::ROT / 64>(v);
        }
        if (!what) {
#pragma unroll
            for (int i = 0; i < G; i++) q[i * 32 + lane] = v.v[i];
            continue;
        }
        const int j = pos % PIECE;
        typename S::Slot &sl = sh.slot(last - pos / PIECE);
        if (what == 1) {
            __half *at = (__half *)(sl.k + S::key_at(j)) + lane;
#pragma unroll
            for (int i = 0; i < G; i++) at[i * 32] = __float2half_rn(v.v[i]);
        } else {
            __half *at = (__half *)(sl.v + j * S::VB) + lane;
#pragma unroll
            for (int i = 0; i < G; i++)
                if (S::PARTS == 1 || i / (S::COLS / 32) == part) at[i % (S::COLS / 32) * 32] = __float2half_rn(v.v[i]);
        }
        if (of != row || blockIdx.x) continue;
        if (!head_append<G>(v, KV_F16, page + (what == 2 ? kv_bytes(S::FK, S::DIM) : 0), S::DIM, j, lane)) report_fault(s.fault, c.op);
    }
}

/* as k_attend_short; a row of the step in z, none left out */
template <class S> __global__ void __launch_bounds__(64 * SHORT_SLOTS, 1)
k_attend_heads(const __grid_constant__ AttendArgs a, const __grid_constant__ StepRows s, const __grid_constant__ BlockHeads g) {
    extern __shared__ __align__(16) uint8_t raw[];
    S &sh = *(S *)raw;
    const int lane = threadIdx.x & 31, warp = few_warp(), slot = warp >> 1, member = warp & 1, head = blockIdx.y * gridDim.x + blockIdx.x, row = blockIdx.z;
    pdl_trigger();
    const AttendRow r = attend_row(a, s, row);
    const uint32_t mask = rows_before(s.table + a.kv.klass * s.n, row, lane);
    const int b0 = r.lo / PIECE, pieces = (r.hi - 1) / PIECE - b0 + 1, first = pieces - 1 - slot, from = (b0 + first) * PIECE;
    const size_t part = (size_t)(kv_bytes(S::FK, S::DIM) + kv_bytes(S::FV, S::DIM)) * blockIdx.y + a.kv.offset;
    float *os = (float *)&sh.slot(g.slots);
    if (!lane) bar_init(&sh.full[slot][member], 1);
    bar_fence();
    __syncwarp();
    if (first >= 0) short_load(sh, slot, member, r.pages[b0 + first] + part, max(0, min((int)PIECE, r.hi - __popc(mask) - from)), lane);
    block_heads(s, g, sh, sh.q[0], r.pages[b0 + pieces - 1] + part, row, head, 0, mask, r.hi, warp, [] {});
    __syncthreads(); /* the query is there, and the step's keys and values */
    if (short_pieces(sh, r, sh.q[0], a.c, os, part, b0, first, g.slots, warp, lane)) report_fault(s.fault, a.op);
    __syncthreads();
    short_fold(a, sh, os, s.fault, row, head, pieces, warp, 2 * g.slots);
}

} // namespace bw
#endif
