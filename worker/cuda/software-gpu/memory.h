// What others ask of device memory.
#pragma once

#include "driver.h"

namespace gpu {

// Whether these bytes lie in one allocation; if not, says so on stderr as this call. With the lock of the
// counts.
bool check(const char* call, Address address, uint64_t bytes);

}  // namespace GPU
