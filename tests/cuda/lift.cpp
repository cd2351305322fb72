/* Lifted experts in emulation: one kernel from backend cpu's packed tiles to units gives what untiling to the file's rows and packing those give, for random
 * tiles, rows and columns that fill no block. The sources are made by test_cuda_emulated_lift.py from libbw24/cu. */
#include "emulate.h"
template <class T> T __ldcs(const T *p) { return *p; }
#include "op_pack.cuh"

using namespace bw;

static uint64_t state = 7;
static uint8_t random8() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (uint8_t)(state >> 40); }
static int bad;

template <class U> void check(int unit, const char *name, bw_untile u, int rows, int cols) {
    const int segs = (cols + 255) / 256, groups = cols / 32, tiles = (rows + 15) / 16;
    const size_t tile_bytes = ((size_t)(groups + u.per - 1) / u.per * (u.head + u.per * u.codes) + 63) / 64 * 64, row_bytes = (size_t)groups / u.block * u.bytes;
    std::vector<uint8_t> packed(tiles * tile_bytes), raw(rows * row_bytes), want((size_t)(rows + 31) / 32 * 2 * segs * U::UNIT), got(want.size(), 0xaa);
    for (auto &b : packed) b = random8();
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g += u.block)
            bw_untile_block(&u, packed.data() + r / 16 * tile_bytes, g, r % 16, raw.data() + r * row_bytes + (size_t)g / u.block * u.bytes);
    PackArgs p = {raw.data(), want.data(), rows, cols, segs, row_bytes};
    emu::launch([&] { k_pack(unit, p, LiftArgs()); }, dim3(tiles * segs), 128);
    LiftArgs l = {u, packed.data(), got.data(), rows, cols, segs, tile_bytes};
    emu::launch([&] { k_pack(unit, PackArgs(), l); }, dim3((rows + 31) / 32 * 2 * segs), 128);
    bool same = want == got;
    printf("%s %s %d x %d\n", same ? "PASS" : "FAIL", name, rows, cols);
    bad |= !same;
}

int main() {
    for (int rows : {40, 64})
        for (int cols : {512, 768}) {
            check<U_Q4_K>(UNIT_Q4_K, "Q4_K", {UNTILE_Q4_K, 256, 256, 8, 8, 144}, rows, cols);
            check<U_Q6_K>(UNIT_Q6_K, "Q6_K", {UNTILE_Q6_K, 320, 384, 8, 8, 210}, rows, cols);
            check<U_IQ4_XS>(UNIT_IQ4_XS, "IQ4_XS", {UNTILE_IQ4_XS, 128, 256, 8, 8, 136}, rows, cols);
            check<U_NVFP4>(UNIT_NVFP4, "NVFP4", {UNTILE_NVFP4, 64, 256, 2, 2, 36}, rows, cols - 192);
            check<U_Q4_0>(UNIT_Q4_0, "Q4_0", {UNTILE_Q4_0, 64, 256, 2, 1, 18}, rows, cols - 32);
            check<U_Q8_0>(UNIT_Q8_0, "Q8_0", {UNTILE_Q8_0, 64, 512, 2, 1, 34}, rows, cols - 224);
        }
    return bad;
}
