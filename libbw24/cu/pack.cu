/* Launches of packing and of what a step begins with, whatever the unit */
#include "launch.h"
#include "op_pack.cuh"

namespace bw {

void begin_rows(Queue &q, const LinearKernels *k, const EmbedArgs &a, const RopeTables &t, const StepRows &s) {
    launch(q, k_begin, dim3((unsigned)s.n, (unsigned)(t.n + (a.y != NULL))), 256, 0, k ? k->id : (int)UNIT_FLOAT, a, t, s);
}
void pack_units(Queue &q, const LinearKernels *k, const PackArgs &a) {
    launch(q, k_pack, dim3((unsigned)((a.rows + 15) / 16 * a.segs)), 128, 0, k->id, a, LiftArgs());
}
void lift_units(Queue &q, const LinearKernels *k, const LiftArgs &a) {
    launch(q, k_pack, dim3((unsigned)((a.rows + 31) / 32 * 2 * a.segs)), 128, 0, k->id, PackArgs(), a);
}

} // namespace bw
