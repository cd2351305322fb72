/* The CPU's ATTEND, KV_APPEND and row ops against the reference by memcmp, for every instruction set of this machine; the vector forms
 * of the elementary functions against canon.h. Prints what it ran; exits 1 at the first difference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "cpu/attend.h"
#include "cpu/vecops.h"
#include "ref/attend.h"

static enum cpu_isa isas[4];
static int n_isas;
static const char *const isa_names[] = {"portable", "avx2", "avx-vnni", "avx512-vnni"};
static long checks;

static void find_isas(void) {
    isas[n_isas++] = CPU_PORTABLE;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas[n_isas++] = CPU_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        isas[n_isas++] = CPU_AVX512VNNI;
#endif
}

static uint64_t state = 88172645463325252ull;
static uint32_t bits(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 32);
}
static float uniform(float a, float b) { return a + (b - a) * (float)(bits() >> 8) * 0x1p-24f; }

static void fill(float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) x[i] = scale * (uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1));
}

static void *need(void *p) {
    if (!p) exit(2);
    return p;
}

#define FAIL(...) do { printf("FAIL: " __VA_ARGS__); printf("\n"); exit(1); } while (0)

static void expect(const float *got, const float *want, int64_t n, const char *what, enum cpu_isa isa, int a, int b, int c) {
    checks++;
    if (memcmp(got, want, sizeof(float) * (size_t)n) == 0) return;
    for (int64_t i = 0; i < n; i++)
        if (memcmp(got + i, want + i, 4))
            FAIL("%s %s (%d, %d, %d): value %ld is %a, expected %a", what, isa_names[isa], a, b, c, (long)i, got[i], want[i]);
}

/* ---- elementary functions */
static float scalar(enum cpu_fn f, float x) {
    switch (f) {
    case CPU_FN_EXP: return bw_exp(x);
    case CPU_FN_EXP2: return bw_exp2(x);
    case CPU_FN_SIGMOID: return bw_sigmoid(x);
    case CPU_FN_SILU: return bw_silu(x);
    case CPU_FN_GELU: return bw_gelu(x);
    default: return bw_tanh(x);
    }
}

static const float special[] = {
    0.0f, -0.0f, 1.0f, -1.0f, 0.5f, -0.5f, 1.5f, -1.5f, 0x1p-149f, -0x1p-149f, 0x1p-126f, -0x1p-126f, 65504.0f, -65504.0f,
    3.402823466e38f, -3.402823466e38f, -125.0f, -125.00001f, -124.99999f, 127.0f, 127.00001f, 126.5f, -86.0f, -86.00001f, -85.99999f,
    88.0f, 88.00001f, 87.99999f, 43.0f, -43.0f, 10.0f, -10.0f, 0.34657359f, -0.34657359f, 1e-30f, -1e30f, 126.99999f, 20.0f,
};

/* n arguments: the special ones, then a mix of the usual range and of any finite bit pattern */
static void test_functions(void) {
    enum { N = 1 << 12 };
    static float x[N], want[N], got[N];
    for (int round = 0; round < 600; round++) {
        for (int i = 0; i < N; i++) {
            bw_f32 v = {.u = bits()};
            x[i] = i % 2 && (v.u & 0x7f800000u) != 0x7f800000u ? v.f : uniform(-130, 130) * (i % 8 ? 1.0f : 0.01f);
        }
        if (round == 0) memcpy(x, special, sizeof special);
        for (int f = CPU_FN_EXP; f <= CPU_FN_TANH; f++) {
            for (int i = 0; i < N; i++) want[i] = scalar((enum cpu_fn)f, x[i]);
            for (int k = 0; k < n_isas; k++) {
                cpu_map(isas[k], (enum cpu_fn)f, x, got, N);
                expect(got, want, N, "function", isas[k], f, round, 0);
            }
        }
    }
}

/* ---- row ops */
enum { GUARD = 8 };

/* a guarded row: sentinels must survive */
static float *row_new(int64_t n) {
    float *p = need(malloc(sizeof(float) * (size_t)(n + 2 * GUARD)));
    for (int64_t i = 0; i < n + 2 * GUARD; i++) p[i] = 12345.0f;
    return p + GUARD;
}
static void row_free(float *p, int64_t n) {
    for (int i = 0; i < GUARD; i++)
        if (p[i - GUARD] != 12345.0f || p[n + i] != 12345.0f) FAIL("a row of %ld was overrun", (long)n);
    free(p - GUARD);
}

