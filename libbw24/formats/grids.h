/* The lattice codebooks of the IQ1, IQ2 and IQ3 types, packed one row a word (grids.c says how). Data only. */
#ifndef BW24_GRIDS_H
#define BW24_GRIDS_H

#include <stdint.h>

extern const uint16_t bw_grid_iq2xxs[256]; /* rows of 8 */
extern const uint16_t bw_grid_iq2xs[512];  /* rows of 8 */
extern const uint16_t bw_grid_iq2s[1024];  /* rows of 8 */
extern const uint16_t bw_grid_iq3xxs[256]; /* rows of 4 */
extern const uint16_t bw_grid_iq3s[512];   /* rows of 4 */
extern const uint16_t bw_grid_iq1[2048];   /* rows of 8 */

#endif
