// One query's heads over a span of a row's positions: the unit of decoding. Softmaxes of spans are folded together
// (flash decoding: Dao et al. 2023; the fold is the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867).
#pragma once

#include "kernels/attention.h"
#include "kernels/attention_exp.h"

namespace kveik::KVEIK_ISA {

// Spans are multiples of this many positions, and begin at one.
constexpr int span_step = 128;

// A row is cut into so many spans at most, so that what several threads found of it needs little memory.
constexpr int spans_most = 33;

// A span is computed in ranges of so many positions: all scores, then all values.
constexpr int range_positions = 256;

// What one query's heads, those that share a kv head, saw in some positions.
struct Partial {
    float* most;   // [heads]: the largest score in units of log 2, rounded up to a whole number
    float* total;  // [heads]: sum of 2^(score - most)
    float* sum;    // [heads, head_dim]: sum of 2^(score - most) * value
};

// What all queries of a step have in common.
struct Problem {
    const float* queries;
    int64_t stride;
    float* out;
    int64_t out_stride;
    int group;  // heads per kv head
    float scale, soft_cap;
    CacheView cache;
    StepRows rows;
};

// Positions [first, stop) of a row for the heads of one kv head, whose query is [group, head_dim].
struct Span {
    const float* query;
    const int32_t* table;
    int kv_head, first, stop;
    const Span* next;  // what the same thread reads next, where that is known
    bool foreseen;     // it was some span's `next`
    bool prepared;     // the thread's memory holds this query already
};

// Memory of one thread for a span, all of it aligned to 64 bytes.
struct SpanMemory {
    float* scores;     // [group, range_positions]
    uint8_t* queries;  // the query as the kernel wants it: prepared_bytes
    uint8_t* slots;    // [2, 16, head_dim] two-byte numbers at most: groups of slots that are not whole
};

// Eight bytes a dimension, and a line for what a kernel wants to know of a head besides.
constexpr int prepared_extra = 64;
constexpr size_t prepared_bytes(int group, int head_dim) {
    return size_t(group) * ((head_dim + 63) / 64 * 64 * 8 + prepared_extra);
}

inline void clear(const Partial& partial, int group, int head_dim) {
    for (int head = 0; head < group; ++head) {
        partial.most[head] = -INFINITY;
        partial.total[head] = 0;
    }
    std::memset(partial.sum, 0, sizeof(float) * group * head_dim);
}

// `most` of a head grows; what was summed up before keeps its share.
inline void raise(const Partial& partial, int head, float most, int head_dim) {
    const float before = partial.most[head];
    partial.most[head] = most;
    if (before == most || before == -INFINITY) return;
    const float kept = std::exp2(before - most);
    partial.total[head] *= kept;
    float* sum = partial.sum + head * head_dim;
    for (int i = 0; i < head_dim; i += 16) store(sum + i, load(sum + i) * kept);
}

// into = both.
inline void fold(const Partial& into, const Partial& from, int group, int head_dim) {
    for (int head = 0; head < group; ++head) {
        raise(into, head, into.most[head] > from.most[head] ? into.most[head] : from.most[head], head_dim);
        const float added = std::exp2(from.most[head] - into.most[head]);
        into.total[head] += from.total[head] * added;
        float *sum = into.sum + head * head_dim, *more = from.sum + head * head_dim;
        for (int i = 0; i < head_dim; i += 16) store(sum + i, load(sum + i) + load(more + i) * added);
    }
}

inline void finish(const Partial& all, int group, int head_dim, float* out) {
    for (int head = 0; head < group; ++head) {
        const float inverse = 1.0f / all.total[head];
        for (int i = 0; i < head_dim; i += 16)
            store(out + head * head_dim + i, load(all.sum + head * head_dim + i) * inverse);
    }
}

// What a span's positions hold, from nothing: `to` is cleared first.
using SpanKernel = void(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to);

SpanKernel attend_span_f32;   // float32 arithmetic, every type, every instruction set
// Where __AVX512BF16__ is:
SpanKernel attend_span_bf16;  // bfloat16 products; other types' spans go on to who knows them
SpanKernel attend_span_int8;  // products of bytes

}  // namespace kveik::KVEIK_ISA
