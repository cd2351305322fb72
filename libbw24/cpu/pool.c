/* Thread pool. Workers wait for the next job spinning, then asleep on a futex: a decode step lasts 1-5 ms and the next follows at once, but an idle
 * program must not burn processors. */
#define _GNU_SOURCE /* syscall */
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../internal.h"
#include "pool.h"

struct cpu_pool {
    int n, spins; /* spins: between jobs */
    pthread_t *threads;
    cpu_fn fn;
    void *arg;
    _Alignas(64) atomic_int job;      /* counts jobs; workers wait for it to move */
    _Alignas(64) atomic_int sleepers; /* workers in futex wait */
    _Alignas(64) atomic_int done;     /* workers that finished the job */
    atomic_bool quit;
};
typedef struct worker { cpu_pool *pool; int tid; } worker;

/* Between two jobs, about 200 us: longer than a host takes from step to step. A worker that slept is often woken on the processor of the thread that
 * woke it, and then waits milliseconds for its turn. */
enum { IDLE_SPIN = 4 * CPU_POOL_SPIN };

/* spins for a while, then sleeps until the job counter leaves `seen` */
static void wait_for_job(cpu_pool *p, int seen) {
    for (int i = 0; i < p->spins; i++) {
        if (atomic_load_explicit(&p->job, memory_order_acquire) != seen) return;
        cpu_pool_pause();
    }
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->job) == seen) syscall(SYS_futex, &p->job, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&p->sleepers, 1);
}

static void *worker_main(void *arg) {
    worker w = *(worker *)arg;
    free(arg);
    bw_fpenv_enter();
    for (int seen = 0;; seen++) {
        wait_for_job(w.pool, seen);
        if (atomic_load(&w.pool->quit)) return NULL;
        w.pool->fn(w.pool->arg, w.tid, w.pool->n);
        atomic_fetch_add_explicit(&w.pool->done, 1, memory_order_release);
    }
}

static void publish(cpu_pool *p) {
    atomic_fetch_add(&p->job, 1);
    if (atomic_load(&p->sleepers)) syscall(SYS_futex, &p->job, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

cpu_pool *cpu_pool_new(int n) {
    cpu_pool *p = aligned_alloc(64, (sizeof *p + 63) & ~(size_t)63);
    if (!p) return NULL;
    *p = (cpu_pool){.n = 1, .spins = IDLE_SPIN, .threads = calloc((size_t)n, sizeof *p->threads)};
    if (!p->threads) { free(p); return NULL; }
    for (int i = 1; i < n; i++) {
        worker *w = malloc(sizeof *w);
        if (w) *w = (worker){p, i};
        if (!w || pthread_create(&p->threads[i], NULL, worker_main, w)) {
            free(w);
            cpu_pool_free(p);
            return NULL;
        }
        p->n = i + 1;
    }
    return p;
}

void cpu_pool_free(cpu_pool *p) {
    if (!p) return;
    atomic_store(&p->quit, true);
    publish(p);
    for (int i = 1; i < p->n; i++) pthread_join(p->threads[i], NULL);
    free(p->threads);
    free(p);
}

int cpu_pool_size(const cpu_pool *p) { return p->n; }
void cpu_pool_wait_longer(cpu_pool *p, int times) { p->spins = times * IDLE_SPIN; }

void cpu_pool_start(cpu_pool *p, cpu_fn fn, void *arg) {
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    if (p->n > 1) publish(p);
}

void cpu_pool_run(cpu_pool *p, cpu_fn fn, void *arg) {
    cpu_pool_start(p, fn, arg);
    cpu_pool_join(p);
}

void cpu_pool_join(cpu_pool *p) {
    p->fn(p->arg, 0, p->n);
    for (int i = 0; atomic_load_explicit(&p->done, memory_order_acquire) < p->n - 1; i++) {
        if (i < CPU_POOL_SPIN) cpu_pool_pause();
        else sched_yield();
    }
}
