/* Bit equality with reference.h; included by orders.cu */
struct Matrix { int type, n, cols, segs; std::vector<Group> w; uint8_t *units; };
static Matrix make_matrix(int type, int n, int cols, Rng &r) {
    Matrix m = {type, n, cols, (cols + 255) / 256, {}, nullptr};
    size_t ub = unit_bytes(type), stride = m.segs * 8, tiles = (n + 15) / 16;
    std::vector<uint8_t> u(tiles * m.segs * ub);
    m.w.resize(tiles * 16 * stride);
    for (size_t t = 0; t < tiles; t++)
        for (int s = 0; s < m.segs; s++)
            make_unit(type, &u[(t * m.segs + s) * ub], &m.w[t * 16 * stride + s * 8], stride, std::min(8, cols / 32 - s * 8), r);
    m.units = up(u);
    return m;
}
static void report(const char *name, const char *type, int rows, int n, int cols, bool ok) {
    if (!ok) failures++;
    if (!ok || rows == 1 || rows > 8) row(fmt("{\"what\":\"check\",\"op\":\"%s\",\"type\":\"%s\",\"rows\":%d,\"n\":%d,\"cols\":%d,\"bit_equal\":%s}", name, type, rows, n, cols, ok ? "true" : "false"));
}
static std::vector<float> random_rows(int rows, int cols, Rng &r) {
    std::vector<float> x((size_t)rows * cols);
    for (auto &v : x) v = r.normal();
    for (int i = 0; i < 32 && i < cols; i++) x[i] = 0.0f; /* a zero group */
    return x;
}
static void quantise_device(const float *x, Acts a, int rows, int n) { launch(k_quant<false>, dim3((n / 32 + 7) / 8, rows), 256, 0, 0, x, a, n); }

template <class U> static void check_linear(int type, int n, int cols) {
    Rng r = {(uint64_t)(type * 131 + cols)};
    Matrix m = make_matrix(type, n, cols, r);
    const int most = 150;
    std::vector<float> x = random_rows(most, cols, r), want((size_t)most * n);
    for (int i = 0; i < most; i++) {
        QuantRow q = ref_quantise(&x[(size_t)i * cols], cols);
        for (int o = 0; o < n; o++) want[(size_t)i * n + o] = ref_linear(&m.w[(size_t)o * m.segs * 8], type_form[type], q, cols);
    }
    float *dx = up(x), *y = dev<float>((size_t)most * n), *res = dev<float>((size_t)most * n, 0);
    for (int rows : {1, 2, 3, 4, 5, 8, 33, 150}) {
        Acts a = acts(rows, cols), xo = acts(rows, n / 2), xq = acts(rows, n);
        quantise_device(dx, a, rows, cols);
        LinearArgs la = {m.units, a, xq, res, y, n, rows, m.segs};
        auto same = [&](const char *op) {
            CK(cudaDeviceSynchronize());
            std::vector<float> got = down(y, (size_t)rows * n);
            report(op, type_name[type], rows, n, cols, !memcmp(got.data(), want.data(), got.size() * 4));
            CK(cudaMemset(y, 0xff, (size_t)most * n * 4));
        };
        auto same_quant = [&](const char *op, Acts o, bool glu) {
            CK(cudaDeviceSynchronize());
            int w = o.cols; bool ok = true;
            std::vector<int8_t> q = down(o.q, (size_t)o.ld * w); std::vector<float> d = down(o.delta, (size_t)o.ld * w / 32), s = down(o.sum, (size_t)o.ld * w / 32);
            for (int i = 0; i < rows; i++) {
                std::vector<float> v(want.begin() + (size_t)i * n, want.begin() + (size_t)i * n + w);
                if (glu) for (int k = 0; k < w; k++) v[k] = bw_silu(v[k]) * want[(size_t)i * n + w + k];
                QuantRow e = ref_quantise(v.data(), w);
                for (int g = 0; g < w / 32; g++) {
                    ok &= !memcmp(&d[(size_t)g * o.ld + i], &e.d[g], 4) && s[(size_t)g * o.ld + i] == e.a[g];
                    for (int c = 0; c < 32; c++) { int wd = c >> 2; ok &= q[(size_t)i * w + g * 32 + (wd < 4 ? 2 * wd : 2 * wd - 7) * 4 + (c & 3)] == e.q[g * 32 + c]; }
                }
            }
            report(op, type_name[type], rows, n, cols, ok);
        };
        if (rows <= 8) {
            if (rows <= 1) { small<U, 1, 2, EPI_ADD>(la, 0); same("linear R1"); small_launch<U, 1, 2, EPI_ADD, false>(la, 0, 16); same("linear R1 direct"); }
            if (rows <= 2) { small<U, 2, 2, EPI_ADD>(la, 0); same("linear R2"); }
            if (rows <= 4) { small<U, 4, 2, EPI_ADD>(la, 0); same("linear R4"); }
            small<U, 8, 2, EPI_ADD>(la, 0, 12); same("linear R8");
            small_launch<U, 8, 2, EPI_ADD, false>(la, 0, 7); same("linear R8 direct");
            small<U, 8, 2, EPI_QUANT>(la, 0); same_quant("linear+quant R8", xq, false);
            la.xo = xo; small<U, 8, 4, EPI_GLU>(la, 0); same_quant("linear+glu R8", xo, true);
            if (rows == 1) { small<U, 1, 4, EPI_GLU>(la, 0); same_quant("linear+glu R1", xo, true); }
        } else { gemm<U, false>(la, 0); same("gemm"); gemm<U, true>(la, 0); same("gemm+add"); }
        release(a); release(xo); release(xq);
    }
    cudaFree(m.units); cudaFree(dx); cudaFree(y); cudaFree(res);
}

