/* k_linear_one in emulation against plain loops over the same units, bit for bit. usage: linear_one. The sources are made by
 * test_cuda_emulated_linear.py from libbw24/cu. */
#include "emulate.h"
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
#include "op_linear_one.cuh"
#include "units.h"
#include "one_row.h"

struct Part { std::vector<uint8_t> w; std::vector<float> bias, res, y, want; float scale; int n; };

struct Case { int cols, n[3]; bool glu, norm, res, bias; OneShape shape; int blocks; };

template <class U> void check(const char *name, const Case &c) {
    const int segs = (c.cols + 255) / 256, parts = c.glu ? 2 : c.n[2] ? 3 : c.n[1] ? 2 : 1;
    int fault = NO_FAULT;
    std::vector<Part> m;
    LinearArgs a = {};
    Row xo((c.n[0] + 31) / 32 * 32), xw((c.n[0] + 31) / 32 * 32);
    Input x(c.cols);
    for (int i = 0; i < parts; i++) {
        Part p;
        p.n = c.n[i]; p.scale = 0.25f + 0.1f * i;
        const int blocks = (p.n + 31) / 32;
        p.w.assign((size_t)2 * blocks * segs * U::UNIT, 0);
        for (size_t u = 0; u < p.w.size() / U::UNIT; u++) {
            uint8_t *at = p.w.data() + u * U::UNIT;
            if (c.cols / 32 - (int)(u % segs) * 8 >= 8)
                for (int k = 0; k < 2 * U::HALF; k++) at[k] = code_byte<U>(random32());
            fill_scales<U>(at + 2 * U::HALF);
        }
        for (int k = 0; k < p.n; k++) { p.bias.push_back(unit()); p.res.push_back(unit()); }
        p.y.assign(p.n, -7.0f);
        m.push_back(p);
    }
    one_row_args(a, m, c, x, &fault);
    std::vector<float> act;
    for (int i = 0; i < parts; i++)
        for (int k = 0; k < m[i].n; k++) {
            float v = plain_output<U>(m[i].w.data(), segs, k, a.x, 0) * m[i].scale;
            if (c.bias) v = v + m[i].bias[k];
            if (c.res) v = m[i].res[k] + v;
            m[i].want.push_back(v);
        }
    if (c.glu) {
        for (int k = 0; k < m[0].n; k++) { float g = m[0].want[k]; m[0].want[k] = bw_silu(g) * m[1].want[k]; }
        xw.quantise(m[0].want, &fault);
        a.xo = xo.a;
    }
    if (c.norm) a.x.q = NULL;
    OneShape g = c.shape;
    const int all = c.glu ? a.blocks : 2 * a.blocks;
    g.per = all / c.blocks; g.more = all % c.blocks;
    one_divisors(g);
    if (one_shared<U>(g, segs, c.blocks, all) > sizeof emu::shared) { printf("FAIL %s: shared memory\n", name); bad = 1; return; }
    emu::launch([=] { k_linear_one<U, 0>(a, g); }, dim3(c.blocks), ONE_THREADS);
    bool ok = !c.norm || x.normed();
    for (int i = 0; i < (c.glu ? 1 : parts); i++) ok &= !memcmp(m[i].y.data(), m[i].want.data(), m[i].n * 4);
    if (c.glu) ok &= xo == xw;
    printf("%s %s cols %d n %d %d %d\n", ok ? "PASS" : "FAIL", name, c.cols, c.n[0], c.n[1], c.n[2]);
    bad |= !ok;
}

template <class U> void type(const char *name) {
    check<U>(name, {1024, {96, 0, 0}, false, false, true, false, {4, 2, 3, 0, 1}, 2});          /* passes, a residual */
    check<U>(name, {672, {80, 32, 100}, false, true, false, true, {5, 1, 16, 0, 1}, 3});        /* norm, parts, an odd number of segments, the last one short */
    check<U>(name, {512, {96, 96, 0}, true, true, false, false, {3, 2, 4, 1, 1}, 2});           /* GLU in passes */
    check<U>(name, {2304, {32, 0, 0}, false, false, false, false, {2, 2, 2, 0, 1}, 3});         /* a block without a tile */
}

int main() {
    check<U_Q4_K>("Q4_K, long", {512, {1472, 32, 0}, false, true, false, false, {2, 2, 16, 0, 1}, 1}); /* more pairs a warp than lanes, seven passes */
    type<U_Q4_K>("Q4_K");
    type<U_NVFP4>("NVFP4");
    type<U_Q8_0>("Q8_0");
    type<U_Q4_0>("Q4_0");
    type<U_IQ4_XS>("IQ4_XS");
    type<U_Q6_K>("Q6_K");
    type<U_INT8>("INT8");
    type<U_INT8H>("INT8H");
    return bad;
}
