/* Experts beyond memory: which experts of a model are in RAM, and how the others get there. An entry is one expert of one EXPERTS op with its three
 * matrices. Owns the byte budget, the policies, the files and the threads that read; refuses to know what a matrix is multiplied with or how a
 * backend packs it. One thread at a time calls begin, next and end; wait may be called by many. */
#ifndef BW24_SPILL_H
#define BW24_SPILL_H

#include <sys/types.h>

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BW_SPILL_WAVE = 2 }; /* experts that are read, then used, together; the least that a budget must hold */

/* where one matrix of a spilled tensor lies. file -1: the file lacks this expert, and choosing it is an error */
typedef struct bw_place { int32_t file; const bw_type_info *type; uint64_t offset; } bw_place;

typedef struct bw_spill bw_spill;

/* bytes of a matrix's packed form, 0: it is used as it lies in the file */
typedef size_t (*bw_spill_room)(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols);

/* makes the layer of an EXPERTS op whose tensors are spilled; *index counts from 0 in the order of the calls */
int bw_spill_layer(bw24_model *m, const bw_op *op, bw_spill_room room, int *index);
/* true if the op's tensors are spilled; all three are or none is */
bool bw_spilled(const bw_op *op);
const bw_type_info *bw_spill_type(const bw_op *op, int expert, int matrix);

/* The experts that a step needs of a layer: order = active, those in RAM first, *hits of them. All hits are held until next or end lets them go, and
 * reads start for as many of the others as there is room for. rows: of the step; expert e has uses[e] (row, slot) pairs (NULL: none). order may be
 * active itself. Experts of the backend's own set are not asked for here. */
void bw_spill_begin(bw_spill *s, int layer, const int *active, int n, int rows, const int *uses, int *order, int *hits);
/* experts order[from .. to) are used next: those before are let go, reads of these are surely on their way */
void bw_spill_next(bw_spill *s, int from, int to);
int bw_spill_begun(const bw_spill *s); /* order[.. here) is there or on its way */
/* Waits until the matrix's bytes are there: *raw, inside the block that begins at *base (64-byte aligned). A packed form goes to *base and may be
 * written tile by tile over the raw rows that it has consumed. False: they could not be read; they are zeros, and the step must fail (bw_spill_error).
 * Call it only for experts that were not hits. */
bool bw_spill_wait(bw_spill *s, int layer, int expert, int matrix, uint8_t **base, uint8_t **raw);
/* For a thread that would wait for the matrix: takes the pages of an expert that is read later from the system, which is half of what reading costs.
 * False: the matrix is there, or there is nothing to take. */
bool bw_spill_touch(bw_spill *s, int layer, int expert, int matrix);
void bw_spill_end(bw_spill *s);
/* the backend's clock: nanoseconds spent waiting for reads and unpacking, and computing */
void bw_spill_time(bw_spill *s, int64_t wait_ns, int64_t compute_ns);
void bw_spill_card_time(bw_spill *s, int64_t ns); /* a step's nanoseconds in which the card alone was waited for */

/* A second set of experts, in memory of the backend's own (a card's), beside the budget: filled by bw24_spill_card, changed by bw_spill_swap alone, never
 * asked of begin. bytes: of one matrix there; put: writes a matrix from its rows as the file has them to `offset` of that memory, a multiple of
 * 256, and is done with the rows when wait (NULL: when put) returns; settle: everything that was put is there. pin, unpin: what makes memory of the budget fit
 * for the device's own copies and ends that, NULL where nothing is needed; pin may refuse and is called by many threads. both: an expert of the set may
 * be in RAM as well. */
typedef struct bw_spill_set {
    size_t (*bytes)(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols);
    int (*put)(bw24_model *m, int layer, int expert, int matrix, uint64_t offset, const uint8_t *raw);
    int (*wait)(bw24_model *m);
    int (*settle)(bw24_model *m);
    bool (*pin)(bw24_model *m, void *at, size_t bytes);
    void (*unpin)(bw24_model *m, void *at);
    bool both;
} bw_spill_set;
/* for bw_backend.warm, before it packs experts that were read: where they are on their way to the set, it gets them now */
int bw_spill_to_set(bw_spill *s, int layer, const int *experts, int n);
/* one byte an expert of the layer: 1 where the set has it; where its matrix lies there; bytes of the whole set */
const uint8_t *bw_spill_in_set(const bw_spill *s, int layer);
uint64_t bw_spill_set_at(const bw_spill *s, int layer, int expert, int matrix);
uint64_t bw_spill_set_bytes(const bw_spill *s);
/* uses of experts of the set, which begin does not see; in the order of the layers they follow begin */
void bw_spill_set_uses(bw_spill *s, int layer, const int *experts, int n, const int *uses);
/* Experts of a step that the device takes from RAM by itself, before begin: hold keeps one there until release. False: it is not in RAM, its memory is not
 * pinned, or the budget would starve without it. held_uses counts them, in the order of the layers after begin. */
bool bw_spill_in_ram(const bw_spill *s, int layer, int expert);
uint64_t bw_spill_total_uses(const bw_spill *s, int layer, int expert); /* pairs since the model was made */
bool bw_spill_pinned(const bw_spill *s, int layer, int expert); /* its memory is fit for the device's copies */
bool bw_spill_hold(bw_spill *s, int layer, int expert);
void bw_spill_release(bw_spill *s, int layer, int expert);
void bw_spill_held_uses(bw_spill *s, int layer, const int *experts, int n, const int *uses);
/* Policies other than FROZEN: the expert takes the place in the set of one of its layer that the step does not use (uses[e] = 0), the least valuable one by
 * SLRU, of those that RAM has as well if there is one; bw_spill_set_at says
 * where. False: there is none. The bytes are the backend's to write before the set's memory is read again. */
bool bw_spill_swap(bw_spill *s, int layer, int expert, const int *uses);
/* a trace's mark between steps, where begin is not called for layer 0 */
void bw_spill_step(bw_spill *s);
/* the first failure since the last call, NULL: none; the text stays until the next begin */
const char *bw_spill_error(bw_spill *s);
int64_t bw_spill_clock(void);
void bw_spill_free(bw_spill *s);
/* the range lies inside the file */
int bw_spill_check(bw_spill *s, const char *name, int index, int file, uint64_t offset, uint64_t bytes);

/* memory.c: bytes that can be taken without harm under `root` ("" is the system): what is free of MemAvailable after a reserve of max(4 GiB, 8 %), and
 * of every memory cgroup above this process after 8 %. reserve 0 leaves both out. Below 0: the reserve is in use already. */
int64_t bw_memory_free(const char *root, bool reserve);

/* how files are read, for tests that inject faults */
typedef struct bw_spill_io {
    ssize_t (*pread)(int fd, void *buf, size_t n, off_t at);
    int64_t patience_ns; /* a step fails when no read has ended for so long */
} bw_spill_io;
extern bw_spill_io bw_spill_sys;

#ifdef __cplusplus
}
#endif
#endif
