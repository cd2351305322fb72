/* k_linear_tiny in emulation against plain loops over the same units, bit for bit. usage: linear_tiny. The sources are made by
 * test_cuda_emulated_linear.py from libbw24/cu. */
#include "emulate.h"
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
#include "op_linear_tiny.cuh"
#include "units.h"
#include "one_row.h"

struct Part {
    std::vector<uint8_t> w;
    std::vector<float> bias, res, y, want;
    float scale;
    int n, unit;
};
struct Case { int cols, n[3]; bool glu, norm, res, bias; };

template <class F> void by_type(int type, F f) {
    switch (type) {
    case TINY_Q4_0: return f(U_Q4_0());
    case TINY_Q4_K: return f(U_Q4_K());
    case TINY_NVFP4: return f(U_NVFP4());
    case TINY_Q8_0: return f(U_Q8_0());
    case TINY_Q6_K: return f(U_Q6_K());
    case TINY_IQ4_XS: return f(U_IQ4_XS());
    case TINY_INT8: return f(U_INT8());
    default: return f(U_INT8H());
    }
}

Part matrix(int n, int cols, int type, float scale) {
    Part p;
    const int segs = (cols + 255) / 256;
    p.n = n; p.unit = type; p.scale = scale;
    by_type(type, [&](auto u) {
        using U = decltype(u);
        p.w.assign((size_t)(n + 31) / 32 * 2 * segs * U::UNIT, 0);
        for (size_t i = 0; i < p.w.size() / U::UNIT; i++) {
            uint8_t *at = p.w.data() + i * U::UNIT;
            if (cols / 32 - (int)(i % segs) * 8 >= 8)
                for (int k = 0; k < 2 * U::HALF; k++) at[k] = code_byte<U>(random32());
            fill_scales<U>(at + 2 * U::HALF);
        }
    });
    for (int k = 0; k < n; k++) { p.bias.push_back(unit()); p.res.push_back(unit()); }
    p.y.assign(n, -7.0f);
    return p;
}

/* turn: as TinyShape's. types: of the parts */
void check(const char *name, const Case &c, const int *types, int turn) {
    const int segs = (c.cols + 255) / 256, parts = c.glu ? 2 : c.n[2] ? 3 : c.n[1] ? 2 : 1;
    int fault = NO_FAULT;
    std::vector<Part> m;
    LinearArgs a = {};
    TinyShape g = {};
    Row xo((c.n[0] + 31) / 32 * 32), xw((c.n[0] + 31) / 32 * 32);
    Input x(c.cols);
    for (int i = 0; i < parts; i++) m.push_back(matrix(c.n[i], c.cols, types[i], 0.25f + 0.1f * i));
    for (int i = 0; i < parts; i++) g.unit[i] = m[i].unit;
    one_row_args(a, m, c, x, &fault);
    for (int i = 0; i < parts; i++)
        for (int k = 0; k < m[i].n; k++) {
            float v = 0;
            by_type(m[i].unit, [&](auto u) { v = plain_output<decltype(u)>(m[i].w.data(), segs, k, a.x, 0) * m[i].scale; });
            if (c.bias) v = v + m[i].bias[k];
            if (c.res) v = m[i].res[k] + v;
            m[i].want.push_back(v);
        }
    if (c.glu) {
        for (int k = 0; k < m[0].n; k++) { float gate = m[0].want[k]; m[0].want[k] = bw_silu(gate) * m[1].want[k]; }
        xw.quantise(m[0].want, &fault);
        a.xo = xo.a;
    }
    if (c.norm) a.x.q = NULL;
    g.glu = c.glu;
    g.turn = turn;
    const int warps = segs * (c.glu ? 4 : 1), blocks = c.glu ? a.blocks : 2 * a.blocks;
    emu::launch([=] { k_linear_tiny(a, g); }, dim3(blocks), warps * 32);
    bool ok = fault == NO_FAULT && (!c.norm || x.normed());
    for (int i = 0; i < (c.glu ? 1 : parts); i++) ok &= !memcmp(m[i].y.data(), m[i].want.data(), m[i].n * 4);
    if (c.glu) ok &= xo == xw;
    printf("%s %s cols %d n %d %d %d\n", ok ? "PASS" : "FAIL", name, c.cols, c.n[0], c.n[1], c.n[2]);
    bad |= !ok;
}

int main() {
    const char *names[] = {"Q4_0", "Q4_K", "NVFP4", "Q8_0", "Q6_K", "IQ4_XS", "INT8", "INT8H"};
    for (int t = 0; t < 8; t++) {
        const int same[3] = {t, t, t}, mixed[3] = {t, (t + 3) % 8, (t + 1) % 8};
        check(names[t], {1536, {80, 0, 0}, false, false, true, false}, same, 1);      /* six segments, a residual */
        check(names[t], {576, {80, 32, 100}, false, true, false, true}, mixed, 0);    /* norm, parts of three types, a short last segment, a first turn */
        check(names[t], {576, {96, 96, 0}, true, true, false, false}, same, 0);       /* GLU with a norm */
        check(names[t], {1280, {32, 32, 0}, true, false, false, true}, mixed, 1);     /* GLU of two types, twenty warps */
        check(names[t], {2560, {40, 0, 0}, false, true, false, false}, same, 1);      /* more segments than a round of sums */
    }
    return bad;
}
