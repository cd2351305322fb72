/* ATTEND's kernels in emulation, against its plain kernel (op_attend_any.cuh), which a card has shown equal to ref: every mapping of work over the same
 * pages, bit for bit; the class fast within a bound. usage: attend CASE [first], with it until the first difference. The sources are made by
 * test_cuda_emulated.py from libbw24/cu. */
#include "emulate.h"
#include "op_attend.cuh"
#include "op_attend_few.cuh"
#include "op_attend_many.cuh"
#include "op_attend_team.cuh"
#include "op_attend_short.cuh"
#include "op_attend_heads.cuh"
#include "op_attend_gated.cuh"
#include "op_attend_any.cuh"
#include "op_attend_fast.cuh"
#include "op_attend_merge.cuh"
#include "op_attend_shared.cuh"

using namespace bw;

static uint64_t state = 7;
static uint32_t random32() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (uint32_t)(state >> 32); }
static float unit() { return (float)(int)(random32() >> 8) * 0x1p-23f - 1.0f; }
static void put_half(uint8_t *p, float v) { __half h = __float2half_rn(v); memcpy(p, &h, 2); }

/* a part of a page: random codes, tame scales */
static void fill_part_of(int f, uint8_t *p, int D) {
    const int codes = f == KV_Q8_0 ? PIECE * D : PIECE * D * 5 / 8;
    switch (f) {
    case KV_F16: for (int i = 0; i < PIECE * D; i++) put_half(p + 2 * i, unit()); return;
    case KV_E4M3: for (int i = 0; i < PIECE * D; i++) p[i] = (uint8_t)(random32() & 0xbf); return; /* below 2 */
    default: for (int i = 0; i < codes; i++) p[i] = (uint8_t)(random32() >> 9);
    }
    for (int i = 0; i < PIECE * D / 32; i++) {
        if (f == KV_Q8_0) { put_half(p + codes + 2 * i, (1.1f + unit()) * 0.01f); continue; }
        put_half(p + codes + 4 * i, (1.1f + unit()) * 0.05f);
        put_half(p + codes + 4 * i + 2, unit());
    }
}

struct Run { int first, rows; }; /* rows of one sequence from a position on */
struct Case { int heads, kv_heads, window; std::vector<Run> runs; };

/* the arguments of a step and the memory that they point to */
struct Setup {
    AttendArgs a = {};
    StepRows s = {};
    std::vector<float> q, y, o, scale[6];
    std::vector<float2> nl;
    std::vector<int8_t> code, result;
    std::vector<int> pos, table;
    std::vector<uint8_t *> pages, near; /* near: [rows][GATED_PIECES] */
    int fault = NO_FAULT;
    ~Setup() { for (uint8_t *p : pages) free(p); }
    void add_pages(const KvPlace &kv, const Run &run) {
        const int at = (int)pages.size();
        const size_t head = kv_head_bytes(kv), bytes = (kv.offset + head * kv.heads + 255) / 256 * 256;
        for (int i = 0; i < run.first + run.rows; i += PIECE) {
            uint8_t *p = (uint8_t *)aligned_alloc(256, bytes);
            pages.push_back(p);
            for (int h = 0; h < kv.heads; h++) {
                fill_part_of(kv.k, p + kv.offset + h * head, kv.dim);
                if (!kv.shared) fill_part_of(kv.v, p + kv.offset + h * head + kv_bytes(kv.k, kv.dim), kv.dim);
            }
        }
        for (int i = 0; i < run.rows; i++) { pos.push_back(run.first + i); table.push_back(at); }
    }
    Setup(const Case &c, int k, int v, int D, int shared = 0) {
        const KvPlace kv = {256, 0, c.kv_heads, D, k, v, shared};
        for (const Run &run : c.runs) { add_pages(kv, run); a.max_pieces = max(a.max_pieces, (run.first + run.rows) / PIECE + 2); }
        const int rows = (int)pos.size(), width = c.heads * D, ld = (rows + 127) / 128 * 128;
        q.resize((size_t)rows * width);
        for (float &x : q) x = unit() * 3;
        y.assign(q.size(), NAN);
        o.assign((size_t)a.max_pieces * q.size(), NAN);
        nl.assign((size_t)rows * a.max_pieces * c.heads, make_float2(NAN, NAN));
        code.resize((size_t)ld * width);
        result.resize((size_t)ld * width);
        for (auto &x : scale) x.resize((size_t)ld * width / 32);
        near.resize((size_t)rows * GATED_PIECES);
        for (int r = 0; r < rows; r++)
            for (int b = 0; b <= pos[r] / PIECE && b < GATED_PIECES; b++) near[r * GATED_PIECES + b] = pages[table[r] + b];
        s.fault = &fault; s.pos = pos.data(); s.table = table.data(); s.pages = pages.data(); s.n = rows;
        a.kv = kv; a.q = q.data(); a.y = y.data(); a.o = o.data(); a.nl = nl.data();
        a.heads = c.heads; a.window = c.window; a.rows = rows; a.c = 1.4426950408889634f / sqrtf((float)D);
        a.xq = {code.data(), scale[0].data(), scale[1].data(), scale[2].data(), ld, width};
        a.yo = {result.data(), scale[3].data(), scale[4].data(), scale[5].data(), ld, width};
        emu::launch([this, width] {
            for (int g = 0; g < width / 32; g++)
                quant_group(a.xq, blockIdx.x, g, threadIdx.x, q[(size_t)blockIdx.x * width + g * 32 + threadIdx.x], &fault, 0);
        }, dim3(rows), 32);
    }
};

