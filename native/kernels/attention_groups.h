// Slots of a span eight and sixteen at a time, where they lie.
#pragma once

#include "kernels/attention_span.h"
#include "kernels/kv_types.h"

namespace kveik::KVEIK_ISA {

constexpr int half_slots = 8, group_slots = 16;

// Eight consecutive positions; blocks hold eight slots or more.
struct Half {
    const uint8_t* rows;
    const uint8_t* scales;  // eight bfloat16, where the type has them
};

// The keys of a range, [groups of sixteen][2]. Their values lie `values` bytes further. Where all of a half is outside the span,
// the other half of its group stands in for it, as a block that nobody may read: so it is to be masked.
struct Halves {
    Half at[range_positions / half_slots];
    int groups;
    int64_t values;
};

// Positions [first, stop) of the span, `first` a multiple of 16.
inline void find(const Problem& problem, const Span& span, int first, int stop, Halves& found) {
    const CacheView& cache = problem.cache;
    const int shift = __builtin_ctz(cache.block_size), inside = cache.block_size - 1;
    const int64_t offset = cache.scales_offset(), row_bytes = offset >> shift, record = cache.record_bytes();
    found.values = cache.kv_heads * record;
    found.groups = (stop - first + group_slots - 1) / group_slots;
    const auto half = [&](int position) -> Half {
        const uint8_t* keys = cache.base + span.table[position >> shift] * cache.block_stride + span.kv_head * record;
        const int within = position & inside;
        return {keys + within * row_bytes, keys + offset + 2 * within};
    };
    for (int i = 0, at = first; i < found.groups; ++i, at += group_slots) {
        Half* to = found.at + 2 * i;
        if (at + half_slots > span.first) to[0] = half(at);
        if (at + half_slots < span.stop) to[1] = half(at + half_slots);
        else to[1] = to[0];
        if (at + half_slots <= span.first) to[0] = to[1];
    }
}

// Lanes of the group at `at` that are in the span, one bit each.
inline uint32_t lanes_in(const Span& span, int at) {
    const int low = std::max(span.first - at, 0), high = std::min(span.stop - at, group_slots);
    return ((1u << high) - 1) & ~((1u << low) - 1);
}

// Fetches what a reader will want next into the second-level cache, a few lines at a time, while it computes over what it has.
// Records lie anywhere in the pool, so that the processor cannot foresee where the next one begins.
class Ahead {
public:
    // All rows and scales of `halves`, of their keys or their values, within so many calls of `some`.
    Ahead(const Halves* halves, bool values, int half_bytes, bool scales, int calls)
        : half_(halves ? halves->at : nullptr), last_(halves ? half_ + 2 * halves->groups : nullptr),
          offset_(halves && values ? halves->values : 0), lines_(half_bytes / 64), scales_(scales) {
        const int all = int(last_ - half_) * lines_;
        each_ = (all + calls - 1) / calls;
    }

    [[gnu::always_inline]] void some() {
        for (int i = 0; i < each_ && half_ != last_; ++i) {
            __builtin_prefetch(half_->rows + offset_ + 64 * line_, 0, 2);
            if (++line_ < lines_) continue;
            if (scales_) __builtin_prefetch(half_->scales + offset_, 0, 2);
            line_ = 0;
            ++half_;
        }
    }

private:
    const Half *half_, *last_;
    int64_t offset_;
    int lines_, each_, line_ = 0;
    bool scales_;
};

}  // namespace kveik::KVEIK_ISA
