/* The mixture's kernels in emulation: products of pairs and the GEMM over the same units against plain loops, the router against its plain text, bit for
 * bit. usage: moe CASE. The sources are made by test_cuda_emulated_moe.py from libbw24/cu. */
#include "emulate.h"
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
#include "op_experts.cuh"
#include "op_experts_any.cuh"
#include "op_gemm_fast.cuh"
#include "op_experts_gemm.cuh"
#include "op_router.cuh"
#include "op_float_few.cuh"
#include "units.h"

/* matrices of `parts` experts, zero past their columns */
template <class U> struct Matrices {
    std::vector<uint8_t> mem;
    std::vector<float> scales;
    ExpertMatrix m;
    Matrices(int parts, int rows, int cols) {
        const int segs = (cols + 255) / 256, blocks = (rows + 31) / 32;
        const size_t stride = (size_t)2 * blocks * segs * U::UNIT;
        mem.assign(parts * stride, 0);
        for (int i = 0; i < parts; i++) scales.push_back(0.5f + 0.25f * i);
        for (size_t u = 0; u < mem.size() / U::UNIT; u++) {
            uint8_t *p = mem.data() + u * U::UNIT;
            const int groups = min(8, cols / 32 - (int)(u % segs) * 8);
            for (int i = 0; i < 2 * U::HALF; i++) p[i] = code_byte<U>(U::UNSIGNED || U::PACKS == 1 ? random32() : random32() % 255 - 127);
            if (groups < 8)
                for (int i = 0; i < 2 * U::HALF; i++) p[i] = 0;
            fill_scales<U>(p + 2 * U::HALF);
        }
        m = {mem.data(), stride, NULL, parts > 1 ? scales.data() : NULL, 0.75f, rows, cols, segs, blocks};
    }
};

struct Rows {
    std::vector<int8_t> q;
    std::vector<float> f[3];
    Acts a;
    Rows(int rows, int cols) {
        const int ld = (rows + 127) / 128 * 128;
        q.assign((size_t)ld * cols, 0);
        for (auto &x : f) x.assign((size_t)ld * cols / 32, 0.0f);
        a = {q.data(), f[0].data(), f[1].data(), f[2].data(), ld, cols};
    }
    /* wide: every fifth row's groups span up to 2^46 */
    void fill(int rows, bool wide = false) {
        int *fault = new int(NO_FAULT);
        Acts o = a;
        std::vector<float> x((size_t)rows * a.cols);
        for (float &v : x) v = unit() * 2;
        for (size_t i = 0; wide && i < x.size(); i++)
            if (i / a.cols % 5 == 3) x[i] = ldexpf(x[i], (int)(i % a.cols / 32) % 3 * -23);
        emu::launch([=, &x] { for (int g = 0; g < o.cols / 32; g++) quant_group(o, blockIdx.x, g, threadIdx.x, x[(size_t)blockIdx.x * o.cols + g * 32 + threadIdx.x], fault, 0); }, dim3(rows), 32);
        delete fault;
    }
};

/* one output of one row of an expert */
template <class U> float plain(const ExpertMatrix &m, int id, int n, const Acts &x, int row) {
    return plain_output<U>(m.w + (size_t)id * m.stride, m.segs, n, x, row) * (m.scales ? m.scales[id] : m.scale);
}

