/* EXPERTS over quantised weights (docs/numerics.md §2, §10), a pair (row, slot) at a time: every block reads the id of its expert from the route, so the
 * host never waits for one. Owns the mapping of work to threads: a warp folds units of one row slot, and all of a block's units are on their way at
 * once. The order of sums is op_linear.cuh's. */
#ifndef BW24_CU_OP_EXPERTS_CUH
#define BW24_CU_OP_EXPERTS_CUH

#include "moe.cuh"
#include "op_linear.cuh"

namespace bw {

/* one row's activations of a segment: lane (gid, tig) holds words tig and tig + 4 of group gid, and the scales of groups 2 tig and 2 tig + 1 */
template <Form F> struct PairActs {
    static constexpr bool SUMS = F == FORM_S1M || F == FORM_S2M;
    uint2 q;
    float d[2], a[2], l[2];
    __device__ __forceinline__ void load(const Acts &x, int row, int seg, int lane) {
        const int tig = lane & 3, groups = x.cols >> 5, g = seg * 8 + (lane >> 2);
        q = g < groups ? __ldcg((const uint2 *)(x.q + (size_t)row * x.cols + g * 32 + tig * 8)) : make_uint2(0, 0);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int gc = seg * 8 + 2 * tig + e;
            bool ok = gc < groups;
            size_t at = (size_t)gc * x.ld + row;
            d[e] = ok ? __ldcg(x.delta + at) : 0.0f;
            a[e] = SUMS && ok ? __ldcg(x.sum + at) : 0.0f;
            l[e] = F == FORM_S2M && ok ? __ldcg(x.low + at) : 0.0f;
        }
    }
};

/* The same from a row's copy in shared memory: codes [segs * 256], then scales, sums, low sums [segs * 8] each, zero past the row. The copy is
 * complete after cp.async.wait_all and a barrier. */
inline size_t row_acts_bytes(int segs) { return (size_t)segs * 352; }
__device__ __forceinline__ void copy_row(const Acts &x, int row, int segs, uint8_t *to) {
    const int groups = x.cols >> 5;
    float *f = (float *)(to + segs * 256);
    for (int i = threadIdx.x; i < segs * 16; i += blockDim.x) {
        if (i * 16 < x.cols) cp16(to + i * 16, x.q + (size_t)row * x.cols + i * 16);
        else *(uint4 *)(to + i * 16) = make_uint4(0, 0, 0, 0);
    }
    for (int i = threadIdx.x; i < segs * 24; i += blockDim.x) {
        const int kind = i / (segs * 8), g = i - kind * segs * 8;
        const float *from = kind == 0 ? x.delta : kind == 1 ? x.sum : x.low;
        f[i] = g < groups ? __ldcg(from + (size_t)g * x.ld + row) : 0.0f;
    }
}
template <Form F> struct RowActs {
    static constexpr bool SUMS = F == FORM_S1M || F == FORM_S2M;
    uint2 q;
    float d[2], a[2], l[2];
    __device__ __forceinline__ void load(const uint8_t *row, int segs, int seg, int lane) {
        const float2 *f = (const float2 *)(row + segs * 256) + seg * 4 + (lane & 3);
        q = *(const uint2 *)(row + seg * 256 + (lane >> 2) * 32 + (lane & 3) * 8);
        float2 v = f[0], s = SUMS ? f[segs * 4] : make_float2(0.0f, 0.0f), z = F == FORM_S2M ? f[segs * 8] : make_float2(0.0f, 0.0f);
        d[0] = v.x; d[1] = v.y; a[0] = s.x; a[1] = s.y; l[0] = z.x; l[1] = z.y;
    }
};

