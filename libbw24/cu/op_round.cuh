/* What stands between the steps of a round on the device: a step's tokens and hidden rows from what the steps before gave, and what leaves at the end.
 * Both run when all before them has ended, so that the next step may rely on everything earlier, also before its kernels wait. Knows no list. */
#ifndef BW24_CU_OP_ROUND_CUH
#define BW24_CU_OP_ROUND_CUH

#include "device.cuh"
#include "value.cuh"

namespace bw {

struct FeedArgs {
    const uint8_t *block;
    const RoundValue *values;
    const int *ids;       /* of the draft list's columns, or NULL */
    const int *value;     /* [rows]: whose value is the row's token, -1: the token is there */
    const int *from;      /* [rows]: hidden row of `handed` that the row takes; NULL: none */
    int *token;
    const float *handed;
    float *hidden;        /* [rows][width] */
    int width;
    u64 *stamp;           /* when the step begins, ns */
};
__device__ __forceinline__ u64 clock_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* grid (rows, parts of a hidden row); a missing token is 0, whose row nobody looks at */
static __global__ void __launch_bounds__(256) k_feed(FeedArgs a) {
    const int i = blockIdx.x;
    if (!threadIdx.x && !blockIdx.y) {
        int v = a.value[i];
        if (v >= 0) {
            v = value_of(a.block, a.values[v], a.ids);
            a.token[i] = v < 0 ? 0 : v;
        }
        if (!i) *a.stamp = clock_ns();
    }
    if (!a.from) return;
    const float *x = a.handed + (size_t)a.from[i] * a.width;
    for (int c = blockIdx.y * 256 + threadIdx.x; c < a.width; c += 256 * gridDim.y) a.hidden[(size_t)i * a.width + c] = __ldcg(x + c);
}

struct LeaveArgs {
    const uint8_t *block;
    const RoundValue *values;
    const int *ids;
    int n_values, n_steps;
    unsigned fault[VALUES_A_REQUEST + 1]; /* where the fault word of each step stands in the block */
    int *out;             /* [n_values] tokens, then [n_steps] fault words */
    u64 *stamp;
};
static __global__ void __launch_bounds__(256) k_leave(LeaveArgs a) {
    for (int i = threadIdx.x; i < a.n_values; i += 256) a.out[i] = a.values[i].kind < 0 ? -1 : value_of(a.block, a.values[i], a.ids);
    if ((int)threadIdx.x < a.n_steps) a.out[a.n_values + threadIdx.x] = *(const volatile int *)(a.block + a.fault[threadIdx.x]);
    if (!threadIdx.x) *a.stamp = clock_ns();
}

} // namespace bw
#endif
