/* The angles of ROPE, one text for every backend (docs/numerics.md §5). Owns the expression and the table's layout;
 * knows no tensor and no model. */
#ifndef BW24_ROPE_H
#define BW24_ROPE_H

#include <stddef.h>
#include "canon.h"

enum bw_rope_style {
    BW_ROPE_NEOX, /* pair i is (x[i], x[i + rot/2]) */
    BW_ROPE_NORM  /* pair i is (x[2i], x[2i + 1]) */
};

/* angle of pair i in radians; ff = 1 where the file has no frequency factors, scale = 1 where positions are not scaled */
BW_FN double bw_rope_angle(int64_t pos, int rot, double base, int i, float ff, double scale) {
    return ((double)pos * (bw_inv_freq(base, i, rot) / (double)ff)) * scale;
}

/* One row's table for rot dimensions (even): cs[0 .. rot/2) cosines, cs[rot/2 .. rot) sines. freq_factors: [rot/2] or NULL. */
BW_FN void bw_rope_table(int64_t pos, int rot, double base, const float *freq_factors, double freq_scale, float *cs) {
    for (int i = 0; i < rot / 2; i++) {
        double a = bw_rope_angle(pos, rot, base, i, freq_factors ? freq_factors[i] : 1.0f, freq_scale);
        bw_sincos(a, cs + rot / 2 + i, cs + i);
    }
}

#endif