static void row_op(int op, int ref, enum cpu_isa isa, const float *x, const float *w, float *y, int64_t n) {
    switch (op) {
    case 0: ref ? ref_norm(x, w, y, n, 1e-5f, 0) : cpu_norm(isa, x, w, y, n, 1e-5f, 0); break;
    case 1: ref ? ref_norm(x, NULL, y, n, 1e-6f, 0) : cpu_norm(isa, x, NULL, y, n, 1e-6f, 0); break;
    case 2: ref ? ref_norm(x, w, y, n, 1e-6f, 1) : cpu_norm(isa, x, w, y, n, 1e-6f, 1); break;
    case 3: ref ? ref_glu(BW_ACT_SILU, x, w, y, n) : cpu_glu(isa, BW_ACT_SILU, x, w, y, n); break;
    case 4: ref ? ref_glu(BW_ACT_GELU, x, w, y, n) : cpu_glu(isa, BW_ACT_GELU, x, w, y, n); break;
    case 5: ref ? ref_add(x, w, y, n) : cpu_add(isa, x, w, y, n); break;
    case 6: ref ? ref_scale(x, 0.37f, y, n) : cpu_scale(isa, x, 0.37f, y, n); break;
    default: ref ? ref_softcap(x, 30.0f, y, n) : cpu_softcap(isa, x, 30.0f, y, n); break;
    }
}

static void test_rows(void) {
    static const int sizes[] = {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 300, 576, 640, 1023, 1536, 5120};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int n = sizes[s];
        for (int op = 0; op < 8; op++) {
            float *x = row_new(n), *w = row_new(n), *want = row_new(n), *got = row_new(n);
            fill(x, n, op == 7 ? 40.0f : 3.0f);
            fill(w, n, 1.0f);
            for (int i = 0; i < n && i < (int)(sizeof special / sizeof *special); i++)
                if (op >= 3) x[n - 1 - i] = special[i];
            row_op(op, 1, 0, x, w, want, n);
            for (int k = 0; k < n_isas; k++) {
                row_op(op, 0, isas[k], x, w, got, n);
                expect(got, want, n, "row op", isas[k], op, n, 0);
                memcpy(got, x, sizeof(float) * (size_t)n);
                row_op(op, 0, isas[k], got, w, got, n);
                expect(got, want, n, "row op in place", isas[k], op, n, 0);
            }
            row_free(x, n); row_free(w, n); row_free(want, n); row_free(got, n);
        }
    }
}

static void test_rope(void) {
    static const int shapes[][3] = {{3, 64, 64}, {1, 256, 256}, {2, 128, 64}, {2, 96, 96}, {1, 80, 32},
                                    {2, 20, 14}, {1, 2, 2},     {1, 512, 512}, {2, 32, 24}};
    float ff[256], cs[512];
    for (int i = 0; i < 256; i++) ff[i] = i < 20 ? 1.0f + 0.1f * (float)i : 1e30f;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int heads = shapes[s][0], dim = shapes[s][1], rot = shapes[s][2], n = heads * dim;
        for (int round = 0; round < 8; round++) {
            float *x = row_new(n), *want = row_new(n), *got = row_new(n);
            enum bw_rope_style style = round & 1 ? BW_ROPE_NORM : BW_ROPE_NEOX;
            bw_rope_table(round * 777 + round / 4 * 100000, rot, 10000.0 * (1 + round), round & 2 ? ff : NULL, round & 4 ? 0.125 : 1.0, cs);
            fill(x, n, 2.0f);
            ref_rope(x, want, heads, dim, rot, style, cs);
            for (int k = 0; k < n_isas; k++) {
                cpu_rope(isas[k], x, got, heads, dim, rot, style, cs);
                expect(got, want, n, "rope", isas[k], dim, rot, style);
                memcpy(got, x, sizeof(float) * (size_t)n);
                cpu_rope(isas[k], got, got, heads, dim, rot, style, cs);
                expect(got, want, n, "rope in place", isas[k], dim, rot, style);
            }
            row_free(x, n); row_free(want, n); row_free(got, n);
        }
    }
}

