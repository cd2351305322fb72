/* Finds the gated delta net's chain of steps in a list and runs its short form. Owns the conditions under which one launch may stand for the chain. */
#include "forward.h"
#include "op_gdn.cuh"

namespace bw {

enum { GDN_ROWS = 32 }; /* most rows of a step in the short form; all of them are logged, so there is no version in the middle */

/* which of DELTA's q, k, v a buffer is, -1: none */
static int input_of(const bw_op *delta, int buf) {
    for (int i = 0; i < 3; i++)
        if (delta->buf[i + 1] == buf) return i;
    return -1;
}

struct Seen { bool slice[3], norm[2], sigmoid, decay; };

/* one op between CONV and DELTA */
static bool match_between(bw24_model *m, bw_list *l, const bw_op *conv, const bw_op *delta, const bw_op *op, GdnArgs *a, Seen *seen) {
    CuList *s = list_of(l);
    const int which = input_of(delta, op->buf[0]);
    if (op->code == BW_OP_SLICE) {
        if (which < 0 || seen->slice[which] || op->buf[1] != conv->buf[0] || op->i[0] != 1) return false;
        a->from[which] = op->i[1];
        return seen->slice[which] = true;
    }
    if (op->code == BW_OP_NORM) {
        if (which < 0 || which > 1 || seen->norm[which] || !seen->slice[which] || op->buf[1] != op->buf[0] || op->w[0] || !op->i[1] || op->i[0] != a->d.kheads) return false;
        a->eps[which] = (float)op->f[0];
        return seen->norm[which] = true;
    }
    if (op->code == BW_OP_SCALE) {
        if (which || a->scaled || !seen->norm[0] || op->buf[1] != op->buf[0] || op->w[0]) return false;
        a->scale = (float)op->f[0];
        return a->scaled = true;
    }
    if (op->code == BW_OP_SIGMOID) {
        if (seen->sigmoid || op->buf[0] != delta->buf[5]) return false;
        a->beta = s->buf[(size_t)op->buf[1]];
        return seen->sigmoid = true;
    }
    if (op->code != BW_OP_DECAY || seen->decay || op->buf[0] != delta->buf[4]) return false;
    a->decay = s->buf[(size_t)op->buf[1]];
    if (cu_upload_dense(m, op->w[0], &a->a) || cu_upload_dense(m, op->w[1], &a->dt)) return false;
    return seen->decay = true;
}

/* NORM by head of DELTA's output, then GLU */
static bool match_tail(bw24_model *m, bw_list *l, const bw_op *delta, const CuStep &c, GdnArgs *a) {
    CuList *s = list_of(l);
    const bw_op *norm = &l->ops[c.first], *glu = norm + 1;
    if (c.kind != CU_ROWS || c.n != 2 || c.want || norm->code != BW_OP_NORM || glu->code != BW_OP_GLU) return false;
    if (norm->buf[1] != delta->buf[0] || norm->i[0] != a->d.heads || norm->i[1] || glu->buf[2] != norm->buf[0] || glu->buf[1] == norm->buf[0]) return false;
    int after = c.first + 2;
    for (int b : {delta->buf[0], norm->buf[0]})
        if (b != glu->buf[0] && !cu_dead_after(l, after, b)) return false;
    if (cu_upload_dense(m, norm->w[0], &a->w)) return false;
    a->tail = true;
    a->z = s->buf[(size_t)glu->buf[1]];
    a->tail_eps = (float)norm->f[0];
    a->gelu = glu->i[0] == 1;
    a->y = s->buf[(size_t)glu->buf[0]];
    return true;
}

static bool match_at(bw24_model *m, bw_list *l, size_t i, GdnArgs *a, int *steps) {
    CuList *s = list_of(l);
    if (i + 2 >= s->steps.size()) return false;
    const CuStep &conv = s->steps[i], &rows = s->steps[i + 1], &delta = s->steps[i + 2];
    if (conv.kind != CU_CONV || rows.kind != CU_ROWS || delta.kind != CU_DELTA || rows.want) return false;
    const bw_op *c = &l->ops[conv.first], *d = &l->ops[delta.first];
    a->conv = s->convs[(size_t)conv.at];
    a->d = s->deltas[(size_t)delta.at];
    if (a->d.dv % 32 || a->d.dv > GDN_CHANNELS || a->d.dk > GDN_CHANNELS || a->conv.taps > GDN_TAPS) return false;
    if (a->conv.n != 2 * a->d.kheads * a->d.dk + a->d.heads * a->d.dv) return false; /* each channel has a block that keeps it */
    Seen seen = {};
    for (int k = 0; k < rows.n; k++)
        if (!match_between(m, l, c, d, &l->ops[rows.first + k], a, &seen)) return false;
    if (!seen.slice[0] || !seen.slice[1] || !seen.slice[2] || !seen.norm[0] || !seen.norm[1] || !seen.sigmoid || !seen.decay) return false;
    int q = a->from[0], k = a->from[1], v = a->from[2], kd = a->d.kheads * a->d.dk;
    if (v != 2 * kd || q + k != kd || (q && k)) return false;
    for (int b : {c->buf[0], d->buf[1], d->buf[2], d->buf[3], d->buf[4], d->buf[5]})
        if (!cu_dead_after(l, delta.first + 1, b)) return false;
    a->y = s->buf[(size_t)d->buf[0]];
    *steps = 3;
    if (i + 3 < s->steps.size() && match_tail(m, l, d, s->steps[i + 3], a)) *steps = 4;
    return true;
}

int cu_resolve_gdn(bw24_model *m, bw_list *l) {
    CuList *s = list_of(l);
    CuModel *all = model_of(m);
    for (size_t i = 0; i < s->steps.size(); i++) {
        GdnArgs a = {};
        int steps;
        if (s->steps[i].kind != CU_CONV || !match_at(m, l, i, &a, &steps)) continue;
        const size_t bytes = (size_t)GDN_ROWS * a.d.heads * sizeof(int);
        if (all->gdn_count_bytes < bytes) {
            int rc = cu_share(m, (void **)&all->gdn_count, &all->gdn_count_bytes, bytes, "gated delta nets");
            cudaError_t e = rc ? cudaSuccess : cudaMemsetAsync(all->gdn_count, 0, bytes, ctx_of(m)->q.stream);
            if (rc || e) return rc ? rc : cu_fail(m->ctx, e, "gated delta nets");
        }
        s->steps[i].short_n = steps;
        s->steps[i].short_at = (int)s->gdns.size();
        s->gdns.push_back(a);
    }
    return 0;
}

int run_gdn(Pass &p, size_t i) {
    const CuStep &c = p.s->steps[i];
    if (c.kind != CU_CONV || !c.short_n || p.rows.n > GDN_ROWS) return 0;
    GdnArgs a = p.s->gdns[(size_t)c.short_at];
    const CuStep &last = p.s->steps[i + (size_t)c.short_n - 1];
    a.d.fault = p.rows.fault;
    if (last.quant_out) a.o = acts_of(p, last.out, p.rows.n);
    a.quant_op = last.quant_op;
    a.count = model_of(p.m)->gdn_count;
    const bool full = a.d.dk == GDN_CHANNELS && a.d.dv == GDN_CHANNELS && a.conv.taps == GDN_TAPS;
    const int cols = full ? (int)GDN_CHANNELS : 32;
    const dim3 grid((unsigned)(a.d.heads * (a.d.dv / cols)), (unsigned)p.n_seqs);
    launch(*p.q, full ? k_gdn<GDN_CHANNELS, true> : k_gdn<32, false>, grid, gdn_threads(cols), 0, a, p.fold);
    for (int k = c.first; k < last.first + last.n; k++) p.quantised[(size_t)p.l->ops[k].buf[0]] = 0;
    p.quantised[(size_t)last.out] = last.quant_out;
    return c.short_n;
}

} // namespace bw
