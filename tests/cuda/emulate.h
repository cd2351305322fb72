/* Blocks and warps of CUDA on the CPU, for tests of kernels where there is no card: a thread is a fiber, warps run in random order and a random number of
 * turns, so that a missing barrier shows; copies to shared memory happen at once, so that one issued too early destroys what is still read. Owns the
 * meaning of the intrinsics that the kernels use; knows no kernel. */
#ifndef BW24_TESTS_CUDA_EMULATE_H
#define BW24_TESTS_CUDA_EMULATE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <functional>
#include <map>
#include <vector>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#undef __shared__
#undef __noinline__
#define __noinline__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __align__
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

namespace emu {

struct Fiber { ucontext_t ctx; std::vector<char> stack; uint3 tid; int lin; bool done; };
enum { SLOTS = 8, WORDS = 6 }; /* operations of a warp that may be under way: half warps run ahead of each other */
struct Warp { uint32_t slot[SLOTS][32][WORDS]; long ops[32]; };
struct Bar { int phase, arrived, count; long bytes; };

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber *cur;
inline ucontext_t main_ctx;
inline std::function<void()> body;
inline uint3 block;
inline dim3 grid, threads;
inline long arrived, generation, live, turns;
inline std::map<const void *, Bar> bars;
inline std::function<void()> before_block, at_wait; /* of a test: ahead of each block; in place of the dependency wait */
alignas(1024) inline uint8_t shared[256 * 1024];

inline void fail(const char *what) { printf("emulation: %s\n", what); exit(3); }
inline void yield() {
    if (++turns > 400000000L) fail("no thread gets any further");
    swapcontext(&cur->ctx, &main_ctx);
}
inline void sync_threads() {
    long mine = generation;
    if (++arrived == live) { arrived = 0; generation++; return; }
    while (generation == mine) yield();
}

/* every lane of mask gives n words and sees those of all; the result is good until the warp's next operation but seven */
inline uint32_t (*exchange(uint32_t mask, const uint32_t *w, int n))[WORDS] {
    const int lane = cur->lin & 31;
    Warp &warp = warps[cur->lin >> 5];
    const long op = warp.ops[lane];
    memcpy(warp.slot[op % SLOTS][lane], w, 4 * n);
    warp.ops[lane] = op + 1;
    auto all_here = [&] {
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1 && warp.ops[i] <= op) return false;
        return true;
    };
    while (!all_here()) yield();
    return warp.slot[op % SLOTS];
}

inline void entry() {
    body();
    cur->done = true;
    live--;
    if (live && arrived == live) { arrived = 0; generation++; }
    swapcontext(&cur->ctx, &main_ctx);
}

inline void run_block(uint32_t seed) {
    const int n = (int)threads.x, W = (n + 31) / 32;
    if (before_block) before_block();
    live = n;
    arrived = 0;
    bars.clear();
    memset(shared, 0xff, sizeof shared); /* NaN */
    if ((int)fibers.size() < n) fibers.resize(n);
    warps.assign(W, Warp{});
    for (int i = 0; i < n; i++) {
        Fiber &x = fibers[i];
        x.stack.resize(192 * 1024);
        x.done = false;
        x.lin = i;
        x.tid = make_uint3(i, 0, 0);
        getcontext(&x.ctx);
        x.ctx.uc_stack.ss_sp = x.stack.data();
        x.ctx.uc_stack.ss_size = x.stack.size();
        makecontext(&x.ctx, entry, 0);
    }
    while (live) {
        seed = seed * 1664525u + 1013904223u;
        const int w = (int)((seed >> 16) % W), times = 1 + (seed >> 8) % 8;
        for (int k = 0; k < times; k++)
            for (int i = w * 32; i < w * 32 + 32 && i < n; i++)
                if (!fibers[i].done) { cur = &fibers[i]; swapcontext(&main_ctx, &cur->ctx); }
    }
}

/* the blocks of a grid, one after the other */
inline void launch(std::function<void()> f, dim3 g, int n) {
    uint32_t seed = 1;
    body = f;
    grid = g;
    threads = dim3((unsigned)n);
    for (unsigned z = 0; z < g.z; z++)
        for (unsigned y = 0; y < g.y; y++)
            for (unsigned x = 0; x < g.x; x++) { block = make_uint3(x, y, z); run_block(seed++); }
}

template <class T> uint32_t word(T v) { uint32_t w; memcpy(&w, &v, 4); return w; }
template <class T> T of_word(uint32_t w) { T v; memcpy(&v, &w, 4); return v; }
template <class T> T from_lane(unsigned mask, T v, int lane) {
    uint32_t w[2] = {};
    memcpy(w, &v, sizeof v);
    T r;
    memcpy(&r, exchange(mask, w, sizeof v / 4)[lane & 31], sizeof r);
    return r;
}
inline int lane() { return cur->lin & 31; }

