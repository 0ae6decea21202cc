/* Registers CUDA allocations with cuFile as they are made (LD_PRELOAD).
 *
 * GPUDirect Storage moves bytes of registered memory without a bounce buffer.
 * PyTorch's allocators take their segments through four calls of the CUDA runtime;
 * this library stands before them, so the allocators stay as they are.
 *
 * Builds without CUDA: the runtime and cuFile are found with dlsym and dlopen, and
 * the few types of theirs that cross the border are spelled out below.
 *
 * Locks: `lock` guards the table and the counters, and is never held across a call into
 * CUDA or cuFile: those take locks of their own, and cuFile may allocate. An address is
 * in the table from behind its cudaMalloc to before its cudaFree, and CUDA gives no
 * address out twice in between, so nobody can meet an entry that is being made or
 * removed.
 *
 * cudaMallocAsync is counted and not registered: an allocator on top of it calls for
 * every tensor, and a registration takes milliseconds. A training step became 41 times
 * slower on an H200.
 *
 * Not seen: allocations that do not come through these calls. Expandable segments
 * (cuMemCreate through cuGetProcAddress) and statically linked runtimes pass by.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "malloc_hook.h"

#define EXPORT __attribute__((visibility("default")))

/* cudaSuccess, cudaErrorSharedObjectSymbolNotFound */
enum { CUDA_SUCCESS = 0, CUDA_SYMBOL_NOT_FOUND = 302 };

typedef struct { int error, cuda_error; } cufile_result; /* CUfileError_t */

typedef int malloc_fn(void **, size_t);
typedef int malloc_async_fn(void **, size_t, void *);
typedef int free_fn(void *);
typedef int free_async_fn(void *, void *);
typedef cufile_result driver_open_fn(void);
typedef cufile_result buf_register_fn(const void *, size_t, int);
typedef cufile_result buf_deregister_fn(const void *);

struct entry {
    void *address; /* NULL: never used; TOMBSTONE: used before */
    size_t size;
    bool registered;
};

static char tombstone;
#define TOMBSTONE ((void *)&tombstone)

static struct {
    bool enabled;
    size_t min_bytes;
} config = {.enabled = true, .min_bytes = 1024 * 1024};

static struct {
    buf_register_fn *register_buffer;
    buf_deregister_fn *deregister_buffer;
} cufile;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ssdtrain_hook_counters counters;
static struct entry *table;
static size_t table_size; /* a power of two */
static size_t table_used; /* entries and tombstones */

static pthread_once_t configured = PTHREAD_ONCE_INIT;
static pthread_once_t cufile_opened = PTHREAD_ONCE_INIT;
static _Thread_local bool inside;

/* ---- the table, under the lock ------------------------------------------------ */

static size_t slot_of(const struct entry *in, size_t size, const void *address)
{
    /* Device addresses are multiples of 512 at least; the product spreads them. */
    size_t at = (size_t)(((uintptr_t)address >> 9) * UINT64_C(0x9E3779B97F4A7C15));
    at = (at >> 20) & (size - 1);
    while (in[at].address != NULL && in[at].address != address)
        at = (at + 1) & (size - 1);
    return at;
}

static bool table_grow(void)
{
    size_t live = (size_t)counters.live;
    size_t size = 256;
    while (size < 4 * live)
        size *= 2;
    struct entry *bigger = calloc(size, sizeof *bigger);
    if (bigger == NULL)
        return false;
    for (size_t i = 0; i < table_size; i++) {
        void *address = table[i].address;
        if (address != NULL && address != TOMBSTONE)
            bigger[slot_of(bigger, size, address)] = table[i];
    }
    free(table);
    table = bigger;
    table_size = size;
    table_used = live;
    return true;
}

static bool table_add(void *address, size_t size, bool registered)
{
    if (2 * (table_used + 1) > table_size && !table_grow())
        return false;
    size_t at = slot_of(table, table_size, address);
    if (table[at].address == NULL)
        table_used++;
    table[at] = (struct entry){address, size, registered};
    counters.live++;
    counters.live_bytes += size;
    counters.live_registered += registered;
    return true;
}

