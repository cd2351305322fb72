/* EXPERTS over quantised weights (docs/numerics.md §2, §10), a pair (row, slot) at a time: every block reads the id of its expert from the route, so the
 * host never waits for one. Owns the mapping of work to threads: a warp folds tasks, two neighbouring segments of a tile of 16 outputs, which lie side by
 * side in memory; bulk copies bring the first tasks of all warps at once as soon as the expert is known. The order of sums is op_linear.cuh's. */
#ifndef BW24_CU_OP_EXPERTS_CUH
#define BW24_CU_OP_EXPERTS_CUH

#include "moe.cuh"
#include "op_linear_one.cuh"
#include "op_route.cuh"

namespace bw {

enum { EXPERT_WARPS = 8, EXPERT_PAIR_ACTS = 512 + 256 }; /* bytes of two segments of a row: codes, then 16 scales (put_scale's pairs), sums and low sums */

/* What a block knows of its row's experts */
struct ExpertSums { float scale[EXPERT_SLOTS], weight[EXPERT_SLOTS], d[EXPERT_SLOTS * 16]; int id[EXPERT_SLOTS]; };

/* Shared memory of a block: ExpertSums, barriers, a ring of tasks and a box for each warp, the rows' activations (a row's codes, then its scales, sums, low sums),
 * sums of segments by tile */
template <class U> struct ExpertMem {
    static constexpr int TASK = 2 * U::UNIT, SLOT = PAIR_SLOT<U>, PLACES = OneBox<OneActs<U>::SETS>::PLACES /* floats of a box */, HEAD = (sizeof(ExpertSums) + 127) / 128 * 128;
    uint64_t *full;
    uint8_t *ring, *acts;
    float *box, *parts;
    int pairs, pitch; /* of segments; floats from one tile's sums to the next */
    __host__ __device__ static size_t bars(int warps, int depth) { return ((size_t)warps * depth * 8 + 127) / 128 * 128; }
    __host__ __device__ static int pitch_of(int pairs) { return pairs * 32 + 16; } /* two tiles lie in separate banks */
    static size_t bytes(int warps, int depth, int pairs, int rows, int tiles) {
        return HEAD + bars(warps, depth) + (size_t)warps * ((size_t)depth * SLOT + PLACES * sizeof(float)) +
               (size_t)rows * pairs * EXPERT_PAIR_ACTS + (size_t)tiles * pitch_of(pairs) * sizeof(float);
    }
    __device__ __forceinline__ ExpertMem(uint8_t *mem, int depth, int segs, int rows) {
        const int warps = blockDim.x >> 5, warp = threadIdx.x >> 5;
        pairs = (segs + 1) >> 1;
        pitch = pitch_of(pairs);
        mem += HEAD;
        full = (uint64_t *)mem + warp * depth;
        mem += bars(warps, depth);
        ring = mem + (size_t)warp * depth * SLOT;
        mem += (size_t)warps * depth * SLOT;
        box = (float *)mem + warp * PLACES;
        acts = mem + warps * PLACES * sizeof(float);
        parts = (float *)(acts + rows * pairs * EXPERT_PAIR_ACTS);
    }
    /* a row's: codes; scales; sums, behind which the low sums lie at distance 16 pairs */
    __device__ __forceinline__ uint8_t *codes(int row) const { return acts + row * pairs * EXPERT_PAIR_ACTS; }
    __device__ __forceinline__ float *scales(int row) const { return (float *)(codes(row) + pairs * 512); }
    __device__ __forceinline__ float *sums(int row) const { return scales(row) + pairs * 32; }
    __device__ __forceinline__ void begin(int depth) const { /* by each warp for its own barriers */
        if ((threadIdx.x & 31) < depth) bar_init(full + (threadIdx.x & 31), 1);
        bar_fence();
        __syncwarp();
    }
    /* by one lane: a task into a slot; whole: both units are within the matrix */
    __device__ __forceinline__ void ask(int slot, const uint8_t *w, bool whole) const {
        const int bytes = whole ? TASK : U::UNIT;
        bar_expect(full + slot, bytes);
        bulk_copy(ring + (size_t)slot * SLOT, w, bytes, full + slot);
        bar_issued(full + slot);
    }
};

/* rows from, from + 1, ... of x, a warp two segments of one; complete after cp.async.wait_all and a barrier. Zero past the columns. */
template <class U> __device__ __forceinline__ void expert_rows(const Acts &x, int from, int rows, const ExpertMem<U> &m) {
    constexpr bool SUMS = U::FORM == FORM_S1M || U::FORM == FORM_S2M, LOWS = U::FORM == FORM_S2M;
    const int lane = threadIdx.x & 31, groups = x.cols >> 5;
#pragma unroll 1
    for (int i = threadIdx.x >> 5; i < rows * m.pairs; i += blockDim.x >> 5) {
        const int row = i / m.pairs, pair = i - row * m.pairs, c = pair * 512 + lane * 16, g = pair * 16 + (lane & 15);
        const size_t at = (size_t)g * x.ld + from + row;
        if (c < x.cols) cp16(m.codes(row) + c, x.q + (size_t)(from + row) * x.cols + c);
        else *(uint4 *)(m.codes(row) + c) = make_uint4(0, 0, 0, 0);
        const float *p = lane < 16 ? x.delta : x.sum;
        const float v = g < groups && (SUMS || lane < 16) ? __ldcg(p + at) : 0.0f, low = LOWS && lane < 16 && g < groups ? __ldcg(x.low + at) : 0.0f;
        if (lane < 16) put_scale(m.scales(row), g, v);
        else if (SUMS) m.sums(row)[g] = v;
        if (LOWS && lane < 16) m.sums(row)[m.pairs * 16 + g] = low;
    }
}

/* B registers of two segments, made when wanted: at(u, j) of group j of segment u */
template <class U> struct ExpertActs {
    static constexpr bool HALVES = OneActs<U>::HALVES;
    static constexpr int SETS = OneActs<U>::SETS;
    uint2 q[2];
    int gid;
    __device__ __forceinline__ ExpertActs(const uint8_t *codes, int lane) : gid(lane >> 2) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const uint8_t *p = codes + u * 256 + (lane & 3) * 8;
            if (HALVES) { /* column gid: half gid % 2 of group gid / 2 * 2, and of the one after it in the second set */
                q[u].x = *(const uint32_t *)(p + (gid & 6) * 32 + (gid & 1) * 4);
                q[u].y = *(const uint32_t *)(p + (gid & 6) * 32 + 32 + (gid & 1) * 4);
            } else q[u] = *(const uint2 *)(p + gid * 32);
        }
    }
    __device__ __forceinline__ uint2 at(int u, int j) const {
        if (!HALVES) return make_uint2(gid == j ? q[u].x : 0, gid == j ? q[u].y : 0);
        const uint32_t v = j & 1 ? q[u].y : q[u].x;
        return make_uint2(gid == (j & 6) ? v : 0, gid == (j | 1) ? v : 0);
    }
};

