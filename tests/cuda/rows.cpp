/* Runs of row ops in emulation: k_chain and k_quant have the interpreter's bits, results and quantised rows alike, k_chain with and without a turn before
 * the dependency wait. The interpreter's own are held to ref by the gates. The sources are made by test_cuda_emulated_rows.py from libbw24/cu. */
#include "emulate.h"
inline unsigned long long atomicMax(unsigned long long *p, unsigned long long v) { unsigned long long old = *p; *p = std::max(old, v); return old; }
#undef __grid_constant__
#define __grid_constant__

struct bw_op { int buf[4]; };
struct bw_list { std::vector<bw_op> ops; int n_ops; };
namespace bw {
/* no op from `from` on reads buf before one overwrites it */
bool cu_dead_after(const bw_list *l, int from, int buf) {
    for (int i = from; i < l->n_ops; i++) {
        if (l->ops[i].buf[1] == buf || l->ops[i].buf[2] == buf) return false;
        if (l->ops[i].buf[0] == buf) return true;
    }
    return true;
}
} // namespace bw
#include "chain.cu"
#include "op_chain.cuh"
#include "op_rows.cuh"

using namespace bw;

enum { BUFS = 6, ROWS = 2, NO_BUF = -1 };
static uint64_t state = 11;
static uint32_t random32() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (uint32_t)(state >> 32); }
static float unit() { return (float)(int)(random32() >> 8) * 0x1p-23f - 1.0f; }
static int bad;
static void report(const char *name, bool equal) { printf("%s %s\n", equal ? "PASS" : "FAIL", name); bad |= !equal; }

/* buffers of one run; the last is wider than the others */
struct Memory {
    std::vector<float> b[BUFS], delta, sum, low;
    std::vector<int8_t> q;
    int fault = NO_FAULT;
    Memory(int n) {
        for (auto &x : b) { x.resize((size_t)ROWS * n * (&x == b + BUFS - 1 ? 2 : 1)); for (float &v : x) v = 3 * unit(); }
        q.assign((size_t)8 * n, 0);
        delta.assign((size_t)8 * (n / 32), 0); sum = low = delta;
    }
    Acts acts(int n) { return {q.data(), delta.data(), sum.data(), low.data(), 8, n}; }
    bool same_acts(const Memory &o) const {
        auto equal = [](const std::vector<float> &x, const std::vector<float> &y) { return !memcmp(x.data(), y.data(), x.size() * 4); };
        return q == o.q && equal(delta, o.delta) && equal(sum, o.sum) && equal(low, o.low) && fault == o.fault;
    }
};

static std::vector<float> weights(8192), factor(1, 0.75f);

/* a run over buffers y, a, b of the memory, with the list that it stands in */
struct Run {
    Memory &m;
    int n;
    bw_list l;
    std::vector<RowOp> ops;
    Run &op(int code, int y, int a, int b = NO_BUF, bool weighted = false, int flag = 0, float f = 1e-6f) {
        RowOp o = {};
        o.code = code;
        o.op = (int)ops.size();
        o.y = m.b[y].data(); o.a = m.b[a].data(); o.b = b < 0 ? NULL : m.b[b].data();
        o.n = n; o.na = a == BUFS - 1 ? 2 * n : n; o.nb = b < 0 ? 0 : n;
        o.f = f;
        o.w = !weighted ? NULL : code == ROW_SCALE ? factor.data() : weights.data() + y;
        if (code == ROW_NORM) { o.i[0] = 1; o.i[1] = flag; }
        if (code == ROW_GLU) o.i[0] = flag;
        if (code == ROW_SLICE) { o.i[0] = 1; o.i[1] = flag; }
        ops.push_back(o);
        l.ops.push_back({{y, a, b, NO_BUF}});
        l.n_ops = (int)ops.size();
        return *this;
    }
    Run &norm(int y, int a, bool l2 = false) { return op(ROW_NORM, y, a, NO_BUF, true, l2); }
    Run &add(int y, int a, int b) { return op(ROW_ADD, y, a, b); }
    Run &scale(int y, int a, bool weighted = true, float f = 0.37f) { return op(ROW_SCALE, y, a, NO_BUF, weighted, 0, f); }
    /* a reader after the run: buffer x is not dead */
    Run &reader(int x) {
        l.ops.push_back({{BUFS - 1, x, NO_BUF, NO_BUF}});
        l.n_ops = (int)l.ops.size();
        return *this;
    }
};