static int failures;
/* bound 0: every bit */
static bool until_first = false;
static void judge(Setup &t, const std::vector<float> &ref, const char *what, double bound = 0) {
    double error = 0, size = 0;
    size_t different = 0;
    for (size_t i = 0; i < ref.size(); i++) {
        different += memcmp(&ref[i], &t.y[i], 4) != 0;
        error += ((double)ref[i] - t.y[i]) * ((double)ref[i] - t.y[i]);
        size += (double)ref[i] * ref[i];
    }
    const bool good = (bound > 0 ? error <= bound * size : !different) && t.fault == NO_FAULT;
    failures += !good;
    const bool last = !good && until_first;
    printf("%s %s: %zu of %zu differ, error %.2e\n", good ? "PASS" : "FAIL", what, different, ref.size(), error / size);
    if (last) exit(1);
    t.y.assign(t.y.size(), NAN);
}

static int tiles_of(const AttendArgs &a, int queries, int *chunks) {
    const int share = a.heads / a.kv.heads;
    *chunks = (share + queries - 1) / queries;
    while (share % *chunks) ++*chunks;
    const int rows = queries / (share / *chunks);
    return (a.rows + rows - 1) / rows * *chunks;
}
template <class S> void exact(Setup &t, const std::vector<float> &ref, const char *what) {
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    int chunks;
    const int tiles = tiles_of(a, S::QUERIES, &chunks);
    const dim3 grid = S::SPLIT ? dim3(3, a.kv.heads, tiles) : dim3(a.kv.heads, tiles);
    emu::launch([=] { k_attend<S>(a, s, chunks, tiles); }, grid, S::THREADS);
    if (S::SPLIT) emu::launch([=] { k_attend_merge<false>(a, s); }, dim3(a.heads * a.kv.dim / 32, a.rows), MERGE);
    judge(t, ref, what);
}

/* many rows over float keys */
template <class S> void widened(Setup &t, const std::vector<float> &ref) {
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    int chunks;
    const int tiles = tiles_of(a, S::QUERIES, &chunks);
    emu::launch([=] { k_attend_many<S>(a, s, chunks, tiles); }, dim3(a.kv.heads, tiles), S::THREADS);
    judge(t, ref, "many rows");
}

