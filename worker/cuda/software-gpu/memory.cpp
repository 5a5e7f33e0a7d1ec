// Device and pinned memory, and copies: the memory half of libcuda.so.1.
//
// Device memory is host memory between two pages that nobody may touch, so a kernel that leaves an allocation
// by far ends the process. cubecl allocates large pages and divides them itself: what leaves a tensor but not
// its page is not noticed. When calls are only counted, addresses are given out that nothing lies behind.
//
// Every copy is checked against the allocations when it is given to its stream.

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "counts.h"
#include "driver.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace gpu {

namespace {

constexpr uint64_t PAGE_BYTES = 4096;
// As cuMemAlloc aligns.
constexpr uint64_t GRANULE_BYTES = 512;
// Beyond this, filling with NaN would touch more memory than a host has.
constexpr uint64_t MOST_POISONED_BYTES = 256 << 20;
// Counted GPUs: distance between the addresses of allocations.
constexpr uint64_t COUNTED_GRANULE_BYTES = 2 << 20;
// A counted GPU's memory reads as 0.001 everywhere: gradients that are all zero would end a training run.
constexpr float COUNTED_VALUE = 0.001f;

std::map<Address, uint64_t> device_blocks;
std::map<void*, uint64_t> pinned_blocks;
Address next_counted_address = 0x7000'0000'0000;

uint64_t round_up(uint64_t bytes, uint64_t granule) { return (bytes + granule - 1) / granule * granule; }

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

Code move(void* to, const void* from, size_t bytes) {
    memmove(to, from, bytes);
    return SUCCESS;
}

void* map_pages(uint64_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return mapped == MAP_FAILED ? nullptr : mapped;
}

// Address 0: the host has no such memory.
Address map_device(uint64_t bytes) {
    const uint64_t guarded = round_up(bytes, PAGE_BYTES) + 2 * PAGE_BYTES;
    char* mapped = static_cast<char*>(map_pages(guarded));
    if (!mapped) {
        return 0;
    }
    mprotect(mapped, PAGE_BYTES, PROT_NONE);
    mprotect(mapped + guarded - PAGE_BYTES, PAGE_BYTES, PROT_NONE);
    if (settings().poison && bytes <= MOST_POISONED_BYTES) {
        memset(mapped + PAGE_BYTES, 0xff, bytes);
    }
    return reinterpret_cast<Address>(mapped) + PAGE_BYTES;
}

void unmap_device(Address address, uint64_t bytes) {
    munmap(pointer(address - PAGE_BYTES), round_up(bytes, PAGE_BYTES) + 2 * PAGE_BYTES);
}

bool is_allocated(Address address, uint64_t bytes) {
    auto after = device_blocks.upper_bound(address);
    if (after == device_blocks.begin()) {
        return false;
    }
    const auto& [start, size] = *std::prev(after);
    return address + bytes <= start + size;
}

void fill_with_counted_value(char* destination, uint64_t bytes) {
    memset(destination, 0, bytes);
    for (uint64_t at = 0; at + sizeof COUNTED_VALUE <= bytes; at += sizeof COUNTED_VALUE) {
        memcpy(destination + at, &COUNTED_VALUE, sizeof COUNTED_VALUE);
    }
}

// CUDA_MEMCPY2D.
struct PitchedEnd {
    size_t first_byte;
    size_t first_row;
    int memory_type;
    void* host;
    Address device;
    void* array;
    size_t pitch;

    static constexpr int DEVICE = 2;