/* a unit in registers */
template <class U> struct UnitRegs {
    typename U::Pack pk[2][U::PACKS][2];
    typename U::Pair sc[2]; /* of the groups whose results the lane gets */
    __device__ __forceinline__ void load(const uint8_t *w, int lane) {
#pragma unroll
        for (int i = 0; i < 4 * U::PACKS; i++)
            pk[i / (2 * U::PACKS)][i / 2 % U::PACKS][i & 1] = U::template load_pack<false>(w + i / (2 * U::PACKS) * U::HALF, i / 2 % U::PACKS, i & 1, lane);
        sc[0] = U::fetch(w + 2 * U::HALF, lane >> 2, lane & 3);
        sc[1] = U::fetch(w + 2 * U::HALF, (lane >> 2) + 8, lane & 3);
    }
    /* p[r]: the segment's sum of row gid + 8 r, equal in its four lanes */
    template <class X> __device__ __forceinline__ void fold(const X &x, int lane, float (&p)[2]) const {
        constexpr Form F = U::FORM;
        int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, ch[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint32_t l0, h0, l1, h1;
            U::unpack(pk[j >> 2][(j & 3) / U::GP][0], (j & 3) % U::GP, l0, h0);
            U::unpack(pk[j >> 2][(j & 3) / U::GP][1], (j & 3) % U::GP, l1, h1);
            bool mine = lane >> 2 == j;
            uint32_t b0 = mine ? x.q.x : 0, b1 = mine ? x.q.y : 0;
            if (F == FORM_S2 || F == FORM_S2M) { mma16(c, l0, l1, b0); mma16(ch, h0, h1, b1); }
            else mma32<U::UNSIGNED>(c, l0, l1, h0, h1, b0, b1);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float a[2], b[2], m0[2], m1[2], t[2];
            U::pair(sc[r], lane & 3, a, b);
            unit_mins<U>(sc[r], m0, m1);
#pragma unroll
            for (int e = 0; e < 2; e++)
                t[e] = group_value<F>(c[2 * r + e], ch[2 * r + e], a[e], b[e], a[e] * -MAGIC_F, F == FORM_S2M ? x.l[e] : x.a[e], m0[e], m1[e], x.a[e] - x.l[e]);
            p[r] = 0.0f;
#pragma unroll
            for (int st = 0; st < 4; st++) p[r] = __shfl_sync(~0u, fmaf(x.d[1], t[1], fmaf(x.d[0], t[0], p[r])), (lane & ~3) | st);
        }
    }
};

__device__ __forceinline__ int expert_of(const float *route, int top, int row, int slot) {
    return route ? (int)__ldcg(route + (size_t)row * 2 * top + top + slot) : slot; /* PERHEAD has none */
}
__device__ __forceinline__ float expert_scale(const ExpertMatrix &m, int id) { return m.scales ? __ldg(m.scales + id) : m.scale; }

template <class U, class X> __device__ __forceinline__ void fold_to(const UnitRegs<U> &u, const X &x, int lane, float *to) {
    float p[2];
    u.fold(x, lane, p);
    if (lane & 3) return;
    to[lane >> 2] = p[0];
    to[8 + (lane >> 2)] = p[1];
}
/* how many units a warp has on their way at once */
template <class U> __host__ __device__ constexpr int units_at_once() { return U::HALF == 1024 && U::FORM == FORM_S1 ? 2 : 1; }

