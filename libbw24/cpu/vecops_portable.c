/* The row ops' kernels for any machine. The text is vecops_kernels.h. */
#include "vec.h"
#define V(name) p8_##name
#define VW 8
#define VECOPS_TABLE cpu_vecops_portable
#include "vecops_kernels.h"
