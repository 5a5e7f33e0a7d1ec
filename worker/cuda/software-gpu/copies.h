// Asynchronous copies of the block in execution, and its barriers.
//
//   issued      asked for by a thread with cp.async, and bound to no barrier yet
//   unfinished  bound to a barrier, which misses an arrival or bytes until the copy is done
//
// On a GPU a copy is done at any time between the two calls around it. Here it is done as late as can be:
// when no thread of the block can go on without it. So a thread that reads too early reads what was there
// before. With GPU_EAGER_COPIES it is done at once: then one that overwrites what is still being read shows.
#pragma once

#include "execute.h"

namespace gpu {

void forget_copies();

void wait_for_phase(Thread* thread, const Phases* phases, bool parity);
void phase_over(Thread* thread, const Phases* phases);
void copy(Thread* thread, void* to, const void* from, unsigned bytes, unsigned from_bytes);
void arrive_after_copies(Thread* thread, Phases* phases);
void copy_box(Thread* thread, void* to, const void* map, const int* at, int rank, Phases* phases);

// Those that somebody waits for. Whether there were any.
bool finish_awaited_copies(Block& block);

}  // namespace GPU