/* The accumulators of a lane of the pair of units at w, as one_dots gives them; codes are read from shared memory as they are wanted */
template <class U> __device__ __forceinline__ void expert_dots(const uint8_t *w, const ExpertActs<U> &x, int lane, uint32_t zero, int (*c)[ExpertActs<U>::SETS][4]) {
    constexpr int SETS = ExpertActs<U>::SETS;
    typename U::Pack pk[2][2];
#pragma unroll
    for (int step = 0; step < 16; step++) { /* the units side by side, so that one's mma hide the other's */
        const int j = step >> 1, u = step & 1, i = j / U::GP, e = j % U::GP, s = SETS == 2 ? j & 1 : 0;
        const bool first = j < SETS;
        if (!e)
#pragma unroll
            for (int r = 0; r < 2; r++) pk[u][r] = U::template load_pack<true>(w + u * U::UNIT + i / U::PACKS * U::HALF, i % U::PACKS, r, lane);
        const uint2 b = x.at(u, j);
        if constexpr (U::APART)
            apart_dots<false>(unit_signs<U, true>(pk[u][0], e, zero), unit_signs<U, true>(pk[u][1], e, zero), b, first, c[u][s], NULL);
        else {
            uint32_t l0, h0, l1, h1;
            U::unpack(pk[u][0], e, l0, h0);
            U::unpack(pk[u][1], e, l1, h1);
            mma32_to<U::UNSIGNED>(first, c[u][s], l0, l1, h0, h1, b.x, b.y);
        }
    }
}