template <class U> struct Mixture {
    int rows, width, ff, experts, top, fault = NO_FAULT;
    Matrices<U> gate, up, down, sgate, sup, sdown;
    Rows x, want, got, spread;
    std::vector<float> route, shgate, res;
    Mixture(int rows, int width, int ff, int experts, int top, bool uneven, bool wide = false)
        : rows(rows), width(width), ff(ff), experts(experts), top(top), gate(experts, ff, width), up(experts, ff, width), down(experts, width, ff), sgate(1, ff, width),
          sup(1, ff, width), sdown(1, width, ff), x(rows, width), want(rows * (top + 1), ff), got(rows * (top + 1), ff), spread(rows * (top + 1), ff) {
        x.fill(rows, wide);
        for (int r = 0; r < rows; r++) {
            for (int k = 0; k < top; k++) route.push_back(0.5f + 0.3f * unit());
            int first = uneven && random32() % 3 ? 1 : (int)(random32() % (uint32_t)(experts - top + 1));
            for (int k = 0; k < top; k++) route.push_back((float)(first + k));
            shgate.push_back(unit());
            for (int i = 0; i < width; i++) res.push_back(unit());
        }
    }
    int id(int row, int k) { return (int)route[(size_t)row * 2 * top + top + k]; }
    void gates(Rows &to, bool shared) {
        const int slots = top + shared;
        std::vector<float> v((size_t)rows * slots * ff);
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < slots; k++)
                for (int n = 0; n < ff; n++) {
                    bool own = k < top;
                    float g = plain<U>(own ? gate.m : sgate.m, own ? id(r, k) : 0, n, x.a, r), u = plain<U>(own ? up.m : sup.m, own ? id(r, k) : 0, n, x.a, r);
                    v[((size_t)r * slots + k) * ff + n] = bw_silu(g) * u;
                }
        Acts o = to.a;
        int *f = &fault;
        emu::launch([=, &v] { for (int g = 0; g < o.cols / 32; g++) quant_group(o, blockIdx.x, g, threadIdx.x, v[(size_t)blockIdx.x * o.cols + g * 32 + threadIdx.x], f, 0); }, dim3(rows * slots), 32);
    }
    bool equal(const Rows &p, const Rows &q, int n) {
        for (int i = 0; i < n; i++) {
            if (memcmp(p.q.data() + (size_t)i * ff, q.q.data() + (size_t)i * ff, ff)) return false;
            for (int k = 0; k < 3; k++)
                for (int g = 0; g < ff / 32; g++)
                    if (memcmp(&p.f[k][(size_t)g * p.a.ld + i], &q.f[k][(size_t)g * q.a.ld + i], 4)) return false;
        }
        return true;
    }
    void few(const char *name, bool deep) {
        const int slots = top + 1, tasks = 4 * ((gate.m.segs + 1) / 2), t = slots * ((down.m.segs + 1) / 2);
        gates(want, true);
        ExpertArgs a = {};
        a.m[0] = gate.m; a.m[1] = up.m; a.shared[0] = sgate.m; a.shared[1] = sup.m;
        a.slots = slots; a.route = route.data(); a.n_mats = 2; a.top = top; a.x = x.a; a.yo = got.a; a.fault = &fault;
        a.depth = deep ? (tasks + EXPERT_WARPS - 1) / EXPERT_WARPS : 1;
        a.by_pairs = one_reciprocal((gate.m.segs + 1) / 2);
        emu::launch([&] { k_experts<U>(a, DownArgs()); }, dim3((ff + 31) / 32, rows * slots), 32 * min(tasks, (int)EXPERT_WARPS));
        report(name, equal(want, got, rows * slots) && fault == NO_FAULT);
        std::vector<float> y((size_t)rows * width, NAN), sum(res), ry(y), rsum(res);
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < width; n++) {
                float v = 0.0f;
                for (int k = 0; k < top; k++) v = fmaf(route[(size_t)r * 2 * top + k], plain<U>(down.m, id(r, k), n, got.a, r * slots + k), v);
                v = v + plain<U>(sdown.m, 0, n, got.a, r * slots + top) * bw_sigmoid(shgate[r]);
                ry[(size_t)r * width + n] = v;
                rsum[(size_t)r * width + n] = res[(size_t)r * width + n] + v;
            }
        DownArgs d = {down.m, route.data(), top, got.a, y.data(), sdown.m, slots, shgate.data(), sum.data(), sum.data(), 1, deep ? (t + EXPERT_WARPS - 1) / EXPERT_WARPS : 1, one_reciprocal((down.m.segs + 1) / 2)};
        emu::launch([&] { k_experts<U>(ExpertArgs(), d); }, dim3((width + 15) / 16, rows), 32 * min(t, (int)EXPERT_WARPS));
        report("down, shared expert and residual", same(y, ry) && same(sum, rsum));
    }
    /* groups: the form of warp groups, which some rows of x are too wide for */
    void many(const char *name, bool groups = false) {
        const int pairs = rows * top;
        std::vector<int> order(pairs, -1);
        std::vector<ExpertTile> tiles(pairs / EXPERT_TILE + MOST_EXPERTS);
        int n_tiles = 0;
        emu::launch([&] { k_experts_order(route.data(), pairs, top, order.data(), tiles.data(), &n_tiles); }, dim3(1), 1024);
        gates(want, false);
        const int most = pairs / EXPERT_TILE + min(experts, pairs), blocks = pairs / 32 + experts;
        ExpertGemmArgs a = {{gate.m, up.m}, 2, top, 1, 0, order.data(), &n_tiles, most, tiles.data(), x.a, got.a, NULL, &fault, 0};
        std::vector<float> factor((size_t)blocks * 32, NAN);
        std::vector<uint8_t> room((size_t)blocks * group_stages(max(width, ff)) * GG_BLOCK + 16);
        a.factor = factor.data();
        a.rows = (const uint8_t *)(((uint64_t)room.data() + 15) & ~15ull);
        const auto gemm = [&](int outs) {
            const ExpertRows e = {a.tiles, a.n_tiles, a.order, a.top, a.gather, factor.data()};
            if (!groups) return emu::launch([&] { k_experts_gemm<U>(a); }, dim3(2 * most, (a.m[0].rows + outs - 1) / outs), 256);
            emu::launch([&] { group_pairs(a.x, (uint8_t *)a.rows, e); }, dim3(most * (EXPERT_TILE / 8)), 256);
            if constexpr (expert_groups<U>) emu::launch([&] { if (outs == 64) experts_groups<U, true>(a); else experts_groups<U, false>(a); }, dim3(3), GG_THREADS);
        };
        gemm(64);
        for (int i = 0; i < pairs; i++) /* back to the places of the pairs */
            for (int g = 0; g < ff / 32; g++) {
                memcpy(&spread.q[(size_t)order[i] * ff], &got.q[(size_t)i * ff], ff);
                for (int k = 0; k < 3; k++) spread.f[k][(size_t)g * spread.a.ld + order[i]] = got.f[k][(size_t)g * got.a.ld + i];
            }
        report(name, equal(want, spread, pairs) && fault == NO_FAULT && n_tiles <= most);
        std::vector<float> y((size_t)pairs * width, NAN), ry(y);
        for (int i = 0; i < pairs; i++)
            for (int n = 0; n < width; n++) ry[(size_t)i * width + n] = plain<U>(down.m, id(i / top, i % top), n, want.a, i);
        a.m[0] = down.m; a.n_mats = 1; a.gather = 0; a.x = got.a; a.y = y.data();
        gemm(128);
        report("down by the GEMM", same(y, ry));
    }
};

