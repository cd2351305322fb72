/* Drawing on the device, as forward.cu uses it. */
#ifndef BW24_CU_SAMPLE_H
#define BW24_CU_SAMPLE_H

#include "cuda.h"
#include "sample_args.h"

namespace bw {

/* memory of a model's draws: states, rows, edits and biases in one block, on the device and pinned */
struct CuSampler {
    uint8_t *dev, *host;
    size_t cap;
    RaceBest *slots;
    size_t n_slots;
    std::vector<SampleRow> rows;
    std::vector<SampleEdit> edits;
    std::vector<float> bias;
};

/* the edits of a pick's bias and history appended to s; count: an entry for every id, all zero before and after */
void cu_add_edits(CuSampler *s, const bw24_pick *p, std::vector<int> &count);
SampleRow cu_sample_row(const bw24_pick *p, uint64_t position, int edit_from, int edit_n);
bool cu_penalised(const bw24_sampler *p);
bool cu_sample_filters(const SampleRow &r);
void cu_sample_race(Queue &q, const SampleArgs &a, int n, bool filters); /* the draws of n rows whose edits are made */
/* likeliest token, nothing edited: the step's own result serves */
bool cu_pick_plain(const bw24_pick *p);
/* a->logits, best and vocab are set; the rest is filled in and uploaded in the context's stream */
int cu_sample_upload(bw24_model *m, const bw_batch *b, const bw24_pick *picks, SampleArgs *a);
bool cu_sample_edits(const bw24_model *m); /* whether some logit changes: then `best` must be found again after cu_sample_edit */
void cu_sample_edit(Queue &q, const SampleArgs &a, int n, unsigned long long *best);
void cu_sample_draw(bw24_model *m, const SampleArgs &a, int n); /* ends with the copy that cu_sample_read needs the stream to have done */
void cu_sample_read(const bw24_model *m, int n, bw_drawn *out);
void cu_sample_free(CuModel *cm);

} // namespace bw
#endif
