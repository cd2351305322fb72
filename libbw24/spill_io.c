/* Reading of spilled experts: files with an optional mirror, and threads that read aligned pieces of up to 1 MiB in the order in which experts were
 * asked for, so that the first expert is whole while the last is still on its way. Owns descriptors, retries and the check that a file is still
 * the one that was opened; knows no policy. */
#define _GNU_SOURCE /* O_DIRECT, madvise */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fault.h"
#include "spill_impl.h"

static ssize_t system_pread(int fd, void *buf, size_t n, off_t at) { return pread(fd, buf, n, at); }
bw_spill_io bw_spill_sys = {system_pread, 30000000000};
enum { POPULATE_WRITE = 23 }; /* MADV_POPULATE_WRITE of Linux 5.14, refused without harm before */
enum { LEAVE_S = 2 }; /* seconds that a reader has to leave when files are closed; a piece takes milliseconds */

void spill_fail(bw_spill *s, const char *fmt, ...) {
    va_list ap;
    pthread_mutex_lock(&s->lock);
    if (!s->failed) {
        va_start(ap, fmt);
        vsnprintf(s->error, sizeof s->error, fmt, ap);
        va_end(ap);
    }
    s->failed = true;
    pthread_mutex_unlock(&s->lock);
}

/* ---- files */
static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static int open_drive(const bw_spill *s, const char *path, spill_drive *d) {
    d->direct = -1;
    d->plain = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a FIFO must not wait for its writer */
    if (d->plain < 0) return bw_fail(BW24_E_IO, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(d->plain, &d->seen) || !S_ISREG(d->seen.st_mode)) return bw_fail(BW24_E_IO, "%s: expected a regular file", path);
    posix_fadvise(d->plain, 0, 0, POSIX_FADV_RANDOM);
    if (!s->buffered) d->direct = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
    struct stat now;
    if (d->direct >= 0 && (fstat(d->direct, &now) || !same_file(&now, &d->seen))) return bw_fail(BW24_E_IO, "%s: replaced while it was opened", path);
    d->alive = true;
    return 0;
}

/* the first MiB and 64 blocks of 4 KiB over the rest: enough to tell two models apart, not to prove two files equal */
static int compare_copies(const spill_file *f) {
    enum { HEAD = 1 << 20, BLOCK = 4096, BLOCKS = 64 };
    char *a = malloc(2 * HEAD);
    int rc = a ? 0 : bw_fail(BW24_E_MEMORY, "out of memory for comparing %s", f->mirror);
    for (int i = 0; i <= BLOCKS && !rc; i++) {
        uint64_t at = i ? (f->size / BLOCKS * (uint64_t)i) & ~(uint64_t)(BLOCK - 1) : 0;
        size_t n = i ? BLOCK : HEAD;
        if (at >= f->size) break;
        if (n > f->size - at) n = f->size - at;
        if (pread(f->drive[0].plain, a, n, (off_t)at) != (ssize_t)n || pread(f->drive[1].plain, a + HEAD, n, (off_t)at) != (ssize_t)n)
            rc = bw_fail(BW24_E_IO, "%s: cannot be compared with its copy %s", f->path, f->mirror);
        else if (memcmp(a, a + HEAD, n)) rc = bw_fail(BW24_E_IO, "%s is no copy of %s: they differ after byte %llu", f->mirror, f->path, (unsigned long long)at);
    }
    free(a);
    return rc;
}

static int open_mirror(bw_spill *s, spill_file *f, const char *mirror) {
    if (!(f->mirror = strdup(mirror))) return bw_fail(BW24_E_MEMORY, "out of memory for a file name");
    BW_TRY(open_drive(s, mirror, &f->drive[1]));
    const struct stat *a = &f->drive[0].seen, *b = &f->drive[1].seen;
    if (b->st_size != a->st_size) return bw_fail(BW24_E_IO, "%s: expected the %lld bytes of %s, found %lld", mirror, (long long)a->st_size, f->path, (long long)b->st_size);
    if (a->st_dev == b->st_dev && a->st_ino == b->st_ino) return bw_fail(BW24_E_ARG, "%s: the mirror is the file itself", mirror);
    return compare_copies(f);
}

static void close_file(spill_file *f) {
    for (int d = 0; d < 2; d++) {
        if (f->drive[d].direct >= 0) close(f->drive[d].direct);
        if (f->drive[d].plain >= 0) close(f->drive[d].plain);
    }
    free(f->path);
    free(f->mirror);
}