/* router of `experts` outputs over rows of `cols`, with another output beside it; own: its rows are scaled, and the experts' rows have weights of their own */
static void router(int rows, int cols, int experts, int top, int groups, int keep, bool sigmoid, bool own = false) {
    std::vector<float> x((size_t)rows * cols), w(cols), wr((size_t)experts * cols), wg(cols), h(x.size(), NAN), logits((size_t)rows * experts), gate(rows), route((size_t)rows * 2 * top),
        bias(experts);
    Rows o(rows, cols), ro(rows, cols);
    std::vector<int> count(rows, 0);
    int fault = NO_FAULT;
    for (auto *v : {&x, &w, &wr, &wg, &bias}) for (float &f : *v) f = unit();
    for (int i = 1; i < experts; i += 5) memcpy(&wr[(size_t)i * cols], &wr[0], cols * 4), bias[i] = bias[0]; /* ties */
    RouterArgs a = {};
    a.x = x.data(); a.w = w.data(); a.h = h.data(); a.o = o.a; a.cols = cols; a.eps = 1e-6f;
    std::vector<float> w2(cols);
    for (float &f : w2) f = unit();
    a.factor = own ? 0.37f : 1.0f;
    a.own = own ? w2.data() : NULL;
    a.part[0] = {(const uint8_t *)wr.data(), NULL, NULL, logits.data(), 1.0f, experts, 0};
    a.part[1] = {(const uint8_t *)wg.data(), NULL, NULL, gate.data(), 1.0f, 1, 0};
    a.count = count.data(); a.fault = &fault;
    a.route.y = route.data(); a.route.n = 2 * top; a.route.na = experts; a.route.f = 2.5f; a.route.w = sigmoid ? bias.data() : NULL;
    a.route.i[0] = groups; a.route.i[1] = keep; a.route.i[2] = 1; a.route.i[3] = sigmoid;
    emu::launch([&] { k_router(a); }, dim3((experts + 1) / 2 + 2, rows), ROUTER_THREADS);
    bool ok = fault == NO_FAULT;
    for (int r = 0; r < rows; r++) {
        std::vector<float> hr(cols), l(experts + 1), p(experts), c(experts), out(2 * top);
        float *dst = hr.data();
        std::vector<float> part(64);
        emu::launch([&] { norm_row({x.data() + (size_t)r * cols, w.data(), cols, 0, 1e-6f}, 8, part.data(), [&](int, int col, const float (&v)[8], int n) {
            for (int j = 0; j < n; j++) dst[col + j] = v[j]; }); }, dim3(1), 256);
        std::vector<float> read(hr);
        for (float &f : hr) f = f * a.factor;
        for (int e = 0; e <= experts; e++) {
            const float *we = e < experts ? &wr[(size_t)e * cols] : wg.data();
            for (int s = 0; s < cols; s += 256) { float v = 0; for (int i = s; i < min(cols, s + 256); i++) v = fmaf(we[i], hr[i], v); l[e] = l[e] + v; }
        }
        float top_l = l[0], total[32] = {0};
        for (int e = 0; e < experts; e++) top_l = max(top_l, l[e]);
        for (int e = 0; e < experts; e++) { p[e] = sigmoid ? bw_sigmoid(l[e]) : bw_exp(l[e] - top_l); total[e % 32] = total[e % 32] + p[e]; }
        for (int s = 16; s; s >>= 1) for (int i = 0; i < s; i++) total[i] = total[i] + total[i + s];
        for (int e = 0; e < experts; e++) { if (!sigmoid) p[e] = p[e] / total[0]; c[e] = sigmoid ? p[e] + bias[e] : p[e]; }
        bw_route spec = {experts, top, groups, keep, 1, sigmoid ? BW_ROUTE_SIGMOID : BW_ROUTE_SOFTMAX, 2.5f};
        bw_route_select(&spec, p.data(), c.data(), out.data());
        if (own) {
            dst = read.data();
            emu::launch([&] { norm_row({x.data() + (size_t)r * cols, w2.data(), cols, 0, 1e-6f}, 8, part.data(), [&](int, int col, const float (&v)[8], int n) {
                for (int j = 0; j < n; j++) dst[col + j] = v[j]; }); }, dim3(1), 256);
        }
        ok &= !memcmp(&h[(size_t)r * cols], read.data(), cols * 4) && !memcmp(&logits[(size_t)r * experts], l.data(), experts * 4) && gate[r] == l[experts] && !count[r];
        ok &= !memcmp(&route[(size_t)r * 2 * top], out.data(), 8 * top);
        if (groups == 1 && !sigmoid && experts <= 32 * ROUTE_HELD) { /* as EXPERTS makes it for itself */
            const RouteChoice choice = {logits.data(), NULL, NULL, 2.5f, experts, 1, 0};
            float weight[32];
            int id[32];
            emu::launch([&] { route_choose(choice, r, top, weight, id, &fault); }, dim3(1), 32);
            for (int k = 0; k < top; k++) ok &= !memcmp(&weight[k], &out[k], 4) && id[k] == (int)out[top + k];
        }
        emu::launch([&] { for (int g = 0; g < cols / 32; g++) quant_group(ro.a, r, g, threadIdx.x, read[g * 32 + threadIdx.x], &fault, 0); }, dim3(1), 32);
    }
    ok &= o.q == ro.q && o.f[0] == ro.f[0] && o.f[1] == ro.f[1] && o.f[2] == ro.f[2];
    char name[96];
    snprintf(name, sizeof name, "router %d x %d of %d, %d groups, %s%s", top, experts, cols, groups, sigmoid ? "sigmoid" : "softmax", own ? ", experts of rows of their own" : "");
    report(name, ok);
}

