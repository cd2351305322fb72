/* A column of DELTA's state in the registers of four lanes, and one row's work on it (docs/numerics.md §11). Owns the order of its additions; knows
 * neither sequences nor where rows come from. */
#ifndef BW24_CU_OP_DELTA_CUH
#define BW24_CU_OP_DELTA_CUH

#include "device.cuh"
#include "fold.cuh"

namespace bw {

/* k and q of a row by strand: value 4 t + j at [j][t]. The pitch keeps the strands in separate banks. */
enum { DELTA_STRAND = DELTA_MAX_DK / 4, DELTA_PITCH = DELTA_STRAND + 4 };
typedef float DeltaRow[4][DELTA_PITCH];

/* One strand of a column's state, and the key of the row at hand. A warp has 8 columns: strand = lane / 8, so that eight lanes read one key value.
 * step() ends a row and begins the next in one pass over the state: the two chains of additions run side by side. FULL: dk is DELTA_MAX_DK. KEPT: the key stays in registers; without, it is read
 * from shared memory again. */
template <bool FULL, bool KEPT> struct DeltaColumn {
    float S[DELTA_STRAND], k[KEPT ? DELTA_STRAND : 1];
    int strand, count; /* count: values of this strand */
    __device__ __forceinline__ bool has(int t) const { return FULL || t < count; }
    __device__ __forceinline__ void load(const float *from, int step, bool live) {
#pragma unroll
        for (int t = 0; t < DELTA_STRAND; t++) S[t] = live && has(t) ? __ldcg(from + (size_t)t * step) : 0.0f;
    }
    __device__ __forceinline__ void keep(float *to, int step) const {
#pragma unroll
        for (int t = 0; t < DELTA_STRAND; t++)
            if (has(t)) to[(size_t)t * step] = S[t];
    }
    /* (0 + 2) + (1 + 3) over the strands, in every lane */
    static __device__ __forceinline__ float joined(float p) {
        p = p + __shfl_xor_sync(~0u, p, 16);
        return p + __shfl_xor_sync(~0u, p, 8);
    }
    /* OLD: the row at hand, of key `old`, gets d, and its output's strand is added up against q; NEW: the row of `key` begins: decay g. Returns (its p,
     * output's strand) */
    template <bool OLD, bool NEW> __device__ __forceinline__ float2 step(const DeltaRow &old, const DeltaRow &q, float d, const DeltaRow &key, float g) {
        float p = 0.0f, o = 0.0f;
#pragma unroll
        for (int m = 0; m < DELTA_STRAND / 4; m++) {
            const float4 q4 = OLD ? *(const float4 *)&q[strand][4 * m] : make_float4(0, 0, 0, 0), k4 = NEW ? *(const float4 *)&key[strand][4 * m] : make_float4(0, 0, 0, 0),
                         o4 = OLD && !KEPT ? *(const float4 *)&old[strand][4 * m] : make_float4(0, 0, 0, 0);
            int n = count;
            if (!FULL) asm volatile("" : "+r"(n)); /* compared here, not before the loop: the results would take registers */
            const float qs[4] = {q4.x, q4.y, q4.z, q4.w}, ks[4] = {k4.x, k4.y, k4.z, k4.w}, os[4] = {o4.x, o4.y, o4.z, o4.w};
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const int t = 4 * m + u;
                if (!FULL && t >= n) continue;
                if (OLD) { S[t] = fmaf(KEPT ? k[KEPT ? t : 0] : os[u], d, S[t]); o = fmaf(S[t], qs[u], o); }
                if (NEW) { S[t] = S[t] * g; p = fmaf(S[t], ks[u], p); }
                if (NEW && KEPT) k[KEPT ? t : 0] = ks[u];
            }
        }
        return make_float2(p, o);
    }
};

} // namespace bw
#endif