int bw24_spill_file(bw24_model *m, const char *path, const char *mirror) {
    if (!m || !path || !m->spill) return bw_fail(BW24_E_ARG, "bw24_spill_file: NULL argument, or no bw24_spill_open before");
    bw_spill *s = m->spill;
    if (s->n_readers || s->n_files == SPILL_FILES_MAX) return bw_fail(BW24_E_ARG, "%s: files are named before anything is read, at most %d", path, SPILL_FILES_MAX);
    spill_file *grown = realloc(s->files, (size_t)(s->n_files + 1) * sizeof *grown);
    if (!grown) return bw_fail(BW24_E_MEMORY, "out of memory for file %s", path);
    s->files = grown;
    spill_file *f = &grown[s->n_files];
    *f = (spill_file){.path = strdup(path), .drive = {{-1, -1, {0}, false}, {-1, -1, {0}, false}}};
    int rc = f->path ? open_drive(s, path, &f->drive[0]) : bw_fail(BW24_E_MEMORY, "out of memory for a file name");
    f->size = rc ? 0 : (uint64_t)f->drive[0].seen.st_size;
    if (!rc && mirror) rc = open_mirror(s, f, mirror);
    if (rc) { close_file(f); return rc; }
    return s->n_files++;
}

int bw_spill_check(bw_spill *s, const char *name, int index, int file, uint64_t offset, uint64_t bytes) {
    if (file >= s->n_files) return bw_fail(BW24_E_ARG, "tensor %s, matrix %d: file %d of %d", name, index, file, s->n_files);
    uint64_t size = s->files[file].size;
    if (offset > size || bytes > size - offset)
        return bw_fail(BW24_E_IO, "tensor %s, matrix %d: bytes [%llu, %llu) of %s, which has %llu", name, index, (unsigned long long)offset,
                       (unsigned long long)(offset + bytes), s->files[file].path, (unsigned long long)size);
    return 0;
}

/* ---- one piece */
typedef struct piece {
    spill_file *file;
    uint8_t *into;
    uint64_t from, span, need; /* need: bytes before the file's end */
    int drive;
    uint32_t turn;             /* of its entry */
    bool mirrored;             /* drive 1 may be read */
} piece;

