// A rank's communicator: a thread that connects, and then does one operation after another.
//
//   ncclAllReduce ──▶ launch: the thread puts an errand into the stream     IN_PROGRESS until it is there
//   the stream is as far ──▶ the errand begins: the thread runs it
//   it is done ──▶ the errand is over, and the stream goes on
//
// Half of the operations are put into the stream by the caller, so that both answers are met.
// Where a peer is gone, the errand is not over until somebody aborts.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "../streams.h"
#include "operations.h"

namespace gpu::nccl {

class Communicator {
   public:
    explicit Communicator(const Place& place);
    // Ends what is in flight.
    ~Communicator();

    int rank() const { return place_.rank; }
    int world() const { return place_.world; }
    // The error, if there is one, and else whether the last call is still being carried out.
    Result state();
    std::string message();

    Result start(std::vector<Operation> group, void* stream);
    // Says goodbye to the others once they do.
    Result leave();
    void wait_until_idle();

   private:
    using Duty = std::function<void(Peers&)>;

    void run();
    void work(Peers& peers);
    void post(Duty duty);
    void launch(std::vector<Operation> group, void* stream, uint64_t number);
    void settle(Result state, const std::string& message);

    const Place place_;
    Stop stop_;

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<Duty> duties_;
    Result state_ = IN_PROGRESS;
    std::string reported_;
    uint64_t launched_ = 0;
    // In streams, and not over. Under the lock of the counts.
    std::set<std::shared_ptr<Errand>> errands_;

    std::thread thread_;
};

}  // namespace gpu::nccl
