// What the ranks of a communicator do together.
#pragma once

#include "peers.h"

namespace gpu::nccl {

enum class Kind : int { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };

// ncclDataType_t and ncclRedOp_t, as far as they are here.
constexpr int FLOAT32 = 7;
constexpr int FLOAT64 = 8;
constexpr int BFLOAT16 = 9;
constexpr int SUM = 0;
constexpr int MAX = 2;

struct Operation {
    Kind kind;
    const char* from;
    char* to;
    // As NCCL counts: of what is received for a reduce-scatter, of what is sent for an all-gather.
    size_t count;
    int type;
    int reduce;
    // The root of a broadcast; whom a send or receive is for.
    int peer;
};

// 0: a type that is not here.
size_t bytes_of(int type);

// What it reads and writes, in bytes.
size_t read_bytes(const Operation& operation, int rank, int world);
size_t written_bytes(const Operation& operation, int rank, int world);

// Does the operations of one group. All ranks are at their group of this number.
void run(Peers& peers, const std::vector<Operation>& group, uint64_t number);

}  // namespace gpu::nccl
