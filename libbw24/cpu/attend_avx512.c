/* ATTEND's kernels for AVX-512 F, BW, VL, DQ, VNNI. The text is attend_kernels.h. */
#include "vec.h"
#define V(name) v16_##name
#define VW 16
#define ATTEND_TABLE cpu_attend_avx512
#include "attend_kernels.h"
