/* LINEAR of the class `fast` on sm_90a (docs/numerics.md, section 13): bf16 products by warp-group instructions, weights from registers, activations from
 * shared memory. A block has 256 outputs x 128 rows: two warp groups of 128 outputs each, in two tiles of 64; a warp of the third group asks for what the rings
 * take, and this group leaves the others its registers. Owns the order of the bf16 activations of these cards; knows no launch.
 *
 * Activations: [64 columns][row][128 bytes], the 16-byte places of a row swapped by row % 8 (the instruction's 128-byte swizzle), so that what a block reads
 * at a time is 16 KB in a row. Along k a group of 32 columns is two products of 16; place j of a group's four has columns 4t + j and 4t + j + 16 for
 * t = 0 .. 3: value j of the two words of a unit that lane t of a quad has. */
#ifndef BW24_CU_OP_GEMM_WGMMA_CUH
#define BW24_CU_OP_GEMM_WGMMA_CUH

#include "bf16.cuh"
#include "op_gemm.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) /* sm_90a has instructions of its own for warp groups */
#define BW_WARP_GROUPS 1
#else
#define BW_WARP_GROUPS 0
#endif

namespace bw {

constexpr int WG_OUTS = 256, WG_ROWS = 128, WG_TILES = WG_OUTS / 16, WG_THREADS = 384, WG_ACT_SLOTS = 4, WG_SLOTS = 3;

/* rings: activations in stages of 64 columns, weights in halves (128 columns), raw scales by segment; a warp's scales of the half that it works on */
template <class U> struct alignas(1024) WgShared {
    uint8_t b[WG_ACT_SLOTS][WG_ROWS * 128];
    uint8_t a[WG_SLOTS][WG_TILES * U::HALF];
    uint8_t raw[2][WG_TILES * U::SCALE];
    float2 scale[8][4][32]; /* [warp][group][row of its two tiles] */
    uint64_t full_b[WG_ACT_SLOTS], free_b[WG_ACT_SLOTS], full_a[WG_SLOTS], free_a[WG_SLOTS];
};

/* ---- the instructions */
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
/* 16 columns from byte `at` of a tile of rows on, which begins on 1024 bytes: swizzle of 128 bytes, 1024 bytes from eight rows to the next */
__device__ __forceinline__ uint64_t wg_rows(const uint8_t *tile, int at) { return (uint64_t)((smem_at(tile) + at) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
/* d [64 outputs][128 rows] += a [64][16] times the rows at b */
__device__ __forceinline__ void wg_mma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                 "{%64,%65,%66,%67},%68,1,1,1,0;"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                   "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
                   "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                   "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
                   "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
                   "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
                   "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
                   "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* products of two bf16, subnormals as they are */
__device__ __forceinline__ uint32_t bf16_times(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

/* ---- activations: codes times scale as bf16 in the order above, zeros in columns past the row's; a warp has 8 rows of 64 columns, a lane a place of two */
__device__ __forceinline__ void wg_acts(const Acts &a, uint8_t *to, int padded) {
    const int lane = threadIdx.x & 31, stage = blockIdx.x * 8 + (threadIdx.x >> 5), place = lane & 7, g = 2 * stage + (place >> 2);
    if (stage >= (a.cols + 127) / 128 * 2) return;
    uint4 q[2][2];
    float d[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int row = blockIdx.y * 8 + (lane >> 3) + 4 * j;
        const bool have = g < a.cols / 32;
        const uint4 *p = (const uint4 *)(a.q + (size_t)row * a.cols + g * 32), zero = make_uint4(0, 0, 0, 0);
        q[j][0] = have ? __ldcg(p) : zero;
        q[j][1] = have ? __ldcg(p + 1) : zero;
        d[j] = have ? __ldcg(a.delta + (size_t)g * a.ld + row) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int row = blockIdx.y * 8 + (lane >> 3) + 4 * j;
        const uint32_t w[4][2] = {{q[j][0].x, q[j][0].y}, {q[j][0].z, q[j][0].w}, {q[j][1].x, q[j][1].y}, {q[j][1].z, q[j][1].w}};
        uint32_t v[4];
#pragma unroll
        for (int t = 0; t < 4; t++)
            v[t] = bf16x2(d[j] * (big_byte(w[t][0] ^ 0x80808080u, place & 3) - 8388736.0f), d[j] * (big_byte(w[t][1] ^ 0x80808080u, place & 3) - 8388736.0f));
        *(uint4 *)(to + ((size_t)stage * padded + row) * 128 + ((place ^ (row & 7)) * 16)) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

/* ---- the warp that asks */
template <class U> __device__ __forceinline__ void wg_fetch(WgShared<U> &sh, const LinearPart &part, int tile0, int segs, int halves, const uint8_t *acts, size_t stage) {
    const int lane = threadIdx.x & 31;
    const uint8_t *unit = part.w + (size_t)min(tile0 + lane, 2 * part.blocks - 1) * segs * U::UNIT;
    for (int h = 0; h < halves; h++) {
        const int slot = h % WG_SLOTS;
        const bool first = !(h & 1);
        bar_wait(&sh.free_a[slot], h / WG_SLOTS & 1 ^ 1);
        if (!lane) bar_expect(&sh.full_a[slot], WG_TILES * (U::HALF + (first ? U::SCALE : 0)));
        __syncwarp();
        if (lane < WG_TILES) {
            const uint8_t *from = unit + (size_t)(h >> 1) * U::UNIT;
            bulk_copy(sh.a[slot] + lane * U::HALF, from + (h & 1) * U::HALF, U::HALF, &sh.full_a[slot]);
            if (first) bulk_copy(sh.raw[h >> 1 & 1] + lane * U::SCALE, from + 2 * U::HALF, U::SCALE, &sh.full_a[slot]);
        }
        if (!h) pdl_wait();
        for (int s = 2 * h; s < 2 * h + 2; s++) {
            const int at = s % WG_ACT_SLOTS;
            bar_wait(&sh.free_b[at], s / WG_ACT_SLOTS & 1 ^ 1);
            if (lane) continue;
            bar_expect(&sh.full_b[at], WG_ROWS * 128);
            bulk_copy(sh.b[at], acts + s * stage, WG_ROWS * 128, &sh.full_b[at]);
        }
    }
}

/* ---- weights of a warp: tiles `warp` and `warp + 4` of its group's eight */
template <class U> struct WgWeights {
    WgShared<U> &sh;
    static constexpr bool TWO = U::FORM == FORM_S2, E2M1 = TWO && U::APART;
    static constexpr float ZERO = U::UNSIGNED ? -32768.0f : -32896.0f, BACK = E2M1 ? 256.0f : 1.0f; /* BACK: what the sums lack */
    int warp, lane, tile; /* tile: the warp's first of the block's */
    typename U::Pack w[2][2];
    /* scales of half h, two pairs of groups a lane: what a code is multiplied with and what is added to code + 2^15 (+ 128 where it is signed) times that;
     * two scales a group: these; NVFP4: both in bf16, times 2^119 */
    __device__ __forceinline__ void scales(int h) {
        const int row = lane & 15, t = tile + (lane >> 4) * 4;
        const uint8_t *raw = sh.raw[h >> 1 & 1] + t * U::SCALE;
        __syncwarp(); /* the half before is decoded */
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float x[2], y[2];
            const int at = 2 * (h & 1) + k;
            U::pair(U::fetch(raw, row, at), at, x, y);
#pragma unroll
            for (int e = 0; e < 2; e++)
                sh.scale[warp][2 * k + e][lane] = E2M1   ? make_float2(__uint_as_float(bf16x2(x[e] * 0x1p119f, y[e] * 0x1p119f)), 0.0f)
                                                  : TWO ? make_float2(x[e], y[e])
                                                        : make_float2(x[e], fmaf(x[e], ZERO, y[e]));
        }
        __syncwarp();
    }
    /* word w times s plus z */
    static __device__ __forceinline__ void codes(uint32_t w, float s, float z, float (&f)[4]) {
        const uint32_t v = U::UNSIGNED ? w : w ^ 0x80808080u;
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = fmaf(s, __uint_as_float(prmt(v, 0x47000000u, 0x7404 + 16 * i)), z);
    }
    /* group g of half h as A registers [tile of 64][16 columns] */
    __device__ __forceinline__ void group(int h, int g, uint32_t (&a)[2][2][4]) {
        if (g % U::GP == 0)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) w[m][r] = U::template load_pack<true>(sh.a[h % WG_SLOTS] + (tile + 4 * m) * U::HALF, g / U::GP, r, lane);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 s = sh.scale[warp][g][m * 16 + (lane >> 2) + 8 * r];
                if constexpr (E2M1) {
                    /* a value's three bits as the lowest of a bf16's exponent and the highest of its fraction are it times 2^-126; with the scale, 2^-8 */
                    const uint32_t x = word_of(w[m][r].v, g);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint32_t v = i < 2 ? x << (6 - 4 * i) : x >> (4 * i - 6);
                        a[m][i >> 1][(i & 1) * 2 + r] = bf16_times((v & 0x01c001c0u) | (x << (12 - 4 * i) & 0x80008000u), __float_as_uint(s.x));
                    }
                } else {
                    uint32_t lo, hi;
                    float f[4], k[4];
                    U::unpack(w[m][r], g % U::GP, lo, hi);
                    codes(lo, s.x, TWO ? s.x * ZERO : s.y, f);
                    codes(hi, TWO ? s.y : s.x, TWO ? s.y * ZERO : s.y, k);
#pragma unroll
                    for (int i = 0; i < 4; i++) a[m][i >> 1][(i & 1) * 2 + r] = bf16x2(f[i], k[i]);
                }
            }
    }
};

/* x: blocks of rows, y: tiles of 256 outputs; acts: the bf16 activations, of `padded` rows */
template <class U> __device__ __forceinline__ void wg_gemm(const LinearArgs &a, const uint8_t *acts, int padded) {
    extern __shared__ __align__(1024) uint8_t rings[];
    WgShared<U> &sh = *(WgShared<U> *)rings;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, halves = (a.x.cols + 127) / 128;
    int tile_y = blockIdx.y, k_part = 0;
    while (k_part + 1 < a.n_parts && tile_y >= (a.part[k_part].n + WG_OUTS - 1) / WG_OUTS) tile_y -= (a.part[k_part++].n + WG_OUTS - 1) / WG_OUTS;
    const LinearPart &part = a.part[k_part];
    if (threadIdx.x < WG_ACT_SLOTS) { bar_init(&sh.full_b[threadIdx.x], 1); bar_init(&sh.free_b[threadIdx.x], 8); }
    else if (threadIdx.x < WG_ACT_SLOTS + WG_SLOTS) { bar_init(&sh.full_a[threadIdx.x - WG_ACT_SLOTS], 1); bar_init(&sh.free_a[threadIdx.x - WG_ACT_SLOTS], 8); }
    bar_fence();
    __syncthreads();
    pdl_trigger();
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 8) wg_fetch<U>(sh, part, tile_y * WG_TILES, a.segs, halves, acts + (size_t)blockIdx.x * WG_ROWS * 128, (size_t)padded * 128);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    WgWeights<U> weights = {sh, warp, lane, (warp >> 2) * 8 + (warp & 3)};
    float y[2][16][4];
    uint32_t w[2][2][2][4]; /* [odd groups][tile of 64][16 columns] */
#pragma unroll
    for (int i = 0; i < 128; i++) (&y[0][0][0])[i] = 0.0f;
    bar_wait(&sh.full_a[0], 0);
    weights.scales(0);
    weights.group(0, 0, w[0]);
    for (int h = 0; h < halves; h++) {
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const int stage = 2 * h + (g >> 1), slot = stage % WG_ACT_SLOTS;
            if (!(g & 1)) bar_wait(&sh.full_b[slot], stage / WG_ACT_SLOTS & 1);
            wg_fence();
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int m = 0; m < 2; m++) wg_mma(y[m], w[g & 1][m][e], wg_rows(sh.b[slot], (g & 1) * 64 + e * 32));
            wg_commit();
            wg_wait<1>(); /* of the group before */
            if (!(g & 1) && stage && !lane) bar_arrive(&sh.free_b[(stage - 1) % WG_ACT_SLOTS]);
            if (g < 3) { weights.group(h, g + 1, w[(g + 1) & 1]); continue; }
            __syncwarp();
            if (!lane) bar_arrive(&sh.free_a[h % WG_SLOTS]);
            if (h + 1 == halves) continue;
            bar_wait(&sh.full_a[(h + 1) % WG_SLOTS], (h + 1) / WG_SLOTS & 1);
            weights.scales(h + 1);
            weights.group(h + 1, 0, w[0]);
        }
    }
    wg_wait<0>();
    pdl_wait();
    const int row = blockIdx.x * WG_ROWS + 2 * (lane & 3);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int out = tile_y * WG_OUTS + (weights.tile + 4 * m) * 16 + (lane >> 2);
        if (part.res) gemm_store<true, false>(part, part.scale * weights.BACK, a.rows, out, row, y[m]);
        else gemm_store<false, false>(part, part.scale * weights.BACK, a.rows, out, row, y[m]);
    }
}

} // namespace bw
#endif