typedef std::function<void(Run &)> Make;
static bool equal_live(const Run &x, const Run &y) {
    const int end = (int)x.ops.size(), last = x.l.ops[(size_t)end - 1].buf[0];
    for (int i = 0; i < BUFS; i++) {
        bool read = i == last || !cu_dead_after(&x.l, end, i), written = false;
        for (int k = 0; k < end; k++) written |= x.l.ops[k].buf[0] == i;
        if ((read || !written) && memcmp(x.m.b[i].data(), y.m.b[i].data(), x.m.b[i].size() * 4)) return false;
    }
    return x.m.same_acts(y.m);
}

static void run_other(Run &r, bool quant, int turn, bool pair) {
    const Acts o = quant ? r.m.acts(r.n) : Acts{};
    if (pair) {
        QuantArgs a;
        if (!cu_pair_of(&r.l, r.ops.data(), (int)r.ops.size(), &a)) { r.m.fault = -1; return; }
        a.o = o; a.fault = &r.m.fault; a.op = 9;
        return emu::launch([&] { k_quant(a); }, dim3((unsigned)((r.n + 255) / 256), ROWS), 256);
    }
    ChainArgs a;
    if (!cu_chain_of(&r.l, r.ops.data(), (int)r.ops.size(), &a)) { r.m.fault = -1; return; }
    a.o = o; a.fault = &r.m.fault; a.quant_op = 9;
    a.turn = turn || !a.still;
    emu::launch([&] { k_chain(a); }, dim3(ROWS), (r.n + 255) / 256 * 32);
}

static void compare(const char *name, int n, bool quant, bool pair, Make make) {
    for (int turn = 0; turn < 2 - pair; turn++) {
        state = 5 + n;
        Memory x(n), y(n);
        for (int i = 0; i < BUFS; i++) y.b[i] = x.b[i];
        if (quant && n == 512) x.b[0][7] = y.b[0][7] = INFINITY;
        Run rx = {x, n}, ry = {y, n};
        make(rx); make(ry);
        StepRows s = {};
        s.fault = &x.fault;
        RowsQuant z = {};
        if (quant) z = {x.acts(n), rx.ops.back().y, 9};
        emu::launch([&] { k_rows(rx.ops.data(), (int)rx.ops.size(), 0, z, s); }, dim3(ROWS), n > 512 ? 512 : 256);
        run_other(ry, quant, turn, pair);
        report(name, equal_live(rx, ry));
    }
}

static void equal_runs(int n) {
    compare("norm, sum", n, false, false, [](Run &r) { r.norm(1, 0).add(2, 2, 1); });
    compare("norm that is read later, sum", n, false, false, [](Run &r) { r.norm(1, 0).add(2, 2, 1).reader(1); });
    compare("norm, sum, norm, quantised", n, true, false, [](Run &r) { r.norm(1, 0).add(2, 1, 2).norm(1, 2, true); });
    compare("two norms, two sums, scale", n, true, false, [](Run &r) { r.norm(3, 3).add(0, 0, 3).norm(1, 0).add(2, 2, 1).scale(2, 2); });
    compare("norms of two inputs, their sum, norm, sum, scale", n, true, false, [](Run &r) {
        r.norm(0, 0).norm(3, 3).add(0, 0, 3).norm(1, 0).add(2, 2, 1).scale(2, 2, false); });
    compare("norms of two inputs", n, false, false, [](Run &r) { r.norm(0, 0).norm(1, 2).scale(1, 1, false); });
    compare("scale, sum, scale, scale", n, true, false, [](Run &r) { r.scale(0, 1).add(3, 0, 2).scale(3, 3).scale(4, 3, false, 3.0f); });
    compare("sum of two rows", n, true, false, [](Run &r) { r.add(0, 1, 2).norm(0, 0); });
    for (int gelu = 0; gelu < 2; gelu++) {
        compare(gelu ? "gelu" : "silu", n, true, true, [=](Run &r) { r.op(ROW_GLU, 0, 0, 1, false, gelu); });
        compare("of a slice", n, true, true, [=](Run &r) { r.op(ROW_SLICE, 1, 5, NO_BUF, false, 3).op(ROW_GLU, 0, 0, 1, false, gelu); });
    }
    compare("cap", n, true, true, [](Run &r) { r.op(ROW_SOFTCAP, 0, 0, NO_BUF, false, 0, 30.0f); });
    for (int parts = 0; parts < 2; parts++)
        compare("gates by parts", n, true, true, [=](Run &r) {
            if (!parts) r.op(ROW_SLICE, 1, 5, NO_BUF, false, n / 8), r.ops[0].i[0] = 4, r.ops[0].i[1] = n / 4;
            r.op(ROW_GATE, 0, 0, 1);
            if (parts) r.ops.back().nb = 8; });
}

