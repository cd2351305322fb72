/* LINEAR of many rows in the numeric class `fast`, and activations for the GEMMs of both classes. Host side; knows no list. */
#ifndef BW24_CU_GEMM_FAST_H
#define BW24_CU_GEMM_FAST_H

#include "launch.h"

namespace bw {

/* fewer rows take the exact program, as ATTEND of the class does */
enum { FAST_LEAST_ROWS = 33 };

/* bytes of the bf16 activations of `rows` rows, or of the f16 ones that the exact GEMM of warp groups reads */
size_t gemm_acts_bytes(bool warp_groups, bool fast, size_t rows, size_t cols);
/* the activations of x as f16: op_gemm_codes.cuh */
void gemm_codes(Queue &q, const Acts &x, uint8_t *acts);
/* the same of the rows of a's tiles to a.rows and a.factor */
struct ExpertGemmArgs;
void gemm_pairs(Queue &q, const ExpertGemmArgs &a);
/* kernels of these units exist in the class and fit the card */
bool gemm_fast_fits(const Queue &q, const LinearKernels *k);
/* a.rows rows of a.x through `acts`, then the parts; gemm_fast_fits(q, k) */
void gemm_fast(Queue &q, const LinearKernels *k, const LinearArgs &a, uint8_t *acts);

} // namespace bw
#endif
