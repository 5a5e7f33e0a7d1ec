// The ranks of a communicator: a socket to each of them, on this machine.
//
// Every wait here waits for the stop as well.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpu::nccl {

// ncclResult_t.
enum Result : int {
    DONE = 0,
    CUDA_ERROR = 1,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
};

// Why a communicator cannot go on.
struct Failure {
    Result result;
    std::string message;
};
// Somebody has ended it.
struct Stopped {};

// Wakes a thread in `Peers`. Set once.
class Stop {
   public:
    Stop();
    ~Stop();
    Stop(const Stop&) = delete;
    void set();
    bool is_set() const { return set_; }
    int descriptor() const { return descriptor_; }

   private:
    std::atomic<bool> set_{false};
    int descriptor_;
};

struct Place {
    std::string id;
    int rank;
    int world;
    int gpu;
};

class Peers {
   public:
    // Finds all others. Throws Failure or Stopped, as all here do.
    Peers(const Place& place, const Stop& stop);
    ~Peers();
    Peers(const Peers&) = delete;

    int rank() const { return place_.rank; }
    int world() const { return place_.world; }

    // Sends to one rank and receives from one, at the same time.
    void exchange(int to, const void* out, size_t out_bytes, int from, void* in, size_t in_bytes);
    void send(int to, const void* out, size_t bytes) { exchange(to, out, bytes, to, nullptr, 0); }
    void receive(int from, void* in, size_t bytes) { exchange(from, nullptr, 0, from, in, bytes); }

   private:
    void find();
    void accept_callers(int listener);
    void greet(int rank);
    void close_all();

    Place place_;
    const Stop& stop_;
    // By rank; -1 for this one.
    std::vector<int> sockets_;
};

}  // namespace gpu::nccl
