/* LINEAR over quantised weights (docs/numerics.md §2) for 9..16 rows in one launch, and for 5..8 rows too long for op_linear.cuh's: N groups of 8 rows share the
 * weights and what is decoded of them. Owns the mapping of work to warps; products and hand-over are of op_linear.cuh's kind.
 *
 * Activations stay in shared memory where they fit (resident): then warps take the units (tile, segment) in turn. Else the warp that folds a segment fetches it,
 * and keeps its segment over the tiles of a block. Results are handed to the warps that add them a tile at a time: more would not fit either. */
#ifndef BW24_CU_OP_LINEAR_STREAM_CUH
#define BW24_CU_OP_LINEAR_STREAM_CUH

#include <type_traits>
#include "op_linear_half.cuh"

namespace bw {

enum { STREAM_BUFS = 4 /* at most */, STREAM_DEPTH = 2, STREAM_PITCH = 20, STREAM_BARS = (SMALL_WARPS * STREAM_DEPTH + 2 * STREAM_BUFS) * 8 };
template <int N> struct StreamSize {
    enum { ROWS = 8 * N, WARPS = N == 1 ? SMALL_WARPS : 12, REDUCERS = 2 * N, PART = ROWS * STREAM_PITCH, CODES = ROWS * 288 };
    enum { THREADS = BW_FEWER(384, 32 * (WARPS + REDUCERS)) };
};

/* Where activations are: all in shared memory (RESIDENT; in f16 where a unit has such products), or each warp's segment, as codes or in f16 */
enum StreamPlace { STREAMED, RESIDENT, STREAMED_HALVES };
/* A chunk is as many segments as are handed over together: all of a tile, or one of each warp (segment w of each chunk, the last one may be smaller). */
struct StreamShape {
    int warps, depth;  /* warps that fold; units of a warp's ring, STREAM_DEPTH */
    int place;         /* StreamPlace */
    int slots, chunks; /* segments of a chunk; chunks of a tile */
    int bufs;          /* chunks in shared memory */
    int glu;           /* a tile block is 32 outputs of gate and of up */
    int each, more;    /* whole items of a block; the first `more` blocks have one more */
    int early;         /* as SmallShape's */
};

/* floats a group has of each row: scale, sums */
template <Form F> __host__ __device__ constexpr int group_floats() { return F == FORM_S2M ? 3 : F == FORM_S1M ? 2 : 1; }

/* which have products in f16 (op_linear_half.cuh) */
template <class U, int N> __host__ __device__ constexpr bool stream_halves() { return std::is_same<U, U_NVFP4>::value && N > 1; }

/* bytes of a warp's segment: codes, scales and sums of it and the next one, what is made of them */
template <class U, int N> __host__ __device__ constexpr int stream_slot(bool halves) {
    return StreamSize<N>::CODES + 2 * group_floats<U::FORM>() * 8 * StreamSize<N>::ROWS * 4 + (halves ? (int)HalfPlace<N>::BYTES : 0);
}
/* Tiles whose sums a block keeps at a time. Where a tile has several chunks: so many that what a segment's activations cost is little beside its units */
enum { STREAM_GROUP = 8 };
__host__ __device__ inline int stream_group(const StreamShape &g) { return g.chunks > 1 ? (int)STREAM_GROUP : g.glu ? 4 : 2; }
template <int N> __host__ __device__ inline int stream_kept(const StreamShape &g) { return g.chunks > 1 ? STREAM_GROUP * StreamSize<N>::REDUCERS * 32 * 8 : 0; }
/* tiles of a block */
__device__ __forceinline__ int stream_tiles(const LinearArgs &a, const StreamShape &g) {
    return (g.each + ((int)blockIdx.x < g.more)) * (g.glu ? 4 : 2) + ((int)blockIdx.x < a.items - a.whole);
}

/* Activations as a warp sees them: a segment's codes [rows][pitch] and its scales and sums [value][8 groups][rows]; B registers of the groups of rows. */
template <Form F, int N> struct StreamActs {
    enum { ROWS = 8 * N, VALUES = group_floats<F>() * 8 * ROWS };
    uint2 b[N][8];
    const float *now; /* of the segment in b, at the lane's columns */
    /* asks for a segment, by the whole warp */
    static __device__ __forceinline__ void ask(const Acts &x, int seg, uint8_t *codes, int pitch, float *values, int lane) {
        const int c = seg * 256 + (lane & 15) * 16, row = lane >> 4;
        if (c < x.cols)
#pragma unroll
            for (int r = 0; r < ROWS; r += 2) cp16(codes + (r + row) * pitch + (lane & 15) * 16, x.q + (size_t)(r + row) * x.cols + c);
#pragma unroll
        for (int i = lane; i < VALUES / 4; i += 32) {
            const int what = i / (2 * ROWS), g = seg * 8 + i / (2 * N) % 8;
            float *to = values + i * 4;
            if (g < x.cols >> 5) cp16(to, (what == 0 ? x.delta : what == 1 ? x.sum : x.low) + (size_t)g * x.ld + i % (2 * N) * 4);
            else *(float4 *)to = make_float4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void take(const uint8_t *codes, int pitch, const float *values, int lane) {
        const int gid = lane >> 2, tig = lane & 3;
        now = values + 2 * tig;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 8; j++) b[n][j] = *(const uint2 *)(codes + (n * 8 + gid) * pitch + j * 32 + tig * 8);
    }
    __device__ __forceinline__ float2 value(int what, int n, int group) const { return *(const float2 *)(now + (what * 8 + group) * ROWS + n * 8); }
};

/* unit_fold<U, 8> for N groups of rows: p[n][r] of columns 2 tig and 2 tig + 1 of group n, row gid + 8r of the unit */
template <class U, int N, class Read>
__device__ __forceinline__ void stream_fold(const uint8_t *w, const StreamActs<U::FORM, N> &x, int lane, uint32_t zero, float4 *box, float (*p)[2][2], Read read) {
    constexpr Form F = U::FORM;
    constexpr bool TWO = F == FORM_S2 || F == FORM_S2M;
    const int gid = lane >> 2, tig = lane & 3;
    const uint8_t *scales = w + 2 * U::HALF;
    RowScales sc[2];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) p[i >> 2][i >> 1 & 1][i & 1] = 0.0f;
    typename U::Pack pk[2];
    if constexpr (boxed<U, 8>()) box_scales<U>(w, lane, box, pk);
#pragma unroll
    for (int s = 0; s < 8; s++) {
        const int e = (s & 3) % U::GP;
        int c[N][4], ch[N][4];
        if (!e && (s || !boxed<U, 8>()))
#pragma unroll
            for (int r = 0; r < 2; r++) pk[r] = U::template load_pack<true>(w + (s >> 2) * U::HALF, (s & 3) / U::GP, r, lane);
        if constexpr (U::APART) {
            const TableApart t0 = unit_signs<U>(pk[0], e, zero), t1 = unit_signs<U>(pk[1], e, zero);
#pragma unroll
            for (int n = 0; n < N; n++) apart_dots<TWO>(t0, t1, x.b[n][s], true, c[n], ch[n]);
        } else {
            uint32_t l0, h0, l1, h1;
            U::unpack(pk[0], e, l0, h0);
            U::unpack(pk[1], e, l1, h1);
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (TWO) { mma16_first(c[n], l0, l1, x.b[n][s].x); mma16_first(ch[n], h0, h1, x.b[n][s].y); }
                else mma32_first<U::UNSIGNED>(c[n], l0, l1, h0, h1, x.b[n][s].x, x.b[n][s].y);
            }
        }
        if (!(s & 1))
#pragma unroll
            for (int r = 0; r < 2; r++) sc[r] = row_scales<U, 8>(scales, box, gid + 8 * r, s >> 1);
        if (s == 7) read();
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 d = x.value(0, n, s);
            const GroupScale d0(d.x), d1(d.y);
            const float2 a = F == FORM_S1M || F == FORM_S2M ? x.value(1, n, s) : make_float2(0, 0), z = F == FORM_S2M ? x.value(2, n, s) : make_float2(0, 0);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float sa = sc[r].a[s & 1], sb = sc[r].b[s & 1], m0 = sc[r].m0[s & 1], m1 = sc[r].m1[s & 1];
                p[n][r][0] = fold_group<F>(p[n][r][0], c[n][2 * r], ch[n][2 * r], d0, sa, sb, F == FORM_S2M ? z.x : a.x, m0, m1, a.x - z.x);
                p[n][r][1] = fold_group<F>(p[n][r][1], c[n][2 * r + 1], ch[n][2 * r + 1], d1, sa, sb, F == FORM_S2M ? z.y : a.y, m0, m1, a.y - z.y);
            }
        }
    }
    if (boxed<U, 8>()) __syncwarp(); /* the box may be filled again */
}