/* p of the lane's row (lane % 16) in unit lane / 16 of the task at w. scales: of the two segments, as put_scale puts them; sums: of their codes, low sums 16
 * pairs further on. zero: 0 in a way that the compiler does not see (unit.cuh) */
template <class U>
__device__ __forceinline__ float expert_fold(const uint8_t *w, const uint8_t *codes, const float *scales, const float *sums, int pairs, float *box, int lane, uint32_t zero) {
    constexpr int SETS = ExpertActs<U>::SETS;
    const int seg = lane >> 4;
    int c[2][SETS][4];
    float t[2][2][2 * SETS], mine[8 * SETS];
    expert_dots<U>(w, ExpertActs<U>(codes, lane), lane, zero, c);
#pragma unroll
    for (int u = 0; u < 2; u++) one_scaled<SETS>(c[u], scales + u * 16 + 4 * (lane & 3), t[u]);
    one_change<SETS>(OneBox<SETS>(box, lane), t, mine);
    const typename U::Row raw = U::fetch_row(w + seg * U::UNIT + 2 * U::HALF, lane & 15);
    float a[8], b[8];
    U::row(raw, a, b);
    return one_row_fold<U, SETS>(a, b, raw, mine, sums + seg * 8, sums + pairs * 16 + seg * 8);
}

__device__ __forceinline__ int expert_of(const float *route, int top, int row, int slot) {
    return route ? (int)__ldcg(route + (size_t)row * 2 * top + top + slot) : slot; /* PERHEAD has none */
}
__device__ __forceinline__ float expert_scale(const ExpertMatrix &m, int id) { return m.scales ? __ldg(m.scales + id) : m.scale; }

/* The tasks of a block, tiles of m.pairs of them one after the other, a warp every W-th. at(tile): where the tile's units begin; row(tile): of the
 * activations. Lane l has asked for the warp's l-th task, l < depth; the rows are there after the barrier that stands here. */
template <class U, class At, class Row> __device__ __forceinline__ void expert_fold_all(const ExpertMem<U> &m, int tasks, int segs, int depth, uint32_t by_pairs, At at, Row row) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const uint32_t zero = (uint32_t)depth >> 16;
    int slot = 0, phase = 0;
#pragma unroll 1
    for (int k = threadIdx.x >> 5; k < tasks; k += warps) {
        const int tile = one_quotient(k, by_pairs), pair = k - tile * m.pairs, r = row(tile);
        bar_wait(m.full + slot, phase);
        const float p = expert_fold<U>(m.ring + slot * ExpertMem<U>::SLOT, m.codes(r) + pair * 512, m.scales(r) + pair * 32, m.sums(r) + pair * 16, m.pairs, m.box, lane, zero);
        m.parts[tile * m.pitch + pair * 32 + lane] = p;
        const int next = k + warps * depth;
        __syncwarp(); /* the slot and the box are read */
        if (next < tasks && !lane) {
            const int t = one_quotient(next, by_pairs), sp = next - t * m.pairs;
            m.ask(slot, at(t) + (size_t)2 * sp * U::UNIT, 2 * sp + 1 < segs);
        }
        if (++slot == depth) { slot = 0; phase ^= 1; }
    }
    __syncthreads();
}