/* bytes of a and b by the four nibbles of sel; 8 and up: the byte's sign */
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t sel) {
    uint64_t v = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = sel >> (4 * i) & 15;
        uint8_t x = (uint8_t)(v >> (8 * (s & 7)));
        if (s & 8) x = x & 128 ? 255 : 0;
        r |= (uint32_t)x << (8 * i);
    }
    return r;
}

} // namespace emu

#define threadIdx (emu::cur->tid)
#define blockIdx (emu::block)
#define gridDim (emu::grid)
#define blockDim (emu::threads)

inline void __syncthreads() { emu::sync_threads(); }
inline void __syncwarp(unsigned mask = ~0u) { uint32_t z = 0; emu::exchange(mask, &z, 1); }
template <class T> T __shfl_sync(unsigned m, T v, int l, int width = 32) { return emu::from_lane(m, v, (emu::lane() & -width) + (l & (width - 1))); }
template <class T> T __shfl_xor_sync(unsigned m, T v, int o) { return emu::from_lane(m, v, emu::lane() ^ o); }
template <class T> T __shfl_up_sync(unsigned m, T v, int d) { return emu::from_lane(m, v, emu::lane() >= d ? emu::lane() - d : emu::lane()); }
template <class T> T __shfl_down_sync(unsigned m, T v, int d) { return emu::from_lane(m, v, emu::lane() + d < 32 ? emu::lane() + d : emu::lane()); }
template <class T> T __reduce_max_sync(unsigned m, T v) {
    uint32_t w = emu::word(v), (*s)[emu::WORDS] = emu::exchange(m, &w, 1);
    for (int i = 0; i < 32; i++)
        if (m >> i & 1) v = std::max(v, emu::of_word<T>(s[i][0]));
    return v;
}
template <class T> T __reduce_min_sync(unsigned m, T v) { return -__reduce_max_sync(m, (T)-v); }
template <class T> T __reduce_add_sync(unsigned m, T v) {
    uint32_t w = emu::word(v), (*s)[emu::WORDS] = emu::exchange(m, &w, 1);
    T sum = 0;
    for (int i = 0; i < 32; i++)
        if (m >> i & 1) sum += emu::of_word<T>(s[i][0]);
    return sum;
}
inline unsigned __ballot_sync(unsigned m, int p) {
    uint32_t w = p != 0, (*s)[emu::WORDS] = emu::exchange(m, &w, 1), r = 0;
    for (int i = 0; i < 32; i++) r |= s[i][0] << i;
    return r;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline uint32_t __float_as_uint(float f) { return emu::word(f); }
inline int __float_as_int(float f) { return (int)emu::word(f); }
inline float __uint_as_float(uint32_t w) { return emu::of_word<float>(w); }
inline float __int_as_float(int w) { return emu::of_word<float>((uint32_t)w); }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldg(const T *p) { return *p; }
inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, int n) { return n ? hi << n | lo >> (32 - n) : hi; }
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, uint32_t n) { n &= 31; return n ? hi << (32 - n) | lo >> n : lo; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t sel) { return emu::prmt(a, b, sel); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}
inline int __syncthreads_or(int p) {
    static int any;
    __syncthreads();
    any = 0;
    __syncthreads();
    any |= p;
    __syncthreads();
    return any;
}
inline void __threadfence() {}
inline float __fdividef(float a, float b) { return a / b; }
inline int atomicMin(int *p, int v) { int old = *p; *p = std::min(old, v); return old; }
inline int atomicAdd(int *p, int v) { int old = *p; *p += v; return old; }