/* Pages whose last keys, those of the step's rows, are NaN or noise until all threads of the block stand at the dependency wait. */
struct Unwritten {
    std::vector<std::pair<uint8_t *, std::vector<uint8_t>>> now, later;
    bool written = false;
    long waiting = 0;
    static void spoil(uint8_t *p, int f, int D, int j) {
        auto fill = [&](size_t at, int n) { memset(p + at + (size_t)j * n, 0xff, n); };
        if (f == KV_F16) fill(0, 2 * D);
        else if (f == KV_E4M3) fill(0, D);
        else if (f == KV_Q8_0) { fill(0, D); fill(PIECE * D, D / 16); }
        else { fill(0, D / 2); fill(PIECE * D / 2, D / 8); fill(PIECE * D * 5 / 8, D / 8); }
    }
    void put(bool all) {
        for (auto &x : all ? later : now) memcpy(x.first, x.second.data(), x.second.size());
        written = all;
    }
    explicit Unwritten(Setup &t) {
        const KvPlace &kv = t.a.kv;
        const size_t head = kv_head_bytes(kv), bytes = kv.offset + head * kv.heads;
        std::map<uint8_t *, std::vector<int>> rows;
        for (int i = 0; i < t.s.n; i++) rows[t.pages[(size_t)(t.table[(size_t)i] + t.pos[(size_t)i] / PIECE)]].push_back(t.pos[(size_t)i] % PIECE);
        for (auto &r : rows) {
            later.push_back({r.first, std::vector<uint8_t>(r.first, r.first + bytes)});
            for (int j : r.second)
                for (int h = 0; h < kv.heads; h++) {
                    spoil(r.first + kv.offset + h * head, kv.k, kv.dim, j);
                    spoil(r.first + kv.offset + h * head + kv_bytes(kv.k, kv.dim), kv.v, kv.dim, j);
                }
            now.push_back({r.first, std::vector<uint8_t>(r.first, r.first + bytes)});
        }
        emu::before_block = [this] { put(false); waiting = 0; };
        emu::at_wait = [this] {
            for (++waiting; !written && waiting < emu::live;) emu::yield();
            if (!written) put(true);
        };
    }
    void end() { put(true); emu::before_block = emu::at_wait = nullptr; }
};

/* few rows: blocks that share the pieces, slots, warps of a slot */
template <class S> void few(Setup &t, const std::vector<float> &ref, int blocks, int used, int team) {
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    int chunks;
    const int tiles = tiles_of(a, S::QUERIES, &chunks);
    Unwritten u(t);
    emu::launch([=] { k_attend_few<S>(a, s, chunks, used, team); }, dim3(blocks, a.kv.heads, tiles), S::THREADS);
    u.end();
    emu::launch([=] { k_attend_merge<false>(a, s); }, dim3(a.heads * a.kv.dim / 32, a.rows), MERGE);
    char what[64];
    snprintf(what, sizeof what, "few rows, %d blocks, %d slots of %d warps", blocks, used, team);
    judge(t, ref, what);
}

template <class S> void few_ways(Setup &t, const std::vector<float> &ref) {
    constexpr int room = (int)((sizeof emu::shared - sizeof(S)) / sizeof(typename S::Slot)), team = S::QUERIES / S::MOST, slots = min(room, S::WARPS / team);
    few<S>(t, ref, 9, slots, team);
    few<S>(t, ref, 1, slots > 1 ? slots - 1 : 1, team);
    few<S>(t, ref, 2, 2, 4);
}
/* few rows by teams: blocks that share the pieces, teams, slots of their rings of K and V; of the rings where a row is deep enough (0: never) */
template <class S> void teams(Setup &t, const std::vector<float> &ref, int blocks, int n, int keys, int values, DeepSlots deep) {
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    int chunks;
    const int tiles = tiles_of(a, S::QUERIES, &chunks), share = a.heads / a.kv.heads;
    const bool one = S::DEEP && a.rows == 1 && share / chunks <= DEEP_QUERIES;
    const TeamShape f = team_shape(share, chunks, S::QUERIES, n, keys, values, one ? deep : DeepSlots{0, 0});
    Unwritten u(t);
    emu::launch([=] { k_attend_team<S>(a, s, f); }, dim3(blocks, a.kv.heads, tiles), S::THREADS);
    u.end();
    emu::launch([=] { k_attend_merge<false>(a, s); }, dim3(a.heads * a.kv.dim / 32, a.rows), MERGE);
    char what[96];
    snprintf(what, sizeof what, "few rows, %d blocks of %d teams, rings of %d and %d, deep %d and %d", blocks, n, keys, values, f.deep.keys, f.deep.values);
    judge(t, ref, what);
}