/* the table against sums of angles in long double: cos and sin of (pos * base^(-2i/rot)) */
static void test_rope_table(void) {
    float cs[64], cs2[64];
    bw_rope_table(0, 64, 10000.0, NULL, 1.0, cs);
    for (int i = 0; i < 32; i++)
        if (cs[i] != 1.0f || cs[32 + i] != 0.0f) FAIL("rope table at position 0, pair %d", i);
    for (int64_t pos = 1; pos < 100000; pos = pos * 3 + 1) {
        bw_rope_table(pos, 64, 10000.0, NULL, 1.0, cs);
        for (int i = 0; i < 32; i++) {
            double a = (double)pos * pow(10000.0, -2.0 * i / 64.0);
            if (fabs(cs[i] - cos(a)) > 1e-7 || fabs(cs[32 + i] - sin(a)) > 1e-7) FAIL("rope table at position %ld, pair %d", (long)pos, i);
        }
        bw_rope_table(8 * pos, 64, 10000.0, NULL, 0.125, cs2);
        if (memcmp(cs, cs2, sizeof cs)) FAIL("rope table at position %ld scaled by 1/8", (long)(8 * pos));
        checks++;
    }
}

/* ---- KV and ATTEND */
static const int kv_types[] = {0, 1, 8, 7, 256};
enum { N_KV_TYPES = 5, MAX_PAGES = 16 };

typedef struct cache {
    bw_kv_desc kv;
    int64_t len;
    uint8_t *ref[MAX_PAGES], *cpu[MAX_PAGES];
} cache;

/* values of a key: v_scale > 0 that magnitude; WIDE any exponent; ZEROS -0 and the least negative number, whose products vanish to -0,
 * but 1 for the last key, so that adding +0 for a key that a row may not see shows */
#define WIDE 0.0f
#define ZEROS -1.0f
static void fill_values(float *v, int n, float v_scale, int last) {
    fill(v, n, v_scale > 0 ? v_scale : 1.0f);
    for (int i = 0; i < n && v_scale == WIDE; i++) v[i] = ldexpf(v[i], (int)(bits() % 200) - 100);
    for (int i = 0; i < n && v_scale == ZEROS; i++) v[i] = last ? 1.0f : bits() & 1 ? -0.0f : -0x1p-149f;
}

static cache cache_new(int kt, int vt, int heads, int dim, int64_t len, float scale, float v_scale) {
    cache c = {.kv = {heads, dim, bw_type(kt), bw_type(vt)}, .len = len};
    size_t rb = ref_kv_page_bytes(&c.kv), cb = cpu_kv_page_bytes(&c.kv);
    if (!rb || !cb) FAIL("no page for types %d, %d, dim %d", kt, vt, dim);
    int n = heads * dim;
    float *k = row_new(n), *v = row_new(n);
    for (int64_t j = 0; j < len; j++) {
        if (j % 64 == 0) {
            c.ref[j / 64] = need(malloc(rb));
            c.cpu[j / 64] = need(aligned_alloc(64, cb));
            memset(c.cpu[j / 64], 0xff, cb); /* NaN in the float formats: slots that no one wrote must not matter */
        }
        fill(k, n, scale);
        fill_values(v, n, v_scale, j == len - 1);
        if (j % 7 == 0 && v_scale > 0) memset(v, 0, sizeof(float) * (size_t)(n / 2));
        if (j % 11 == 0) memset(k, 0, sizeof(float) * (size_t)(n / 3));
        if (ref_kv_append(&c.kv, c.ref[j / 64], (int)(j % 64), k, v)) FAIL("reference append");
        if (cpu_kv_append(&c.kv, c.cpu[j / 64], (int)(j % 64), k, v)) FAIL("append");
    }
    row_free(k, n);
    row_free(v, n);
    return c;
}

static void cache_free(cache *c) {
    for (int i = 0; i < MAX_PAGES; i++) {
        free(c->ref[i]);
        free(c->cpu[i]);
    }
}

