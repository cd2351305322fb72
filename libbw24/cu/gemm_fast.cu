/* LINEAR of many rows in the numeric class `fast`: shape of its blocks by card and unit, and the bf16 activations that they read */
#include "gemm_fast.h"
#include "op_gemm_fast.cuh"

namespace bw {

size_t gemm_acts_bytes(bool warp_groups, bool fast, size_t rows, size_t cols) {
    const size_t padded = (rows + FAST_PAD - 1) / FAST_PAD * FAST_PAD, stages = (cols + 127) / 128 * 2;
    const size_t bf16 = fast ? padded * stages * 128 : 0, codes = warp_groups ? group_acts_bytes((rows + 127) / 128 * 128, (int)cols) : 0;
    return bf16 > codes ? bf16 : codes;
}

void gemm_codes(Queue &q, const Acts &x, uint8_t *acts) {
    launch(q, k_fast_acts, dim3((unsigned)(group_stages(x.cols) + 7) / 8, (unsigned)(x.ld / 8)), 256, 0, x, acts, 0, true, ExpertRows());
}

void gemm_pairs(Queue &q, const ExpertGemmArgs &a) {
    const ExpertRows e = {a.tiles, a.n_tiles, a.order, a.top, a.gather, (float *)a.factor};
    launch(q, k_fast_acts, dim3((unsigned)a.most * (EXPERT_TILE / 8)), 256, 0, a.x, (uint8_t *)a.rows, 0, true, e);
}

/* what a block has */
struct FastShape { int outs, rows, threads; size_t bytes; };

template <class U> static FastShape fast_shape(const Queue &q) {
    if (q.warp_groups) return {WG_OUTS, WG_ROWS, WG_THREADS, sizeof(WgShared<U>)};
    if (q.shared_max > 100 * 1024) return {128, FAST_ROWS_LARGE, 256, sizeof(FastGemmShared<U, FAST_ROWS_LARGE>)};
    return {128, FAST_ROWS_SMALL, 256, sizeof(FastGemmShared<U, FAST_ROWS_SMALL>)};
}

static FastShape (*const shapes[])(const Queue &q) = { /* by UnitId: those that the class has */
    fast_shape<U_Q4_0>, fast_shape<U_Q4_K>, fast_shape<U_NVFP4>, fast_shape<U_Q8_0>, fast_shape<U_Q6_K>, fast_shape<U_IQ4_XS>, fast_shape<U_INT8>,
};

bool gemm_fast_fits(const Queue &q, const LinearKernels *k) {
    return k->id < (int)(sizeof shapes / sizeof *shapes) && shapes[k->id](q).bytes <= (size_t)q.shared_max;
}

void gemm_fast(Queue &q, const LinearKernels *k, const LinearArgs &a, uint8_t *acts) {
    const int padded = (a.rows + FAST_PAD - 1) / FAST_PAD * FAST_PAD, groups = (a.x.cols + 127) / 128 * 4, per_warp = q.warp_groups ? 2 : 1;
    const FastShape s = shapes[k->id](q);
    const int rows = q.warp_groups ? a.x.ld : padded;
    launch(q, k_fast_acts, dim3((unsigned)((groups + 8 * per_warp - 1) / (8 * per_warp)), (unsigned)(rows / 8)), 256, 0, a.x, acts, padded, false, ExpertRows());
    int tiles = 0;
    for (int i = 0; i < a.n_parts; i++) tiles += (a.part[i].n + s.outs - 1) / s.outs;
    launch(q, k_linear_fast, dim3((unsigned)((a.rows + s.rows - 1) / s.rows), (unsigned)tiles), s.threads, s.bytes, k->id, a, (const uint8_t *)acts, padded);
}

} // namespace bw
