/* The threads of one library's owner. */
#include "native/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPINS 200          /* some microseconds */
#define AWAKE_NS 1000000   /* of giving the core away, before sleep; longer than the engine takes between two steps */

/* A number that only grows, and how many sleep until it does. */
typedef struct {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} counter;

struct crew {
    int64_t parts;
    pthread_t *threads; /* parts - 1 */
    _Atomic int is_taken, is_over;
    part_fn run;
    const void *args;
    counter call;  /* ops begun */
    counter round; /* meetings that are over */
    _Alignas(64) _Atomic int64_t arrived;
};

typedef struct {
    crew *crew;
    int64_t part;
} member;

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_while(counter *c, uint32_t seen)
{
    atomic_fetch_add(&c->sleepers, 1);
    while (atomic_load(&c->value) == seen) {
#ifdef __linux__
        syscall(SYS_futex, &c->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
        nanosleep(&(struct timespec){0, 50000}, NULL);
#endif
    }
    atomic_fetch_sub(&c->sleepers, 1);
}

static void wait_while(counter *c, uint32_t seen)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&c->value, memory_order_acquire) != seen)
            return;
        relax();
    }
    int64_t until = now_ns() + AWAKE_NS;
    while (now_ns() < until) {
        sched_yield();
        if (atomic_load_explicit(&c->value, memory_order_acquire) != seen)
            return;
    }
    sleep_while(c, seen);
}

static void advance(counter *c)
{
    atomic_fetch_add(&c->value, 1);
#ifdef __linux__
    if (atomic_load(&c->sleepers))
        syscall(SYS_futex, &c->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

void embergate_meet_parts(crew *crew, int64_t parts)
{
    if (parts < 2)
        return;
    uint32_t round = atomic_load(&crew->round.value);
    if (atomic_fetch_add(&crew->arrived, 1) == parts - 1) {
        atomic_store(&crew->arrived, 0);
        advance(&crew->round);
    } else {
        wait_while(&crew->round, round);
    }
}

static void *work(void *argument)
{
    member self = *(member *)argument;
    free(argument);
    crew *crew = self.crew;
    for (uint32_t seen = 0;; seen++) {
        wait_while(&crew->call, seen);
        if (atomic_load(&crew->is_over))
            return NULL;
        crew->run(crew->args, self.part, crew->parts);
        embergate_meet_parts(crew, crew->parts);
    }
}

void embergate_run_parts(crew *crew, part_fn run, const void *args)
{
    if (crew == NULL || crew->parts < 2 || atomic_exchange(&crew->is_taken, 1)) {
        run(args, 0, 1);
        return;
    }
    crew->run = run;
    crew->args = args;
    advance(&crew->call);
    run(args, 0, crew->parts);
    embergate_meet_parts(crew, crew->parts);
    atomic_store(&crew->is_taken, 0);
}

void embergate_crew_free(crew *crew)
{
    atomic_store(&crew->is_over, 1);
    advance(&crew->call);
    for (int64_t i = 0; i < crew->parts - 1; i++)
        pthread_join(crew->threads[i], NULL);
    free(crew->threads);
    free(crew);
}

/* A crew of up to `threads`, the caller's own included; fewer where the system gives no more. Null without memory. */
crew *embergate_crew_new(int64_t threads)
{
    crew *new = aligned_alloc(64, (sizeof(crew) + 63) / 64 * 64);
    pthread_t *handles = calloc((size_t)threads, sizeof(pthread_t));
    if (new == NULL || handles == NULL) {
        free(new);
        free(handles);
        return NULL;
    }
    memset(new, 0, sizeof(crew));
    new->threads = handles;
    new->parts = threads;
    for (int64_t part = 1; part < threads; part++) {
        member *argument = malloc(sizeof(member));
        if (argument != NULL)
            *argument = (member){new, part};
        if (argument == NULL || pthread_create(&handles[part - 1], NULL, work, argument)) {
            free(argument);
            new->parts = part;
            break;
        }
    }
    return new;
}