/* the row in two steps, the pages split in up to three calls */
static void run_pieces(enum cpu_isa isa, const cache *c, int64_t lo, int64_t hi, const float *q, int q_heads, float factor, float *out,
                       void *work) {
    int64_t b0 = lo / 64, b1 = (hi - 1) / 64 + 1, third = (b1 - b0 + 2) / 3;
    float *acc = need(malloc(sizeof(float) * (size_t)(b1 - b0) * (size_t)q_heads * cpu_attend_piece_floats(&c->kv)));
    for (int h = 0; h < c->kv.heads; h++)
        for (int64_t b = b0; b < b1; b += third)
            if (cpu_attend_pieces(isa, &c->kv, c->cpu, b, b + third < b1 ? b + third : b1, lo, hi, q, q_heads, factor, acc, h, h + 1, work))
                FAIL("pieces");
    if (cpu_attend_merge(isa, &c->kv, b1 - b0, acc, q_heads, out, 0, c->kv.heads)) FAIL("merge");
    free(acc);
}

/* rows that end one key apart, the last at the cache's end; window 0: from the first key */
static void attend_case(const cache *c, int rows, int group, int64_t window, float q_scale) {
    int q_heads = c->kv.heads * group, n = q_heads * c->kv.dim, stride = n + 5, types = c->kv.kt->id * 1000 + c->kv.vt->id;
    int64_t all = (int64_t)rows * stride;
    float *q = row_new(all), *want = row_new(all), *got = row_new(all), factor = 0.37f;
    int64_t *lo = need(malloc(sizeof(int64_t) * (size_t)rows)), *hi = need(malloc(sizeof(int64_t) * (size_t)rows));
    void *work = need(malloc(cpu_attend_work(&c->kv, rows, q_heads)));
    for (int r = 0; r < rows; r++) {
        fill(q + r * stride, n, q_scale);
        hi[r] = c->len - (rows - 1 - r) > 0 ? c->len - (rows - 1 - r) : 1;
        lo[r] = window && hi[r] > window ? hi[r] - window : 0;
        if (ref_attend(&c->kv, c->ref, lo[r], hi[r], q + r * stride, q_heads, factor, want + r * stride)) FAIL("reference attend");
    }
    uint8_t *pages[MAX_PAGES];
    memcpy(pages, c->cpu, sizeof pages);
    for (int b = 0; b < lo[0] / 64; b++) pages[b] = NULL;
    for (int k = 0; k < n_isas; k++) {
        memcpy(got, want, sizeof(float) * (size_t)all); /* what lies between the rows */
        for (int r = 0; r < rows; r++) memset(got + r * stride, 0, sizeof(float) * (size_t)n);
        for (int h = 0; h < c->kv.heads; h++)
            if (cpu_attend(isas[k], &c->kv, pages, rows, lo, hi, q, stride, q_heads, factor, got, stride, h, h + 1, work)) FAIL("attend");
        expect(got, want, all, "attend", isas[k], types, c->kv.dim, (int)c->len);
        for (int r = 0; r < rows; r += 8) run_pieces(isas[k], c, lo[r], hi[r], q + r * stride, q_heads, factor, got + r * stride, work);
        expect(got, want, all, "attend by pieces", isas[k], types, c->kv.dim, (int)c->len);
    }
    free(work); free(lo); free(hi);
    row_free(q, all); row_free(want, all); row_free(got, all);
}

static void test_attend(void) {
    static const int dims[] = {32, 64, 80, 96, 128, 256, 512}, lens[] = {1, 63, 64, 65, 130, 700};
    for (int kt = 0; kt < N_KV_TYPES; kt++) {
        for (int vt = 0; vt < N_KV_TYPES; vt++) {
            for (int d = 0; d < 7; d++) {
                bw_kv_desc kv = {2, dims[d], bw_type(kv_types[kt]), bw_type(kv_types[vt]), false};
                if (dims[d] % 32 && (kv.kt->block > 1 || kv.vt->block > 1)) {
                    if (ref_kv_page_bytes(&kv) || cpu_kv_page_bytes(&kv)) FAIL("dim %d taken by a block format", dims[d]);
                    continue;
                }
                for (int l = 0; l < 6; l++) {
                    if (lens[l] == 700 && (kt != vt || dims[d] > 128) && !(kt == 2 && dims[d] == 256)) continue;
                    cache c = cache_new(kv_types[kt], kv_types[vt], 2, dims[d], lens[l], 1.0f, 1.0f);
                    attend_case(&c, 1, 1 + l % 4, 0, 1.0f);
                    attend_case(&c, lens[l] == 700 ? 33 : 1 + (l * 7 + d) % 33, l % 2 ? 3 : 1, l % 3 ? 0 : 50, 1.0f);
                    if (lens[l] == 130) attend_case(&c, 5, 2, 100, 0.2f);
                    if (lens[l] == 130) attend_case(&c, 3, 5, 1, 0.2f);
                    cache_free(&c);
                }
            }
        }
    }
}

