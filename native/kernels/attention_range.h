// One query's heads over a range of a row's positions: the unit of decoding. Partial softmaxes of ranges are folded together
// (flash decoding: Dao et al. 2023; the fold is the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867).
#pragma once

#include "kernels/attention.h"
#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

// Positions are cut at multiples of this, whatever else is in the step: a row's sums are always made the same way.
constexpr int range_positions = 256;

// What one query's heads, those that share a kv head, saw in some positions.
struct Partial {
    float* most;   // [heads]: the largest score
    float* total;  // [heads]: sum of exp(score - most)
    float* sum;    // [heads, head_dim]: sum of exp(score - most) * value
};

// What all queries of a step have in common.
struct Problem {
    const float* queries;
    int64_t stride;
    float* out;
    int64_t out_stride;
    int heads, group;  // group: heads per kv head
    float scale, soft_cap;
    CacheView cache;
    StepRows rows;
};

// Positions [first, stop), within one range, of a row: query [group, head_dim]; scores: workspace [group, range_positions].
struct RangeTask {
    const float* query;
    const int32_t* table;
    int kv_head, first, stop;
};

inline float capped(float score, float soft_cap) { return soft_cap == 0 ? score : soft_cap * std::tanh(score / soft_cap); }

inline f32x16 capped(f32x16 score, float soft_cap) {
    const f32x16 grown = exp(score * (2.0f / soft_cap));
    return soft_cap * (1.0f - 2.0f / (grown + 1.0f));
}

// into = both; a part that is not a number makes the whole so.
inline void fold(const Partial& into, const Partial& from, int group, int head_dim) {
    for (int head = 0; head < group; ++head) {
        const float before = into.most[head], most = before > from.most[head] ? before : from.most[head];
        const float kept = std::exp(before - most), added = std::exp(from.most[head] - most);
        into.most[head] = most;
        into.total[head] = into.total[head] * kept + from.total[head] * added;
        float *sum = into.sum + head * head_dim, *more = from.sum + head * head_dim;
        for (int i = 0; i < head_dim; i += 16) store(sum + i, load(sum + i) * kept + load(more + i) * added);
    }
}

inline void finish(const Partial& all, int group, int head_dim, float* out) {
    for (int head = 0; head < group; ++head) {
        const float inverse = 1.0f / all.total[head];
        for (int i = 0; i < head_dim; i += 16)
            store(out + head * head_dim + i, load(all.sum + head * head_dim + i) * inverse);
    }
}

// Scores [group, range_positions] of `count` positions become exp(score - most); what lies behind, up to a multiple of 16, 0.
inline void exponentiate(float* scores, int group, int count, float soft_cap, const Partial& to) {
    for (int head = 0; head < group; ++head) {
        float* row = scores + head * range_positions;
        const int whole = (count + 15) / 16 * 16;
        for (int i = count; i < whole; ++i) row[i] = -INFINITY;
        f32x16 most = splat(-INFINITY);
        for (int i = 0; i < whole; i += 16) {
            f32x16 score = load(row + i);
            if (soft_cap != 0) {
                // Behind the count the cap would make a number of -infinity.
                score = score == splat(-INFINITY) ? score : capped(score, soft_cap);
                store(row + i, score);
            }
            most = max(most, score);
        }
        to.most[head] = largest(most);
        f32x16 total{};
        for (int i = 0; i < whole; i += 16) {
            const f32x16 p = exp(load(row + i) - to.most[head]);
            store(row + i, p);
            total += p;
        }
        to.total[head] = sum(total);
    }
}

void attend_range_f32(const Problem& problem, const RangeTask& task, float* scores, const Partial& to);

}  // namespace kveik::KVEIK_ISA
