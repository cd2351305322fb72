/* Timed steps; included by orders.cu */
__global__ void fill_words(uint32_t *p, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = (uint32_t)(bw_mix64(i + ((uint64_t)seed << 40)) >> 20);
}
/* scales of every unit: f16 of about 0.002 in each 16-bit word, UE4M3 or int8 bytes left random where the type has them */
__global__ void fill_scales(uint8_t *w, size_t units, int ub, int at, int type) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < units * 16; i += (size_t)gridDim.x * blockDim.x) {
        uint8_t *row = w + i / 16 * ub + at + i % 16 * 16;
        uint16_t d = (uint16_t)(0x1800 + bw_mix64(i) % 0x400);
        if (type == 0 || type == 3) for (int k = 0; k < 8; k++) ((uint16_t *)row)[k] = d;
        else if (type == 1) for (int k = 0; k < 16; k++) row[k] = (uint8_t)(0x10 + (bw_mix64(i) >> k) % 16);
        else if (type == 2) { ((uint16_t *)row)[0] = d - 0x1400; ((uint16_t *)row)[1] = d - 0x1400; }
        else *(uint16_t *)(w + i / 16 * ub + at + 256 + i % 16 * 2) = (uint16_t)(d - 0x1400);
    }
}
__global__ void __launch_bounds__(512) read_all(const uint4 *p, size_t n, uint32_t *o) {
    uint32_t a = 0;
    for (size_t i = blockIdx.x * 512 + threadIdx.x; i + 7 * (size_t)gridDim.x * 512 < n; i += 8 * (size_t)gridDim.x * 512) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = ld_stream(p + i + k * (size_t)gridDim.x * 512);
#pragma unroll
        for (int k = 0; k < 8; k++) a ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (a == 0x12345678) *o = a;
}
static void measure_wall() {
    size_t n = (size_t)4 << 30;
    uint4 *p = (uint4 *)dev<uint8_t>(n);
    uint32_t *o = dev<uint32_t>(1);
    fill_words<<<1024, 256>>>((uint32_t *)p, n / 4, 7);
    double t = timed([&](cudaStream_t s) { read_all<<<132 * 4, 512, 0, s>>>(p, n / 16, o); });
    wall = n / t / 1e9;
    row(fmt("{\"what\":\"wall\",\"gb_s\":%.0f}", wall));
    cudaFree(p);
}

struct Shape { const char *name; int dim, ff, qkv, vocab, layers; };
static const Shape shapes[] = {{"9B", 4096, 12288, 12288, 248320, 32}, {"27B", 5120, 17408, 12288, 151936, 24}};
struct Model { Shape s; int type; size_t params; uint8_t *base; std::vector<uint8_t *> qkv, o, gu, dn; uint8_t *head; };
static size_t matrix_bytes(int type, int n, int cols) { return (size_t)(n + 15) / 16 * ((cols + 255) / 256) * unit_bytes(type); }
static Model make_model(Shape s, int type) {
    Model m = {s, type, 0, nullptr, {}, {}, {}, {}, nullptr};
    size_t q = matrix_bytes(type, s.qkv, s.dim), o = matrix_bytes(type, s.dim, s.dim), g = matrix_bytes(type, 2 * s.ff, s.dim), d = matrix_bytes(type, s.dim, s.ff);
    size_t total = s.layers * (q + o + g + d) + matrix_bytes(type, s.vocab, s.dim);
    m.params = s.layers * ((size_t)s.qkv * s.dim + (size_t)s.dim * s.dim + 3ull * s.ff * s.dim);
    m.base = dev<uint8_t>(total);
    fill_words<<<2048, 256>>>((uint32_t *)m.base, total / 4, type + 1);
    fill_scales<<<2048, 256>>>(m.base, total / unit_bytes(type), unit_bytes(type), 2 * type_half[type], type);
    uint8_t *p = m.base;
    for (int i = 0; i < s.layers; i++) { m.qkv.push_back(p); p += q; m.o.push_back(p); p += o; m.gu.push_back(p); p += g; m.dn.push_back(p); p += d; }
    m.head = p;
    return m;
}

struct Buffers { float *x, *x2, *nw, *y, *zero; Acts a, h, f; };
static Buffers buffers(const Shape &s, int rows, size_t ywidth) {
    Rng r = {5};
    Buffers b; b.x = up(random_rows(rows, s.dim, r)); b.x2 = dev<float>((size_t)rows * s.dim); b.nw = up(std::vector<float>(s.dim, 1.0f));
    b.y = dev<float>((size_t)rows * ywidth); b.zero = dev<float>((size_t)std::min(rows, 8) * s.vocab, 0); b.a = acts(rows, s.dim); b.h = acts(rows, s.qkv); b.f = acts(rows, s.ff);
    return b;
}
static void release(Buffers &b) { cudaFree(b.x); cudaFree(b.x2); cudaFree(b.nw); cudaFree(b.y); cudaFree(b.zero); release(b.a); release(b.h); release(b.f); }

