/* From the file's blocks to units, on the device, and back to rows for EMBED. Owns the correspondence of the two layouts. */
#ifndef BW24_CU_PACK_CUH
#define BW24_CU_PACK_CUH

#include "float.cuh"
#include "unit.cuh"
#include "untile.h"

namespace bw {

/* raw: rows [row0, row0 + rows) of the file's form, row_bytes apart; units from tile row0 / 16 on. One block of 128 threads a unit, whose bytes
 * are zero before. */
struct PackArgs { const uint8_t *raw; uint8_t *units; int rows, cols, segs; size_t row_bytes; };

__device__ __forceinline__ uint32_t load_bytes(const uint8_t *p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24; }
/* nibbles of 4 + 4 bytes -> one word, low nibbles from lo, high from hi */
__device__ __forceinline__ uint32_t join_nibbles(uint32_t lo, uint32_t hi) { return (lo & 0x0f0f0f0fu) | (hi & 0x0f0f0f0fu) << 4; }

/* the word of group g (of the segment) that lane tig reads: columns 4 tig.. in the low, 16 + 4 tig.. in the high nibbles */
template <class U> struct Packer;
template <> struct Packer<U_Q4_0> {
    static __device__ uint32_t word(const uint8_t *seg, int g, int tig) { return load_bytes(seg + g * 18 + 2 + 4 * tig) ^ 0x88888888u; }
    static __device__ void scales(const uint8_t *seg, int groups, uint8_t *unit, int row) {
        uint8_t *s = unit + 2 * U_Q4_0::HALF + row * 16;
        for (int g = 0; g < groups; g++) { s[2 * g] = seg[g * 18]; s[2 * g + 1] = seg[g * 18 + 1]; }
    }
};
template <> struct Packer<U_Q4_K> {
    static __device__ uint32_t word(const uint8_t *seg, int g, int tig) { return load_bytes(seg + 16 + 32 * (g >> 1) + 4 * tig + 16 * (g & 1)); }
    /* kind 0: scale, 1: minimum of group g, 6 bits */
    static __device__ uint32_t six(const uint8_t *head, int g, int kind) {
        const uint8_t *p = head + 4;
        return g < 4 ? p[g + 4 * kind] & 63 : ((p[g + 4] >> 4 * kind) & 15) | (p[g - 4 + 4 * kind] >> 6) << 4;
    }
    static __device__ void scales(const uint8_t *seg, int, uint8_t *unit, int row) {
        uint8_t *s = unit + 2 * U_Q4_K::HALF + row * 8, *low = s + 128;
        for (int i = 0; i < 4; i++) {
            s[i] = seg[i];
            uint32_t high = 0;
            for (int w = 0; w < 4; w++) high |= (six(seg, 2 * w + (i & 1), i >> 1) >> 4) << (2 * w);
            s[4 + i] = (uint8_t)high;
        }
        for (int g = 0; g < 8; g++) low[g] = (uint8_t)((six(seg, g, 0) & 15) | (six(seg, g, 1) & 15) << 4);
    }
};
template <> struct Packer<U_NVFP4> {
    static __device__ uint32_t half(const uint8_t *q, int tig) { /* columns 4 tig .. + 3 of a 16 whose byte j holds j and j + 8 */
        uint32_t v = load_bytes(q + 4 * (tig & 1)) >> (tig < 2 ? 0 : 4), w = 0;
        for (int b = 0; b < 4; b++) { uint32_t n = v >> (8 * b) & 15; w |= (n == 8 ? 0 : n) << (4 * b); }
        return w;
    }
    static __device__ uint32_t word(const uint8_t *seg, int g, int tig) {
        const uint8_t *q = seg + (g >> 1) * 36 + 4 + 16 * (g & 1);
        return half(q, tig) | half(q + 8, tig) << 16;
    }
    static __device__ void scales(const uint8_t *seg, int groups, uint8_t *unit, int row) {
        for (int h = 0; h < 2 * groups; h++) {
            uint8_t c = seg[(h >> 2) * 36 + (h & 3)] & 127;
            unit[2 * U_NVFP4::HALF + row * 16 + h] = c == 127 ? 0 : c;
        }
    }
};
template <> struct Packer<U_Q6_K> {
    static __device__ uint32_t low4(const uint8_t *seg, int g, int col) { return load_bytes(seg + 64 * (g >> 2) + 32 * (g & 1) + col) >> (4 * (g >> 1 & 1)); }
    static __device__ uint32_t word(const uint8_t *seg, int g, int tig) { return join_nibbles(low4(seg, g, 4 * tig), low4(seg, g, 4 * tig + 16)); }
    /* 2 high bits of 4 codes, top bit inverted */
    static __device__ uint32_t high2(const uint8_t *seg, int g, int col) { return (load_bytes(seg + 128 + 32 * (g >> 2) + col) >> (2 * (g & 3)) & 0x03030303u) ^ 0x02020202u; }
    static __device__ void scales(const uint8_t *seg, int, uint8_t *unit, int row) {
        uint8_t *s = unit + 2 * U_Q6_K::HALF;
        for (int i = 0; i < 16; i++) s[row * 16 + i] = seg[192 + i];
        s[256 + row * 2] = seg[208]; s[256 + row * 2 + 1] = seg[209];
    }
};
template <> struct Packer<U_Q8_0> {
    static __device__ void scales(const uint8_t *seg, int groups, uint8_t *unit, int row) {
        uint8_t *s = unit + 2 * U_Q8_0::HALF + row * 16;
        for (int g = 0; g < groups; g++) { s[2 * g] = seg[g * 34]; s[2 * g + 1] = seg[g * 34 + 1]; }
    }
};
template <> struct Packer<U_IQ4_XS> {
    static __device__ uint32_t word(const uint8_t *seg, int g, int tig) {
        uint32_t v = load_bytes(seg + 8 + 16 * g + 4 * tig), w = 0;
        for (int b = 0; b < 4; b++) w |= (v >> (8 * b) & 15) << (4 * b) | (v >> (8 * b + 4) & 15) << (4 * b + 16);
        return w;
    }
    static __device__ void scales(const uint8_t *seg, int, uint8_t *unit, int row) {
        uint8_t *s = unit + 2 * U_IQ4_XS::HALF + row * 16;
        for (int g = 0; g < 8; g++) {
            int high = (seg[2] | seg[3] << 8) >> (2 * g) & 3;
            s[(g >> 1) * 4 + (g & 1)] = seg[g & 1];
            s[(g >> 1) * 4 + 2 + (g & 1)] = (uint8_t)((seg[4 + (g >> 1)] >> (4 * (g & 1)) & 15) | high << 4);
        }
    }
};
template <class U> struct RawSegment;
template <> struct RawSegment<U_Q4_0> { static constexpr int BYTES = 144; };
template <> struct RawSegment<U_Q4_K> { static constexpr int BYTES = 144; };
template <> struct RawSegment<U_NVFP4> { static constexpr int BYTES = 144; };
template <> struct RawSegment<U_IQ4_XS> { static constexpr int BYTES = 136; };
template <> struct RawSegment<U_Q6_K> { static constexpr int BYTES = 210; };
template <> struct RawSegment<U_Q8_0> { static constexpr int BYTES = 272; };

/* a segment of one row, `groups` of it, to a unit, whose bytes are zero before: eight threads a row, thread `part` has its group g and the first the scales */
template <class U> __device__ __forceinline__ void pack_segment(const uint8_t *raw, int groups, uint8_t *unit, int row, int part) {
    const int g = part, gid = row & 7, r = row >> 3, half = g >> 2, c = g & 3;
    if (part == 0) Packer<U>::scales(raw, groups, unit, row);
    if (g >= groups) return;
    if constexpr (U::PACKS == 2) {
        uint8_t *to = unit + half * U::HALF;
        for (int w = 0; w < 8; w++) *(uint32_t *)(to + int8_place(c, row, 4 * w)) = load_bytes(raw + g * 34 + 2 + 4 * w);
    } else {
        for (int tig = 0; tig < 4; tig++) *(uint32_t *)(unit + half * U::HALF + r * 512 + (gid * 4 + tig) * 16 + c * 4) = Packer<U>::word(raw, g, tig);
        if constexpr (U::FORM == FORM_S2 && U::HALF == 1536) { /* Q6_K: a high word holds two groups, written by the even one */
            if (c & 1) return;
            for (int tig = 0; tig < 4; tig++) {
                uint32_t w = Packer<U>::high2(raw, g, 4 * tig) | Packer<U>::high2(raw, g, 4 * tig + 16) << 2;
                w |= Packer<U>::high2(raw, g + 1, 4 * tig) << 4 | Packer<U>::high2(raw, g + 1, 4 * tig + 16) << 6;
                *(uint32_t *)(unit + half * U::HALF + 1024 + r * 256 + (gid * 4 + tig) * 8 + (c >> 1) * 4) = w;
            }
        }
    }
}

/* Backend cpu's packed tiles -> units, all of the matrix's. A block of 128 threads makes a unit: the tile's groups of the segment to shared memory, from
 * there to rows of the file, from those to the unit; so nothing but whole lines goes to and from memory. */
struct LiftArgs { bw_untile u; const uint8_t *tiles; uint8_t *units; int rows, cols, segs; size_t tile_bytes; };
enum { LIFT_HEADS = 1024, /* bytes beyond the rows' own that a segment of a tile may have */
       MOST_SEGMENT = 272, MOST_UNIT = 4352 }; /* bytes of a row's segment in the file and of a unit, the largest (Q8_0) */

__device__ __forceinline__ void copy_words(uint8_t *to, const uint8_t *from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((uint32_t *)to)[i] = from ? __ldcs((const uint32_t *)from + i) : 0;
}

struct LiftRoom { __align__(16) uint8_t in[16 * MOST_SEGMENT + LIFT_HEADS], rows[16 * MOST_SEGMENT], unit[MOST_UNIT]; };

template <class U> __device__ __forceinline__ void lift_unit(const LiftArgs &a, LiftRoom &room) {
    static_assert(RawSegment<U>::BYTES <= MOST_SEGMENT && U::UNIT <= MOST_UNIT, "room of a block");
    uint8_t *in = room.in, *rows = room.rows, *unit = room.unit;
    const int seg = blockIdx.x % a.segs, tile = blockIdx.x / a.segs, groups = min(8, a.cols / 32 - seg * 8), row = threadIdx.x >> 3;
    const bool some = tile * UNTILE_ROWS < a.rows;
    copy_words(unit, NULL, U::UNIT);
    if (some) copy_words(in, bw_untile_head(&a.u, a.tiles + (size_t)tile * a.tile_bytes, seg * 8), (groups + a.u.per - 1) / a.u.per * (a.u.head + a.u.per * a.u.codes));
    __syncthreads();
    for (int i = threadIdx.x; some && i < groups / a.u.block * UNTILE_ROWS; i += 128) {
        const int r = i % UNTILE_ROWS, b = i / UNTILE_ROWS;
        bw_untile_block(&a.u, in, b * a.u.block, r, rows + r * RawSegment<U>::BYTES + b * a.u.bytes);
    }
    __syncthreads();
    if (tile * UNTILE_ROWS + row < a.rows) pack_segment<U>(rows + row * RawSegment<U>::BYTES, groups, unit, row, threadIdx.x & 7);
    __syncthreads();
    uint32_t *to = (uint32_t *)(a.units + (size_t)blockIdx.x * U::UNIT);
    for (int i = threadIdx.x; i < U::UNIT / 4; i += 128) to[i] = ((uint32_t *)unit)[i];
}

template <class U> __device__ __forceinline__ void pack_unit(const PackArgs &a) {
    const int seg = blockIdx.x % a.segs, tile = blockIdx.x / a.segs, row = threadIdx.x >> 3, at = tile * 16 + row;
    if (at >= a.rows) return;
    const uint8_t *raw = a.raw + (size_t)at * a.row_bytes + (size_t)seg * RawSegment<U>::BYTES;
    pack_segment<U>(raw, min(8, a.cols / 32 - seg * 8), a.units + (size_t)blockIdx.x * U::UNIT, row, threadIdx.x & 7);
}

/* EMBED: y [rows][cols] = row token * c. type: FloatType of float weights; of units 1 where the type has minima (adding +0 would lose a -0) */
struct EmbedArgs { const uint8_t *w; float *y; int cols, segs, type; float c; };
/* rotation tables of the step's rows: cs [rows][rot] as rope.h lays them out; inv [rot / 2] inverse frequency / factor */
struct RopeTable { const double *inv; float *cs; double scale; int rot; };
struct RopeTables { RopeTable t[8]; int n; };

__device__ __forceinline__ void rope_row(const RopeTable &t, int row, int pos) {
    const int half = t.rot / 2;
    float *cs = t.cs + (size_t)row * t.rot;
    for (int k = threadIdx.x; k < half; k += blockDim.x) bw_sincos(((double)pos * t.inv[k]) * t.scale, cs + half + k, cs + k);
}

template <class U> __device__ __forceinline__ void embed_row(const EmbedArgs &a, int i, int token) {
    const int row = token & 15, lane0 = (row & 7) * 4, r = row >> 3;
    const uint8_t *units = a.w + (size_t)(token >> 4) * a.segs * U::UNIT;
    float *y = a.y + (size_t)i * a.cols;
    for (int k = threadIdx.x; k < a.segs * 32; k += 256) { /* (segment, group, tig) */
        int seg = k >> 5, g = k >> 2 & 7, tig = k & 3, c = g & 3, col = seg * 256 + g * 32 + 4 * tig;
        if (seg * 256 + g * 32 >= a.cols) continue;
        const uint8_t *u = units + (size_t)seg * U::UNIT;
        typename U::Pack p = U::template load_pack<true>(u + (g >> 2) * U::HALF, c / U::GP, r, lane0 + tig);
        float x[2], z[2], m0[2], m1[2];
        const typename U::Pair scales = U::fetch(u + 2 * U::HALF, row, g >> 1);
        U::pair(scales, g >> 1, x, z);
        if constexpr (U::UNSIGNED) U::sign_zeros(u + 2 * U::HALF, row, x, z);
        unit_mins<U>(scales, m0, m1);
        uint32_t lo, hi;
        U::unpack(p, c % U::GP, lo, hi);
        const int e = g & 1;
        const float s0 = x[e], s1 = U::FORM == FORM_S2 || U::FORM == FORM_S2M ? z[e] : x[e];
        const float a0 = U::FORM == FORM_S1M ? z[e] : m0[e], a1 = U::FORM == FORM_S1M ? z[e] : m1[e];
        for (int b = 0; b < 4; b++) {
            uint32_t c0 = lo >> (8 * b) & 255, c1 = hi >> (8 * b) & 255;
            float v0 = s0 * (U::UNSIGNED ? (float)c0 : (float)(int8_t)c0), v1 = s1 * (U::UNSIGNED ? (float)c1 : (float)(int8_t)c1);
            if (a.type && (U::FORM == FORM_S1M || U::FORM == FORM_S2M)) { v0 = v0 + a0; v1 = v1 + a1; }
            y[col + b] = v0 * a.c;
            y[col + 16 + b] = v1 * a.c;
        }
    }
}

} // namespace bw
#endif
