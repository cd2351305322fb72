/* Tokens that an earlier kernel of the same round gives, read where they stand. Knows no list. */
#ifndef BW24_CU_VALUE_CUH
#define BW24_CU_VALUE_CUH

#include "sample_args.h"

namespace bw {

/* the token at a value; -1 where its column stands for none */
__device__ __forceinline__ int value_of(const uint8_t *block, RoundValue v, const int *ids) {
    const uint8_t *p = block + v.at;
    if (v.kind == VALUE_STATE) return ((const volatile SampleState *)p)->token;
    int i = (int)~(uint32_t)*(const volatile u64 *)p;
    return v.kind == VALUE_COLUMN ? __ldg(ids + i) : i;
}

} // namespace bw
#endif
