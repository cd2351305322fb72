/* The row ops' kernels for AVX2 with FMA and F16C. The text is vecops_kernels.h. */
#include "vec.h"
#define V(name) v8_##name
#define VW 8
#define VECOPS_TABLE cpu_vecops_avx2
#include "vecops_kernels.h"
