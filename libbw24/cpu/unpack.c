/* Spilled experts in the form that the kernels read: packing in place, and reading ahead. Owns the order of tiles that makes packing in place safe; the
 * bytes come from spill.h. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, usleep */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

size_t cpu_spill_room(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols) {
    return m->ctx->repack ? cpu_pack_bytes(t, rows, cols) : 0;
}

/* Tile k is written to [k, k + 1) packed tiles from the base, its rows lie behind: raw - base is at least packed - raw bytes, and each packed tile is
 * at most as much longer than its rows as the average, so nothing that is still needed is overwritten once the tile's own rows are in `tile`. */
void cpu_unpack_spilled(cpu_mat *mat, bool pack, uint8_t *base, uint8_t *raw, uint8_t *tile) {
    mat->data = pack ? base : NULL;
    mat->raw = pack ? NULL : raw;
    size_t size = pack ? cpu_pack_bytes(mat->type, CPU_TILE, mat->cols) : 0, row = (size_t)bw_row_bytes(mat->type, mat->cols);
    for (int64_t k = 0; pack && k < cpu_tiles(mat->rows); k++) {
        int64_t first = k * CPU_TILE, n = mat->rows - first < CPU_TILE ? mat->rows - first : CPU_TILE;
        cpu_mat one = *mat;
        one.rows = n;
        one.data = base + (size_t)k * size;
        memcpy(tile, raw + (size_t)first * row, (size_t)n * row);
        cpu_pack_tiles(&one, tile, 0, 1);
    }
}

typedef struct warm_job {
    bw24_model *m;
    int layer;
    const int *experts;
    int n;
    uint8_t **tiles;
    atomic_int next, put; /* matrices taken, in the order in which they are read; experts that the set has got */
    int rc;               /* of putting them there */
} warm_job;
enum { PUT_TOGETHER = 4 }; /* experts between two waits for the set */

/* the caller's thread alone: what is on its way to the set goes there before it is packed */
static void put_all(warm_job *j) {
    for (int at = 0; at < j->n; at += PUT_TOGETHER) {
        int n = at + PUT_TOGETHER < j->n ? PUT_TOGETHER : j->n - at;
        if (!j->rc) j->rc = bw_spill_to_set(j->m->spill, j->layer, j->experts + at, n);
        atomic_store(&j->put, at + n);
    }
}

static void warm_part(void *arg, int tid, int threads) {
    warm_job *j = arg;
    cpu_mat *mats = ((cpu_weights *)j->m->priv)->spilled[j->layer];
    (void)threads;
    if (tid == 0) put_all(j);
    for (int i; (i = atomic_fetch_add(&j->next, 1)) < 3 * j->n;) {
        uint8_t *base, *raw;
        cpu_mat *mat = &mats[3 * j->experts[i / 3] + i % 3];
        bool pack = cpu_spill_room(j->m, mat->type, mat->rows, mat->cols) > 0;
        while (bw_spill_touch(j->m->spill, j->layer, j->experts[i / 3], i % 3)) {}
        bool there = bw_spill_wait(j->m->spill, j->layer, j->experts[i / 3], i % 3, &base, &raw);
        while (atomic_load(&j->put) <= i / 3) usleep(20);
        if (there) cpu_unpack_spilled(mat, pack, base, raw, j->tiles[tid]);
    }
}

static size_t tile_bytes(const cpu_mat *mats, const int *experts, int n) {
    size_t most = 64;
    for (int i = 0; i < 3 * n; i++) {
        const cpu_mat *mat = &mats[3 * experts[i / 3] + i % 3];
        size_t need = (size_t)(CPU_TILE * bw_row_bytes(mat->type, mat->cols));
        if (need > most) most = need;
    }
    return most;
}

int cpu_warm(bw24_model *m, int layer, const int *experts, int n) {
    cpu_pool *pool = ((cpu_ctx *)m->ctx->priv)->pool;
    int threads = cpu_pool_size(pool), hits, put = 0, rc = 0;
    int *order = malloc((size_t)n * sizeof *order);
    uint8_t **tiles = calloc((size_t)threads, sizeof *tiles);
    size_t bytes = tile_bytes(((cpu_weights *)m->priv)->spilled[layer], experts, n);
    for (int t = 0; tiles && t < threads; t++)
        if (!(tiles[t] = malloc(bytes))) rc = BW24_E_MEMORY;
    if (!order || !tiles || rc) rc = bw_fail(BW24_E_MEMORY, "out of memory for reading experts ahead");
    if (!rc) bw_spill_begin(m->spill, layer, experts, n, 1, NULL, order, &hits);
    for (int at = hits, to; !rc && at < n; at = to) { /* as many at once as have memory already */
        int begun = bw_spill_begun(m->spill);
        to = at + BW_SPILL_WAVE < begun ? begun : at + BW_SPILL_WAVE < n ? at + BW_SPILL_WAVE : n;
        warm_job job = {.m = m, .layer = layer, .experts = order + at, .n = to - at, .tiles = tiles, .rc = put};
        bw_spill_next(m->spill, at, to);
        cpu_pool_run(pool, warm_part, &job);
        put = job.rc;
    }
    if (!rc) bw_spill_end(m->spill);
    for (int t = 0; tiles && t < threads; t++) free(tiles[t]);
    free(tiles);
    free(order);
    const char *lost = bw_spill_error(m->spill);
    return rc ? rc : put ? put : lost ? bw_fail(BW24_E_IO, "%s", lost) : 0;
}

/* ---- the set: experts outside the budget, packed once */
static size_t set_bytes_of(const bw24_model *m, const bw_type_info *t, int64_t rows, int64_t cols) {
    size_t room = cpu_spill_room(m, t, rows, cols);
    return room ? room : (size_t)(rows * bw_row_bytes(t, cols));
}

static int set_put(bw24_model *m, int layer, int expert, int matrix, uint64_t offset, const uint8_t *raw) {
    cpu_weights *w = m->priv;
    cpu_mat *mat = &w->spilled[layer][3 * expert + matrix];
    if (!w->set) {
        size_t bytes = (size_t)bw_spill_set_bytes(m->spill);
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return bw_fail(BW24_E_MEMORY, "out of memory for a set of %zu MiB of experts", bytes >> 20);
        w->set = p;
        w->set_bytes = bytes;
    }
    bool pack = cpu_spill_room(m, mat->type, mat->rows, mat->cols) > 0;
    mat->data = pack ? w->set + offset : NULL;
    mat->raw = pack ? NULL : w->set + offset;
    if (pack) cpu_pack_tiles(mat, raw, 0, cpu_tiles(mat->rows));
    else memcpy(w->set + offset, raw, set_bytes_of(m, mat->type, mat->rows, mat->cols));
    return 0;
}

static int set_settle(bw24_model *m) {
    (void)m;
    return 0;
}

const bw_spill_set cpu_set = {set_bytes_of, set_put, NULL, set_settle, NULL, NULL, false};