/* one decode or verify step without attention: 6 kernels a layer; parts leaves out norms (bit 0) to see their price */
template <class U, int R> static void decode_step(const Model &m, Buffers &b, int rows, int most, int parts, cudaStream_t s) {
    const Shape &h = m.s;
    int S = (h.dim + 255) / 256, SF = (h.ff + 255) / 256;
    Acts o_in = b.h; o_in.cols = h.dim;
    NormArgs n1 = {b.x, b.nw, b.a, h.dim, 1e-6f}, n2 = {b.x2, b.nw, b.a, h.dim, 1e-6f};
    for (int i = 0; i < h.layers; i++) {
        if (parts & 1) norm(n1, rows, s);
        small<U, R, 2, EPI_QUANT>({m.qkv[i], b.a, b.h, nullptr, nullptr, h.qkv, rows, S}, s, most);
        small<U, R, 2, EPI_ADD>({m.o[i], o_in, {}, b.x, b.x2, h.dim, rows, S}, s, most);
        if (parts & 1) norm(n2, rows, s);
        small<U, R, 4, EPI_GLU>({m.gu[i], b.a, b.f, nullptr, nullptr, 2 * h.ff, rows, S}, s, most);
        small<U, R, 2, EPI_ADD>({m.dn[i], b.f, {}, b.x2, b.x, h.dim, rows, SF}, s, most);
    }
    if (parts & 1) norm(n1, rows, s);
    small<U, R, 2, EPI_ADD>({m.head, b.a, {}, b.zero, b.y, h.vocab, rows, S}, s, most);
}
template <class U, int R> static double decode_row(const Model &m, int rows, int most, int parts) {
    Buffers b = buffers(m.s, rows, m.s.vocab);
    double t = timed([&](cudaStream_t s) { decode_step<U, R>(m, b, rows, most, parts, s); });
    double gb = ((double)m.params + (double)m.s.vocab * m.s.dim) * type_bits[m.type] / 8e9;
    row(fmt("{\"what\":\"step\",\"shape\":\"%s\",\"type\":\"%s\",\"rows\":%d,\"slots\":%d,\"most_warps\":%d,\"ring_kb\":%d,\"norms\":%d,\"us\":%.1f,\"gb\":%.3f,\"wall_pct\":%.1f}",
            m.s.name, type_name[m.type], rows, R, most, ring_kb, parts & 1, t * 1e6, gb, gb / t / wall * 100));
    release(b);
    return t;
}
template <class U> static void decode_type(const Shape &s, int type, bool all) {
    Model m = make_model(s, type);
    decode_row<U, 1>(m, 1, 16, 1);
    decode_row<U, 1>(m, 1, 16, 0);
    decode_row<U, 8>(m, 8, 12, 1);
    decode_row<U, 8>(m, 8, 16, 1);
    if (all) {
        decode_row<U, 2>(m, 2, 16, 1);
        decode_row<U, 4>(m, 4, 16, 1);
        decode_row<U, 8>(m, 5, 16, 1);
        decode_row<U, 8>(m, 8, 16, 0);
    }
    cudaFree(m.base);
}
static void profile_one() {
    Shape s = shapes[0]; s.layers = 2;
    Model m = make_model(s, T_Q4_0), v = make_model(s, T_NVFP4);
    Buffers b = buffers(s, 8, s.vocab);
    decode_step<U_Q4_0, 1>(m, b, 1, 16, 1, 0);
    decode_step<U_Q4_0, 8>(m, b, 8, 16, 1, 0);
    decode_step<U_NVFP4, 1>(v, b, 1, 16, 1, 0);
    CK(cudaDeviceSynchronize());
}
static void decode_all() {
    decode_type<U_Q4_0>(shapes[0], T_Q4_0, true); decode_type<U_NVFP4>(shapes[0], T_NVFP4, true); decode_type<U_Q4_K>(shapes[0], T_Q4_K, true);
    decode_type<U_Q8_0>(shapes[0], T_Q8_0, false); decode_type<U_Q6_K>(shapes[0], T_Q6_K, false);
    decode_type<U_Q4_0>(shapes[1], T_Q4_0, false); decode_type<U_NVFP4>(shapes[1], T_NVFP4, false);
}

