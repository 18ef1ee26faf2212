/* A CUDA driver without a device, for tests: the functions that an engine calls, with their rules.
 *
 * Addresses of device memory are in pages without any access right; the bytes are kept elsewhere.
 * The work of a stream is carried out only when a thread waits for that stream. Copies require pinned
 * memory, and the right context current in the thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { DEVICES = 2, RANGES = 256, DEPTH = 16, PAGE = 4096 };

/* The bytes of device memory are those of the file. */
struct range { uint64_t base; size_t length; char *bytes; int device, file; };
struct work { char *to; const char *from; int fill; size_t length; struct work *next; };
struct stream { int device; struct work *first, **last; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range device_ranges[RANGES], pinned_ranges[RANGES];
static int retained[DEVICES];
static int is_started, is_copying_refused, is_exporting_refused;
static size_t pinned_bytes, pinned_bytes_max;
static struct stream default_streams[DEVICES];
static __thread uintptr_t contexts[DEPTH];
static __thread int depth;

static uintptr_t context_of(int device) { return 0x1000 + (uintptr_t)device; }
static int current(void) { return depth ? (int)(contexts[depth - 1] - 0x1000) : -1; }

static struct range *find(struct range *ranges, uint64_t address, size_t length) {
    for (int i = 0; i < RANGES; i++) {
        struct range *range = &ranges[i];
        if (range->length && address >= range->base && address - range->base < range->length)
            return length <= range->length - (address - range->base) ? range : NULL;
    }
    return NULL;
}

static struct range *vacant(struct range *ranges) {
    for (int i = 0; i < RANGES; i++)
        if (!ranges[i].length) return &ranges[i];
    return NULL;
}

int cuInit(unsigned flags) {
    is_started = 1;
    return flags ? INVALID_VALUE : OK;
}

int cuGetErrorName(int status, const char **name) {
    switch (status) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case NO_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return OK;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; return OK;
    default: *name = NULL; return INVALID_VALUE;
    }
}

int cuDeviceGetCount(int *count) { *count = DEVICES; return OK; }

/* The order of the driver is not that of the bus. */
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    static const char *addresses[DEVICES] = {"0000:C2:00.0", "0000:04:00.0"};
    if (device < 0 || device >= DEVICES || length < 13) return INVALID_VALUE;
    strcpy(text, addresses[device]);
    return OK;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (device < 0 || device >= DEVICES) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *flags = 0, *active = retained[device] > 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuDevicePrimaryCtxRetain(uintptr_t *context, int device) {
    if (!is_started || device < 0 || device >= DEVICES) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    retained[device]++;
    pthread_mutex_unlock(&lock);
    *context = context_of(device);
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    int was_retained = retained[device] > 0;
    retained[device] -= was_retained;
    pthread_mutex_unlock(&lock);
    return was_retained ? OK : NO_CONTEXT;
}

int cuCtxPushCurrent_v2(uintptr_t context) {
    if (context < context_of(0) || context >= context_of(DEVICES) || depth == DEPTH)
        return NO_CONTEXT;
    contexts[depth++] = context;
    return OK;
}

int cuCtxPopCurrent_v2(uintptr_t *context) {
    if (!depth) return NO_CONTEXT;
    *context = contexts[--depth];
    return OK;
}

int cuCtxGetCurrent(uintptr_t *context) {
    *context = depth ? contexts[depth - 1] : 0;
    return OK;
}

int cuPointerGetAttribute(unsigned *value, int attribute, uint64_t address) {
    if (current() < 0) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    struct range *device = find(device_ranges, address, 1);
    int is_pinned = find(pinned_ranges, address, 1) != NULL, owner = device ? device->device : 0;
    pthread_mutex_unlock(&lock);
    if (!device && !is_pinned) return INVALID_VALUE;
    switch (attribute) {
    case 2: *value = device ? 2 : 1; return OK;
    case 9: *value = (unsigned)owner; return OK;
    default: return INVALID_VALUE;
    }
}

