/* LINEAR of many rows on sm_90a: the program of op_gemm.cuh, hence the same bits, with the products by warp-group instructions. A block has 128 outputs x 128
 * rows: two warp groups of 64 outputs each, in two chunks of 64 rows; a warp of the third group asks for what the rings take. Codes of weights and activations
 * are small integers, which f16 holds exactly, and so is a group's sum in f32 (below 2^24 of its last place): it comes as a float and needs no conversion.
 * While a chunk of a group is folded, the other one is multiplied. Owns the order of the f16 activations; knows no launch.
 *
 * Activations: [128 rows][64 columns] as 128 rows of 128 bytes, the 16-byte places of a row swapped by row % 8 (the instruction's 128-byte swizzle), then
 * scales and sums of codes, [2 groups][128 rows] each. Place 2e + i of a group's four has columns 16e + 4t + i and two more for t = 0 .. 3: what lane t of a
 * quad has in value i and i + 2 of word e of a unit. Rows 4t + 2e + i of 16 lie in places 8e + 2t + i, as in op_gemm.cuh. */
#ifndef BW24_CU_OP_GEMM_GROUPS_CUH
#define BW24_CU_OP_GEMM_GROUPS_CUH

#include "op_gemm_wgmma.cuh"

namespace bw {

constexpr int GG_ROWS = 128, GG_CODES = GG_ROWS * 128, GG_STAGE = GG_CODES + 4 * GG_ROWS * 4, GG_THREADS = 384, GG_ACT_SLOTS = 4, GG_SLOTS = 3;

/* rings: activations in stages of 64 columns, weights in halves (128 columns), raw scales by segment; a warp's scales of the half that it works on; results so
 * far, a place for each thread */
template <class U> struct alignas(1024) GroupShared {
    uint8_t b[GG_ACT_SLOTS][GG_STAGE];
    uint8_t a[GG_SLOTS][8 * U::HALF];
    uint8_t raw[2][8 * U::SCALE];
    float4 y[16][256];
    float2 scale[8][4][16]; /* [warp][group][row] */
    uint64_t full_b[GG_ACT_SLOTS], free_b[GG_ACT_SLOTS], full_a[GG_SLOTS], free_a[GG_SLOTS];
};

/* units that this form serves: two scales a group, where an int8 accumulator each and their conversion cost more than the other forms have; Q4_K was 3 % slower so */
template <class U> constexpr bool by_groups = U::FORM == FORM_S2;

/* ---- the instructions */
/* d [64 outputs][64 rows] = a [64][16] times the rows at b, or += that */
#define BW_WG64(first, c)                                                                                                                      \
    asm volatile("{.reg .pred p; setp.ne.b32 p," first ",0;\n"                                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"                                                                        \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                                      \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"                                                           \
                 "{%32,%33,%34,%35},%36,p,1,1,0;}"                                                                                             \
                 : c(d[0][0]), c(d[0][1]), c(d[0][2]), c(d[0][3]), c(d[1][0]), c(d[1][1]), c(d[1][2]), c(d[1][3]), c(d[2][0]), c(d[2][1]),     \
                   c(d[2][2]), c(d[2][3]), c(d[3][0]), c(d[3][1]), c(d[3][2]), c(d[3][3]), c(d[4][0]), c(d[4][1]), c(d[4][2]), c(d[4][3]),     \
                   c(d[5][0]), c(d[5][1]), c(d[5][2]), c(d[5][3]), c(d[6][0]), c(d[6][1]), c(d[6][2]), c(d[6][3]), c(d[7][0]), c(d[7][1]),     \
                   c(d[7][2]), c(d[7][3])                                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool FIRST> __device__ __forceinline__ void wg_mma64(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (FIRST) BW_WG64("0", "=f");
    else BW_WG64("1", "+f");
}
#undef BW_WG64
/* the same rows' columns, or others of the tile, `bytes` further on */
__device__ __forceinline__ uint64_t wg_further(uint64_t rows, int bytes) { return rows + (uint64_t)(bytes >> 4); }
/* results of the instructions that have been waited for: not read before */
__device__ __forceinline__ void wg_held(float (&d)[8][4]) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"((&d[0][0])[i]));
}
/* two codes, read as f16 1024 + code, less what they are too much */
__device__ __forceinline__ uint32_t halves_less(uint32_t v, uint32_t zero) {
    const __half2 d = __hsub2(*(__half2 *)&v, *(__half2 *)&zero);
    return *(uint32_t *)&d;
}
__device__ __forceinline__ uint32_t signed_pair(uint32_t w, int i) { return halves_less(prmt(w ^ 0x80808080u, 0x64646464u, i ? 0x4341 : 0x4240), 0x64806480u); }

/* ---- activations in the order above, zeros in columns past the row's; a warp has 8 rows of 64 columns, a lane a place of two */
__device__ __forceinline__ void group_acts(const Acts &a, uint8_t *to) {
    const int lane = threadIdx.x & 31, stages = (a.cols + 127) / 128 * 2, stage = blockIdx.x * 8 + (threadIdx.x >> 5), place = lane & 7, g = 2 * stage + (place >> 2);
    if (stage >= stages) return;
    uint4 q[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 *p = (const uint4 *)(a.q + (size_t)(blockIdx.y * 8 + (lane >> 3) + 4 * j) * a.cols + g * 32), zero = make_uint4(0, 0, 0, 0);
        const bool have = g < a.cols / 32;
        q[j][0] = have ? __ldcg(p) : zero;
        q[j][1] = have ? __ldcg(p + 1) : zero;
    }
    const int group = 2 * stage + (lane >> 3 & 1), r = blockIdx.y * 8 + (lane & 7);
    const float f = group < a.cols / 32 ? __ldcg((lane >> 4 ? a.sum : a.delta) + (size_t)group * a.ld + r) : 0.0f;
    uint8_t *part = to + ((size_t)(blockIdx.y >> 4) * stages + stage) * GG_STAGE;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int row = (blockIdx.y * 8 + (lane >> 3) + 4 * j) & 127, at = (row & 112) + (row >> 1 & 1) * 8 + (row >> 2 & 3) * 2 + (row & 1);
        const bool high = place & 2;
        const uint32_t w[4] = {high ? q[j][0].y : q[j][0].x, high ? q[j][0].w : q[j][0].z, high ? q[j][1].y : q[j][1].x, high ? q[j][1].w : q[j][1].z};
        uint32_t v[4];
#pragma unroll
        for (int t = 0; t < 4; t++) v[t] = signed_pair(w[t], place & 1);
        *(uint4 *)(part + at * 128 + ((place ^ (at & 7)) * 16)) = make_uint4(v[0], v[1], v[2], v[3]);
    }
    ((float *)(part + GG_CODES))[(lane >> 3) * GG_ROWS + (r & 127)] = f;
}

