/* LINEAR of few rows in emulation: one to four matrices over one input, gated pairs, against plain loops, bit for bit. usage: linear CASE. The sources are
 * made by test_cuda_emulated_linear_few.py from libbw24/cu. */
#include "emulate.h"
#include "op_linear_stream.cuh"
#include "units.h"

enum { SHARED = 227 * 1024 };

/* weights of n outputs, zero past them and past the columns */
template <class U> std::vector<uint8_t> matrix(int n, int cols) {
    const int segs = (cols + 255) / 256, tiles = (n + 31) / 32 * 2;
    std::vector<uint8_t> mem((size_t)tiles * segs * U::UNIT, 0);
    for (int i = 0; i < tiles * segs && i / segs * 16 < n; i++) {
        uint8_t *u = mem.data() + (size_t)i * U::UNIT;
        if ((i % segs + 1) * 256 <= cols)
            for (int k = 0; k < 2 * U::HALF; k++) u[k] = code_byte<U>(U::PACKS == 1 ? random32() : random32() % 255 - 127);
        fill_scales<U>(u + 2 * U::HALF);
    }
    return mem;
}

struct Input {
    std::vector<int8_t> q;
    std::vector<float> f[3];
    Acts a;
    explicit Input(int cols) : q((size_t)16 * cols, 0) {
        for (auto &x : f) x.assign((size_t)cols / 2, 0.0f);
        a = {q.data(), f[0].data(), f[1].data(), f[2].data(), 16, cols};
    }
    void quantise(int rows, const std::vector<float> &x) {
        static int fault;
        const Acts o = a;
        emu::launch([&] { for (int g = 0; g < o.cols / 32; g++) quant_group(o, blockIdx.x, g, threadIdx.x, x[(size_t)blockIdx.x * o.cols + g * 32 + threadIdx.x], &fault, 0); }, dim3(rows), 32);
    }
};

static std::vector<float> values(size_t n) {
    std::vector<float> v(n);
    for (float &x : v) x = unit();
    return v;
}

/* the same, of groups of columns each times another power of two down to 2^-spread */
static std::vector<float> far_apart(size_t n, int spread) {
    std::vector<float> v = values(n);
    float by = 1.0f;
    for (size_t i = 0; i < n; i++) {
        if (i % 32 == 0) by = ldexpf(1.0f, -(int)(random32() % (spread + 1)));
        v[i] *= by;
    }
    return v;
}

/* R row slots of k_linear_small, or with N the groups of eight of k_linear_stream */
template <class U, int R, int N, bool GLU> void launch_few(LinearArgs a, int blocks) {
    if constexpr (N) {
        StreamShape g = stream_shape<U, N>(SHARED, a.segs, GLU, a.blocks * (GLU ? 4 : 2) / blocks);
        small_items(a, g, GLU, blocks);
        if (stream_shared<U, N>(g, a.segs) > SHARED) emu::fail("a block does not fit");
        emu::launch([=] { k_linear_stream<U, N>(a, g); }, dim3(blocks), 32 * (g.warps + StreamSize<N>::REDUCERS));
    } else {
        size_t bytes = 0;
        SmallShape g = small_shape<U, R, GLU>(SHARED, a.segs, &bytes);
        small_items(a, g, GLU, blocks);
        if (bytes > SHARED) emu::fail("a block does not fit");
        emu::launch([=] { k_linear_small<U, R, GLU>(a, g); }, dim3(blocks), 32 * (g.warps + small_reducers<R>()));
    }
}

/* outputs n of each part; the first has a residual and a bias */
template <class U, int R, int N = 0> void plain_parts(const char *name, int rows, int cols, std::vector<int> n, int blocks, int spread = 0) {
    Input x(cols);
    x.quantise(rows, far_apart((size_t)rows * cols, spread));
    std::vector<std::vector<uint8_t>> w;
    std::vector<std::vector<float>> y, bias, res;
    LinearArgs a = {};
    a.x = x.a;
    a.n_parts = (int)n.size();
    a.rows = rows;
    a.segs = (cols + 255) / 256;
    for (int i = 0; i < a.n_parts; i++) {
        w.push_back(matrix<U>(n[i], cols));
        y.emplace_back((size_t)rows * n[i], 0.0f);
        bias.push_back(values(n[i]));
        res.push_back(values((size_t)rows * n[i]));
    }
    for (int i = 0; i < a.n_parts; i++) {
        a.part[i] = {w[i].data(), i ? NULL : bias[i].data(), i ? NULL : res[i].data(), y[i].data(), 0.5f + i, n[i], (n[i] + 31) / 32};
        a.blocks += a.part[i].blocks;
    }
    launch_few<U, R, N, false>(a, blocks);
    bool equal = true;
    for (int i = 0; i < a.n_parts; i++)
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < n[i]; k++) {
                float v = plain_output<U>(w[i].data(), a.segs, k, x.a, r) * (0.5f + i);
                if (!i) v = res[i][(size_t)r * n[i] + k] + (v + bias[i][k]);
                equal &= !memcmp(&v, &y[i][(size_t)r * n[i] + k], 4);
            }
    report(name, equal);
}

