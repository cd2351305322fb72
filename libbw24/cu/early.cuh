/* What keeps a kernel's loads and addresses where they are written, before the dependency wait: the compiler moves them to where their value is used. */
#ifndef BW24_CU_EARLY_CUH
#define BW24_CU_EARLY_CUH

#include "device.cuh"

namespace bw {

/* a load that stays before the dependency wait; constant ones are moved */
__device__ __forceinline__ float load_now(const float *p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ int load_now(const int *p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_now(const uint4 *p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
/* a value that is in a register here, not fetched or made where it is first used */
__device__ __forceinline__ int held(int v) { asm volatile("" : "+r"(v)); return v; }
template <class T> __device__ __forceinline__ T *held(T *p) { asm volatile("" : "+l"(p)); return p; }

} // namespace bw
#endif
