/* Kernels that serve every unit: packing at load and while lifting, and what a step begins with, rotation tables and EMBED. Which unit is an argument: each
 * runs once a step or less, so code that is jumped over costs nothing. */
#ifndef BW24_CU_OP_PACK_CUH
#define BW24_CU_OP_PACK_CUH

#include "pack.cuh"

namespace bw {

/* units from the file's rows, or, where lift.tiles is not NULL, from packed tiles */
static __global__ void __launch_bounds__(128) k_pack(int unit, PackArgs a, LiftArgs lift) {
    __shared__ LiftRoom room;
#define BW_PACK(id, U) case id: if (lift.tiles) lift_unit<U>(lift, room); else pack_unit<U>(a); break;
    switch (unit) {
        BW_PACK(UNIT_Q4_0, U_Q4_0)
        BW_PACK(UNIT_Q4_K, U_Q4_K)
        BW_PACK(UNIT_NVFP4, U_NVFP4)
        BW_PACK(UNIT_Q8_0, U_Q8_0)
        BW_PACK(UNIT_Q6_K, U_Q6_K)
        BW_PACK(UNIT_IQ4_XS, U_IQ4_XS)
    }
#undef BW_PACK
}

/* x: rows of the step, y: rotation tables, then EMBED where a.y is not NULL. UNIT_FLOAT: a float matrix */
static __global__ void __launch_bounds__(256) k_begin(int unit, EmbedArgs a, const __grid_constant__ RopeTables tables, StepRows s) {
    pdl_trigger();
    pdl_wait();
    const int i = blockIdx.x;
    if ((int)blockIdx.y < tables.n) return rope_row(tables.t[blockIdx.y], i, s.pos[i]);
    const int token = s.token[i];
    switch (unit) {
    case UNIT_Q4_0: return embed_row<U_Q4_0>(a, i, token);
    case UNIT_Q4_K: return embed_row<U_Q4_K>(a, i, token);
    case UNIT_NVFP4: return embed_row<U_NVFP4>(a, i, token);
    case UNIT_Q8_0: return embed_row<U_Q8_0>(a, i, token);
    case UNIT_Q6_K: return embed_row<U_Q6_K>(a, i, token);
    case UNIT_IQ4_XS: return embed_row<U_IQ4_XS>(a, i, token);
    case UNIT_INT8: return embed_row<U_INT8>(a, i, token);
    case UNIT_INT8H: return embed_row<U_INT8H>(a, i, token);
    default:
        for (int c = threadIdx.x; c < a.cols; c += 256) a.y[(size_t)i * a.cols + c] = float_at(a.type, a.w, (size_t)token * a.cols + c) * a.c;
    }
}

} // namespace bw
#endif