/* the choice, by the last warp of a block that makes it, which has the least else to do; then a barrier. first: of its row's blocks */
__device__ __forceinline__ void expert_choice(const RouteChoice &c, int row, int top, bool first, ExpertSums &s, int *fault) {
    const int lane = threadIdx.x & 31;
    if (threadIdx.x >> 5 == (blockDim.x >> 5) - 1) {
        route_choose(c, row, top, s.weight, s.id, fault);
        __syncwarp();
        if (first && lane < top) {
            c.route[(size_t)row * 2 * top + lane] = s.weight[lane];
            c.route[(size_t)row * 2 * top + top + lane] = (float)s.id[lane];
        }
    }
    __syncthreads();
}

/* Products of pairs: tile t of a block is tile t % 2 of its 32 outputs in matrix t / 2. The next kernel may begin only when this one's blocks are behind
 * their wait, so that it finds the route complete before its own. */
template <class U> __device__ __forceinline__ void expert_products(const ExpertArgs &a, uint8_t *mem, ExpertSums &s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, S = a.m[0].segs, D = a.depth;
    const ExpertMem<U> m(mem, D, S, 1);
    const int tasks = a.n_mats * 2 * m.pairs, first = warp + lane * warps, tile = one_quotient(first, a.by_pairs), sp = first - tile * m.pairs;
    m.begin(D);
    int pair = blockIdx.y;
    bool own = true;
    int id = 0;
    const auto find = [&](bool chosen) {
        const int row = pair / a.slots, slot = pair - row * a.slots;
        own = slot < a.top;
        if (own && chosen) id = s.id[slot];
        else if (own) id = expert_of(a.route, a.top, row, slot);
        return row;
    };
    const auto at = [&](int t) { return expert_at(own ? a.m[t >> 1] : a.shared[t >> 1], id) + (size_t)(blockIdx.x * 2 + (t & 1)) * S * U::UNIT; };
    const auto ask = [&]() {
        if (lane < D && first < tasks) m.ask(lane, at(tile) + (size_t)2 * sp * U::UNIT, 2 * sp + 1 < S);
    };
    const bool known = !a.order && (pair % a.slots >= a.top || !a.route); /* the shared expert's, and heads' */
    if (known) { find(false); ask(); }
    pdl_wait();
    pdl_trigger();
    if (a.order) pair = __ldcg(a.order + pair);
    int row = pair / a.slots;
    if (!known && !a.choice.logits) find(false);
    expert_rows<U>(a.x, a.per_pair ? pair : row, 1, m); /* before the tasks, behind which it would queue */
    if (!known) {
        if (a.choice.logits) {
            expert_choice(a.choice, row, a.top, !blockIdx.x && pair == row * a.slots, s, a.fault);
            find(true);
        }
        ask();
    }
    const float scale[2] = {warp ? 0.0f : expert_scale(own ? a.m[0] : a.shared[0], id), warp || a.n_mats < 2 ? 0.0f : expert_scale(own ? a.m[1] : a.shared[1], id)};
    expert_fold_all<U>(m, tasks, S, D, a.by_pairs, at, [](int) { return 0; });
    if (warp) return;
    const int n = blockIdx.x * 32 + lane;
    const float *parts = m.parts + (lane >> 4) * m.pitch + (lane & 15);
    float y[2];
    if (a.n_mats == 2) {
        one_sum<2>(parts, 2 * m.pitch, S, y);
        const float gate = y[0] * scale[0];
        y[0] = (a.gelu ? bw_gelu(gate) : bw_silu(gate)) * (y[1] * scale[1]);
    } else {
        one_sum<1>(parts, 0, S, y);
        y[0] = y[0] * scale[0];
    }
    if (a.y && n < a.m[0].rows) a.y[(size_t)pair * a.m[0].rows + n] = y[0];
    if (a.yo.q && blockIdx.x * 32 < a.m[0].rows) quant_group(a.yo, pair, blockIdx.x, lane, y[0], a.fault, a.op);
}

