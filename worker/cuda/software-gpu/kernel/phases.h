// What a barrier in shared memory holds: 64 bits, as on a GPU, because cubecl keeps that much room for it.
//
// A phase is over when nobody who was expected is missing and no byte that was announced; the next one begins
// at once. Bytes may come before they are announced.
#pragma once

#include <cstdint>

namespace gpu {

struct Phases {
    static constexpr unsigned MOST = (1u << 20) - 1;

    uint64_t parity : 1;
    uint64_t expected : 20;
    uint64_t missing : 20;
    int64_t bytes : 22;

    void begin(unsigned count) {
        parity = 0;
        expected = count;
        missing = count;
        bytes = 0;
    }

    // Whether that was the end of a phase.
    bool settle() {
        if (missing || bytes) {
            return false;
        }
        missing = expected;
        parity ^= 1;
        return true;
    }
};
static_assert(sizeof(Phases) == 8);

}  // namespace GPU