template <class U> void units(const char *name) {
    Mixture<U>(2, 512, 96, 7, 3, false).few(name, true);
    Mixture<U>(1, 800, 544, 5, 2, false).few(name, true);
    Mixture<U>(1, 2336, 96, 4, 2, false).few(name, false);
    Mixture<U>(70, 256, 96, 5, 2, true).many(name);
    Mixture<U>(40, 320, 160, 4, 2, true).many(name);
}

template <class U> void by_pairs(const char *name) {
    Mixture<U>(150, 288, 96, 3, 2, true, true).many(name, true); /* tiles of 128 and fewer pairs, a second segment of one group */
    Mixture<U>(40, 544, 160, 4, 2, false, true).many(name, true);
}

/* LINEAR of many rows with bias and residual, which is where the result goes */
template <class U> void linear(const char *name, int rows, int outs, int cols, bool groups = false) {
    Matrices<U> w(1, outs, cols);
    Rows x(rows, cols);
    x.fill(rows, groups);
    std::vector<float> bias(outs), y((size_t)rows * outs), wanted(y.size());
    for (float &v : bias) v = unit();
    for (float &v : y) v = unit();
    w.m.scale = 1.0f;
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < outs; n++) wanted[(size_t)r * outs + n] = y[(size_t)r * outs + n] + (plain<U>(w.m, 0, n, x.a, r) * 0.75f + bias[n]);
    LinearArgs a = {};
    a.part[0] = {(const uint8_t *)w.m.w, bias.data(), y.data(), y.data(), 0.75f, outs, w.m.blocks};
    a.x = x.a;
    a.n_parts = 1; a.blocks = w.m.blocks; a.segs = w.m.segs; a.rows = rows;
    const dim3 grid((rows + 127) / 128, (outs + 127) / 128);
    if (groups) {
        std::vector<uint8_t> acts(group_acts_bytes(x.a.ld, cols) + 16);
        uint8_t *at = (uint8_t *)(((uint64_t)acts.data() + 15) & ~15ull);
        emu::launch([&] { group_acts(x.a, at); }, dim3((group_stages(cols) + 7) / 8, x.a.ld / 8), 256);
        emu::launch([&] { group_gemm<U>(a, at); }, dim3((grid.x * grid.y + 1) / 2), GG_THREADS); /* a block has two places */
    } else emu::launch([&] { gemm_block<U>(a); }, grid, 256);
    report(name, same(y, wanted));
}

