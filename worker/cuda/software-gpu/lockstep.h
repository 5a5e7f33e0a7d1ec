// Kernels for tensor cores that count on the lanes of a warp running in step.
#pragma once

#include <string>

namespace gpu {

// A kernel with `lockstep();` before each access to shared memory where other lanes may have to be done with
// theirs: before a read after writes, and before a write after reads, if nothing in between waits for the
// warp.
//
// CUDA demands `__syncwarp()` there. cubek does without when it writes its results, and on a GPU it works as
// long as the lanes have not parted.
std::string with_lockstep(const std::string& kernel);

}  // namespace GPU
