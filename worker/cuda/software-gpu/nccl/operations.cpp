// Every rank sends what others need to each of them, and adds up what comes in the order of ranks. Sums of
// bfloat16 are rounded after every addition.
//
// Before anything else ranks tell each other what they are about to do: where two are in different operations
// NCCL would hang, or mix them up.

#include "operations.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace gpu::nccl {

namespace {

struct Heading {
    uint64_t number;
    uint64_t count;
    int kind;
    int type;
    int reduce;
    int root;

    bool operator==(const Heading&) const = default;
};

float widened(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// To the nearest, ties to even.
uint16_t narrowed(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (value != value) {
        return uint16_t(bits >> 16) | 0x40;
    }
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
T combined(T a, T b, int reduce) {
    return reduce == MAX ? std::max(a, b) : a + b;
}

void add_number(float& sum, float other, int reduce) { sum = combined(sum, other, reduce); }
void add_number(double& sum, double other, int reduce) { sum = combined(sum, other, reduce); }
void add_number(uint16_t& sum, uint16_t other, int reduce) {
    sum = narrowed(combined(widened(sum), widened(other), reduce));
}

template <class T>
void add_all(char* sum, const char* other, size_t count, int reduce) {
    for (size_t i = 0; i < count; i++) {
        T left;
        T right;
        memcpy(&left, sum + i * sizeof left, sizeof left);
        memcpy(&right, other + i * sizeof right, sizeof right);
        add_number(left, right, reduce);
        memcpy(sum + i * sizeof left, &left, sizeof left);
    }
}

void add(char* sum, const char* other, const Operation& operation) {
    switch (operation.type) {
        case FLOAT32: return add_all<float>(sum, other, operation.count, operation.reduce);
        case FLOAT64: return add_all<double>(sum, other, operation.count, operation.reduce);
        default: return add_all<uint16_t>(sum, other, operation.count, operation.reduce);
    }
}

// One that all ranks take part in.
class Collective {
   public:
    Collective(Peers& peers, const Operation& operation)
        : peers_(peers), operation_(operation), bytes_(operation.count * bytes_of(operation.type)) {}

    void run(uint64_t number) {
        agree(number);
        switch (operation_.kind) {
            case Kind::all_reduce: return reduce([](int) { return size_t(0); });
            case Kind::reduce_scatter: return reduce([this](int rank) { return bytes_ * rank; });
            case Kind::all_gather: return gather();
            default: return broadcast();
        }
    }

   private:
    // Calls with every distance to another rank: whom to send to, whom to hear.
    template <class Visit>
    void each_pair(Visit visit) {
        const int world = peers_.world();
        for (int distance = 1; distance < world; distance++) {
            visit((peers_.rank() + distance) % world, (peers_.rank() + world - distance) % world);
        }
    }

    void agree(uint64_t number) {
        const Operation& o = operation_;
        const Heading own{number, o.count, int(o.kind), o.type, o.reduce, o.peer};
        each_pair([&](int to, int from) {
            Heading other{};
            peers_.exchange(to, &own, sizeof own, from, &other, sizeof other);
            if (other != own) {
                throw Failure{INTERNAL_ERROR, "rank " + std::to_string(from) + " is in another operation"};
            }
        });
    }

    // `start`: where the part of a rank begins in what each brings.
    template <class Start>
    void reduce(Start start) {
        std::vector<std::vector<char>> parts(peers_.world(), std::vector<char>(bytes_));
        const char* own = operation_.from + start(peers_.rank());
        parts[peers_.rank()].assign(own, own + bytes_);
        each_pair([&](int to, int from) {
            peers_.exchange(to, operation_.from + start(to), bytes_, from, parts[from].data(), bytes_);
        });
        for (size_t rank = 1; rank < parts.size(); rank++) {
            add(parts[0].data(), parts[rank].data(), operation_);
        }
        memcpy(operation_.to, parts[0].data(), bytes_);
    }

    void gather() {
        each_pair([&](int to, int from) {
            peers_.exchange(to, operation_.from, bytes_, from, operation_.to + bytes_ * from, bytes_);
        });
        memmove(operation_.to + bytes_ * peers_.rank(), operation_.from, bytes_);
    }

    void broadcast() {
        const int root = operation_.peer;
        if (peers_.rank() != root) {
            return peers_.receive(root, operation_.to, bytes_);
        }
        each_pair([&](int to, int) { peers_.send(to, operation_.from, bytes_); });
        memmove(operation_.to, operation_.from, bytes_);
    }

    Peers& peers_;
    const Operation& operation_;
    const size_t bytes_;
};

bool is_collective(const Operation& operation) {
    return operation.kind != Kind::send && operation.kind != Kind::receive;
}

// A send and a receive at a time, as they were asked for.
void pass_on(Peers& peers, const std::vector<Operation>& group) {
    std::vector<Operation> sends;
    std::vector<Operation> receives;
    for (const Operation& operation : group) {
        (operation.kind == Kind::send ? sends : receives).push_back(operation);
    }
    // What is received may lie where something that is sent has been.
    std::vector<std::vector<char>> sent;
    for (const Operation& send : sends) {
        sent.emplace_back(send.from, send.from + send.count * bytes_of(send.type));
    }
    for (size_t i = 0; i < std::max(sends.size(), receives.size()); i++) {
        const Operation* in = i < receives.size() ? &receives[i] : nullptr;
        const size_t in_bytes = in ? in->count * bytes_of(in->type) : 0;
        const int to = i < sends.size() ? sends[i].peer : in->peer;
        const size_t out_bytes = i < sends.size() ? sent[i].size() : 0;
        const bool to_itself = to == peers.rank();
        if (to_itself && in) {
            memcpy(in->to, sent[i].data(), std::min(in_bytes, out_bytes));
        } else {
            peers.exchange(to, out_bytes ? sent[i].data() : nullptr, out_bytes, in ? in->peer : to,
                           in ? in->to : nullptr, in_bytes);
        }
    }
}

}  // namespace

size_t bytes_of(int type) {
    switch (type) {
        case FLOAT32: return 4;
        case FLOAT64: return 8;
        case BFLOAT16: return 2;
        default: return 0;
    }
}

size_t read_bytes(const Operation& operation, int rank, int world) {
    const size_t bytes = operation.count * bytes_of(operation.type);
    switch (operation.kind) {
        case Kind::reduce_scatter: return bytes * world;
        case Kind::broadcast: return rank == operation.peer ? bytes : 0;
        case Kind::receive: return 0;
        default: return bytes;
    }
}

size_t written_bytes(const Operation& operation, int, int world) {
    const size_t bytes = operation.count * bytes_of(operation.type);
    switch (operation.kind) {
        case Kind::all_gather: return bytes * world;
        case Kind::send: return 0;
        default: return bytes;
    }
}

void run(Peers& peers, const std::vector<Operation>& group, uint64_t number) {
    std::vector<Operation> passed;
    for (const Operation& operation : group) {
        if (is_collective(operation)) {
            Collective(peers, operation).run(number);
        } else {
            passed.push_back(operation);
        }
    }
    pass_on(peers, passed);
}

}  // namespace gpu::nccl
