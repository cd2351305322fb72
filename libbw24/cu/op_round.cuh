/* What stands around the steps of a round on the device: what the host wrote is fetched, a step's tokens and hidden rows come from what the steps before
 * gave, and the results leave into the host's memory at the end, where it waits for a word.
 * Both run when all before them has ended, so that the next step may rely on everything earlier, also before its kernels wait. Knows no list. */
#ifndef BW24_CU_OP_ROUND_CUH
#define BW24_CU_OP_ROUND_CUH

#include "device.cuh"
#include "value.cuh"

namespace bw {

/* from pinned memory, 16 bytes a thread: a copy by the card's engines would begin later than a kernel */
static __global__ void __launch_bounds__(256) k_fetch(uint4 *to, const uint4 *from, int n) {
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * gridDim.x) to[i] = __ldcv(from + i);
}

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

/* pinned memory of the host's: done, then stamps, tokens and fault words, and the hidden rows apart */
struct LeaveArgs {
    const uint8_t *block;
    const RoundValue *values;
    const int *ids;
    int n_values, n_steps, n_hidden; /* n_hidden: values of the judged rows' hidden rows */
    unsigned fault[VALUES_A_REQUEST + 1]; /* where the fault word of each step stands in the block */
    const u64 *began;     /* [n_steps], of the steps */
    u64 *stamp;           /* [n_steps + 1]: those, and the end */
    int *out;             /* [n_values] tokens, then [n_steps] fault words */
    const float *hidden;
    float *hidden_out;
    unsigned *count;      /* blocks that are done; 0 before */
    unsigned *done;       /* 0 before; the host waits for 1 */
};
static __global__ void __launch_bounds__(256) k_leave(LeaveArgs a) {
    for (int i = blockIdx.x * 256 + threadIdx.x; i < a.n_hidden; i += 256 * gridDim.x) a.hidden_out[i] = __ldcg(a.hidden + i);
    if (!blockIdx.x) {
        for (int i = threadIdx.x; i < a.n_values; i += 256) a.out[i] = a.values[i].kind < 0 ? -1 : value_of(a.block, a.values[i], a.ids);
        if ((int)threadIdx.x < a.n_steps) {
            a.out[a.n_values + threadIdx.x] = *(const volatile int *)(a.block + a.fault[threadIdx.x]);
            a.stamp[threadIdx.x] = __ldcg(a.began + threadIdx.x);
        }
        if (!threadIdx.x) a.stamp[a.n_steps] = clock_ns();
    }
    __threadfence_system(); /* before the word, for the host too */
    __syncthreads();
    if (threadIdx.x || atomicAdd(a.count, 1u) + 1 < gridDim.x) return;
    __threadfence_system();
    *(volatile unsigned *)a.done = 1;
}

} // namespace bw
#endif
