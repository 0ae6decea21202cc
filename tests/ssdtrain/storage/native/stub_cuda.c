/* A stand-in for the CUDA runtime: memory of the host, and answers on request.
 *
 * Unscripted, it allocates for real, so that sanitizers see leaks and double frees.
 * Scripted (`stub_script`), the next call gives a recorded answer. Freeing memory
 * that cuFile still has registered is counted: on a real machine it is the bug that
 * this hook must never have.
 */
#include "stubs.h"

#include <pthread.h>
#include <stdlib.h>

static struct stub_answer next;
static int scripted;
static unsigned long freed_while_registered;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void stub_script(struct stub_answer answer)
{
    next = answer;
    scripted = 1;
}

unsigned long stub_freed_while_registered(void) { return freed_while_registered; }

static int allocate(void **address, size_t size)
{
    if (scripted && !stub_cufile_busy()) {
        scripted = 0;
        *address = next.address;
        stub_cufile_script(next.cufile_error);
        return next.result;
    }
    if (size == STUB_SIZE_THAT_FAILS)
        return 2; /* cudaErrorMemoryAllocation */
    *address = aligned_alloc(512, (size + 511) / 512 * 512);
    return *address == NULL ? 2 : 0;
}

static int release(void *address)
{
    if (stub_cufile_has(address)) {
        pthread_mutex_lock(&lock);
        freed_while_registered++;
        pthread_mutex_unlock(&lock);
    }
    if (scripted) {
        scripted = 0;
        return next.result;
    }
    free(address);
    return 0;
}

int cudaMalloc(void **address, size_t size) { return allocate(address, size); }

int cudaMallocAsync(void **address, size_t size, void *stream)
{
    (void)stream;
    return allocate(address, size);
}

int cudaFree(void *address) { return release(address); }

int cudaFreeAsync(void *address, void *stream)
{
    (void)stream;
    return release(address);
}
