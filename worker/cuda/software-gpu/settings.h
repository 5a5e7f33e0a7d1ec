// What `run` and its user chose: read from the environment, once.
#pragma once

#include <cstdint>
#include <string>

namespace gpu {

struct Settings {
    // Kernels are executed; otherwise calls are counted, and nothing is computed.
    bool execute;
    // Ten times CUDA's compute capability. From 8.0 on cubecl writes kernels for tensor cores and with
    // asynchronous copies, at 9.0 also such that copy boxes of tensors.
    int capability;
    // GPU_MEMORY_MIB
    uint64_t memory_bytes;
    // GPU_GPUS
    int gpus;
    // GPU_POISON: fresh device memory is full of NaN instead of zeros.
    bool poison;
    // GPU_EAGER_COPIES: asynchronous copies are done at once instead of as late as can be.
    bool eager_copies;
    // GPU_LATE: streams do what they were given when somebody waits for it or asks for it, not before.
    bool late;
    // GPU_OLD_DRIVER: no events on everything that a GPU was told, as before CUDA 12.5.
    bool old_driver;
    // GPU_OLD_CUBLAS: a library of products that is too old.
    bool old_cublas;
    // GPU_REFUSE: programs with one of these words in them, comma between two, are not compiled.
    std::string refused;
    // Lanes of a warp run in step where a kernel counts on it (lockstep.h). GPU_FREE_LANES: they do not.
    bool lockstep;
    // GPU_BACKWARDS: the last thread of a block comes first.
    bool backwards;
    // GPU_VERBOSE: a line on stderr for every launch.
    bool verbose;
    // GPU_TRACE: the file that counts are appended to at exit; empty for none.
    std::string trace;
    // Where `run` has put the headers that kernels include.
    std::string headers;
    // Where kernels are kept, compiled or, when counting, as sources.
    std::string kernels;
};

const Settings& settings();

}  // namespace GPU
