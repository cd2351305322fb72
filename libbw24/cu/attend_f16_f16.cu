/* ATTEND over K in KV_F16, V in KV_F16 */
#include "attend_kernels.cuh"

namespace bw {
bool attend_f16_f16(Queue &q, const AttendArgs &a, const StepRows &s, bool split) { return attend_run<KV_F16, KV_F16>(q, a, s, split); }
}
