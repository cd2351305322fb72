/* CONV, DELTA and the gated delta net's short form in emulation against docs/numerics.md section 11 as plain loops, bit for bit: outputs, versions of
 * the state, logs. usage: delta CASE. The sources are made by test_cuda_emulated_delta.py from libbw24/cu. */
#include "emulate.h"
#include "op_fold.cuh"
#include "op_gdn.cuh"
#include "op_delta_fast.cuh"

using namespace bw;
typedef std::vector<float> V;

static uint64_t seed = 11;
static float unit() { seed = seed * 6364136223846793005ull + 1442695040888963407ull; return (float)(int)(seed >> 40) * 0x1p-23f - 1.0f; }
static V random_values(size_t n) { V v(n); for (float &x : v) x = unit(); return v; }
static int bad;
static void report(const char *what, const V &a, const V &b) {
    size_t differ = a.size() != b.size();
    for (size_t i = 0; i < a.size() && i < b.size(); i++) differ += memcmp(&a[i], &b[i], 4) != 0;
    printf("%s %s: %zu of %zu differ\n", differ ? "FAIL" : "PASS", what, differ, a.size());
    bad |= differ != 0;
}

/* the sizes of a net; channels of the convolution: q, k, v */
struct Net {
    int heads, kheads, dk, dv, grouped, taps = 4;
    int kd() const { return kheads * dk; }
    int channels() const { return 2 * kd() + heads * dv; }
    size_t conv_floats() const { return (size_t)(taps - 1) * channels(); }
    size_t state_floats() const { return conv_floats() + (size_t)heads * dk * dv; }
    int log_width() const { return kd() + heads * dv + 2 * heads; }
    size_t log_floats() const { return (size_t)32 * (channels() + log_width()); }
    int key(int h) const { return grouped ? h / (heads / kheads) : h % kheads; }
    /* where element (i, c) of a head's state lies: columns in eights */
    size_t at(int h, int i, int c) const {
        int eight = c / 8, cols = min(8, dv - eight * 8);
        return conv_floats() + (size_t)h * dk * dv + (size_t)eight * 8 * dk + (size_t)i * cols + c % 8;
    }
};

static float tree(const float *v, int n) {
    float p[32] = {}, t[32];
    for (int i = 0; i < n; i++) p[i % 32] = fmaf(v[i], v[i], p[i % 32]);
    for (int o = 16; o; o >>= 1) { for (int l = 0; l < 32; l++) t[l] = p[l] + p[l ^ o]; memcpy(p, t, sizeof p); }
    return 0.0f + p[0];
}

/* one row of DELTA for one head */
static void plain_delta(const Net &n, float *state, int h, const float *q, const float *k, const float *v, float g, float b, float *y) {
    for (int c = 0; c < n.dv; c++) {
        float a[4] = {}, o[4] = {};
        for (int i = 0; i < n.dk; i++) { float &s = state[n.at(h, i, c)]; s = s * g; a[i & 3] = fmaf(s, k[i], a[i & 3]); }
        float d = b * (v[c] - ((a[0] + a[2]) + (a[1] + a[3])));
        for (int i = 0; i < n.dk; i++) { float &s = state[n.at(h, i, c)]; s = fmaf(k[i], d, s); o[i & 3] = fmaf(s, q[i], o[i & 3]); }
        y[c] = (o[0] + o[2]) + (o[1] + o[3]);
    }
}
static void plain_conv(const Net &n, float *state, const float *w, const float *x, float *y) {
    for (int c = 0; c < n.channels(); c++) {
        float p = 0.0f;
        for (int t = 0; t < n.taps; t++) p = fmaf(w[c * n.taps + t], t + 1 < n.taps ? state[(size_t)t * n.channels() + c] : x[c], p);
        for (int t = 0; t + 1 < n.taps; t++) state[(size_t)t * n.channels() + c] = t + 2 < n.taps ? state[(size_t)(t + 1) * n.channels() + c] : x[c];
        y[c] = bw_silu(p);
    }
}

