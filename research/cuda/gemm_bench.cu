/* The EXACT GEMM of sm_90a (op_gemm_groups.cuh), that of the other cards and the class `fast` on random weights: least milliseconds, and how many results differ
 * from plain loops in a bit. The first shape has rows of factor 0.
 * nvcc -std=c++17 -O3 -fmad=false -Ilibbw24 -Ilibbw24/cu -gencode arch=compute_90a,code=sm_90a -cudart static -o gemm_bench research/cuda/gemm_bench.cu
 * gemm_bench: all units; gemm_bench prof: 8192 x 4096, 2048 rows of Q4_K and NVFP4 once, for ncu. Knows no model. */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "op_gemm_fast.cuh"

using namespace bw;

template <class U> __global__ void __launch_bounds__(GG_THREADS, 1) k_group(LinearArgs a, const uint8_t *acts, int) { group_gemm<U>(a, acts); }
template <class U> __global__ void __launch_bounds__(256, 1) k_block(LinearArgs a, const uint8_t *, int) { gemm_block<U>(a); }
template <class U> __global__ void __launch_bounds__(WG_THREADS, 1) k_fast(LinearArgs a, const uint8_t *acts, int padded) { wg_gemm<U>(a, acts, padded); }
__global__ void k_acts(Acts a, uint8_t *groups, uint8_t *fast, int padded) {
    group_acts(a, groups);
    wg_acts(a, fast, padded);
}
/* results of outputs first, first + step, ... that differ, and how many there are */
template <class U> __global__ void k_compare(LinearArgs a, int first, int step, int count, unsigned *bad) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i % a.rows, out = first + i / a.rows * step;
    const LinearPart &part = a.part[0];
    if (i >= count * a.rows || out >= part.n) return;
    const float v = linear_res(part, row, out) + group_plain<U>(part.w, a.segs, a.x, out, row) * part.scale;
    if (__float_as_uint(v) != __float_as_uint(part.y[(size_t)row * part.n + out])) atomicAdd(bad, 1u);
    atomicAdd(bad + 1, 1u);
}

#define CHECK(x)                                                                         \
    do {                                                                                 \
        const cudaError_t e = (x);                                                       \
        if (e) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); }               \
    } while (0)

static uint64_t state = 88172645463325252ull;
static uint32_t bits() {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return (uint32_t)(state >> 16);
}
/* an f16 of either sign, 2^-7 or so */
static void put_half(uint8_t *to) {
    const uint16_t h = (uint16_t)(0x2000 | (bits() & 0x07ff) | (bits() & 1) << 15);
    memcpy(to, &h, 2);
}
template <class T> static T *device(const std::vector<T> &v) {
    T *p;
    CHECK(cudaMalloc(&p, v.size() * sizeof(T)));
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <class U> static std::vector<uint8_t> units(size_t n) {
    std::vector<uint8_t> w(n * U::UNIT);
    for (size_t i = 0; i + 4 <= w.size(); i += 4) { const uint32_t v = bits(); memcpy(&w[i], &v, 4); }
    const bool nvfp4 = U::FORM == FORM_S2 && U::APART;
    for (size_t u = 0; u < n; u++) {
        uint8_t *s = &w[u * U::UNIT + 2 * U::HALF];
        if (nvfp4) for (int i = 0; i < U::SCALE; i++) s[i] &= 0x3f;
        else if (U::FORM == FORM_S2) for (int r = 0; r < 16; r++) put_half(s + 256 + 2 * r);
        else if (U::UNSIGNED) for (int r = 0; r < 32; r++) put_half(s + r / 2 * 8 + r % 2 * 2);
        else for (int i = 0; i < U::SCALE / 2; i += U::APART ? 2 : 1) put_half(s + 2 * i);
    }
    return w;
}

struct Kind { const char *name; void (*kernel)(LinearArgs, const uint8_t *, int); size_t bytes; dim3 grid; int threads; const uint8_t *acts; };

/* milliseconds of one launch */
static float timed(const Kind &f, const LinearArgs &a, int padded) {
    static cudaEvent_t began, ended;
    if (!began) { CHECK(cudaEventCreate(&began)); CHECK(cudaEventCreate(&ended)); }
    float ms;
    CHECK(cudaFuncSetAttribute((const void *)f.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)f.bytes));
    CHECK(cudaEventRecord(began));
    f.kernel<<<f.grid, f.threads, f.bytes>>>(a, f.acts, padded);
    CHECK(cudaEventRecord(ended));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, began, ended));
    return ms;
}

