// A launch, executed on the calling thread: block after block, the threads of a block as fibers.
#pragma once

#include "kernel/block.h"

namespace gpu {

constexpr unsigned MOST_SHARED_BYTES = 232448;

// `shared` of the launch and the services are filled in here. False: a GPU would have ended the launch.
bool execute(Launch launch, Run run);

// Another thread runs until somebody sets this one's state to `runs`.
void wait(Thread* thread, State state);

}  // namespace GPU