template <class S> void team_ways(Setup &t, const std::vector<float> &ref) {
    teams<S>(t, ref, 9, 4, 1, 2, {4, 4});
    teams<S>(t, ref, 1, 2, 2, 2, {8, 5});
    teams<S>(t, ref, 2, 3, 2, 1, {4, 4});
    teams<S>(t, ref, 2, 1, 1, 1, {0, 0});
}
/* a short context in one launch; its quantised result too */
template <class S> void shorts(Setup &t, const std::vector<float> &ref, int slots) {
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    const int width = a.heads * a.kv.dim;
    Unwritten u(t);
    emu::launch([=] { k_attend_short<S>(a, s, slots); }, dim3(a.heads / a.kv.heads, a.kv.heads, a.rows), 64 * slots);
    u.end();
    char what[64];
    snprintf(what, sizeof what, "short context, %d slots", slots);
    judge(t, ref, what);
    std::vector<int8_t> found = t.result, codes((size_t)a.rows * width);
    emu::launch([&t, &ref, width] {
        for (int g = 0; g < width / 32; g++)
            quant_group(t.a.yo, blockIdx.x, g, threadIdx.x, ref[(size_t)blockIdx.x * width + g * 32 + threadIdx.x], &t.fault, 0);
    }, dim3(a.rows), 32);
    const bool good = !memcmp(found.data(), t.result.data(), codes.size());
    failures += !good;
    printf("%s its codes\n", good ? "PASS" : "FAIL");
}

/* The same with GATE behind it, and with norms, rotations and appends before it from raw queries, keys and values; against k_heads, the plain kernel and GATE;
 * and the pieces' merge with GATE. */