/* probabilities and values so small that products vanish with either sign, and scores so large that pieces vanish */
static void test_extremes(void) {
    static const int shapes[][2] = {{0, 0}, {8, 0}, {1, 1}, {7, 7}, {256, 256}};
    for (int s = 0; s < 5; s++) {
        for (int big = 0; big < 4; big++) {
            cache c = cache_new(shapes[s][0], shapes[s][1], 1, 64, 200, big < 3 ? 1.0f : 100.0f, s < 2 ? 1e-38f : 1e-4f);
            attend_case(&c, 9, 3, big & 1 ? 70 : 0, big == 0 ? 10.0f : big == 1 ? 30.0f : 300.0f);
            attend_case(&c, 1, 2, 0, big == 0 ? 10.0f : big == 1 ? 30.0f : 300.0f);
            cache_free(&c);
        }
    }
    for (int i = 0; i < 12; i++) {
        cache c = cache_new(0, 0, 1, 64, 150 + i, 1.0f, i & 1 ? WIDE : ZEROS);
        attend_case(&c, 8, 3, i & 2 ? 70 : 0, i < 4 ? 10.0f : i < 8 ? 30.0f : 100.0f);
        cache_free(&c);
    }
}

/* a long prefill chunk: several blocks of queries and many heads on one KV head */
static void test_blocks(void) {
    for (int kt = 0; kt < N_KV_TYPES; kt++) {
        cache c = cache_new(kv_types[kt], kv_types[(kt + 2) % N_KV_TYPES], 1, 64, 300, 1.0f, 1.0f);
        attend_case(&c, 300, 1, 0, 1.0f);
        attend_case(&c, 140, 4, 77, 1.0f);
        attend_case(&c, 3, 130, 0, 1.0f);
        cache_free(&c);
    }
}

/* the reference itself against softmax in f64 over the same f32 values */
static void test_reference(void) {
    enum { D = 64, N = 150 };
    cache c = cache_new(0, 0, 1, D, N, 1.0f, 1.0f);
    float q[D], out[D];
    for (int round = 0; round < 20; round++) {
        double p[N], top = -1e300, sum = 0;
        fill(q, D, 1.0f);
        for (int j = 0; j < N; j++) {
            const float *k = (const float *)c.ref[j / 64] + (j % 64) * D;
            p[j] = 0;
            for (int d = 0; d < D; d++) p[j] += (double)k[d] * (double)q[d] * 0.125;
            top = p[j] > top ? p[j] : top;
        }
        for (int j = 0; j < N; j++) sum += p[j] = exp(p[j] - top);
        if (ref_attend(&c.kv, c.ref, 0, N, q, 1, (float)(0.125 * 1.4426950408889634), out)) FAIL("reference attend");
        for (int d = 0; d < D; d++) {
            double want = 0;
            for (int j = 0; j < N; j++) want += p[j] / sum * (double)((const float *)c.ref[j / 64] + (64 + j % 64) * D)[d];
            if (fabs(out[d] - want) > 2e-6) FAIL("reference attend: %g, expected %g", (double)out[d], want);
        }
        checks++;
    }
    cache_free(&c);
}

