/* Speed of cpu/linear.h: GB/s of packed weights at few rows, GMAC/s at many, beside the machine's read bandwidth and its integer peak.
 * bench_cpu_linear [threads [isa [type [cols]]]]. Prints; asserts nothing about speed. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cpu/linear.h"

enum { MAX_THREADS = 16 };

typedef struct task {
    enum cpu_isa isa;
    const cpu_mat *m;
    const cpu_act *a;
    int rows;
    float *y;
    int64_t t0, t1;
    void *work;
} task;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *run(void *arg) {
    task *k = arg;
    cpu_linear(k->isa, k->m, k->a, 0, k->rows, k->y, k->m->rows, k->t0, k->t1, NULL, k->work);
    return NULL;
}

static void *huge(size_t bytes) {
    void *p = aligned_alloc(2u << 20, (bytes + (2u << 20)) >> 21 << 21);
    if (!p) abort();
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 1, bytes);
    return p;
}

/* seconds of the best of several runs over `threads` equal cuts */
static double best(task *k, int threads, int64_t tiles, int repeats) {
    double least = 1e9;
    for (int i = 0; i < repeats; i++) {
        pthread_t id[MAX_THREADS];
        double t = now();
        for (int j = 0; j < threads; j++) {
            k[j].t0 = tiles * j / threads;
            k[j].t1 = tiles * (j + 1) / threads;
            if (j) pthread_create(&id[j], NULL, run, &k[j]);
        }
        run(&k[0]);
        for (int j = 1; j < threads; j++) pthread_join(id[j], NULL);
        t = now() - t;
        if (t < least) least = t;
    }
    return least;
}

static void measure(enum cpu_isa isa, const bw_type_info *t, int64_t rows, int64_t cols, int n, int threads, int repeats) {
    size_t bytes = cpu_pack_bytes(t, rows, cols);
    int floats = t->form == BW_FLOAT;
    cpu_mat m = {t, rows, cols, huge(bytes), NULL, 1.0f, NULL};
    memset(m.data, 0x11, bytes);
    float *x = huge((size_t)n * (size_t)cols * 4), *y = huge((size_t)n * (size_t)rows * 4);
    for (int64_t i = 0; i < n * cols; i++) x[i] = (float)(i % 61) - 30.0f;
    cpu_act a;
    cpu_act_init(&a, huge(cpu_act_bytes(n, cols, floats)), n, cols, floats);
    double tq = 1e9;
    for (int i = 0; i < repeats; i++) {
        double s = now();
        cpu_act_fill(isa, &a, x, cols, 0, n);
        s = now() - s;
        if (s < tq) tq = s;
    }
    task k[MAX_THREADS];
    for (int j = 0; j < threads; j++) k[j] = (task){isa, &m, &a, n, y, 0, 0, huge(CPU_LINEAR_WORK)};
    double s = best(k, threads, cpu_tiles(rows), repeats);
    printf("%-11s %-7s %6d x %-5d rows %-4d threads %d  %6.1f GB/s  %6.1f GMAC/s  quantise %.2f ns/value\n", cpu_isa_name(isa), t->name,
           (int)rows, (int)cols, n, threads, (double)bytes / s * 1e-9, (double)rows * (double)cols * n / s * 1e-9,
           tq / ((double)n * (double)cols) * 1e9);
    fflush(stdout);
    for (int j = 0; j < threads; j++) free(k[j].work);
    free(a.mem);
    free(x);
    free(y);
    free(m.data);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 2;
    enum cpu_isa isa = argc > 2 && atoi(argv[2]) >= 0 ? (enum cpu_isa)atoi(argv[2]) : cpu_isa_best();
    int64_t cols = argc > 4 ? atoi(argv[4]) : 0;
    if (threads < 1 || threads > MAX_THREADS || !cpu_isa_supported(isa)) return 2;
    static const char *names[] = {"Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "NVFP4", "F16"};
    for (int i = 0; i < 10; i++) {
        const bw_type_info *t = bw_type_by_name(names[i]);
        if (argc > 3 && strcmp(argv[3], "all") && strcmp(argv[3], names[i])) continue;
        int64_t c = cols ? cols : t->block > 64 ? 1024 : 640;
        int64_t rows = (int64_t)(128e6 / ((double)t->bytes / t->block) / (double)c) / 16 * 16; /* beyond any cache */
        measure(isa, t, rows, c, 1, threads, 7);
        measure(isa, t, rows, c, 4, threads, 3);
        measure(isa, t, 2048, c, 8, threads, 5);
        measure(isa, t, 2048, c, 256, threads, 5);
    }
    return 0;
}