    bool on_device() const { return memory_type == DEVICE; }
    char* start() const {
        char* base = on_device() ? pointer(device) : static_cast<char*>(host);
        return base + first_row * pitch + first_byte;
    }
};
struct PitchedCopy {
    PitchedEnd source;
    PitchedEnd destination;
    size_t row_bytes;
    size_t rows;
};

bool check_end(const PitchedEnd& end, const PitchedCopy& copy) {
    if (copy.rows > 1 && end.pitch < copy.row_bytes) {
        fprintf(stderr, "software GPU: cuMemcpy2D: rows of %zu bytes, %zu bytes apart\n", copy.row_bytes, end.pitch);
        return false;
    }
    const bool empty = copy.rows == 0 || copy.row_bytes == 0;
    if (empty || !end.on_device()) {
        return true;
    }
    const uint64_t bytes = end.pitch * (copy.rows - 1) + copy.row_bytes;
    return check("cuMemcpy2D", reinterpret_cast<Address>(end.start()), bytes);
}

Copies& copies_of(const PitchedCopy& copy) {
    if (!copy.destination.on_device()) {
        return counts().from_device_pitched;
    }
    return copy.source.on_device() ? counts().within_device : counts().to_device_pitched;
}

Code free_device(Address address) {
    auto block = device_blocks.find(address);
    if (block == device_blocks.end()) {
        fprintf(stderr, "software GPU: cuMemFree: %llx is no allocation\n", address);
        return INVALID_VALUE;
    }
    if (settings().execute) {
        unmap_device(address, block->second);
    }
    counts().device.free(block->second);
    device_blocks.erase(block);
    return SUCCESS;
}

bool is_pinned(const void* start) {
    auto after = pinned_blocks.upper_bound(const_cast<void*>(start));
    if (after == pinned_blocks.begin()) {
        return false;
    }
    const auto& [first, bytes] = *std::prev(after);
    return start < static_cast<char*>(first) + bytes;
}

// A source that is not pinned is read before the call returns, as a GPU does it.
Code copy_to_device(Address destination, const void* source, size_t bytes, void* stream) {
    if (!check("cuMemcpyHtoD", destination, bytes)) {
        return INVALID_VALUE;
    }
    counts().to_device.add(bytes);
    if (!is_pinned(source)) {
        counts().to_device_pageable.add(bytes);
    }
    if (!settings().execute) {
        return SUCCESS;
    }
    if (is_pinned(source)) {
        return give(stream, [=] { return move(pointer(destination), source, bytes); });
    }
    const auto* first = static_cast<const char*>(source);
    auto kept = std::make_shared<std::vector<char>>(first, first + bytes);
    return give(stream, [=] { return move(pointer(destination), kept->data(), bytes); });
}

// A destination that is not pinned is written before the call returns.
Code copy_from_device(void* destination, Address source, size_t bytes, void* stream, CachePhaseKind& turn) {
    if (!check("cuMemcpyDtoH", source, bytes)) {
        return INVALID_VALUE;
    }
    counts().from_device.add(bytes);
    if (!settings().execute) {
        fill_with_counted_value(static_cast<char*>(destination), bytes);
        return SUCCESS;
    }
    const Code given = give(stream, [=] { return move(destination, pointer(source), bytes); });
    return given != SUCCESS || is_pinned(destination) ? given : finish(stream, turn);
}

void copy_rows(const PitchedCopy& copy) {
    for (size_t row = 0; row < copy.rows; row++) {
        char* to = copy.destination.start() + row * copy.destination.pitch;
        const char* from = copy.source.start() + row * copy.source.pitch;
        if (settings().execute) {
            memcpy(to, from, copy.row_bytes);
        } else if (!copy.destination.on_device()) {
            fill_with_counted_value(to, copy.row_bytes);
        }
    }
}

// The same two rules. cubecl copies rows from and to pinned memory only.
bool waits_for_host(const PitchedCopy& copy) {
    const auto unpinned = [](const PitchedEnd& end) { return !end.on_device() && !is_pinned(end.start()); };
    return unpinned(copy.source) || unpinned(copy.destination);
}

}  // namespace

bool check(const char* call, Address address, uint64_t bytes) {
    if (bytes == 0 || is_allocated(address, bytes)) {
        return true;
    }
    fprintf(stderr, "software GPU: %s: %llu bytes at %llx are outside every allocation\n", call,
            (unsigned long long)bytes, address);
    return false;
}

