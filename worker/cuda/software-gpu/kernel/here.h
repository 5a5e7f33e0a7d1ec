// The thread that runs, for functions that are no members of the kernel's class.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"

namespace gpu {

// One launch is executed at a time.
static const Launch* launching = nullptr;

// Never kept across a wait: another thread runs then.
inline Thread* here() { return *launching->current; }

inline const Services& services() { return *launching->services; }

inline void demand(bool kept, const char* otherwise) {
    if (__builtin_expect(!kept, 0)) {
        services().stop(*launching, otherwise);
    }
}

// What a GPU ends a launch for, which does no harm here.
inline void require(bool kept, const char* otherwise) {
    if (__builtin_expect(!kept, 0)) {
        services().fail(*launching, otherwise);
    }
}

// What CUDA's manual forbids and a GPU may do all the same: said once by every kernel.
inline void prefer(bool kept, const char* otherwise) {
    static bool message = false;
    if (__builtin_expect(!kept && !message, 0)) {
        message = true;
        services().complain(*launching, otherwise);
    }
}

// Shared memory is addressed as on a GPU: from 0. Offset 0 of the host's copy is aligned like a GPU's.
inline void* shared_place(uint32_t address, size_t bytes) {
    demand(address + bytes <= launching->shared_bytes, "an address is outside the block's shared memory");
    return launching->shared + address;
}

// `Function` is called once, with the operands of all lanes, when the last of them is here.
template <auto Function, class Operands>
inline void together(Operands& mine) {
    const Work work = [](void* const* lanes) { Function(reinterpret_cast<Operands* const*>(lanes)); };
    services().together(here(), work, &mine);
}

}  // namespace GPU

inline size_t __cvta_generic_to_shared(const void* place) {
    const size_t offset = static_cast<const uint8_t*>(place) - gpu::launching->shared;
    gpu::demand(offset < gpu::launching->shared_bytes, "a pointer is not to shared memory");
    return offset;
}
