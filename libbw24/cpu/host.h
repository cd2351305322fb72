/* The processor's share of a model that computes on a card: the experts outside the card's set (spill.h), by backend cpu's own kernels. A list's
 * EXPERTS ops become a list of their own over rows in host memory. One thread at a time; knows no card. */
#ifndef BW24_CPU_HOST_H
#define BW24_CPU_HOST_H

#include "../internal.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bw_host bw_host;

/* for a model whose experts are spilled; its threads are the context's */
int bw_host_new(bw24_model *m, bw_host **out);
void bw_host_free(bw_host *h);
/* Resolves the list's EXPERTS ops, in the order of the spill's layers, as backend cpu would. To be called once a list, in order. */
int bw_host_list(bw_host *h, const bw_list *l);

/* One EXPERTS op of a step. A place is a pair's position once pairs are sorted by expert: first those of this side, then those of experts that are lifted
 * to the card, then those of its set. */
typedef struct bw_host_step {
    int pairs, own;          /* all; places [0, own) are this side's */
    int lifted;              /* experts to be lifted (bw_host_lift); their pairs have the places from own on */
    int first_set;           /* the first place of the set's pairs */
    const int *place, *pair; /* [pairs] pair -> place, place -> pair */
    const float *d;          /* [own][out] down h, in the order of the places: what the slots' sum is over */
} bw_host_step;

/* x, route: [n][width] of the op's buffers. plan sorts; experts outside the set with at least `lift` pairs are lifted (0: none), or, where `lifts` is not
 * NULL, those that it marks, which the caller holds (bw_spill_hold). begin starts reads for this side's, start lets all threads but the caller's go to work,
 * work computes d, started or not, and returns when it is whole. x, route and lifts must stay until then. Work fails for reads that failed and for Inf
 * or NaN. */
int bw_host_plan(bw_host *h, const bw_list *l, int op, const float *x, const float *route, int n, int lift, const uint8_t *lifts, bw_host_step *out);
void bw_host_begin(bw_host *h, const bw_list *l, int op);
void bw_host_start(bw_host *h, const bw_list *l, int op);
int bw_host_work(bw_host *h, const bw_list *l, int op);

/* Between plan and begin, as often as there are lifted experts: the next of them, in the order in which they are there, with its packed matrices and its
 * places. They stay until bw_host_lift_lets_go says otherwise. After the last, bw_host_lift_end. Experts whose types have no packed form are not to be lifted. */
typedef struct bw_host_lifted { int expert, first, n; const uint8_t *data[3]; size_t bytes[3]; bool pinned; } bw_host_lifted;
bool bw_host_lift_lets_go(const bw_host *h); /* the next call lets go of those before it, which else stay as well */
void bw_host_lift(bw_host *h, const bw_list *l, int op, bw_host_lifted *out);
const int *bw_host_lift_order(const bw_host *h, const bw_list *l, int op); /* after the first: all lifted experts in the order of the calls */
int bw_host_lift_end(bw_host *h);
/* the packed matrices of an expert that is held, without its places */
void bw_host_held(const bw_host *h, const bw_list *l, int op, int expert, bw_host_lifted *out);
void bw_host_copy(bw_host *h, void *to, const void *from, size_t bytes); /* by all threads */
/* where d is, of all lists: bytes from one address on, for a backend that wants them pinned; 0 before the first list */
size_t bw_host_results(const bw_host *h, const bw_list *l, void **at);
/* layer of the spill that an EXPERTS op is */
int bw_host_layer(const bw_host *h, const bw_list *l, int op);
/* bw_backend.warm over this side's forms */
int bw_host_warm(bw_host *h, int layer, const int *experts, int n);

#ifdef __cplusplus
}
#endif
#endif
