/* How much memory may still be taken: /proc/meminfo, and the limits of the memory cgroups (version 1 and 2) that hold this process. Owns the reserve
 * that is left to the rest of the system; knows nothing of models. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "spill.h"

enum { PATH_BYTES = 1024 };
static const uint64_t RESERVE = 4ull << 30; /* with less than this the desktop beside the model begins to swap */

/* the number after `key` at the beginning of a line, in the file's own unit */
static bool number_after(const char *path, const char *key, uint64_t *out) {
    char line[256];
    bool found = false;
    FILE *f = fopen(path, "re");
    if (!f) return false;
    while (!found && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key))) found = sscanf(line + strlen(key), " %llu", (unsigned long long *)out) == 1;
    fclose(f);
    return found;
}

/* free bytes of one cgroup's folder, below 0 where the reserve is taken already; false where it has no limit */
static bool cgroup_free(const char *folder, bool v2, bool reserve, int64_t *out) {
    char path[PATH_BYTES + 64];
    uint64_t limit, used, cached = 0;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.max" : "memory.limit_in_bytes");
    if (!number_after(path, "", &limit) || limit > 1ull << 60) return false; /* "max", or version 1's huge number */
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!number_after(path, "", &used)) return false;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    number_after(path, v2 ? "inactive_file " : "total_inactive_file ", &cached); /* page cache that the kernel gives up first */
    *out = (int64_t)limit - (int64_t)(used > cached ? used - cached : 0) - (reserve ? (int64_t)(limit / 100 * 8) : 0);
    return true;
}

/* the group that /proc/self/cgroup names and all above it: each limit holds */
static int64_t cgroups_free(const char *root, const char *mount, const char *name, bool v2, bool reserve, int64_t least) {
    char path[PATH_BYTES];
    int64_t here;
    int base = snprintf(path, sizeof path, "%s%s", root, mount);
    if (base < 0 || snprintf(path + base, sizeof path - (size_t)base, "%s", name) >= (int)(sizeof path - (size_t)base)) path[base] = 0;
    for (;;) {
        size_t n = strlen(path);
        while (n > (size_t)base && path[n - 1] == '/') path[--n] = 0;
        if (cgroup_free(path, v2, reserve, &here) && here < least) least = here;
        char *slash = strrchr(path + base, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

int64_t bw_memory_free(const char *root, bool reserve) {
    char path[PATH_BYTES], line[PATH_BYTES];
    uint64_t kib = 0, total = 0;
    int64_t least = 0;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (number_after(path, "MemAvailable:", &kib)) least = (int64_t)(kib << 10);
    if (reserve && number_after(path, "MemTotal:", &total)) {
        uint64_t share = (total << 10) / 100 * 8;
        least -= (int64_t)(share > RESERVE ? share : RESERVE);
    }
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *first = strchr(line, ':'), *second = first ? strchr(first + 1, ':') : NULL;
        if (!second) continue;
        *second = 0;
        if (!strcmp(first + 1, "")) least = cgroups_free(root, "/sys/fs/cgroup", second + 1, true, reserve, least);
        else if (!strcmp(first + 1, "memory")) least = cgroups_free(root, "/sys/fs/cgroup/memory", second + 1, false, reserve, least);
    }
    if (f) fclose(f);
    return least;
}

uint64_t bw24_available_memory(int32_t reserve) {
    int64_t n = bw_memory_free("", reserve != 0);
    return n > 0 ? (uint64_t)n : 0;
}