/* Downs of all slots of a row, and their sums: a tile is a slot. early: products stand before this launch, so that the route, the shared expert's gate
 * and the residual are there before the dependency wait. */
template <class U> __device__ __forceinline__ void expert_downs(const DownArgs &a, uint8_t *mem, ExpertSums &s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, S = a.m.segs, D = a.depth, row = blockIdx.y, t = threadIdx.x;
    const int n = blockIdx.x * 16 + (t & 15), sums = t < 16 && n < a.m.rows;
    const ExpertMem<U> m(mem, D, S, a.slots);
    const int tasks = a.slots * m.pairs, first = warp + lane * warps, slot = one_quotient(first, a.by_pairs), sp = first - slot * m.pairs;
    m.begin(D);
    if (!a.early) pdl_wait();
    pdl_trigger();
    const auto at = [&](int k) {
        const bool own = k < a.top;
        return expert_at(own ? a.m : a.shared, !own ? 0 : a.choice.logits ? s.id[k] : expert_of(a.route, a.top, row, k)) + (size_t)blockIdx.x * S * U::UNIT;
    };
    if (a.choice.logits) expert_choice(a.choice, row, a.top, false, s, a.fault);
    if (lane < D && first < tasks) m.ask(lane, at(slot) + (size_t)2 * sp * U::UNIT, 2 * sp + 1 < S);
    float res = 0.0f, gate = 0.0f;
    if (sums && a.res) load_one(a.res + (size_t)row * a.m.rows + n, &res);
    if (sums && a.gate) load_one(a.gate + row, &gate);
    if (t < a.slots) {
        const bool own = t < a.top;
        if (own && !a.choice.logits) {
            s.weight[t] = __ldcg(a.route + (size_t)row * 2 * a.top + t);
            s.id[t] = expert_of(a.route, a.top, row, t);
        }
        s.scale[t] = own ? expert_scale(a.m, s.id[t]) : a.shared.scale;
    }
    if (a.gate) gate = bw_sigmoid(gate);
    if (a.early) pdl_wait();
    expert_rows<U>(a.x, row * a.slots, a.slots, m);
    expert_fold_all<U>(m, tasks, S, D, a.by_pairs, at, [](int k) { return k; });
    for (int i = t; i < a.slots * 16; i += blockDim.x) {
        float y;
        one_sum<1>(m.parts + (i >> 4) * m.pitch + (i & 15), 0, S, &y);
        s.d[i] = y * s.scale[i >> 4];
    }
    __syncthreads();
    if (!sums) return;
    float y = 0.0f;
#pragma unroll 4
    for (int k = 0; k < a.top; k++) y = fmaf(s.weight[k], s.d[k * 16 + t], y);
    if (a.slots > a.top) {
        float shared = s.d[a.top * 16 + t];
        if (a.gate) shared = shared * gate;
        y = y + shared;
    }
    if (a.y) a.y[(size_t)row * a.m.rows + n] = y;
    if (a.res) a.sum[(size_t)row * a.m.rows + n] = res + y;
}

/* products: grid (blocks of 32 outputs, pairs). downs (products.n_mats = 0): grid (tiles of 16 outputs, rows) */
template <class U> __global__ void __launch_bounds__(32 * EXPERT_WARPS, 2) k_experts(const __grid_constant__ ExpertArgs products, const __grid_constant__ DownArgs downs) {
    extern __shared__ __align__(128) uint8_t expert_mem[];
    ExpertSums &sums = *(ExpertSums *)expert_mem;
    if (products.n_mats) expert_products<U>(products, expert_mem, sums);
    else expert_downs<U>(downs, expert_mem, sums);
}

} // namespace bw
#endif
