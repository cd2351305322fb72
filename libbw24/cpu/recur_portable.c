/* The kernels of CONV and DELTA for any machine. The text is recur_kernels.h. */
#include "vec.h"
#define V(name) p8_##name
#define VW 8
#define RECUR_TABLE cpu_recur_portable
#include "recur_kernels.h"
