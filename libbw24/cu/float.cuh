/* Float weight types as in the file. Knows how one value is read. */
#ifndef BW24_CU_FLOAT_CUH
#define BW24_CU_FLOAT_CUH

#include "kv.cuh"

namespace bw {

enum FloatType { FLOAT_F32, FLOAT_F16, FLOAT_BF16, FLOAT_E4M3 };

__device__ __forceinline__ float float_at(int type, const uint8_t *w, size_t i) {
    switch (type) {
    case FLOAT_F32: return __ldg((const float *)w + i);
    case FLOAT_F16: return __half2float(__ushort_as_half(__ldg((const unsigned short *)w + i)));
    case FLOAT_BF16: return __uint_as_float((uint32_t)__ldg((const unsigned short *)w + i) << 16);
    default: return e4m3_value(__ldg(w + i));
    }
}

/* bytes of a value */
__device__ __forceinline__ int float_bytes(int type) { return type == FLOAT_F32 ? 4 : type == FLOAT_E4M3 ? 1 : 2; }

} // namespace bw
#endif
