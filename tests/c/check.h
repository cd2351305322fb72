/* CHECK(condition, format, ...): prints and counts what does not hold, in `failures`. Knows nothing of what is tested. */
#ifndef BW24_TESTS_CHECK_H
#define BW24_TESTS_CHECK_H

#include <stdio.h>

static int failures;
#define CHECK(cond, ...) \
    do { \
        if (!(cond)) { \
            failures++; \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
            fprintf(stderr, __VA_ARGS__); \
            fputc('\n', stderr); \
        } \
    } while (0)

#endif
