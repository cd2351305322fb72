/* Backend "cpu": what weights and work memory will take (bw24_predict). The sums follow backend.c, which makes what is counted here. */
#include <stdlib.h>

#include "../ref/fold.h"
#include "state.h"

static uint64_t small_floats(const bw_tensor *t) { return (uint64_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]) * sizeof(float); }

/* Rows whose logits are wanted: those of the gate before a reply. A buffer's other rows are never touched, so they take no memory; the logits
 * themselves are the caller's, and it keeps one set while it looks at the next row. */
enum { WANTED = 8 };

/* packed matrices, raw ones that a kernel reads where they are, and the f32 form of small tensors */
static uint64_t weights(const bw24_model *m) {
    uint64_t packed = 0, other = 0;
    for (int i = 0; i < m->n_tensors; i++) {
        const bw_tensor *t = m->tensors[i];
        uint64_t part = t->linear ? (cpu_pack_bytes(t->type, bw_part_rows(t), t->ne[0]) + 63) & ~(uint64_t)63 : 0;
        if (part && m->ctx->repack) packed += (uint64_t)t->parts * part;
        else if (t->linear) other += t->bytes;
        else if (t->used && t->ne[1] == 1) other += small_floats(t);
    }
    return other + ((packed + (1 << 21) - 1) & ~(uint64_t)((1 << 21) - 1));
}

/* EXPERTS of one list: the scratch of its largest layer */
static uint64_t moe(const bw24_model *m, const bw_list *l) {
    uint64_t most = 0;
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code != BW_OP_EXPERTS) continue;
        int part, pairs = m->max_rows * ((int)l->bufs[op->buf[2]].width / 2);
        const bw_tensor *scale, *gate = bw_expert_part(op, BW_EXP_GATE, 0, &part, &scale), *down = bw_expert_part(op, BW_EXP_DOWN, 0, &part, &scale);
        uint64_t need = (uint64_t)pairs * (uint64_t)(down->ne[0] + bw_part_rows(down)) * sizeof(float);
        int f = gate->type->form == BW_FLOAT;
        need += cpu_act_bytes(pairs, gate->ne[0], f) + cpu_act_bytes(pairs, down->ne[0], f);
        most = need > most ? need : most;
    }
    return most;
}

/* buffers between matrices that a step joins are never written; NULL: out of memory */
static bool *unwritten(const bw24_model *m, bw_list *l) {
    bw_plan *plan;
    bool *out = calloc((size_t)l->n_bufs, sizeof *out);
    if (!out || bw_lower(l, m->ctx->fuse, &plan)) { free(out); return NULL; }
    for (int i = 0; i < plan->n_steps; i++) {
        const bw_step *st = &plan->steps[i];
        for (int k = 0; k < st->n_lin && st->glu >= 0; k++) out[l->ops[st->lin0 + k].buf[0]] = true;
    }
    bw_plan_free(plan);
    return out;
}

static uint64_t work(const bw24_model *m, const bw_list *l, const bool *out) {
    uint64_t bytes = moe(m, l), rot = 0, attend = 0, heads = 0;
    int64_t in = 64, widest = 64;
    bool quant = false, floats = false;
    for (int i = 0; i < l->n_bufs; i++) {
        if (out[i]) continue;
        int rows = l->bufs[i].rows == BW_ROWS_WANT && m->max_rows > WANTED ? WANTED : m->max_rows;
        bytes += (uint64_t)(i == l->logits ? rows + 1 : rows) * (uint64_t)l->bufs[i].width * sizeof(float);
        if (i == l->logits) continue;
        widest = l->bufs[i].width > widest ? l->bufs[i].width : widest;
    }
    for (int i = 0; i < l->n_ops; i++) {
        const bw_op *op = &l->ops[i];
        if (op->code == BW_OP_ROPE) rot = (uint64_t)op->i[2];
        if (op->code == BW_OP_ATTEND) {
            uint64_t need = cpu_attend_work(&l->kvs[op->kv].desc, m->max_rows, op->i[0]);
            attend = need > attend ? need : attend;
        }
        if (op->code == BW_OP_PERHEAD && (uint64_t)op->i[0] * cpu_head_bytes(m, op) > heads) heads = (uint64_t)op->i[0] * cpu_head_bytes(m, op);
        if (op->code != BW_OP_LINEAR) continue;
        in = op->w[0]->ne[0] > in ? op->w[0]->ne[0] : in;
        *(op->w[0]->type->form == BW_FLOAT ? &floats : &quant) = true;
    }
    uint64_t thread = CPU_LINEAR_WORK + attend + (uint64_t)widest * sizeof(float) + cpu_act_bytes(1, in, 0) + cpu_act_bytes(1, in, 1);
    bytes += heads + (uint64_t)m->ctx->threads * thread + (uint64_t)m->max_rows * rot * sizeof(float);
    if (quant) bytes += cpu_act_bytes(m->max_rows, in, 0);
    return floats ? bytes + cpu_act_bytes(m->max_rows, in, 1) : bytes;
}

int cpu_predict(bw24_model *m, bw24_memory *out) {
    out->weights = weights(m);
    for (int i = 0; i < m->n_lists; i++) {
        bool *skip = unwritten(m, m->lists[i]);
        if (!skip) return bw_fail(BW24_E_MEMORY, "out of memory for a plan");
        out->work += work(m, m->lists[i], skip);
        free(skip);
    }
    out->host = out->weights + out->work + out->kv + out->state;
    return 0;
}
