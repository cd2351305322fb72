/* A quantised row, and NORM by plain loops, for the tests of LINEAR's kernels of one row in emulation. Knows no kernel. */
#ifndef BW24_TESTS_CUDA_ONE_ROW_H
#define BW24_TESTS_CUDA_ONE_ROW_H

#include "emulate.h"
#include "device.cuh"

using namespace bw;

struct Row {
    std::vector<int8_t> q;
    std::vector<float> f[3];
    Acts a;
    explicit Row(int cols) {
        q.assign(8 * cols, 0);
        for (auto &x : f) x.assign(cols / 4, 0.0f);
        a = {q.data(), f[0].data(), f[1].data(), f[2].data(), 8, cols};
    }
    void quantise(const std::vector<float> &x, int *fault) {
        const int n = (int)x.size();
        emu::launch([&] {
            for (int g = 0, i = threadIdx.x; g < a.cols / 32; g++, i += 32) quant_group(a, 0, g, threadIdx.x, i < n ? x[i] : 0.0f, fault, 0);
        }, dim3(1), 32);
    }
    bool operator==(const Row &o) const {
        if (q != o.q) return false;
        for (int i = 0; i < 3; i++) if (memcmp(f[i].data(), o.f[i].data(), f[i].size() * 4)) return false;
        return true;
    }
};

/* NORM of a row by the plain text of docs/numerics.md §4 */
inline void plain_norm(const std::vector<float> &x, const std::vector<float> &w, float eps, std::vector<float> &y) {
    const int n = (int)x.size();
    float total = 0.0f;
    for (int s = 0; s < n; s += 256) {
        float v[32] = {0};
        for (int k = s; k < min(n, s + 256); k++) v[k % 32] = fmaf(x[k], x[k], v[k % 32]);
        for (int o = 16; o; o >>= 1) { float t[32]; for (int l = 0; l < 32; l++) t[l] = v[l] + v[l ^ o]; memcpy(v, t, sizeof v); }
        total = total + v[0];
    }
    const float r = 1.0f / sqrtf(total / (float)n + eps);
    for (int k = 0; k < n; k++) y[k] = (x[k] * r) * w[k];
}

/* One row of input, whole or quantised, with the weights of a NORM before it and room for what the NORM gives */
struct Input {
    Row x;
    std::vector<float> in, nw, ny, nwant;
    explicit Input(int cols) : x(cols), in(cols), nw(cols), ny(cols), nwant(cols) {
        for (float &v : in) v = 2 * unit();
        for (float &v : nw) v = 1 + 0.2f * unit();
    }
    bool normed() const { return !memcmp(ny.data(), nwant.data(), ny.size() * 4); }
};

/* the arguments of a LINEAR of one row over parts m (w, bias, res, y, scale, n); with NORM x is what it should give, in plain loops */
template <class Args, class Parts, class Case> void one_row_args(Args &a, Parts &m, const Case &c, Input &x, int *fault) {
    for (size_t i = 0; i < m.size(); i++) {
        auto &p = m[i];
        a.part[i] = {p.w.data(), c.bias ? p.bias.data() : NULL, c.res ? p.res.data() : NULL, p.y.data(), p.scale, p.n, (p.n + 31) / 32};
        a.blocks += c.glu && i ? 0 : a.part[i].blocks;
    }
    a.n_parts = (int)m.size(); a.rows = 1; a.segs = (c.cols + 255) / 256; a.fault = fault;
    if (c.norm) {
        plain_norm(x.in, x.nw, 1e-6f, x.nwant);
        x.x.quantise(x.nwant, fault);
        a.norm = {x.in.data(), x.nw.data(), x.ny.data(), 1e-6f, 0, 0};
    } else x.x.quantise(x.in, fault);
    a.x = x.x.a;
}

#endif
