/* The sampling kernels' own text, run by threads of the processor: one for each thread of a block, warps in step at every shuffle. Tokens, counts
 * and masses must be those of bw24_sample. Needs a C++20 compiler, no card and no CUDA toolkit; knows nothing of a real card's timing. */
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static
struct dim { unsigned x, y; };
static thread_local dim threadIdx, blockIdx;
static dim blockDim, gridDim;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barrier;
static std::vector<uint64_t> lanes;

static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T> T exchange(T v, unsigned from) {
    auto &b = *warp_barrier[threadIdx.x / 32];
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    lanes[threadIdx.x] = bits;
    b.arrive_and_wait();
    bits = lanes[threadIdx.x / 32 * 32 + from];
    b.arrive_and_wait();
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <class T> T __shfl_xor_sync(unsigned, T v, int o) { return exchange(v, (threadIdx.x & 31) ^ (unsigned)o); }
template <class T> T __shfl_up_sync(unsigned, T v, int o) {
    unsigned lane = threadIdx.x & 31;
    return exchange(v, lane >= (unsigned)o ? lane - (unsigned)o : lane);
}
static unsigned __ballot_sync(unsigned, bool p) {
    unsigned out = 0;
    for (unsigned i = 0; i < 32; i++) out |= (unsigned)exchange((int)p, i) << i;
    return out;
}
static int __ffs(int v) { return __builtin_ffs(v); }
template <class T, class V> T atomicAdd(T *p, V v) { return std::atomic_ref<T>(*p).fetch_add((T)v); }
template <class T> T atomicMin(T *p, T v) {
    std::atomic_ref<T> a(*p);
    T old = a.load();
    while (v < old && !a.compare_exchange_weak(old, v)) { }
    return old;
}
template <class T> T __ldcg(const T *p) { return *(const volatile T *)p; }
template <class T> T __ldg(const T *p) { return *p; }
static uint32_t __float_as_uint(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
static float __uint_as_float(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }
#define BW24_CU_DEVICE_CUH
#include "../../libbw24/canon.h"
namespace bw { static void pdl_trigger() { } static void pdl_wait() { } }
#include "../../libbw24/cu/op_sample.cuh"
extern "C" {
#include "../../libbw24/bw24.h"
}

using namespace bw;

static void run(unsigned gx, unsigned gy, unsigned threads, const std::function<void()> &kernel) {
    blockDim = {threads, 1};
    gridDim = {gx, gy};
    lanes.assign(threads, 0);
    for (unsigned y = 0; y < gy; y++)
        for (unsigned x = 0; x < gx; x++) {
            block_barrier = std::make_unique<std::barrier<>>(threads);
            warp_barrier.clear();
            for (unsigned w = 0; w < threads / 32; w++) warp_barrier.push_back(std::make_unique<std::barrier<>>(32));
            std::vector<std::thread> pool;
            for (unsigned t = 0; t < threads; t++)
                pool.emplace_back([=, &kernel] {
                    threadIdx = {t, 0};
                    blockIdx = {x, y};
                    kernel();
                });
            for (auto &p : pool) p.join();
        }
}

static uint64_t state = 24;
static uint32_t random32() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (uint32_t)(state >> 32); }
static float unit() { return (float)random32() * 0x1p-32f; }

/* spread 0: all equal; kind 1: few distinct values; kind 2: one far above */
static std::vector<float> logits_of(int vocab, int kind) {
    std::vector<float> l((size_t)vocab);
    for (float &v : l) {
        float x = unit() + unit() + unit() - 1.5f;
        v = kind == 0 ? 1.25f : kind == 1 ? (float)(random32() % 5) - 0.0f : kind == 3 ? x * 2000.0f : x * 12.0f;
        if (random32() % 50 == 0) v = random32() & 1 ? 0.0f : -0.0f;
    }
    if (kind == 2) l[(size_t)vocab / 3] = 60.0f;
    return l;
}

static int check(int vocab, int kind, const bw24_sampler &p) {
    std::vector<float> l = logits_of(vocab, kind), copy = l;
    int32_t token = -1;
    if (bw24_sample(l.data(), vocab, &p, NULL, 0, 77, NULL, &token, NULL)) { printf("bw24_sample: %s\n", bw24_last_error()); return 1; }
    u64 best = 0;
    for (int i = 0; i < vocab; i++) {
        u64 key = (u64)ordered_bits(l[(size_t)i]) << 32 | (uint32_t)~i;
        best = key > best ? key : best;
    }
    SampleRow r = {};
    r.seed = p.seed; r.pos = 77;
    r.k = p.temperature == 0.0f ? 0.0f : 1.44269504f / p.temperature;
    r.top_p = p.top_p; r.min_p = p.min_p; r.top_k = p.top_k; r.rep = 1.0f;
    SampleState st;
    unsigned chunks = (unsigned)(vocab + RACE_CHUNK - 1) / RACE_CHUNK;
    std::vector<RaceBest> slots(chunks);
    SampleArgs a = {copy.data(), &best, &r, NULL, NULL, &st, slots.data(), vocab};
    run(1, 1, 32, [&] { k_sample_edit(a, &best); });
    run(1, 1, 64, [&] { k_sample_bound(a); });
    run(chunks, 1, RACE_THREADS, [&] { k_sample_race(a); });
    /* what must survive, by sorting */
    std::vector<std::pair<u64, u64>> order;
    float top = logit_of(best);
    for (int i = 0; i < vocab && p.temperature > 0.0f; i++)
        if (u64 w = weight_of(l[(size_t)i], top, r.k)) order.push_back({order_key(l[(size_t)i], i), w});
    std::sort(order.begin(), order.end());
    u64 total = 0, mass = 0;
    for (auto &o : order) total += o.second;
    int kept = 0, n = (int)order.size();
    if (p.top_k && p.top_k < n) n = p.top_k;
    double need = std::ceil((double)p.top_p * (double)total), least = (double)p.min_p * 0x1p40;
    while (kept < n && (kept == 0 || ((p.top_p >= 1 || (double)mass < need) && (double)order[(size_t)kept].second >= least))) mass += order[(size_t)kept++].second;
    if (p.temperature == 0.0f) { kept = 1; mass = 1ull << 40; }
    bool same = st.token == token && st.kept == kept && st.mass == mass;
    if (!same)
        printf("vocab %d kind %d T %g k %d p %g min %g: token %d kept %d mass %llu, expected %d %d %llu\n", vocab, kind, p.temperature, p.top_k, p.top_p, p.min_p,
               st.token, st.kept, st.mass, token, kept, mass);
    return !same;
}

/* a cut head in a round: columns stand for tokens or none, penalties look at a history that ends with drafts which are found through values */
static int check_round(int columns, int vocab, int drafts, const bw24_sampler &p) {
    std::vector<float> l = logits_of(columns, 3), copy;
    for (float &v : l) v *= 0.01f;
    copy = l;
    std::vector<int> ids((size_t)columns), column((size_t)vocab, -1), history;
    for (int i = 0; i < columns; i++) {
        int id = (int)((u64)i * 7919 % (u64)vocab);
        ids[(size_t)i] = i % 11 == 3 ? -1 : id;
        if (ids[(size_t)i] >= 0) column[(size_t)id] = i;
        else l[(size_t)i] = copy[(size_t)i] = 100.0f; /* must not count as the largest */
    }
    for (int i = 0; i < 40; i++) history.push_back((int)(random32() % (unsigned)vocab));
    std::map<int, int> count;
    for (int id : history) count[id]++;
    std::vector<SampleEdit> edits;
    std::vector<float> bias;
    for (int i = 0; i < p.n_bias; i++) { /* ids ascending and distinct here */
        edits.push_back({p.bias_ids[i], count.count(p.bias_ids[i]) ? count[p.bias_ids[i]] : 0, (int)bias.size(), 1});
        bias.push_back(p.bias_values[i]);
        count.erase(p.bias_ids[i]);
    }
    for (auto &c : count) edits.push_back({c.first, c.second, 0, 0});
    /* drafts: of the history, of the biased, twice the same, by column, by state and by key */
    std::vector<u64> block(64);
    std::vector<RoundValue> values;
    for (int d = 0; d < drafts; d++) {
        int c = (int)(random32() % (unsigned)columns), kind = d % 3;
        int id = kind == VALUE_COLUMN ? ids[(size_t)c] : d % 4 == 0 ? history[(size_t)d] : d % 4 == 1 && p.n_bias ? p.bias_ids[0] : (int)(random32() % (unsigned)vocab);
        unsigned at = (unsigned)(d * 8);
        if (kind == VALUE_STATE) { at = (unsigned)(256 + d / 3 * sizeof(SampleState)); memcpy((uint8_t *)block.data() + at, &id, sizeof id); }
        else block[(size_t)d] = 5ull << 40 | (uint32_t)~(kind == VALUE_COLUMN ? c : id);
        if (id < 0) break; /* a missing draft ends the chain */
        values.push_back({at, kind});
        history.push_back(id);
    }
    int32_t token = -1;
    if (bw24_sample_ids(l.data(), columns, ids.data(), vocab, &p, history.data(), (int)history.size(), 77, &token)) { printf("bw24_sample_ids: %s\n", bw24_last_error()); return 1; }
    u64 best = 1;
    SampleRow r = {};
    r.seed = p.seed; r.pos = 77;
    r.k = p.temperature == 0.0f ? 0.0f : 1.44269504f / p.temperature;
    r.top_p = p.top_p; r.min_p = p.min_p; r.top_k = p.top_k;
    r.rep = p.repetition_penalty; r.presence = p.presence_penalty; r.freq = p.frequency_penalty;
    r.edit_n = (int)edits.size(); r.drafts_n = (int)values.size();
    SampleState st;
    unsigned chunks = (unsigned)(columns + RACE_CHUNK - 1) / RACE_CHUNK;
    std::vector<RaceBest> slots(chunks);
    SampleArgs a = {copy.data(), &best, &r, edits.data(), bias.data(), &st, slots.data(), columns, ids.data(), column.data(), (const uint8_t *)block.data(), values.data()};
    run(1, 1, 32, [&] { k_sample_edit(a, &best); });
    if (best) { printf("the best key was kept\n"); return 1; }
    for (int i = 0; i < columns; i++) {
        u64 key = (u64)ordered_bits(copy[(size_t)i]) << 32 | (uint32_t)~ids[(size_t)i];
        if (ids[(size_t)i] >= 0 && key > best) best = key;
    }
    run(1, 1, 64, [&] { k_sample_bound(a); });
    run(chunks, 1, RACE_THREADS, [&] { k_sample_race(a); });
    if (st.token != token)
        printf("columns %d of %d, %d drafts, T %g k %d p %g: token %d, expected %d\n", columns, vocab, (int)values.size(), p.temperature, p.top_k, p.top_p, st.token, token);
    return st.token != token;
}

int main() {
    int bad = 0, n = 0;
    const int vocabs[] = {1, 2049, 5000};
    const struct { float t; int k; float p, m; } sets[] = {
        {0, 0, 1, 0}, {1, 0, 1, 0}, {0.7f, 40, 1, 0}, {1, 0, 0.9f, 0}, {1, 0, 1, 0.05f}, {0.8f, 20, 0.95f, 0.02f}, {100, 3000, 1, 0}, {100, 0, 0.99f, 0},
        {0.01f, 5, 0.5f, 0}, {1, 1, 1, 0}, {1, 0, 0, 0}, {2, 1500, 0.999f, 0.0001f}, {1e-6f, 0, 0.5f, 0.5f}, {30, 0, 1, 1},
    };
    for (int vocab : vocabs)
        for (int kind = 0; kind < 4; kind++)
            for (auto &s : sets) {
                if (vocab == 5000 && kind > 1) continue; /* the two that fill one bin with thousands */
                bw24_sampler p = {};
                p.size = sizeof p; p.temperature = s.t; p.top_k = s.k; p.top_p = s.p; p.min_p = s.m; p.repetition_penalty = 1; p.seed = 5 + (uint64_t)n;
                bad += check(vocab, kind, p);
                n++;
            }
    const int biased[] = {3, 17, 400};
    const float by[] = {2.5f, -4.0f, 7.0f};
    for (int drafts : {0, 5, 16})
        for (auto &s : sets) {
                const int bias = n & 1;
                if (drafts == 5 && s.t != 1) continue;
                bw24_sampler p = {};
                p.size = sizeof p; p.temperature = s.t; p.top_k = s.k; p.top_p = s.p; p.min_p = s.m; p.seed = 5 + (uint64_t)n;
                p.repetition_penalty = 1.3f; p.presence_penalty = 0.4f; p.frequency_penalty = 0.2f;
                if (bias) { p.n_bias = 3; p.bias_ids = biased; p.bias_values = by; }
                bad += check_round(drafts == 5 ? 2500 : 700, 4001, drafts, p);
                n++;
            }
    printf("%d draws, %d different\n", n, bad);
    return bad != 0;
}
