/* Operands of the row ops' interpreter (op_rows.cuh), one entry an op, resolved when a list is prepared. Knows no kernel. */
#ifndef BW24_CU_ROWS_CUH
#define BW24_CU_ROWS_CUH

#include "kv.cuh"

namespace bw {

enum { PICKS = 4 }; /* buffers whose wanted rows one launch picks */
enum RowCode { ROW_NORM, ROW_ADD, ROW_SCALE, ROW_GLU, ROW_ROPE, ROW_APPEND, ROW_SOFTCAP, ROW_SLICE, ROW_GATE, ROW_SIGMOID, ROW_DECAY, ROW_CONCAT, ROW_ROUTE };
struct RowOp {
    int code, op;             /* index in the list, for faults */
    float *y;                 /* [rows][n] */
    const float *a, *b, *w;   /* inputs of the row; weights, bias of ROUTE, a of DECAY */
    int n, na, nb;            /* widths of y (ROPE: of x), a, b */
    int i[4];                 /* NORM heads, l2; GLU gelu; ROPE heads, dim, rot, norm style; SLICE heads, from; CONCAT heads; ROUTE groups, keep, norm, sigmoid */
    float f;                  /* NORM eps; SCALE c; SOFTCAP cap; ROUTE scale */
    const float *cs;          /* ROPE: table; DECAY: dt */
    KvPlace kv;               /* APPEND: k in a, v in b */
};

/* ROUTE as each block of EXPERTS makes it for itself: softmax, one group, at most 256 experts, 32 of them chosen. logits NULL: the route has it */
struct RouteChoice {
    const float *logits, *bias; /* [rows][experts]; [experts] or NULL */
    float *route;         /* where the first block of a row leaves it */
    float scale;
    int experts, norm, op;
};

/* y = act(x) * up (GLU), x * sigmoid(up) (GATE) or f * tanh(x / f) (SOFTCAP) [rows][n], and the quantised form of y, or of x where it is all that is wanted. Column c has the
 * value of up at c, or with size > 0 at c / size * stride + from + c % size * step, of rows of ldu values. */
enum QuantKind { QUANT_ONLY, QUANT_SILU, QUANT_GELU, QUANT_GATE, QUANT_CAP };
struct QuantArgs {
    const float *x, *up;
    float *y;
    Acts o;           /* o.q NULL: not wanted */
    float f;
    int n, kind, ldu, size, stride, from, step, *fault, op;
};

} // namespace bw
#endif
