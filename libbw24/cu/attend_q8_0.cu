/* ATTEND over K in KV_Q8_0, V in KV_Q5_1 or KV_Q8_0 */
#include "attend_kernels.cuh"

namespace bw {
bool attend_q8_0(Queue &q, const AttendArgs &a, const StepRows &s, bool split) {
    return a.kv.v == KV_Q8_0 ? attend_run<KV_Q8_0, KV_Q8_0>(q, a, s, split) : attend_run<KV_Q8_0, KV_Q5_1>(q, a, s, split);
}
}
