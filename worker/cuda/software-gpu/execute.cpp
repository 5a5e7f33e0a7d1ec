// How a block of threads is executed on one thread of the host.
//
// Every thread of the block is a fiber: it runs until it waits for its warp or its block, or is done. The
// scheduler goes round and lets run who can, until all are done.
//
//   last lane of a warp arrives      the others of the warp can run
//   last thread of a block arrives   all can run
//   a thread is done                 it is not waited for any more
//   all lanes of a warp arrive       at an instruction that belongs to all: the last one does it for them
//   nobody can run                   copies that somebody waits for are done (copies.h). If there are none,
//                                    lanes of a warp have parted: those that wait for their warp go on
//                                    without the others. If there are none,
//                                    the process is aborted: the kernel hangs.
//
// One thread runs at a time, and switches only where it waits, so missing barriers and races are seen only if
// the order of threads makes a difference. GPU_BACKWARDS turns it round.

#include "execute.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "copies.h"
#include "counts.h"
#include "settings.h"

#ifndef __x86_64__
#error "the software GPU switches between threads in assembly, which is written for x86-64 only"
#endif

// gpu_switch(from, to): keeps the registers that a callee has to keep on this stack, leaves its address in
// *from, goes on at `to`. gpu_enter: where a new fiber begins; its thread is in rbx.
asm(R"(
.text
.hidden gpu_switch
.globl gpu_switch
.type gpu_switch,@function
gpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpu_switch,.-gpu_switch
.hidden gpu_enter
.globl gpu_enter
.type gpu_enter,@function
gpu_enter:
  movq %rbx, %rdi
  call gpu_run_fiber
  ud2
.size gpu_enter,.-gpu_enter
)");
extern "C" void gpu_switch(void** from, void* to);
extern "C" void gpu_enter();

namespace gpu {

namespace {

constexpr size_t STACK_BYTES = 128 << 10;
// Stacks that begin at the same offset of a page would share a few lines of the processor's cache.
constexpr size_t STAGGER_BYTES = 192;
constexpr int STAGGERS = 61;

// Memory for the one block in execution; made once.
struct Room {
    char* stacks;
    Thread* threads = new Thread[MOST_THREADS];
    Warp* warps = new Warp[MOST_THREADS / LANES];
    uint8_t* shared;
    Thread* current = nullptr;

