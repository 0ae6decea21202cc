/* What the two stand-ins and the driver know of one another. */
#ifndef STUBS_H
#define STUBS_H

#include <stddef.h>

#define STUB_SIZE_THAT_FAILS 13131313
#define STUB_SIZE_CUFILE_REFUSES 23232323

typedef struct { int error, cuda_error; } cufile_result;

struct stub_answer {
    void *address;
    int result;
    int cufile_error;
};

int cudaMalloc(void **address, size_t size);
int cudaMallocAsync(void **address, size_t size, void *stream);
int cudaFree(void *address);
int cudaFreeAsync(void *address, void *stream);
void stub_script(struct stub_answer answer);
unsigned long stub_freed_while_registered(void);

cufile_result cuFileDriverOpen(void);
cufile_result cuFileBufRegister(const void *address, size_t size, int flags);
cufile_result cuFileBufDeregister(const void *address);
int stub_cufile_has(const void *address);
int stub_cufile_busy(void);
int stub_cufile_num_registered(void);
unsigned long stub_cufile_misuses(void);
void stub_cufile_script(int error);

#endif
