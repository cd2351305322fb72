/* LINEAR of one row and small matrices. Owns which launches that is; the kernel is op_linear_tiny.cuh's. */
#include "op_linear_tiny.cuh"
#include "launch.h"

namespace bw {

enum { TINY_UNITS = 20 }; /* most units of a multiprocessor: more do not start together (96 registers a thread) */

static int tiny_unit(const LinearKernels *k) {
    const LinearKernels *const of[] = {&linear_q4_0, &linear_q4_k, &linear_nvfp4, &linear_q8_0, &linear_q6_k, &linear_iq4_xs, &linear_int8, &linear_int8h};
    for (int i = 0; i < 8; i++)
        if (of[i] == k) return i;
    return -1;
}

/* tiles, or fours of a GLU, over inputs of segs segments */
static bool linear_tiny_fits(const Queue &q, int tiles, int segs, bool glu) {
    const int warps = segs * (glu ? 4 : 1);
    return q.pdl && warps <= TINY_WARPS && tiles <= q.sms * (TINY_UNITS / warps);
}

bool linear_tiny(Queue &q, const LinearKernels *const *k, const LinearArgs &a, bool glu) {
    const int tiles = glu ? a.blocks : 2 * a.blocks, warps = a.segs * (glu ? 4 : 1);
    if (a.rows != 1 || !linear_tiny_fits(q, tiles, a.segs, glu)) return false;
    TinyShape g = {};
    for (int i = 0; i < a.n_parts; i++) {
        g.unit[i] = tiny_unit(k[i]);
        if (g.unit[i] < 0) return false;
    }
    g.glu = glu;
    g.turn = 1;
    launch(q, k_linear_tiny, dim3((unsigned)tiles), 32 * warps, tiny_shared(warps), a, g);
    return true;
}

} // namespace bw
