/* Thread pool with spinning barriers. A decode step meets ~200 barriers in 2-3 ms, so a barrier must cost well below a microsecond: threads spin, and
 * only yield or sleep after SPIN pauses (about 50 us), so that an oversubscribed or idle machine is not burnt. */
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

enum { SPIN = 4000 };

struct cpu_pool {
    int n;
    pthread_t *threads;
    cpu_fn fn;
    void *arg;
    _Alignas(64) atomic_int job;      /* counts jobs; workers wait for it to move */
    _Alignas(64) atomic_int sleepers; /* workers in futex wait */
    _Alignas(64) atomic_int done;     /* workers that finished the job */
    _Alignas(64) atomic_int arrived;  /* at the barrier */
    _Alignas(64) atomic_int phase;    /* of the barrier */
    atomic_bool quit;
};
typedef struct worker { cpu_pool *pool; int tid; } worker;

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_until(atomic_int *a, int not_value) {
    for (int i = 0; atomic_load_explicit(a, memory_order_acquire) == not_value; i++) {
        if (i < SPIN) pause_cpu();
        else sched_yield();
    }
}

void cpu_pool_barrier(cpu_pool *p) {
    if (p->n == 1) return;
    int phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->n - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&p->phase, 1, memory_order_release);
    } else {
        wait_until(&p->phase, phase);
    }
}

/* spins for a while, then sleeps until the job counter leaves `seen` */
static void wait_for_job(cpu_pool *p, int seen) {
    for (int i = 0; i < SPIN; i++) {
        if (atomic_load_explicit(&p->job, memory_order_acquire) != seen) return;
        pause_cpu();
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
    *p = (cpu_pool){.n = 1, .threads = calloc((size_t)n, sizeof *p->threads)};
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

void cpu_pool_run(cpu_pool *p, cpu_fn fn, void *arg) {
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    if (p->n > 1) publish(p);
    fn(arg, 0, p->n);
    for (int i = 0; atomic_load_explicit(&p->done, memory_order_acquire) < p->n - 1; i++) {
        if (i < SPIN) pause_cpu();
        else sched_yield();
    }
}