template <class U, int R, int N = 0> void gated(const char *name, int rows, int cols, int n, int blocks) {
    Input x(cols), want(n), got(n);
    x.quantise(rows, values((size_t)rows * cols));
    const std::vector<uint8_t> gate = matrix<U>(n, cols), up = matrix<U>(n, cols);
    std::vector<float> y((size_t)rows * n), plain = y;
    int fault = NO_FAULT;
    LinearArgs a = {};
    a.x = x.a;
    a.xo = got.a;
    a.n_parts = 2;
    a.rows = rows;
    a.segs = (cols + 255) / 256;
    a.blocks = (n + 31) / 32;
    a.part[0] = {gate.data(), NULL, NULL, y.data(), 0.01f, n, a.blocks};
    a.part[1] = {up.data(), NULL, NULL, NULL, 0.02f, n, a.blocks};
    a.fault = &fault;
    launch_few<U, R, N, true>(a, blocks);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < n; k++)
            plain[(size_t)r * n + k] = bw_silu(plain_output<U>(gate.data(), a.segs, k, x.a, r) * 0.01f) * (plain_output<U>(up.data(), a.segs, k, x.a, r) * 0.02f);
    want.quantise(rows, plain);
    report(name, same(y, plain) && want.q == got.q && same(want.f[0], got.f[0]) && same(want.f[1], got.f[1]) && fault == NO_FAULT);
}

/* segments: fewer than warps; as many; some more, shared out unevenly; three and more chunks, the last one smaller; the last segment not whole */
template <class U> void run() {
    plain_parts<U, 4>("one part, 2 rows", 2, 16 * 256 - 32, {64}, 1);
    plain_parts<U, 4>("one part, 4 rows", 4, 3 * 256, {200}, 3);
    plain_parts<U, 4>("three parts, 3 rows, halves", 3, 16 * 256, {96, 40, 32}, 4);
    plain_parts<U, 4>("20 segments, 4 rows", 4, 20 * 256, {80, 32}, 2);
    plain_parts<U, 4>("50 segments, 4 rows", 4, 50 * 256, {64}, 1);
    plain_parts<U, 8>("one part, 8 rows", 8, 5 * 256 - 96, {100}, 2);
    plain_parts<U, 8>("20 segments, 7 rows", 7, 20 * 256, {70}, 1);
    plain_parts<U, 8>("6 rows, scales apart", 6, 3 * 256 - 32, {40}, 1, 20);
    plain_parts<U, 8>("8 rows, scales far apart", 8, 3 * 256 - 32, {40}, 1, 60);
    plain_parts<U, 16, 2>("16 rows, scales far apart", 16, 3 * 256 - 32, {40}, 1, 60);
    plain_parts<U, 16, 2>("11 rows, 25 segments, 10 tiles", 11, 25 * 256 - 64, {160}, 1, 30);
    gated<U, 16, 2>("gate, 12 rows, 24 segments, 12 tiles", 12, 24 * 256, 96, 1);
    plain_parts<U, 8, 1>("35 segments, 8 rows, streamed", 8, 35 * 256, {64}, 2);
    gated<U, 4>("gate, 4 rows", 4, 20 * 256, 96, 2);
    plain_parts<U, 16, 2>("16 rows, three parts, halves, short last segment", 16, 5 * 256 - 96, {96, 40, 32}, 4);
    plain_parts<U, 16, 2>("9 rows, 12 segments", 9, 12 * 256, {100}, 1);
    plain_parts<U, 16, 2>("14 rows, 30 segments", 14, 30 * 256, {64, 32}, 2);
    gated<U, 16, 2>("gate, 13 rows, 16 segments", 13, 16 * 256, 96, 2);
    gated<U, 8, 1>("gate, 6 rows, 18 segments, streamed", 6, 18 * 256, 64, 1);
    gated<U, 8>("gate, 8 rows", 8, 16 * 256, 64, 1);
    gated<U, 8>("gate, 5 rows, 20 segments", 5, 20 * 256, 64, 1);
}

int main(int, char **argv) {
    switch (atoi(argv[1])) {
    case 0: run<U_NVFP4>(); break;
    case 1: run<U_IQ4_XS>(); break;
    case 2: run<U_Q4_K>(); break;
    case 3: run<U_Q6_K>(); break;
    default: run<U_Q8_0>();
    }
    return bad;
}
