/* Calls a function under a floating-point control word that a host program may have set, and reports the word after the call. x86-64. */
#include <immintrin.h>
#include <stdint.h>

typedef intptr_t (*any)(intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t);

/* control: MXCSR; the x87 unit, whose mode the C library asks when it reads numbers, gets the same rounding. after: MXCSR,
 * bit 31 set if the x87 word came back as it was */
intptr_t call_with(any f, const intptr_t *a, unsigned control, unsigned *after) {
    unsigned own = _mm_getcsr();
    uint16_t x87, changed, found;
    __asm__ volatile("fnstcw %0" : "=m"(x87));
    changed = (uint16_t)((x87 & ~0x0c00u) | (control >> 3 & 0x0c00u));
    __asm__ volatile("fldcw %0" : : "m"(changed));
    _mm_setcsr(control);
    intptr_t rc = f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
    *after = _mm_getcsr();
    _mm_setcsr(own);
    __asm__ volatile("fnstcw %0" : "=m"(found));
    __asm__ volatile("fldcw %0" : : "m"(x87));
    *after |= (unsigned)(found == changed) << 31;
    return rc;
}