/* sequences whose rows are dealt out in turn; versions of their states */
struct Step {
    Net n;
    std::vector<V> live, mid, out, log;
    std::vector<FoldSeq> seqs;
    std::vector<int> order, seq_of;
    int n_seqs;
    FoldRows f;
    Step(const Net &n, const std::vector<int> &counts, bool versions) : n(n), n_seqs((int)counts.size()) {
        int rows = 0, first = 0;
        for (int c : counts) {
            live.push_back(random_values(n.state_floats()));
            mid.push_back(V(n.state_floats(), 0.0f)); out.push_back(V(n.state_floats(), 0.0f)); log.push_back(V(n.log_floats(), 0.0f));
            rows += c;
        }
        for (size_t s = 0; s < counts.size(); s++) {
            int n_log = min(counts[s], 32);
            seqs.push_back({live[s].data(), counts[s] > n_log && versions ? mid[s].data() : NULL, out[s].data(), versions ? log[s].data() : NULL, first, counts[s], n_log});
            for (int i = 0; i < counts[s]; i++) { order.push_back((first + i) * 7 % rows); seq_of.push_back((int)s); }
            first += counts[s];
        }
        seqs.reserve(seqs.size() + 1); /* kernels look at the place of one more */
        f = {seqs.data(), &n_seqs, order.data(), seq_of.data(), rows};
    }
    ConvArgs conv(const V &x, const V &w, V &y) const { return {x.data(), w.data(), y.data(), n.channels(), n.taps, 0, 0}; }
    DeltaArgs delta(int *fault) const {
        DeltaArgs a = {};
        a.heads = n.heads; a.kheads = n.kheads; a.dk = n.dk; a.dv = n.dv; a.grouped = n.grouped;
        a.state = n.conv_floats(); a.log = (size_t)32 * n.channels(); a.log_width = n.log_width(); a.fault = fault;
        return a;
    }
};

/* what the kernels should leave: row by row through fn(state, row, log row or NULL) */
template <class Fn> static void walk(Step &t, std::vector<V> &mid, std::vector<V> &out, std::vector<V> &log, Fn fn) {
    for (int s = 0; s < t.n_seqs; s++) {
        const FoldSeq &q = t.seqs[s];
        V state = t.live[s];
        mid.push_back(V(t.n.state_floats(), 0.0f)); log.push_back(V(t.n.log_floats(), 0.0f));
        for (int i = 0; i < q.n; i++) {
            int at = i - (q.n - q.n_log);
            fn(state.data(), t.order[q.first + i], q.log && at >= 0 ? log[s].data() : NULL, at);
            if (q.mid && i + 1 == q.n - q.n_log) mid[s] = state;
        }
        out.push_back(state);
    }
}
static void judge(Step &t, const char *what, const std::vector<V> &mid, const std::vector<V> &out, const std::vector<V> &log) {
    for (int s = 0; s < t.n_seqs; s++) { printf("%s, sequence %d: ", what, s); report("state", t.out[s], out[s]); report("mid", t.mid[s], mid[s]); report("log", t.log[s], log[s]); }
}