/* bytes of the block's activations; of a warp's scales */
template <class U, int N> __host__ __device__ inline int stream_acts(const StreamShape &g, int segs) {
    if (g.place != RESIDENT) return g.warps * stream_slot<U, N>(g.place == STREAMED_HALVES);
    if (stream_halves<U, N>()) return segs * HalfPlace<N>::BYTES;
    return StreamSize<N>::ROWS * (segs * 256 + 32) + segs * group_floats<U::FORM>() * 8 * StreamSize<N>::ROWS * 4;
}
template <class U, int N> __host__ __device__ inline int stream_box(const StreamShape &g) {
    return !boxed<U, 8>() ? 0 : 16 * (stream_halves<U, N>() && g.place != STREAMED ? HALF_BOX : (int)BOX);
}

/* The units that a warp asks for, in the order in which it folds them: every `warps`th of (tile, segment), or of each group of tiles those of its segment in
 * every chunk. Unit k is asked for by lane k % 32. */
template <class U> struct StreamQueue {
    const LinearArgs &a;
    const StreamShape &g;
    const uint8_t *src;
    int k, warp, folds; /* folds: chunks in which the warp has a segment */
    __device__ __forceinline__ const uint8_t *source(int i) const {
        const int b = blockIdx.x, whole = g.each + (b < g.more), shift = g.glu ? 2 : 1;
        int tile, seg; /* tile of the block */
        if (g.place == RESIDENT) {
            tile = small_quotient(warp + i * g.warps, a.segs);
            seg = warp + i * g.warps - tile * a.segs;
        } else {
            const int size = stream_group(g), group = small_quotient(i, size * folds), n = min(size, stream_tiles(a, g) - group * size);
            if (n <= 0) return NULL;
            const int at = i - group * size * folds, chunk = small_quotient(at, n);
            if (chunk >= folds) return NULL;
            tile = group * size + at - chunk * n;
            seg = chunk * g.warps + warp;
        }
        int tb = b + (tile >> shift) * (int)gridDim.x, t = tile & ((1 << shift) - 1);
        if (tile >> shift >= whole) {
            if (t || b >= a.items - a.whole) return NULL;
            tb = a.whole + (b >> 1);
            t = b & 1;
        }
        const int p = g.glu ? t >> 1 : part_of(a, tb);
        return a.part[p].w + ((size_t)(tb * 2 + (t & 1)) * a.segs + seg) * U::UNIT;
    }
    __device__ __forceinline__ void next(uint8_t *slot, uint64_t *bar, int lane) { ask_next<U>(*this, slot, bar, lane); }
};

