// What the driver and compiled kernels share: a launch, and the block of threads that is being executed.
//
//   Launch  one call of cuLaunchKernel, and the services of the driver that a kernel calls
//   Block   the one block in execution; blocks run one after another
//   Warp    32 threads of it that can exchange values
//   Thread  one of them: a stack of its own, switched to and from by the driver (execute.cpp)
//
// Compiled kernels are kept on disk. `run` gives them another directory when a file of this one changes.
#pragma once

#include <cstddef>
#include <cstdint>

// CUDA's own names.
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

namespace card {

constexpr int LANES = 32;
constexpr int MOST_THREADS = 1024;

enum class State : uint8_t { runs, waits_for_warp, waits_for_block, done };

// What one lane hands to the others of its warp.
struct alignas(16) Slot {
    unsigned char bytes[16];
};

// Values and masks are double: a lane may hand over its next value while others still read the last one, and
// can be no further ahead.
struct Warp {
    int first;
    int count;
    int live;
    int arrived;
    unsigned mask[2];
    Slot values[2][LANES];
};

struct Block;

struct Thread {
    void* stack_pointer;
    Warp* warp;
    Block* block;
    int lane;
    int parity;
    State state;
    uint3 index;
};

using Body = void (*)(Thread*);
struct Launch;

struct Block {
    const Launch* launch;
    dim3 index;
    Body body;
    int count;
    int live;
    int arrived;
    Thread* threads;
    Warp* warps;
    int warp_count;
    void* scheduler;
};

struct Launch {
    dim3 grid;
    dim3 block;
    void** arguments;
    uint8_t* shared;
    void (*run_block)(const Launch&, dim3 index, Body);
    void (*wait_for_warp)(Thread*, int parity);
    void (*wait_for_block)(Thread*);
};

// The function `card_run` of a compiled kernel: executes all blocks.
using Run = void (*)(const Launch&);

}  // namespace card
