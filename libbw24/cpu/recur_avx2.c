/* The kernels of CONV and DELTA for AVX2 with FMA and F16C. The text is recur_kernels.h. */
#include "vec.h"
#define V(name) v8_##name
#define VW 8
#define RECUR_TABLE cpu_recur_avx2
#include "recur_kernels.h"
