/* LINEAR in plain C for any machine: packed tiles are unpacked a panel at a time to int8 codes and f32 scales, then one loop in the
 * order of docs/numerics.md with the 16 rows innermost. Also the yardstick of what the packed bytes mean. */
#include <math.h>
#include <string.h>

#include "../canon.h"
#include "linear_impl.h"

enum { PANEL = SEGMENT_GROUPS };

typedef struct scratch {
    float acc[2][CPU_TILE], scales[PANEL * 4 * CPU_TILE], panel[SEGMENT * CPU_TILE];
    int8_t codes[PANEL * 512];
} scratch;
_Static_assert(sizeof(scratch) <= CPU_LINEAR_WORK, "work buffer of cpu_linear");

static float half_at(const uint8_t *p) { return bw_f16_to_f32((uint16_t)(p[0] | p[1] << 8)); }

/* code of value e of row r; p is the group's code plane */
static int code_at(enum pack_kind k, const uint8_t *p, int r, int e) {
    int w = e >> 2, at = 4 * r + (e & 3);
    if (k == PACK_Q8_0) return p[64 * w + at] - 128;
    int c = p[64 * (w & 3) + at] >> (w < 4 ? 0 : 4) & 15;
    switch (k) {
    case PACK_Q4_0: return c - 8;
    case PACK_Q5_0: return (c | (p[NIB + at] >> w & 1) << 4) - 16;
    case PACK_Q5_1: case PACK_Q5_K: return c | (p[NIB + at] >> w & 1) << 4;
    case PACK_Q6_K: return (c | (p[NIB + 64 * (w >> 2) + at] >> 2 * (w & 3) & 3) << 4) - 32;
    case PACK_IQ4_NL: case PACK_IQ4_XS: return pack_table_iq4[c] - 128;
    case PACK_MXFP4: case PACK_NVFP4: return pack_table_fp4[c] - 16;
    default: return c;
    }
}

static float e4m3_half(int c) { return (c & 127) == 127 ? 0.0f : bw_e4m3_to_f32((uint8_t)(c & 127)) * 0.5f; }
static float e8m0_half(int e) {
    bw_f32 v = {.u = e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23};
    return v.f;
}

/* six-bit integer j of the scales (m = 0) or minima (m = 1) of row r, from the 12 bytes of Q4_K and Q5_K */
static float six_bits(const uint8_t *p, int r, int j, int m) {
    if (j < 4) return (float)(p[16 * (j + 4 * m) + r] & 63);
    int low = p[16 * (j + 4) + r] >> 4 * m & 15, high = p[16 * (j - 4 + 4 * m) + r] >> 6;
    return (float)(low | high << 4);
}

/* scales of group g of row r -> out[0], out[16] */
static void scales_at(enum pack_kind k, const uint8_t *tile, int64_t g, int r, float *out) {
    const uint8_t *b = tile + head_at(k, g), *p = b + g % head_groups(k) * (k == PACK_MXFP4 ? 16 : 32);
    int j = (int)(g & 7);
    float d;
    switch (k) {
    case PACK_MXFP4: out[0] = e8m0_half(p[r]); break;
    case PACK_NVFP4: out[0] = e4m3_half(p[r]); out[16] = e4m3_half(p[16 + r]); break;
    case PACK_Q4_K: case PACK_Q5_K:
        out[0] = half_at(b + 192 + 2 * r) * six_bits(b, r, j, 0);
        out[16] = -half_at(b + 224 + 2 * r) * six_bits(b, r, j, 1);
        break;
    case PACK_Q6_K:
        d = half_at(b + 256 + 2 * r);
        out[0] = d * (float)(int8_t)b[32 * j + r];
        out[16] = d * (float)(int8_t)b[32 * j + 16 + r];
        break;
    case PACK_IQ4_XS:
        out[0] = half_at(b + 2 * r) * (float)(((b[64 + 16 * (j >> 1) + r] >> 4 * (j & 1) & 15) |
                                               ((b[32 + 2 * r] | b[33 + 2 * r] << 8) >> 2 * j & 3) << 4) - 32);
        break;
    case PACK_Q4_1: case PACK_Q5_1: out[16] = half_at(p + 32 + 2 * r); /* fall through */
    default: out[0] = half_at(p + 2 * r); break;
    }
}

static void packed_panel(enum pack_kind k, const uint8_t *tile, int64_t g0, int64_t n, int8_t *codes, float *scales) {
    const int ns = form_of(k) == BW_S1 ? 1 : 2;
    for (int64_t g = g0; g < g0 + n; g++, codes += 512, scales += ns * CPU_TILE) {
        const uint8_t *p = tile + codes_at(k, g);
        for (int r = 0; r < CPU_TILE; r++) {
            for (int e = 0; e < GROUP; e++) codes[64 * (e >> 2) + 4 * r + (e & 3)] = (int8_t)code_at(k, p, r, e);
            scales_at(k, tile, g, r, scales + r);
        }
    }
}