/* A warp that folds: its ring, its activations, its place among the chunks that are handed over */
template <class U, int N> struct StreamWarp {
    enum { PART = StreamSize<N>::PART, VALUES = StreamActs<U::FORM, N>::VALUES };
    const LinearArgs &a;
    const StreamShape &g;
    StreamQueue<U> queue;
    uint8_t *ring;
    uint64_t *full, *handed, *freed;
    float4 *box;
    uint8_t *codes;  /* resident: [rows][pitch] of the block, or places of HalfPlace; else the warp's [rows][288], and its HalfPlace behind scales */
    float *scales;   /* resident: [segment][VALUES]; else [2][VALUES] */
    float *parts;    /* [bufs][slots][PART] */
    int pitch, lane, warp, slot, ring_phase, buf, buf_phase;
    StreamActs<U::FORM, N> x;
    static constexpr bool HALVES = stream_halves<U, N>(); /* what is resident is in f16 */
    typedef HalfPlace<N> Place;
    __device__ __forceinline__ void ask() { /* the input, and behind it the rest of the ring */
        const bool all = g.place == RESIDENT;
        for (int seg = warp; seg < a.segs; seg += all ? g.warps : a.segs) {
            uint8_t *at = codes + (!all ? 0 : HALVES ? seg * (int)Place::BYTES : seg * 256);
            x.ask(a.x, seg, at, HALVES ? (int)Place::PITCH : pitch, HALVES ? (float *)(at + Place::SCALES) : scales + (all ? seg * VALUES : 0), lane);
        }
#pragma unroll 1
        for (int i = queue.k; i < g.depth; i++) queue.next(ring + (size_t)i * UNIT_SLOT<U>, full + i, lane);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
        if (HALVES && all)
#pragma unroll 1
            for (int seg = warp; seg < a.segs; seg += g.warps) {
                uint8_t *at = codes + seg * Place::BYTES;
                Place::make(at, at, (const float *)(at + Place::SCALES), a.rows, lane);
            }
    }
    /* the next unit, into slot `to` of the chunk; products(unit, p, read): stream_fold or the like */
    template <class P> __device__ __forceinline__ void fold(int to, P products) {
        float p[N][2][2];
        bar_wait(full + slot, ring_phase);
        products(ring + slot * UNIT_SLOT<U>, p, [&]() {
            __syncwarp();
            queue.next(ring + slot * UNIT_SLOT<U>, full + slot, lane);
        });
        if (++slot == g.depth) { slot = 0; ring_phase ^= 1; }
        bar_wait(freed + buf, buf_phase);
        float *at = parts + (buf * g.slots + to) * PART;
#pragma unroll
        for (int n = 0; n < N; n++) unit_store<8>(at + n * 8 * STREAM_PITCH, lane, p[n]);
        __syncwarp();
        if (!lane) bar_arrive(handed + buf);
    }
    __device__ __forceinline__ void turn() {
        if (++buf == g.bufs) { buf = 0; buf_phase ^= 1; }
    }
    /* a unit of segment seg, whose activations lie at `at` in f16 */
    __device__ __forceinline__ void fold_halves(int to, int seg, const uint8_t *at, uint32_t zero) {
        fold(to, [&](const uint8_t *w, float (&p)[N][2][2], auto read) {
            const PlainActs plain = {(const uint8_t *)a.x.q + seg * 256, a.x.delta + (size_t)seg * 8 * a.x.ld, a.x.cols, a.x.ld, min(8, (a.x.cols >> 5) - seg * 8)};
            Place::fold(w, at, plain, lane, zero + 2, box, p, read);
        });
    }
    __device__ __forceinline__ void fold_codes(int to, uint32_t zero) {
        fold(to, [&](const uint8_t *w, float (&p)[N][2][2], auto read) { stream_fold<U, N>(w, x, lane, zero, box, p, read); });
    }
    __device__ __forceinline__ void resident(int tiles, uint32_t zero) {
        const int S = a.segs;
#pragma unroll 1
        for (int tile = 0, seg = warp; tile < tiles;) {
            if constexpr (HALVES) fold_halves(seg, seg, codes + seg * Place::BYTES, zero);
            else {
                x.take(codes + seg * 256, pitch, scales + seg * VALUES, lane);
                fold_codes(seg, zero);
            }
            for (seg += g.warps; seg >= S && tile < tiles; seg -= S, tile++) turn();
        }
    }
    /* the segment that has come is brought to where products take it; the next one is asked for */
    template <bool IN_HALVES> __device__ __forceinline__ void take(int taken, int next) {
        const float *from = scales + (taken & 1) * VALUES;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
        if constexpr (IN_HALVES) Place::make(codes + stream_slot<U, N>(false), codes, from, a.rows, lane);
        else x.take(codes, pitch, from, lane);
        __syncwarp(); /* the codes may be overwritten */
        if (queue.folds > 1) x.ask(a.x, next * g.warps + warp, codes, pitch, scales + (~taken & 1) * VALUES, lane);
    }
    template <bool IN_HALVES> __device__ __forceinline__ void streamed(int tiles, uint32_t zero) {
        const int size = stream_group(g);
        for (int first = 0, taken = 0; first < tiles; first += size) {
            const int n = min(size, tiles - first);
#pragma unroll 1
            for (int chunk = 0; chunk < g.chunks; chunk++) {
                const bool mine = chunk < queue.folds;
                if (mine && (queue.folds > 1 || !taken)) take<IN_HALVES>(taken++, chunk + 1 < queue.folds ? chunk + 1 : 0);
#pragma unroll 1
                for (int t = 0; t < n; t++) {
                    if (!mine) {
                        bar_wait(freed + buf, buf_phase);
                        if (!lane) bar_arrive(handed + buf);
                    } else if constexpr (IN_HALVES) fold_halves(warp, chunk * g.warps + warp, codes + stream_slot<U, N>(false), zero);
                    else fold_codes(warp, zero);
                    turn();
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
};

/* A warp that adds: lane = column lane % 16 of rows row() and row() + 1. y: sums of the item's tiles, res: what they are added to */
struct StreamSums {
    const LinearArgs &a;
    int lane, rw;
    float y[4][2], res[2][2]; /* of tiles that there are */
    __device__ __forceinline__ int row(int i) const { return (rw >> 1) * 8 + (rw & 1) * 2 + i + (lane >> 4) * 4; } /* half warps read separate banks */
    __device__ __forceinline__ void begin(const LinearPart &p, bool glu, int n) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row(i & 1), col = n + (i >> 1) * 16;
            res[i >> 1][i & 1] = !glu && r < a.rows && col < p.n ? linear_res(p, r, col) : 0.0f;
        }
    }
    template <int PART> __device__ __forceinline__ float2 add(const float *ps, int count, float2 v) const {
        ps += row(0) * STREAM_PITCH + (lane & 15);
#pragma unroll 4
        for (int w = 0; w < count; w++, ps += PART) { v.x = v.x + ps[0]; v.y = v.y + ps[STREAM_PITCH]; }
        return v;
    }
    __device__ __forceinline__ void put(int tile, float2 v) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[i][0] = i == tile ? v.x : y[i][0];
            y[i][1] = i == tile ? v.y : y[i][1];
        }
    }
    __device__ __forceinline__ void store(const LinearPart &p, int n, int tiles) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row(i & 1), col = n + (i >> 1) * 16;
            if (i >> 1 < tiles && r < a.rows && col < p.n) linear_store(p, r, col, y[i >> 1][i & 1], res[i >> 1][i & 1]);
        }
    }
    /* 32 columns of one row: v0 of lanes 0-15 and v1 of lanes 0-15 (first), or both of lanes 16-31 */
    __device__ __forceinline__ void change(float v0, float v1, float *of) const {
        const float got = __shfl_xor_sync(~0u, lane > 15 ? v0 : v1, 16);
        of[0] = lane > 15 ? got : v0;
        of[1] = lane > 15 ? v1 : got;
    }
    __device__ __forceinline__ void gate(int tb) const {
        const LinearPart &p = a.part[0];
        const int n = tb * 32 + lane;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float g[2], u[2];
            change(y[0][i], y[1][i], g);
            change(y[2][i], y[3][i], u);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int r = (rw >> 1) * 8 + (rw & 1) * 2 + i + k * 4;
                if (r >= a.rows) continue;
                const float gate = linear_scaled(p, n, g[k]), v = (a.gelu ? bw_gelu(gate) : bw_silu(gate)) * linear_scaled(a.part[1], n, u[k]);
                if (n < p.n) p.y[(size_t)r * p.n + n] = v;
                if (a.xo.q) quant_group(a.xo, r, n >> 5, lane, v, a.fault, a.op);
            }
        }
    }
};

