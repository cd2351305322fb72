/* Operands of the row ops' interpreter (op_rows.cuh), one entry an op, resolved when a list is prepared. Knows no kernel. */
#ifndef BW24_CU_ROWS_CUH
#define BW24_CU_ROWS_CUH

#include "kv.cuh"

namespace bw {

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

} // namespace bw
#endif
