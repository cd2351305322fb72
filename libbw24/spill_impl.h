/* What spill.c (budget, policies, steps) and spill_io.c (files, readers) share. Private to them. */
#ifndef BW24_SPILL_IMPL_H
#define BW24_SPILL_IMPL_H

#include <pthread.h>
#include <sys/stat.h>

#include "spill.h"

enum { SPILL_DOORS = 64 }; /* who waits for a matrix is woken by few others: waking costs more than a piece takes to read */
enum { SPILL_PAGE = 4096, SPILL_CHUNK = 1 << 20, SPILL_PART = 4 << 20, SPILL_AREA = 1 << 30, SPILL_AREAS = 64, SPILL_READERS_MAX = 64, SPILL_FILES_MAX = 4096 };
enum { SPILL_SPARES = 32 }; /* slots that wait for the next expert on its way to the set */
enum spill_state { SPILL_ABSENT, SPILL_READING, SPILL_READY };

/* a file that is read; drive 1 is its mirror */
typedef struct spill_drive { int direct, plain; struct stat seen; bool alive; } spill_drive; /* direct -1: refused; plain -1: no such drive */
typedef struct spill_file { char *path, *mirror; uint64_t size; spill_drive drive[2]; } spill_file;

/* one expert. slot: NULL while it is absent. Its lists are doubly linked; an entry is in none while it is held, frozen or absent */
typedef struct spill_entry {
    uint8_t *slot;
    uint64_t bytes, uses;
    struct spill_entry *prev, *next; /* of a policy's list: towards the recently used, towards the victims */
    struct spill_entry *queue;       /* next to be read */
    int layer, expert;
    int pending[3];                  /* chunks of each matrix not yet read */
    uint8_t state, list, held, frozen, failed;
    uint8_t pinned;                  /* the slot */
    uint8_t fresh;                   /* the slot is to be pinned by the reader that ends its last piece; counts as one of matrix 2 */
    uint8_t hung;                    /* reads of it may never end */
    uint32_t turn;                   /* which reading of it this is: a read of an earlier one that ends late counts for nothing */
    uint8_t cut_matrix;              /* what the readers take next: matrix, and bytes of it taken */
    uint64_t cut_at;
} spill_entry;

/* where a matrix lies in its entry's slot: packed form or consumed rows from `base`, the file's rows from `raw`, read as the aligned range
 * [from, from + span) of the file to `into` */
typedef struct spill_span { uint64_t base, raw, into, from, span, bytes; int32_t file; const bw_type_info *type; } spill_span;

/* memory of which slots are cut: up to `next`; pages up to `touched` were taken from the system, or are being taken */
typedef struct spill_area { uint8_t *first, *next, *end, *touched; } spill_area;

typedef struct spill_list { spill_entry *head, *tail; } spill_list;
/* the set's experts of a layer, most recently used first: probation and protected; -1 ends a list */
typedef struct spill_place { int prev, next, list; } spill_place;
typedef struct spill_layer {
    const bw_tensor *w[3];  /* gate, up, down */
    int ratio[3], shift[3]; /* matrix m of expert e is part ratio * e + shift of w[m] */
    int experts;
    spill_entry *entries;
    uint8_t *in_set;        /* [experts] */
    uint64_t *set_at;       /* [experts] of their gate, the other matrices behind */
    spill_place *place;     /* [experts] of the set */
    int set_head[2], set_tail[2], set_n[2];
    uint64_t used;
    spill_list lists[2];    /* policy SLRU: probation, protected */
    uint64_t protected_bytes;
} spill_layer;

struct bw_spill {
    bw24_model *model;
    bw_spill_room room;
    int policy;
    char *root;
    spill_layer *layers;
    int n_layers;
    spill_list lru;         /* policies LRU and FROZEN */
    uint64_t budget, limit, largest, frozen_bytes, held; /* held: by bw_spill_hold */
    int64_t checked;        /* clock of the last look at the system's memory */
    /* the step in hand */
    int step_layer, step_n, step_read, step_from, *step_order; /* order[step_from ..) is held, order[.. step_read) is being read or there */
    int cap_order;
    uint8_t *zeros;         /* readable, `zeros_bytes` long */
    uint64_t zeros_bytes;
    bool scan;              /* it wants so many experts that keeping them would only push others out */
    bool passing;           /* they are on their way to the set and are not kept */
    bool keeping;           /* they are on their way to the set and stay in RAM as well */
    struct { uint8_t *slot; uint64_t bytes; bool pinned; } spare[SPILL_SPARES]; /* they count as used */
    int n_spare;
    uint64_t set_room, set_used;
    int32_t *trace;
    int trace_cap, trace_head, trace_n;
    bw24_spill_counts c;
    char error[384];
    bool failed;
    /* files and readers; under `lock`: the queue, pending, failed, error, counters of reads */
    spill_file *files;
    int n_files, n_readers, readers_wanted;
    bool buffered, quit;
    bool abandoned;         /* readers hang in the system and may still use all of this */
    int64_t first_drive;    /* bytes that the first of two drives was given beyond the second's */
    uint64_t ended, hung_at; /* pieces that ended, well or not; their number plus one when the step in hand gave up waiting */
    int64_t ended_ns;       /* clock of the last one */
    pthread_t readers[SPILL_READERS_MAX];
    pthread_mutex_t lock;
    pthread_cond_t work, done[SPILL_DOORS]; /* done: by expert and matrix */
    spill_entry *first, *last;
    spill_area areas[SPILL_AREAS]; /* the last ones that were made; under `lock` */
    int n_areas;
};

void spill_span_of(const bw_spill *s, const spill_entry *e, int matrix, spill_span *out);
/* puts an entry, whose slot is there, into the queue */
void spill_read(bw_spill *s, spill_entry *e);
/* the set's lists: what was put there at first, what a step used */
void spill_set_add(spill_layer *l, int expert);
void spill_set_touch(spill_layer *l, int expert);
/* Waits for a matrix of an entry; failed: it, or another of the entry, could not be read. False: no read has ended for as long as is waited, and the
 * entry's will not be waited for again. */
bool spill_await(bw_spill *s, spill_entry *e, int matrix, bool *failed);
/* takes the entry's memory from it and gives it back */
void spill_drop(bw_spill *s, spill_entry *e);
void spill_drop_spares(bw_spill *s);
/* an entry that may be given up becomes the last to go of those used once, or the first; others are left alone */
void spill_relink(bw_spill *s, spill_entry *e, bool at_tail);
void spill_look_at_memory(bw_spill *s); /* the limit, ten times a second; what is over it is given back */
void spill_note(bw_spill *s, int32_t use); /* into the trace */
void spill_fail(bw_spill *s, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* keeps the first; takes the lock */
void spill_close_files(bw_spill *s); /* ends the readers first */

#endif
