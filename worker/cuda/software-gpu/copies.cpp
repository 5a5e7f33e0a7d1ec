// Asynchronous copies, done late or at once.

#include "copies.h"

#include <cstring>
#include <functional>
#include <vector>

#include "kernel/phases.h"
#include "settings.h"
#include "tensor_map.h"

namespace gpu {

namespace {

using Act = std::function<void()>;

struct Unfinished {
    Phases* phases;
    Act act;
    // What the barrier misses: an arrival, or these bytes.
    unsigned bytes;
};

std::vector<Act> issued[MOST_THREADS];
std::vector<Unfinished> unfinished;

std::vector<Act>& issued_by(Thread* thread) { return issued[thread - thread->block->threads]; }

bool is_awaited(const Block& block, const Phases* phases) {
    for (int i = 0; i < block.count; i++) {
        const Thread& thread = block.threads[i];
        if (thread.state == State::waits_for_phase && thread.awaited == phases) {
            return true;
        }
    }
    return false;
}

void finish(Block& block, const Unfinished& copy) {
    copy.act();
    if (copy.bytes) {
        copy.phases->bytes -= copy.bytes;
    } else {
        copy.phases->missing--;
    }
    if (copy.phases->settle()) {
        phase_over(block.threads, copy.phases);
    }
}

}  // namespace

// Of a block that is over: on a GPU they are done, and nobody sees it.
void forget_copies() {
    for (auto& copies : issued) {
        copies.clear();
    }
    unfinished.clear();
}

void wait_for_phase(Thread* thread, const Phases* phases, bool parity) {
    while (phases->parity == parity) {
        thread->awaited = phases;
        thread->awaited_parity = parity;
        wait(thread, State::waits_for_phase);
    }
}

void phase_over(Thread* thread, const Phases* phases) {
    Block& block = *thread->block;
    for (int i = 0; i < block.count; i++) {
        Thread& other = block.threads[i];
        const bool waits = other.state == State::waits_for_phase && other.awaited == phases;
        if (waits && other.awaited_parity != phases->parity) {
            other.state = State::runs;
        }
    }
}

void copy(Thread* thread, void* to, const void* from, unsigned bytes, unsigned from_bytes) {
    const Act act = [=] {
        memcpy(to, from, from_bytes);
        memset(static_cast<char*>(to) + from_bytes, 0, bytes - from_bytes);
    };
    if (settings().eager_copies) {
        act();
    } else {
        issued_by(thread).push_back(act);
    }
}

// One more is missing until the copies are done, so that the number that has to arrive stays the same.
void arrive_after_copies(Thread* thread, Phases* phases) {
    std::vector<Act>& copies = issued_by(thread);
    if (copies.empty()) {
        return;
    }
    phases->missing++;
    const Act all = [copies = std::move(copies)] {
        for (const Act& act : copies) {
            act();
        }
    };
    copies.clear();
    unfinished.push_back({phases, all, 0});
}

void copy_box(Thread* thread, void* to, const void* map, const int* at, int rank, Phases* phases) {
    const Launch& launch = *thread->block->launch;
    const Box box = box_of(launch, map, to, at, rank);
    const Unfinished copy{phases, [box] { load(box); }, box.bytes};
    if (settings().eager_copies) {
        finish(*thread->block, copy);
    } else {
        unfinished.push_back(copy);
    }
}

bool finish_awaited_copies(Block& block) {
    std::vector<Unfinished> awaited, others;
    for (Unfinished& copy : unfinished) {
        (is_awaited(block, copy.phases) ? awaited : others).push_back(std::move(copy));
    }
    unfinished = std::move(others);
    for (const Unfinished& copy : awaited) {
        finish(block, copy);
    }
    return !awaited.empty();
}

}  // namespace GPU
