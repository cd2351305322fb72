/* Which experts a row goes to and with what weights: ROUTE, one text for every backend (docs/numerics.md §10). Owns selection, ties and
 * renormalisation; the scores come from the caller. Knows no tensor and no model. */
#ifndef BW24_ROUTE_H
#define BW24_ROUTE_H

#include "canon.h"

enum bw_route_kind { BW_ROUTE_SOFTMAX, BW_ROUTE_SIGMOID };
enum { BW_ROUTE_MAX = 1024 }; /* experts, and groups */

typedef struct bw_route {
    int experts, top, groups, keep, norm;
    enum bw_route_kind kind;
    float scale;
} bw_route;

/* index of the largest of x[0..n), the lowest where several are equal; entries with skip[i] are left out; -1 if all are */
BW_FN int bw_route_best(const float *x, const unsigned char *skip, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (!skip[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

/* sum of the two largest scores of a group; of the only one */
BW_FN float bw_route_group(const float *c, int n) {
    float a = c[0], b = 0.0f;
    int two = 0;
    for (int i = 1; i < n; i++) {
        float x = c[i];
        if (x > a) { b = a; a = x; }
        else if (!two || x > b) b = x;
        two = 1;
    }
    return two ? a + b : a;
}

/* p: [experts] probabilities; c: [experts] selection scores; out: [top] weights, then [top] expert ids as floats */
BW_FN void bw_route_select(const bw_route *r, const float *p, const float *c, float *out) {
    unsigned char skip[BW_ROUTE_MAX], dropped[BW_ROUTE_MAX];
    float group[BW_ROUTE_MAX], sum = 0.0f;
    int size = r->experts / r->groups;
    for (int i = 0; i < r->experts; i++) skip[i] = r->groups > 1;
    for (int g = 0; g < r->groups && r->groups > 1; g++) {
        group[g] = bw_route_group(c + g * size, size);
        dropped[g] = 0;
    }
    for (int k = 0; k < r->keep && r->groups > 1; k++) {
        int g = bw_route_best(group, dropped, r->groups);
        dropped[g] = 1;
        for (int i = 0; i < size; i++) skip[g * size + i] = 0;
    }
    for (int s = 0; s < r->top; s++) {
        int e = bw_route_best(c, skip, r->experts);
        skip[e] = 1;
        out[s] = p[e];
        out[r->top + s] = (float)e;
        sum = sum + p[e];
    }
    sum = sum < 0x1p-14f ? 0x1p-14f : sum;
    for (int s = 0; s < r->top; s++) out[s] = (r->norm ? out[s] / sum : out[s]) * r->scale;
}

#endif
