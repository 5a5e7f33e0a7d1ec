// What is counted: memory, copies, waits and launches. The report is appended to the file GPU_TRACE when the
// process exits.
//
// Every entry point takes the lock of the counts for as long as it works, so the GPU does one thing at a
// time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace gpu {

// Grid, block, bytes of shared memory.
using Shape = std::array<unsigned, 7>;

struct Copies {
    uint64_t count = 0;
    uint64_t bytes = 0;
    std::map<uint64_t, uint64_t> count_by_bytes;

    void add(uint64_t bytes);
};

struct Memory {
    uint64_t allocations = 0;
    uint64_t frees = 0;
    uint64_t refused = 0;
    uint64_t live_bytes = 0;
    uint64_t peak_bytes = 0;
    std::map<uint64_t, uint64_t> count_by_bytes;

    void allocate(uint64_t bytes);
    void free(uint64_t bytes);
};

struct KernelCounts {
    uint64_t variants = 0;
    uint64_t launches = 0;
    double seconds = 0;
    std::map<Shape, uint64_t> launches_by_shape;
};

struct Counts {
    std::mutex lock;

    Memory device;
    Memory pinned;
    Copies to_device;
    // Of these: from host memory that is not page-locked, which a driver copies first.
    Copies to_device_pageable;
    Copies to_device_pitched;
    Copies from_device;
    Copies from_device_pitched;
    Copies within_device;

    uint64_t streams = 0;
    uint64_t stream_waits = 0;
    uint64_t stream_syncs = 0;
    uint64_t events_recorded = 0;
    uint64_t event_syncs = 0;
    uint64_t gpu_syncs = 0;
    uint64_t memory_questions = 0;

    uint64_t launches = 0;
    double launch_seconds = 0;
    uint64_t parted_warps = 0;
    uint64_t modules = 0;
    uint64_t programs = 0;
    double compile_seconds = 0;
    // By the name of the entry point, which many variants share.
    std::map<std::string, KernelCounts> kernels;
};

// Lives until the process has exited.
Counts& counts();

double now_seconds();

}  // namespace GPU