int cuMemAlloc_v2(uint64_t *address, size_t length) {
    if (current() < 0) return NO_CONTEXT;
    size_t whole = (length + PAGE - 1) / PAGE * PAGE;
    int file = memfd_create("device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, whole)) return OUT_OF_MEMORY;
    void *pages = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *bytes = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (pages == MAP_FAILED || bytes == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    struct range *range = vacant(device_ranges);
    if (range) *range = (struct range){(uint64_t)(uintptr_t)pages, length, bytes, current(), file};
    pthread_mutex_unlock(&lock);
    *address = (uint64_t)(uintptr_t)pages;
    return range ? OK : OUT_OF_MEMORY;
}

/* Exports whole pages from the beginning of an allocation, in the context of its device. */
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t length, int kind,
                                  unsigned long long flags) {
    if (current() < 0) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    struct range *range = find(device_ranges, address, 1);
    int is_right = range && kind == 1 && !flags && !is_exporting_refused &&
                   range->base == address && length % PAGE == 0 &&
                   length <= (range->length + PAGE - 1) / PAGE * PAGE && range->device == current();
    int file = is_right ? dup(range->file) : -1;
    pthread_mutex_unlock(&lock);
    if (file >= 0) *(int *)handle = file;
    return file >= 0 ? OK : INVALID_VALUE;
}

int cuMemHostAlloc(void **address, size_t length, unsigned flags) {
    if (current() < 0) return NO_CONTEXT;
    if (flags != 1 || !(*address = malloc(length))) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct range *range = vacant(pinned_ranges);
    if (range) *range = (struct range){(uint64_t)(uintptr_t)*address, length, NULL, current(), -1};
    pinned_bytes += length;
    if (pinned_bytes > pinned_bytes_max) pinned_bytes_max = pinned_bytes;
    pthread_mutex_unlock(&lock);
    return range ? OK : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *address) {
    if (current() < 0) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    struct range *range = find(pinned_ranges, (uint64_t)(uintptr_t)address, 1);
    int is_whole = range && range->base == (uint64_t)(uintptr_t)address;
    if (is_whole) pinned_bytes -= range->length, range->length = 0;
    pthread_mutex_unlock(&lock);
    if (!is_whole) return INVALID_VALUE;
    free(address);
    return OK;
}

int cuStreamCreate(struct stream **made, unsigned flags) {
    (void)flags;
    if (current() < 0) return NO_CONTEXT;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->device = current();
    *made = stream;
    return OK;
}

int cuStreamGetCtx(struct stream *stream, uintptr_t *context) {
    if ((uintptr_t)stream <= 2) return INVALID_HANDLE;
    *context = context_of(stream->device);
    return OK;
}

/* Handles up to 2 are the default streams of the current context. */
static int is_default(struct stream *stream) { return (uintptr_t)stream <= 2; }

static struct stream *stream_of(struct stream *stream) {
    return is_default(stream) ? &default_streams[current()] : stream;
}

int cuStreamSynchronize(struct stream *given) {
    if (current() < 0) return NO_CONTEXT;
    if (!is_default(given) && given->device != current()) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(given);
    struct work *work = stream->first;
    stream->first = NULL, stream->last = NULL;
    while (work) {
        struct work *next = work->next;
        if (work->from) memcpy(work->to, work->from, work->length);
        else memset(work->to, work->fill, work->length);
        free(work);
        work = next;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

/* The caller holds the lock. */
static void give(struct stream *given, struct work work) {
    struct stream *stream = stream_of(given);
    struct work *kept = malloc(sizeof *kept);
    *kept = work;
    if (!stream->last) stream->last = &stream->first;
    *stream->last = kept;
    stream->last = &kept->next;
}

static int copy(uint64_t device, char *host, size_t length, struct stream *given, int is_to_host) {
    if (current() < 0) return NO_CONTEXT;
    if (!is_default(given) && given->device != current()) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    struct range *range = find(device_ranges, device, length);
    int is_pinned = find(pinned_ranges, (uint64_t)(uintptr_t)host, length) != NULL;
    int is_right = range && is_pinned && !is_copying_refused &&
                   (!is_default(given) || range->device == current());
    if (is_right) {
        char *bytes = range->bytes + (device - range->base);
        struct work to_host = {host, bytes, 0, length, NULL};
        struct work to_device = {bytes, host, 0, length, NULL};
        give(given, is_to_host ? to_host : to_device);
    }
    pthread_mutex_unlock(&lock);
    return is_right ? OK : INVALID_VALUE;
}

int cuMemcpyDtoHAsync_v2(char *host, uint64_t device, size_t length, struct stream *stream) {
    return copy(device, host, length, stream, 1);
}

int cuMemcpyHtoDAsync_v2(uint64_t device, char *host, size_t length, struct stream *stream) {
    return copy(device, host, length, stream, 0);
}

/* The functions below are called by tests only. */

/* Queues a fill of device memory on a stream, as a kernel would. */
int fake_fill(struct stream *stream, uint64_t device, int byte, size_t length) {
    pthread_mutex_lock(&lock);
    struct range *range = find(device_ranges, device, length);
    if (range)
        give(stream, (struct work){range->bytes + (device - range->base), NULL, byte, length, NULL});
    pthread_mutex_unlock(&lock);
    return range ? OK : INVALID_VALUE;
}

/* Read and write device memory immediately, without regard to streams. */
int fake_peek(uint64_t device, char *into, size_t length) {
    pthread_mutex_lock(&lock);
    struct range *range = find(device_ranges, device, length);
    if (range) memcpy(into, range->bytes + (device - range->base), length);
    pthread_mutex_unlock(&lock);
    return range ? OK : INVALID_VALUE;
}

int fake_poke(uint64_t device, const char *from, size_t length) {
    pthread_mutex_lock(&lock);
    struct range *range = find(device_ranges, device, length);
    if (range) memcpy(range->bytes + (device - range->base), from, length);
    pthread_mutex_unlock(&lock);
    return range ? OK : INVALID_VALUE;
}

void fake_refuse_copies(int is_refused) { is_copying_refused = is_refused; }
void fake_refuse_exports(int is_refused) { is_exporting_refused = is_refused; }
int fake_is_started(void) { return is_started; }
int fake_depth(void) { return depth; }
int fake_retained(int device) { return retained[device]; }
size_t fake_pinned_bytes(void) { return pinned_bytes; }
size_t fake_pinned_bytes_max(void) { return pinned_bytes_max; }