/* ---- the warp that asks; acts: of the block's rows */
template <class U> __device__ __forceinline__ void group_fetch(GroupShared<U> &sh, const LinearPart &part, int tile0, int segs, int halves, const uint8_t *acts) {
    const int lane = threadIdx.x & 31;
    const uint8_t *unit = part.w + (size_t)min(tile0 + lane, 2 * part.blocks - 1) * segs * U::UNIT;
    for (int h = 0; h < halves; h++) {
        const int slot = h % GG_SLOTS;
        const bool first = !(h & 1);
        bar_wait(&sh.free_a[slot], h / GG_SLOTS & 1 ^ 1);
        if (!lane) bar_expect(&sh.full_a[slot], 8 * (U::HALF + (first ? U::SCALE : 0)));
        __syncwarp();
        if (lane < 8) {
            const uint8_t *from = unit + (size_t)(h >> 1) * U::UNIT;
            bulk_copy(sh.a[slot] + lane * U::HALF, from + (h & 1) * U::HALF, U::HALF, &sh.full_a[slot]);
            if (first) bulk_copy(sh.raw[h >> 1 & 1] + lane * U::SCALE, from + 2 * U::HALF, U::SCALE, &sh.full_a[slot]);
        }
        if (!h) pdl_wait();
        for (int s = 2 * h; s < 2 * h + 2; s++) {
            const int at = s % GG_ACT_SLOTS;
            bar_wait(&sh.free_b[at], s / GG_ACT_SLOTS & 1 ^ 1);
            if (lane) continue;
            bar_expect(&sh.full_b[at], GG_STAGE);
            bulk_copy(sh.b[at], acts + (size_t)s * GG_STAGE, GG_STAGE, &sh.full_b[at]);
        }
    }
}

