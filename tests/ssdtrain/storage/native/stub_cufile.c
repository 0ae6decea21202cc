/* A stand-in for cuFile: remembers what is registered, complains about the rest.
 *
 * As the real one may, it allocates device memory of its own while it registers.
 */
#include "stubs.h"

#include <pthread.h>
#include <stdlib.h>

#define MAX_REGISTERED 65536

static const void *registered[MAX_REGISTERED];
static int num_registered;
static _Thread_local int scripted_error;
static unsigned long misuses;
static _Thread_local int busy;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A thread that is not there in the child may have held it. */
static void after_fork_in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void prepare(void)
{
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

static int find(const void *address)
{
    for (int i = 0; i < num_registered; i++)
        if (registered[i] == address)
            return i;
    return -1;
}

int stub_cufile_has(const void *address)
{
    pthread_mutex_lock(&lock);
    int found = find(address) >= 0;
    pthread_mutex_unlock(&lock);
    return found;
}

int stub_cufile_busy(void) { return busy; }

int stub_cufile_num_registered(void) { return num_registered; }

unsigned long stub_cufile_misuses(void) { return misuses; }

void stub_cufile_script(int error) { scripted_error = error; }

cufile_result cuFileDriverOpen(void)
{
    int refuse = getenv("STUB_CUFILE_NO_DRIVER") != NULL;
    return (cufile_result){refuse ? 5001 : 0, 0};
}

cufile_result cuFileBufRegister(const void *address, size_t size, int flags)
{
    void *own = NULL;
    busy = 1;
    if (cudaMalloc(&own, 4096) == 0)
        cudaFree(own);
    busy = 0;
    int error = scripted_error;
    scripted_error = 0;
    pthread_mutex_lock(&lock);
    if (size == 0 || flags != 0 || find(address) >= 0)
        misuses++;
    if (size == STUB_SIZE_CUFILE_REFUSES)
        error = 5023;
    if (error == 0)
        registered[num_registered++] = address;
    pthread_mutex_unlock(&lock);
    return (cufile_result){error, 0};
}

cufile_result cuFileBufDeregister(const void *address)
{
    pthread_mutex_lock(&lock);
    int at = find(address);
    if (at < 0)
        misuses++;
    else
        registered[at] = registered[--num_registered];
    pthread_mutex_unlock(&lock);
    return (cufile_result){at < 0 ? 5022 : 0, 0};
}
