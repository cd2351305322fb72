/* What a context's device can do; here memory bandwidth with the context's own threads, what a decode step can hope for. Owns two buffers for the
 * time of one call; a card measures itself (cu/probe.cu). */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cpu/pool.h"
#include "cpu/state.h"

enum { ROUNDS = 5 };
static const size_t HALF = (size_t)256 << 20; /* two of these: 512 MiB in all, several times any last-level cache */

typedef struct probe { uint8_t *a, *b; int mode; atomic_ullong sink; } probe;
enum { TOUCH, READ, COPY };

static void part(void *arg, int tid, int n) {
    probe *p = arg;
    size_t from = HALF / (size_t)n * (size_t)tid & ~(size_t)4095,
           to = tid == n - 1 ? HALF : HALF / (size_t)n * (size_t)(tid + 1) & ~(size_t)4095;
    if (p->mode == TOUCH) {
        memset(p->a + from, 1, to - from);
        memset(p->b + from, 2, to - from);
    } else if (p->mode == COPY) {
        memcpy(p->b + from, p->a + from, to - from);
    } else {
        uint64_t sum = 0;
        const uint64_t *x = (const uint64_t *)(p->a + from), *y = (const uint64_t *)(p->b + from);
        for (size_t i = 0; i < (to - from) / 8; i++) sum += x[i] ^ y[i];
        atomic_fetch_add(&p->sink, sum);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double best_seconds(cpu_pool *pool, probe *p, int mode) {
    double best = 1e30;
    p->mode = mode;
    for (int i = 0; i < ROUNDS; i++) {
        double t = now();
        if (pool) cpu_pool_run(pool, part, p);
        else part(p, 0, 1);
        t = now() - t;
        best = t < best ? t : best;
    }
    return best;
}

/* read: bytes summed; copy: bytes read plus bytes written */
static int host_memory(bw24_ctx *c, bw24_rates *out) {
    uint8_t *mem = mmap(NULL, 2 * HALF, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED) return bw_fail(BW24_E_MEMORY, "out of memory for %zu MiB of probe buffers", 2 * HALF >> 20);
    madvise(mem, 2 * HALF, MADV_HUGEPAGE);
    probe p = {.a = mem, .b = mem + HALF};
    cpu_pool *pool = c->backend == &bw_backend_cpu ? ((cpu_ctx *)c->priv)->pool : NULL;
    p.mode = TOUCH;
    if (pool) cpu_pool_run(pool, part, &p);
    else part(&p, 0, 1);
    out->read_gbps = 2.0 * (double)HALF / best_seconds(pool, &p, READ) * 1e-9;
    out->copy_gbps = 2.0 * (double)HALF / best_seconds(pool, &p, COPY) * 1e-9;
    munmap(mem, 2 * HALF);
    return 0;
}

static int rates(bw24_ctx *c, bool all, bw24_rates *out) {
    *out = (bw24_rates){.size = sizeof *out};
    if (c->plan_only) return bw_fail(BW24_E_ARG, "bw24_probe: the context was opened for plans only");
    return c->backend->probe ? c->backend->probe(c, all, out) : host_memory(c, out);
}

int bw24_probe(bw24_ctx *c, double *read_gbps, double *copy_gbps) {
    bw24_rates r;
    if (!c || !read_gbps || !copy_gbps) return bw_fail(BW24_E_ARG, "bw24_probe: NULL argument");
    BW_TRY(rates(c, false, &r));
    *read_gbps = r.read_gbps;
    *copy_gbps = r.copy_gbps;
    return 0;
}

int bw24_probe_rates(bw24_ctx *c, bw24_rates *out) {
    if (!c || !out || out->size != sizeof *out)
        return bw_fail(BW24_E_ARG, "bw24_probe_rates: NULL argument, or a struct of size %u, expected %zu", out ? out->size : 0, sizeof *out);
    return rates(c, true, out);
}
