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
    __device__ __forceinline__ void fold(const PairActs<U::FORM> &x, int lane, float (&p)[2]) const {
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

__device__ __forceinline__ int expert_of(const float *route, int top, int row, int slot) { return (int)__ldcg(route + (size_t)row * 2 * top + top + slot); }
__device__ __forceinline__ float expert_scale(const ExpertMatrix &m, int id) { return m.scales ? __ldg(m.scales + id) : m.scale; }

/* grid (blocks of 32 outputs, pairs); a warp takes segments of two tiles. Shared: [n_mats][segs][32] sums. */
template <class U> __global__ void __launch_bounds__(512, 1) k_experts(ExpertArgs a) {
    extern __shared__ float part[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, S = a.m[0].segs, tasks = a.n_mats * S;
    pdl_trigger();
    pdl_wait();
    const int pair = a.order ? __ldcg(a.order + blockIdx.y) : blockIdx.y, row = pair / a.top, id = expert_of(a.route, a.top, row, pair % a.top);
    for (int k = warp; k < tasks; k += warps) {
        const ExpertMatrix &m = a.m[k >= S];
        const int seg = k >= S ? k - S : k;
        const uint8_t *w = expert_at(m, id) + ((size_t)blockIdx.x * 2 * S + seg) * U::UNIT;
        UnitRegs<U> u[2];
        PairActs<U::FORM> x;
        u[0].load(w, lane);
        u[1].load(w + (size_t)S * U::UNIT, lane);
        x.load(a.x, a.per_pair ? pair : row, seg, lane);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float p[2];
            u[t].fold(x, lane, p);
            if (lane & 3) continue;
            part[k * 32 + t * 16 + (lane >> 2)] = p[0];
            part[k * 32 + t * 16 + 8 + (lane >> 2)] = p[1];
        }
    }
    __syncthreads();
    if (warp) return;
    const int n = blockIdx.x * 32 + lane;
    float y = 0.0f, u = 0.0f;
    for (int s = 0; s < S; s++) y = y + part[s * 32 + lane];
    y = y * expert_scale(a.m[0], id);
    if (a.n_mats == 2) {
        for (int s = 0; s < S; s++) u = u + part[(S + s) * 32 + lane];
        u = u * expert_scale(a.m[1], id);
        y = (a.gelu ? bw_gelu(y) : bw_silu(y)) * u;
    }
    if (a.y && n < a.m[0].rows) a.y[(size_t)pair * a.m[0].rows + n] = y;
    if (a.yo.q && n < a.m[0].rows) quant_group(a.yo, pair, n >> 5, lane, y, a.fault, a.op);
}

/* grid (tiles of 16 outputs, rows): all slots of a row. Shared: [top][segs][16] sums, then [top][16] products. */
template <class U> __global__ void __launch_bounds__(512, 1) k_experts_down(DownArgs a) {
    extern __shared__ float part[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, S = a.m.segs, tasks = a.top * S, row = blockIdx.y;
    float *d = part + tasks * 16;
    pdl_trigger();
    pdl_wait();
    for (int k = warp; k < tasks; k += warps) {
        const int slot = k / S, seg = k - slot * S, id = expert_of(a.route, a.top, row, slot);
        UnitRegs<U> u;
        PairActs<U::FORM> x;
        float p[2];
        u.load(expert_at(a.m, id) + ((size_t)blockIdx.x * S + seg) * U::UNIT, lane);
        x.load(a.x, row * a.top + slot, seg, lane);
        u.fold(x, lane, p);
        if (lane & 3) continue;
        part[k * 16 + (lane >> 2)] = p[0];
        part[k * 16 + 8 + (lane >> 2)] = p[1];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top * 16; i += blockDim.x) {
        float y = 0.0f;
        for (int s = 0; s < S; s++) y = y + part[(i / 16 * S + s) * 16 + (i & 15)];
        d[i] = y * expert_scale(a.m, expert_of(a.route, a.top, row, i / 16));
    }
    __syncthreads();
    const int n = blockIdx.x * 16 + threadIdx.x;
    if (threadIdx.x >= 16 || n >= a.m.rows) return;
    float y = 0.0f;
    for (int s = 0; s < a.top; s++) y = fmaf(__ldcg(a.route + (size_t)row * 2 * a.top + s), d[s * 16 + threadIdx.x], y);
    a.y[(size_t)row * a.m.rows + n] = y;
}

} // namespace bw
#endif