/* What a tile of a block belongs to */
struct StreamItem {
    int part, tb, n, tiles, tile; /* n: the lane's first output, tile: of the item's `tiles` */
    __device__ __forceinline__ StreamItem(const LinearArgs &a, const StreamShape &g, int at, int lane) {
        const int shift = g.glu ? 2 : 1, item = blockIdx.x + (at >> shift) * gridDim.x, half = item - a.whole;
        tile = at & ((1 << shift) - 1);
        tiles = half < 0 || g.glu ? 1 << shift : 1;
        tb = half < 0 ? item : a.whole + (half >> 1);
        part = g.glu ? 0 : part_of(a, tb);
        n = tb * 32 + (lane & 15) + (half < 0 ? 0 : (half & 1) * 16);
    }
};

/* A warp that adds, over the block's groups of tiles: sums wait in shared memory for their next chunk, after the last one an item's results leave */
template <int N> __device__ __forceinline__ void stream_reduce(const LinearArgs &a, const StreamShape &g, const float *parts, uint64_t *handed, uint64_t *freed, int rw, int lane) {
    enum { PART = StreamSize<N>::PART, LANES = StreamSize<N>::REDUCERS * 32 };
    const int tiles = stream_tiles(a, g), size = stream_group(g);
    float2 *kept = (float2 *)(parts + g.bufs * g.slots * PART) + rw * 32 + lane; /* [tile][LANES] */
    StreamSums sums = {a, lane, rw};
    int buf = 0, buf_phase = 0;
    for (int first = 0; first < tiles; first += size)
        for (int chunk = 0; chunk < g.chunks; chunk++) {
            const int count = min(g.slots, a.segs - chunk * g.slots), n = min(size, tiles - first);
            const bool last = chunk == g.chunks - 1;
#pragma unroll 1
            for (int t = 0; t < n; t++) {
                const StreamItem item(a, g, first + t, lane);
                const LinearPart &p = a.part[item.part];
                if (last && !item.tile) sums.begin(p, g.glu, item.n); /* the residual is on its way */
                const float2 before = chunk ? kept[t * LANES] : make_float2(0.0f, 0.0f);
                bar_wait(handed + buf, buf_phase);
                const float2 v = sums.template add<PART>(parts + buf * g.slots * PART, count, before);
                __syncwarp();
                if (!lane) bar_arrive(freed + buf);
                if (++buf == g.bufs) { buf = 0; buf_phase ^= 1; }
                if (!last) { kept[t * LANES] = v; continue; }
                sums.put(item.tile, v);
                if (item.tile < item.tiles - 1) continue;
                if (g.glu) sums.gate(item.tb);
                else sums.store(p, item.n, item.tiles);
            }
        }
}