struct Raw {
    std::vector<float> x[3], w, cs, gate;
    GatedArgs g = {};
    HeadArgs h = {};
    Raw(Setup &t, int slots) {
        const int rows = t.s.n, heads[3] = {t.a.heads, t.a.kv.heads, t.a.kv.heads}, D = t.a.kv.dim, pitch = D + 32;
        const size_t part[3] = {0, t.a.kv.offset, t.a.kv.offset + kv_bytes(t.a.kv.k, D)};
        w.resize(D);
        cs.resize((size_t)rows * D);
        gate.resize((size_t)rows * heads[0] * pitch);
        for (auto *v : {&w, &cs, &gate})
            for (float &f : *v) f = unit() * (v == &gate ? 4 : 1);
        for (int i = 0; i < 3; i++) {
            HeadChain &c = g.c[i];
            x[i].resize((size_t)rows * heads[i] * pitch);
            for (float &f : x[i]) f = unit() * 3;
            c.x = x[i].data(); c.pitch = pitch; c.from = 16; c.heads = heads[i]; c.dim = D; c.eps = 1e-6f; c.cs = cs.data();
            c.norm = i < 2; c.w = c.norm ? w.data() : NULL; c.rot = i < 2 ? (int)GATED_ROT : 0;
            c.y = i ? NULL : t.q.data(); c.copy = !i; c.append = i == 1 ? APPEND_K : i == 2 ? APPEND_V : APPEND_NONE;
            c.kv = t.a.kv; c.place = part[i]; c.stride = (int)kv_head_bytes(t.a.kv); c.format = KV_F16; c.op = i;
            h.c[i] = c;
            h.heads += heads[i];
        }
        h.n = 3;
        g.near = t.near.data(); g.gate = gate.data(); g.gate_pitch = pitch; g.gate_from = 8; g.slots = slots;
    }
};
/* What a launch that appends itself leaves: with no key of the step in the pages before each block, then with all blocks writing to the same pages; and the pages */
template <class Launch> void twice(Setup &t, const std::vector<float> &ref, const char *name, Launch launch) {
    Unwritten u(t); /* holds the pages as they are to be */
    char what[80];
    t.y.assign(t.y.size(), NAN);
    emu::before_block = [&u] { u.put(false); };
    emu::at_wait = nullptr;
    for (int again = 0; again < 2; again++) {
        launch();
        snprintf(what, sizeof what, "%s%s", name, again ? "" : ", no key of the step in the pages");
        judge(t, ref, what);
        emu::before_block = nullptr;
        if (!again) u.put(false);
    }
    bool good = true;
    for (auto &x : u.later) good &= !memcmp(x.first, x.second.data(), x.second.size());
    failures += !good;
    printf("%s its pages\n", good ? "PASS" : "FAIL");
}
template <class S> void gated(const Case &c, int slots) {
    Setup t(c, KV_F16, KV_F16, S::DIM);
    Raw r(t, slots);
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    const HeadArgs h = r.h;
    const GatedArgs g = r.g;
    const dim3 grid(a.heads / a.kv.heads * S::PARTS, a.kv.heads, a.rows);
    emu::launch([=] { k_heads<S::DIM / 32>(h, s); }, dim3(s.n, (h.heads + 3) / 4), 128);
    emu::launch([=] { k_attend_any(a, s); }, dim3(a.rows, a.heads), 128);
    std::vector<float> ref = t.y, flat(t.y.size());
    for (size_t i = 0; i < ref.size(); i++) {
        flat[i] = r.gate[i / S::DIM * g.gate_pitch + g.gate_from + i % S::DIM];
        ref[i] = ref[i] * bw_sigmoid(flat[i]);
    }
    t.y.assign(t.y.size(), NAN);
    typedef FewBlock<KV_F16, KV_F16, S::DIM> Few;
    AttendArgs m = a;
    m.gate = flat.data();
    int chunks;
    const int tiles = tiles_of(a, Few::QUERIES, &chunks);
    emu::launch([=] { k_attend_few<Few>(m, s, chunks, 1, Few::QUERIES / Few::MOST); }, dim3(3, a.kv.heads, tiles), Few::THREADS);
    emu::launch([=] { k_attend_merge<true>(m, s); }, dim3(a.heads * S::DIM / 32, a.rows), MERGE);
    judge(t, ref, "merge with GATE");
    twice(t, ref, "gated", [=] { emu::launch([=] { k_attend_gated<S>(a, s, g); }, grid, 64 * slots); });
}

/* norms, rotations and appends in the launch of a short context; against k_heads and the plain kernel. pairs: neighbours turn */
template <class S> void headed(const Case &c, int slots) {
    Setup t(c, KV_F16, KV_F16, S::DIM);
    Raw r(t, slots);
    for (int i = 0; i < 3; i++) {
        HeadChain &x = r.h.c[i];
        x.norm = S::NORM && i < 2;
        x.w = x.norm ? r.w.data() : NULL;
        x.rot = i < 2 ? S::DIM : 0;
        x.interleaved = S::PAIRS;
        r.g.c[i] = x;
    }
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    const HeadArgs h = r.h;
    const BlockHeads g = r.g;
    emu::launch([=] { k_heads<S::DIM / 32>(h, s); }, dim3(s.n, (h.heads + 3) / 4), 128);
    emu::launch([=] { k_attend_any(a, s); }, dim3(a.rows, a.heads), 128);
    const std::vector<float> ref = t.y;
    twice(t, ref, "heads and ATTEND", [=] { emu::launch([=] { k_attend_heads<S>(a, s, g); }, dim3(a.heads / a.kv.heads, a.kv.heads, a.rows), 64 * slots); });
}

