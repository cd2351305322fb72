/* Storage formats: decode, encode and the group form of every weight type. Knows blocks of bytes; knows nothing of
 * tensors, models or devices. One source file per format family; the dispatch tables are generated from types.def. */
#ifndef BW24_FORMATS_H
#define BW24_FORMATS_H

#include <stdint.h>
#include <stddef.h>

enum bw_form { BW_FLOAT, BW_S1, BW_S1M, BW_S2, BW_S2M };

/* 32 values in group form: value[e] = s[e >> 4] * q[e] + m[e >> 4], each product exact in f32, one rounding at the sum.
 * S1 and S1M set both halves alike; S1 and S2 set m to +0. */
typedef struct bw_group {
    int8_t q[32];
    float s[2];
    float m[2];
} bw_group;

typedef struct bw_type_info {
    const char *name;
    int id;    /* GGUF id, or this library's own from 256 */
    int block; /* values in a block */
    int bytes; /* bytes in a block */
    enum bw_form form;
    /* one block -> `block` floats, correctly rounded; never NULL */
    void (*decode)(const uint8_t *src, float *dst);
    /* group g (0 .. block/32-1; NVFP4: 0..1) of one block; NULL for FLOAT types */
    void (*group)(const uint8_t *src, int g, bw_group *out);
    /* n values (a multiple of `block`) -> blocks, byte-equal to ggml's reference quantisers (NVFP4 and MXFP4 below 2^-125 apart:
     * fp4.c states their rules); NULL where encoding is not offered */
    void (*encode)(const float *src, uint8_t *dst, int64_t n);
} bw_type_info;

/* NULL if the id is unknown */
const bw_type_info *bw_type(int id);
const bw_type_info *bw_type_by_name(const char *name);
/* the i-th row of types.def, NULL past the end */
const bw_type_info *bw_type_at(int i);
/* bytes of a row of n values; -1 if n is not a multiple of the block */
int64_t bw_row_bytes(const bw_type_info *t, int64_t n);

/* scalar conversions, exact or round-to-nearest-even, all special values defined (formats/scalar.c or inline here) */
float bw_f16_to_f32(uint16_t h);
uint16_t bw_f32_to_f16(float f);  /* RNE, overflow -> Inf, NaN -> quiet NaN */
float bw_bf16_to_f32(uint16_t h);
uint16_t bw_f32_to_bf16(float f); /* RNE */
float bw_e4m3_to_f32(uint8_t c);
uint8_t bw_f32_to_e4m3(float f);  /* RNE, saturating at 448; NaN -> 0x7f */

#endif