static void check_norm(int n) {
    Rng r = {(uint64_t)n};
    std::vector<float> x = random_rows(3, n, r), w = random_rows(1, n, r), y(n);
    Acts a = acts(3, n);
    NormArgs na = {up(x), up(w), a, n, 1e-6f};
    norm(na, 3, 0);
    CK(cudaDeviceSynchronize());
    std::vector<int8_t> q = down(a.q, (size_t)a.ld * n); std::vector<float> d = down(a.delta, (size_t)a.ld * n / 32);
    bool ok = true;
    for (int i = 0; i < 3; i++) {
        ref_norm(&x[(size_t)i * n], w.data(), n, 1e-6f, y.data());
        QuantRow e = ref_quantise(y.data(), n);
        for (int c = 0; c < n; c++) { int wd = (c & 31) >> 2; ok &= q[(size_t)i * n + (c & ~31) + (wd < 4 ? 2 * wd : 2 * wd - 7) * 4 + (c & 3)] == e.q[c]; }
        for (int g = 0; g < n / 32; g++) ok &= !memcmp(&d[(size_t)g * a.ld + i], &e.d[g], 4);
    }
    report("norm", "F32", 9, n, n, ok);
}

/* random pages of one format pair and their decoded values */
struct Cache { std::vector<uint8_t> bytes; std::vector<float> k, v; std::vector<Group> kg; };
static float e4m3_float(int c) { int E = (c >> 3) & 15, m = c & 7; float v = E ? ldexpf(1.0f + m / 8.0f, E - 7) : ldexpf((float)m, -9); return c & 128 ? -v : v; }
static Cache make_cache(KvFormat kf, KvFormat vf, int D, int kvh, int keys, Rng &r) {
    int pieces = (keys + 63) / 64, kb = kv_bytes(kf, D), vb = kv_bytes(vf, D);
    Cache c; c.bytes.assign((size_t)kvh * pieces * (kb + vb), 0); c.k.resize((size_t)kvh * pieces * 64 * D); c.v = c.k; c.kg.resize(c.k.size() / 32);
    for (int p = 0; p < kvh * pieces; p++)
        for (int j = 0; j < 64; j++)
            for (int d = 0; d < D; d++) {
                uint8_t *k = &c.bytes[(size_t)p * (kb + vb)], *v = k + kb;
                size_t at = ((size_t)p * 64 + j) * D + d; Group &g = c.kg[at / 32];
                if (kf == KV_Q8_0) {
                    if (!(d & 31)) { uint16_t h = rand_half(r, false); memcpy(k + 64 * D + (j * (D / 32) + d / 32) * 2, &h, 2); g.s[0] = half_float(h); }
                    int wd = (d & 31) >> 2, q = (int)(r.next() % 255) - 127; g.q[d & 31] = (int8_t)q;
                    k[j * D + (d & ~31) + (wd < 4 ? 2 * wd : 2 * wd - 7) * 4 + (d & 3)] = (uint8_t)q;
                } else if (kf == KV_F16) { uint16_t h = rand_half(r, true); h += 0x1400; memcpy(k + ((size_t)j * D + d) * 2, &h, 2); c.k[at] = half_float(h); }
                else { int q = r.next() % 0x40 + (r.next() & 128); k[j * D + d] = (uint8_t)q; c.k[at] = e4m3_float(q); }
                if (vf == KV_Q5_1) {
                    uint8_t *dm = v + 64 * D * 5 / 8 + (j * (D / 32) + d / 32) * 4;
                    if (!(d & 31)) { uint16_t a = rand_half(r, false), b = rand_half(r, true); memcpy(dm, &a, 2); memcpy(dm + 2, &b, 2); }
                    uint16_t a, b; memcpy(&a, dm, 2); memcpy(&b, dm + 2, 2);
                    int q = r.next() & 31; c.v[at] = fmaf(half_float(a), (float)q, half_float(b));
                    v[j * (D / 2) + d / 2] |= (uint8_t)((q & 15) << (4 * (d & 1))); v[64 * D / 2 + j * (D / 8) + d / 8] |= (uint8_t)((q >> 4) << (d & 7));
                } else if (vf == KV_F16) { uint16_t h = rand_half(r, true); h += 0x1800; memcpy(v + ((size_t)j * D + d) * 2, &h, 2); c.v[at] = half_float(h); }
                else { int q = r.next() % 0x40 + (r.next() & 128); v[j * D + d] = (uint8_t)q; c.v[at] = e4m3_float(q); }
            }
    return c;
}
template <KvFormat K, KvFormat V, int D, int H> static void attend(AttendArgs a, cudaStream_t s) {
    launch(k_attend<K, V, D, H>, dim3(a.pieces, a.kv_heads), D / 4, attend_shared<K, V, D, H>(), s, a);
    launch(k_attend_merge<D>, dim3(a.kv_heads * H * D / 32), 32, 0, s, a, a.kv_heads * H);
}
template <KvFormat K, KvFormat V, int D, int H> static void check_attend(const char *name, int keys) {
    Rng r = {(uint64_t)keys + D};
    const int kvh = 2, heads = kvh * H, pieces = (keys + 63) / 64;
    Cache c = make_cache(K, V, D, kvh, keys, r);
    std::vector<float> q = random_rows(heads, D, r), want((size_t)heads * D);
    float scale = (1.0f / sqrtf((float)D)) * 1.44269504f;
    for (int h = 0; h < heads; h++) {
        QuantRow qq = ref_quantise(&q[(size_t)h * D], D);
        std::vector<float> u(keys);
        size_t base = (size_t)(h / H) * pieces * 64;
        for (int j = 0; j < keys; j++) {
            float y = 0, p = 0;
            if (K == KV_Q8_0) y = ref_linear(&c.kg[(base + j) * D / 32], R_S1, qq, D);
            else for (int d = 0; d < D; d++) { p = fmaf(c.k[(base + j) * D + d], q[(size_t)h * D + d], p); if ((d & 255) == 255 || d == D - 1) { y = y + p; p = 0; } }
            u[j] = y * scale;
        }
        ref_attend(u, &c.v[base * D], keys, D, &want[(size_t)h * D]);
    }
    AttendArgs a = {};
    a.q = acts(heads, D); a.qf = up(q); a.pages = up(c.bytes); a.o = dev<float>((size_t)pieces * heads * D); a.nl = dev<float2>((size_t)pieces * heads);
    a.y = dev<float>((size_t)heads * D); a.kv_heads = kvh; a.keys = keys; a.pieces = pieces; a.scale = scale;
    quantise_device(a.qf, a.q, heads, D);
    attend<K, V, D, H>(a, 0);
    CK(cudaDeviceSynchronize());
    std::vector<float> got = down(a.y, (size_t)heads * D);
    report(name, "attend", 9, keys, D, !memcmp(got.data(), want.data(), got.size() * 4));
}

static void check_all() {
    for (int cols : {256, 576, 4096, 5120}) {
        check_linear<U_Q4_0>(T_Q4_0, 192, cols); check_linear<U_NVFP4>(T_NVFP4, 192, cols); check_linear<U_Q4_K>(T_Q4_K, 192, cols);
        check_linear<U_Q8_0>(T_Q8_0, 192, cols); check_linear<U_Q6_K>(T_Q6_K, 192, cols);
    }
    for (int n : {576, 4096, 5120, 12288}) check_norm(n);
    check_attend<KV_Q8_0, KV_Q5_1, 256, 8>("q8_0/q5_1 g8", 1000); check_attend<KV_Q8_0, KV_Q5_1, 128, 4>("q8_0/q5_1 g4", 3000);
    check_attend<KV_F16, KV_F16, 256, 4>("f16 g4", 130); check_attend<KV_F16, KV_F16, 128, 8>("f16 g8", 64);
    check_attend<KV_E4M3, KV_E4M3, 256, 8>("e4m3 g8", 65); check_attend<KV_E4M3, KV_E4M3, 128, 4>("e4m3 g4", 2500);
}