/* Persistent over items. Warps fold units that come through their own rings; others add the p's, handed over a tile and chunk at a time, segments ascending.
 * Traffic: every weight byte once; activations once a block (resident), or a segment once a group of tiles. */
template <class U, int N>
__global__ void __launch_bounds__(StreamSize<N>::THREADS, 1) k_linear_stream(const __grid_constant__ LinearArgs a, const __grid_constant__ StreamShape g) {
    typedef StreamSize<N> Z;
    extern __shared__ __align__(128) uint8_t sm[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), W = g.warps, D = g.depth, S = a.segs; /* warp: a register */
    uint64_t *full = (uint64_t *)sm + warp * STREAM_DEPTH, *handed = (uint64_t *)sm + SMALL_WARPS * STREAM_DEPTH, *freed = handed + STREAM_BUFS;
    uint8_t *at = sm + (STREAM_BARS + 127) / 128 * 128, *ring = at + (size_t)warp * D * UNIT_SLOT<U>;
    at += (size_t)W * D * UNIT_SLOT<U>;
    float4 *box = (float4 *)(at + warp * stream_box<U, N>(g));
    at += W * stream_box<U, N>(g);
    uint8_t *codes = at + (g.place == RESIDENT ? 0 : warp * stream_slot<U, N>(g.place == STREAMED_HALVES));
    float *parts = (float *)(at + stream_acts<U, N>(g, S));
    const int pitch = g.place == RESIDENT ? S * 256 + 32 : 288, folds = g.chunks - (warp + (g.chunks - 1) * g.slots >= S);
    StreamWarp<U, N> w = {a, g, {a, g, NULL, 0, warp, folds}, ring, full, handed, freed, box, codes, (float *)(codes + Z::ROWS * pitch), parts, pitch, lane, warp, 0, 0, 0, 1};
    small_arguments(a, warp);
    if (warp < W) {
        if (lane < D) bar_init(full + lane, 1);
        bar_fence();
        __syncwarp();
        w.queue.src = w.queue.source(lane);
#pragma unroll 1
        for (int i = 0; i < D && i * W + warp < g.early; i++) w.queue.next(ring + (size_t)i * UNIT_SLOT<U>, full + i, lane);
    } else if (threadIdx.x - W * 32 < STREAM_BUFS) {
        const int i = threadIdx.x - W * 32;
        bar_init(handed + i, g.slots);
        bar_init(freed + i, Z::REDUCERS);
    }
    pdl_trigger();
    __syncthreads(); /* the barriers are there */
    pdl_wait();
    if (warp < W) w.ask();
    if (g.place == RESIDENT) __syncthreads(); /* else a warp reads what it brought */
    if (warp >= W) return stream_reduce<N>(a, g, parts, handed, freed, warp - W, lane);
    const uint32_t zero = (uint32_t)lane * ((uint32_t)a.n_parts >> 8); /* the compiler does not know: what it is part of stays in a register of each lane */
    const int tiles = stream_tiles(a, g);
    if (g.place == RESIDENT) return w.resident(tiles, zero);
    if constexpr (stream_halves<U, N>())
        if (g.place == STREAMED_HALVES) return w.template streamed<true>(tiles, zero);
    w.template streamed<false>(tiles, zero);
}

