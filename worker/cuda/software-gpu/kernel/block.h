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

namespace gpu {

constexpr int LANES = 32;
constexpr int MOST_THREADS = 1024;

enum class State : uint8_t { runs, waits_for_warp, waits_for_block, waits_for_phase, done };

// What one lane hands to the others of its warp.
struct alignas(16) Slot {
    unsigned char bytes[16];
};

// An instruction of all lanes of a warp at once, executed by the last of them to arrive: where each lane has
// its operands.
using Work = void (*)(void* const operands[LANES]);

// Values and masks are double: a lane may hand over its next value while others still read the last one, and
// can be no further ahead.
struct Warp {
    int first;
    int count;
    int live;
    int arrived;
    unsigned mask[2];
    Slot values[2][LANES];
    Work work;
    void* operands[LANES];
};

struct Block;
struct Phases;

struct Thread {
    void* stack_pointer;
    Warp* warp;
    Block* block;
    int lane;
    int parity;
    State state;
    uint3 index;
    // What it waits for in `waits_for_phase`: that a phase of this parity is over.
    const Phases* awaited;
    bool awaited_parity;
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

// What the driver does for a kernel.
struct Services {
    void (*run_block)(const Launch&, dim3 index, Body);
    void (*wait_for_warp)(Thread*, int parity);
    void (*wait_for_block)(Thread*);
    void (*give_way)(Thread*);
    // Comes back when all lanes have arrived and the work is done.
    void (*together)(Thread*, Work, void* operands);

    // Asynchronous copies, and the barriers by which they are waited for (copies.cpp).
    void (*wait_for_phase)(Thread*, const Phases*, bool parity);
    void (*phase_over)(Thread*, const Phases*);
    void (*copy)(Thread*, void* to, const void* from, unsigned bytes, unsigned from_bytes);
    void (*arrive_after_copies)(Thread*, Phases*);
    void (*copy_box)(Thread*, void* to, const void* map, const int* at, int rank, Phases*);

    // The kernel cannot go on; its launch has failed; or it did what is forbidden.
    void (*stop)(const Launch&, const char* why);
    void (*fail)(const Launch&, const char* why);
    void (*complain)(const Launch&, const char* why);
};

struct Launch {
    const char* name;
    dim3 grid;
    dim3 block;
    void** arguments;
    uint8_t* shared;
    unsigned shared_bytes;
    // The one that runs.
    Thread** current;
    const Services* services;
};

// The function `gpu_run` of a compiled kernel: executes all blocks.
using Run = void (*)(const Launch&);

}  // namespace GPU
