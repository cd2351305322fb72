/* The x86 kernels of LINEAR, one text for every vector length. An including file defines vi, vf, VL (lanes: 16 or 8), the v_ operations,
 * dot_rows / dot_one, V_SIGNED (codes above 63 are kept signed), GEMM_ROWS(form) and LINEAR_FN. Lanes are output rows; integer sums are
 * exact, so only the float operations have an order, and it is that of docs/numerics.md whatever the blocking. */
#include <stdbool.h>
#include <string.h>

#include "../canon.h"
#include "linear_impl.h"

#define UNROLL _Pragma("GCC unroll 16")

enum { VH = CPU_TILE / VL, GEMV_ROWS = 4, GEMV_MOST = VL == 16 ? 16 : 8, ROW_PANEL = 11 * ACT_BLOCK, PANEL_GROUPS = 16 };
enum { PANEL_BYTES = 768 * 1024, PANEL_CODES = PANEL_GROUPS * 512, PANEL_SCALES = PANEL_GROUPS * 64 };

/* facts of the packed kinds, folded at compile time */
/* codes are stored as code + 2^off_shift; -1: no offset */
INL int off_shift(int k) {
    switch (k) {
    case PACK_Q4_0: return 3;
    case PACK_Q5_0: case PACK_MXFP4: case PACK_NVFP4: return 4;
    case PACK_Q6_K: return 5;
    case PACK_Q8_0: case PACK_IQ4_NL: case PACK_IQ4_XS: return V_SIGNED ? -1 : 7;
    default: return -1;
    }
}
/* largest code as the dot product sees it */
INL int top_code(int k) {
    switch (k) {
    case PACK_Q4_0: case PACK_Q4_1: case PACK_Q4_K: return 15;
    case PACK_Q5_0: case PACK_Q5_1: case PACK_Q5_K: case PACK_MXFP4: case PACK_NVFP4: return 31;
    case PACK_Q6_K: return 63;
    default: return 255;
    }
}
/* What a block of 256 says about its groups: f32 factors, and byte scales [8 groups][16 rows] (Q6_K: [16]) of s and m */
typedef struct seg {
    vf d, m;
    uint8_t s[256], t[128];
} seg;

/* 12 packed bytes of 16 rows -> 8 + 8 six-bit integers; 64 bytes hold four of the twelve */
INL void six_bits(const uint8_t *p, seg *o) {
    vi m63 = v_set8(63), m15 = v_set8(15), m48 = v_set8(48);
    for (int i = 0; i < 64; i += 4 * VL) {
        vi a = v_load(p + i), b = v_load(p + 64 + i), c = v_load(p + 128 + i);
        v_store(o->s + i, v_and(a, m63));
        v_store(o->t + i, v_and(b, m63));
        v_store(o->s + 64 + i, v_or(v_and(c, m15), v_and(v_srl(a, 2), m48)));
        v_store(o->t + 64 + i, v_or(v_and(v_srl(c, 4), m15), v_and(v_srl(b, 2), m48)));
    }
}

/* scales of IQ4_XS minus 32, eight of each row: 4 low bits from a byte pair, 2 high bits from a u16 */
INL void iq4xs_bits(const uint8_t *p, seg *o) {
    for (int r = 0; r < 16; r++) {
        uint32_t high = p[32 + 2 * r] | (uint32_t)p[33 + 2 * r] << 8;
        for (int j = 0; j < 8; j++) {
            uint32_t low = p[64 + 16 * (j >> 1) + r] >> 4 * (j & 1) & 15;
            o->s[16 * j + r] = (uint8_t)((low | (high >> 2 * j & 3) << 4) - 32);
        }
    }
}

/* p is the head of a block of 256 */
INL void load_seg(int k, const uint8_t *p, int h, seg *o) {
    if (k == PACK_Q4_K || k == PACK_Q5_K) {
        six_bits(p, o);
        o->d = v_half(p + 192 + 2 * VL * h);
        o->m = v_neg(v_half(p + 224 + 2 * VL * h));
    } else if (k == PACK_Q6_K) {
        memcpy(o->s, p, 256);
        o->d = v_half(p + 256 + 2 * VL * h);
    } else if (k == PACK_IQ4_XS) {
        iq4xs_bits(p, o);
        o->d = v_half(p + 2 * VL * h);
    }
}

