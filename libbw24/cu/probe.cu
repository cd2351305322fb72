/* What a card can do (bw24_probe_rates): bandwidth of its memory and of the bus, the cost of launches, graph nodes and barriers, the rate of its
 * matrix units by mma.sync. Owns its kernels and memory for the time of one call; measures nothing of a model. */
#include <cuda_bf16.h>
#include "cuda.h"

namespace bw {

enum { ROUNDS = 8, NODES = 256, BARRIERS = 512, MMA_STEPS = 4096, WARPS = 8 };

static __device__ __forceinline__ void read_all(const uint4 *p, size_t n, unsigned *sink) {
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    unsigned acc = 0;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __ldcs(p + i + k * stride);
#pragma unroll
        for (int k = 0; k < 8; k++) acc ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < n; i += stride) acc ^= __ldcs(p + i).x;
    if (acc == 0x12345678u) *sink = acc; /* so that the loads are not dropped */
}

/* every block of a grid that is wholly resident waits for all others, again and again */
static __device__ __forceinline__ void meet_all(unsigned *count) {
    for (unsigned k = 1; k <= BARRIERS; k++) {
        __syncthreads();
        if (threadIdx.x) continue;
        __threadfence();
        atomicAdd(count, 1u);
        while (*(volatile unsigned *)count < k * gridDim.x) { }
        __threadfence();
    }
}

