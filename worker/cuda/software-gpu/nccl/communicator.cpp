#include "communicator.h"

#include "../counts.h"

namespace gpu::nccl {

Communicator::Communicator(const Place& place) : place_(place), thread_([this] { run(); }) {}

Communicator::~Communicator() {
    {
        // Not between the thread's look and its wait.
        std::lock_guard turn(lock_);
        stop_.set();
        changed_.notify_all();
    }
    thread_.join();
    std::lock_guard turn(counts().lock);
    for (const auto& errand : errands_) {
        errand->begin = [] {};
        end(*errand);
    }
}

Result Communicator::state() {
    std::lock_guard turn(lock_);
    return state_;
}

std::string Communicator::message() {
    std::lock_guard turn(lock_);
    return reported_;
}

void Communicator::settle(Result state, const std::string& message) {
    std::lock_guard turn(lock_);
    // The first error stays.
    if (state_ == DONE || state_ == IN_PROGRESS) {
        state_ = state;
        reported_ = message;
    }
    changed_.notify_all();
}

void Communicator::post(Duty duty) {
    std::lock_guard turn(lock_);
    duties_.push_back(std::move(duty));
    changed_.notify_all();
}

void Communicator::wait_until_idle() {
    std::unique_lock turn(lock_);
    changed_.wait(turn, [this] { return state_ != IN_PROGRESS; });
}

void Communicator::run() {
    try {
        Peers peers(place_, stop_);
        settle(DONE, "");
        work(peers);
    } catch (const Failure& failure) {
        settle(failure.result, failure.message);
    } catch (const Stopped&) {
    }
}

void Communicator::work(Peers& peers) {
    while (true) {
        Duty duty;
        {
            std::unique_lock turn(lock_);
            changed_.wait(turn, [this] { return stop_.is_set() || !duties_.empty(); });
            if (stop_.is_set()) {
                throw Stopped{};
            }
            duty = std::move(duties_.front());
            duties_.pop_front();
        }
        duty(peers);
    }
}

void Communicator::launch(std::vector<Operation> group, void* stream, uint64_t number) {
    auto errand = std::make_shared<Errand>();
    errand->begin = [this, errand, group, number] {
        post([this, errand, group, number](Peers& peers) {
            nccl::run(peers, group, number);
            std::lock_guard turn(counts().lock);
            errands_.erase(errand);
            end(*errand);
        });
    };
    std::lock_guard turn(counts().lock);
    errands_.insert(errand);
    give(stream, errand);
}

Result Communicator::start(std::vector<Operation> group, void* stream) {
    uint64_t number = 0;
    {
        std::lock_guard turn(lock_);
        if (state_ != DONE) {
            return state_ == IN_PROGRESS ? INVALID_USAGE : state_;
        }
        number = launched_++;
        state_ = number % 2 ? DONE : IN_PROGRESS;
    }
    if (number % 2) {
        launch(std::move(group), stream, number);
        return DONE;
    }
    post([this, group = std::move(group), stream, number](Peers&) {
        launch(group, stream, number);
        settle(DONE, "");
    });
    return IN_PROGRESS;
}

Result Communicator::leave() {
    {
        std::lock_guard turn(lock_);
        if (state_ != DONE) {
            return state_ == IN_PROGRESS ? INVALID_USAGE : state_;
        }
        state_ = IN_PROGRESS;
    }
    post([this](Peers& peers) {
        const char goodbye = 'b';
        char other = 0;
        for (int distance = 1; distance < peers.world(); distance++) {
            const int to = (peers.rank() + distance) % peers.world();
            const int from = (peers.rank() + peers.world() - distance) % peers.world();
            peers.exchange(to, &goodbye, 1, from, &other, 1);
        }
        settle(DONE, "");
    });
    return IN_PROGRESS;
}

}  // namespace gpu::nccl
