/* Copies between device and host that run beside compute: one call of Python each.

A tensor that moves takes five calls of the CUDA runtime each way, and five more for
each of its pieces that go aside (native.py says why). The calls themselves take some
3 microseconds together; made from Python one by one they take some eight times as
long.

Nothing of CUDA is included: its functions come as pointers (native.py has them), and
streams, events and addresses are theirs. Every function returns the first status that
is not 0, and calls nothing after it. */

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
    void *side;           /* stream of every second piece */
    void *begun, *ended;  /* events around such a piece */
    uint64_t piece_bytes; /* 0: copies are whole */
    uint64_t left_bytes;  /* of the piece that copies fill now */
    int64_t is_aside;     /* whether that one goes by the other stream */
} Way;

/* By the other stream, behind this one, which waits for it. */
static int aside(const Calls *calls, const Way *way, void *stream, char *to,
                 const char *from, size_t count)
{
    int status = calls->record(way->begun, stream);
    if (!status) status = calls->wait(way->side, way->begun, 0);
    if (!status) status = calls->copy(to, from, count, (int)way->kind, way->side);
    if (!status) status = calls->record(way->ended, way->side);
    if (!status) status = calls->wait(stream, way->ended, 0);
    return status;
}

/* Copy in the order of a stream. */
static int move(const Calls *calls, Way *way, void *stream, char *to,
                const char *from, size_t count)
{
    if (!way->piece_bytes)
        return calls->copy(to, from, count, (int)way->kind, stream);
    size_t done = 0;
    int status = 0;
    while (done < count && !status) {
        size_t part = count - done;
        if (part > way->left_bytes) part = way->left_bytes;
        status = way->is_aside
                     ? aside(calls, way, stream, to + done, from + done, part)
                     : calls->copy(to + done, from + done, part, (int)way->kind,
                                   stream);
        done += part;
        way->left_bytes -= part;
        if (!way->left_bytes) {
            way->left_bytes = way->piece_bytes;
            way->is_aside = !way->is_aside;
        }
    }
    return status;
}

/* A batch of copies on `stream`, behind what compute has now, which `ready` is recorded
for, and behind `more`, if that is an event; `done` is recorded behind them. */
EXPORT int ssdtrain_batch(const Calls *calls, Way *way, void *ready, void *compute,
                          void *stream, void *more, void *done, size_t num,
                          char *const *to, const char *const *from,
                          const size_t *counts)
{
    int status = calls->record(ready, compute);
    if (!status) status = calls->wait(stream, ready, 0);
    if (!status && more) status = calls->wait(stream, more, 0);
    for (size_t at = 0; at < num && !status; at++)
        status = move(calls, way, stream, to[at], from[at], counts[at]);
    return status ? status : calls->record(done, stream);
}

/* Of one copy, for which Python need not make arrays. */
EXPORT int ssdtrain_one(const Calls *calls, Way *way, void *ready, void *compute,
                        void *stream, void *more, void *done, char *to,
                        const char *from, size_t count)
{
    return ssdtrain_batch(calls, way, ready, compute, stream, more, done, 1, &to,
                          &from, &count);
}
