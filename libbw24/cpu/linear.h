/* LINEAR on the CPU: y = W x for packed or raw weight rows, equal bit for bit to ref/dot.h (docs/numerics.md sections 2 and 3).
 * Owns the packed layout, the int8 activations and the kernels of each instruction set; knows one matrix at a time, allocates
 * nothing and starts no thread: the caller cuts the output into tiles of CPU_TILE rows and gives every buffer. */
#ifndef BW24_CPU_LINEAR_H
#define BW24_CPU_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "../formats/formats.h"
#include "isa.h"

enum { CPU_TILE = 16 };              /* output rows of a tile */
enum { CPU_LINEAR_WORK = 96 * 1024 };/* bytes of work a call of cpu_linear uses, 64-byte aligned, one per thread */
enum cpu_epilogue { CPU_STORE, CPU_ADD, CPU_GLU };
enum cpu_glu_act { CPU_SILU, CPU_GELU };

enum cpu_isa cpu_isa_best(void);
int cpu_isa_supported(enum cpu_isa isa);
const char *cpu_isa_name(enum cpu_isa isa);

/* Weights of rows x cols. Exactly one of data and raw is set. cols is a multiple of 32 and of the type's block (any for FLOAT types). */
typedef struct cpu_mat {
    const bw_type_info *type;
    int64_t rows, cols;
    uint8_t *data;      /* packed tiles, 64-byte aligned, cpu_pack_bytes long; huge pages are worth 15-20 % of read bandwidth */
    const uint8_t *raw; /* the file's rows, read block by block: the way for types that have no packed form, slow for the others */
    float scale;        /* tensor scale, 1 where there is none */
    const float *bias;  /* [rows] or NULL */
} cpu_mat;

/* Bytes of the packed form; 0 if the type has none (set raw instead). At most 64 bytes a tile more than the file's rows,
 * the last tile counted whole. */
size_t cpu_pack_bytes(const bw_type_info *t, int64_t rows, int64_t cols);
/* Packs tiles [tile0, tile1) of m->data from the file's rows; src is row 0. Absent rows of the last tile become zeros. */
void cpu_pack_tiles(cpu_mat *m, const uint8_t *src, int64_t tile0, int64_t tile1);
/* a tile's records of groups: bytes of the head, bytes of a group's codes, groups that a head serves; false: no packed form */
int cpu_tile_layout(const bw_type_info *t, int *head, int *codes, int *per);
static inline int64_t cpu_tiles(int64_t rows) { return (rows + CPU_TILE - 1) / CPU_TILE; }

/* Activations of `rows` rows, filled once and read by every matrix of the same cols: int8 for quantised weights,
 * f32 (floats = 1) for FLOAT weights. The layout is private. */
typedef struct cpu_act {
    void *mem; /* 64-byte aligned */
    int rows;
    int floats;
    int64_t cols;
} cpu_act;

size_t cpu_act_bytes(int rows, int64_t cols, int floats);
void cpu_act_init(cpu_act *a, void *mem, int rows, int64_t cols, int floats);
/* Rows [r0, r1) of x[rows][ldx]. Returns -1 if a value of a quantised row is Inf, NaN or 2^100 and more (that group then reads as 0), else 0.
 * Threads may fill disjoint rows at the same time. */
int cpu_act_fill(enum cpu_isa isa, cpu_act *a, const float *x, int64_t ldx, int r0, int r1);

/* What happens to y = (W x) * scale + bias on its way out: y, res + y, or act((Wg x) * scale_g + bias_g) * y. res may be y itself. */
typedef struct cpu_epi {
    enum cpu_epilogue mode;
    const float *res; /* [rows][ldres], CPU_ADD */
    int64_t ldres;
    const cpu_mat *gate; /* same rows and cols as m, CPU_GLU */
    enum cpu_glu_act act;
} cpu_epi;

/* y[r][o] for the activation rows r in [r0, r1) and the output rows o of tiles [t0, t1); y and res are addressed by r and o.
 * e NULL is CPU_STORE. m, gate and a agree in cols, and in floats against quantised. */
void cpu_linear(enum cpu_isa isa, const cpu_mat *m, const cpu_act *a, int r0, int r1, float *y, int64_t ldy, int64_t t0, int64_t t1,
                const cpu_epi *e, void *work);

#endif
