/* Host side of drawing on the device: the picks of a step become rows and edits in device memory, the kernels follow the step's own in its
 * stream. Owns that memory; knows no list. */
#include <algorithm>
#include <cstring>
#include "op_sample.cuh"
#include "sample.h"

namespace bw {

bool cu_penalised(const bw24_sampler *p) {
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

bool cu_pick_plain(const bw24_pick *p) {
    return p->params->temperature == 0.0f && !p->params->n_bias && !(cu_penalised(p->params) && p->n_history);
}

/* ids that change, each once; `count` has an entry for every id, all zero before and after */
void cu_add_edits(CuSampler *s, const bw24_pick *p, std::vector<int> &count) {
    const bw24_sampler *q = p->params;
    std::vector<int> touched, order;
    for (int i = 0; i < p->n_history && cu_penalised(q); i++)
        if (!count[(size_t)p->history[i]]++) touched.push_back(p->history[i]);
    for (int i = 0; i < q->n_bias; i++) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [=](int a, int b) { return q->bias_ids[a] < q->bias_ids[b]; });
    for (size_t i = 0; i < order.size();) {
        int id = q->bias_ids[order[i]];
        SampleEdit e = {id, count[(size_t)id], (int)s->bias.size(), 0};
        for (; i < order.size() && q->bias_ids[order[i]] == id; i++, e.bias_n++) s->bias.push_back(q->bias_values[order[i]]);
        count[(size_t)id] = 0;
        s->edits.push_back(e);
    }
    for (int id : touched) {
        if (count[(size_t)id]) s->edits.push_back({id, count[(size_t)id], 0, 0});
        count[(size_t)id] = 0;
    }
}

static int grow(bw24_model *m, CuSampler *s, size_t bytes, size_t slots) {
    if (bytes > s->cap) {
        if (s->dev) cudaFree(s->dev);
        if (s->host) cudaFreeHost(s->host);
        s->dev = s->host = NULL;
        s->cap = 0;
        size_t room = bytes + bytes / 2 + 4096;
        int rc = cu_alloc(m, (void **)&s->dev, room, "sampling");
        if (rc) return rc;
        cudaError_t e = cudaHostAlloc((void **)&s->host, room, cudaHostAllocDefault);
        if (e) return cu_fail(m->ctx, e, "pinned memory");
        s->cap = room;
    }
    if (slots <= s->n_slots) return 0;
    if (s->slots) cudaFree(s->slots);
    s->slots = NULL;
    s->n_slots = 0;
    int rc = cu_alloc(m, (void **)&s->slots, slots * sizeof(RaceBest), "sampling");
    if (!rc) s->n_slots = slots;
    return rc;
}

SampleRow cu_sample_row(const bw24_pick *p, uint64_t position, int from, int n) {
    const bw24_sampler *q = p->params;
    SampleRow r = {};
    r.seed = q->seed;
    r.pos = position;
    r.k = q->temperature == 0.0f ? 0.0f : 1.44269504f / q->temperature;
    r.top_p = q->top_p; r.min_p = q->min_p; r.top_k = q->top_k;
    r.rep = q->repetition_penalty; r.presence = q->presence_penalty; r.freq = q->frequency_penalty;
    r.edit_from = from; r.edit_n = n;
    return r;
}

/* states first: they are what comes back */
int cu_sample_upload(bw24_model *m, const bw_batch *b, const bw24_pick *picks, SampleArgs *a) {
    CuModel *cm = model_of(m);
    if (!cm->sampler) cm->sampler = new CuSampler();
    CuSampler *s = cm->sampler;
    const size_t n = (size_t)b->want.n, vocab = (size_t)a->vocab, chunks = (vocab + RACE_CHUNK - 1) / RACE_CHUNK;
    std::vector<int> count(vocab, 0);
    s->edits.clear(); s->bias.clear(); s->rows.clear();
    for (size_t i = 0; i < n; i++) {
        int from = (int)s->edits.size();
        cu_add_edits(s, &picks[i], count);
        s->rows.push_back(cu_sample_row(&picks[i], (uint64_t)b->want.pos[i] + 1, from, (int)s->edits.size() - from));
    }
    size_t at_rows = n * sizeof(SampleState), at_edits = at_rows + n * sizeof(SampleRow), at_bias = at_edits + s->edits.size() * sizeof(SampleEdit),
           bytes = at_bias + s->bias.size() * sizeof(float);
    int rc = grow(m, s, bytes, n * chunks);
    if (rc) return rc;
    memcpy(s->host + at_rows, s->rows.data(), at_edits - at_rows);
    if (!s->edits.empty()) memcpy(s->host + at_edits, s->edits.data(), at_bias - at_edits);
    if (!s->bias.empty()) memcpy(s->host + at_bias, s->bias.data(), bytes - at_bias);
    cudaError_t e = cudaMemcpyAsync(s->dev + at_rows, s->host + at_rows, bytes - at_rows, cudaMemcpyHostToDevice, ctx_of(m)->q.stream);
    if (e) return cu_fail(m->ctx, e, "sampling");
    a->state = (SampleState *)s->dev;
    a->rows = (const SampleRow *)(s->dev + at_rows);
    a->edits = (const SampleEdit *)(s->dev + at_edits);
    a->bias = (const float *)(s->dev + at_bias);
    a->slots = s->slots;
    return 0;
}

void cu_sample_edit(Queue &q, const SampleArgs &a, int n, unsigned long long *best) { launch(q, k_sample_edit, dim3((unsigned)n), 256, 0, a, best); }

bool cu_sample_filters(const SampleRow &r) { return r.k != 0.0f && (r.top_k > 0 || r.top_p < 1.0f || r.min_p > 0.0f); }

void cu_sample_race(Queue &q, const SampleArgs &a, int n, bool filters) {
    if (filters) launch(q, k_sample_bound, dim3((unsigned)n), BOUND_THREADS, 0, a);
    launch(q, k_sample_race, dim3((unsigned)(a.vocab + RACE_CHUNK - 1) / RACE_CHUNK, (unsigned)n), RACE_THREADS, 0, a);
}

void cu_sample_draw(bw24_model *m, const SampleArgs &a, int n) {
    Queue &q = ctx_of(m)->q;
    CuSampler *s = model_of(m)->sampler;
    bool filters = false;
    for (const SampleRow &r : s->rows) filters |= cu_sample_filters(r);
    cu_sample_race(q, a, n, filters);
    if (!q.error) q.error = cudaMemcpyAsync(s->host, a.state, (size_t)n * sizeof(SampleState), cudaMemcpyDeviceToHost, q.stream);
}

bool cu_sample_edits(const bw24_model *m) { return !model_of(m)->sampler->edits.empty(); }

void cu_sample_read(const bw24_model *m, int n, bw_drawn *out) {
    const SampleState *s = (const SampleState *)model_of(m)->sampler->host;
    for (int i = 0; i < n; i++) out[i] = {s[i].token, s[i].kept, s[i].mass};
}

void cu_sample_free(CuModel *cm) {
    CuSampler *s = cm->sampler;
    if (!s) return;
    if (s->dev) cudaFree(s->dev);
    if (s->host) cudaFreeHost(s->host);
    if (s->slots) cudaFree(s->slots);
    delete s;
    cm->sampler = NULL;
}

} // namespace bw
