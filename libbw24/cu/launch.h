/* How the host starts kernels, and the tables of LINEAR kernels by unit. Host side of the CUDA backend; knows no list. */
#ifndef BW24_CU_LAUNCH_H
#define BW24_CU_LAUNCH_H

#include <cuda_runtime.h>
#include "attend.cuh"
#include "op_linear.cuh"
#include "pack.cuh"

namespace bw {

/* A stream and what its card allows. The first error stays; later launches do nothing. */
struct Queue {
    cudaStream_t stream;
    bool pdl;          /* programmatic dependent launch: compute capability 9.0 and up */
    bool warp_groups;  /* compute capability 9.0: matrix instructions of warp groups (op_gemm_wgmma.cuh) */
    bool barrier;      /* the next kernel starts when all before it have ended */
    bool twos;         /* blocks of the next kernel go in clusters of two */
    int sms, shared_max; /* multiprocessors; bytes of shared memory that a block may ask for */
    cudaError_t error;
};

inline bool has_warp_groups(int major, int minor) { return major == 9 && minor == 0; }

enum { SHARED_LEAST = 99 * 1024 }; /* bytes that a block may ask for on the smallest supported cards */

/* the fewest equal chunks of the heads that share a KV head with at most n in each */
inline int head_chunks(int share, int n) {
    int chunks = (share + n - 1) / n;
    while (share % chunks) chunks++;
    return chunks;
}

template <class... P, class... A> void launch(Queue &q, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    if (q.error || !grid.x || !grid.y || !grid.z) return;
    if (shared > 48 * 1024) q.error = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (q.error) return;
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[2];
    unsigned n = 0;
    c.gridDim = grid;
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = shared;
    c.stream = q.stream;
    if (q.pdl && !q.barrier) {
        at[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (q.twos) {
        at[n].id = cudaLaunchAttributeClusterDimension;
        at[n].val.clusterDim.x = 2;
        at[n].val.clusterDim.y = at[n].val.clusterDim.z = 1;
        n++;
    }
    c.attrs = at;
    c.numAttrs = n;
    q.barrier = q.twos = false;
    q.error = cudaLaunchKernelEx(&c, kernel, P(args)...);
}

/* kernels of one unit type; one file linear_*.cu each, so that they compile side by side */
struct LinearKernels {
    const char *name;
    int id, unit;                                      /* UnitId; bytes */
    bool packs;                                        /* pack_units and lift_units make it; else the host makes the units */
    bool (*gemm_fits)(const Queue &q);
    bool (*takes_norm)(const Queue &q, int segs);      /* `small` of one row can do the NORM before it (LinearArgs.norm) */
    int (*most)(const Queue &q, int segs);             /* rows that `small` takes: 8 or 16 */
    void (*small)(Queue &q, const LinearArgs &a, bool glu);
    void (*gemm)(Queue &q, const LinearArgs &a, uint8_t *acts); /* any rows, a.x padded to 128; acts: gemm_acts_bytes */
};
/* rotation tables of the step's rows and EMBED; k NULL: a float matrix, a.y NULL: no EMBED, no tables: t.n 0 */
void begin_rows(Queue &q, const LinearKernels *k, const EmbedArgs &a, const RopeTables &t, const StepRows &s);
void pack_units(Queue &q, const LinearKernels *k, const PackArgs &a);
void lift_units(Queue &q, const LinearKernels *k, const LiftArgs &a); /* from backend cpu's packed form */
/* LINEAR or GLU of one row and small matrices, each with units of its own type; false: not this one (linear_tiny.cu) */
bool linear_tiny(Queue &q, const LinearKernels *const *k, const LinearArgs &a, bool glu);
/* ATTEND by pair of formats; false: not this head size. split: pieces go to a.o and a.nl, attend_merge folds them */
bool attend_q8_0(Queue &q, const AttendArgs &a, const StepRows &s, bool split); /* V in q5_1 or q8_0 */
bool attend_f16_f16(Queue &q, const AttendArgs &a, const StepRows &s, bool split);
bool attend_e4m3_e4m3(Queue &q, const AttendArgs &a, const StepRows &s, bool split);
/* The same with the merge in its launch, where no row sees more than a.reach pieces; false: not these heads, or they do not fit the card */
enum { SHORT_REACH_LEAST = 4, SHORT_REACH = 16, SHORT_ROWS = 8 }; /* the classes of a.reach double from the least to the most; rows of a step */
bool attend_has_short(const KvPlace &kv);
bool attend_short(Queue &q, const AttendArgs &a, const StepRows &s);
bool attend_has_gated(const KvPlace &kv, int window);
/* ATTEND of the class `fast` over any pair of formats; false: not this head size */
bool attend_class_fast(Queue &q, const AttendArgs &a, const StepRows &s);
extern const LinearKernels linear_q4_0, linear_q4_k, linear_nvfp4, linear_q8_0, linear_q6_k, linear_iq4_xs, linear_int8, linear_int8h;

} // namespace bw
#endif
