// cuda::barrier and the asynchronous copies that arrive at one: cp.async, and boxes of tensors (TMA).
//
// When a copy is done is up to the driver (copies.cpp): as late as it may be, or at once.
#pragma once

#include <cstdint>

#include "here.h"
#include "phases.h"

namespace gpu {

inline void settle(Phases& phases) {
    if (phases.settle()) {
        services().phase_over(here(), &phases);
    }
}

// The parity of the phase that was arrived at.
inline bool arrive(Phases& phases, unsigned count) {
    demand(phases.missing >= count, "more arrive at a barrier than it expects");
    const bool parity = phases.parity;
    phases.missing -= count;
    settle(phases);
    return parity;
}

inline void expect(Phases& phases, unsigned bytes) {
    demand(bytes <= Phases::MOST, "a barrier cannot wait for so many bytes");
    phases.bytes += bytes;
}

}  // namespace GPU

namespace cuda {

enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };

template <thread_scope>
struct barrier : gpu::Phases {
    struct arrival_token {
        bool parity;
    };

    arrival_token arrive(unsigned count = 1) { return {gpu::arrive(*this, count)}; }
    void wait(arrival_token token) { wait_parity(token.parity); }
    void wait_parity(bool parity) { gpu::services().wait_for_phase(gpu::here(), this, parity); }
    void arrive_and_wait() { wait(arrive()); }
};

template <thread_scope Scope>
inline void init(barrier<Scope>* started, unsigned count) {
    gpu::demand(count > 0 && count <= gpu::Phases::MOST, "a barrier expects nobody, or too many");
    started->begin(count);
}

namespace device {

using Barrier = barrier<thread_scope_block>;

inline unsigned long long* barrier_native_handle(Barrier& of) {
    return reinterpret_cast<unsigned long long*>(&of);
}

inline void barrier_expect_tx(Barrier& at, unsigned bytes) { gpu::expect(at, bytes); }

inline Barrier::arrival_token barrier_arrive_tx(Barrier& at, unsigned count, unsigned bytes) {
    gpu::expect(at, bytes);
    return at.arrive(count);
}

namespace experimental {

// Orders writes before copies that read or overwrite them. Nothing here is out of order.
inline void fence_proxy_async_shared_cta() {}

template <class... Coordinates>
inline void copy_box(void* to, const void* map, Barrier& arrives_at, Coordinates... coordinates) {
    const int at[] = {int(coordinates)...};
    gpu::services().copy_box(gpu::here(), to, map, at, int(sizeof...(coordinates)), &arrives_at);
}

template <class Map>
inline void cp_async_bulk_tensor_1d_global_to_shared(void* to, const Map* map, int x, Barrier& at) {
    copy_box(to, map, at, x);
}
template <class Map>
inline void cp_async_bulk_tensor_2d_global_to_shared(void* to, const Map* map, int x, int y, Barrier& at) {
    copy_box(to, map, at, x, y);
}
template <class Map>
inline void cp_async_bulk_tensor_3d_global_to_shared(void* to, const Map* map, int x, int y, int z,
                                                     Barrier& at) {
    copy_box(to, map, at, x, y, z);
}
template <class Map>
inline void cp_async_bulk_tensor_4d_global_to_shared(void* to, const Map* map, int x, int y, int z, int w,
                                                     Barrier& at) {
    copy_box(to, map, at, x, y, z, w);
}
template <class Map>
inline void cp_async_bulk_tensor_5d_global_to_shared(void* to, const Map* map, int x, int y, int z, int w,
                                                     int v, Barrier& at) {
    copy_box(to, map, at, x, y, z, w, v);
}

}  // namespace experimental
}  // namespace device
}  // namespace cuda

namespace cooperative_groups {

struct thread_block {};
inline thread_block this_thread_block() { return {}; }

}  // namespace cooperative_groups

namespace ptx {

inline void cp_async(uint32_t to, uint64_t from, unsigned bytes, unsigned from_bytes) {
    gpu::require(to % bytes == 0, "cp.async: it is not written to a multiple of its bytes");
    gpu::require(from % bytes == 0 || !from_bytes, "cp.async: it is not read from a multiple of its bytes");
    gpu::prefer(from % bytes == 0, "cp.async: of nothing, but not from a multiple of its bytes");
    gpu::demand(from_bytes <= bytes, "cp.async: more is read than written");
    void* place = gpu::shared_place(to, bytes);
    gpu::services().copy(gpu::here(), place, reinterpret_cast<const void*>(from), bytes, from_bytes);
}

inline void cp_async_ca_shared__cta_global(uint32_t to, uint64_t from, unsigned bytes, unsigned from_bytes) {
    cp_async(to, from, bytes, from_bytes);
}
inline void cp_async_cg_shared__cta_global(uint32_t to, uint64_t from, unsigned bytes, unsigned from_bytes) {
    cp_async(to, from, bytes, from_bytes);
}

inline void cp_async_mbarrier_arrive_shared__cta_b64(uint32_t barrier) {
    void* place = gpu::shared_place(barrier, sizeof(gpu::Phases));
    gpu::services().arrive_after_copies(gpu::here(), static_cast<gpu::Phases*>(place));
}

}  // namespace ptx