template <bool Int8> static __device__ __forceinline__ void mma_all(int *out) {
    uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x * 3, 5};
    int ci[4][4] = {};
    float cf[4][4] = {};
    for (int s = 0; s < MMA_STEPS; s++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (Int8)
                asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                             : "+r"(ci[k][0]), "+r"(ci[k][1]), "+r"(ci[k][2]), "+r"(ci[k][3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
            else
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                             : "+f"(cf[k][0]), "+f"(cf[k][1]), "+f"(cf[k][2]), "+f"(cf[k][3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
    int sum = 0;
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < 4; j++) sum += ci[k][j] + (int)cf[k][j];
    if (sum == 0x7fffffff) *out = sum;
}

/* the cost of a launch: with the other work inside, a node of a graph took .61 us instead of .53 */
static __global__ void k_probe_nothing(unsigned *sink) {
    pdl_trigger();
    pdl_wait();
    if (blockDim.x == 1024) *sink = 1;
}

const void *probe_kernel() { return (const void *)k_probe_nothing; }

/* READ: n 16-byte values at p; INT8, BF16: blocks of WARPS warps */
enum Work { READ, MEET, INT8, BF16 };
static __global__ void __launch_bounds__(512) k_probe(Work work, unsigned *word, const uint4 *p, size_t n) {
    pdl_trigger();
    pdl_wait();
    switch (work) {
    case READ: return read_all(p, n, word);
    case MEET: return meet_all(word);
    case INT8: return mma_all<true>((int *)word);
    case BF16: return mma_all<false>((int *)word);
    }
}

/* memory and events of one call */
struct Bench {
    Queue q;
    uint4 *mem = NULL;
    size_t bytes = 0;
    unsigned *word = NULL;
    uint8_t *host = NULL;
    size_t host_bytes = 64 << 20;
    cudaEvent_t t0 = NULL, t1 = NULL;

    cudaError_t open(const Queue &from) {
        q = from;
        q.error = cudaSuccess;
        size_t room = 0, total = 0;
        cudaError_t e = cudaMemGetInfo(&room, &total);
        bytes = ((size_t)2 << 30) < room / 3 ? (size_t)2 << 30 : room / 3 & ~(size_t)0xffff;
        if (!e) e = cudaMalloc((void **)&mem, bytes);
        if (!e) e = cudaMalloc((void **)&word, 256);
        if (!e) e = cudaHostAlloc((void **)&host, host_bytes, cudaHostAllocDefault);
        if (!e) e = cudaEventCreate(&t0);
        if (!e) e = cudaEventCreate(&t1);
        if (!e) e = cudaMemsetAsync(mem, 1, bytes, q.stream);
        if (!e) e = cudaMemsetAsync(word, 0, 256, q.stream);
        return e;
    }
    ~Bench() {
        if (mem) cudaFree(mem);
        if (word) cudaFree(word);
        if (host) cudaFreeHost(host);
        if (t0) cudaEventDestroy(t0);
        if (t1) cudaEventDestroy(t1);
        cudaGetLastError();
    }
    void start(Queue &on, Work work, int blocks, int threads) const { launch(on, k_probe, dim3((unsigned)blocks), threads, 0, work, word, (const uint4 *)mem, bytes / 16); }
    /* best seconds of f's work on the device */
    template <class F> double best(F f) {
        float least = 1e30f;
        for (int i = 0; i < ROUNDS && !q.error; i++) {
            cudaEventRecord(t0, q.stream);
            f();
            cudaEventRecord(t1, q.stream);
            if ((q.error = cudaEventSynchronize(t1))) break;
            float ms = 0;
            cudaEventElapsedTime(&ms, t0, t1);
            least = ms < least ? ms : least;
        }
        return (double)least * 1e-3;
    }
};

/* seconds a node of a chain of empty kernels in one graph; with programmatic edges or without */
static double node_seconds(Bench &b, bool pdl) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    Queue q = b.q;
    q.pdl = pdl;
    b.q.error = cudaStreamBeginCapture(q.stream, cudaStreamCaptureModeThreadLocal);
    if (b.q.error) return 0;
    for (int i = 0; i < NODES; i++) launch(q, k_probe_nothing, dim3(1), 32, 0, b.word);
    b.q.error = cudaStreamEndCapture(q.stream, &graph);
    if (!b.q.error) b.q.error = q.error;
    if (!b.q.error) b.q.error = cudaGraphInstantiate(&exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    double s = b.best([&] { if (!b.q.error) b.q.error = cudaGraphLaunch(exec, b.q.stream); });
    if (exec) cudaGraphExecDestroy(exec);
    return s / NODES;
}

static void measure_launches(Bench &b, bw24_rates *out) {
    Queue q = b.q;
    q.pdl = false;
    out->launch_us = 1e6 / NODES * b.best([&] { for (int i = 0; i < NODES; i++) launch(q, k_probe_nothing, dim3(1), 32, 0, b.word); });
    out->graph_node_us = 1e6 * node_seconds(b, false);
    out->pdl_node_us = b.q.pdl ? 1e6 * node_seconds(b, true) : 0;
    double s = b.best([&] {
        cudaMemsetAsync(b.word, 0, 4, b.q.stream);
        b.start(q, MEET, b.q.sms, 128);
    });
    out->barrier_us = 1e6 * s / BARRIERS;
    if (!b.q.error) b.q.error = q.error;
}

static void measure_units(Bench &b, bw24_rates *out) {
    Queue q = b.q;
    q.pdl = false;
    const double macs = (double)b.q.sms * 2 * WARPS * MMA_STEPS * 4 * 16 * 8;
    out->int8_tops = 1e-12 * 2 * macs * 32 / b.best([&] { b.start(q, INT8, 2 * b.q.sms, WARPS * 32); });
    out->bf16_tflops = 1e-12 * 2 * macs * 16 / b.best([&] { b.start(q, BF16, 2 * b.q.sms, WARPS * 32); });
    if (!b.q.error) b.q.error = q.error;
}

int cu_probe(bw24_ctx *c, bool all, bw24_rates *out) {
    Bench b;
    int rc = cu_alive(c);
    if (rc) return rc;
    cudaError_t e = b.open(((CuCtx *)c->priv)->q);
    if (e) return cu_fail(c, e, "the probe");
    Queue q = b.q;
    q.pdl = false;
    const double gb = 1e-9 * (double)b.bytes;
    out->read_gbps = gb / b.best([&] { b.start(q, READ, 4 * b.q.sms, 512); });
    out->copy_gbps = gb / b.best([&] { b.q.error = cudaMemcpyAsync(b.mem, (uint8_t *)b.mem + b.bytes / 2, b.bytes / 2, cudaMemcpyDeviceToDevice, b.q.stream); });
    if (!b.q.error) b.q.error = q.error;
    if (all && !b.q.error) {
        const double up = 1e-9 * (double)b.host_bytes;
        out->to_device_gbps = up / b.best([&] { b.q.error = cudaMemcpyAsync(b.mem, b.host, b.host_bytes, cudaMemcpyHostToDevice, b.q.stream); });
        out->from_device_gbps = up / b.best([&] { b.q.error = cudaMemcpyAsync(b.host, b.mem, b.host_bytes, cudaMemcpyDeviceToHost, b.q.stream); });
        measure_launches(b, out);
        measure_units(b, out);
    }
    return b.q.error ? cu_fail(c, b.q.error, "the probe") : 0;
}

} // namespace bw
