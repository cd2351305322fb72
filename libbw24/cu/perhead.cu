/* PERHEAD on the host's side: each head's columns become a row of their own, which the kernels of EXPERTS multiply with the head's matrix. Owns the
 * scratch and the launches; a pair is (row, head). */
#include "forward.h"
#include "op_perhead.cuh"

namespace bw {

enum { MOST_PAIRS = 32768 }; /* of one launch: blocks along y */

uint64_t cu_perhead_bytes(const bw24_model *m, const bw_op *op) {
    uint64_t pairs = (uint64_t)m->max_rows * (uint64_t)op->i[0], cols = (uint64_t)op->w[0]->ne[0];
    if (op->w[0]->type->form == BW_FLOAT) return pairs * cols * sizeof(float);
    pairs = (pairs + 127) / 128 * 128;
    return pairs * cols + pairs * (cols / 32) * 12;
}

int cu_resolve_perhead(bw24_model *m, bw_list *l, int index) {
    const bw_op *op = &l->ops[index];
    const CuMatrix *x = (const CuMatrix *)op->w[0]->packed;
    if (x->k && !cu_expert_kernels(x->k))
        return bw_fail(BW24_E_UNSUPPORTED, "tensor %s: backend cuda has no PERHEAD kernel over units %s", op->w[0]->name, x->k->name);
    CuMoe &all = model_of(m)->moe;
    int rc = cu_share(m, &all.mem[MOE_HEADS], &all.bytes[MOE_HEADS], (size_t)cu_perhead_bytes(m, op), "heads");
    list_of(l)->moe.mem[MOE_HEADS] = all.mem[MOE_HEADS];
    return rc;
}

void run_perhead(Pass &p, const CuStep &c) {
    const bw_op *op = &p.l->ops[c.first];
    const CuMatrix *x = (const CuMatrix *)op->w[0]->packed;
    const int n = rows_of(p, c), heads = op->i[0], each = MOST_PAIRS / heads, width = width_of(p, op->buf[1]);
    void *mem = p.s->moe.mem[MOE_HEADS];
    for (int r0 = 0; r0 < n; r0 += each) {
        const int rows = n - r0 < each ? n - r0 : each, pairs = rows * heads;
        HeadRows h = {buf_of(p, op->buf[1]) + (size_t)r0 * (size_t)width, NULL, {}, heads, width / heads, op->i[1], x->cols, p.rows.fault, c.first};
        ExpertArgs a = {};
        a.m[0] = {x->w, x->bytes, NULL, NULL, x->scale, x->rows, x->cols, x->segs, x->blocks};
        a.n_mats = a.per_pair = 1;
        a.top = a.slots = heads;
        a.fault = p.rows.fault;
        a.op = c.first;
        a.y = buf_of(p, op->buf[0]) + (size_t)r0 * (size_t)width_of(p, op->buf[0]);
        if (x->k) {
            a.x = h.o = acts_in((int8_t *)mem, ((size_t)p.m->max_rows * (size_t)heads + 127) / 128 * 128, x->cols, (pairs + 3) / 4 * 4);
        } else {
            a.xf = h.y = (float *)mem;
            a.type[0] = x->float_type;
        }
        launch(*p.q, k_head_rows, dim3((unsigned)heads, (unsigned)rows), 128, 0, h);
        run_products(p, x->k ? cu_expert_kernels(x->k) : NULL, a, pairs);
    }
    p.quantised[(size_t)op->buf[0]] = 0;
}

} // namespace bw
