/* The shape and formats of one KV cache (one layer). Pages of 64 tokens; the layout inside a page belongs to the backend. */
#ifndef BW24_KV_H
#define BW24_KV_H
#include <stdbool.h>
#include "formats/formats.h"

typedef struct bw_kv_desc {
    int heads, dim;               /* KV heads; values a head */
    const bw_type_info *kt, *vt;  /* formats of K and V: F32, F16, Q8_0, Q5_1, E4M3 */
    bool shared;                  /* a key is its own value: vt is kt, and a page may keep one of the two */
} bw_kv_desc;

#endif
