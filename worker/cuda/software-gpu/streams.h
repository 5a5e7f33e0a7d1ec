// Streams, and the order of what they are given.
//
//   Task     a launch or a copy, done by the thread that finds it due
//   Mark     a place in a stream; an event holds one, or one of every stream of its GPU
//   Errand   what another thread does while the stream waits: an operation of NCCL
//
// A stream's work is done in order. Usually each piece is done by the call that gives it, unless an errand or
// another stream is still waited for. With GPU_LATE it is done as late as can be: when somebody waits for it
// or asks whether it is done. So what does not wait for a stream and should, finds the work not done.
//
// The caller holds the lock of the counts; waiting for an errand gives it up meanwhile.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace gpu {

using CachePhaseKind = std::unique_lock<std::mutex>;
using Task = std::function<Code()>;

struct Stream;

struct Mark {
    Stream* stream;
    bool passed = false;
    double passed_at = 0;
};
using Marks = std::vector<std::shared_ptr<Mark>>;

struct Errand {
    // Called once, when all before it is done; must not wait.
    std::function<void()> begin;
    bool begun = false;
    bool over = false;
};

// Gives a stream work. What goes wrong later is reported to the call that waits for the stream, as on a GPU.
// No stream: the GPU's own.
Code give(void* stream, Task work);
void give(void* stream, std::shared_ptr<Errand> errand);

// The errand is over: what stood behind it can go on. Wakes who waits.
void end(Errand& errand);

// All that the stream has been given is done.
Code finish(void* stream, CachePhaseKind& turn);

// All that can be done without waiting, in every stream: before memory goes.
void finish_what_can_be();

}  // namespace GPU
