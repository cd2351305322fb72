/* The thread pool: persistent workers that all run one function. Owns threads; knows no work. */
#ifndef BW24_CPU_POOL_H
#define BW24_CPU_POOL_H

typedef struct cpu_pool cpu_pool;
typedef void (*cpu_fn)(void *arg, int tid, int n_threads);

/* n threads, the caller being thread 0; NULL if they cannot be started */
cpu_pool *cpu_pool_new(int n);
void cpu_pool_free(cpu_pool *p);
int cpu_pool_size(const cpu_pool *p);
void cpu_pool_wait_longer(cpu_pool *p, int times); /* between two jobs, awake; before the first job */
/* fn(arg, tid, n) on every thread; returns when all have returned. Workers run in the numeric program's floating-point environment. */
void cpu_pool_run(cpu_pool *p, cpu_fn fn, void *arg);
/* the same in two parts: the workers begin, the caller does something else, then its share. arg must stay until join returns. */
void cpu_pool_start(cpu_pool *p, cpu_fn fn, void *arg);
void cpu_pool_join(cpu_pool *p);
/* waiting for another thread: this many pauses (about 50 us) before giving the processor away */
enum { CPU_POOL_SPIN = 4000 };
static inline void cpu_pool_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