template <class U> void by_group(const char *name) {
    linear<U>(name, 130, 150, 800, true);
    linear<U>(name, 33, 20, 96, true);
}

/* LINEAR over float weights of many rows, or of few outputs, with a bias and a residual */
static void floats(int rows, int outs, int cols, int type) {
    std::vector<float> x((size_t)rows * cols), bias(outs), y((size_t)rows * outs), wanted(y.size());
    std::vector<uint8_t> w((size_t)outs * cols * 4 + 16);
    uint8_t *at = (uint8_t *)(((uint64_t)w.data() + 15) & ~15ull);
    for (auto *v : {&x, &bias, &y}) for (float &f : *v) f = unit();
    for (size_t i = 0; i < (size_t)outs * cols; i++) {
        const float f = unit();
        const uint16_t half = (uint16_t)(0x2c00 | (random32() & 0x83ff));
        if (type == FLOAT_F32) memcpy(at + 4 * i, &f, 4);
        else memcpy(at + 2 * i, &half, 2);
    }
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < outs; n++) {
            float sum = 0.0f;
            for (int s = 0; s < cols; s += 256) {
                float p = 0.0f;
                for (int c = s; c < min(cols, s + 256); c++) p = fmaf(float_at(type, at, (size_t)n * cols + c), x[(size_t)r * cols + c], p);
                sum = sum + p;
            }
            wanted[(size_t)r * outs + n] = y[(size_t)r * outs + n] + (sum * 0.75f + bias[n]);
        }
    const FloatArgs a = {{at, bias.data(), y.data(), y.data(), 0.75f, outs, 0}, x.data(), type, cols, rows};
    if (outs <= 2 * FEW_OUTS) emu::launch([&] { k_float_few(a); }, dim3((outs + FEW_OUTS - 1) / FEW_OUTS, (rows + FEW_ROWS - 1) / FEW_ROWS), 256);
    else emu::launch([&] { k_linear_float(a); }, dim3((outs + FLOAT_OUTS - 1) / FLOAT_OUTS, (rows + FLOAT_ROWS - 1) / FLOAT_ROWS), 256);
    char name[64];
    snprintf(name, sizeof name, "LINEAR of floats, %d rows, %d outputs, %d columns", rows, outs, cols);
    report(name, same(y, wanted));
}

