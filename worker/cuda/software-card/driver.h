// CUDA's driver API as far as it is here: codes, handles, and what its two halves (driver.cpp, memory.cpp)
// share.
#pragma once

#include <cstdint>
#include <string>

#include "kernel/block.h"

namespace card {

// CUresult.
enum Code : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NOT_FOUND = 500,
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
};

// What stands before the path of a compiled kernel in the "PTX" that compiler.cpp gives.
constexpr char IMAGE_MARK[] = "software card: ";

}  // namespace card
