/* ATTEND's kernels for AVX2 with FMA and F16C. The text is attend_kernels.h. */
#include "vec.h"
#define V(name) v8_##name
#define VW 8
#define ATTEND_TABLE cpu_attend_avx2
#include "attend_kernels.h"
