/* The kernels of CONV and DELTA for AVX-512 F, BW, VL, DQ, VNNI. The text is recur_kernels.h. */
#include "vec.h"
#define V(name) v16_##name
#define VW 16
#define RECUR_TABLE cpu_recur_avx512
#include "recur_kernels.h"
