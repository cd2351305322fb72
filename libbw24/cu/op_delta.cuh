/* A column of DELTA's state in the registers of four lanes, and one row's work on it (docs/numerics.md §11). Owns the order of its additions; knows
 * neither sequences nor where rows come from. */
#ifndef BW24_CU_OP_DELTA_CUH
#define BW24_CU_OP_DELTA_CUH

#include "device.cuh"
#include "fold.cuh"

namespace bw {

/* A row of inputs in shared memory: k and q by strand, value 4 t + j at [j][t] (the pitch keeps the strands in separate banks), 32 columns of v, decay,
 * beta, and which row of the step it is */
enum { DELTA_STRAND = DELTA_MAX_DK / 4, DELTA_PITCH = DELTA_STRAND + 4 };
struct __align__(16) DeltaRow { float k[4][DELTA_PITCH], q[4][DELTA_PITCH], v[32], g, b; int row, unused; };

/* One strand of a column's state, and the key of the row at hand. A warp has 8 columns: strand = lane / 8, so that eight lanes read one key value.
 * step() ends a row and begins the next in one pass over the state: the two chains of additions run side by side. What a row needs from shared memory is
 * asked for before the sums of the strands, whose exchange takes as long; the output of a row is joined with the next one's p. FULL: dk is DELTA_MAX_DK. */
template <bool FULL> struct DeltaColumn {
    float S[DELTA_STRAND], k[DELTA_STRAND];
    int strand, count; /* count: values of this strand */
    __device__ __forceinline__ void place(int lane, int dk) { strand = lane >> 3; count = (dk - strand + 3) / 4; }
    /* compared here, not once before the loops: the results would take registers */
    __device__ __forceinline__ int values() const {
        int n = count;
        if (!FULL) asm volatile("" : "+r"(n));
        return n;
    }
    __device__ __forceinline__ void load(const float *from, int step, bool live) {
#pragma unroll
        for (int t = 0; t < DELTA_STRAND; t++) S[t] = live && (FULL || t < count) ? __ldcg(from + (size_t)t * step) : 0.0f;
    }
    __device__ __forceinline__ void keep(float *to, int step) const {
#pragma unroll
        for (int t = 0; t < DELTA_STRAND; t++)
            if (FULL || t < count) to[(size_t)t * step] = S[t];
    }
    /* (0 + 2) + (1 + 3) over the strands, in every lane, of two sums */
    static __device__ __forceinline__ float2 joined(float2 x) {
        x.x = x.x + __shfl_xor_sync(~0u, x.x, 16);
        x.y = x.y + __shfl_xor_sync(~0u, x.y, 16);
        x.x = x.x + __shfl_xor_sync(~0u, x.x, 8);
        x.y = x.y + __shfl_xor_sync(~0u, x.y, 8);
        return x;
    }
    /* OLD: the row at hand gets d, and its output's strand is added up against q; NEW: the row of key `next` begins, with decay g. Returns (p of the new
     * row, output of the old), this strand's share of both */
    template <bool OLD, bool NEW> __device__ __forceinline__ float2 step(const float4 (&q)[DELTA_STRAND / 4], float d, const float4 (&next)[DELTA_STRAND / 4], float g) {
        float p = 0.0f, o = 0.0f;
#pragma unroll
        for (int m = 0; m < DELTA_STRAND / 4; m++) {
            const int n = values();
            const float qs[4] = {q[m].x, q[m].y, q[m].z, q[m].w}, ks[4] = {next[m].x, next[m].y, next[m].z, next[m].w};
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const int t = 4 * m + u;
                if (!FULL && t >= n) continue;
                if (OLD) { S[t] = fmaf(k[t], d, S[t]); o = fmaf(S[t], qs[u], o); }
                if (NEW) { k[t] = ks[u]; S[t] = S[t] * g; p = fmaf(S[t], k[t], p); }
            }
        }
        return make_float2(p, o);
    }
    __device__ __forceinline__ void read(const float (&from)[4][DELTA_PITCH], float4 (&to)[DELTA_STRAND / 4]) const {
#pragma unroll
        for (int m = 0; m < DELTA_STRAND / 4; m++) to[m] = *(const float4 *)&from[strand][4 * m];
    }
    /* the first row: its p */
    __device__ __forceinline__ float2 begin(const DeltaRow &r) {
        float4 key[DELTA_STRAND / 4];
        read(r.k, key);
        return step<false, true>(key, 0.0f, key, r.g);
    }
    /* x: p of row r and the output of the row before, this strand's share; value: the column's v; ends r, begins `next` unless `last`. kept() sees the state after r, where it is
     * wanted. Returns the same of the next row; y: the row before's whole output */
    template <class Kept>
    __device__ __forceinline__ float2 row(const DeltaRow &r, const float *value, const DeltaRow &next, float2 x, bool last, bool wanted, float *y, Kept kept) {
        float4 q[DELTA_STRAND / 4], key[DELTA_STRAND / 4];
        read(r.q, q);
        read(next.k, key);
        const float v = *value, b = r.b, g = next.g;
        x = joined(x);
        *y = x.y;
        const float d = b * (v - x.x);
        if (!last && !wanted) return step<true, true>(q, d, key, g);
        x = step<true, false>(q, d, key, g);
        if (wanted) kept();
        if (!last) x.x = step<false, true>(q, d, key, g).x;
        return x;
    }
};

} // namespace bw
#endif
