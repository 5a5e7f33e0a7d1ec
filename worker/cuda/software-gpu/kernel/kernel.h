// What a kernel of CUDA C++ finds when it is compiled for the host: CUDA's words, and the thread it runs as.
//
// compiler.cpp puts a kernel into a class derived from `Base`: CUDA's variables and the functions by which
// threads wait for each other are members, so that every thread has its own. What CUDA has in namespaces
// finds the thread that runs by itself (here.h). Enough for what cubecl writes, not for CUDA at large: no
// clusters, and of PTX the instructions in namespace `ptx`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "barriers.h"
#include "block.h"
#include "fragments.h"
#include "here.h"
#include "matrices.h"
#include "numbers.h"

#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define warpSize 32u

namespace gpu {

struct Base {
    uint3 threadIdx;
    dim3 blockIdx, blockDim, gridDim;
    const Launch* launch;
    uint8_t* shared;
    Thread* thread;

    // Members, because the C library has names like these for itself.
    static float __expf(float value) { return expf(value); }
    static float __logf(float value) { return logf(value); }
    static float __sinf(float value) { return sinf(value); }
    static float __cosf(float value) { return cosf(value); }
    static float __tanhf(float value) { return tanhf(value); }
    static float __powf(float base, float power) { return powf(base, power); }
    static float __fdividef(float a, float b) { return a / b; }
    static float __fsqrt_rn(float value) { return sqrtf(value); }
    static float __frsqrt_rn(float value) { return 1.0f / sqrtf(value); }
    static float __frcp_rn(float value) { return 1.0f / value; }

    // Not inlined: whatever a thread holds in registers must be in memory when another one runs.
    __attribute__((noinline)) void __syncthreads() { launch->services->wait_for_block(thread); }
    __attribute__((noinline)) void __syncwarp(unsigned = ~0u) { hand_over(0); }
    // The other lanes come as far, if they go the same way. compiler.cpp puts it into kernels (lockstep.h).
    __attribute__((noinline)) void lockstep() { launch->services->give_way(thread); }

    template <class T>
    T __shfl_sync(unsigned, T value, int lane, int width = LANES) {
        const int parity = hand_over(value);
        return handed<T>(parity, first_lane(width) | (lane & (width - 1)));
    }
    template <class T>
    T __shfl_xor_sync(unsigned, T value, int flipped, int width = LANES) {
        const int parity = hand_over(value);
        const int lane = thread->lane ^ flipped;
        return handed<T>(parity, lane <= last_lane(width) ? lane : thread->lane);
    }
    template <class T>
    T __shfl_up_sync(unsigned, T value, unsigned distance, int width = LANES) {
        const int parity = hand_over(value);
        const int lane = thread->lane - int(distance);
        return handed<T>(parity, lane >= first_lane(width) ? lane : thread->lane);
    }
    template <class T>
    T __shfl_down_sync(unsigned, T value, unsigned distance, int width = LANES) {
        const int parity = hand_over(value);
        const int lane = thread->lane + int(distance);
        return handed<T>(parity, lane <= last_lane(width) ? lane : thread->lane);
    }
    unsigned __ballot_sync(unsigned, bool vote) { return count_votes(vote).yes; }
    int __any_sync(unsigned, bool vote) { return count_votes(vote).yes != 0; }
    int __all_sync(unsigned, bool vote) {
        const Votes votes = count_votes(vote);
        return votes.yes == votes.cast;
    }
    unsigned __activemask() { return count_votes(true).cast; }

   private:
    struct Votes {
        unsigned yes;
        unsigned cast;
    };

    int first_lane(int width) const { return thread->lane & ~(width - 1); }
    int last_lane(int width) const { return thread->lane | (width - 1); }

    // Comes back when every lane of the warp has handed over its value.
    template <class T>
    int hand_over(T value) {
        static_assert(sizeof(T) <= sizeof(Slot));
        const int parity = thread->parity;
        thread->parity ^= 1;
        memcpy(&thread->warp->values[parity][thread->lane], &value, sizeof value);
        launch->services->wait_for_warp(thread, parity);
        return parity;
    }
    template <class T>
    T handed(int parity, int lane) const {
        T value;
        memcpy(&value, &thread->warp->values[parity][lane & (LANES - 1)], sizeof value);
        return value;
    }
    Votes count_votes(bool vote) {
        const int parity = hand_over(unsigned(vote));
        Votes votes{0, thread->warp->mask[parity]};
        for (int lane = 0; lane < LANES; lane++) {
            if ((votes.cast >> lane & 1) && handed<unsigned>(parity, lane)) {
                votes.yes |= 1u << lane;
            }
        }
        return votes;
    }
};

// How the driver calls a kernel, which is a member function of a class made for it.
template <auto Function>
struct Entry;

template <class Kernel, class... Arguments, void (Kernel::*Function)(Arguments...)>
struct Entry<Function> {
    // The driver keeps arguments until the kernel runs.
    static constexpr uint32_t argument_bytes[] = {sizeof(std::remove_cvref_t<Arguments>)..., 0};

    // For kernels whose threads never wait: one after another, without stacks of their own.
    static void run_in_turn(const Launch& launch) {
        launching = &launch;
        each(launch.grid, [&](dim3 block) {
            each(launch.block, [&](dim3 index) {
                run_thread(launch, block, uint3{index.x, index.y, index.z}, nullptr);
            });
        });
    }

    static void run_together(const Launch& launch) {
        launching = &launch;
        each(launch.grid, [&](dim3 block) { launch.services->run_block(launch, block, body); });
    }

   private:
    template <class Visit>
    static __forceinline__ void each(dim3 size, Visit visit) {
        for (unsigned z = 0; z < size.z; z++) {
            for (unsigned y = 0; y < size.y; y++) {
                for (unsigned x = 0; x < size.x; x++) {
                    visit(dim3{x, y, z});
                }
            }
        }
    }

    static void body(Thread* thread) {
        run_thread(*thread->block->launch, thread->block->index, thread->index, thread);
    }

    static __forceinline__ void run_thread(const Launch& launch, dim3 block, uint3 index, Thread* thread) {
        Kernel kernel;
        kernel.threadIdx = index;
        kernel.blockIdx = block;
        kernel.blockDim = launch.block;
        kernel.gridDim = launch.grid;
        kernel.launch = &launch;
        kernel.shared = launch.shared;
        kernel.thread = thread;
        call(kernel, launch.arguments, std::index_sequence_for<Arguments...>{});
    }

    template <size_t... Position>
    static __forceinline__ void call(Kernel& kernel, void** arguments, std::index_sequence<Position...>) {
        (kernel.*Function)(argument<std::remove_cvref_t<Arguments>>(arguments[Position])...);
    }

    // The caller aligns arguments as a GPU needs them, which may be less than a host does.
    template <class T>
    static __forceinline__ T argument(const void* place) {
        T value;
        memcpy(&value, place, sizeof value);
        return value;
    }
};

}  // namespace GPU