template <class U, int N> inline size_t stream_shared(const StreamShape &g, int segs) {
    const size_t warp = g.depth * UNIT_SLOT<U> + stream_box<U, N>(g);
    return (STREAM_BARS + 127) / 128 * 128 + g.warps * warp + stream_acts<U, N>(g, segs) + (size_t)g.bufs * g.slots * StreamSize<N>::PART * 4 + stream_kept<N>(g);
}
/* the widest block that fits, each warp with a segment of its own */
template <class U, int N> void stream_widest(StreamShape &g, size_t shared_max, int segs) {
    for (g.warps = segs < StreamSize<N>::WARPS ? segs : (int)StreamSize<N>::WARPS;; g.warps--) {
        g.slots = g.warps;
        g.chunks = (segs + g.slots - 1) / g.slots;
        if (g.warps == 1 || stream_shared<U, N>(g, segs) <= shared_max) return;
    }
}
/* Resident where all warps, in f16 10 of them, and two buffers fit, which N = 1 leaves to op_linear.cuh. Else streamed, in f16 where a block has so many tiles
 * that a segment's way to f16 (as long as a unit's products) is little, and 10 warps fit. tiles: of a block. Measured. */
enum { HALVES_LEAST = 10, HALVES_TILES = 5 };
template <class U, int N> StreamShape stream_shape(size_t shared_max, int segs, bool glu, int tiles) {
    constexpr int all = StreamSize<N>::WARPS, least = stream_halves<U, N>() ? (int)HALVES_LEAST : all;
    StreamShape g = {};
    auto fits = [&] { return stream_shared<U, N>(g, segs) <= shared_max; };
    g.glu = glu;
    g.place = N > 1 ? RESIDENT : STREAMED;
    g.warps = segs < all ? segs : all;
    g.slots = segs;
    g.chunks = 1;
    g.bufs = g.depth = STREAM_DEPTH;
    while (g.place == RESIDENT && !fits())
        if (--g.warps < least) g.place = stream_halves<U, N>() && tiles >= HALVES_TILES ? STREAMED_HALVES : STREAMED;
    if (g.place == STREAMED_HALVES) {
        stream_widest<U, N>(g, shared_max, segs);
        if (g.warps < least || !fits()) g.place = STREAMED;
    }
    if (g.place == STREAMED) {
        g.bufs = STREAM_BUFS;
        stream_widest<U, N>(g, shared_max, segs);
    }
    while (g.bufs < STREAM_BUFS && ++g.bufs && !fits()) { g.bufs--; break; }
    g.early = g.warps;
    return g;
}

} // namespace bw
#endif
