/* Copies between device and host that run beside compute: one call of Python each.

A tensor that moves takes five calls of the CUDA runtime each way, and five more for
each of its pieces that go aside (pieces.py says why). The calls themselves take some
3 microseconds together; made from Python one by one they take some eight times as
long.

Nothing of CUDA is included: its functions come as pointers (runtime.py has them), and
streams, events and addresses are theirs. Every function returns the first status that
is not 0, and calls nothing behind it. */

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*copy)(void *to, const void *from, size_t count, int kind, void *stream);
} Calls;

/* One direction. */
typedef struct {
    int64_t kind;
    void *stream;         /* of its copies */
    void *side;           /* of every second piece */
    void *begun, *ended;  /* events around such a piece */
    uint64_t piece_bytes; /* 0: copies are whole */
    uint64_t left_bytes;  /* of the piece that copies fill now */
    int64_t is_aside;     /* whether that one goes by the other stream */
} Way;

/* By the other stream, behind this one, which waits for it. */
static int aside(const Calls *calls, const Way *way, char *to, const char *from,
                 size_t count)
{
    int status = calls->record(way->begun, way->stream);
    if (!status) status = calls->wait(way->side, way->begun, 0);
    if (!status) status = calls->copy(to, from, count, (int)way->kind, way->side);
    if (!status) status = calls->record(way->ended, way->side);
    if (!status) status = calls->wait(way->stream, way->ended, 0);
    return status;
}

/* Copy in the order of the way's stream. */
EXPORT int ssdtrain_copy(const Calls *calls, Way *way, char *to, const char *from,
                         size_t count)
{
    if (!way->piece_bytes)
        return calls->copy(to, from, count, (int)way->kind, way->stream);
    size_t done = 0;
    int status = 0;
    while (done < count && !status) {
        size_t part = count - done;
        if (part > way->left_bytes) part = way->left_bytes;
        status = way->is_aside
                     ? aside(calls, way, to + done, from + done, part)
                     : calls->copy(to + done, from + done, part, (int)way->kind,
                                   way->stream);
        done += part;
        way->left_bytes -= part;
        if (!way->left_bytes) {
            way->left_bytes = way->piece_bytes;
            way->is_aside = !way->is_aside;
        }
    }
    return status;
}

/* Let the way wait for what compute has now, and for one more event, if any. */
static int behind(const Calls *calls, const Way *way, void *ready, void *compute,
                  void *more)
{
    int status = calls->record(ready, compute);
    if (!status) status = calls->wait(way->stream, ready, 0);
    if (!status && more) status = calls->wait(way->stream, more, 0);
    return status;
}

/* A batch of copies, behind compute and `more`; `done` is recorded behind them. */
EXPORT int ssdtrain_batch(const Calls *calls, Way *way, void *ready, void *compute,
                          void *more, size_t num, char *const *to,
                          const char *const *from, const size_t *counts, void *done)
{
    int status = behind(calls, way, ready, compute, more);
    for (size_t at = 0; at < num && !status; at++)
        status = ssdtrain_copy(calls, way, to[at], from[at], counts[at]);
    return status ? status : calls->record(done, way->stream);
}

/* Likewise of one copy. */
EXPORT int ssdtrain_one(const Calls *calls, Way *way, void *ready, void *compute,
                        void *more, char *to, const char *from, size_t count,
                        void *done)
{
    int status = behind(calls, way, ready, compute, more);
    if (!status) status = ssdtrain_copy(calls, way, to, from, count);
    return status ? status : calls->record(done, way->stream);
}
