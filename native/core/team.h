// The threads of one parallel region. Kernels are given a Team and take their share of the work; they open no region themselves.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kveik {

// What the members of a team have in common. Each line that is written to lies alone in its cache line.
struct TeamState {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
    alignas(64) std::atomic<int64_t> taken[2]{};
};

// Pauses before a waiting thread offers its core to others: some 20 microseconds, longer than phases differ on a quiet machine.
constexpr int spins_before_yield = 1000;

class Team {
public:
    Team(int rank, int size, TeamState* state) : rank(rank), size(size), state_(state), round_(state->round.load()) {}

    const int rank;
    const int size;

    // Everybody has come this far, and sees what the others wrote before.
    void barrier() {
        if (size == 1) return;
        const int round = round_++;
        if (state_->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            state_->arrived.store(0, std::memory_order_relaxed);
            state_->round.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; state_->round.load(std::memory_order_acquire) == round; ++spins) {
            if (spins < spins_before_yield) pause();
            else sched_yield();
        }
    }

    struct Share {
        int64_t first, last;
    };

    // This member's part of [0, count), in whole grains: contiguous, the same in every call with the same count.
    Share share(int64_t count, int64_t grain = 1) const {
        const int64_t grains = (count + grain - 1) / grain;
        const int64_t first = grains * rank / size, last = grains * (rank + 1) / size;
        return {std::min(first * grain, count), std::min(last * grain, count)};
    }

    // work(first, last) for all of [0, count), a grain at a time, by whoever is free; ends with a barrier.
    template <class Work>
    void each(int64_t count, int64_t grain, Work&& work) {
        if (size == 1) {
            for (int64_t first = 0; first < count; first += grain) work(first, std::min(first + grain, count));
            return;
        }
        // Two counters: who is in this loop has left the one before, whose counter is made ready for the next.
        std::atomic<int64_t>& taken = state_->taken[loop_ & 1];
        if (rank == 0) state_->taken[(loop_ + 1) & 1].store(0, std::memory_order_relaxed);
        ++loop_;
        for (;;) {
            const int64_t first = taken.fetch_add(grain, std::memory_order_relaxed);
            if (first >= count) break;
            work(first, std::min(first + grain, count));
        }
        barrier();
    }

private:
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    TeamState* state_;
    int round_;
    unsigned loop_ = 0;
};

// work(team) on `threads` threads; returns when all are done.
template <class Work>
void with_team(int threads, Work&& work) {
    TeamState state;
    if (threads <= 1) {
        Team team(0, 1, &state);
        work(team);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        // The system may give fewer threads than asked for.
        Team team(omp_get_thread_num(), omp_get_num_threads(), &state);
        work(team);
    }
}

}  // namespace kveik