template <class U> static void prefill_type(const Shape &s, int type, int rows) {
    Model m = make_model(s, type);
    Buffers b = buffers(s, rows, 2 * s.ff);
    int S = (s.dim + 255) / 256, SF = (s.ff + 255) / 256, layers = 8;
    auto step = [&](cudaStream_t st, bool glue) {
        Acts o_in = b.h; o_in.cols = s.dim;
        NormArgs n1 = {b.x, b.nw, b.a, s.dim, 1e-6f}, n2 = {b.x2, b.nw, b.a, s.dim, 1e-6f};
        for (int i = 0; i < layers; i++) {
            if (glue) norm(n1, rows, st);
            gemm<U, false>({m.qkv[i], b.a, {}, nullptr, b.y, s.qkv, rows, S}, st);
            if (glue) launch(k_quant<false>, dim3((s.qkv / 32 + 7) / 8, rows), 256, 0, st, (const float *)b.y, b.h, s.qkv);
            gemm<U, true>({m.o[i], o_in, {}, b.x, b.x2, s.dim, rows, S}, st);
            if (glue) norm(n2, rows, st);
            gemm<U, false>({m.gu[i], b.a, {}, nullptr, b.y, 2 * s.ff, rows, S}, st);
            if (glue) launch(k_quant<true>, dim3((s.ff / 32 + 7) / 8, rows), 256, 0, st, (const float *)b.y, b.f, s.ff);
            gemm<U, true>({m.dn[i], b.f, {}, b.x2, b.x, s.dim, rows, SF}, st);
        }
    };
    double t = timed([&](cudaStream_t st) { step(st, true); }, 1, 5) * s.layers / layers, tg = timed([&](cudaStream_t st) { step(st, false); }, 1, 5) * s.layers / layers;
    row(fmt("{\"what\":\"prefill\",\"shape\":\"%s\",\"type\":\"%s\",\"rows\":%d,\"ms\":%.2f,\"tok_s\":%.0f,\"gemm_ms\":%.2f,\"gemm_tok_s\":%.0f,\"gemm_tops\":%.0f}", s.name,
            type_name[type], rows, t * 1e3, rows / t, tg * 1e3, rows / tg, 2.0 * m.params * rows / tg / 1e12));
    release(b);
    cudaFree(m.base);
}
static void prefill_all() {
    prefill_type<U_Q4_0>(shapes[0], T_Q4_0, 2048); prefill_type<U_Q4_0>(shapes[0], T_Q4_0, 512); prefill_type<U_NVFP4>(shapes[0], T_NVFP4, 2048);
    prefill_type<U_Q4_K>(shapes[0], T_Q4_K, 2048); prefill_type<U_Q8_0>(shapes[0], T_Q8_0, 2048); prefill_type<U_Q6_K>(shapes[0], T_Q6_K, 2048);
    prefill_type<U_Q4_0>(shapes[1], T_Q4_0, 2048);
}

/* decode attention of `layers` layers over separate caches, with the merge and the quantised result */
template <KvFormat K, KvFormat V, int D, int H> static void attend_row(const char *name, int kvh, int keys) {
    int heads = kvh * H, pieces = (keys + 63) / 64;
    size_t bytes = (size_t)kvh * pieces * (kv_bytes(K, D) + kv_bytes(V, D));
    int layers = (int)std::max<size_t>(8, (256u << 20) / bytes);
    uint8_t *kv = dev<uint8_t>(bytes * layers);
    fill_words<<<2048, 256>>>((uint32_t *)kv, bytes * layers / 4, 3);
    if (K == KV_Q8_0 || V != KV_E4M3) CK(cudaMemset(kv, 0x11, bytes * layers)); /* finite scales */
    Rng r = {9};
    AttendArgs a = {};
    a.q = acts(heads, D); a.qf = up(random_rows(heads, D, r)); a.o = dev<float>((size_t)pieces * heads * D); a.nl = dev<float2>((size_t)pieces * heads);
    a.yo = acts(1, heads * D); a.kv_heads = kvh; a.keys = keys; a.pieces = pieces; a.scale = 0.1f;
    quantise_device(a.qf, a.q, heads, D);
    auto run = [&](cudaStream_t s, bool merge) {
        for (int i = 0; i < layers; i++) {
            a.pages = kv + bytes * i;
            launch(k_attend<K, V, D, H>, dim3(a.pieces, a.kv_heads), D / 4, attend_shared<K, V, D, H>(), s, a);
            if (merge) launch(k_attend_merge<D>, dim3(heads * D / 32), 32, 0, s, a, heads);
        }
    };
    double t = timed([&](cudaStream_t s) { run(s, true); }), t0 = timed([&](cudaStream_t s) { run(s, false); });
    row(fmt("{\"what\":\"attend\",\"kv\":\"%s\",\"head_dim\":%d,\"gqa\":%d,\"kv_heads\":%d,\"keys\":%d,\"us_layer\":%.2f,\"us_pieces\":%.2f,\"mb\":%.2f,\"wall_pct\":%.1f}", name, D, H, kvh, keys,
            t / layers * 1e6, t0 / layers * 1e6, bytes / 1e6, bytes * layers / t / 1e9 / wall * 100));
    cudaFree(kv); cudaFree(a.o); cudaFree(a.nl); release(a.q); release(a.yo);
}
static void attend_all() {
    for (int keys : {4096, 32768}) {
        attend_row<KV_Q8_0, KV_Q5_1, 256, 4>("q8_0/q5_1", 4, keys); attend_row<KV_F16, KV_F16, 256, 4>("f16", 4, keys); attend_row<KV_E4M3, KV_E4M3, 256, 4>("e4m3", 4, keys);
        attend_row<KV_Q8_0, KV_Q5_1, 128, 8>("q8_0/q5_1", 8, keys); attend_row<KV_F16, KV_F16, 128, 8>("f16", 8, keys); attend_row<KV_E4M3, KV_E4M3, 128, 8>("e4m3", 8, keys);
        attend_row<KV_Q8_0, KV_Q5_1, 256, 8>("q8_0/q5_1", 2, keys); attend_row<KV_Q8_0, KV_Q5_1, 128, 4>("q8_0/q5_1", 8, keys);
    }
}
