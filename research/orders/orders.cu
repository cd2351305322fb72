/* Measures the orders of docs/numerics.md on a GPU: bit equality of LINEAR, NORM and ATTEND with scalar C, then the time of
 * 9B- and 27B-shaped steps at 1..8 and 2048 rows and of attention at 4k and 32k keys. Writes JSON lines to the file given. */
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <cuda_runtime.h>
#include "../../libbw24/cu/op_norm.cuh"
#include "../../libbw24/cu/op_gemm.cuh"
#include "../../libbw24/cu/op_attend.cuh"
#include "reference.h"

#define CK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s line %d: %s\n", #x, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
using namespace bw;

static FILE *out;
static double wall = 4700; /* GB/s, measured below */
static int failures;

template <class T> static T *dev(size_t n, int fill = 0xff) { T *p; CK(cudaMalloc(&p, n * sizeof(T))); CK(cudaMemset(p, fill, n * sizeof(T))); return p; }
template <class T> static T *up(const std::vector<T> &h) { T *p = dev<T>(h.size()); CK(cudaMemcpy(p, h.data(), h.size() * sizeof(T), cudaMemcpyHostToDevice)); return p; }
template <class T> static std::vector<T> down(const T *p, size_t n) { std::vector<T> h(n); CK(cudaMemcpy(h.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost)); return h; }
static Acts acts(int rows, int cols) {
    Acts a; a.ld = rows > 8 ? (rows + 127) / 128 * 128 : 8; a.cols = cols;
    a.q = dev<int8_t>((size_t)a.ld * cols, 0); a.delta = dev<float>((size_t)a.ld * cols / 32, 0); a.sum = dev<float>((size_t)a.ld * cols / 32, 0);
    return a;
}
static void release(Acts &a) { cudaFree(a.q); cudaFree(a.delta); cudaFree(a.sum); }

template <class K, class... A> static void launch(K k, dim3 grid, int threads, size_t shared, cudaStream_t s, A... args) {
    if (shared > 48 * 1024) CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[1];
    c.gridDim = grid; c.blockDim = threads; c.dynamicSmemBytes = shared; c.stream = s;
    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; at[0].val.programmaticStreamSerializationAllowed = 1;
    c.attrs = at; c.numAttrs = 1;
    CK(cudaLaunchKernelEx(&c, k, args...));
}
/* consumer warps: equal rounds of at most `most` */
static int warps_for(int segs, int most) { int rounds = (segs + most - 1) / most; return (segs + rounds - 1) / rounds; }
static int sms = 132, ring_kb = 110, act_kb = 52;
template <class U, int R, int T, int EPI, bool STAGED> static void small_launch(LinearArgs a, cudaStream_t s, int most) {
    SmallShape g;
    for (;; most--) { /* the widest block whose ring is at least two units deep and that fits */
        g = {warps_for(a.segs, most), 0, (a.n + 15) / 16 / T};
        g.depth = std::max(2, ring_kb * 1024 / (g.warps * U::UNIT));
        while (g.depth > 2 && small_shared<U, R, T, STAGED>(g, a.segs) > 227 * 1024) g.depth--;
        if (small_shared<U, R, T, STAGED>(g, a.segs) <= 227 * 1024) break;
    }
    launch(k_linear_small<U, R, T, EPI, STAGED>, dim3(std::min(sms, g.blocks)), 32 * (g.warps + (R == 8 ? 4 : R == 4 ? 2 : 1)), small_shared<U, R, T, STAGED>(g, a.segs), s, a, g);
}
template <class U, int R, int T, int EPI> static void small(LinearArgs a, cudaStream_t s, int most = 16) {
    if ((size_t)R * a.segs * 320 <= (size_t)act_kb * 1024) small_launch<U, R, T, EPI, true>(a, s, most);
    else small_launch<U, R, T, EPI, false>(a, s, most);
}
template <class U, bool ADD> static void gemm(LinearArgs a, cudaStream_t s) {
    constexpr int ST = 3;
    launch(k_linear_gemm<U, ST, ADD>, dim3((a.rows + 127) / 128, (a.n + 127) / 128), 256, sizeof(GemmShared<U, ST>), s, a);
}
static void norm(NormArgs a, int rows, cudaStream_t s) {
    int segs = (a.n + 255) / 256;
    if (segs <= 16) launch(k_norm_quant<1>, dim3(rows), 32 * segs, 0, s, a);
    else if (segs <= 32) launch(k_norm_quant<2>, dim3(rows), 512, 0, s, a);
    else launch(k_norm_quant<5>, dim3(rows), 512, 0, s, a);
}

/* median seconds of a captured graph */
static double timed(const std::function<void(cudaStream_t)> &step, int inner = 4, int outer = 11) {
    cudaStream_t s; CK(cudaStreamCreate(&s));
    cudaGraph_t g; cudaGraphExec_t ge; cudaEvent_t e0, e1;
    CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); step(s); CK(cudaStreamEndCapture(s, &g));
    CK(cudaGraphInstantiate(&ge, g, 0)); cudaEventCreate(&e0); cudaEventCreate(&e1);
    for (int i = 0; i < 2; i++) CK(cudaGraphLaunch(ge, s));
    CK(cudaStreamSynchronize(s));
    std::vector<float> t;
    for (int i = 0; i < outer; i++) {
        cudaEventRecord(e0, s); for (int j = 0; j < inner; j++) cudaGraphLaunch(ge, s); cudaEventRecord(e1, s);
        CK(cudaEventSynchronize(e1)); float ms; cudaEventElapsedTime(&ms, e0, e1); t.push_back(ms / inner);
    }
    cudaGraphExecDestroy(ge); cudaGraphDestroy(g); cudaStreamDestroy(s); CK(cudaGetLastError());
    std::sort(t.begin(), t.end());
    return t[t.size() / 2] * 1e-3;
}
static void row(const std::string &s) { printf("%s\n", s.c_str()); if (out) { fprintf(out, "%s\n", s.c_str()); fflush(out); } }
static std::string fmt(const char *f, ...) { char b[512]; va_list v; va_start(v, f); vsnprintf(b, sizeof b, f, v); va_end(v); return b; }

#include "checks.h"
#include "steps.h"

int main(int argc, char **argv) {
    if (argc > 1) out = fopen(argv[1], "w");
    std::string what = argc > 2 ? argv[2] : "check,wall,decode,prefill,attend";
    cudaDeviceProp p; CK(cudaGetDeviceProperties(&p, 0));
    row(fmt("{\"what\":\"device\",\"name\":\"%s\",\"sms\":%d}", p.name, p.multiProcessorCount));
    if (what.find("check") != std::string::npos) check_all();
    if (what.find("wall") != std::string::npos) measure_wall();
    if (what.find("decode") != std::string::npos) decode_all();
    if (what.find("profile") != std::string::npos) profile_one();
    if (what.find("prefill") != std::string::npos) prefill_all();
    if (what.find("attend") != std::string::npos) attend_all();
    row(fmt("{\"what\":\"end\",\"failures\":%d}", failures));
    return failures != 0;
}
