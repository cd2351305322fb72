/* Instantiates the LINEAR kernels of one unit type: included by the linear_*.cu files. Owns the choice of block shapes. */
#ifndef BW24_CU_LINEAR_KERNELS_CUH
#define BW24_CU_LINEAR_KERNELS_CUH

#include <type_traits>
#include "launch.h"
#include "gemm_fast.h"
#include "op_gemm_groups.cuh"
#include "op_linear_one.cuh"
#include "op_linear_stream.cuh"

namespace bw {

enum { ACT_KB = 52 }; /* measured on the H200 (research/orders) */
enum { EIGHT_SEGS = 22 }; /* of eight rows: more are faster by op_linear_stream.cuh (measured) */
enum { ACT_WIDE_KB = 136, WIDE_KB = 222, WIDE_WARPS = 10 };

template <class U, int R, bool GLU> void small_launch(Queue &q, LinearArgs a) {
    size_t bytes = 0;
    SmallShape g = small_shape<U, R, GLU>((size_t)q.shared_max, a.segs, &bytes);
    if (a.rows == 2) g.early += g.early / 2; /* its input is half as long: 1 % of a step on the H200 */
    small_items(a, g, GLU, q.sms);
    launch(q, k_linear_small<U, R, GLU>, dim3((unsigned)q.sms), 32 * (g.warps + small_reducers<R>()), bytes, a, g);
}

/* One row, measured on the H200: warps that fold (more of them and deeper rings were slower); half of them ask before the dependency wait, all where the
 * input is a quantised row, a quarter of the bytes that a NORM reads. Tiles of a pass: all of a block's, or as many as fit. */
enum { ONE_NARROW = 12, ONE_WIDE = 8, ONE_WIDE_UNIT = 4096, ONE_LEAST = 8 };
template <class U> bool one_fits_in(OneShape &g, int segs, int blocks, int all, size_t limit, int two) {
    const int step = g.glu ? 4 : 1, most = one_most(all, blocks, two) * step, least = most < 8 || two ? most : 8; /* of blocks in twos all in one pass */
    for (g.tiles = most < 64 ? most : 64; g.tiles >= least; g.tiles -= step)
        if (one_shared<U>(g, segs, blocks, all, two) <= limit) return true;
    return false;
}
/* As many warps as make the longest run of pairs no longer than g.warps would: fewer that have the same to do disturb each other less */
inline int one_warps(const OneShape &g, int segs, int two) {
    const int most = g.per + (g.more != 0), pairs = (segs + 1) / 2, tiles = (most >> two) * pairs + (most & two) * ((pairs + 1) / 2);
    const int items = tiles * (g.glu ? 4 : 1), longest = (items + g.warps - 1) / g.warps, warps = (items + longest - 1) / longest;
    return warps > ONE_LEAST ? warps : g.warps < ONE_LEAST ? g.warps : (int)ONE_LEAST;
}
/* false: nothing fits but one warp's pair and the fewest tiles, as one_fits says */
template <class U> bool one_shape(OneShape &g, const Queue &q, int segs, int all, bool glu, int two, bool norm) {
    constexpr int most = U::UNIT < ONE_WIDE_UNIT ? ONE_NARROW : ONE_WIDE;
    g = {};
    g.glu = glu;
    g.per = all / (q.sms >> two);
    g.more = all % (q.sms >> two);
    bool fits = false;
    for (int depth = 2; depth && !fits; depth--)
        for (int warps = most; warps >= (depth > 1 ? 4 : 1) && !fits; warps--) {
            g.warps = warps;
            g.depth = depth;
            fits = one_fits_in<U>(g, segs, q.sms, all, (size_t)q.shared_max, two);
        }
    if (fits) g.warps = one_warps(g, segs, two);
    else g.tiles = glu ? 4 : 1;
    g.early = norm ? (g.warps + 1) / 2 : g.warps;
    one_divisors(g, two);
    return fits;
}
/* Blocks go in twos that share a last tile (four) where the longest work becomes shorter: 4.5 fours instead of 5. Of more tiles a half is little. */
enum { ONE_TWOS_MOST = 8 };
inline bool one_in_twos(const Queue &q, int all) {
    const int alone = one_most(all, q.sms, 0), both = one_most(all, q.sms / 2, 0);
    return q.warp_groups && q.sms % 2 == 0 && all >= 2 * q.sms && alone <= ONE_TWOS_MOST && both < 2 * alone;
}
template <class U> bool one_fits(const Queue &q, int segs) {
    OneShape g = {};
    g.warps = g.depth = g.glu = 1;
    g.tiles = 4;
    return one_shared<U>(g, segs, 1, 2) <= (size_t)q.shared_max;
}
template <class U, int TWO> bool one_start(Queue &q, const LinearArgs &a, bool glu, int all) {
    OneShape g;
    if (!one_shape<U>(g, q, a.segs, all, glu, TWO, a.norm.x != NULL) && TWO) return false;
    q.twos = TWO;
    launch(q, k_linear_one<U, TWO>, dim3((unsigned)q.sms), ONE_THREADS, one_shared<U>(g, a.segs, q.sms, all, TWO), a, g);
    return true;
}
/* units that have a kernel of blocks in twos: those of matrices with 320 tiles (5120 outputs) that were measured */
template <class U> constexpr bool ONE_TWOS = std::is_same<U, U_NVFP4>::value || std::is_same<U, U_Q4_K>::value;
template <class U> void one_launch(Queue &q, const LinearArgs &a, bool glu) {
    const int all = glu ? a.blocks : 2 * a.blocks;
    if constexpr (ONE_TWOS<U>)
        if (one_in_twos(q, all) && one_start<U, 1>(q, a, glu, all)) return;
    one_start<U, 0>(q, a, glu, all);
}

/* rows that `small` takes at once: 16 where enough warps fit */
enum { WIDE_LEAST_WARPS = 10 };
template <class U> int small_most(const Queue &q, int segs) {
    return stream_shape<U, 2>((size_t)q.shared_max, segs, false, 0).warps >= (segs < WIDE_LEAST_WARPS ? segs : (int)WIDE_LEAST_WARPS) ? 16 : 8;
}
template <class U, int N> void stream_launch(Queue &q, LinearArgs a, bool glu) {
    StreamShape g = stream_shape<U, N>((size_t)q.shared_max, a.segs, glu, a.blocks * (glu ? 4 : 2) / q.sms);
    small_items(a, g, glu, q.sms);
    launch(q, k_linear_stream<U, N>, dim3((unsigned)q.sms), 32 * (g.warps + StreamSize<N>::REDUCERS), stream_shared<U, N>(g, a.segs), a, g);
}

inline bool acts_fit(int R, int segs) { return (size_t)R * segs * 352 <= (size_t)ACT_KB * 1024; }

/* Beyond ACT_KB the alternative is eight row slots whose activations are fetched again for every item, so fewer warps or shallower rings are the lesser
 * evil where shared memory is large */
template <class U, int R, bool GLU> bool staged_fits(const Queue &q, int segs) {
    if (acts_fit(R, segs)) return true;
    if (R == 8 && segs > EIGHT_SEGS) return false;
    if ((size_t)q.shared_max < (size_t)WIDE_KB * 1024 || (size_t)R * segs * 352 > (size_t)ACT_WIDE_KB * 1024) return false;
    size_t bytes = 0;
    return small_shape<U, R, GLU>((size_t)q.shared_max, segs, &bytes).warps >= WIDE_WARPS;
}

template <class U> bool takes_norm(const Queue &q, int segs) { return one_fits<U>(q, segs) && segs <= 2 * ONE_WARPS; }

template <class U, bool GLU, bool MANY> void small_rows(Queue &q, const LinearArgs &a) {
    if constexpr (MANY) {
        if (a.rows <= 4 && staged_fits<U, 4, GLU>(q, a.segs)) return small_launch<U, 4, GLU>(q, a);
    }
    if (staged_fits<U, 8, GLU>(q, a.segs)) small_launch<U, 8, GLU>(q, a);
    else stream_launch<U, 1>(q, a, GLU);
}

/* which kernels of 2 to 8 rows a unit has beside op_linear_stream.cuh */
enum SmallKernels { SMALL_NONE, SMALL_8, SMALL_4_8 };
template <class U, int KERNELS> void linear_small(Queue &q, const LinearArgs &a, bool glu) {
    if (a.rows > 8) stream_launch<U, 2>(q, a, glu);
    else if (a.rows <= 1 && one_fits<U>(q, a.segs)) one_launch<U>(q, a, glu);
    else if constexpr (KERNELS == SMALL_NONE) stream_launch<U, 1>(q, a, glu);
    else if (glu) small_rows<U, true, KERNELS == SMALL_4_8>(q, a);
    else small_rows<U, false, KERNELS == SMALL_4_8>(q, a);
}

template <class U> bool group_shape(const Queue &q) { return q.warp_groups && by_groups<U>; }
template <class U> size_t gemm_bytes(const Queue &q) {
    if (group_shape<U>(q)) return sizeof(GroupShared<U>);
    return gemm_stages(q.shared_max) == 3 ? sizeof(GemmBlock<U, 3>) : sizeof(GemmBlock<U, 2>);
}
template <class U> bool gemm_fits(const Queue &q) { return gemm_bytes<U>(q) <= (size_t)q.shared_max; }
template <class U> void linear_gemm(Queue &q, const LinearArgs &a, uint8_t *acts) {
    int tiles = 0;
    for (int i = 0; i < a.n_parts; i++) tiles += (a.part[i].n + 127) / 128;
    const int blocks = (a.rows + 127) / 128, places = tiles * blocks;
    dim3 grid((unsigned)blocks, (unsigned)tiles);
    if (group_shape<U>(q)) {
        gemm_codes(q, a.x, acts);
        grid = dim3((unsigned)(places < q.sms ? places : q.sms));
    }
    launch(q, k_linear_gemm<U>, grid, group_shape<U>(q) ? GG_THREADS : 256, gemm_bytes<U>(q), a, (const uint8_t *)acts);
}

#define BW_LINEAR_KERNELS(name, type, kernels, packs) \
    const LinearKernels name = {"U_" #type, UNIT_##type, U_##type::UNIT, packs, gemm_fits<U_##type>, takes_norm<U_##type>, small_most<U_##type>, \
                                linear_small<U_##type, kernels>, linear_gemm<U_##type>};

} // namespace bw
#endif