static void many(const Net &n, const std::vector<int> &counts) {
    Step t(n, counts, true);
    const int rows = t.f.n;
    int fault = NO_FAULT;
    V x = random_values((size_t)rows * n.channels()), w = random_values((size_t)n.channels() * n.taps), conv((size_t)rows * n.channels()), y((size_t)rows * n.heads * n.dv), wanted = y, c(conv.size());
    V q = random_values((size_t)rows * n.kd()), k = random_values((size_t)rows * n.kd()), v = random_values((size_t)rows * n.heads * n.dv), g = random_values((size_t)rows * n.heads), b = random_values((size_t)rows * n.heads);
    for (float &e : k) e *= 0.1f;
    ConvArgs ca = t.conv(x, w, conv);
    DeltaArgs a = t.delta(&fault);
    a.q = q.data(); a.k = k.data(); a.v = v.data(); a.g = g.data(); a.b = b.data(); a.y = y.data();
    a.ldq = a.ldk = n.kd(); a.ldv = n.heads * n.dv; a.ldg = a.ldb = n.heads;
    emu::launch([&] { k_conv(ca, t.f); }, dim3((n.channels() + 255) / 256, (rows + CONV_RUN - 1) / CONV_RUN), 256);
    emu::launch([&] { k_delta(a, t.f, 0); }, dim3(n.heads * ((n.dv + 31) / 32), t.n_seqs + 1), FOLD_THREADS);
    std::vector<V> mid, out, log;
    walk(t, mid, out, log, [&](float *state, int row, float *to, int at) {
        plain_conv(n, state, w.data(), &x[(size_t)row * n.channels()], &c[(size_t)row * n.channels()]);
        for (int h = 0; h < n.heads; h++)
            plain_delta(n, state, h, &q[(size_t)row * n.kd() + n.key(h) * n.dk], &k[(size_t)row * n.kd() + n.key(h) * n.dk], &v[((size_t)row * n.heads + h) * n.dv], g[row * n.heads + h],
                        b[row * n.heads + h], &wanted[((size_t)row * n.heads + h) * n.dv]);
        if (!to) return;
        memcpy(to + (size_t)at * n.channels(), &x[(size_t)row * n.channels()], n.channels() * 4);
        to += (size_t)32 * n.channels() + (size_t)at * n.log_width();
        memcpy(to, &k[(size_t)row * n.kd()], n.kd() * 4);
        memcpy(to + n.kd(), &v[(size_t)row * n.heads * n.dv], n.heads * n.dv * 4);
        for (int h = 0; h < n.heads; h++) { to[n.kd() + n.heads * n.dv + h] = g[row * n.heads + h]; to[n.kd() + n.heads * n.dv + n.heads + h] = b[row * n.heads + h]; }
    });
    report("CONV", conv, c);
    report("DELTA", y, wanted);
    judge(t, "many rows", mid, out, log);
    for (int s = 0; s < t.n_seqs; s++) { /* the way back: the first half of the log again */
        const FoldSeq &seq = t.seqs[s];
        const int half = (seq.n_log + 1) / 2;
        V from = seq.mid ? t.mid[s] : t.live[s], to(n.state_floats()), state = from, skip(n.channels()), yy(n.dv);
        ReplayOp ops[2] = {{false, ca, a}, {true, ca, a}};
        ops[1].d.q = NULL;
        FoldSeq one = {from.data(), NULL, to.data(), t.log[s].data(), 0, half, half};
        emu::launch([&] { k_replay(ops, one); }, dim3(max(n.heads * ((n.dv + 31) / 32), (n.channels() + FOLD_THREADS - 1) / FOLD_THREADS), 2), FOLD_THREADS);
        for (int i = 0; i < half; i++) {
            const int row = t.order[seq.first + seq.n - seq.n_log + i];
            plain_conv(n, state.data(), w.data(), &x[(size_t)row * n.channels()], skip.data());
            for (int h = 0; h < n.heads; h++)
                plain_delta(n, state.data(), h, &q[(size_t)row * n.kd() + n.key(h) * n.dk], &k[(size_t)row * n.kd() + n.key(h) * n.dk], &v[((size_t)row * n.heads + h) * n.dv], g[row * n.heads + h],
                            b[row * n.heads + h], yy.data());
        }
        report("way back", to, state);
    }
}

/* |found - wanted|^2 within `bound` of |wanted|^2 */
static void close_to(const char *what, const V &found, const V &wanted, double bound) {
    double error = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); i++) { const double d = (double)found[i] - wanted[i]; error += d * d; size += (double)wanted[i] * wanted[i]; }
    const bool ok = error <= bound * size;
    printf("%s %s: %.3g of %.3g allowed\n", ok ? "PASS" : "FAIL", what, error / size, bound);
    bad |= !ok;
}