/* one segment of n groups, one activation row: acc[16] += p */
static void segment(enum bw_form form, const int8_t *codes, const float *scales, int64_t n, const act_line *l, int64_t stride, float *acc) {
    const int ns = form == BW_S1 ? 1 : form == BW_S2M ? 4 : 2;
    float p[CPU_TILE] = {0};
    for (int64_t g = 0; g < n; g++, codes += 512, scales += ns * CPU_TILE, l += stride) {
        int32_t sum[2][CPU_TILE] = {{0}};
        for (int e = 0; e < GROUP; e++)
            for (int r = 0; r < CPU_TILE; r++) sum[e >> 4][r] += codes[64 * (e >> 2) + 4 * r + (e & 3)] * l->q[e];
        for (int r = 0; r < CPU_TILE; r++) {
            const float *s = scales + r;
            if (form == BW_S1 || form == BW_S1M) {
                p[r] = fmaf(s[0], l->d * (float)(sum[0][r] + sum[1][r]), p[r]);
                if (form == BW_S1M) p[r] = fmaf(s[16], l->a, p[r]);
            } else {
                p[r] = fmaf(s[16], l->d * (float)sum[1][r], fmaf(s[0], l->d * (float)sum[0][r], p[r]));
                if (form == BW_S2M) p[r] = fmaf(s[48], l->a1, fmaf(s[32], l->a0, p[r]));
            }
        }
    }
    for (int r = 0; r < CPU_TILE; r++) acc[r] = acc[r] + p[r];
}

static void float_segment(const float *panel, int64_t len, const float *x, int64_t stride, float *acc) {
    float p[CPU_TILE] = {0};
    for (int64_t c = 0; c < len; c++)
        for (int r = 0; r < CPU_TILE; r++) p[r] = fmaf(panel[c * CPU_TILE + r], x[c * stride], p[r]);
    for (int r = 0; r < CPU_TILE; r++) acc[r] = acc[r] + p[r];
}

static void float_panel(enum pack_kind k, const uint8_t *tile, int64_t c0, int64_t len, float *panel) {
    for (int64_t i = 0, at = c0 * CPU_TILE; i < len * CPU_TILE; i++, at++) {
        if (k == PACK_F32) {
            memcpy(panel + i, tile + 4 * at, 4);
        } else {
            uint16_t v;
            memcpy(&v, tile + 2 * at, 2);
            panel[i] = k == PACK_F16 ? bw_f16_to_f32(v) : bw_bf16_to_f32(v);
        }
    }
}

/* one tile, one activation row */
static void tile_row(const cpu_mat *m, const cpu_act *a, int64_t t, int r, float *acc, scratch *s) {
    enum pack_kind k = pack_kind_of(m->type);
    const uint8_t *tile = m->data ? m->data + t * pack_tile_bytes(k, m->cols) : NULL;
    int64_t stride;
    memset(acc, 0, CPU_TILE * sizeof *acc);
    for (int64_t c = 0; c < m->cols; c += SEGMENT) {
        int64_t len = m->cols - c < SEGMENT ? m->cols - c : SEGMENT;
        if (m->type->form == BW_FLOAT) {
            const float *x = act_float_at(a, r, &stride);
            if (tile) float_panel(k, tile, c, len, s->panel);
            else linear_raw_floats(m, t, c, len, s->panel);
            float_segment(s->panel, len, x + c * stride, stride, acc);
        } else {
            const act_line *l = act_line_at(a, r, &stride);
            if (tile) packed_panel(k, tile, c / GROUP, len / GROUP, s->codes, s->scales);
            else linear_raw_panel(m, t, c / GROUP, len / GROUP, 0, (uint8_t *)s->codes, s->scales);
            segment(m->type->form, s->codes, s->scales, len / GROUP, l + c / GROUP * stride, stride, acc);
        }
    }
}

static float value(const cpu_mat *m, float sum, int64_t o) {
    float y = sum * m->scale;
    return m->bias ? y + m->bias[o] : y;
}

void linear_portable(const cpu_mat *m, const cpu_act *a, int r0, int r1, float *y, int64_t ldy, int64_t t0, int64_t t1, const cpu_epi *e,
                     void *work) {
    scratch *s = work;
    enum cpu_epilogue mode = e ? e->mode : CPU_STORE;
    for (int64_t t = t0; t < t1; t++) {
        for (int r = r0; r < r1; r++) {
            tile_row(m, a, t, r, s->acc[0], s);
            if (mode == CPU_GLU) tile_row(e->gate, a, t, r, s->acc[1], s);
            for (int64_t o = t * CPU_TILE; o < (t + 1) * CPU_TILE && o < m->rows; o++) {
                float v = value(m, s->acc[0][o % CPU_TILE], o);
                if (mode == CPU_ADD) v = e->res[r * e->ldres + o] + v;
                if (mode == CPU_GLU) {
                    float g = value(e->gate, s->acc[1][o % CPU_TILE], o);
                    v = (e->act == CPU_SILU ? bw_silu(g) : bw_gelu(g)) * v;
                }
                y[r * ldy + o] = v;
            }
        }
    }
}
