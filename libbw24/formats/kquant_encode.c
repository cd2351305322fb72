/* Encoders of Q4_K, Q5_K, Q6_K without importance weights, byte-equal to ggml's reference quantisers: every sum runs serially
 * in f32 in element order, so the order of operations here is part of the format. Knows nothing of decoding beyond the layouts. */
#include "internal.h"
#include <math.h>

enum { BLOCK = 256 };

/* ---- affine groups of 32: Q4_K, Q5_K ---- */

typedef struct fit {
    float scale, min; /* value = scale * code + min, min <= 0 */
    uint8_t code[32];
} fit;

/* how the grid of trial scales is laid: (first + step * i + top) / range for i = 0 .. tries */
typedef struct fit_grid {
    int top;
    float first, step;
    int tries;
} fit_grid;

/* codes for x under an inverse scale and a minimum */
static void assign_codes(const float *x, float inv, float min, int top, uint8_t *code) {
    for (int i = 0; i < 32; i++) code[i] = (uint8_t)clamp_int(near_int(inv * (x[i] - min)), 0, top);
}

/* weighted squared error of an affine reading */
static float fit_error(const float *x, const float *w, const uint8_t *code, float scale, float min) {
    float sum = 0.0f;
    for (int i = 0; i < 32; i++) {
        float diff = scale * (float)code[i];
        diff = diff + min;
        diff = diff - x[i];
        diff = diff * diff;
        sum += w[i] * diff;
    }
    return sum;
}

/* weighted least squares of scale and minimum for given codes; 0 if the codes do not determine them */
static int solve_affine(const float *x, const float *w, const uint8_t *code, float sw, float sx, float *scale, float *min) {
    float sl = 0.0f, sl2 = 0.0f, sxl = 0.0f;
    for (int i = 0; i < 32; i++) {
        float wl = w[i] * (float)code[i];
        sl += wl;
        sl2 += wl * (float)code[i];
        sxl += wl * x[i];
    }
    float det = sw * sl2 - sl * sl;
    if (!(det > 0.0f)) return 0;
    *scale = (sw * sxl - sx * sl) / det;
    *min = (sl2 * sx - sl * sxl) / det;
    if (*min > 0.0f) {
        *min = 0.0f;
        *scale = sxl / sl2;
    }
    return 1;
}

/* scale, minimum and codes of a group: the plain range fit, then the best refit of the grid of trial scales */
static void fit_affine(const float *x, const float *w, const fit_grid *grid, fit *out) {
    float lo = x[0], hi = x[0], sw = w[0], sx = w[0] * x[0];
    for (int i = 1; i < 32; i++) {
        if (x[i] < lo) lo = x[i];
        if (x[i] > hi) hi = x[i];
        sw += w[i];
        sx += w[i] * x[i];
    }
    if (lo > 0.0f) lo = 0.0f;
    out->min = lo;
    if (hi == lo) {
        out->scale = 0.0f;
        memset(out->code, 0, 32);
        return;
    }
    float inv = (float)grid->top / (hi - lo);
    out->scale = 1.0f / inv;
    assign_codes(x, inv, lo, grid->top, out->code);
    float least = fit_error(x, w, out->code, out->scale, lo);
    for (int t = 0; t <= grid->tries; t++) {
        uint8_t code[32];
        float scale, min;
        inv = (grid->first + grid->step * (float)t + (float)grid->top) / (hi - out->min);
        assign_codes(x, inv, out->min, grid->top, code);
        if (!solve_affine(x, w, code, sw, sx, &scale, &min)) continue;
        float error = fit_error(x, w, code, scale, min);
        if (error < least) {
            least = error;
            out->scale = scale;
            out->min = min;
            memcpy(out->code, code, 32);
        }
    }
}

/* weights of a group: root mean square plus magnitude */
static void fit_weights(const float *x, float *w) {
    float sum = 0.0f;
    for (int i = 0; i < 32; i++) sum += x[i] * x[i];
    float rms = sqrtf(sum / 32.0f);
    for (int i = 0; i < 32; i++) w[i] = rms + fabsf(x[i]);
}

/* eight 6-bit scales and minima -> 12 bytes */
static void pack_scales(const uint8_t *ls, const uint8_t *lm, uint8_t *p) {
    for (int j = 0; j < 4; j++) {
        p[j] = (uint8_t)(ls[j] | (ls[j + 4] >> 4) << 6);
        p[j + 4] = (uint8_t)(lm[j] | (lm[j + 4] >> 4) << 6);
        p[j + 8] = (uint8_t)((ls[j + 4] & 15) | (lm[j + 4] & 15) << 4);
    }
}

/* v as a share of the largest, in 6 bits; a negative v wraps to a large byte and gives 63, as in the reference */
static uint8_t six_bits(float v, float inv) {
    uint8_t l = (uint8_t)near_int(inv * v);
    return l < 63 ? l : 63;
}