/* DELTA of the class fast: chunks, then the exact kernel over the rows that are logged. keys: as random ones, or (alike) almost the same in every row */
static void chunked(const Net &n, int rows, bool alike, float least) {
    Step t(n, {rows}, true);
    int fault = NO_FAULT;
    const int width = n.heads * n.dv;
    V q = random_values((size_t)rows * n.kd()), k = random_values((size_t)rows * n.kd()), v = random_values((size_t)rows * width), g = random_values((size_t)rows * n.heads), b = g, y((size_t)rows * width, NAN), wanted = y;
    for (float &e : g) e = least + (1.0f - least) * fabsf(e);
    for (float &e : b) e = fabsf(e);
    for (size_t i = 0; alike && i < k.size(); i++) k[i] = k[i % n.kd()] + 0.05f * k[i];
    for (V *x : {&q, &k})
        for (size_t i = 0; i < x->size(); i += n.dk) {
            float p = 0;
            for (int j = 0; j < n.dk; j++) p += (*x)[i + j] * (*x)[i + j];
            for (int j = 0; j < n.dk; j++) (*x)[i + j] /= sqrtf(p);
        }
    for (float &e : t.live[0]) e *= 0.1f;
    DeltaArgs a = t.delta(&fault);
    a.q = q.data(); a.k = k.data(); a.v = v.data(); a.g = g.data(); a.b = b.data(); a.y = y.data();
    a.ldq = a.ldk = n.kd(); a.ldv = width; a.ldg = a.ldb = n.heads;
    std::vector<ChunkFacts> facts((size_t)((rows + CHUNK - 1) / CHUNK) * n.heads);
    emu::launch([&] { k_delta_facts(a, t.f, facts.data()); }, dim3(n.heads, (rows + CHUNK - 1) / CHUNK), CHUNK_THREADS);
    emu::launch([&] { k_delta_chunks(a, t.f, facts.data()); }, dim3(n.heads * (n.dv / 32)), CHUNK_THREADS);
    emu::launch([&] { k_delta(a, t.f, 1); }, dim3(n.heads * (n.dv / 32), 1), FOLD_THREADS);
    std::vector<V> mid, out, log;
    walk(t, mid, out, log, [&](float *state, int row, float *, int) {
        for (int h = 0; h < n.heads; h++)
            plain_delta(n, state, h, &q[(size_t)row * n.kd() + n.key(h) * n.dk], &k[(size_t)row * n.kd() + n.key(h) * n.dk], &v[((size_t)row * n.heads + h) * n.dv], g[row * n.heads + h],
                        b[row * n.heads + h], &wanted[((size_t)row * n.heads + h) * n.dv]);
    });
    const auto net = [&](const V &x) { return V(x.begin() + n.conv_floats(), x.end()); };
    close_to("outputs", y, wanted, 0x1p-18);
    close_to("the version before the log", net(t.mid[0]), net(mid[0]), 0x1p-18);
    close_to("the last version", net(t.out[0]), net(out[0]), 0x1p-18);
    for (int i = 0; i < 32; i++) /* the log and the state after it agree bit for bit with the version before it */
        for (int h = 0; h < n.heads; h++) {
            const float *l = t.log[0].data() + (size_t)32 * n.channels() + (size_t)i * n.log_width();
            V yy(n.dv);
            plain_delta(n, t.mid[0].data(), h, &q[(size_t)t.order[rows - 32 + i] * n.kd() + n.key(h) * n.dk], l + n.key(h) * n.dk, l + n.kd() + h * n.dv, l[n.kd() + width + h],
                        l[n.kd() + width + n.heads + h], yy.data());
        }
    report("the way back", net(t.mid[0]), net(t.out[0]));
    report("no fault", V{(float)fault}, V{(float)NO_FAULT});
}