static bool table_take(const void *address, struct entry *out)
{
    if (table_size == 0)
        return false;
    size_t at = slot_of(table, table_size, address);
    if (table[at].address == NULL)
        return false;
    *out = table[at];
    table[at].address = TOMBSTONE;
    counters.live--;
    counters.live_bytes -= out->size;
    counters.live_registered -= out->registered;
    return true;
}

/* ---- finding the libraries ---------------------------------------------------- */

static void *function_in(void *library, const char *name)
{
    return library == NULL ? NULL : dlsym(library, name);
}

/* The runtime's own function. Not RTLD_NEXT alone: a runtime that came in by dlopen
 * without RTLD_GLOBAL is not behind this library in any search order. */
static void *runtime_function(const char *name)
{
    static const char *const names[] = {"libcudart.so.13", "libcudart.so.12",
                                        "libcudart.so"};
    void *found = dlsym(RTLD_NEXT, name);
    const char *path = getenv("SSDTRAIN_HOOK_CUDART");
    if (found == NULL && path != NULL)
        found = function_in(dlopen(path, RTLD_LAZY), name);
    for (size_t i = 0; found == NULL && i < sizeof names / sizeof *names; i++)
        found = function_in(dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD), name);
    for (size_t i = 0; found == NULL && i < sizeof names / sizeof *names; i++)
        found = function_in(dlopen(names[i], RTLD_LAZY), name);
    return found;
}

static void open_cufile(void)
{
    static const char *const names[] = {"libcufile.so.0", "libcufile.so"};
    const char *path = getenv("SSDTRAIN_HOOK_CUFILE");
    void *library = path == NULL ? NULL : dlopen(path, RTLD_LAZY);
    for (size_t i = 0; path == NULL && library == NULL &&
                       i < sizeof names / sizeof *names; i++)
        library = dlopen(names[i], RTLD_LAZY);
    void *open = function_in(library, "cuFileDriverOpen");
    void *add = function_in(library, "cuFileBufRegister");
    void *drop = function_in(library, "cuFileBufDeregister");
    if (open == NULL || add == NULL || drop == NULL)
        return;
    driver_open_fn *driver_open;
    memcpy(&driver_open, &open, sizeof open);
    if (driver_open().error != 0)
        return;
    memcpy(&cufile.register_buffer, &add, sizeof add);
    memcpy(&cufile.deregister_buffer, &drop, sizeof drop);
}

/* ---- fork --------------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* The child has none of the parent's CUDA memory, and a cuFile whose threads are
 * gone. It starts from nothing and, if cuFile was open, registers nothing. */
static void after_fork_in_child(void)
{
    free(table);
    table = NULL;
    table_size = table_used = 0;
    memset(&counters, 0, sizeof counters);
    memset(&cufile, 0, sizeof cufile);
    inside = false;
    pthread_mutex_unlock(&lock);
}

