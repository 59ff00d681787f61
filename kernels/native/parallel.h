/* Work in parts. OpenMP's pool is the one that torch already uses (both bind to the same libgomp), so the two never
 * fight for cores. With one thread no OpenMP call is made. */
#ifndef EMBERGATE_PARALLEL_H
#define EMBERGATE_PARALLEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* Computes part `part` of `parts` of some op. */
typedef void (*part_fn)(const void *args, int64_t part, int64_t parts);

static inline void run_parts(int64_t threads, part_fn run, const void *args)
{
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
        run(args, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    run(args, 0, 1);
}

/* All parts of the running op wait for each other. */
static inline void meet_parts(int64_t parts)
{
    if (parts > 1) {
#pragma omp barrier
    }
}

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