namespace emu {

/* m16n8k32: c [16][8] += a [16][32] b [32][8] in int8, a perhaps of unsigned bytes; the places of the operands in the lanes are the instruction's */
inline void mma_s8(int *c, const uint32_t *a, const uint32_t *b, bool positive = false) {
    uint32_t w[6] = {a[0], a[1], a[2], a[3], b[0], b[1]}, (*s)[WORDS] = exchange(~0u, w, 6);
    for (int i = 0; i < 4; i++) {
        const int row = (lane() >> 2) + 8 * (i >> 1), col = 2 * (lane() & 3) + (i & 1);
        for (int k = 0; k < 32; k++) {
            const int half = k >> 4, t = (k & 15) >> 2, byte = 8 * (k & 3);
            const int x = s[(row & 7) * 4 + t][half * 2 + (row >> 3)] >> byte & 255;
            c[i] += (positive ? x : (int8_t)x) * (int8_t)(s[col * 4 + t][4 + half] >> byte);
        }
    }
}
/* m16n8k16: the same in bf16 with sums in f32 */
inline void mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    uint32_t w[6] = {a[0], a[1], a[2], a[3], b0, b1}, (*s)[WORDS] = exchange(~0u, w, 6);
    auto value = [](uint32_t v, int high) { return (double)of_word<float>(high ? v & 0xffff0000u : v << 16); };
    for (int i = 0; i < 4; i++) {
        const int row = (lane() >> 2) + 8 * (i >> 1), col = 2 * (lane() & 3) + (i & 1);
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const int half = k >> 3, t = (k & 7) >> 1;
            sum += value(s[(row & 7) * 4 + t][half * 2 + (row >> 3)], k & 1) * value(s[col * 4 + t][4 + half], k & 1);
        }
        c[i] = (float)sum;
    }
}
/* products of pairs of bf16, rounded to nearest, subnormals as they are */
inline uint32_t bf16_times(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int i = 0; i < 2; i++) {
        const float v = of_word<float>(a >> 16 * i << 16) * of_word<float>(b >> 16 * i << 16);
        const uint32_t w = word(v);
        r |= ((w + 0x7fff + (w >> 16 & 1)) >> 16) << 16 * i;
    }
    return r;
}
/* m16n8k8 in tf32, whose operands lose their last 13 bits */
inline void mma_tf32(float *c, const float *a, float b0, float b1) {
    uint32_t w[6] = {word(a[0]), word(a[1]), word(a[2]), word(a[3]), word(b0), word(b1)}, (*s)[WORDS] = exchange(~0u, w, 6);
    auto value = [](uint32_t v) { return (double)of_word<float>(v & 0xffffe000u); };
    for (int i = 0; i < 4; i++) {
        const int row = (lane() >> 2) + 8 * (i >> 1), col = 2 * (lane() & 3) + (i & 1);
        double sum = c[i];
        for (int k = 0; k < 8; k++) sum += value(s[(row & 7) * 4 + (k & 3)][(k >> 2) * 2 + (row >> 3)]) * value(s[col * 4 + (k & 3)][4 + (k >> 2)]);
        c[i] = (float)sum;
    }
}
inline float tf32(float v) { return of_word<float>(word(v) + 0x1000u); }
/* ldmatrix.x4 */
inline void load_matrices(uint32_t *r, const void *at, bool transposed) {
    uint64_t p = (uint64_t)at;
    uint32_t w[2] = {(uint32_t)p, (uint32_t)(p >> 32)}, (*s)[WORDS] = exchange(~0u, w, 2), out[4];
    auto row = [&](int m, int i) { return (const uint16_t *)((uint64_t)s[m * 8 + i][1] << 32 | s[m * 8 + i][0]); };
    const int i = lane() >> 2, j = 2 * (lane() & 3);
    for (int m = 0; m < 4; m++) out[m] = transposed ? row(m, j)[i] | (uint32_t)row(m, j + 1)[i] << 16 : row(m, i)[j] | (uint32_t)row(m, i)[j + 1] << 16;
    __syncwarp();
    memcpy(r, out, sizeof out);
}

/* one warp's 16 outputs of m64n128k16 (bf16, sums in f32): rows of b in tiles of eight of 1024 bytes, 128 bytes a row, places of 16 bytes swapped by row % 8;
 * at: 16 columns of row 0, a multiple of 32 bytes from where the tile begins */
inline void wg_mma(float *d, const uint32_t *a, uint64_t at) {
    const uint64_t tile = at & ~1023ull;
    const int column = (int)(at & 127) / 16;
    for (int n = 0; n < 16; n++) {
        uint32_t b[2];
        for (int half = 0; half < 2; half++) {
            const int row = lane() >> 2;
            memcpy(&b[half], (const uint8_t *)tile + n * 1024 + row * 128 + ((column + half) ^ row) * 16 + 4 * (lane() & 3), 4);
        }
        mma_bf16(d + 4 * n, a, b[0], b[1]);
    }
}

