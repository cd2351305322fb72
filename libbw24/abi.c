/* The edge of the library: contexts, messages, versions, the floating-point environment. Checks arguments, calls inward; holds no mathematics. */
#define _GNU_SOURCE /* sched_getaffinity, strdup */
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "canon.h"
#include "fault.h"
#include "internal.h"
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <fenv.h>
#endif

#ifndef BW24_REVISION
#define BW24_REVISION "unknown"
#endif

static _Thread_local char last_error[512];

const char *bw24_last_error(void) { return last_error; }

int bw_fail(int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(last_error, sizeof last_error, fmt, ap);
    va_end(ap);
    return code;
}

int bw24_abi(void) { return BW24_ABI; }
const char *bw24_version(void) { return BW24_REVISION; }

uint64_t bw24_struct_size(const char *name) {
    static const struct { const char *name; size_t size; } sizes[] = {
        {"bw24_open_params", sizeof(bw24_open_params)}, {"bw24_model_params", sizeof(bw24_model_params)}, {"bw24_row", sizeof(bw24_row)},
        {"bw24_sampler", sizeof(bw24_sampler)},         {"bw24_memory", sizeof(bw24_memory)},             {"bw24_type_facts", sizeof(bw24_type_facts)},
        {"bw24_round_request", sizeof(bw24_round_request)}, {"bw24_round_times", sizeof(bw24_round_times)},
        {"bw24_rounds_log", sizeof(bw24_rounds_log)},
        {"bw24_op_facts", sizeof(bw24_op_facts)},       {"bw24_check_result", sizeof(bw24_check_result)}, {"bw24_device_facts", sizeof(bw24_device_facts)},
        {"bw24_spill_params", sizeof(bw24_spill_params)}, {"bw24_place", sizeof(bw24_place)}, {"bw24_spill_counts", sizeof(bw24_spill_counts)},
        {"bw24_pick", sizeof(bw24_pick)}, {"bw24_rates", sizeof(bw24_rates)}, {"bw24_decode_request", sizeof(bw24_decode_request)},
    };
    for (size_t i = 0; name && i < sizeof sizes / sizeof *sizes; i++)
        if (!strcmp(sizes[i].name, name)) return sizes[i].size;
    return 0;
}

/* ---- floating-point environment */
bw_fpenv bw_fpenv_enter(void) {
    bw_fpenv e;
#if defined(__x86_64__)
    e.saved = _mm_getcsr();
    _mm_setcsr(BW_SEEDED(17, (unsigned)e.saved, 0x1f80)); /* all exceptions masked, round to nearest, FTZ and DAZ off */
#else
    e.saved = (uint64_t)fegetround();
    fesetround(FE_TONEAREST);
#endif
    return e;
}
void bw_fpenv_leave(bw_fpenv e) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)e.saved);
#else
    fesetround((int)e.saved);
#endif
}

/* ---- contexts */
/* one thread a physical core: SMT siblings share the units that these kernels saturate */
static int default_threads(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    int n = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &set)) continue;
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        FILE *f = fopen(path, "r");
        int first = cpu;
        if (f) {
            if (fscanf(f, "%d", &first) != 1) first = cpu;
            fclose(f);
        }
        if (first == cpu || !CPU_ISSET(first, &set)) n++;
    }
    return n < 1 ? 1 : n > 256 ? 256 : n;
}

#ifdef BW24_CUDA
static const char backend_names[] = "ref, cpu and cuda";
#else
static const char backend_names[] = "ref and cpu";
#endif

/* "cuda:1" finds backend cuda; the number is for its own open */
static const bw_backend *find_backend(const char *name) {
    static const bw_backend *const all[] = {
        &bw_backend_cpu, &bw_backend_ref,
#ifdef BW24_CUDA
        &bw_backend_cuda,
#endif
    };
    size_t n = name ? strcspn(name, ":") : 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!name || (strlen(all[i]->name) == n && !memcmp(all[i]->name, name, n))) return all[i];
    return NULL;
}

