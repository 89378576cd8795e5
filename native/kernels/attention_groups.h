// Sixteen slots at a time, where they lie or, at a span's ends, as a copy that holds nothing of what is outside.
#pragma once

#include "kernels/attention_span.h"

namespace kveik::KVEIK_ISA {

constexpr int group_slots = 16;

// Rows of sixteen consecutive positions: the first eight and the next eight, since blocks hold eight slots or more.
struct Group {
    const uint8_t* rows[2];
    const uint8_t* scales[2];  // eight bfloat16 each, where the type has them
};

enum class Part { keys, values };

// Positions [at, at + 16), `at` a multiple of 16, of which those in the span are read.
template <Part part>
inline Group group_at(const Problem& problem, const Span& span, int at, uint8_t* copy) {
    const CacheView& cache = problem.cache;
    const int64_t row_bytes = int64_t(cache.head_dim) * value_bytes(cache.type), offset = cache.scales_offset();
    const auto record = [&](int position) {
        const int64_t block = span.table[position / cache.block_size];
        return part == Part::keys ? cache.keys(block, span.kv_head) : cache.values(block, span.kv_head);
    };
    if (at >= span.first && at + group_slots <= span.stop) {
        const int within = at % cache.block_size;
        const uint8_t* low = record(at);
        if (cache.block_size == 8) {
            const uint8_t* high = record(at + 8);
            return {{low, high}, {low + offset, high + offset}};
        }
        const uint8_t* rows = low + within * row_bytes;
        const uint8_t* scales = low + offset + 2 * within;
        return {{rows, rows + 8 * row_bytes}, {scales, scales + 16}};
    }
    uint8_t* scales = copy + group_slots * row_bytes;
    std::memset(copy, 0, group_slots * row_bytes + 2 * group_slots);
    for (int slot = 0; slot < group_slots; ++slot) {
        const int position = at + slot;
        if (position < span.first || position >= span.stop) continue;
        const uint8_t* from = record(position);
        const int within = position % cache.block_size;
        std::memcpy(copy + slot * row_bytes, from + within * row_bytes, row_bytes);
        if (has_scales(cache.type)) std::memcpy(scales + 2 * slot, from + offset + 2 * within, 2);
    }
    return {{copy, copy + 8 * row_bytes}, {scales, scales + 16}};
}

// Lanes of the group at `at` that are in the span, one bit each.
inline uint32_t lanes_in(const Span& span, int at) {
    const int low = std::max(span.first - at, 0), high = std::min(span.stop - at, group_slots);
    return ((1u << high) - 1) & ~((1u << low) - 1);
}

// Fetches what a span reads into the second-level cache, some bytes ahead of the reader: the keys of a range, its values, the
// next range. Records lie anywhere in the pool, so that the processor cannot foresee where the next one begins.
class Ahead {
public:
    Ahead(const Problem& problem, const Span& span, int bytes) : problem_(problem), span_(span) {
        start_ = position_ = span.first / group_slots * group_slots;
        turn();
        for (int i = 0; i < bytes; i += 256) more();
    }

    // Four lines more.
    void more() {
        if (at_ >= end_) turn();
        for (int i = 0; i < 4; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
        at_ += 256;
    }

private:
    void turn() {
        if (position_ >= span_.stop || position_ >= start_ + range_positions) {
            if (values_) start_ += range_positions;
            values_ = !values_;
            position_ = start_;
            if (start_ >= span_.stop) {
                at_ = end_ = nullptr;
                return;
            }
        }
        const CacheView& cache = problem_.cache;
        const int64_t block = span_.table[position_ / cache.block_size];
        const uint8_t* record = values_ ? cache.values(block, span_.kv_head) : cache.keys(block, span_.kv_head);
        const int64_t row_bytes = cache.scales_offset() / cache.block_size;
        const int within = position_ % cache.block_size, slots = std::min(group_slots, cache.block_size);
        at_ = record + within * row_bytes;
        end_ = at_ + slots * row_bytes;
        if (within + slots == cache.block_size) end_ = record + cache.record_bytes();
        position_ += slots;
    }

    const Problem& problem_;
    const Span& span_;
    int start_, position_;
    bool values_ = false;
    const uint8_t *at_ = nullptr, *end_ = nullptr;
};

}  // namespace kveik::KVEIK_ISA