static double bf16_of(float v) { return (double)__bfloat162float(__float2bfloat16_rn(v)); }

/* LINEAR of the class `fast`, by warps or by warp groups, against sums in f64 of the same rounded factors: what is left is the f32 of the sums */
template <class U> void fast(const char *name, int rows, int outs, int cols, bool groups) {
    Matrices<U> w(1, outs, cols);
    Rows x(rows, cols);
    x.fill(rows);
    const int padded = (rows + FAST_PAD - 1) / FAST_PAD * FAST_PAD, wide = (cols + 127) / 128 * 128;
    std::vector<uint8_t> acts((size_t)padded * wide * 2 + 1024);
    uint8_t *at = (uint8_t *)(((uint64_t)acts.data() + 1023) & ~1023ull);
    std::vector<float> y((size_t)rows * outs, NAN);
    LinearArgs a = {};
    a.part[0] = {(const uint8_t *)w.m.w, NULL, NULL, y.data(), 1.0f, outs, w.m.blocks};
    a.x = x.a;
    a.n_parts = 1; a.blocks = w.m.blocks; a.segs = w.m.segs; a.rows = rows;
    if (groups) {
        emu::launch([&] { wg_acts(x.a, at, padded); }, dim3((wide / 64 + 7) / 8, x.a.ld / 8), 256);
        emu::launch([&] { wg_gemm<U>(a, at, padded); }, dim3((rows + WG_ROWS - 1) / WG_ROWS, (outs + WG_OUTS - 1) / WG_OUTS), WG_THREADS);
    } else {
        emu::launch([&] { fast_acts(x.a, (uint4 *)at, padded / 8); }, dim3((cols / 32 + 7) / 8, padded / 8), 256);
        emu::launch([&] { fast_gemm<U>(a, at, padded); }, dim3((rows + FAST_ROWS - 1) / FAST_ROWS, (outs + 127) / 128), 256);
    }
    double error = 0, size = 0;
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < outs; n++) {
            double sum = 0;
            for (int g = 0; g < cols / 32; g++) {
                const uint8_t *u = w.m.w + ((size_t)(n / 16) * w.m.segs + g / 8) * U::UNIT;
                float sa[2], sb[2];
                U::pair(U::fetch(u + 2 * U::HALF, n % 16, g % 8 >> 1), g % 8 >> 1, sa, sb);
                for (int tig = 0; tig < 4; tig++) {
                    uint32_t c[2];
                    U::unpack(U::template load_pack<true>(u + (g % 8 >> 2) * U::HALF, (g & 3) / U::GP, n % 16 >> 3, (n & 7) * 4 + tig), (g & 3) % U::GP, c[0], c[1]);
                    for (int i = 0; i < 8; i++) {
                        const int b = (int)(c[i >> 2] >> 8 * (i & 3) & 255), zero = U::UNSIGNED ? 32768 : 32896, code = U::UNSIGNED ? b : (int8_t)b;
                        const float s = U::FORM == FORM_S2 && i > 3 ? sb[g & 1] : sa[g & 1], m = U::FORM == FORM_S2 ? 0.0f : sb[g & 1];
                        sum += bf16_of(groups ? fmaf(s, (float)(code + zero), fmaf(s, (float)-zero, m)) : fmaf(s, (float)code, m)) * bf16_of(x.a.delta[(size_t)g * x.a.ld + r] * (float)x.a.q[(size_t)r * cols + g * 32 + tig * 8 + i]);
                    }
                }
            }
            const double d = sum - y[(size_t)r * outs + n];
            error += d * d;
            size += sum * sum;
        }
    report(name, error <= 1e-11 * size);
}
template <class U> void fasts(const char *name) {
    for (int groups = 0; groups < 2; groups++) {
        fast<U>(name, 40, 70, 64, groups);
        fast<U>(name, 150, 130, 544, groups);
        fast<U>(name, 33, 33, 96, groups);
    }
}

