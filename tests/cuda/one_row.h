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

#endif