/* the 16-byte head of a block and its 256 final codes: groups are fitted alone, then coded again under the rounded scales */
static void encode_affine(const float *x, const fit_grid *grid, uint8_t *head, uint8_t *code) {
    fit fits[8];
    float w[32], top_scale = 0.0f, top_min = 0.0f;
    for (int j = 0; j < 8; j++) {
        fit_weights(x + 32 * j, w);
        fit_affine(x + 32 * j, w, grid, &fits[j]);
        if (fits[j].scale > top_scale) top_scale = fits[j].scale;
        if (-fits[j].min > top_min) top_min = -fits[j].min;
    }
    float inv_scale = top_scale > 0.0f ? 63.0f / top_scale : 0.0f, inv_min = top_min > 0.0f ? 63.0f / top_min : 0.0f;
    uint8_t ls[8], lm[8];
    for (int j = 0; j < 8; j++) {
        ls[j] = six_bits(fits[j].scale, inv_scale);
        lm[j] = six_bits(-fits[j].min, inv_min);
    }
    store_half(head, top_scale / 63.0f);
    store_half(head + 2, top_min / 63.0f);
    pack_scales(ls, lm, head + 4);
    float d = load_half(head), dmin = load_half(head + 2);
    for (int j = 0; j < 8; j++) {
        float scale = d * (float)(ls[j] & 63), min = dmin * (float)(lm[j] & 63);
        memcpy(code + 32 * j, fits[j].code, 32);
        if (scale == 0.0f) continue;
        for (int i = 32 * j; i < 32 * j + 32; i++) code[i] = (uint8_t)clamp_int(near_int((x[i] + min) / scale), 0, grid->top);
    }
}

/* low nibbles of 256 codes: bytes 32k .. 32k+31 hold groups 2k (low) and 2k+1 (high) */
static void pack_nibbles(const uint8_t *code, uint8_t *qs) {
    for (int k = 0; k < 4; k++)
        for (int l = 0; l < 32; l++) qs[32 * k + l] = (uint8_t)((code[64 * k + l] & 15) | (code[64 * k + 32 + l] & 15) << 4);
}

void bw_encode_Q4_K(const float *src, uint8_t *dst, int64_t n) {
    static const fit_grid grid = {15, -1.0f, 0.1f, 20};
    uint8_t code[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK, dst += 144) {
        encode_affine(src + i, &grid, dst, code);
        pack_nibbles(code, dst + 16);
    }
}

void bw_encode_Q5_K(const float *src, uint8_t *dst, int64_t n) {
    static const fit_grid grid = {31, -0.5f, 0.1f, 15};
    uint8_t code[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK, dst += 176) {
        encode_affine(src + i, &grid, dst, code);
        pack_nibbles(code, dst + 48);
        memset(dst + 16, 0, 32);
        for (int e = 0; e < BLOCK; e++) dst[16 + (e & 31)] |= (uint8_t)((code[e] >> 4) << (e >> 5));
    }
}

/* ---- symmetric groups of 16: Q6_K ---- */

/* sums of a trial inverse scale, weights x^2: codes in -32..31 -> code + 32, numerator and denominator of the best scale */
static void trial_symmetric(const float *x, float inv, uint8_t *code, float *num, float *den) {
    float sn = 0.0f, sd = 0.0f;
    for (int i = 0; i < 16; i++) {
        int l = clamp_int(near_int(inv * x[i]), -32, 31);
        float w = x[i] * x[i];
        code[i] = (uint8_t)(l + 32);
        sn += w * x[i] * (float)l;
        sd += w * (float)l * (float)l;
    }
    *num = sn;
    *den = sd;
}

/* scale of a group (the sign follows the value of largest magnitude) and its codes; 0 for a group below 1e-15 */
static float fit_symmetric(const float *x, uint8_t *code) {
    float top = peak(x, 16), num, den;
    if (fabsf(top) < 1e-15f) {
        memset(code, 0, 16);
        return 0.0f;
    }
    trial_symmetric(x, -32.0f / top, code, &num, &den);
    float scale = den != 0.0f ? num / den : 0.0f, best = scale * num;
    for (int t = -9; t <= 9; t++) {
        uint8_t trial[16];
        if (t == 0) continue;
        trial_symmetric(x, -(32.0f + 0.1f * (float)t) / top, trial, &num, &den);
        if (den > 0.0f && num * num > best * den) {
            memcpy(code, trial, 16);
            scale = num / den;
            best = scale * num;
        }
    }
    return scale;
}

/* ql: bytes 64h + 32(r & 1) + l hold group r of half h in the nibble r >> 1; qh: 2 bits a group */
static void pack_q6(const uint8_t *code, uint8_t *dst) {
    for (int h = 0; h < 2; h++)
        for (int l = 0; l < 32; l++) {
            const uint8_t *c = code + 128 * h + l;
            dst[64 * h + l] = (uint8_t)((c[0] & 15) | (c[64] & 15) << 4);
            dst[64 * h + 32 + l] = (uint8_t)((c[32] & 15) | (c[96] & 15) << 4);
            dst[128 + 32 * h + l] = (uint8_t)(c[0] >> 4 | (c[32] >> 4) << 2 | (c[64] >> 4) << 4 | (c[96] >> 4) << 6);
        }
}

static void encode_q6_block(const float *x, uint8_t *dst) {
    uint8_t code[BLOCK];
    float scale[16], top = 0.0f;
    for (int j = 0; j < 16; j++) {
        scale[j] = fit_symmetric(x + 16 * j, code + 16 * j);
        if (fabsf(scale[j]) > fabsf(top)) top = scale[j];
    }
    if (fabsf(top) < 1e-15f) {
        memset(dst, 0, 210);
        return;
    }
    float inv = -128.0f / top;
    store_half(dst + 208, 1.0f / inv);
    float d = load_half(dst + 208);
    for (int j = 0; j < 16; j++) {
        int l = near_int(inv * scale[j]);
        int8_t sc = (int8_t)(l < 127 ? l : 127);
        float s = d * (float)sc;
        dst[192 + j] = (uint8_t)sc;
        if (s == 0.0f) continue;
        for (int i = 16 * j; i < 16 * j + 16; i++) code[i] = (uint8_t)(clamp_int(near_int(x[i] / s), -32, 31) + 32);
    }
    pack_q6(code, dst);
}

void bw_encode_Q6_K(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += BLOCK, dst += 210) encode_q6_block(src + i, dst);
}
