/* What the EXACT GEMM of warp groups (op_gemm_groups.cuh) multiplies: codes of weights as f16 in A registers, activations as f16 in shared memory, and the
 * instruction. Knows no order of sums and no launch.
 *
 * An activation is a code (7 bits) times its group's scale (4 bits) divided by the row's 2^R, which f16 holds exactly: R puts the row's largest scale where
 * 127 times it stays below 2^16. Where the scales of a row span more than 2^29, or R leaves -60 .. 60 (sums could become subnormal), the row's factor is 0
 * instead of 2^R, its values are zeros, and op_gemm_groups.cuh computes the row from its int8 codes.
 *
 * Activations of a step: [128 rows][64 columns], of whole segments, zeros past the row's columns: 128 rows of 128 bytes, then alpha (scale times sum of codes,
 * divided by 2^R) [2 groups][128 rows]; behind all of them the factors [row]. The 16-byte places of a row are swapped by row % 8 (the instruction's 128-byte
 * swizzle). Place 2e + i of a group's four has columns 16e + 4t + i and two more for t = 0 .. 3: what lane t of a quad has in value i and i + 2 of word e of a
 * unit. Rows 4t + 2e + i of 16 lie in places 8e + 2t + i, as in op_gemm.cuh. */
#ifndef BW24_CU_OP_GEMM_CODES_CUH
#define BW24_CU_OP_GEMM_CODES_CUH

#include "moe.cuh"
#include "op_gemm_wgmma.cuh"

namespace bw {

/* ---- the instruction: d [64 outputs][rows of activations] = a [64][16] times the rows at b, or += that, always in d's own registers: none may move while a
 * loop turns back */
#define BW_WG16(first)                                                                                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p," first ",0;\n"                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"                                                                    \
                 "%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,p,1,1,0;}"                                                                  \
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool FIRST> __device__ __forceinline__ void wg_f16(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (FIRST) BW_WG16("0");
    else BW_WG16("1");
}
#undef BW_WG16
#define BW_WG32(first)                                                                                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p," first ",0;\n"                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"                                                                    \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"                                                                   \
                 "},{%16,%17,%18,%19},%20,p,1,1,0;}"                                                                                       \
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
                   "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool FIRST> __device__ __forceinline__ void wg_f16(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (FIRST) BW_WG32("0");
    else BW_WG32("1");
}
#undef BW_WG32
#define BW_WG64(first)                                                                                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p," first ",0;\n"                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"                                                                    \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                                  \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"                                                         \
                 "},{%32,%33,%34,%35},%36,p,1,1,0;}"                                                                                       \
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
                   "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), \
                   "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
                   "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool FIRST> __device__ __forceinline__ void wg_f16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (FIRST) BW_WG64("0");
    else BW_WG64("1");
}
#undef BW_WG64
/* the same rows' columns, or others of the tile, `bytes` further on */
__device__ __forceinline__ uint64_t wg_further(uint64_t rows, int bytes) { return rows + (uint64_t)(bytes >> 4); }
/* results of the instructions that have been waited for: not read before */
template <int N> __device__ __forceinline__ void wg_held(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"((&d[0][0])[i]));
}

/* ---- codes of weights, two to a register: those of columns that differ by two. k and l: constants in registers, so that a mask and another constant are one
 * instruction; BACK: what the scale gets for what a code lacks. */
__device__ __forceinline__ uint32_t and_or(uint32_t v, uint32_t mask, uint32_t k) {
    uint32_t d;
    asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(k));
    return d;
}
__device__ __forceinline__ uint32_t and_xor(uint32_t v, uint32_t mask, uint32_t k) {
    uint32_t d;
    asm("lop3.b32 %0,%1,%2,%3,0x6a;" : "=r"(d) : "r"(v), "r"(mask), "r"(k));
    return d;
}
/* v read as f16 less zero; a sixteenth of v plus zero */
__device__ __forceinline__ uint32_t halves_less(uint32_t v, uint32_t zero) {
    const __half2 d = __hsub2(*(__half2 *)&v, *(__half2 *)&zero);
    return *(uint32_t *)&d;
}
__device__ __forceinline__ uint32_t sixteenths_plus(uint32_t v, uint32_t zero) {
    const uint32_t sixteenth = 0x2c002c00u;
    const __half2 d = __hfma2(*(__half2 *)&v, *(const __half2 *)&sixteenth, *(__half2 *)&zero);
    return *(const uint32_t *)&d;
}

