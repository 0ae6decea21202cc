/* Drives the hook: `driver basic | threads | fork | replay FILE`.
 *
 * Prints the counters as `name value` lines and fails on any misuse of cuFile.
 */
#define _GNU_SOURCE
#include "stubs.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define NUM_THREADS 8
#define NUM_TURNS 400
#define MIB (1024 * 1024)

static const char *const names[] = {
    "malloc_calls",       "malloc_async_calls", "free_calls",
    "free_async_calls",   "failed_calls",       "below_threshold",
    "reentrant",          "registered",         "deregistered",
    "refused",            "without_cufile",     "unregistered_async",
    "live",               "live_bytes",         "live_registered",
    "last_cufile_error",
};
#define NUM_COUNTERS (sizeof names / sizeof *names)

void ssdtrain_hook_read(uint64_t out[NUM_COUNTERS]) __attribute__((weak));
size_t ssdtrain_hook_size_of(const void *address) __attribute__((weak));

static void print_counters(void)
{
    uint64_t values[NUM_COUNTERS] = {0};
    if (ssdtrain_hook_read == NULL)
        return;
    ssdtrain_hook_read(values);
    for (size_t i = 0; i < NUM_COUNTERS; i++)
        printf("%s %llu\n", names[i], (unsigned long long)values[i]);
    printf("cufile_registered %d\n", stub_cufile_num_registered());
}

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

static void basic(void)
{
    void *big = NULL, *small = NULL, *async = NULL, *refused = NULL, *none = NULL;
    must(cudaMalloc(&big, 4 * MIB) == 0, "cudaMalloc");
    must(cudaMalloc(&small, 4096) == 0, "a small cudaMalloc");
    must(cudaMallocAsync(&async, 2 * MIB, NULL) == 0, "cudaMallocAsync");
    must(cudaMalloc(&refused, STUB_SIZE_CUFILE_REFUSES) == 0, "cuFile refuses");
    must(cudaMalloc(&none, STUB_SIZE_THAT_FAILS) == 2, "the error goes through");
    must(none == NULL, "no address with the error");
    must(cudaFree(NULL) == 0, "cudaFree(NULL)");
    if (ssdtrain_hook_size_of != NULL && getenv("SSDTRAIN_HOOK") == NULL) {
        must(ssdtrain_hook_size_of(big) == 4 * MIB, "size of a live allocation");
        must(ssdtrain_hook_size_of(async) == 2 * MIB, "size, registered or not");
        must(ssdtrain_hook_size_of(small) == 0, "below the threshold");
        must(ssdtrain_hook_size_of(&big) == 0, "a foreign address");
    }
    must(cudaFree(small) == 0, "cudaFree below the threshold");
    must(cudaFreeAsync(async, NULL) == 0, "cudaFreeAsync");
    must(cudaFree(refused) == 0, "cudaFree of a refused one");
    if (ssdtrain_hook_size_of != NULL)
        must(ssdtrain_hook_size_of(async) == 0, "freed");
    print_counters(); /* `big` is live */
    must(cudaFree(big) == 0, "cudaFree");
}

static void *allocate_and_free(void *number)
{
    void *held[7] = {NULL};
    unsigned seed = (unsigned)(uintptr_t)number;
    for (int turn = 0; turn < NUM_TURNS; turn++) {
        int at = rand_r(&seed) % 7;
        if (held[at] != NULL) {
            must((turn % 2 ? cudaFree(held[at]) : cudaFreeAsync(held[at], NULL)) == 0,
                 "free in a thread");
            held[at] = NULL;
        } else {
            size_t size = (size_t)(rand_r(&seed) % 4 + 1) * 1024;
            must((turn % 3 ? cudaMalloc(&held[at], size)
                           : cudaMallocAsync(&held[at], size, NULL)) == 0,
                 "malloc in a thread");
        }
    }
    for (int i = 0; i < 7; i++)
        cudaFree(held[i]);
    return NULL;
}

static void threads(void)
{
    pthread_t ids[NUM_THREADS];
    for (uintptr_t i = 0; i < NUM_THREADS; i++)
        must(pthread_create(&ids[i], NULL, allocate_and_free, (void *)(i + 1)) == 0,
             "pthread_create");
    for (int i = 0; i < NUM_THREADS; i++)
        pthread_join(ids[i], NULL);
    print_counters();
}

/* The child of a process that used CUDA: what the parent registered is not the
 * child's to deregister, and nothing hangs although threads held the lock. */
static void forked(void)
{
    void *before = NULL;
    must(cudaMalloc(&before, 4 * MIB) == 0, "cudaMalloc before the fork");
    pthread_t busy;
    must(pthread_create(&busy, NULL, allocate_and_free, (void *)1) == 0, "thread");
    for (int turn = 0; turn < 20; turn++) {
        pid_t child = fork();
        if (child == 0) {
            uint64_t values[NUM_COUNTERS] = {0};
            ssdtrain_hook_read(values);
            for (size_t i = 0; i < NUM_COUNTERS; i++)
                if (values[i] != 0)
                    _exit(2);
            void *own = NULL;
            if (cudaMalloc(&own, 4 * MIB) != 0 || cudaFree(own) != 0)
                _exit(3);
            ssdtrain_hook_read(values);
            _exit(values[7] == 0 && values[12] == 0 ? 0 : 4);
        }
        int status = 0;
        must(waitpid(child, &status, 0) == child, "waitpid");
        must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child");
    }
    pthread_join(busy, NULL);
    must(ssdtrain_hook_size_of(before) == 4 * MIB, "the parent's table");
    must(cudaFree(before) == 0, "cudaFree behind the fork");
    print_counters();
}

static void replay(const char *path)
{
    char call[64];
    size_t size;
    void *address, *stream = NULL;
    int result, error;
    FILE *file = fopen(path, "r");
    must(file != NULL, "the recording");
    while (fscanf(file, "%63s %p %zu %d %d", call, &address, &size, &result, &error) ==
           5) {
        void *got = NULL;
        stub_script((struct stub_answer){address, result, error});
        if (strcmp(call, "cudaMalloc") == 0)
            must(cudaMalloc(&got, size) == result && got == address, "replay");
        else if (strcmp(call, "cudaMallocAsync") == 0)
            must(cudaMallocAsync(&got, size, stream) == result && got == address,
                 "replay");
        else if (strcmp(call, "cudaFree") == 0)
            must(cudaFree(address) == result, "replay");
        else if (strcmp(call, "cudaFreeAsync") == 0)
            must(cudaFreeAsync(address, stream) == result, "replay");
        else
            must(0, call);
    }
    must(feof(file), "the recording was read to its end");
    fclose(file);
    print_counters();
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "basic") == 0)
        basic();
    else if (strcmp(mode, "threads") == 0)
        threads();
    else if (strcmp(mode, "fork") == 0)
        forked();
    else if (strcmp(mode, "replay") == 0 && argc > 2)
        replay(argv[2]);
    else
        must(0, "usage: driver basic | threads | fork | replay FILE");
    must(stub_cufile_misuses() == 0, "cuFile was used as it should be");
    must(stub_freed_while_registered() == 0, "nothing was freed while registered");
    return 0;
}