/* runs that read a buffer which an op before the last wrote, or are too long or too wide, are the interpreter's */
static void refused() {
    Memory m(256);
    auto no = [&](const char *name, int n, Make make) {
        Run r = {m, n};
        make(r);
        ChainArgs a;
        QuantArgs q;
        const int ops = (int)r.ops.size();
        report(name, !cu_chain_of(&r.l, r.ops.data(), ops, &a) && !cu_pair_of(&r.l, r.ops.data(), ops, &q));
    };
    no("an old result", 256, [](Run &r) { r.norm(0, 0).norm(1, 2).add(3, 4, 1).add(3, 0, 3); });
    no("too wide", 24 * 256 + 32, [](Run &r) { r.add(0, 1, 2); });
    no("no multiple of 32", 48, [](Run &r) { r.add(0, 1, 2); });
    no("five passes", 256, [](Run &r) { r.norm(0, 0).norm(0, 0).norm(0, 0).norm(0, 0).norm(0, 0); });
    no("a sum with itself", 256, [](Run &r) { r.add(0, 1, 1); });
    no("a norm by heads", 256, [](Run &r) { r.norm(0, 0); r.ops[0].i[0] = 4; });
    no("a slice that is read later", 256, [](Run &r) { r.op(ROW_SLICE, 1, 5, NO_BUF, false, 3).op(ROW_GLU, 0, 0, 1).reader(1); });
    no("a slice of what is gated", 256, [](Run &r) { r.op(ROW_SLICE, 1, 0, NO_BUF, false, 0).op(ROW_GLU, 0, 0, 1); });
}

/* NORM by k_norm_whole, in one to four parts a row and with fewer blocks than rows, has k_norm_quant's bits */
static void norms(int n, bool weighted, bool l2) {
    Memory wanted(n);
    NormArgs a = {wanted.b[1].data(), weighted ? weights.data() : NULL, wanted.b[0].data(), wanted.acts(n), n, l2, 1e-6f, &wanted.fault, 7, ROWS, 0};
    emu::launch([&] { k_norm_quant(a); }, dim3(ROWS), 32 * std::min(n / 256, 16));
    for (int parts = 1; parts <= 4; parts += parts < 2 ? 1 : 2)
        for (int blocks = 1; blocks <= ROWS; blocks++) {
            Memory found(n);
            found.b[1] = wanted.b[1];
            NormArgs c = {found.b[1].data(), a.w, found.b[0].data(), found.acts(n), n, l2, 1e-6f, &found.fault, 7, ROWS, (n / 256 + parts - 1) / parts};
            emu::launch([&] { k_norm_whole(c); }, dim3(blocks, parts), 32 * (n / 256));
            char name[64];
            snprintf(name, sizeof name, "norm of %d, %d parts, %d blocks", n, parts, blocks);
            report(name, found.same_acts(wanted) && !memcmp(found.b[0].data(), wanted.b[0].data(), (size_t)ROWS * n * 4));
        }
}

int main(int argc, char **argv) {
    for (float &v : weights) v = 1 + 0.5f * unit();
    const int widths[] = {256, 512, 160, 2816}, which = argc > 1 ? atoi(argv[1]) : 0;
    if (which < 4) equal_runs(widths[which]);
    else if (which == 4) refused();
    else for (int n : {256, 2048, 4096, 5120, 8192}) norms(n, n != 2048, n == 4096);
    return bad;
}