/* rows of bytes: row r's registers of codes c (words tig and tig + 4) plus 128 as bytes: under f16 1024, less 1152 */
__device__ __forceinline__ void group_bytes(const uint32_t (&c)[2], int r, uint32_t (&a)[2][4], uint32_t k) {
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int i = 0; i < 2; i++) a[e][2 * i + r] = halves_less(prmt(c[e], k, i ? 0x4341 : 0x4240), 0x64806480u);
}

/* group g of a pack, row r of its two, as A registers [16 columns]; here int8 codes: bytes, their top bit inverted */
template <class U> struct GroupCodes {
    static constexpr uint32_t K = 0x64646464u, L = 0;
    static constexpr float BACK = 1.0f;
    static __device__ __forceinline__ void get(const typename U::Pack &p, int g, int r, uint32_t (&a)[2][4], uint32_t k, uint32_t) {
        uint32_t c[2];
        U::unpack(p, g, c[0], c[1]);
        c[0] ^= 0x80808080u;
        c[1] ^= 0x80808080u;
        group_bytes(c, r, a, k);
    }
};
/* the values of U_IQ4_XS, 128 more in the table already */
template <> struct GroupCodes<U_IQ4_XS> {
    static constexpr uint32_t K = 0x64646464u, L = 0;
    static constexpr float BACK = 1.0f;
    static __device__ __forceinline__ void get(const Pack4 &p, int g, int r, uint32_t (&a)[2][4], uint32_t k, uint32_t) {
        const uint32_t t[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
        uint32_t c[2];
        unpack_table(word_of(p.v, g), t, c[0], c[1]);
        group_bytes(c, r, a, k);
    }
};
/* a nibble, its top bit inverted, in the lowest bits of f16 1024, or 16 times that above them */
template <> struct GroupCodes<U_Q4_0> {
    static constexpr uint32_t K = 0x64086408u, L = 0x64806480u;
    static constexpr float BACK = 16.0f;
    static __device__ __forceinline__ void get(const Pack4 &p, int g, int r, uint32_t (&a)[2][4], uint32_t k, uint32_t l) {
        const uint32_t w = word_of(p.v, g);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t v = i ? w >> 8 : w;
            a[0][2 * i + r] = halves_less(and_xor(v, 0x000f000fu, k), 0x64086408u);
            a[1][2 * i + r] = sixteenths_plus(and_xor(v, 0x00f000f0u, l), 0xd480d480u); /* less 72 */
        }
    }
};
/* f16 subnormals */
template <> struct GroupCodes<U_Q4_K> {
    static constexpr uint32_t K = 0, L = 0;
    static constexpr float BACK = 0x1p24f;
    static __device__ __forceinline__ void get(const Pack4 &p, int g, int r, uint32_t (&a)[2][4], uint32_t, uint32_t) {
        const uint32_t c[2] = {g < 2 ? p.v.x : p.v.z, g < 2 ? p.v.y : p.v.w};
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int i = 0; i < 2; i++) a[e][2 * i + r] = (i ? c[e] >> 8 : c[e]) & (g & 1 ? 0x00f000f0u : 0x000f000fu);
    }
};
/* six bits a byte, the top one inverted, under f16 1024 */
template <> struct GroupCodes<U_Q6_K> {
    static constexpr uint32_t K = 0x64206420u, L = 0;
    static constexpr float BACK = 4.0f;
    static __device__ __forceinline__ void get(const U_Q6_K::Pack &p, int g, int r, uint32_t (&a)[2][4], uint32_t k, uint32_t) {
        const uint32_t w = word_of(p.v, g), h = g < 2 ? p.h.x : p.h.y;
        const uint32_t c[2] = {and_or(g & 1 ? h : h << 4, 0x30303030u, w & 0x0f0f0f0fu), and_or(g & 1 ? h >> 2 : h << 2, 0x30303030u, w >> 4 & 0x0f0f0f0fu)};
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int i = 0; i < 2; i++) a[e][2 * i + r] = halves_less(and_xor(i ? c[e] >> 8 : c[e], 0x003f003fu, k), 0x64206420u);
    }
};
/* three bits of E2M1 are the lowest of an f16's exponent and the highest of its fraction */
template <> struct GroupCodes<U_NVFP4> {
    static constexpr uint32_t K = 0, L = 0;
    static constexpr float BACK = 0x1p15f;
    static __device__ __forceinline__ void get(const Pack4 &p, int g, int r, uint32_t (&a)[2][4], uint32_t, uint32_t) {
        const uint32_t w = word_of(p.v, g);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t z = prmt(w, 0, e ? 0x3424 : 0x1404); /* nibbles 1 and 3 end the halves, 0 and 2 stand below them */
            a[e][r] = and_or(z << 4, 0x80008000u, z << 1 & 0x0e000e00u);
            a[e][2 + r] = and_or(z, 0x80008000u, z >> 3 & 0x0e000e00u);
        }
    }
};

