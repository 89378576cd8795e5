// What reading a span has in common for all types: its ranges, heads a few at a time, and softmax.
#pragma once

#include <type_traits>

#include "kernels/attention_groups.h"
#include "kernels/attention_rows.h"

#if defined(__AVX512BF16__)

namespace kveik::KVEIK_ISA {

// A line of 64 bytes; where it is a row's tail, `mask` has a bit for each four bytes that belong to it, and the rest is 0.
template <bool tail>
[[gnu::always_inline]] inline __m512i line(const uint8_t* from, __mmask16 mask) {
    return tail ? _mm512_maskz_loadu_epi32(mask, from) : _mm512_loadu_si512(from);
}

inline __mmask16 mask_of(int bytes) { return __mmask16(bytes >= 64 ? 0xffff : bytes > 0 ? (1u << bytes / 4) - 1 : 0); }

// One span. `Reader` has
//     has_scales, bytes_per_number
//     has_nans                      a stored number may be one: then values outside the span must not even meet a weight of 0
//     prepare(head)                 the head's query into its prepared_bytes
//     score<heads, tail>(head)      scores of the range's slots, before problem.scale
//     narrow(head)                  weights, where scores were, as the next wants them
//     weigh<heads, tail>(head, at)  what the range's values from byte `at` of their rows on add to the sums: 64 dimensions
//     scored_most, weighed_most     for as many heads at once as registers hold sums for
// Loops over groups call nothing, because a call would spill all sums.
template <class Reader>
class SpanReader {
public:
    SpanReader(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to)
        : problem_(problem), span_(span), memory_(memory), to_(to), head_dim_(problem.cache.head_dim),
          row_bytes_(head_dim_ * value_bytes(problem.cache.type)), mask_(mask_of(row_bytes_ % 64)) {}

    void attend() {
        const int group = problem_.group;
        enter(span_.first / group_slots * group_slots);
        if (!span_.foreseen) Ahead(&halves_, false, half_slots * row_bytes_, Reader::has_scales, 1).some();
        if (!span_.prepared) prepare();
        clear(to_, group, head_dim_);
        for (;;) {
            read_range();
            if (stop_ == span_.stop) break;
            enter(first_ + range_positions);
        }
    }

protected:
    float* scores(int head) const { return memory_.scores + head * range_positions; }
    uint8_t* prepared(int head) const { return memory_.queries + prepared_bytes(head, head_dim_); }
    const float* query(int head) const { return span_.query + head * head_dim_; }
    float* sums(int head) const { return to_.sum + head * head_dim_; }

    // Sixteen scales.
    static f32x16 scales_of(const Half* group, int64_t offset) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group[0].scales + offset));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group[1].scales + offset));
        return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_set_m128i(high, low)), 16);
    }

    const Problem& problem_;
    const Span& span_;
    const SpanMemory& memory_;
    const Partial& to_;
    const int head_dim_, row_bytes_;
    const __mmask16 mask_;      // of a row's tail
    int first_ = 0, stop_ = 0;  // the range
    Halves halves_;

