/* CHECK(condition[, format, ...]): prints what does not hold, with the library's last error, and counts in `checks` and `failures`. Knows nothing of
 * what is tested. */
#ifndef BW24_TESTS_CHECK_H
#define BW24_TESTS_CHECK_H

#include <stdarg.h>
#include <stdio.h>

#include "bw24.h"

static int checks, failures;

__attribute__((format(printf, 4, 5))) static void check_failed(const char *file, int line, const char *condition, const char *format, ...) {
    va_list more;
    va_start(more, format);
    failures++;
    fprintf(stderr, "%s:%d: %s:", file, line, condition);
    vfprintf(stderr, format, more);
    fprintf(stderr, " (%s)\n", bw24_last_error());
    va_end(more);
}

/* the format follows a blank, so that a lone condition has one too */
#define CHECK(condition, ...) \
    do { \
        checks++; \
        if (!(condition)) check_failed(__FILE__, __LINE__, #condition, " " __VA_ARGS__); \
    } while (0)

#endif
