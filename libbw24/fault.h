/* Seeded faults: builds that are wrong on purpose (make lib FAULT=n), so that tests/test_faults.py can show that a gate turns red. A fault
 * is one expression written BW_SEEDED(n, wrong, right); an ordinary build contains only `right`. Numbers are unique; the Makefile finds the
 * file by the number, so a fault stands in a .c file. */
#ifndef BW24_FAULT_H
#define BW24_FAULT_H

#ifndef BW24_FAULT
#define BW24_FAULT 0
#endif
#define BW_SEEDED(n, wrong, right) (BW24_FAULT == (n) ? (wrong) : (right))

#endif
