/* The instruction sets that cpu kernels come in. Every kernel takes one of these; linear.h and attend.h share this declaration.
 * AVXVNNI and AVX512VNNI imply the ones before them; AVX512VNNI means F, BW, VL, DQ and VNNI. */
#ifndef BW24_CPU_ISA_H
#define BW24_CPU_ISA_H

enum cpu_isa { CPU_PORTABLE, CPU_AVX2, CPU_AVXVNNI, CPU_AVX512VNNI };

#endif