/* ---- weights of a warp: the block's tile of its number */
template <class U> struct GroupWeights {
    static constexpr bool TWO = U::FORM == FORM_S2, E2M1 = TWO && U::APART;
    static constexpr float BACK = U::UNSIGNED ? 0x1p24f : E2M1 ? 0x1p15f : 1.0f; /* what the codes lack as f16, which the scales get */
    GroupShared<U> &sh;
    int warp, lane;
    typename U::Pack w[2];
    /* scales of half h, a pair of groups a lane */
    __device__ __forceinline__ void scales(int h) {
        const int row = lane & 15, k = lane >> 4, at = 2 * (h & 1) + k;
        float x[2], y[2];
        U::pair(U::fetch(sh.raw[h >> 1 & 1] + warp * U::SCALE, row, at), at, x, y);
        __syncwarp(); /* the half before is folded */
#pragma unroll
        for (int e = 0; e < 2; e++) sh.scale[warp][2 * k + e][row] = make_float2(x[e] * BACK, TWO ? y[e] * BACK : y[e]);
        __syncwarp();
    }
    /* group g of half h as A registers [16 columns]. Codes without a sign are f16 subnormals; three bits of E2M1 are the lowest of the exponent and the highest
     * of the fraction. */
    __device__ __forceinline__ void group(int h, int g, uint32_t (&a)[2][4]) {
        if (g % U::GP == 0)
#pragma unroll
            for (int r = 0; r < 2; r++) w[r] = U::template load_pack<true>(sh.a[h % GG_SLOTS] + warp * U::HALF, g / U::GP, r, lane);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t c[2];
            if constexpr (!E2M1) U::unpack(w[r], g % U::GP, c[0], c[1]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if constexpr (E2M1) {
                    const uint32_t z = prmt(word_of(w[r].v, g), 0, e ? 0x3424 : 0x1404); /* nibbles 1 and 3 end the halves, 0 and 2 stand below them */
                    a[e][r] = (z << 4 & 0x80008000u) | (z << 1 & 0x0e000e00u);
                    a[e][2 + r] = (z & 0x80008000u) | (z >> 3 & 0x0e000e00u);
                } else if constexpr (U::UNSIGNED) {
                    a[e][r] = c[e] & 0x00ff00ffu;
                    a[e][2 + r] = c[e] >> 8 & 0x00ff00ffu;
                } else {
                    a[e][r] = signed_pair(c[e], 0);
                    a[e][2 + r] = signed_pair(c[e], 1);
                }
            }
        }
    }
};

/* a group's products t (S2: of its first half, u of its second) of 64 rows into p; f: scales of the rows, sums 2 * GG_ROWS further on */
template <Form F> __device__ __forceinline__ void group_fold(const float *f, const float2 (&s)[2], const float (&t)[8][4], const float (&u)[8][4], float (&p)[8][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float4 d = *(const float4 *)(f + 16 * j);
        float4 z = d;
        if (F == FORM_S1M) z = *(const float4 *)(f + 2 * GG_ROWS + 16 * j);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int n = 2 * j + (k >> 2), i = k & 3, r = i >> 1, c = (k >> 2) * 2 + (i & 1);
            const float dc = c == 0 ? d.x : c == 1 ? d.y : c == 2 ? d.z : d.w, zc = c == 0 ? z.x : c == 1 ? z.y : c == 2 ? z.z : z.w;
            float v = fmaf(s[r].x, dc * t[n][i], p[n][i]);
            if (F == FORM_S1M) v = fmaf(s[r].y, zc, v);
            if (F == FORM_S2) v = fmaf(s[r].y, dc * u[n][i], v);
            p[n][i] = v;
        }
    }
}

/* asks for the products of a group with 64 rows; S2: its halves apart. None is under way where a loop turns back: the compiler would wait for each. */
template <class U> __device__ __forceinline__ void group_products(uint64_t rows, int g, uint32_t (&w)[2][4], float (&t)[8][4], float (&u)[8][4]) {
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("" : "+r"((&w[0][0])[i])); /* all are there before the first product */
    wg_fence();
    wg_mma64<true>(t, w[0], wg_further(rows, (g & 1) * 64));
    if constexpr (U::FORM == FORM_S2) wg_mma64<true>(u, w[1], wg_further(rows, (g & 1) * 64 + 32));
    else wg_mma64<false>(t, w[1], wg_further(rows, (g & 1) * 64 + 32));
    wg_commit();
}

/* x: blocks of 128 rows, y: tiles of 128 outputs */
template <class U> __device__ __forceinline__ void group_gemm(const LinearArgs &a, const uint8_t *acts) {
    constexpr bool TWO = U::FORM == FORM_S2;
    extern __shared__ __align__(1024) uint8_t rings[];
    GroupShared<U> &sh = *(GroupShared<U> *)rings;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, halves = (a.x.cols + 127) / 128;
    int tile_y = blockIdx.y, k_part = 0;
    while (k_part + 1 < a.n_parts && tile_y >= (a.part[k_part].n + 127) / 128) tile_y -= (a.part[k_part++].n + 127) / 128;
    const LinearPart &part = a.part[k_part];
    if (threadIdx.x < GG_ACT_SLOTS) { bar_init(&sh.full_b[threadIdx.x], 1); bar_init(&sh.free_b[threadIdx.x], 8); }
    else if (threadIdx.x < GG_ACT_SLOTS + GG_SLOTS) { bar_init(&sh.full_a[threadIdx.x - GG_ACT_SLOTS], 1); bar_init(&sh.free_a[threadIdx.x - GG_ACT_SLOTS], 8); }
    bar_fence();
    __syncthreads();
    pdl_trigger();
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 8) group_fetch<U>(sh, part, tile_y * 8, a.segs, halves, acts + (size_t)blockIdx.x * halves * 2 * GG_STAGE);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    GroupWeights<U> weights = {sh, warp, lane};
    float t[2][8][4], p[2][8][4];
    uint32_t w[2][2][4]; /* [odd groups][16 columns] */