/* ---- activations of a.ld rows, a multiple of 128 */
constexpr int GG_ROWS = 128, GG_CODES = GG_ROWS * 128, GG_ROW = 128 + 2 * 4, GG_STAGE = GG_ROWS * GG_ROW, GG_BLOCK = 32 * GG_ROW; /* GG_BLOCK: a stage of 32 rows */
__host__ __device__ constexpr int group_stages(int cols) { return (cols + 255) / 256 * 4; }
__host__ __device__ constexpr size_t group_acts_bytes(size_t rows, int cols) { return rows / GG_ROWS * (size_t)group_stages(cols) * GG_STAGE + rows * 4; }
/* stage 0 of a block of rows */
__device__ __forceinline__ size_t group_rows(const Acts &a, int block) { return (size_t)block * group_stages(a.cols) * GG_STAGE; }
__device__ __forceinline__ const float *group_factor(const Acts &a, const uint8_t *acts) { return (const float *)(acts + group_rows(a, a.ld / GG_ROWS)); }

/* factors of eight rows, from[row] of a, 1 for rows that are not there (-1); range: [warp][largest, least scale as bits][row] */
__device__ __forceinline__ void group_factors(const Acts &a, const int (&from)[8], float (&factor)[8], uint32_t (&range)[8][2][8]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = from[lane & 7];
    uint32_t most = 0, least = 0x7f800000u;
    for (int g = threadIdx.x >> 3; row >= 0 && g < a.cols / 32; g += 32) {
        const uint32_t d = __float_as_uint(__ldcg(a.delta + (size_t)g * a.ld + row));
        most = max(most, d);
        least = d ? min(least, d) : least;
    }
#pragma unroll
    for (int o = 8; o < 32; o <<= 1) {
        most = max(most, __shfl_xor_sync(~0u, most, o));
        least = min(least, __shfl_xor_sync(~0u, least, o));
    }
    if (lane < 8) { range[warp][0][lane] = most; range[warp][1][lane] = least; }
    __syncthreads();
    if (threadIdx.x < 8) {
#pragma unroll
        for (int i = 0; i < 8; i++) { most = max(most, range[i][0][lane]); least = min(least, range[i][1][lane]); }
        const int high = (int)(most >> 23), low = (int)(least >> 23), R = most ? high - 135 : 0;
        factor[lane] = most && (high - low > 29 || R > 60 || R < -60) ? 0.0f : __uint_as_float((uint32_t)(127 + R) << 23);
    }
    __syncthreads();
}
/* d divided by a power of two, 0 for 0 */
__device__ __forceinline__ float group_less(float d, float factor) { return factor != 0.0f ? d * __uint_as_float(0x7f000000u - __float_as_uint(factor)) : 0.0f; }