/* the KV quantisers: error within half a step (and the f16 rounding of the step) */
static void test_quantisers(void) {
    static const float tol[] = {0.0f, 0x1p-11f, 0.0f, 0.0f, 0x1p-4f};
    float x[32], y[32];
    uint8_t bytes[128];
    for (int round = 0; round < 4000; round++) {
        float amax = 0, lo = 1e30f, hi = -1e30f;
        fill(x, 32, ldexpf(1.0f, (int)(bits() % 12) - 8));
        for (int i = 0; i < 32; i++) {
            amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
            lo = x[i] < lo ? x[i] : lo;
            hi = x[i] > hi ? x[i] : hi;
        }
        for (int t = 0; t < N_KV_TYPES; t++) {
            const bw_type_info *info = bw_type(kv_types[t]);
            if (ref_kv_encode(info, x, 32, bytes)) FAIL("encode %s", info->name);
            for (int i = 0; i < 32; i += info->block) info->decode(bytes + i / info->block * info->bytes, y + i);
            for (int i = 0; i < 32; i++) {
                float e = fabsf(x[i] - y[i]), bound = tol[t] * fabsf(x[i]) + (t == 4 ? 0x1p-10f : 0x1p-25f);
                if (info->id == 8) bound = amax / 254 + amax * 0x1p-11f + 0x1p-18f;
                if (info->id == 7) bound = (hi - lo) / 62 + (hi - lo) * 0x1p-11f + amax * 0x1p-11f + 0x1p-18f;
                if (e > bound) FAIL("%s: %g read back as %g", info->name, (double)x[i], (double)y[i]);
            }
            checks++;
        }
    }
}

/* what must be refused, by the reference and by every kernel */
static void test_faults(void) {
    enum { D = 64 };
    float k[D], v[D], q[D], out[D];
    for (int t = 0; t < N_KV_TYPES; t++) {
        cache c = cache_new(kv_types[t], kv_types[t], 1, D, 70, 1.0f, 1.0f);
        void *work = need(malloc(cpu_attend_work(&c.kv, 1, 1)));
        const float bad[] = {INFINITY, -INFINITY, NAN, 1e30f, 3e38f};
        for (int b = 0; b < 5; b++) {
            fill(k, D, 1.0f);
            fill(v, D, 1.0f);
            (b & 1 ? k : v)[37] = bad[b];
            (b & 1 ? k : v)[38] = -bad[b];
            int want = b < 3 || (t != 0 && t != 4); /* f32 holds it, e4m3 saturates */
            if (!!ref_kv_append(&c.kv, c.ref[1], 10, k, v) != want) FAIL("reference append of %g, type %d", (double)bad[b], kv_types[t]);
            if (!!cpu_kv_append(&c.kv, c.cpu[1], 10, k, v) != want) FAIL("append of %g, type %d", (double)bad[b], kv_types[t]);
        }
        for (int i = 0; i < n_isas; i++) {
            for (int b = 0; b < 3; b++) {
                int64_t lo = 3, hi = 70;
                fill(q, D, 1.0f);
                q[5] = bad[b];
                if (!ref_attend(&c.kv, c.ref, lo, hi, q, 1, 1.0f, out)) FAIL("reference attend took %g", (double)bad[b]);
                if (!cpu_attend(isas[i], &c.kv, c.cpu, 1, &lo, &hi, q, D, 1, 1.0f, out, D, 0, 1, work))
                    FAIL("attend took %g", (double)bad[b]);
                q[5] = 1.0f;
                hi = 3;
                if (!cpu_attend(isas[i], &c.kv, c.cpu, 1, &lo, &hi, q, D, 1, 1.0f, out, D, 0, 1, work)) FAIL("attend took an empty range");
                checks += 3;
            }
        }
        free(work);
        cache_free(&c);
    }
    bw_kv_desc odd = {1, 64, bw_type(2), bw_type(0), false};
    if (ref_kv_page_bytes(&odd) || cpu_kv_page_bytes(&odd)) FAIL("q4_0 taken as a KV format");
}

int main(void) {
    find_isas();
    test_functions();
    test_rows();
    test_rope();
    test_rope_table();
    test_quantisers();
    test_reference();
    test_faults();
    test_extremes();
    test_blocks();
    test_attend();
    printf("cpu attend and row ops: %ld comparisons equal, instruction sets:", checks);
    for (int k = 0; k < n_isas; k++) printf(" %s", isa_names[isas[k]]);
    printf("\n");
    return 0;
}
