// Sockets of this machine, named after the communicator's id and the rank that listens. A rank calls those
// below it and is called by those above.

#include "peers.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace gpu::nccl {

namespace {

// Between two calls of a rank that does not listen yet.
constexpr int RETRY_MS = 2;

// What ranks tell each other first.
struct Hello {
    int rank;
    int world;
    int gpu;
    uint64_t host;
};

// NCCL takes two ranks for being on one machine if these are equal, and NCCL_HOSTID for the truth.
uint64_t host() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    const char* told = getenv("NCCL_HOSTID");
    return std::hash<std::string>()(told && *told ? told : name);
}

struct Name {
    sockaddr_un address{};
    socklen_t bytes;

    Name(const std::string& id, int rank) {
        address.sun_family = AF_UNIX;
        const std::string text = "nccl " + id + " " + std::to_string(rank);
        // The zero before it: a name without a file.
        memcpy(address.sun_path + 1, text.data(), text.size());
        bytes = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Failure system_failure(const char* call) {
    return {INTERNAL_ERROR, std::string(call) + ": " + strerror(errno)};
}

int new_socket() {
    const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0) {
        throw system_failure("socket");
    }
    return made;
}

// Until one of them is ready, or the time is over.
void wait_for(std::vector<pollfd> watched, const Stop& stop, int ms) {
    watched.push_back({stop.descriptor(), POLLIN, 0});
    if (poll(watched.data(), watched.size(), ms) < 0 && errno != EINTR) {
        throw system_failure("poll");
    }
    if (stop.is_set()) {
        throw Stopped{};
    }
}

int call(const Name& name, const Stop& stop) {
    while (true) {
        const int made = new_socket();
        if (connect(made, name.get(), name.bytes) == 0) {
            return made;
        }
        close(made);
        wait_for({}, stop, RETRY_MS);
    }
}

int accept_one(int listener, const Stop& stop) {
    while (true) {
        wait_for({{listener, POLLIN, 0}}, stop, -1);
        const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (made >= 0) {
            return made;
        }
    }
}

// How many bytes went; 0 if none could.
size_t moved(ssize_t count, int rank) {
    if (count > 0) {
        return size_t(count);
    }
    const bool later = count < 0 && (errno == EAGAIN || errno == EINTR);
    if (!later) {
        throw Failure{REMOTE_ERROR, "rank " + std::to_string(rank) + " has left"};
    }
    return 0;
}

}  // namespace

Stop::Stop() : descriptor_(eventfd(0, EFD_CLOEXEC)) {}

Stop::~Stop() { close(descriptor_); }

void Stop::set() {
    set_ = true;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(descriptor_, &one, sizeof one);
}

Peers::Peers(const Place& place, const Stop& stop) : place_(place), stop_(stop), sockets_(place.world, -1) {
    try {
        find();
    } catch (...) {
        // Ranks that have found this one hear that it is gone.
        close_all();
        throw;
    }
}

void Peers::find() {
    const int listener = new_socket();
    const Name own(place_.id, place_.rank);
    if (bind(listener, own.get(), own.bytes) != 0 || listen(listener, place_.world) != 0) {
        close(listener);
        throw Failure{INVALID_USAGE, "an id is good for one communicator, and a rank for one process"};
    }
    try {
        for (int rank = 0; rank < place_.rank; rank++) {
            sockets_[rank] = call(Name(place_.id, rank), stop_);
            send(rank, &place_.rank, sizeof place_.rank);
        }
        accept_callers(listener);
    } catch (...) {
        close(listener);
        throw;
    }
    close(listener);
    for (int rank = 0; rank < place_.world; rank++) {
        if (rank != place_.rank) {
            greet(rank);
        }
    }
}

// Those above this rank, in whatever order they call.
void Peers::accept_callers(int listener) {
    for (int rank = place_.rank + 1; rank < place_.world; rank++) {
        const int caller = accept_one(listener, stop_);
        int number = -1;
        if (recv(caller, &number, sizeof number, MSG_WAITALL) != sizeof number || number <= place_.rank ||
            number >= place_.world || sockets_[number] >= 0) {
            close(caller);
            throw Failure{REMOTE_ERROR, "a rank has left"};
        }
        sockets_[number] = caller;
    }
}

void Peers::greet(int rank) {
    const Hello own{place_.rank, place_.world, place_.gpu, host()};
    Hello other{};
    exchange(rank, &own, sizeof own, rank, &other, sizeof other);
    if (other.world != own.world || other.rank != rank) {
        throw Failure{INVALID_USAGE, "ranks of different worlds have one id"};
    }
    if (other.host == own.host && other.gpu == own.gpu) {
        throw Failure{INVALID_USAGE, "Duplicate GPU detected : rank " + std::to_string(own.rank) + " and rank " +
                                         std::to_string(rank) + " both on CUDA device " +
                                         std::to_string(own.gpu)};
    }
}

Peers::~Peers() { close_all(); }

void Peers::close_all() {
    for (const int socket : sockets_) {
        if (socket >= 0) {
            close(socket);
        }
    }
}

void Peers::exchange(int to, const void* out, size_t out_bytes, int from, void* in, size_t in_bytes) {
    const char* unsent = static_cast<const char*>(out);
    char* missing = static_cast<char*>(in);
    while (out_bytes || in_bytes) {
        std::vector<pollfd> watched;
        if (out_bytes) {
            watched.push_back({sockets_.at(to), POLLOUT, 0});
        }
        if (in_bytes) {
            watched.push_back({sockets_.at(from), POLLIN, 0});
        }
        wait_for(watched, stop_, -1);
        if (out_bytes) {
            const size_t went = moved(::send(sockets_[to], unsent, out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL), to);
            unsent += went;
            out_bytes -= went;
        }
        if (in_bytes) {
            const size_t came = moved(recv(sockets_[from], missing, in_bytes, MSG_DONTWAIT), from);
            missing += came;
            in_bytes -= came;
        }
    }
}

}  // namespace gpu::nccl
