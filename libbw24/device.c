/* Which accelerators this machine has, and whether this library can use them. Owns the answer for builds without CUDA (by the device files of
 * the driver) and the edge of the other; opens no context of the library's and knows no model. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

/* the driver makes one file a card; Windows' Linux subsystem has its own way in */
static bool driver_file(int index) {
    char path[32];
    snprintf(path, sizeof path, "/dev/nvidia%d", index);
    return access(path, F_OK) == 0 || (index == 0 && access("/dev/dxg", F_OK) == 0 && access("/usr/lib/wsl/lib/libcuda.so.1", F_OK) == 0);
}

int bw24_device_query(int32_t index, bw24_device_facts *out) {
    if (!out || out->size != sizeof *out) return bw_fail(BW24_E_ARG, "bw24_device_query: struct of size %u, expected %zu", out ? out->size : 0, sizeof *out);
    if (index < 0 || index > 63) return bw_fail(BW24_E_ARG, "bw24_device_query: device %d is outside 0..63", index);
    *out = (bw24_device_facts){.size = sizeof *out};
#ifdef BW24_CUDA
    (void)driver_file;
    return bw_cuda_query(index, out);
#else
    if (!driver_file(index)) {
        snprintf(out->reason, sizeof out->reason, index ? "there is no device %d" : "there is no CUDA device", index);
        return 0;
    }
    out->state = BW24_DEVICE_UNUSABLE;
    while (out->count < 64 && driver_file(out->count)) out->count++;
    snprintf(out->name, sizeof out->name, "an NVIDIA card");
    snprintf(out->reason, sizeof out->reason, "the library was built without CUDA (make CUDA=1 needs nvcc)");
    return 0;
#endif
}
