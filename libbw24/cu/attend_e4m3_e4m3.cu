/* ATTEND over K in KV_E4M3, V in KV_E4M3 */
#include "attend_kernels.cuh"

namespace bw {
bool attend_e4m3_e4m3(Queue &q, const AttendArgs &a, const StepRows &s, bool split) { return attend_run<KV_E4M3, KV_E4M3>(q, a, s, split); }
}