    Room() {
        const size_t bytes = STACK_BYTES * MOST_THREADS;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        shared = static_cast<uint8_t*>(aligned_alloc(1024, MOST_SHARED_BYTES));
        if (mapped == MAP_FAILED || !shared) {
            fprintf(stderr, "software GPU: no memory for the stacks of a block\n");
            abort();
        }
        stacks = static_cast<char*>(mapped);
    }
};

Room& room() {
    static Room* made = new Room;
    return *made;
}

void release_warp(Block& block, Warp& warp) {
    warp.arrived = 0;
    for (int lane = 0; lane < warp.count; lane++) {
        Thread& thread = block.threads[warp.first + lane];
        if (thread.state == State::waits_for_warp) {
            thread.state = State::runs;
        }
    }
}

void release_block(Block& block) {
    block.arrived = 0;
    for (int i = 0; i < block.count; i++) {
        if (block.threads[i].state == State::waits_for_block) {
            block.threads[i].state = State::runs;
        }
    }
}

void complain(const Launch& launch, const char* why) {
    fprintf(stderr, "software GPU: %s: %s\n", launch.name, why);
}

void stop(const Launch& launch, const char* why) {
    complain(launch, why);
    abort();
}

bool failed = false;

void fail(const Launch& launch, const char* why) {
    if (!failed) {
        complain(launch, why);
    }
    failed = true;
}

// Lanes have to arrive at one instruction.
void arrive(Thread* thread, Work work) {
    Warp& warp = *thread->warp;
    if (warp.arrived && warp.work != work) {
        stop(*thread->block->launch, "lanes of a warp are at different instructions that belong to all");
    }
    warp.work = work;
    warp.arrived++;
}

void wait_for_warp(Thread* thread, int parity) {
    Warp& warp = *thread->warp;
    if (!warp.arrived) {
        warp.mask[parity] = 0;
    }
    warp.mask[parity] |= 1u << thread->lane;
    arrive(thread, nullptr);
    if (warp.arrived == warp.live) {
        release_warp(*thread->block, warp);
    } else {
        wait(thread, State::waits_for_warp);
    }
}

// The other lanes of the warp run next, unless races between them are looked for.
void give_way(Thread* thread) {
    if (settings().lockstep) {
        wait(thread, State::runs);
    }
}

void together(Thread* thread, Work work, void* operands) {
    Warp& warp = *thread->warp;
    warp.operands[thread->lane] = operands;
    arrive(thread, work);
    if (warp.arrived == LANES) {
        work(warp.operands);
        release_warp(*thread->block, warp);
    } else {
        wait(thread, State::waits_for_warp);
    }
}

void wait_for_block(Thread* thread) {
    Block& block = *thread->block;
    block.arrived++;
    if (block.arrived == block.live) {
        release_block(block);
    } else {
        wait(thread, State::waits_for_block);
    }
}

void finish(Thread* thread) {
    Block& block = *thread->block;
    Warp& warp = *thread->warp;
    thread->state = State::done;
    warp.live--;
    block.live--;
    if (warp.arrived && warp.arrived == warp.live && !warp.work) {
        release_warp(block, warp);
    }
    if (block.arrived && block.arrived == block.live) {
        release_block(block);
    }
}

// A stack as gpu_switch leaves it, so that switching to it calls gpu_enter.
void* new_stack(Thread* thread, int number) {
    char* top = room().stacks + STACK_BYTES * (number + 1) - (number % STAGGERS) * STAGGER_BYTES;
    void** stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;
    *--stack = nullptr;
    *--stack = reinterpret_cast<void*>(gpu_enter);
    void* const registers[] = {/*rbp*/ nullptr, /*rbx*/ thread, nullptr, nullptr, nullptr, nullptr};
    for (void* value : registers) {
        *--stack = value;
    }
    return stack;
}

void begin(Block& block) {
    for (int w = 0; w < block.warp_count; w++) {
        Warp& warp = block.warps[w];
        warp.first = w * LANES;
        warp.count = std::min(LANES, block.count - warp.first);
        warp.live = warp.count;
        warp.arrived = 0;
        warp.mask[0] = 0;
        warp.mask[1] = 0;
        warp.work = nullptr;
    }
    const dim3 size = block.launch->block;
    for (int i = 0; i < block.count; i++) {
        Thread& thread = block.threads[i];
        thread.warp = &block.warps[i / LANES];
        thread.block = &block;
        thread.lane = i % LANES;
        thread.parity = 0;
        thread.state = State::runs;
        thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        thread.stack_pointer = new_stack(&thread, i);
    }
}

int in_order(int number, int count) { return settings().backwards ? count - 1 - number : number; }

// Until none of its lanes can run; whether any could.
bool run_warp(Block& block, Warp& warp) {
    bool progress = false;
    bool again = warp.live > 0;
    while (again) {
        again = false;
        for (int lane = 0; lane < warp.count; lane++) {
            Thread& thread = block.threads[warp.first + in_order(lane, warp.count)];
            if (thread.state == State::runs) {
                room().current = &thread;
                gpu_switch(&block.scheduler, thread.stack_pointer);
                again = true;
                progress = true;
            }
        }
    }
    return progress;
}

bool release_parted_warps(Block& block) {
    bool released = false;
    for (int w = 0; w < block.warp_count; w++) {
        if (block.warps[w].arrived) {
            if (block.warps[w].work) {
                stop(*block.launch, "lanes of a warp are missing at an instruction that belongs to all");
            }
            release_warp(block, block.warps[w]);
            counts().parted_warps++;
            released = true;
        }
    }
    return released;
}

void run_block(const Launch& launch, dim3 index, Body body) {
    Block block{};
    block.launch = &launch;
    block.index = index;
    block.body = body;
    block.count = int(launch.block.x * launch.block.y * launch.block.z);
    block.live = block.count;
    block.threads = room().threads;
    block.warps = room().warps;
    block.warp_count = (block.count + LANES - 1) / LANES;
    begin(block);
    if (settings().poison) {
        memset(launch.shared, 0xff, launch.shared_bytes);
    }
    while (block.live) {
        bool progress = false;
        for (int w = 0; w < block.warp_count; w++) {
            progress |= run_warp(block, block.warps[in_order(w, block.warp_count)]);
        }
        if (!progress && !finish_awaited_copies(block) && !release_parted_warps(block)) {
            stop(launch, "the threads of a block wait for each other for ever");
        }
    }
    forget_copies();
}

constexpr Services SERVICES{
    run_block,      wait_for_warp, wait_for_block, give_way,            together,
    wait_for_phase, phase_over,    copy,           arrive_after_copies, copy_box,
    stop,           fail,          complain,
};

}  // namespace

extern "C" __attribute__((used, visibility("hidden"))) void gpu_run_fiber(Thread* thread) {
    thread->block->body(thread);
    finish(thread);
    void* never_continued;
    gpu_switch(&never_continued, thread->block->scheduler);
    __builtin_unreachable();
}

void wait(Thread* thread, State state) {
    thread->state = state;
    gpu_switch(&thread->stack_pointer, thread->block->scheduler);
}

bool execute(Launch launch, Run run) {
    launch.shared = room().shared;
    launch.current = &room().current;
    launch.services = &SERVICES;
    failed = false;
    run(launch);
    return !failed;
}

}  // namespace GPU
