/* Work in parts, by a crew of threads that lives as long as the library's owner wants it (crew.c).
 *
 * Whoever waits spins for some microseconds, then gives its core away again and again, and sleeps in the end: threads
 * that sleep at once take longer to wake than a part takes to compute, and threads that spin on starve an engine that
 * shares the cores. */
#ifndef EMBERGATE_PARALLEL_H
#define EMBERGATE_PARALLEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Computes part `part` of `parts` of some op. */
typedef void (*part_fn)(const void *args, int64_t part, int64_t parts);

typedef struct crew crew;

/* Runs all parts and returns when they are done. A null crew, one of a single thread, and one that another caller is
 * using compute everything as one part. */
void embergate_run_parts(crew *crew, part_fn run, const void *args);

/* All parts of the running op wait for each other. */
void embergate_meet_parts(crew *crew, int64_t parts);

/* The half-open share of `total` items that belongs to a part. */
static inline void share(int64_t total, int64_t part, int64_t parts, int64_t *begin, int64_t *end)
{
    *begin = total * part / parts;
    *end = total * (part + 1) / parts;
}

/* Scratch of a call, 64-byte aligned; the caller frees it. A machine out of memory ends the process. */
static inline float *take_floats(int64_t count)
{
    size_t bytes = ((size_t)count * sizeof(float) + 63) / 64 * 64;
    float *floats = aligned_alloc(64, bytes ? bytes : 64);
    if (floats == NULL) {
        fprintf(stderr, "embergate: no memory for %zu bytes of scratch\n", bytes);
        abort();
    }
    return floats;
}

#endif
