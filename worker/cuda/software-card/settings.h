// What `run` and its user chose: read from the environment, once.
#pragma once

#include <cstdint>
#include <string>

namespace card {

struct Settings {
    // Kernels are executed; otherwise calls are counted, and nothing is computed.
    bool execute;
    // Ten times CUDA's compute capability. 6.0 has no tensor cores, so cubecl writes kernels that this card
    // can execute.
    int capability;
    // CARD_MEMORY_GIB
    uint64_t memory_bytes;
    // CARD_CARDS
    int cards;
    // CARD_POISON: fresh device memory is full of NaN instead of zeros.
    bool poison;
    // CARD_VERBOSE: a line on stderr for every launch.
    bool verbose;
    // CARD_TRACE: the file that counts are appended to at exit; empty for none.
    std::string trace;
    // Where `run` has put the headers that kernels include.
    std::string headers;
    // Where kernels are kept, compiled or, when counting, as sources.
    std::string kernels;
};

const Settings& settings();

}  // namespace card