INL void nibbles(const uint8_t *p, vi *w) {
    vi low = v_set8(15);
    UNROLL for (int n = 0; n < 4; n++) {
        vi v = v_load(p + 64 * n);
        w[n] = v_and(v, low);
        w[n + 4] = v_and(v_srl(v, 4), low);
    }
}
INL void add_high1(const uint8_t *p, vi *w) {
    vi v = v_load(p), bit = v_set8(16);
    UNROLL for (int n = 0; n < 4; n++) w[n] = v_or(w[n], v_and(v_sll(v, 4 - n), bit));
    UNROLL for (int n = 4; n < 8; n++) w[n] = v_or(w[n], v_and(v_srl(v, n - 4), bit));
}
INL void add_high2(const uint8_t *p, vi *w) {
    vi bits = v_set8(48);
    UNROLL for (int j = 0; j < 2; j++) {
        vi v = v_load(p + 64 * j);
        w[4 * j] = v_or(w[4 * j], v_and(v_sll(v, 4), bits));
        w[4 * j + 1] = v_or(w[4 * j + 1], v_and(v_sll(v, 2), bits));
        w[4 * j + 2] = v_or(w[4 * j + 2], v_and(v, bits));
        w[4 * j + 3] = v_or(w[4 * j + 3], v_and(v_srl(v, 2), bits));
    }
}
INL void lookup(vi table, vi *w) {
    UNROLL for (int n = 0; n < 8; n++) w[n] = v_shuf(table, w[n]);
}

/* 2^(e - 128) of 16 or 8 bytes; a subnormal for e < 2 */
INL vf e8m0_half(const uint8_t *p) {
    vi e = v_u8(p), two = v_set32(2);
    return v_asf(v_blend(v_lt(e, two), v_sll(v_sub(e, v_set32(1)), 23), v_sllv(v_set32(0x200000), e)));
}
/* half the e4m3 magnitude: the same bits as f16 are it times 2^-7; the NaN code reads as 0 */
INL vf ue4m3_half(const uint8_t *p) {
    vi c = v_and(v_u8(p), v_set32(127)), nan = v_set32(127);
    vi bits = v_blend(v_lt(c, nan), v_zero(), v_sll(c, 7));
    return v_mul(v_half32(bits), v_setf(128.0f));
}

/* Group g of a tile: 8 words of codes, scales in sm: S1 {s}, S1M {s, m}, S2 {s0, s1} */
INL void load_group(int k, const uint8_t *tile, int64_t g, int h, const seg *o, vi *w, vf *sm) {
    const uint8_t *codes = tile + codes_at(k, g) + 4 * VL * h;
    const uint8_t *scales = tile + head_at(k, g) + g % head_groups(k) * (k == PACK_MXFP4 ? 16 : 32);
    if (k == PACK_Q8_0) {
        UNROLL for (int n = 0; n < 8; n++) w[n] = V_SIGNED ? v_xor(v_load(codes + 64 * n), v_set8(128)) : v_load(codes + 64 * n);
    } else {
        nibbles(codes, w);
    }
    if (k == PACK_Q5_0 || k == PACK_Q5_1 || k == PACK_Q5_K) add_high1(codes + NIB, w);
    if (k == PACK_Q6_K) add_high2(codes + NIB, w);
    if (k == PACK_IQ4_NL || k == PACK_IQ4_XS) {
        vi table = v_table(pack_table_iq4);
        lookup(V_SIGNED ? v_xor(table, v_set8(128)) : table, w);
    }
    if (k == PACK_MXFP4 || k == PACK_NVFP4) lookup(v_table(pack_table_fp4), w);

    int at = 16 * (int)(g & 7) + VL * h;
    switch (k) {
    case PACK_Q4_0: case PACK_Q5_0: case PACK_Q8_0: case PACK_IQ4_NL: sm[0] = v_half(scales + 2 * VL * h); break;
    case PACK_Q4_1: case PACK_Q5_1:
        sm[0] = v_half(scales + 2 * VL * h);
        sm[1] = v_half(scales + 32 + 2 * VL * h);
        break;
    case PACK_Q4_K: case PACK_Q5_K:
        sm[0] = v_mul(o->d, v_float(v_u8(o->s + at)));
        sm[1] = v_mul(o->m, v_float(v_u8(o->t + at)));
        break;
    case PACK_Q6_K:
        sm[0] = v_mul(o->d, v_float(v_i8(o->s + at + 16 * (int)(g & 7))));
        sm[1] = v_mul(o->d, v_float(v_i8(o->s + at + 16 * (int)(g & 7) + 16)));
        break;
    case PACK_IQ4_XS: sm[0] = v_mul(o->d, v_float(v_i8(o->s + at))); break;
    case PACK_MXFP4: sm[0] = e8m0_half(scales + VL * h); break;
    case PACK_NVFP4:
        sm[0] = ue4m3_half(scales + VL * h);
        sm[1] = ue4m3_half(scales + 16 + VL * h);
        break;
    default: break;
    }
}

