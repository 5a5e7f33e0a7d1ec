// CUDA's driver API as far as it is here: codes, handles, and what its parts (driver.cpp, streams.cpp,
// memory.cpp) share.
#pragma once

#include <cstdint>
#include <string>

#include "kernel/block.h"

namespace gpu {

// CUresult.
enum Code : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
};

using Address = unsigned long long;

struct Module {
    void* library;
};

struct Function {
    std::string name;
    Run run;
    // Of each argument; 0 after the last.
    const uint32_t* argument_bytes;
};

extern "C" int cuCtxGetCurrent(void** context);

// What stands before the path of a compiled kernel in the "PTX" that compiler.cpp gives.
constexpr char IMAGE_MARK[] = "software GPU: ";

}  // namespace GPU
