/* Operands of the gated delta net's short form: CONV, what stands between it and DELTA, DELTA, and the gated norm after it. Knows no kernel. */
#ifndef BW24_CU_GDN_CUH
#define BW24_CU_GDN_CUH

#include "device.cuh"
#include "fold.cuh"

namespace bw {

enum { GDN_CHANNELS = 128, GDN_TAPS = 4, GDN_CHUNK = 8 };
/* threads of a block of so many columns of a head: a channel of q, k or v each, and a warp for 8 columns */
constexpr int gdn_threads(int cols) { return cols == GDN_CHANNELS ? 512 : 256 + cols; }

struct GdnArgs {
    ConvArgs conv;           /* x: [rows][n]; y is not written */
    DeltaArgs d;             /* its inputs are not read */
    int from[3];             /* first channel of q, k, v */
    float eps[2], scale;     /* NORM of q and k; SCALE of q */
    bool scaled;
    const float *beta, *decay, *a, *dt; /* [rows][heads] before SIGMOID and DECAY; weights of DECAY */
    bool tail;               /* NORM by head and GLU: y = act(z) * (norm of DELTA's output) */
    const float *z, *w;      /* [rows][heads * dv]; [dv] or NULL */
    float tail_eps;
    int gelu;
    float *y;                /* [rows][heads * dv]: the last op's output; DELTA's until the head's last block finishes it */
    int *count;              /* [sequences][heads] blocks that are done, 0 between launches */
    Acts o;                  /* the same quantised, q NULL: not wanted */
    int quant_op;            /* what a fault of that names */
};

} // namespace bw
#endif