#pragma unroll
    for (int i = 0; i < 64; i++) (&p[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; n++) sh.y[n][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bar_wait(&sh.full_a[0], 0);
    weights.scales(0);
    weights.group(0, 0, w[0]);
    for (int h = 0; h < halves; h++) {
        bar_wait(&sh.full_b[2 * h % GG_ACT_SLOTS], 2 * h / GG_ACT_SLOTS & 1);
        uint64_t rows = wg_rows(sh.b[2 * h % GG_ACT_SLOTS], 0);
        group_products<U>(rows, 0, w[0], t[0], t[1]);
        if (!TWO) group_products<U>(wg_further(rows, 64 * 128), 0, w[0], t[1], t[0]);
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const int stage = 2 * h + (g >> 1), slot = stage % GG_ACT_SLOTS, next = (stage + 1) % GG_ACT_SLOTS;
            const float2 s[2] = {sh.scale[warp][g][lane >> 2], sh.scale[warp][g][(lane >> 2) + 8]};
            if (g < 3) weights.group(h, g + 1, w[(g + 1) & 1]);
            else if (h + 1 < halves) {
                __syncwarp();
                if (!lane) bar_arrive(&sh.free_a[h % GG_SLOTS]);
                bar_wait(&sh.full_a[(h + 1) % GG_SLOTS], (h + 1) / GG_SLOTS & 1);
                weights.scales(h + 1);
                weights.group(h + 1, 0, w[0]);
            }
            if (g == 1) bar_wait(&sh.full_b[next], (stage + 1) / GG_ACT_SLOTS & 1);
            const float *f = (const float *)(sh.b[slot] + GG_CODES) + (g & 1) * GG_ROWS + 4 * (lane & 3);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                if (TWO || (c && g == 3)) wg_wait<0>();
                else wg_wait<1>();
                wg_held(t[c]);
                if (TWO) wg_held(t[!c]);
                group_fold<U::FORM>(f + 64 * c, s, t[TWO ? 0 : c], t[1], p[c]);
                if (TWO && !c) group_products<U>(wg_further(rows, 64 * 128), g, w[g & 1], t[0], t[1]);
                if (c && (g & 1)) {
                    __syncwarp();
                    if (!lane) bar_arrive(&sh.free_b[slot]);
                }
                if (g == 1 && c == TWO) rows = wg_rows(sh.b[next], 0);
                if (g < 3 && (!TWO || c)) group_products<U>(wg_further(rows, (TWO ? 0 : c) * 64 * 128), g + 1, w[(g + 1) & 1], t[TWO ? 0 : c], t[!c || TWO]);
            }
        }
        if ((h & 1) || h + 1 == halves) /* a segment ends */
#pragma unroll
            for (int n = 0; n < 16; n++) {
                float (&v)[4] = p[n >> 3][n & 7];
                const float4 y = sh.y[n][threadIdx.x];
                sh.y[n][threadIdx.x] = make_float4(y.x + v[0], y.y + v[1], y.z + v[2], y.w + v[3]);
                v[0] = v[1] = v[2] = v[3] = 0.0f;
            }
    }
    pdl_wait();
    float y[16][4];
#pragma unroll
    for (int n = 0; n < 16; n++) *(float4 *)y[n] = sh.y[n][threadIdx.x];
    const int out = tile_y * 128 + warp * 16 + (lane >> 2), row = blockIdx.x * GG_ROWS + 4 * (lane & 3);
    if (part.res) gemm_store<true, true>(part, part.scale, a.rows, out, row, y);
    else gemm_store<false, true>(part, part.scale, a.rows, out, row, y);
}

/* the form that the card has */
template <class U> __global__ void __launch_bounds__(BW_WARP_GROUPS && by_groups<U> ? GG_THREADS : 256, 1) k_linear_gemm(LinearArgs a, const uint8_t *acts) {
#if BW_WARP_GROUPS
    if constexpr (by_groups<U>) return group_gemm<U>(a, acts);
    else
#endif
    gemm_block<U>(a);
}

} // namespace bw
#endif