extern "C" {

int cuMemAlloc_v2(Address* address, size_t asked_bytes) {
    std::lock_guard turn(counts().lock);
    if (asked_bytes == 0) {
        return INVALID_VALUE;
    }
    // What was given back in the order of a stream is there again.
    finish_what_can_be();
    const uint64_t bytes = round_up(asked_bytes, GRANULE_BYTES);
    Memory& device = counts().device;
    if (device.live_bytes + bytes > settings().memory_bytes) {
        device.refused++;
        return OUT_OF_MEMORY;
    }
    if (settings().execute) {
        *address = map_device(bytes);
    } else {
        *address = next_counted_address;
        next_counted_address += round_up(bytes, COUNTED_GRANULE_BYTES);
    }
    if (!*address) {
        device.refused++;
        return OUT_OF_MEMORY;
    }
    device_blocks[*address] = bytes;
    device.allocate(bytes);
    return SUCCESS;
}

int cuMemAllocAsync(Address* address, size_t bytes, void*) { return cuMemAlloc_v2(address, bytes); }

// A GPU waits for everything first. What others have to finish is not waited for: they may be waiting for us.
int cuMemFree_v2(Address address) {
    std::lock_guard turn(counts().lock);
    finish_what_can_be();
    return free_device(address);
}

// In the order of the stream: what it was given before may still use the memory.
int cuMemFreeAsync(Address address, void* stream) {
    std::lock_guard turn(counts().lock);
    return give(stream, [address] { return free_device(address); });
}

int cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
    std::lock_guard turn(counts().lock);
    counts().memory_questions++;
    finish_what_can_be();
    *free_bytes = settings().memory_bytes - counts().device.live_bytes;
    *all_bytes = settings().memory_bytes;
    return SUCCESS;
}

int cuMemAllocHost_v2(void** start, size_t bytes) {
    std::lock_guard turn(counts().lock);
    *start = bytes ? map_pages(bytes) : nullptr;
    if (!*start) {
        counts().pinned.refused++;
        return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    pinned_blocks[*start] = bytes;
    counts().pinned.allocate(bytes);
    return SUCCESS;
}

int cuMemFreeHost(void* start) {
    std::lock_guard turn(counts().lock);
    finish_what_can_be();
    auto block = pinned_blocks.find(start);
    if (block == pinned_blocks.end()) {
        return INVALID_VALUE;
    }
    munmap(start, block->second);
    counts().pinned.free(block->second);
    pinned_blocks.erase(block);
    return SUCCESS;
}

int cuMemcpyHtoD_v2(Address destination, const void* source, size_t bytes) {
    CachePhaseKind turn(counts().lock);
    const Code given = copy_to_device(destination, source, bytes, nullptr);
    return given == SUCCESS ? finish(nullptr, turn) : given;
}

int cuMemcpyHtoDAsync_v2(Address destination, const void* source, size_t bytes, void* stream) {
    std::lock_guard turn(counts().lock);
    return copy_to_device(destination, source, bytes, stream);
}

int cuMemcpyDtoH_v2(void* destination, Address source, size_t bytes) {
    CachePhaseKind turn(counts().lock);
    const Code given = copy_from_device(destination, source, bytes, nullptr, turn);
    return given == SUCCESS ? finish(nullptr, turn) : given;
}

int cuMemcpyDtoHAsync_v2(void* destination, Address source, size_t bytes, void* stream) {
    CachePhaseKind turn(counts().lock);
    return copy_from_device(destination, source, bytes, stream, turn);
}

int cuMemcpyDtoDAsync_v2(Address destination, Address source, size_t bytes, void* stream) {
    std::lock_guard turn(counts().lock);
    if (!check("cuMemcpyDtoD", source, bytes) || !check("cuMemcpyDtoD", destination, bytes)) {
        return INVALID_VALUE;
    }
    counts().within_device.add(bytes);
    if (!settings().execute) {
        return SUCCESS;
    }
    return give(stream, [=] { return move(pointer(destination), pointer(source), bytes); });
}

int cuMemcpy2DAsync_v2(const PitchedCopy* asked, void* stream) {
    CachePhaseKind turn(counts().lock);
    const PitchedCopy copy = *asked;
    if (!check_end(copy.source, copy) || !check_end(copy.destination, copy)) {
        return INVALID_VALUE;
    }
    copies_of(copy).add(copy.row_bytes * copy.rows);
    const Code given = give(stream, [copy] {
        copy_rows(copy);
        return SUCCESS;
    });
    return given == SUCCESS && waits_for_host(copy) ? finish(stream, turn) : given;
}

int cuMemsetD8Async(Address destination, unsigned char value, size_t bytes, void* stream) {
    std::lock_guard turn(counts().lock);
    if (!check("cuMemsetD8", destination, bytes)) {
        return INVALID_VALUE;
    }
    if (!settings().execute) {
        return SUCCESS;
    }
    return give(stream, [=] {
        memset(pointer(destination), value, bytes);
        return SUCCESS;
    });
}

}  // extern "C"

}  // namespace GPU
