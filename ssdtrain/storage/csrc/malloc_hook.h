/* What the malloc hook counts. */
#ifndef SSDTRAIN_MALLOC_HOOK_H
#define SSDTRAIN_MALLOC_HOOK_H

#include <stdint.h>

/* Read by Python (shim.py): the same fields in the same order, all uint64. */
struct ssdtrain_hook_counters {
    uint64_t malloc_calls;
    uint64_t malloc_async_calls;
    uint64_t free_calls;
    uint64_t free_async_calls;
    uint64_t failed_calls;       /* the runtime returned an error */
    uint64_t below_threshold;    /* too small to be worth registering */
    uint64_t reentrant;          /* made inside this library's own cuFile call */
    uint64_t registered;         /* cuFileBufRegister succeeded */
    uint64_t deregistered;       /* cuFileBufDeregister was called */
    uint64_t refused;            /* cuFileBufRegister failed */
    uint64_t without_cufile;     /* no cuFile to register with */
    uint64_t unregistered_async; /* large enough, but of cudaMallocAsync */
    uint64_t live;               /* allocations in the table */
    uint64_t live_bytes;
    uint64_t live_registered;
    int64_t last_cufile_error;   /* of the last refusal; 0: none */
};

#endif
