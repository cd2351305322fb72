/* The types of the 16-entry IQ4 codebook: IQ4_NL (blocks of 32) and IQ4_XS (blocks of 256 with 6-bit scales).
 * Layouts: IQ4_NL d, nibbles@2; IQ4_XS d, high scale bits u16@2, low scale nibbles[4]@4, nibbles[128]@8, 16 bytes a group. */
#include "internal.h"
#include <math.h>

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void iq4_codes(const uint8_t *restrict qs, int8_t *restrict q) {
    for (int j = 0; j < 16; j++) {
        q[j] = iq4_values[qs[j] & 15];
        q[j + 16] = iq4_values[qs[j] >> 4];
    }
}

void bw_group_IQ4_NL(const uint8_t *src, int g, bw_group *out) {
    (void)g;
    set_scale(out, load_half(src), 0.0f);
    iq4_codes(src + 2, out->q);
}

void bw_group_IQ4_XS(const uint8_t *src, int g, bw_group *out) {
    int ls = (src[4 + (g >> 1)] >> 4 * (g & 1) & 15) | (load16(src + 2) >> 2 * g & 3) << 4;
    set_scale(out, load_half(src) * (float)(ls - 32), 0.0f);
    iq4_codes(src + 8 + 16 * g, out->q);
}

/* nearest entry, the upper of two equally near */
static int nearest_entry(float x) {
    const int8_t *v = iq4_values;
    if (x <= (float)v[0]) return 0;
    if (x >= (float)v[15]) return 15;
    int above = 1;
    while (above < 15 && !(x < (float)v[above])) above++;
    return x - (float)v[above - 1] < (float)v[above] - x ? above - 1 : above;
}

/* a trial inverse scale under weights x^2: numerator and denominator of the scale that fits its codes best */
static void trial_scale(const float *x, float inv, float *num, float *den) {
    float sn = 0.0f, sd = 0.0f;
    for (int i = 0; i < 32; i++) {
        float q = (float)iq4_values[nearest_entry(inv * x[i])], w = x[i] * x[i], wq = w * q;
        sn += wq * x[i];
        sd += wq * q;
    }
    *num = sn;
    *den = sd;
}

/* best scale of a group: the value of largest magnitude near the codebook's end, 7 steps either way; 0 below 1e-15 */
static float fit_scale(const float *x) {
    float top = peak(x, 32), num, den;
    if (fabsf(top) < 1e-15f) return 0.0f;
    float d = -top / (float)iq4_values[0];
    trial_scale(x, 1.0f / d, &num, &den);
    d = num / den;
    float best = d * num;
    for (int t = -7; t <= 7; t++) {
        trial_scale(x, (float)(t + iq4_values[0]) / top, &num, &den);
        if (den > 0.0f && num * num > best * den) {
            d = num / den;
            best = d * num;
        }
    }
    return d;
}

static void store_entries(const float *x, float inv, uint8_t *qs) {
    for (int j = 0; j < 16; j++) qs[j] = (uint8_t)(nearest_entry(inv * x[j]) | nearest_entry(inv * x[j + 16]) << 4);
}

void bw_encode_IQ4_NL(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += 32, dst += 18) {
        float d = fit_scale(src + i);
        store_half(dst, d);
        store_entries(src + i, d != 0.0f ? 1.0f / d : 0.0f, dst + 2);
    }
}

static void encode_xs_block(const float *x, uint8_t *dst) {
    float scale[8], top = 0.0f;
    for (int j = 0; j < 8; j++) {
        scale[j] = fit_scale(x + 32 * j);
        if (fabsf(scale[j]) > fabsf(top)) top = scale[j];
    }
    float d = -top / 32.0f, inv = d != 0.0f ? 1.0f / d : 0.0f;
    uint32_t high = 0, low = 0;
    store_half(dst, d);
    for (int j = 0; j < 8; j++) {
        int l = clamp_int(near_int(inv * scale[j]), -32, 31);
        float s = d * (float)l;
        store_entries(x + 32 * j, s != 0.0f ? 1.0f / s : 0.0f, dst + 8 + 16 * j);
        low |= (uint32_t)((l + 32) & 15) << 4 * j;
        high |= (uint32_t)((l + 32) >> 4) << 2 * j;
    }
    store16(dst + 2, (uint16_t)high);
    store32(dst + 4, low);
}

void bw_encode_IQ4_XS(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += 256, dst += 136) encode_xs_block(src + i, dst);
}
