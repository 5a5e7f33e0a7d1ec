// The report of a process.

#include "counts.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "settings.h"

namespace gpu {

namespace {

// Of a kernel's shapes, and of the sizes of copies, the most frequent are told.
constexpr size_t TOLD_SHAPES = 6;
constexpr size_t TOLD_SIZES = 40;

template <class Key>
std::vector<std::pair<Key, uint64_t>> most_frequent_first(const std::map<Key, uint64_t>& counted) {
    std::vector<std::pair<Key, uint64_t>> sorted(counted.begin(), counted.end());
    std::stable_sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.second > b.second; });
    return sorted;
}

void write_sizes(FILE* file, const std::map<uint64_t, uint64_t>& count_by_bytes) {
    size_t told = 0;
    for (auto& [bytes, count] : most_frequent_first(count_by_bytes)) {
        if (told++ == TOLD_SIZES) {
            fprintf(file, "  ... %zu sizes\n", count_by_bytes.size());
            return;
        }
        fprintf(file, "  %" PRIu64 " x %" PRIu64 " B\n", count, bytes);
    }
}

void write_copies(FILE* file, const char* name, const Copies& copies) {
    fprintf(file, "%s: %" PRIu64 " copies, %" PRIu64 " B\n", name, copies.count, copies.bytes);
    write_sizes(file, copies.count_by_bytes);
}

void write_memory(FILE* file, const char* name, const Memory& memory) {
    fprintf(file, "%s: %" PRIu64 " allocations, %" PRIu64 " frees, %" PRIu64 " refused, ", name,
            memory.allocations, memory.frees, memory.refused);
    fprintf(file, "live %" PRIu64 " B, peak %" PRIu64 " B\n", memory.live_bytes, memory.peak_bytes);
    write_sizes(file, memory.count_by_bytes);
}

void write_kernel(FILE* file, const std::string& name, const KernelCounts& kernel) {
    fprintf(file, "kernel %" PRIu64 " launches, %" PRIu64 " variants, %.3f s: %s", kernel.launches,
            kernel.variants, kernel.seconds, name.c_str());
    size_t told = 0;
    for (auto& [shape, launches] : most_frequent_first(kernel.launches_by_shape)) {
        if (told++ == TOLD_SHAPES) {
            fprintf(file, " | ... %zu shapes", kernel.launches_by_shape.size());
            break;
        }
        fprintf(file, " | %" PRIu64 " x grid %u,%u,%u block %u,%u,%u shared %u", launches, shape[0], shape[1],
                shape[2], shape[3], shape[4], shape[5], shape[6]);
    }
    fputc('\n', file);
}

void write_kernels(FILE* file, const Counts& counts) {
    std::map<std::string, uint64_t> launches;
    for (auto& [name, kernel] : counts.kernels) {
        launches[name] = kernel.launches;
    }
    for (auto& [name, count] : most_frequent_first(launches)) {
        write_kernel(file, name, counts.kernels.at(name));
    }
}

void write_report(FILE* file, const Counts& counts) {
    const char* mode = settings().execute ? "kernels executed" : "calls counted";
    fprintf(file, "==== process %d, %s\n", getpid(), mode);
    fprintf(file, "launches %" PRIu64 " in %.3f s; warps that parted %" PRIu64 "; ", counts.launches,
            counts.launch_seconds, counts.parted_warps);
    fprintf(file, "modules %" PRIu64 "; programs compiled %" PRIu64 " in %.3f s\n", counts.modules,
            counts.programs, counts.compile_seconds);
    fprintf(file, "waits: events %" PRIu64 ", streams %" PRIu64 ", GPUs %" PRIu64, counts.event_syncs,
            counts.stream_syncs, counts.gpu_syncs);
    fprintf(file, ", streams for events %" PRIu64 "; ", counts.stream_waits);
    fprintf(file, "events recorded %" PRIu64 ", streams made %" PRIu64 ", ", counts.events_recorded,
            counts.streams);
    fprintf(file, "free memory asked for %" PRIu64 "\n", counts.memory_questions);
    write_memory(file, "device memory", counts.device);
    write_memory(file, "pinned memory", counts.pinned);
    write_copies(file, "host to device", counts.to_device);
    write_copies(file, "of these from pageable memory", counts.to_device_pageable);
    write_copies(file, "host to device, pitched", counts.to_device_pitched);
    write_copies(file, "device to host", counts.from_device);
    write_copies(file, "device to host, pitched", counts.from_device_pitched);
    write_copies(file, "within the device", counts.within_device);
    write_kernels(file, counts);
}

__attribute__((destructor)) void report_at_exit() {
    Counts& counted = counts();
    const bool used = counted.launches || counted.modules;
    if (!used || settings().trace.empty()) {
        return;
    }
    std::lock_guard turn(counted.lock);
    FILE* file = fopen(settings().trace.c_str(), "a");
    if (!file) {
        fprintf(stderr, "software GPU: GPU_TRACE: %s: %s\n", settings().trace.c_str(), strerror(errno));
        return;
    }
    write_report(file, counted);
    fclose(file);
}

}  // namespace

void Copies::add(uint64_t size) {
    count++;
    bytes += size;
    count_by_bytes[size]++;
}

void Memory::allocate(uint64_t bytes) {
    allocations++;
    live_bytes += bytes;
    peak_bytes = std::max(peak_bytes, live_bytes);
    count_by_bytes[bytes]++;
}

void Memory::free(uint64_t bytes) {
    frees++;
    live_bytes -= bytes;
}

// Never destroyed: threads of the process may still call the driver while it exits.
Counts& counts() {
    static Counts* counted = new Counts;
    return *counted;
}

double now_seconds() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace GPU
