/* What can be said of a card before a context is opened: whether there is one, its name and memory, or why it cannot be used. Host code; opens
 * the runtime's own context on a usable card, because only that knows the free memory. */
#include <cstdio>
#include <cstring>
#include "cuda.h"

using namespace bw;

static int unusable(bw24_device_facts *out, const char *reason) {
    out->state = BW24_DEVICE_UNUSABLE;
    snprintf(out->reason, sizeof out->reason, "%s", reason);
    return 0;
}

extern "C" int bw_cuda_query(int index, bw24_device_facts *out) {
    int count = 0, driver = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    out->driver = driver;
    if (!driver || e == cudaErrorNoDevice || (!e && !count)) {
        snprintf(out->reason, sizeof out->reason, driver ? "the NVIDIA driver finds no device" : "there is no NVIDIA driver");
        return 0;
    }
    out->count = count;
    if (!e && index >= count) {
        snprintf(out->reason, sizeof out->reason, "the devices are 0..%d", count - 1);
        return 0;
    }
    cudaDeviceProp p = {};
    if (cu_check_card(index, &p)) return unusable(out, bw24_last_error());
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, p.name);
    out->capability = p.major * 10 + p.minor;
    size_t room = 0, total = 0;
    if ((e = cudaMemGetInfo(&room, &total))) {
        cudaGetLastError();
        char why[160];
        snprintf(why, sizeof why, "%s: %s", p.name, cudaGetErrorString(e));
        return unusable(out, why);
    }
    out->free = room;
    out->total = total;
    out->state = BW24_DEVICE_USABLE;
    return 0;
}
