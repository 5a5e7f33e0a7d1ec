// NCCL's entry points, as far as they are called: libnccl.so.2.
//
// Arguments are checked as NCCL checks them, and memory against the GPU's allocations. Communicators are
// non-blocking if their configuration says so; one that is not waits until it has connected.

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "../counts.h"
#include "../driver.h"
#include "../memory.h"
#include "../settings.h"
#include "communicator.h"

namespace gpu::nccl {

namespace {

// 2.28.3, the one that the layout below is of.
constexpr int VERSION = 22803;
constexpr unsigned MAGIC = 0xcafebeef;
constexpr size_t ID_BYTES = 128;

struct UniqueId {
    char bytes[ID_BYTES];
};

// The beginning of ncclConfig_t, which has been the same since 2.14.
struct Config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
};

// What ncclGroupStart holds back.
struct Group {
    int depth = 0;
    std::vector<Operation> operations;
    Communicator* communicator = nullptr;
    void* stream = nullptr;
};
thread_local Group group;
// Of a communicator that is gone.
thread_local std::string last_words;

Result refuse(const std::string& why) {
    last_words = why;
    return INVALID_ARGUMENT;
}

Result begin(Group& begun) {
    Communicator* communicator = begun.communicator;
    return communicator ? communicator->start(std::move(begun.operations), begun.stream) : DONE;
}

bool on_gpu(const char* call, const char* start, size_t bytes) {
    std::lock_guard turn(counts().lock);
    return check(call, reinterpret_cast<Address>(start), bytes);
}

Result enqueue(const char* call, Communicator* communicator, const Operation& operation, void* stream) {
    if (!communicator) {
        return refuse(std::string(call) + ": no communicator");
    }
    const int rank = communicator->rank();
    const int world = communicator->world();
    if (!bytes_of(operation.type)) {
        return refuse(std::string(call) + ": a type that the software GPU has not");
    }
    if (operation.peer < 0 || operation.peer >= world) {
        return refuse(std::string(call) + ": no such rank");
    }
    if (!on_gpu(call, operation.from, read_bytes(operation, rank, world)) ||
        !on_gpu(call, operation.to, written_bytes(operation, rank, world))) {
        return refuse(std::string(call) + ": memory that is not the GPU's");
    }
    if (group.depth == 0) {
        Group alone{0, {operation}, communicator, stream};
        return begin(alone);
    }
    group.operations.push_back(operation);
    group.communicator = communicator;
    group.stream = stream;
    return DONE;
}

const char* bytes(const void* start) { return static_cast<const char*>(start); }
char* bytes(void* start) { return static_cast<char*>(start); }

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
    *version = VERSION;
    return DONE;
}

int ncclGetUniqueId(UniqueId* id) {
    std::random_device chance;
    snprintf(id->bytes, ID_BYTES, "%08x%08x%08x", chance(), chance(), unsigned(getpid()));
    return DONE;
}

int ncclCommInitRankConfig(Communicator** made, int world, UniqueId id, int rank, const Config* config) {
    *made = nullptr;
    if (!settings().execute) {
        return refuse("the software GPU counts only, and moves no data");
    }
    if (config->magic != MAGIC || rank < 0 || rank >= world) {
        return refuse("ncclCommInitRankConfig: a configuration or rank that cannot be");
    }
    void* context = nullptr;
    cuCtxGetCurrent(&context);
    if (!context) {
        return refuse("ncclCommInitRankConfig: this thread has no GPU");
    }
    const int gpu = int(reinterpret_cast<uintptr_t>(context)) - 1;
    *made = new Communicator(Place{std::string(id.bytes, strnlen(id.bytes, ID_BYTES)), rank, world, gpu});
    if (config->blocking == 0) {
        return IN_PROGRESS;
    }
    (*made)->wait_until_idle();
    return (*made)->state();
}

int ncclCommGetAsyncError(Communicator* communicator, int* result) {
    *result = communicator->state();
    return DONE;
}

const char* ncclGetLastError(Communicator* communicator) {
    if (communicator && !communicator->message().empty()) {
        last_words = communicator->message();
    }
    return last_words.c_str();
}

int ncclCommFinalize(Communicator* communicator) { return communicator->leave(); }

int ncclCommDestroy(Communicator* communicator) {
    delete communicator;
    return DONE;
}

int ncclCommAbort(Communicator* communicator) {
    delete communicator;
    return DONE;
}

int ncclGroupStart() {
    group.depth++;
    return DONE;
}

int ncclGroupEnd() {
    if (group.depth == 0) {
        return INVALID_USAGE;
    }
    if (--group.depth) {
        return DONE;
    }
    Group whole = std::move(group);
    group = Group{};
    return begin(whole);
}

int ncclAllReduce(const void* from, void* to, size_t count, int type, int reduce, Communicator* communicator,
                  void* stream) {
    const Operation operation{Kind::all_reduce, bytes(from), bytes(to), count, type, reduce, 0};
    return enqueue("ncclAllReduce", communicator, operation, stream);
}

int ncclReduceScatter(const void* from, void* to, size_t count, int type, int reduce,
                      Communicator* communicator, void* stream) {
    const Operation operation{Kind::reduce_scatter, bytes(from), bytes(to), count, type, reduce, 0};
    return enqueue("ncclReduceScatter", communicator, operation, stream);
}

int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* communicator, void* stream) {
    const Operation operation{Kind::all_gather, bytes(from), bytes(to), count, type, SUM, 0};
    return enqueue("ncclAllGather", communicator, operation, stream);
}

int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* communicator,
                  void* stream) {
    const Operation operation{Kind::broadcast, bytes(from), bytes(to), count, type, SUM, root};
    return enqueue("ncclBroadcast", communicator, operation, stream);
}

int ncclSend(const void* from, size_t count, int type, int peer, Communicator* communicator, void* stream) {
    const Operation operation{Kind::send, bytes(from), nullptr, count, type, SUM, peer};
    return enqueue("ncclSend", communicator, operation, stream);
}

int ncclRecv(void* to, size_t count, int type, int peer, Communicator* communicator, void* stream) {
    const Operation operation{Kind::receive, nullptr, bytes(to), count, type, SUM, peer};
    return enqueue("ncclRecv", communicator, operation, stream);
}

}  // extern "C"

}  // namespace gpu::nccl