int bw24_open(bw24_ctx **out, const bw24_open_params *p) {
    if (!out || !p || p->size != sizeof *p) return bw_fail(BW24_E_ARG, "bw24_open: params of size %u, expected %zu", p ? p->size : 0, sizeof *p);
    if (p->threads < 0 || p->threads > 256) return bw_fail(BW24_E_ARG, "threads=%d is outside 0..256", p->threads);
    const bw_backend *b = find_backend(p->backend);
    if (!b) return bw_fail(BW24_E_UNSUPPORTED, "backend '%s' is not in this build; it has %s", p->backend, backend_names);
    if (p->float_act && b != &bw_backend_ref) return bw_fail(BW24_E_UNSUPPORTED, "float activations exist in backend ref only, not in %s", b->name);
    if (p->fast_prefill && (b == &bw_backend_ref || b == &bw_backend_cpu))
        return bw_fail(BW24_E_UNSUPPORTED, "the fast prefill class exists in backend cuda only, not in %s; the exact class is everywhere", b->name);
    bw24_ctx *c = calloc(1, sizeof *c);
    if (!c) return bw_fail(BW24_E_MEMORY, "out of memory for a context");
    c->backend = b;
    const char *colon = p->backend ? strchr(p->backend, ':') : NULL;
    if (colon && b != &bw_backend_cpu && b != &bw_backend_ref) c->device_index = atoi(colon + 1);
    c->threads = p->threads ? p->threads : default_threads();
    c->fuse = p->fuse != 0;
    c->repack = p->repack != 0;
    c->float_act = p->float_act != 0;
    c->fast_prefill = p->fast_prefill != 0;
    snprintf(c->isa_name, sizeof c->isa_name, "%s", p->isa ? p->isa : "");
    c->plan_only = p->plan_only != 0;
    int rc = c->plan_only ? 0 : b->open(c);
    if (rc) free(c);
    else *out = c;
    return rc;
}

void bw24_close(bw24_ctx *c) {
    if (!c) return;
    if (!c->plan_only) c->backend->close(c);
    free(c);
}

const char *bw24_device(bw24_ctx *c) { return c ? c->device : ""; }
int bw24_threads(bw24_ctx *c) { return c ? c->threads : 0; }
void bw24_cancel(bw24_ctx *c) { if (c) atomic_store(&c->cancel, 1); }

/* ---- the scalar functions, for tests */
static float sigmoid1(float x) { return bw_sigmoid(x); }
static float exp1(float x) { return bw_exp(x); }
static float exp21(float x) { return bw_exp2(x); }
static float silu1(float x) { return bw_silu(x); }
static float gelu1(float x) { return bw_gelu(x); }
static float tanh1(float x) { return bw_tanh(x); }
static float softplus1(float x) { return bw_softplus(x); }

int bw24_canon(const char *name, const float *x, float *y, int64_t n) {
    static const struct { const char *name; float (*f)(float); } fns[] = {{"exp", exp1},   {"exp2", exp21}, {"silu", silu1},        {"gelu", gelu1},
                                                                          {"tanh", tanh1}, {"sigmoid", sigmoid1}, {"softplus", softplus1}};
    for (size_t i = 0; name && i < sizeof fns / sizeof *fns; i++) {
        if (strcmp(fns[i].name, name)) continue;
        bw_fpenv e = bw_fpenv_enter();
        for (int64_t j = 0; j < n; j++) y[j] = fns[i].f(x[j]);
        bw_fpenv_leave(e);
        return 0;
    }
    return bw_fail(BW24_E_ARG, "bw24_canon: no function '%s'", name ? name : "(null)");
}

/* ---- storage types */
int bw24_type_info(int32_t index, bw24_type_facts *out) {
    const bw_type_info *t = index >= 0 && out ? bw_type_at(index) : NULL;
    if (!t) return BW24_E_ARG;
    *out = (bw24_type_facts){t->name, t->id, t->block, t->bytes, t->encode != NULL};
    return 0;
}

static int type_for(const char *fn, int32_t type, int64_t n, const bw_type_info **out) {
    const bw_type_info *t = bw_type(type);
    if (!t) return bw_fail(BW24_E_UNSUPPORTED, "%s: unknown type id %d", fn, type);
    if (n < 0 || n % t->block) return bw_fail(BW24_E_ARG, "%s: %lld values are not a multiple of %s's block of %d", fn, (long long)n, t->name, t->block);
    *out = t;
    return 0;
}

int bw24_dequantize(int32_t type, const void *src, float *dst, int64_t n) {
    const bw_type_info *t = NULL;
    BW_TRY(type_for("bw24_dequantize", type, n, &t));
    bw_fpenv e = bw_fpenv_enter();
    const uint8_t *p = src;
    for (int64_t i = 0; i < n; i += t->block, p += t->bytes) t->decode(p, dst + i);
    bw_fpenv_leave(e);
    return 0;
}

int bw24_quantize(int32_t type, const float *src, void *dst, int64_t n) {
    const bw_type_info *t = NULL;
    BW_TRY(type_for("bw24_quantize", type, n, &t));
    if (!t->encode) return bw_fail(BW24_E_UNSUPPORTED, "bw24_quantize: there is no encoder for %s", t->name);
    bw_fpenv e = bw_fpenv_enter();
    t->encode(src, dst, n);
    bw_fpenv_leave(e);
    return 0;
}