int main(int, char **argv) {
    switch (atoi(argv[1])) {
    case 0: units<U_IQ4_XS>("IQ4_XS"); break;
    case 1: units<U_Q4_K>("Q4_K"); break;
    case 2: units<U_NVFP4>("NVFP4"); break;
    case 3: units<U_Q8_0>("Q8_0"); break;
    case 6:
        linear<U_Q4_K>("LINEAR Q4_K", 150, 150, 320);
        linear<U_NVFP4>("LINEAR NVFP4", 40, 33, 288);
        linear<U_Q8_0>("LINEAR Q8_0", 130, 70, 160);
        linear<U_Q4_0>("LINEAR Q4_0", 33, 70, 512);
        linear<U_IQ4_XS>("LINEAR IQ4_XS", 33, 20, 96);
        by_group<U_Q4_K>("LINEAR by groups, Q4_K"); by_group<U_NVFP4>("LINEAR by groups, NVFP4"); by_group<U_Q8_0>("LINEAR by groups, Q8_0"); by_group<U_Q4_0>("LINEAR by groups, Q4_0");
        by_group<U_IQ4_XS>("LINEAR by groups, IQ4_XS"); by_group<U_Q6_K>("LINEAR by groups, Q6_K"); by_group<U_INT8>("LINEAR by groups, INT8");
        break;
    case 8:
        floats(70, 40, 2600, FLOAT_F32);
        floats(33, 5, 301, FLOAT_F32);
        floats(64, 33, 260, FLOAT_F16);
        floats(35, 1, 300, FLOAT_F32);
        break;
    case 7:
        by_pairs<U_IQ4_XS>("EXPERTS by groups, IQ4_XS"); by_pairs<U_Q4_0>("EXPERTS by groups, Q4_0"); by_pairs<U_Q4_K>("EXPERTS by groups, Q4_K");
        by_pairs<U_NVFP4>("EXPERTS by groups, NVFP4"); by_pairs<U_Q8_0>("EXPERTS by groups, Q8_0"); by_pairs<U_Q6_K>("EXPERTS by groups, Q6_K");
        break;
    case 5: fasts<U_IQ4_XS>("IQ4_XS"); fasts<U_Q4_K>("Q4_K"); fasts<U_NVFP4>("NVFP4"); fasts<U_Q8_0>("Q8_0"); fasts<U_Q4_0>("Q4_0"); break;
    default:
        router(2, 512, 40, 6, 1, 1, false);
        router(1, 2048, 256, 8, 1, 1, false);
        router(2, 416, 33, 4, 1, 1, true);
        router(1, 512, 64, 6, 8, 3, true);
        router(1, 512, 300, 5, 1, 1, true);
        router(2, 704, 128, 8, 1, 1, false, true);
    }
    return bad;
}