/* an f16, subnormals too */
inline float half_value(uint32_t v) {
    const int e = v >> 10 & 31, m = v & 1023;
    return (v & 0x8000 ? -1.0f : 1.0f) * (e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24));
}
/* the f16 of a whole number below 2048 */
inline uint32_t half_word(float v) {
    const uint32_t w = word(v);
    return v == 0.0f ? 0 : (w >> 16 & 0x8000) | (((w >> 23 & 255) - 112) << 10) | (w >> 13 & 1023);
}
/* of pairs of f16: differences, and a sixteenth of the first plus the second, where these are whole numbers below 2048 */
inline uint32_t halves_less(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int i = 0; i < 2; i++) r |= half_word(half_value(a >> 16 * i & 0xffff) - half_value(b >> 16 * i & 0xffff)) << 16 * i;
    return r;
}
inline uint32_t sixteenths_plus(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int i = 0; i < 2; i++) r |= half_word(half_value(a >> 16 * i & 0xffff) / 16 + half_value(b >> 16 * i & 0xffff)) << 16 * i;
    return r;
}
/* the f16 nearest to an exact f32, which must be one */
inline uint32_t half_exact(float v) {
    const uint32_t r = __half_as_ushort(__float2half_rn(v));
    if (half_value(r) != v) fail("a value is no f16");
    return r;
}
/* of pairs of f16: a times b plus c, which must be exact */
inline uint32_t halves_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 16) r |= half_exact(fmaf(half_value(a >> i & 0xffff), half_value(b >> i & 0xffff), half_value(c >> i & 0xffff))) << i;
    return r;
}
/* m16n8k16: c [16][8] = a [16][16] b [16][8] in f16, sums in f32, which must be exact */
inline void mma_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    uint32_t w[6] = {a[0], a[1], a[2], a[3], b0, b1}, (*s)[WORDS] = exchange(~0u, w, 6);
    for (int i = 0; i < 4; i++) {
        const int row = (lane() >> 2) + 8 * (i >> 1), col = 2 * (lane() & 3) + (i & 1);
        double sum = 0.0;
        for (int k = 0; k < 16; k++) {
            const int half = k >> 3, t = (k & 7) >> 1, at = 16 * (k & 1);
            sum += (double)half_value(s[(row & 7) * 4 + t][half * 2 + (row >> 3)] >> at & 0xffff) * half_value(s[col * 4 + t][4 + half] >> at & 0xffff);
        }
        c[i] = (float)sum;
        if ((double)c[i] != sum) fail("the sum of half a group is not exact");
    }
}

/* one warp's 16 outputs of m64nNk16 (f16, sums in f32, which must be exact), tiles: N / 8; operands as wg_mma's; first: d begins here */
inline void wg_f16(float *d, const uint32_t *a, uint64_t at, bool first, int tiles) {
    const uint64_t tile = at & ~1023ull;
    const int column = (int)(at & 127) / 16;
    for (int n = 0; n < tiles; n++) {
        uint32_t w[6] = {a[0], a[1], a[2], a[3], 0, 0};
        for (int half = 0; half < 2; half++) {
            const int row = lane() >> 2;
            memcpy(&w[4 + half], (const uint8_t *)tile + n * 1024 + row * 128 + ((column + half) ^ row) * 16 + 4 * (lane() & 3), 4);
        }
        uint32_t (*s)[WORDS] = exchange(~0u, w, 6);
        for (int i = 0; i < 4; i++) {
            const int row = (lane() >> 2) + 8 * (i >> 1), col = 2 * (lane() & 3) + (i & 1);
            double sum = first ? 0.0 : d[4 * n + i];
            for (int k = 0; k < 16; k++) {
                const int half = k >> 3, t = (k & 7) >> 1;
                sum += (double)half_value(s[(row & 7) * 4 + t][half * 2 + (row >> 3)] >> 16 * (k & 1) & 0xffff) * half_value(s[col * 4 + t][4 + half] >> 16 * (k & 1) & 0xffff);
            }
            d[4 * n + i] = (float)sum;
            if ((double)d[4 * n + i] != sum) fail("the sum of a group is not exact");
        }
    }
}

/* a named barrier of n threads */
inline long team_arrived[16], team_generation[16];
inline void bar_team(int i, int n) {
    long mine = team_generation[i];
    if (++team_arrived[i] == n) { team_arrived[i] = 0; team_generation[i]++; return; }
    while (team_generation[i] == mine) yield();
}

/* mbarriers, and the copies that they count */
inline void bar_init(uint64_t *b, int n) { bars[b] = {0, 0, n, 0}; }
inline void bar_settle(Bar &x) {
    if (x.arrived == x.count && !x.bytes) { x.phase ^= 1; x.arrived = 0; }
}
inline void bar_arrive(uint64_t *b) {
    Bar &x = bars[b];
    if (++x.arrived > x.count) fail("an arrival too many in one phase of an mbarrier");
    bar_settle(x);
}
inline void bar_expect(uint64_t *b, long n) {
    bars[b].bytes += n;
    bar_arrive(b);
}
inline void bulk_copy(void *to, const void *from, long n, uint64_t *b) {
    if (((uint64_t)to | (uint64_t)from | (uint64_t)n) & 15) fail("a bulk copy is not aligned to 16 bytes");
    memcpy(to, from, n);
    bars[b].bytes -= n;
    bar_settle(bars[b]);
}
inline bool bar_test(uint64_t *b, int parity) { return bars[b].phase != parity; }
inline void bar_wait(uint64_t *b, int parity) {
    while (!bar_test(b, parity)) yield();
}

} // namespace emu
#endif