private:
    Reader& reader() { return static_cast<Reader&>(*this); }

    void prepare() {
        if (mask_) std::memset(memory_.queries, 0, prepared_bytes(problem_.group, head_dim_));
        for (int head = 0; head < problem_.group; ++head) reader().prepare(head);
    }

    void enter(int first) {
        first_ = first;
        stop_ = std::min(first + range_positions, span_.stop);
        find(problem_, span_, first_, stop_, halves_);
    }

    void read_range() {
        const int parts = parts_of(Reader::scored_most), weighed = parts_of(Reader::weighed_most);
        const int chunk = 64 * Reader::bytes_per_number, chunks = (row_bytes_ + chunk - 1) / chunk;
        // While keys are read their values are fetched; then the next keys, of this span or the next.
        Ahead values(&halves_, true, half_slots * row_bytes_, Reader::has_scales, parts * halves_.groups);
        for (int part = 0; part < parts; ++part) score_part(part, parts, values);
        for (int head = 0; head < problem_.group; ++head) exponentiate(head);
        Halves following;
        const bool any = find_following(following);
        Ahead next(any ? &following : nullptr, false, half_slots * row_bytes_, Reader::has_scales,
                   weighed * chunks * halves_.groups);
        if constexpr (Reader::has_nans) clear_outside();
        for (int head = 0; head < problem_.group; ++head) reader().narrow(head);
        for (int part = 0; part < weighed; ++part)
            for (int at = 0; at < row_bytes_; at += chunk) weigh_part(part, weighed, at, at + chunk > row_bytes_, next);
    }

    bool find_following(Halves& found) const {
        if (stop_ < span_.stop) {
            find(problem_, span_, stop_, std::min(stop_ + range_positions, span_.stop), found);
            return true;
        }
        if (!span_.next) return false;
        const int first = span_.next->first / group_slots * group_slots;
        find(problem_, *span_.next, first, std::min(first + range_positions, span_.next->stop), found);
        return true;
    }

    // Values of groups that are not all in the span are read from a copy that is 0 where they are not. Scores need no such
    // care: what is outside never gets out of its lane.
    void clear_outside() {
        const int groups = halves_.groups;
        if (span_.first > first_) copy_inside(0, memory_.slots);
        if (span_.stop < first_ + groups * group_slots && (groups > 1 || span_.first <= first_))
            copy_inside(groups - 1, memory_.slots + group_slots * row_bytes_);
    }

    void copy_inside(int group, uint8_t* copy) {
        const uint32_t lanes = lanes_in(span_, first_ + group * group_slots);
        for (int slot = 0; slot < group_slots; ++slot) {
            Half& half = halves_.at[2 * group + slot / half_slots];
            uint8_t* to = copy + slot * row_bytes_;
            const uint8_t* from = half.rows + halves_.values + slot % half_slots * row_bytes_;
            const bool inside = lanes >> slot & 1;
            for (int i = 0; i < row_bytes_; i += 32) {
                const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), inside ? part : _mm256_setzero_si256());
            }
        }
        for (int i = 0; i < 2; ++i) halves_.at[2 * group + i].rows = copy + i * half_slots * row_bytes_ - halves_.values;
    }

    int parts_of(int most) const { return (problem_.group + most - 1) / most; }

    // Parts of heads are of equal size: 14 heads are 7 and 7.
    void score_part(int part, int parts, Ahead& ahead) {
        const int head = problem_.group * part / parts, count = problem_.group * (part + 1) / parts - head;
        by_count<Reader::scored_most>(count, [&](auto heads) {
            if (mask_) reader().template score<heads(), true>(head, ahead);
            else reader().template score<heads(), false>(head, ahead);
        });
    }

    void weigh_part(int part, int parts, int at, bool tail, Ahead& ahead) {
        const int head = problem_.group * part / parts, count = problem_.group * (part + 1) / parts - head;
        by_count<Reader::weighed_most>(count, [&](auto heads) {
            if (tail) reader().template weigh<heads(), true>(head, at, ahead);
            else reader().template weigh<heads(), false>(head, at, ahead);
        });
    }

    template <int heads, class Work>
    static void by_count(int count, Work&& work) {
        if (count == heads) return work(std::integral_constant<int, heads>{});
        if constexpr (heads > 1) by_count<heads - 1>(count, work);
    }

    // A head's scores become weights; 0 outside the span.
    void exponentiate(int head) {
        float* scores = this->scores(head);
        const int count = halves_.groups * group_slots;
        const float scale = problem_.soft_cap == 0 ? problem_.scale * log2e : problem_.scale;
        f32x16 most = splat(to_.most[head]);
        hide_outside(scores);
        for (int at = 0; at < count; at += group_slots) {
            f32x16 s = load(scores + at) * scale;
            if (problem_.soft_cap != 0) s = s == splat(-INFINITY) ? s : capped(s, problem_.soft_cap) * log2e;
            store(scores + at, s);
            most = max(most, s);
        }
        raise(to_, head, std::ceil(largest(most)), head_dim_);
        f32x16 total{};
        for (int at = 0; at < count; at += group_slots) {
            const f32x16 weight = exp2(load(scores + at) - to_.most[head]);
            store(scores + at, weight);
            total += weight;
        }
        to_.total[head] += sum(total);
    }

    void hide_outside(float* scores) const {
        const int last = halves_.groups - 1;
        for (int group : {0, last}) {
            const __mmask16 outside = __mmask16(~lanes_in(span_, first_ + group * group_slots));
            _mm512_mask_storeu_ps(scores + group * group_slots, outside, _mm512_set1_ps(-INFINITY));
        }
    }
};

}  // namespace kveik::KVEIK_ISA

#endif
