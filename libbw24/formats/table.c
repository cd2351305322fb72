/* The table of storage types, generated from types.def, and its lookups. Knows which codec belongs to which row and no layout. */
#include "internal.h"

/* s * q for the forms without a minimum, so that a negative scale keeps its -0; one rounding at the sum where there is one */
static inline void decode_plain(const bw_group *v, float *dst) {
    for (int h = 0; h < 2; h++)
        for (int e = 16 * h; e < 16 * h + 16; e++) dst[e] = v->s[h] * (float)v->q[e];
}

static inline void decode_affine(const bw_group *v, float *dst) {
    for (int h = 0; h < 2; h++)
        for (int e = 16 * h; e < 16 * h + 16; e++) {
            float p = v->s[h] * (float)v->q[e];
            dst[e] = p + v->m[h];
        }
}

#define DECODE_BY_GROUP(name, block, expand) \
    static void bw_decode_##name(const uint8_t *src, float *dst) { \
        bw_group v; \
        for (int g = 0; g < (block) / 32; g++) { \
            bw_group_##name(src, g, &v); \
            expand(&v, dst + 32 * g); \
        } \
    }
#define DECODE_FLOAT(name, block)
#define DECODE_S1(name, block) DECODE_BY_GROUP(name, block, decode_plain)
#define DECODE_S2(name, block) DECODE_BY_GROUP(name, block, decode_plain)
#define DECODE_S1M(name, block) DECODE_BY_GROUP(name, block, decode_affine)
#define DECODE_S2M(name, block) DECODE_BY_GROUP(name, block, decode_affine)
#define TYPE(name, id, block, bytes, form) DECODE_##form(name, block)
#include "../types.def"
#undef TYPE

#define GROUP_FLOAT(name) NULL
#define GROUP_S1(name) bw_group_##name
#define GROUP_S1M(name) bw_group_##name
#define GROUP_S2(name) bw_group_##name
#define GROUP_S2M(name) bw_group_##name

/* types that are read but not written */
#define bw_encode_Q2_K NULL
#define bw_encode_Q3_K NULL
#define bw_encode_IQ1_S NULL
#define bw_encode_IQ1_M NULL
#define bw_encode_IQ2_XXS NULL
#define bw_encode_IQ2_XS NULL
#define bw_encode_IQ2_S NULL
#define bw_encode_IQ3_XXS NULL
#define bw_encode_IQ3_S NULL

static const bw_type_info types[] = {
#define TYPE(name, id, block, bytes, form) {#name, id, block, bytes, BW_##form, bw_decode_##name, GROUP_##form(name), bw_encode_##name},
#include "../types.def"
#undef TYPE
};

enum { TYPE_COUNT = sizeof types / sizeof types[0] };

const bw_type_info *bw_type(int id) {
    for (int i = 0; i < TYPE_COUNT; i++)
        if (types[i].id == id) return &types[i];
    return NULL;
}

const bw_type_info *bw_type_by_name(const char *name) {
    for (int i = 0; name && i < TYPE_COUNT; i++)
        if (strcmp(types[i].name, name) == 0) return &types[i];
    return NULL;
}

const bw_type_info *bw_type_at(int i) { return i >= 0 && i < TYPE_COUNT ? &types[i] : NULL; }

int64_t bw_row_bytes(const bw_type_info *t, int64_t n) {
    if (n < 0 || n % t->block || n / t->block > INT64_MAX / t->bytes) return -1;
    return n / t->block * t->bytes;
}
