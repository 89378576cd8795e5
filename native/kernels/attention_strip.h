// What a panel of queries works in: its strips, and the tile of keys and values that they meet.
#pragma once

#include "kernels/attention_chunk.h"
#include "kernels/attention_exp.h"

namespace kveik::KVEIK_ISA {

// What a strip's queries saw of some keys.
struct StripPartial {
    float* most;   // [strip_lanes], in units of log 2
    float* total;  // [strip_lanes]
    float* sums;   // [head_dim][strip_lanes]
};

inline StripPartial partial_at(uint8_t* memory) {
    float* most = reinterpret_cast<float*>(memory);
    return {most, most + strip_lanes, most + 2 * strip_lanes};
}

inline void clear(const StripPartial& partial, int head_dim) {
    for (int l = 0; l < strip_lanes; ++l) {
        partial.most[l] = -INFINITY;
        partial.total[l] = 0;
    }
    std::memset(partial.sums, 0, sizeof(float) * strip_lanes * head_dim);
}

// into = both, in so many lanes. What is multiplied with a whole power of two keeps its bits.
inline void fold(const StripPartial& into, const StripPartial& from, int lanes, int head_dim) {
    for (int v = 0; v < lanes; v += 16) {
        const f32x16 before = load(into.most + v), more = load(from.most + v), now = max(before, more);
        // Where nothing has been seen yet, both shares are exp(-infinity).
        const f32x16 top = now == splat(-INFINITY) ? f32x16{} : now;
        const f32x16 kept = exp2(before - top), added = exp2(more - top);
        store(into.most + v, now);
        store(into.total + v, load(into.total + v) * kept + load(from.total + v) * added);
        float* sum = into.sums + v;
        const float* other = from.sums + v;
        for (int i = 0; i < head_dim; ++i, sum += strip_lanes, other += strip_lanes)
            store(sum, load(sum) * kept + load(other) * added);
    }
}

// One strip's queries, and what was seen of all keys and of a span of them.
struct Strip {
    uint32_t* queries;   // [steps][strip_lanes]
    int32_t* positions;  // [strip_lanes]
    int width;           // lanes that are computed: those in use, in whole sixteens
    StripPartial all, span;
};

// Where things lie in a panel's memory.
struct Memory {
    uint8_t* base;
    int head_dim;

    template <class Number>
    Number* at(size_t offset) const {
        return reinterpret_cast<Number*>(base + offset);
    }
    size_t row() const { return size_t(4) * head_dim; }
    size_t strip_bytes() const { return strip_lanes * (row() + 4) + 2 * strip_partial_bytes(head_dim); }
    Strip strip(int index, int width) const {
        uint8_t* queries = base + index * strip_bytes();
        uint8_t* positions = queries + strip_lanes * row();
        uint8_t* all = positions + strip_lanes * 4;
        return {reinterpret_cast<uint32_t*>(queries), reinterpret_cast<int32_t*>(positions), width, partial_at(all),
                partial_at(all + strip_partial_bytes(head_dim))};
    }
    size_t strips() const { return panel_strips_most * strip_bytes(); }
    uint32_t* keys() const { return at<uint32_t>(strips()); }                           // [tile_keys][steps]
    uint32_t* values() const { return at<uint32_t>(strips() + tile_keys * row()); }     // [tile_keys / per_word][head_dim]
    float* scores() const { return at<float>(strips() + 2 * tile_keys * row()); }       // [tile_keys][strip_lanes]
    float* scales() const { return scores() + tile_keys * strip_lanes; }                // keys, then values
    uint32_t* rows() const { return reinterpret_cast<uint32_t*>(scales() + 2 * tile_keys); }  // two rows, and zeros
    size_t bytes() const { return strips() + 2 * tile_keys * row() + 4 * tile_keys * (strip_lanes + 2) + 3 * row(); }
};

}  // namespace kveik::KVEIK_ISA