/* one row at depth: blocks whose pieces share one ring, and teams */
template <int K, int V> void run_deep(const Case &c) {
    Setup t(c, K, V, 128);
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    typedef TeamBlock<K, block_v(V, 128, 8), 128> S;
    emu::launch([=] { k_attend_any(a, s); }, dim3(a.rows, a.heads), 128);
    const std::vector<float> ref = t.y;
    for (DeepSlots slots : {DeepSlots{4, 4}, DeepSlots{8, S::INT_K ? 8 : 5}})
        for (int blocks : {1, 2, 3}) teams<S>(t, ref, blocks, 2, 1, 1, slots);
}

template <int K, int V, int D> void run(const Case &c) {
    Setup t(c, K, V, D);
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    emu::launch([=] { k_attend_any(a, s); }, dim3(a.rows, a.heads), 128);
    const std::vector<float> ref = t.y;
    t.y.assign(t.y.size(), NAN);
    constexpr bool large = D == 256 && (K == KV_F16 || V == KV_F16); /* as attend_kernels.cuh */
    constexpr int loop = large ? 16 : D == 256 ? 32 : 64, many = large ? 16 : 32;
    if constexpr (K == V && K != KV_Q8_0) widened<ManyBlock<K, D>>(t, ref);
    else exact<AttendBlock<K, block_v(V, D, loop), D, loop, large ? 128 : 256, false>>(t, ref, "many rows");
    exact<AttendBlock<K, block_v(V, D, 8), D, 8, 128, true>>(t, ref, "split, 8 queries");
    exact<AttendBlock<K, block_v(V, D, many), D, many, 128, true>>(t, ref, "split, many queries");
    if constexpr ((K == KV_F16 || K == KV_E4M3) && (V == KV_F16 || V == KV_E4M3)) few_ways<FewBlock<K, V, D>>(t, ref);
    if constexpr (D <= 128) team_ways<TeamBlock<K, block_v(V, D, 8), D>>(t, ref);
    if constexpr (K == KV_F16 && V == KV_F16 && D <= 128)
        for (int slots : {1, 2, 5}) shorts<ShortBlock<K, V, D>>(t, ref, slots);
    int chunks;
    const int tiles = tiles_of(a, FastBlock<D>::QUERIES, &chunks);
    for (int staged = 0; staged < 2; staged++) {
        emu::launch([=] { k_attend_fast<D>(a, s, chunks, tiles, staged); }, dim3(a.kv.heads, tiles), FastBlock<D>::THREADS);
        judge(t, ref, staged ? "class fast, staged" : "class fast", 0x1p-12);
    }
}

/* more rows than run() has time for */
template <int F, int D> void run_widened(const Case &c) {
    Setup t(c, F, F, D);
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    emu::launch([=] { k_attend_any(a, s); }, dim3(a.rows, a.heads), 128);
    const std::vector<float> ref = t.y;
    t.y.assign(t.y.size(), NAN);
    widened<ManyBlock<F, D>>(t, ref);
}

/* keys that are values */
static void run_shared(const Case &c, int format, int D) {
    Setup t(c, format, format, D, 1);
    const AttendArgs a = t.a;
    const StepRows s = t.s;
    emu::launch([=] { k_attend_any(a, s); }, dim3(a.rows, a.heads), 128);
    const std::vector<float> ref = t.y;
    for (int blocks : {1, 2, 5}) {
        t.y.assign(t.y.size(), NAN);
        emu::launch([=] { k_attend_shared(a, s); }, dim3(blocks, a.heads, a.rows), SHARED_THREADS);
        emu::launch([=] { k_attend_merge<false>(a, s); }, dim3(a.heads * D / 32, a.rows), MERGE);
        judge(t, ref, "keys that are values");
    }
}

