// Streams and events: that part of libcuda.so.1.

#include "streams.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <utility>

#include "counts.h"
#include "settings.h"

namespace gpu {

// One of the three.
struct Piece {
    Task work;
    std::shared_ptr<Errand> errand;
    // Marks of other streams.
    Marks awaited;
};

struct Stream {
    void* context;
    std::deque<std::shared_ptr<Piece>> pieces;
    // The first failure; it stays, as on a GPU.
    Code failure = SUCCESS;
};

namespace {

struct Event {
    Marks marks;
};

struct Streams {
    std::vector<Stream*> all;
    // What streams that are made later wait for, too: of each GPU, the last that it was told to wait for.
    std::map<void*, Marks> awaited;
    std::condition_variable over;
};

// Never destroyed: threads of the process may still call the driver while it exits.
Streams& streams() {
    static Streams* made = new Streams;
    return *made;
}

Stream* new_stream(void* context) {
    auto* stream = new Stream{context, {}, SUCCESS};
    streams().all.push_back(stream);
    if (const auto awaited = streams().awaited.find(context); awaited != streams().awaited.end()) {
        stream->pieces.push_back(std::make_shared<Piece>(Piece{nullptr, nullptr, awaited->second}));
    }
    return stream;
}

Stream& stream_of(void* handle) {
    if (handle) {
        return *static_cast<Stream*>(handle);
    }
    static Stream* own = new_stream(nullptr);
    return *own;
}

bool pass(const Marks& marks, CachePhaseKind* turn);

// Does the first piece of a stream. Without a turn to lend out, not one that has to be waited for; then it is
// false. Another thread may have done the piece meanwhile.
bool advance(Stream& stream, CachePhaseKind* turn) {
    const std::shared_ptr<Piece> piece = stream.pieces.front();
    if (!pass(piece->awaited, turn)) {
        return false;
    }
    if (Errand* errand = piece->errand.get()) {
        if (!errand->begun) {
            errand->begun = true;
            // It may hold the errand.
            std::exchange(errand->begin, nullptr)();
        }
        if (!errand->over && !turn) {
            return false;
        }
        while (!errand->over) {
            streams().over.wait(*turn);
        }
    }
    if (stream.pieces.empty() || stream.pieces.front() != piece) {
        return true;
    }
    stream.pieces.pop_front();
    if (piece->work) {
        const Code code = piece->work();
        stream.failure = stream.failure == SUCCESS ? code : stream.failure;
    }
    return true;
}

bool pass(const Marks& marks, CachePhaseKind* turn) {
    return std::ranges::all_of(marks, [turn](const auto& mark) {
        while (!mark->passed) {
            if (!advance(*mark->stream, turn)) {
                return false;
            }
        }
        return true;
    });
}

void go_on(Stream& stream) {
    while (!stream.pieces.empty() && advance(stream, nullptr)) {
    }
}

Code give(Stream& stream, Piece piece) {
    stream.pieces.push_back(std::make_shared<Piece>(std::move(piece)));
    if (!settings().late) {
        go_on(stream);
    }
    // A GPU tells what went wrong so far with any later call.
    return stream.failure;
}

std::shared_ptr<Mark> put_mark(Stream& stream) {
    auto mark = std::make_shared<Mark>(Mark{&stream});
    const Task note = [mark] {
        mark->passed = true;
        mark->passed_at = now_seconds();
        return SUCCESS;
    };
    give(stream, Piece{note, nullptr, {}});
    return mark;
}

// One in every stream of a GPU.
Marks put_marks(void* context) {
    Marks marks;
    for (Stream* stream : streams().all) {
        if (stream->context == context) {
            marks.push_back(put_mark(*stream));
        }
    }
    return marks;
}

// What has gone wrong in one of the streams.
Code failure_before(const Marks& marks) {
    for (const auto& mark : marks) {
        if (mark->stream->failure != SUCCESS) {
            return mark->stream->failure;
        }
    }
    return SUCCESS;
}

// By value: while it waits, the event may be recorded again.
Code wait_for(const Marks marks, CachePhaseKind& turn) {
    pass(marks, &turn);
    return failure_before(marks);
}

double passed_at(const Event& event) {
    double latest = 0;
    for (const auto& mark : event.marks) {
        latest = std::max(latest, mark->passed_at);
    }
    return latest;
}

bool is_over(const Event& event) {
    return std::ranges::all_of(event.marks, [](const auto& mark) { return mark->passed; });
}

}  // namespace

Code give(void* stream, Task work) { return give(stream_of(stream), Piece{std::move(work), nullptr, {}}); }

void give(void* stream, std::shared_ptr<Errand> errand) {
    give(stream_of(stream), Piece{nullptr, std::move(errand), {}});
}

void end(Errand& errand) {
    errand.over = true;
    streams().over.notify_all();
    if (!settings().late) {
        finish_what_can_be();
    }
}

Code finish(void* handle, CachePhaseKind& turn) {
    return wait_for({put_mark(stream_of(handle))}, turn);
}

void finish_what_can_be() {
    for (Stream* stream : streams().all) {
        go_on(*stream);
    }
}

extern "C" {

int cuStreamCreate(void** stream, unsigned) {
    void* context = nullptr;
    cuCtxGetCurrent(&context);
    std::lock_guard turn(counts().lock);
    counts().streams++;
    *stream = new_stream(context);
    return SUCCESS;
}

// Its work is still done, and its marks may still be asked for: it stays.
int cuStreamDestroy_v2(void*) { return SUCCESS; }

int cuStreamSynchronize(void* stream) {
    CachePhaseKind turn(counts().lock);
    counts().stream_syncs++;
    return finish(stream, turn);
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    std::lock_guard turn(counts().lock);
    counts().stream_waits++;
    return give(stream_of(stream), Piece{nullptr, nullptr, static_cast<Event*>(event)->marks});
}

int cuEventCreate(void** event, unsigned) {
    *event = new Event;
    return SUCCESS;
}

int cuEventRecord(void* event, void* stream) {
    std::lock_guard turn(counts().lock);
    counts().events_recorded++;
    static_cast<Event*>(event)->marks = {put_mark(stream_of(stream))};
    return SUCCESS;
}

// An event behind all that a GPU has been given.
int cuCtxRecordEvent(void* context, void* event) {
    std::lock_guard turn(counts().lock);
    if (settings().old_driver) {
        return NOT_SUPPORTED;
    }
    counts().events_recorded++;
    static_cast<Event*>(event)->marks = put_marks(context);
    return SUCCESS;
}

// All that a GPU will be given waits for an event.
int cuCtxWaitEvent(void* context, void* event) {
    std::lock_guard turn(counts().lock);
    if (settings().old_driver) {
        return NOT_SUPPORTED;
    }
    counts().stream_waits++;
    const Marks& marks = static_cast<Event*>(event)->marks;
    streams().awaited[context] = marks;
    for (Stream* stream : streams().all) {
        if (stream->context == context) {
            give(*stream, Piece{nullptr, nullptr, marks});
        }
    }
    return SUCCESS;
}

int cuCtxSynchronize() {
    void* context = nullptr;
    cuCtxGetCurrent(&context);
    CachePhaseKind turn(counts().lock);
    counts().gpu_syncs++;
    return wait_for(put_marks(context), turn);
}

int cuEventQuery(void* event) {
    std::lock_guard turn(counts().lock);
    const Marks& marks = static_cast<Event*>(event)->marks;
    return pass(marks, nullptr) ? failure_before(marks) : NOT_READY;
}

int cuEventSynchronize(void* handle) {
    CachePhaseKind turn(counts().lock);
    counts().event_syncs++;
    return wait_for(static_cast<Event*>(handle)->marks, turn);
}

int cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
    std::lock_guard turn(counts().lock);
    const Event& first = *static_cast<Event*>(from);
    const Event& second = *static_cast<Event*>(to);
    if (!is_over(first) || !is_over(second)) {
        return NOT_READY;
    }
    *milliseconds = float((passed_at(second) - passed_at(first)) * 1e3);
    return SUCCESS;
}

int cuEventDestroy_v2(void* event) {
    delete static_cast<Event*>(event);
    return SUCCESS;
}

}  // extern "C"

}  // namespace GPU