/* wide: every fiftieth row's scales span 2^40; every step-th output is compared */
template <class U> static void shape(const char *name, int n, int cols, int rows, bool wide, int turns, int step) {
    const int segs = (cols + 255) / 256, blocks = (n + 31) / 32, ld = (rows + 127) / 128 * 128, groups = cols / 32, padded = (rows + 255) / 256 * 256;
    std::vector<int8_t> q((size_t)ld * cols);
    std::vector<float> d((size_t)groups * ld), sum(d.size()), y((size_t)rows * n, 1.0f);
    for (auto &v : q) v = (int8_t)((int)(bits() % 255) - 127);
    for (size_t i = 0; i < d.size(); i++) d[i] = ldexpf((float)(8 + bits() % 8), -(int)(bits() % (wide && i % ld % 50 == 7 ? 40 : 12)) - 4);
    for (size_t i = 0; i < d.size(); i++) {
        int all = 0;
        for (int k = 0; k < 32; k++) all += q[i % ld * cols + i / ld * 32 + k];
        sum[i] = d[i] * (float)all;
    }
    uint8_t *w = device(units<U>((size_t)2 * blocks * segs)), *acts = device(std::vector<uint8_t>(group_acts_bytes(ld, cols))),
            *fast = device(std::vector<uint8_t>((size_t)padded * group_stages(cols) * 128));
    float *result = device(y), *residual = device(y);
    unsigned *bad = device(std::vector<unsigned>(2)), got[2];
    LinearArgs a = {};
    a.part[0] = {w, NULL, residual, result, 1.0f, n, blocks};
    a.x = {device(q), device(d), device(sum), NULL, ld, cols};
    a.n_parts = 1; a.blocks = blocks; a.rows = rows; a.segs = segs;
    k_acts<<<dim3((group_stages(cols) + 7) / 8, ld / 8), 256>>>(a.x, acts, fast, padded);
    const unsigned tall = (rows + 127) / 128, places = tall * ((n + 127) / 128), sms = 132;
    const Kind forms[] = {{"groups", k_group<U>, sizeof(GroupShared<U>), dim3(places < sms ? places : sms), GG_THREADS, acts},
                          {"block", k_block<U>, sizeof(GemmBlock<U, GEMM_STAGES>), dim3(tall, (n + 127) / 128), 256, acts},
                          {"fast", k_fast<U>, sizeof(WgShared<U>), dim3(tall, (n + 255) / 256), WG_THREADS, fast}};
    printf("%-7s %5d x %5d, %4d rows:", name, n, cols, rows);
    for (const Kind &f : forms) {
        CHECK(cudaMemset(result, 255, y.size() * 4));
        CHECK(cudaMemset(bad, 0, 8));
        float least = timed(f, a, padded);
        k_compare<U><<<((n + step - 1) / step * rows + 255) / 256, 256>>>(a, step / 2, step, (n + step - 1) / step, bad);
        CHECK(cudaMemcpy(got, bad, 8, cudaMemcpyDeviceToHost));
        for (int turn = 0; turn < turns; turn++) { const float ms = timed(f, a, padded); least = ms < least ? ms : least; }
        printf("  %s %.3f", f.name, least);
        if (f.acts != fast) printf(" (%u of %u differ)%s", got[0], got[1], got[0] || !got[1] ? " MISMATCH" : "");
    }
    printf("\n");
    for (void *p : {(void *)w, (void *)acts, (void *)fast, (void *)result, (void *)residual, (void *)bad, (void *)a.x.q, (void *)a.x.delta, (void *)a.x.sum}) CHECK(cudaFree(p));
}
template <class U> static void shapes(const char *name) {
    shape<U>(name, 1000, 1056, 130, true, 1, 1);
    shape<U>(name, 12288, 4096, 2048, false, 5, 211);
    shape<U>(name, 4096, 4096, 130, false, 5, 211);
}

int main(int argc, char **) {
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc > 1) {
        shape<U_Q4_K>("Q4_K", 8192, 4096, 2048, false, 0, 997);
        shape<U_NVFP4>("NVFP4", 8192, 4096, 2048, false, 0, 997);
        return 0;
    }
    shapes<U_Q4_K>("Q4_K"); shapes<U_Q8_0>("Q8_0"); shapes<U_Q4_0>("Q4_0"); shapes<U_NVFP4>("NVFP4"); shapes<U_Q6_K>("Q6_K"); shapes<U_IQ4_XS>("IQ4_XS");
    return 0;
}
