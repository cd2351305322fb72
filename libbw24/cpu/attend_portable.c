/* ATTEND's kernels for any machine. The text is attend_kernels.h. */
#include "vec.h"
#define V(name) p8_##name
#define VW 8
#define ATTEND_TABLE cpu_attend_portable
#include "attend_kernels.h"
