/* The row ops' kernels for AVX-512 F, BW, VL, DQ, VNNI. The text is vecops_kernels.h. */
#include "vec.h"
#define V(name) v16_##name
#define VW 16
#define VECOPS_TABLE cpu_vecops_avx512
#include "vecops_kernels.h"