#if !V_SIGNED
/* i + the dot products of n words */
INL vi dot_one(vi i, const vi *w, const int8_t *q, int n, int top) {
    (void)top;
    UNROLL for (int k = 0; k < n; k++) i = v_dot_at(i, w[k], q + 4 * k);
    return i;
}
#endif

INL int two_sums(int form) { return form == BW_S2 || form == BW_S2M; }

/* Where sums of pairs are added to an integer sum anyway, it begins at 0 and is converted; a sum of dot products begins at MAGIC (linear_impl.h). */
enum { SUM_ZERO = V_SIGNED ? 0 : MAGIC };

/* start of an integer sum: SUM_ZERO, and what takes the codes' offset back */
INL vi sum_start(const int32_t *n128, int shift) {
    if (shift < 0) return v_set32(SUM_ZERO);
    return shift == 7 && SUM_ZERO ? v_bcast(n128) : v_add32(v_sra(v_bcast(n128), 7 - shift), v_set32(SUM_ZERO - (MAGIC >> (7 - shift))));
}

/* scale times sum, exactly */
INL vf scaled(vi sum, const act_line *l) {
    return SUM_ZERO ? v_scale_at(v_asf(sum), &l->d, &l->c) : v_mul(v_float(sum), v_bcastf(&l->d));
}

/* p after one group */
INL vf fold(int form, vf p, vi i0, vi i1, const vf *sm, const act_line *l) {
    p = v_fma(sm[0], scaled(i0, l), p);
    if (form == BW_S1M) p = v_fma_at(sm[1], &l->a, p);
    if (two_sums(form)) p = v_fma(sm[1], scaled(i1, l), p);
    if (form == BW_S2M) p = v_fma_at(sm[3], &l->a1, v_fma_at(sm[2], &l->a0, p));
    return p;
}

/* 1 .. GEMV_ROWS activation rows: weights go from the packed tile through registers, memory is read once. acc = [nr][16].
 * `ahead`: 0, or where the tile after this one lies, when this one is in the cache already and the next is to follow.
 * Every group's lines are first touched in the order of their addresses: the loads themselves come out of order, and then the
 * machine's stream prefetcher often loses the stream (Zen 4: 26 instead of 32 GB/s; touching further ahead is no better). */
INL void gemv(int k, int nr, const uint8_t *tile, int64_t groups, const act_line *a, int64_t stride, int64_t ahead, float *acc) {
    const int form = form_of(k), shift = off_shift(k), two = two_sums(form);
    const int64_t step = code_bytes(k) + head_bytes(k) / head_groups(k);
    vf y[VH][GEMV_ROWS];
    for (int h = 0; h < VH; h++)
        for (int r = 0; r < nr; r++) y[h][r] = v_setf(0.0f);
    for (int64_t g0 = 0; g0 < groups; g0 += SEGMENT_GROUPS) {
        int64_t end = groups - g0 < SEGMENT_GROUPS ? groups : g0 + SEGMENT_GROUPS;
        UNROLL for (int h = 0; h < VH; h++) {
            seg o;
            vf p[GEMV_ROWS];
            load_seg(k, tile + head_at(k, g0), h, &o);
            UNROLL for (int r = 0; r < nr; r++) p[r] = v_setf(0.0f);
            for (int64_t g = g0; g < end; g++) {
                vi w[8];
                vf sm[2];
                if (h == 0)
                    UNROLL for (int64_t i = 0; i < step; i += 64) _mm_prefetch((const char *)tile + ahead + g * step + i, _MM_HINT_T0);
                load_group(k, tile, g, h, &o, w, sm);
                UNROLL for (int r = 0; r < nr; r++) {
                    const act_line *l = a + g * stride + r;
                    vi i0 = sum_start(two ? &l->n0 : &l->n, shift), i1 = two ? sum_start(&l->n1, shift) : i0;
                    i0 = dot_one(i0, w, l->q, two ? 4 : 8, top_code(k));
                    if (two) i1 = dot_one(i1, w + 4, l->q + 16, 4, top_code(k));
                    p[r] = fold(form, p[r], i0, i1, sm, l);
                }
            }
            UNROLL for (int r = 0; r < nr; r++) y[h][r] = v_add(y[h][r], p[r]);
        }
    }
    for (int h = 0; h < VH; h++)
        for (int r = 0; r < nr; r++) v_storef(acc + r * CPU_TILE + VL * h, y[h][r]);
}