static void configure(void)
{
    const char *enabled = getenv("SSDTRAIN_HOOK");
    const char *min_bytes = getenv("SSDTRAIN_HOOK_MIN_BYTES");
    if (enabled != NULL && strcmp(enabled, "0") == 0)
        config.enabled = false;
    if (min_bytes != NULL)
        config.min_bytes = (size_t)strtoull(min_bytes, NULL, 10);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- what happens around a call ------------------------------------------------ */

/* Whether this call is ours to look at; counted either way. */
static bool enter(uint64_t *calls)
{
    pthread_once(&configured, configure);
    if (!config.enabled)
        return false;
    pthread_mutex_lock(&lock);
    ++*calls;
    counters.reentrant += inside;
    pthread_mutex_unlock(&lock);
    return !inside;
}

static void allocated(void *address, size_t size, int result, bool may_register)
{
    bool known = result == CUDA_SUCCESS && address != NULL && size >= config.min_bytes;
    bool wanted = known && may_register;
    bool have_cufile = false;
    cufile_result registration = {0, 0};
    inside = true;
    if (wanted) {
        pthread_once(&cufile_opened, open_cufile);
        buf_register_fn *register_buffer = cufile.register_buffer;
        have_cufile = register_buffer != NULL;
        if (have_cufile)
            registration = register_buffer(address, size, 0);
    }
    bool registered = have_cufile && registration.error == 0;
    pthread_mutex_lock(&lock);
    counters.failed_calls += result != CUDA_SUCCESS;
    counters.below_threshold += result == CUDA_SUCCESS && !known;
    counters.unregistered_async += known && !may_register;
    counters.without_cufile += wanted && !have_cufile;
    counters.registered += registered;
    if (have_cufile && !registered) {
        counters.refused++;
        counters.last_cufile_error = registration.error;
    }
    bool lost = known && !table_add(address, size, registered) && registered;
    counters.deregistered += lost;
    pthread_mutex_unlock(&lock);
    if (lost) /* no memory to remember it by: better unregistered than stale */
        cufile.deregister_buffer(address);
    inside = false;
}

static void about_to_free(const void *address)
{
    struct entry gone = {NULL, 0, false};
    inside = true;
    pthread_mutex_lock(&lock);
    bool known = table_take(address, &gone);
    bool drop = known && gone.registered && cufile.deregister_buffer != NULL;
    counters.deregistered += drop;
    pthread_mutex_unlock(&lock);
    if (drop)
        cufile.deregister_buffer(address);
    inside = false;
}

static int freed(int result)
{
    pthread_mutex_lock(&lock);
    counters.failed_calls += result != CUDA_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- the four calls ----------------------------------------------------------- */

#define REAL(type, name)                                 \
    static _Atomic(type *) cached;                       \
    type *real = cached;                                 \
    if (real == NULL) {                                  \
        void *found = runtime_function(name);            \
        if (found == NULL)                               \
            return CUDA_SYMBOL_NOT_FOUND;                \
        memcpy(&real, &found, sizeof found);             \
        cached = real;                                   \
    }

EXPORT int cudaMalloc(void **address, size_t size)
{
    REAL(malloc_fn, "cudaMalloc")
    bool ours = enter(&counters.malloc_calls);
    int result = real(address, size);
    int saved = errno;
    if (ours)
        allocated(result == 0 ? *address : NULL, size, result, true);
    errno = saved;
    return result;
}

EXPORT int cudaMallocAsync(void **address, size_t size, void *stream)
{
    REAL(malloc_async_fn, "cudaMallocAsync")
    bool ours = enter(&counters.malloc_async_calls);
    int result = real(address, size, stream);
    int saved = errno;
    if (ours)
        allocated(result == 0 ? *address : NULL, size, result, false);
    errno = saved;
    return result;
}

EXPORT int cudaFree(void *address)
{
    REAL(free_fn, "cudaFree")
    if (!enter(&counters.free_calls))
        return real(address);
    if (address != NULL) /* cudaFree(NULL) is a way to start the runtime */
        about_to_free(address);
    return freed(real(address));
}

EXPORT int cudaFreeAsync(void *address, void *stream)
{
    REAL(free_async_fn, "cudaFreeAsync")
    if (!enter(&counters.free_async_calls))
        return real(address, stream);
    if (address != NULL)
        about_to_free(address);
    return freed(real(address, stream));
}

/* ---- read by Python ----------------------------------------------------------- */

EXPORT void ssdtrain_hook_read(struct ssdtrain_hook_counters *out)
{
    pthread_mutex_lock(&lock);
    *out = counters;
    pthread_mutex_unlock(&lock);
}

EXPORT int ssdtrain_hook_enabled(void)
{
    pthread_once(&configured, configure);
    return config.enabled;
}

/* Size of the allocation that starts at `address`; 0 if it is not in the table. */
EXPORT size_t ssdtrain_hook_size_of(const void *address)
{
    size_t size = 0;
    pthread_mutex_lock(&lock);
    if (table_size != 0) {
        const struct entry *at = &table[slot_of(table, table_size, address)];
        size = at->address == NULL ? 0 : at->size;
    }
    pthread_mutex_unlock(&lock);
    return size;
}