/* COLS: of a head a block; heads of 128 keys and values run the text that is compiled for them */
template <int COLS, bool FULL> static void few(const Net &n, const std::vector<int> &counts) {
    Step t(n, counts, true);
    const int rows = t.f.n, width = n.heads * n.dv;
    int fault = NO_FAULT;
    V x = random_values((size_t)rows * n.channels()), w = random_values((size_t)n.channels() * n.taps), c(n.channels()), y((size_t)rows * width), wanted = y;
    V beta = random_values((size_t)rows * n.heads), decay = random_values((size_t)rows * n.heads), A = random_values(n.heads), dt = random_values(n.heads), z = random_values((size_t)rows * width), tail = random_values(n.dv);
    for (float &e : A) e = -fabsf(e);
    GdnArgs a = {};
    a.conv = t.conv(x, w, y); a.d = t.delta(&fault);
    a.from[1] = n.kd(); a.from[2] = 2 * n.kd();
    a.eps[0] = a.eps[1] = 1e-6f; a.scaled = true; a.scale = 0.25f;
    a.beta = beta.data(); a.decay = decay.data(); a.a = A.data(); a.dt = dt.data();
    a.tail = true; a.z = z.data(); a.w = tail.data(); a.tail_eps = 1e-5f; a.y = y.data();
    std::vector<int> count((size_t)(t.n_seqs + 1) * n.heads, 0);
    a.count = count.data();
    emu::launch([&] { k_gdn<COLS, FULL>(a, t.f); }, dim3(n.heads * (n.dv / COLS), t.n_seqs + 1), gdn_threads(COLS));
    std::vector<V> mid, out, log;
    walk(t, mid, out, log, [&](float *state, int row, float *to, int at) {
        plain_conv(n, state, w.data(), &x[(size_t)row * n.channels()], c.data());
        if (to) memcpy(to + (size_t)at * n.channels(), &x[(size_t)row * n.channels()], n.channels() * 4);
        for (int h = 0; h < n.heads; h++) {
            V q(n.dk), k(n.dk), o(n.dv);
            const float *cq = &c[n.key(h) * n.dk], *ck = cq + n.kd(), *cv = &c[2 * n.kd() + h * n.dv];
            float rq = 1.0f / sqrtf(tree(cq, n.dk) + 1e-6f), rk = 1.0f / sqrtf(tree(ck, n.dk) + 1e-6f);
            for (int i = 0; i < n.dk; i++) { q[i] = (cq[i] * rq) * 0.25f; k[i] = ck[i] * rk; }
            float b = bw_sigmoid(beta[row * n.heads + h]), g = bw_exp(A[h] * bw_softplus(decay[row * n.heads + h] + dt[h]));
            plain_delta(n, state, h, q.data(), k.data(), cv, g, b, o.data());
            float r = 1.0f / sqrtf(tree(o.data(), n.dv) / (float)n.dv + 1e-5f);
            for (int i = 0; i < n.dv; i++) wanted[(size_t)row * width + h * n.dv + i] = bw_silu(z[(size_t)row * width + h * n.dv + i]) * ((o[i] * r) * tail[i]);
            if (!to) continue;
            float *l = to + (size_t)32 * n.channels() + (size_t)at * n.log_width();
            memcpy(l + n.key(h) * n.dk, k.data(), n.dk * 4);
            memcpy(l + n.kd() + h * n.dv, cv, n.dv * 4);
            l[n.kd() + width + h] = g; l[n.kd() + width + n.heads + h] = b;
        }
    });
    report("few rows", y, wanted);
    report("counters", V(count.begin(), count.end()), V(count.size(), 0.0f));
    judge(t, "few rows", mid, out, log);
}

int main(int argc, char **argv) {
    const int which = argc > 1 ? atoi(argv[1]) : 0;
    if (which == 0) { many({4, 2, 128, 64, 1}, {41, 3}); many({2, 1, 128, 32, 0}, {75, 2}); }
    if (which == 1) { many({4, 2, 30, 48, 0}, {1, 37, 8}); many({2, 1, 20, 44, 0}, {3, 35}); }
    if (which == 2) { few<128, true>({4, 2, 128, 128, 0, 4}, {1, 9, 5}); few<64, true>({4, 2, 128, 128, 0, 4}, {1, 9, 5}); few<32, true>({4, 2, 128, 128, 1, 4}, {1, 9}); }
    if (which == 3) few<32, false>({4, 4, 32, 32, 1}, {8, 17});
    if (which == 4) few<32, false>({6, 2, 64, 96, 1}, {1, 2, 3});
    if (which == 5) { chunked({2, 1, 128, 32, 1}, 32 + 75, false, 0.5f); chunked({2, 2, 128, 64, 0}, 32 + 64, true, 0.98f); chunked({1, 1, 128, 32, 0}, 33, true, 0.0f); }
    return bad;
}