/* Rows first .. first + 7 of a stage of `height` rows, from[row] of a, by a warp: a lane a place of two rows, then alpha of one row and group */
__device__ __forceinline__ void group_stage(const Acts &a, const int (&from)[8], const float (&factor)[8], uint8_t *part, int height, int first, int stage) {
    const int lane = threadIdx.x & 31, place = lane & 7, g = 2 * stage + (place >> 2);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int r = (lane >> 3) + 4 * j, row = first + r, at = (row & ~15) + (row >> 1 & 1) * 8 + (row >> 2 & 3) * 2 + (row & 1);
        const bool have = g < a.cols / 32 && from[r] >= 0;
        const uint4 *p = (const uint4 *)(a.q + (size_t)from[r] * a.cols + g * 32), zero = make_uint4(0, 0, 0, 0);
        const uint4 q0 = have ? __ldcg(p) : zero, q1 = have ? __ldcg(p + 1) : zero;
        const float d = have ? group_less(__ldcg(a.delta + (size_t)g * a.ld + from[r]), factor[r]) : 0.0f;
        const bool high = place & 2;
        const uint32_t w[4] = {high ? q0.y : q0.x, high ? q0.w : q0.z, high ? q1.y : q1.x, high ? q1.w : q1.z};
        uint32_t v[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const __half2 h = __floats2half2_rn(d * (float)(int8_t)(w[t] >> 8 * (place & 1)), d * (float)(int8_t)(w[t] >> 8 * ((place & 1) + 2)));
            v[t] = *(const uint32_t *)&h;
        }
        *(uint4 *)(part + at * 128 + ((place ^ (at & 7)) * 16)) = make_uint4(v[0], v[1], v[2], v[3]);
    }
    if (lane >= 16) return;
    const int group = 2 * stage + (lane >> 3), r = lane & 7;
    const bool have = group < a.cols / 32 && from[r] >= 0;
    ((float *)(part + height * 128))[(lane >> 3) * height + first + r] = have ? group_less(__ldcg(a.sum + (size_t)group * a.ld + from[r]), factor[r]) : 0.0f;
}

/* 256 threads; x: 512 columns, a warp 64 of them; y: eight rows */
__device__ __forceinline__ void group_acts(const Acts &a, uint8_t *to) {
    __shared__ float factor[8];
    __shared__ uint32_t range[8][2][8];
    __shared__ int from[8];
    const int first = blockIdx.y * 8, stage = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (threadIdx.x < 8) from[threadIdx.x] = first + threadIdx.x;
    __syncthreads();
    group_factors(a, from, factor, range);
    if (!blockIdx.x && threadIdx.x < 8) ((float *)group_factor(a, to))[first + threadIdx.x] = factor[threadIdx.x];
    if (stage < group_stages(a.cols)) group_stage(a, from, factor, to + group_rows(a, blockIdx.y >> 4) + (size_t)stage * GG_STAGE, GG_ROWS, first & (GG_ROWS - 1), stage);
}

/* The same for the rows of EXPERTS' tiles, all columns: a tile's rows lie in stages of its own height, from block `at` of 32 rows on; factors [32 * at + row].
 * x: eight rows, EXPERT_TILE / 8 to a tile */
struct ExpertRows {
    const ExpertTile *tiles; /* NULL: not these rows */
    const int *n_tiles, *order;
    int top, gather;         /* as ExpertGemmArgs */
    float *factor;
};
__device__ __forceinline__ void group_pairs(const Acts &a, uint8_t *to, const ExpertRows &e) {
    __shared__ float factor[8];
    __shared__ uint32_t range[8][2][8];
    __shared__ int from[8];
    const int index = (int)blockIdx.x / (EXPERT_TILE / 8), first = (int)blockIdx.x % (EXPERT_TILE / 8) * 8, stages = group_stages(a.cols);
    if (index >= __ldcg(e.n_tiles)) return;
    const ExpertTile tile = e.tiles[index];
    const int height = tile_height(tile.n);
    if (first >= height) return;
    if (threadIdx.x < 8) {
        const int at = tile.first + first + threadIdx.x;
        from[threadIdx.x] = first + (int)threadIdx.x >= tile.n ? -1 : e.gather ? __ldcg(e.order + at) / e.top : at;
    }
    __syncthreads();
    group_factors(a, from, factor, range);
    if (threadIdx.x < 8) e.factor[tile.at * 32 + first + threadIdx.x] = factor[threadIdx.x];
    uint8_t *part = to + (size_t)tile.at * stages * GG_BLOCK;
    for (int stage = threadIdx.x >> 5; stage < stages; stage += 8) group_stage(a, from, factor, part + (size_t)stage * height * GG_ROW, height, first, stage);
}

} // namespace bw
#endif