/* Groups [g0, g0 + n) of a tile -> codes [n][8][16][4] and scales [n][2 (1 for S1)][16]; g0 starts a block.
 * With unsigned codes the S forms all get the offset 128, so that one kernel serves them. */
INL void unpack(int k, const uint8_t *tile, int64_t g0, int64_t n, uint8_t *codes, float *scales) {
    const int ns = form_of(k) == BW_S1 ? 1 : 2, up = !V_SIGNED && off_shift(k) >= 0 ? 128 - (1 << off_shift(k)) : 0;
    for (int h = 0; h < VH; h++) {
        seg o;
        for (int64_t g = g0; g < g0 + n; g++, codes += 512, scales += 16 * ns) {
            vi w[8];
            vf sm[2];
            if ((g & 7) == 0) load_seg(k, tile + head_at(k, g), h, &o);
            load_group(k, tile, g, h, &o, w, sm);
            UNROLL for (int i = 0; i < 8; i++) v_store(codes + 64 * i + 4 * VL * h, up ? v_add8(w[i], v_set8((char)up)) : w[i]);
            UNROLL for (int i = 0; i < ns; i++) v_storef(scales + 16 * i + VL * h, sm[i]);
        }
        codes -= 512 * n;
        scales -= 16 * ns * n;
    }
}

#if !V_SIGNED
/* words [w0, w1) of nt tiles and nr rows; codes are [8 words][16 rows][4], i is [nt][nr] */
INL void dot_rows(vi *i, const uint8_t *codes, const act_line *l, int w0, int w1, int nt, int nr, int top) {
    (void)top;
    UNROLL for (int k = w0; k < w1; k++) {
        vi w[GEMM_TILES];
        UNROLL for (int t = 0; t < nt; t++) w[t] = v_load(codes + t * PANEL_CODES + 64 * k);
        UNROLL for (int r = 0; r < nr; r++)
            UNROLL for (int t = 0; t < nt; t++) i[t * nr + r] = v_dot_at(i[t * nr + r], w[t], l[r].q + 4 * k);
    }
}
#endif

/* nr activation rows x nt tiles over n unpacked groups (whole segments, but for the row's last): acc[nt][ROW_PANEL][16] += p of each
 * segment. Tile i has its codes at i * PANEL_CODES and its scales at i * PANEL_SCALES. */
INL void gemm(int form, int top, int shift, int nt, int nr, const uint8_t *codes, const float *scales, int64_t n, const act_line *a,
              int64_t stride, float *acc) {
    const int two = two_sums(form), ns = form == BW_S1 ? 1 : form == BW_S2M ? 4 : 2;
    UNROLL for (int h = 0; h < VH; h++) {
        const uint8_t *c = codes + 4 * VL * h;
        const float *s = scales + VL * h;
        const act_line *l = a;
        for (int64_t g0 = 0; g0 < n; g0 += SEGMENT_GROUPS) {
            int64_t end = n - g0 < SEGMENT_GROUPS ? n : g0 + SEGMENT_GROUPS;
            vf p[GEMM_SUMS], sm[4];
            UNROLL for (int r = 0; r < nt * nr; r++) p[r] = v_setf(0.0f);
            for (int64_t g = g0; g < end; g++, c += 512, s += 16 * ns, l += stride) {
                vi i0[GEMM_SUMS], i1[GEMM_SUMS];
                UNROLL for (int r = 0; r < nr; r++) {
                    vi start = sum_start(two ? &l[r].n0 : &l[r].n, shift), start1 = two ? sum_start(&l[r].n1, shift) : start;
                    UNROLL for (int t = 0; t < nt; t++) {
                        i0[t * nr + r] = start;
                        if (two) i1[t * nr + r] = start1;
                    }
                }
                dot_rows(i0, c, l, 0, two ? 4 : 8, nt, nr, top);
                if (two) dot_rows(i1, c, l, 4, 8, nt, nr, top);
                UNROLL for (int t = 0; t < nt; t++) {
                    UNROLL for (int i = 0; i < ns; i++) sm[i] = v_loadf(s + t * PANEL_SCALES + 16 * i);
                    UNROLL for (int r = t * nr; r < (t + 1) * nr; r++)
                        p[r] = fold(form, p[r], i0[r], two ? i1[r] : i0[r], sm, l + r - t * nr);
                }
            }
            UNROLL for (int t = 0; t < nt; t++) {
                UNROLL for (int r = 0; r < nr; r++) {
                    float *y = acc + (t * ROW_PANEL + r) * CPU_TILE + VL * h;
                    v_storef(y, v_add(v_loadf(y), p[t * nr + r]));
                }
            }
        }
    }
}

#include "linear_drive.h"