/* Products of pairs: a warp takes segments of two tiles, where registers allow together. Shared: the row, then [n_mats][segs][32] sums. */
template <class U> __device__ __forceinline__ void expert_products(const ExpertArgs &a, uint8_t *mem) {
    constexpr int T = units_at_once<U>();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, S = a.m[0].segs;
    float *part = (float *)(mem + S * 352);
    const int pair = a.order ? __ldcg(a.order + blockIdx.y) : blockIdx.y, row = pair / a.slots, slot = pair - row * a.slots;
    const bool own = slot < a.top;
    copy_row(a.x, a.per_pair ? pair : row, S, mem);
    bool copied = false;
    for (int k = warp; k < a.n_mats * S * (2 / T); k += blockDim.x >> 5) { /* a matrix, a segment, T == 1: a tile */
        const int task = k / (2 / T), tile = k % (2 / T), which = task >= S, seg = which ? task - S : task;
        const ExpertMatrix &m = own ? a.m[which] : a.shared[which];
        const uint8_t *w = expert_at(m, own ? expert_of(a.route, a.top, row, slot) : 0) + ((size_t)(blockIdx.x * 2 + tile) * S + seg) * U::UNIT;
        UnitRegs<U> u[T];
#pragma unroll
        for (int t = 0; t < T; t++) u[t].load(w + t * S * U::UNIT, lane);
        if (!copied) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            copied = true;
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            int l = lane;
            asm volatile("" : "+r"(l)); /* anew for each tile: registers are full */
            RowActs<U::FORM> x;
            x.load(mem, S, seg, l);
            fold_to(u[t], x, l, part + task * 32 + (tile + t) * 16);
        }
    }
    __syncthreads();
    if (warp) return;
    const int n = blockIdx.x * 32 + lane, id = own ? expert_of(a.route, a.top, row, slot) : 0;
    float y = 0.0f, u = 0.0f;
    for (int s = 0; s < S; s++) y = y + part[s * 32 + lane];
    y = y * expert_scale(own ? a.m[0] : a.shared[0], id);
    if (a.n_mats == 2) {
        for (int s = 0; s < S; s++) u = u + part[(S + s) * 32 + lane];
        u = u * expert_scale(own ? a.m[1] : a.shared[1], id);
        y = (a.gelu ? bw_gelu(y) : bw_silu(y)) * u;
    }
    if (a.y && n < a.m[0].rows) a.y[(size_t)pair * a.m[0].rows + n] = y;
    if (a.yo.q && n < a.m[0].rows) quant_group(a.yo, pair, n >> 5, lane, y, a.fault, a.op);
}

/* Downs of all slots of a row, and their sums. Shared: [slots][segs][16] sums, then [slots][16] products. */
template <class U> __device__ __forceinline__ void expert_downs(const DownArgs &a, float *part) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, S = a.m.segs, tasks = a.slots * S, row = blockIdx.y;
    const int n = blockIdx.x * 16 + (threadIdx.x & 15), first = threadIdx.x < 16 && n < a.m.rows;
    float *d = part + tasks * 16;
    const float res = first && a.res ? __ldcg(a.res + (size_t)row * a.m.rows + n) : 0.0f, gate = first && a.gate ? __ldcg(a.gate + row) : 0.0f;
    for (int k = warp; k < tasks; k += warps) {
        const int slot = k / S, seg = k - slot * S;
        const ExpertMatrix &m = slot < a.top ? a.m : a.shared;
        UnitRegs<U> u;
        PairActs<U::FORM> x;
        u.load(expert_at(m, slot < a.top ? expert_of(a.route, a.top, row, slot) : 0) + ((size_t)blockIdx.x * S + seg) * U::UNIT, lane);
        x.load(a.x, row * a.slots + slot, seg, lane);
        fold_to(u, x, lane, part + k * 16);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots * 16; i += blockDim.x) {
        const int slot = i >> 4;
        float y = 0.0f;
        for (int s = 0; s < S; s++) y = y + part[(slot * S + s) * 16 + (i & 15)];
        d[i] = y * (slot < a.top ? expert_scale(a.m, expert_of(a.route, a.top, row, slot)) : a.shared.scale);
    }
    __syncthreads();
    if (!first) return;
    float y = 0.0f;
    for (int s = 0; s < a.top; s++) y = fmaf(__ldcg(a.route + (size_t)row * 2 * a.top + s), d[s * 16 + threadIdx.x], y);
    if (a.slots > a.top) {
        float shared = d[a.top * 16 + threadIdx.x];
        if (a.gate) shared = shared * bw_sigmoid(gate);
        y = y + shared;
    }
    if (a.y) a.y[(size_t)row * a.m.rows + n] = y;
    if (a.res) a.sum[(size_t)row * a.m.rows + n] = res + y;
}

/* products: grid (blocks of 32 outputs, pairs). downs (products.n_mats = 0): grid (tiles of 16 outputs, rows) */
enum { EXPERT_WARPS = 16 };
template <class U> __global__ void __launch_bounds__(32 * EXPERT_WARPS, U::HALF == 1024 ? 2 : 1) k_experts(ExpertArgs products, DownArgs downs) {
    extern __shared__ __align__(16) uint8_t expert_mem[];
    pdl_trigger();
    pdl_wait();
    if (products.n_mats) expert_products<U>(products, expert_mem);
    else expert_downs<U>(downs, (float *)expert_mem);
}

} // namespace bw
#endif
