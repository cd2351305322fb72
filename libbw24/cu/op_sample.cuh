/* Drawing tokens on the device (docs/numerics.md §9): bias and penalties, the filters as one bound on (logit, id), the race. Every mass is an
 * integer and every choice an extremum of unique keys, so neither the order of threads nor the cut into blocks shows. Knows no list. */
#ifndef BW24_CU_OP_SAMPLE_CUH
#define BW24_CU_OP_SAMPLE_CUH

#include "device.cuh"
#include "value.cuh"

namespace bw {

__device__ __forceinline__ uint32_t ordered_bits(float v) { /* -0 counts as 0 */
    uint32_t bits = __float_as_uint(v + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u64 best) {
    uint32_t o = (uint32_t)(best >> 32);
    return __uint_as_float(o & 0x80000000u ? o ^ 0x80000000u : ~o);
}
/* ascending: logits descending, then ids ascending */
__device__ __forceinline__ u64 order_key(float l, int id) { return (u64)~ordered_bits(l) << 32 | (uint32_t)id; }
__device__ __forceinline__ u64 weight_of(float l, float top, float k) { return (u64)(bw_exp2((l - top) * k) * 0x1p40f); }

__device__ __forceinline__ void edit_logit(const SampleArgs &a, const SampleRow &r, float *l, const SampleEdit &e, int count) {
    int c = a.column ? __ldg(a.column + e.id) : e.id;
    if (c < 0) return; /* a token that a cut head lacks */
    float v = l[c];
    for (int b = 0; b < e.bias_n; b++) v = v + a.bias[e.bias_from + b];
    if (count) {
        v = v > 0.0f ? v / r.rep : v * r.rep;
        v = v - fmaf(r.freq, (float)count, r.presence);
    }
    l[c] = v;
}

/* One block a row: edits its logits in place, starts its state, and where something changed its best key, which k_finish then finds again. Drafts of the
 * round count as history: those among the edits with them, the others by themselves. */
static __global__ void __launch_bounds__(256) k_sample_edit(SampleArgs a, u64 *best) {
    __shared__ int draft[VALUES_A_REQUEST], seen[VALUES_A_REQUEST];
    const SampleRow r = a.rows[blockIdx.x];
    float *l = a.logits + (size_t)blockIdx.x * a.vocab;
    pdl_trigger();
    pdl_wait();
    if ((int)threadIdx.x < r.drafts_n) {
        draft[threadIdx.x] = value_of(a.block, a.values[r.drafts_from + threadIdx.x], a.ids);
        seen[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < r.edit_n; i += blockDim.x) {
        SampleEdit e = a.edits[r.edit_from + i];
        int count = e.count;
        for (int k = 0; k < r.drafts_n; k++)
            if (draft[k] == e.id) { count++; seen[k] = 1; }
        edit_logit(a, r, l, e, count);
    }
    __syncthreads();
    if ((int)threadIdx.x < r.drafts_n && !seen[threadIdx.x] && draft[threadIdx.x] >= 0) {
        int count = 0, first = 1;
        for (int k = 0; k < r.drafts_n; k++) {
            count += draft[k] == draft[threadIdx.x];
            first &= k >= (int)threadIdx.x || draft[k] != draft[threadIdx.x];
        }
        if (first) edit_logit(a, r, l, {draft[threadIdx.x], 0, 0, 0}, count);
    }
    if (threadIdx.x) return;
    if (r.edit_n || r.drafts_n) best[blockIdx.x] = 0;
    a.state[blockIdx.x] = {0, 0, 0, ~0ull, ~0ull, 0, 0};
}

struct BoundShared {
    u64 mass[SAMPLE_BINS];
    unsigned count[SAMPLE_BINS];
    u64 list_key[SAMPLE_LIST], list_w[SAMPLE_LIST];
    u64 total, fail, acc_mass;
    unsigned acc_count, n_list;
    int bin;
};

/* the first bin in which the row's quota of candidates or mass is reached; the sums before it. One warp walks, 64 bins a lane. */
__device__ __forceinline__ void find_bin(BoundShared &s, unsigned quota, double need) {
    const int lane = threadIdx.x & 31, per = SAMPLE_BINS / 32;
    u64 mass = 0;
    unsigned count = 0;
    for (int i = lane * per; i < (lane + 1) * per; i++) { mass += s.mass[i]; count += s.count[i]; }
    u64 m = mass;
    unsigned c = count;
    for (int o = 1; o < 32; o <<= 1) {
        u64 pm = __shfl_up_sync(~0u, m, o);
        unsigned pc = __shfl_up_sync(~0u, c, o);
        if (lane >= o) { m += pm; c += pc; }
    }
    m -= mass; c -= count; /* before this lane's bins */
    m += s.acc_mass; c += s.acc_count;
    int bin = -1;
    for (int i = lane * per; i < (lane + 1) * per && bin < 0; i++) {
        if (s.count[i] && (c + s.count[i] >= quota || (double)(m + s.mass[i]) >= need)) bin = i;
        else { m += s.mass[i]; c += s.count[i]; }
    }
    unsigned who = __ballot_sync(~0u, bin >= 0);
    if (!who) { if (!lane) s.bin = -1; return; }
    if (lane == __ffs((int)who) - 1) { s.bin = bin; s.acc_mass = m; s.acc_count = c; }
}

/* Candidates of one level: level 0 bins by distance from the top, later ones by digits of the key inside the bin found before. */
struct Level { int shift; u64 prefix; int bin0; float scale; };
__device__ __forceinline__ int bin0_of(float l, float top, float scale) {
    float d = (top - l) * scale;
    return d < (float)(SAMPLE_BINS - 1) ? (int)d : SAMPLE_BINS - 1;
}
__device__ __forceinline__ int bin_of(const Level &v, float l, float top, u64 key) {
    if (v.shift < 0) return bin0_of(l, top, v.scale);
    if (bin0_of(l, top, v.scale) != v.bin0) return -1;
    if (v.shift < 53 && key >> (v.shift + 11) != v.prefix) return -1;
    return (int)(key >> v.shift & (SAMPLE_BINS - 1));
}

/* the last survivor among the listed candidates: the one at which the quota is reached, itself counted but not without it */
__device__ __forceinline__ void rank_list(BoundShared &s, unsigned quota, double need, u64 *bound) {
    for (unsigned i = threadIdx.x; i < s.n_list; i += blockDim.x) {
        u64 mass = s.acc_mass, key = s.list_key[i];
        unsigned count = s.acc_count;
        for (unsigned j = 0; j < s.n_list; j++)
            if (s.list_key[j] < key) { mass += s.list_w[j]; count++; }
        bool before = count && (count >= quota || (double)mass >= need);
        if (!before && (count + 1 >= quota || (double)(mass + s.list_w[i]) >= need)) *bound = key;
    }
}

__device__ __forceinline__ int id_of(const SampleArgs &a, int column) { return a.ids ? __ldg(a.ids + column) : column; }

/* One block a row: the key of the last candidate that top_k and top_p keep, and of the first that min_p drops. */
static __global__ void __launch_bounds__(BOUND_THREADS) k_sample_bound(SampleArgs a) {
    __shared__ BoundShared s;
    const SampleRow r = a.rows[blockIdx.x];
    const float *l = a.logits + (size_t)blockIdx.x * a.vocab;
    pdl_trigger();
    pdl_wait();
    const bool cut = r.top_k > 0 || r.top_p < 1.0f;
    if (r.k == 0.0f || !(cut || r.min_p > 0.0f)) return;
    const float top = logit_of(__ldcg(a.best + blockIdx.x));
    const double least = (double)r.min_p * (double)0x1p40f; /* the top's own weight is 2^40 */
    const unsigned quota = r.top_k > 0 ? (unsigned)r.top_k : 0xffffffffu;
    double need = 1e300;
    Level v = {-1, 0, 0, fmaxf(50.0f * r.k, 64.0f)};
    if (!threadIdx.x) { s.total = 0; s.fail = ~0ull; s.acc_mass = 0; s.acc_count = 0; }
    for (;;) {
        for (int i = threadIdx.x; i < SAMPLE_BINS; i += blockDim.x) { s.mass[i] = 0; s.count[i] = 0; }
        if (!threadIdx.x) { s.n_list = 0; s.bin = -1; }
        __syncthreads();
        u64 total = 0, fail = ~0ull;
        for (int i = threadIdx.x; i < a.vocab; i += blockDim.x) {
            float x = __ldcg(l + i);
            const int id = id_of(a, i);
            u64 w = weight_of(x, top, r.k), key = order_key(x, id);
            if (!w || id < 0) continue;
            if (v.shift < 0) {
                total += w;
                if (r.min_p > 0.0f && (double)w < least && key < fail) fail = key;
            }
            int b = cut ? bin_of(v, x, top, key) : -1;
            if (b >= 0) { atomicAdd(&s.mass[b], w); atomicAdd(&s.count[b], 1u); }
        }
        if (v.shift < 0) {
            for (int o = 16; o; o >>= 1) {
                total += __shfl_xor_sync(~0u, total, o);
                u64 f = __shfl_xor_sync(~0u, fail, o);
                fail = f < fail ? f : fail;
            }
            if (!(threadIdx.x & 31)) { atomicAdd(&s.total, total); atomicMin(&s.fail, fail); }
        }
        __syncthreads();
        if (v.shift < 0 && r.top_p < 1.0f) need = ceil((double)r.top_p * (double)s.total);
        if (threadIdx.x < 32) find_bin(s, quota, need);
        __syncthreads();
        const int bin = s.bin;
        const bool fits = bin >= 0 && s.count[bin] <= SAMPLE_LIST;
        if (bin < 0) break; /* all survive */
        if (fits) {
            for (int i = threadIdx.x; i < a.vocab; i += blockDim.x) {
                float x = __ldcg(l + i);
                const int id = id_of(a, i);
                u64 key = order_key(x, id);
                if (id < 0 || bin_of(v, x, top, key) != bin) continue;
                u64 w = weight_of(x, top, r.k);
                if (!w) continue;
                unsigned at = atomicAdd(&s.n_list, 1u);
                s.list_key[at] = key;
                s.list_w[at] = w;
            }
            __syncthreads();
            rank_list(s, quota, need, &a.state[blockIdx.x].bound);
            break;
        }
        if (v.shift < 0) { v.bin0 = bin; v.shift = 53; v.prefix = 0; }
        else { v.prefix = v.shift == 53 ? (u64)bin : v.prefix << 11 | (u64)bin; v.shift -= 11; } /* at 9 a bin has at most 512 keys, which fit */
        __syncthreads();
    }
    if (!threadIdx.x) a.state[blockIdx.x].fail = s.fail;
}

__device__ __forceinline__ bool wins(double key, int id, double than, int than_id) { return key < than || (key == than && id < than_id); }

/* the best of a block's threads, in thread 0 */
__device__ __forceinline__ void race_reduce(double &key, int &id, double *keys, int *ids) {
    for (int o = 16; o; o >>= 1) {
        double k = __shfl_xor_sync(~0u, key, o);
        int i = __shfl_xor_sync(~0u, id, o);
        if (wins(k, i, key, id)) { key = k; id = i; }
    }
    if (!(threadIdx.x & 31)) { keys[threadIdx.x >> 5] = key; ids[threadIdx.x >> 5] = id; }
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < RACE_THREADS / 32; w++)
        if (wins(keys[w], ids[w], key, id)) { key = keys[w]; id = ids[w]; }
}

/* The race: a block looks at RACE_CHUNK ids of a row, the row's last block takes the best of all. */
static __global__ void __launch_bounds__(RACE_THREADS) k_sample_race(SampleArgs a) {
    __shared__ double keys[RACE_THREADS / 32];
    __shared__ int ids[RACE_THREADS / 32];
    __shared__ bool last;
    const SampleRow r = a.rows[blockIdx.y];
    SampleState *st = a.state + blockIdx.y;
    const float *l = a.logits + (size_t)blockIdx.y * a.vocab;
    pdl_trigger();
    pdl_wait();
    const u64 best = __ldcg(a.best + blockIdx.y);
    if (r.k == 0.0f) {
        if (!blockIdx.x && !threadIdx.x) { st->token = (int)~(uint32_t)best; st->kept = 1; st->mass = 1ull << 40; }
        return;
    }
    const float top = logit_of(best);
    const u64 bound = __ldcg(&st->bound), fail = __ldcg(&st->fail);
    double key = 1e300;
    int id = 0x7fffffff, kept = 0;
    u64 mass = 0;
    for (int i = blockIdx.x * RACE_CHUNK + threadIdx.x; i < a.vocab && i < (int)(blockIdx.x + 1) * RACE_CHUNK; i += RACE_THREADS) {
        float x = __ldcg(l + i);
        const int token = id_of(a, i);
        u64 w = weight_of(x, top, r.k), o = order_key(x, token);
        if (!w || token < 0 || o > bound || o >= fail) continue;
        double mine = bw_race(r.seed, r.pos, (u64)token) / (double)w;
        if (wins(mine, token, key, id)) { key = mine; id = token; }
        kept++;
        mass += w;
    }
    for (int o = 16; o; o >>= 1) { kept += __shfl_xor_sync(~0u, kept, o); mass += __shfl_xor_sync(~0u, mass, o); }
    if (!(threadIdx.x & 31) && kept) { atomicAdd(&st->kept, kept); atomicAdd(&st->mass, mass); }
    race_reduce(key, id, keys, ids);
    RaceBest *slots = a.slots + (size_t)blockIdx.y * gridDim.x;
    if (!threadIdx.x) {
        slots[blockIdx.x] = {key, id, 0};
        __threadfence();
        last = atomicAdd(&st->ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    key = 1e300;
    id = 0x7fffffff;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += RACE_THREADS) {
        double k = __ldcg(&slots[i].key);
        int other = __ldcg(&slots[i].id);
        if (wins(k, other, key, id)) { key = k; id = other; }
    }
    race_reduce(key, id, keys, ids);
    if (!threadIdx.x) st->token = id;
}

} // namespace bw
#endif