int main(int argc, char **argv) {
    until_first = argc == 3 && !strcmp(argv[2], "first");
    switch (argc == 2 || until_first ? atoi(argv[1]) : -1) {
    case 0: run<KV_Q8_0, KV_Q5_1, 64>({3, 1, 70, {{190, 25}, {0, 4}}}); break;
    case 1: run<KV_Q8_0, KV_Q5_1, 128>({4, 1, 0, {{126, 11}, {3, 5}, {64, 2}}}); break;
    case 2:
        run<KV_F16, KV_F16, 256>({4, 1, 100, {{127, 5}}});
        run<KV_F16, KV_F16, 64>({3, 1, 70, {{190, 3}, {0, 2}}});
        run<KV_F16, KV_F16, 128>({4, 1, 0, {{330, 1}, {62, 3}}});
        break;
    case 3: run<KV_E4M3, KV_E4M3, 128>({16, 1, 0, {{62, 6}}}); break;
    case 4: run<KV_Q8_0, KV_Q8_0, 64>({2, 1, 0, {{17000, 1}}}); break;
    case 5:
        run_shared({4, 1, 0, {{190, 3}, {0, 2}}}, KV_F16, 576);
        run_shared({3, 1, 70, {{150, 2}}}, KV_Q8_0, 96);
        run_shared({4, 2, 0, {{126, 3}, {63, 2}}}, KV_Q5_1, 288);
        run_shared({2, 1, 0, {{64, 1}}}, KV_E4M3, 1024);
        break;
    case 6:
        gated<GatedBlock<256, 256>>({4, 2, 0, {{126, 4}, {3, 3}}}, 2);
        gated<GatedBlock<256, 256>>({2, 1, 0, {{250, 5}}}, 3);
        gated<GatedBlock<256, 128>>({4, 2, 0, {{126, 4}, {3, 3}}}, 2);
        gated<GatedBlock<256, 128>>({4, 1, 0, {{250, 1}, {190, 3}}}, 4);
        break;
    case 7:
        run<KV_Q8_0, KV_Q5_1, 128>({4, 1, 1200, {{1500, 2}}});
        run<KV_F16, KV_F16, 128>({4, 1, 0, {{1400, 3}}});
        run<KV_F16, KV_F16, 64>({3, 1, 0, {{1000, 1}}});
        run<KV_Q8_0, KV_Q8_0, 128>({8, 2, 0, {{900, 1}}});
        break;
    case 8: /* windows that begin and end inside a piece, tiles of two sequences, tiles that are not full */
        run_widened<KV_F16, 128>({4, 1, 90, {{100, 37}}});
        run_widened<KV_F16, 128>({2, 2, 50, {{10, 70}}});
        run_widened<KV_F16, 256>({2, 1, 0, {{100, 30}, {5, 8}}});
        run_widened<KV_E4M3, 64>({5, 1, 0, {{0, 20}}});
        run_widened<KV_E4M3, 256>({3, 1, 70, {{60, 9}}});
        break;
    case 9: {
        typedef ShortBlock<KV_F16, KV_F16, 64> B64;
        typedef ShortBlock<KV_F16, KV_F16, 128> B128;
        headed<HeadsBlock<B128, true, false>>({4, 1, 0, {{0, 1}}}, 2);
        headed<HeadsBlock<B128, true, false>>({8, 2, 0, {{64, 1}, {200, 1}}}, 4);
        headed<HeadsBlock<B128, true, false>>({4, 2, 100, {{190, 5}, {3, 3}}}, 3); /* a window; rows on both sides of a page's end */
        headed<HeadsBlock<B64, false, true>>({3, 1, 0, {{63, 1}}}, 2);
        headed<HeadsBlock<B64, false, true>>({8, 1, 0, {{700, 8}}}, 5);
        headed<HeadsBlock<B128, false, true>>({2, 2, 0, {{1023, 1}}}, 6);
        headed<HeadsBlock<B128, false, true>>({4, 1, 0, {{126, 2}, {5, 2}}}, 2);
        break;
    }
    case 10: /* one row at depth */
        run_deep<KV_F16, KV_F16>({4, 1, 0, {{2400, 1}}});
        run_deep<KV_F16, KV_F16>({6, 2, 1000, {{1700, 1}}});
        run_deep<KV_Q8_0, KV_Q5_1>({4, 1, 0, {{2300, 1}}});
        break;
    case 11: run_deep<KV_Q8_0, KV_Q8_0>({3, 1, 700, {{1500, 1}}}); break;
    default: fprintf(stderr, "usage: attend 0..11\n"); return 2;
    }
    return failures != 0;
}