/* as many bytes as the piece needs, or an errno; `short_reads` counts reads that gave less than asked inside the file */
static int read_from(int fd, const piece *p, uint64_t *short_reads) {
    uint64_t got = 0;
    while (got < p->need) {
        ssize_t n = bw_spill_sys.pread(fd, p->into + got, p->span - got, (off_t)(p->from + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno ? errno : EIO;
        if (n == 0) return ENODATA;
        got += (uint64_t)n;
        if (got < p->need) ++*short_reads;
    }
    return 0;
}

/* errno of the piece from one drive: past the page cache where possible, through it where that fails */
static int read_drive(const piece *p, int which, uint64_t *short_reads, uint64_t *fallbacks, bool *refused) {
    const spill_drive *d = &p->file->drive[which];
    struct stat now;
    int rc = d->direct >= 0 && !*refused ? read_from(d->direct, p, short_reads) : -1;
    if (rc > 0) {
        ++*fallbacks;
        *refused = rc == EINVAL;
    }
    if (rc) {
        rc = read_from(d->plain, p, short_reads);
        posix_fadvise(d->plain, (off_t)p->from, (off_t)p->span, POSIX_FADV_DONTNEED); /* one RAM tier, not two */
    }
    if (rc) return rc;
    if (fstat(d->plain, &now) || now.st_size != d->seen.st_size || now.st_mtim.tv_sec != d->seen.st_mtim.tv_sec || now.st_mtim.tv_nsec != d->seen.st_mtim.tv_nsec)
        return ESTALE;
    return 0;
}

static const char *reason(int rc) {
    return rc == ENODATA ? "the file ends too early (it shrank)" : rc == ESTALE ? "the file was changed while in use" : strerror(rc);
}

/* what one piece adds to the counters */
typedef struct tally { uint64_t short_reads, fallbacks, errors; bool refused[2], ok, lost; int drive; } tally;

/* under the lock */
static void count_piece(bw_spill *s, const piece *p, const tally *t) {
    if (t->lost) p->file->drive[1].alive = false;
    s->c.reads++;
    s->c.short_reads += t->short_reads;
    s->c.errors += t->errors;
    s->c.fallbacks += t->fallbacks;
    if (t->ok) s->c.bytes_read += p->need;
    if (t->ok && t->drive == 1) s->c.mirror_bytes += p->need;
    for (int d = 0; d < 2; d++)
        if (t->refused[d] && p->file->drive[d].direct >= 0) s->c.direct = 0;
    s->ended++;
    s->ended_ns = bw_spill_clock();
}

/* a piece from its drive, else from the other one, which a failing mirror is given up for. False: neither has it */
static bool read_piece(bw_spill *s, const piece *p, tally *t) {
    int rc = 0;
    *t = (tally){0};
    for (int k = 0; k < 2 && !t->ok; k++) {
        int d = k ? !p->drive : p->drive;
        if (p->file->drive[d].plain < 0 || (d && !p->mirrored)) continue;
        int mine = read_drive(p, d, &t->short_reads, &t->fallbacks, &t->refused[d]);
        t->ok = mine == 0;
        if (t->ok && k) t->fallbacks++;
        if (t->ok) t->drive = d;
        else t->errors++;
        if (mine && !d) rc = mine;
        t->lost |= mine && d;
    }
    if (!t->ok) spill_fail(s, "%s: expected %llu bytes at offset %llu: %s", p->file->path, (unsigned long long)p->need, (unsigned long long)p->from, reason(rc));
    return t->ok;
}

/* ---- the queue */
static uint64_t chunks_of(const spill_span *p) { return (p->span + SPILL_CHUNK - 1) / SPILL_CHUNK; }

/* the next piece of the first entry in the queue; the entry leaves the queue with its last one */
static spill_entry *take(bw_spill *s, piece *p, int *matrix) {
    spill_entry *e = s->first;
    spill_span at;
    *matrix = e->cut_matrix;
    spill_span_of(s, e, *matrix, &at);
    uint64_t left = at.span - e->cut_at, size = s->files[at.file].size;
    p->file = &s->files[at.file];
    p->into = e->slot + at.into + e->cut_at;
    p->from = at.from + e->cut_at;
    p->span = left < SPILL_CHUNK ? left : SPILL_CHUNK;
    p->need = p->from + p->span > size ? size - p->from : p->span;
    p->turn = e->turn;
    p->mirrored = p->file->drive[1].alive;
    p->drive = p->mirrored && s->first_drive > 0; /* two drives get as many bytes each */
    if (p->mirrored) s->first_drive += p->drive ? -(int64_t)p->span : (int64_t)p->span;
    e->cut_at += p->span;
    if (e->cut_at < at.span) return e;
    e->cut_at = 0;
    if (++e->cut_matrix < 3) return e;
    s->first = e->queue;
    if (!s->first) s->last = NULL;
    e->queue = NULL;
    return e;
}

/* Under the lock, which is let go meanwhile: takes the pages of an area's next part from the system, if a slot was cut of it. One thread does so for each
 * part: of two that came to one huge page both would clear it. */
static bool touch_next(bw_spill *s, spill_area *a) {
    uint8_t *at = a->touched;
    uint64_t left = (uint64_t)(a->next - at), n = left < SPILL_PART ? left : SPILL_PART;
    if (!left) return false;
    a->touched += n;
    pthread_mutex_unlock(&s->lock);
    madvise(at, n, POPULATE_WRITE); /* a slot that was given back is no area's any more: this changes no byte of whatever is there */
    pthread_mutex_lock(&s->lock);
    return true;
}

/* under the lock: the pages that the piece is read into were taken, or another thread takes them */
static void touch_piece(bw_spill *s, const piece *p) {
    for (int i = s->n_areas - 1; i >= 0; i--)
        if (p->into >= s->areas[i].first && p->into < s->areas[i].next) {
            while (s->areas[i].touched < p->into + p->span && touch_next(s, &s->areas[i])) {}
            return;
        }
}

static pthread_cond_t *door_of(bw_spill *s, const spill_entry *e, int matrix) {
    return &s->done[(unsigned)(3 * e->expert + matrix) % SPILL_DOORS];
}

/* under the lock, which is let go meanwhile: the entry's bytes are there, and its memory becomes fit for the device's copies */
static void pin_slot(bw_spill *s, spill_entry *e) {
    const uint32_t turn = e->turn;
    uint8_t *slot = e->slot;
    const uint64_t bytes = e->bytes;
    e->fresh = 0;
    pthread_mutex_unlock(&s->lock);
    bool pinned = s->model->ctx->backend->set->pin(s->model, slot, bytes);
    pthread_mutex_lock(&s->lock);
    if (e->turn != turn) return; /* it was given up, and so is its memory */
    e->pinned = pinned;
    e->pending[2] = 0;
    pthread_cond_broadcast(door_of(s, e, 2));
}

static void *reader(void *arg) {
    bw_spill *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->quit && !s->first) pthread_cond_wait(&s->work, &s->lock);
        if (s->quit) break;
        piece p;
        int matrix;
        spill_entry *e = take(s, &p, &matrix);
        touch_piece(s, &p);
        pthread_mutex_unlock(&s->lock);
        tally t;
        bool ok = read_piece(s, &p, &t);
        pthread_mutex_lock(&s->lock);
        count_piece(s, &p, &t);
        if (e->turn != p.turn) continue;
        if (!ok) e->failed = 1;
        if (--e->pending[matrix] == 0) pthread_cond_broadcast(door_of(s, e, matrix));
        if (e->fresh && !e->pending[0] && !e->pending[1] && e->pending[2] == 1) pin_slot(s, e);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static int default_readers(const bw_spill *s) {
    for (int i = 0; i < s->n_files; i++)
        if (s->files[i].mirror) return 16;
    return 8;
}

void spill_read(bw_spill *s, spill_entry *e) {
    int wanted = s->readers_wanted ? s->readers_wanted : default_readers(s);
    while (s->n_readers < wanted && !pthread_create(&s->readers[s->n_readers], NULL, reader, s)) s->n_readers++;
    if (!s->n_readers) {
        spill_fail(s, "no thread can be started to read experts");
        e->failed = 1;
        return;
    }
    pthread_mutex_lock(&s->lock);
    for (int m = 0; m < 3; m++) {
        spill_span at;
        spill_span_of(s, e, m, &at);
        e->pending[m] = (int)chunks_of(&at);
    }
    e->pending[2] += e->fresh;
    e->cut_matrix = 0;
    e->cut_at = 0;
    e->queue = NULL;
    if (s->last) s->last->queue = e;
    else s->first = e;
    s->last = e;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
}

/* under the lock: its pieces that nobody has taken are not to be read */
static void unqueue(bw_spill *s, spill_entry *e) {
    spill_entry *before = NULL;
    for (spill_entry *q = s->first; q; before = q, q = q->queue) {
        if (q != e) continue;
        *(before ? &before->queue : &s->first) = e->queue;
        if (s->last == e) s->last = before;
        e->queue = NULL;
        return;
    }
}

bool bw_spill_touch(bw_spill *s, int layer, int expert, int matrix) {
    pthread_mutex_lock(&s->lock);
    bool more = false;
    for (int i = s->n_areas - 1; i >= 0 && !more && s->layers[layer].entries[expert].pending[matrix]; i--) more = touch_next(s, &s->areas[i]);
    pthread_mutex_unlock(&s->lock);
    return more;
}

bool spill_await(bw_spill *s, spill_entry *e, int matrix, bool *failed) {
    pthread_mutex_lock(&s->lock);
    int64_t begun = bw_spill_clock(), patience = bw_spill_sys.patience_ns;
    bool hung = false;
    while (e->pending[matrix] && !e->hung && BW_SEEDED(25, 0, 1)) {
        int64_t since = s->ended_ns > begun ? s->ended_ns : begun;
        hung = s->hung_at == s->ended + 1 || bw_spill_clock() - since >= patience;
        if (hung) {
            s->hung_at = s->ended + 1;
            e->hung = e->failed = 1;
            unqueue(s, e);
            for (int i = 0; i < SPILL_DOORS; i++) pthread_cond_broadcast(&s->done[i]); /* the others need not wait as long again */
            break;
        }
        struct timespec until = {(since + patience) / 1000000000, (since + patience) % 1000000000};
        pthread_cond_timedwait(door_of(s, e, matrix), &s->lock, &until);
    }
    bool ok = !e->hung;
    *failed = e->failed;
    pthread_mutex_unlock(&s->lock);
    spill_span at;
    spill_span_of(s, e, matrix, &at);
    if (hung) spill_fail(s, "%s: no read of experts has ended for %.1f s: does its device hang?", s->files[at.file].path, (double)patience * 1e-9);
    return ok;
}

void spill_close_files(bw_spill *s) {
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LEAVE_S;
    for (int i = 0; i < s->n_readers; i++)
        if (pthread_timedjoin_np(s->readers[i], NULL, &until)) {
            pthread_detach(s->readers[i]);
            s->abandoned = true;
        }
    if (s->abandoned) return;
    for (int i = 0; i < s->n_files; i++) close_file(&s->files[i]);
    free(s->files);
}
