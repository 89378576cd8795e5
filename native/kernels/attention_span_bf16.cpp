// A span of keys and values by bfloat16 products (vdpbf16ps), summed up in float32.
//
// Keys: sixteen slots at a time. Four rows of four 128-bit lanes are transposed to vectors that hold some dimensions of four
// slots; a query's dimensions, repeated in all four lanes, meet them. Every head of the group uses the same vectors.
// Values: rows of two slots are interleaved to pairs of one dimension, which meet the pair of weights.
// Numbers of one byte become bfloat16 by a table on the way; their scales go to the scores and to the weights.
#include "kernels/attention_groups.h"
#include "kernels/attention_rows.h"
#include "kernels/kv_types.h"

#if defined(__AVX512BF16__)

namespace kveik::KVEIK_ISA {

namespace {

// How far memory is read ahead: latency times bandwidth is some 4 KB, and values are read in another order than they lie.
constexpr int bytes_ahead = 12288;

// A part of the heads of a group: as many as registers hold sums for.
constexpr int scored_most = 8, weighed_most = 6;

inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// The bytes of a row from `chunk` on, 64 at most; zeros behind the row's end.
inline __m512i line(const uint8_t* row, int chunk, int row_bytes) {
    const int left = row_bytes - chunk;
    if (left >= 64) return _mm512_loadu_si512(row + chunk);
    return _mm512_maskz_loadu_epi32(__mmask16((1u << left / 4) - 1), row + chunk);
}

// Sixteen scales of a group.
inline f32x16 scales_of(const Group& group) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.scales[0]));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.scales[1]));
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_set_m128i(high, low)), 16);
}

// [head][8 dimensions]: as bfloat16, four times over; zeros behind the last.
void prepare(const float* query, int group, int head_dim, uint8_t* prepared) {
    std::memset(prepared, 0, prepared_bytes(group, head_dim));
    for (int head = 0; head < group; ++head, query += head_dim) {
        uint8_t* to = prepared + head * prepared_bytes(1, head_dim);
        for (int i = 0; i < head_dim; i += 16, to += 128) {
            const __m512i numbers = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(query + i)));
            _mm512_store_si512(to, _mm512_shuffle_i32x4(numbers, numbers, 0x00));
            _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(numbers, numbers, 0x55));
        }
    }
}

// One span, by the heads that a member is called for.
template <class Rows>
class SpanReader {
public:
    SpanReader(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to)
        : problem_(problem), span_(span), memory_(memory), to_(to), head_dim_(problem.cache.head_dim),
          row_bytes_(head_dim_ * Rows::bytes_per_number), query_bytes_(int(prepared_bytes(1, head_dim_))),
          ahead_(problem, span, bytes_ahead) {}

    void attend() {
        const int group = problem_.group;
        prepare(span_.query, group, head_dim_, memory_.queries);
        clear(to_, group, head_dim_);
        for (first_ = span_.first / group_slots * group_slots; first_ < span_.stop; first_ += range_positions) {
            stop_ = std::min(first_ + range_positions, span_.stop);
            each_part<scored_most>(0, group, [&](auto heads, int head) { score<heads()>(head); });
            for (int head = 0; head < group; ++head) exponentiate(head);
            each_part<weighed_most>(0, group, [&](auto heads, int head) { weigh<heads()>(head); });
        }
    }

private:
    // Parts of equal size: 14 heads are 7 and 7.
    template <int most, class Work>
    static void each_part(int first, int last, Work&& work) {
        const int parts = (last - first + most - 1) / most;
        for (int part = 0; part < parts; ++part) {
            const int head = first + (last - first) * part / parts;
            by_count<most>(first + (last - first) * (part + 1) / parts - head, head, work);
        }
    }

    template <int heads, class Work>
    static void by_count(int count, int head, Work& work) {
        if (count == heads) return work(std::integral_constant<int, heads>{}, head);
        if constexpr (heads > 1) by_count<heads - 1>(count, head, work);
    }

    float* scores(int head) const { return memory_.scores + head * range_positions; }

    template <int heads>
    void score(int head) {
        for (int at = first_; at < stop_; at += group_slots) {
            const Group group = group_at<Part::keys>(problem_, span_, at, memory_.slots);
            score_group<heads>(group, memory_.queries + head * query_bytes_, scores(head) + (at - first_));
        }
    }

    // Scores of sixteen slots, [head, range_positions].
    template <int heads>
    void score_group(const Group& group, const uint8_t* queries, float* scores) {
        __m512 sums[4][heads];
        for (int pass = 0; pass < 2; ++pass) {
            // Slots e, e + 4, e + 8, e + 12 go together, so that the sums come out in order.
            const uint8_t* low = group.rows[0] + 2 * pass * row_bytes_;
            const uint8_t* high = group.rows[1] + 2 * pass * row_bytes_;
            __m512 even[heads], odd[heads];
            for (int h = 0; h < heads; ++h) even[h] = odd[h] = _mm512_setzero_ps();
            for (int chunk = 0; chunk < row_bytes_; chunk += 64) {
                ahead_.more();
                ahead_.more();
                meet<heads>(low, high, chunk, queries, even, odd);
            }
            for (int h = 0; h < heads; ++h) {
                sums[2 * pass][h] = even[h];
                sums[2 * pass + 1][h] = odd[h];
            }
        }
        f32x16 scales = splat(1.0f);
        if constexpr (Rows::has_scales) scales = scales_of(group);
        for (int h = 0; h < heads; ++h)
            store(scores + h * range_positions, (f32x16)sums_of_lanes(sums[0][h], sums[1][h], sums[2][h], sums[3][h]) * scales);
    }

    // Rows 0 and 4 from `low` and from `high` on, and those behind them: two sets, because a query's part is read for both.
    template <int heads>
    void meet(const uint8_t* low, const uint8_t* high, int chunk, const uint8_t* queries, __m512 (&even)[heads],
              __m512 (&odd)[heads]) const {
        const auto at = [&](const uint8_t* from, int row) { return line(from + row * row_bytes_, chunk, row_bytes_); };
        __m512i first[4], second[4];
        transpose_lanes(at(low, 0), at(low, 4), at(high, 0), at(high, 4), first);
        transpose_lanes(at(low, 1), at(low, 5), at(high, 1), at(high, 5), second);
        const uint8_t* q = queries + 4 * Rows::parts * chunk;
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane) {
            __m512i a[Rows::parts], b[Rows::parts];
            rows_.expand(first[lane], a);
            rows_.expand(second[lane], b);
#pragma GCC unroll 2
            for (int p = 0; p < Rows::parts; ++p)
#pragma GCC unroll 8
                for (int h = 0; h < heads; ++h) {
                    const __m512i part = _mm512_load_si512(q + h * query_bytes_ + 64 * (Rows::parts * lane + p));
                    even[h] = dot(even[h], a[p], part);
                    odd[h] = dot(odd[h], b[p], part);
                }
        }
    }

    // A head's scores become weights; 0 outside the span.
    void exponentiate(int head) {
        const float scale = problem_.soft_cap == 0 ? problem_.scale * log2e : problem_.scale;
        f32x16 most = splat(to_.most[head]);
        for (int at = first_; at < stop_; at += group_slots) {
            float* score = scores(head) + (at - first_);
            f32x16 s = load(score) * scale;
            if (problem_.soft_cap != 0) s = capped(s, problem_.soft_cap) * log2e;
            s = (f32x16)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(lanes_in(span_, at)), (__m512)s);
            store(score, s);
            most = max(most, s);
        }
        raise(to_, head, std::ceil(largest(most)), head_dim_);
        f32x16 total{};
        for (int at = 0; at < stop_ - first_; at += group_slots) {
            const f32x16 weight = exp2(load(scores(head) + at) - to_.most[head]);
            store(scores(head) + at, weight);
            total += weight;
        }
        to_.total[head] += sum(total);
    }

    template <int heads>
    void weigh(int head) {
        // 64 dimensions at a time.
        constexpr int lines = 2 / Rows::parts;
        for (int chunk = 0; chunk < row_bytes_; chunk += 64 * lines) {
            __m512 sums[heads][4];
            for (int h = 0; h < heads; ++h)
                for (int v = 0; v < 4; ++v) sums[h][v] = _mm512_setzero_ps();
            for (int at = first_; at < stop_; at += group_slots) {
                const Group group = group_at<Part::values>(problem_, span_, at, memory_.slots);
                if (chunk == 0) narrow<heads>(group, head, at - first_);
                for (int i = 0; i < 4 * lines; ++i) ahead_.more();
                weigh_group<heads>(group, chunk, scores(head) + (at - first_) / 2, sums);
            }
            for (int h = 0; h < heads; ++h)
                for (int l = 0; l < lines; ++l) {
                    const int dim = (chunk + 64 * l) / Rows::bytes_per_number;
                    if (dim < head_dim_)
                        Rows::add(sums[h] + 2 * Rows::parts * l, to_.sum + (head + h) * head_dim_ + dim,
                                  std::min(head_dim_ - dim, 32 * Rows::parts));
                }
        }
    }

    // A group's weights, times the scales of its values, become bfloat16. They are half as wide as before, and all lie at the
    // row's start: none is overwritten that is still to be read.
    template <int heads>
    void narrow(const Group& group, int head, int at) {
        f32x16 scales = splat(1.0f);
        if constexpr (Rows::has_scales) scales = scales_of(group);
        for (int h = head; h < head + heads; ++h) {
            const f32x16 weight = load(scores(h) + at) * scales;
            _mm256_store_si256(reinterpret_cast<__m256i*>(scores(h) + at / 2), (__m256i)_mm512_cvtneps_pbh((__m512)weight));
        }
    }

    template <int heads>
    void weigh_group(const Group& group, int chunk, const float* weights, __m512 (&sums)[heads][4]) const {
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
            const uint8_t* row = group.rows[pair / 4] + (2 * pair % 8) * row_bytes_;
            __m512i values[4];
            for (int v = 0; v < 4; v += 2 * Rows::parts) {
                const int at = chunk + 32 * v;
                rows_.interleave(line(row, at, row_bytes_), line(row + row_bytes_, at, row_bytes_), values + v);
            }
            for (int h = 0; h < heads; ++h) {
                const __m512i both = _mm512_castps_si512(_mm512_set1_ps(weights[h * range_positions + pair]));
                for (int v = 0; v < 4; ++v) sums[h][v] = dot(sums[h][v], values[v], both);
            }
        }
    }

    const Problem& problem_;
    const Span& span_;
    const SpanMemory& memory_;
    const Partial& to_;
    const int head_dim_, row_bytes_, query_bytes_;
    const Rows rows_{};
    Ahead ahead_;
    int first_ = 0, stop_ = 0;
};

}  // namespace

void attend_span_bf16(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to) {
    switch (problem.cache.type) {
        case KvType::bf16: return SpanReader<Bf16Rows>(problem, span, memory, to).attend();
        case KvType::int8: return SpanReader<ByteRows<KvType::int8>>(problem, span, memory, to).attend();
        case KvType::fp8_e4m3: return SpanReader<ByteRows<KvType::fp8_e4m3>>(problem, span, memory, to).attend();
        case KvType::fp8_e5m2: return SpanReader<ByteRows<KvType::fp8_e5m2>>(problem, span, memory, to).attend();
        case KvType::f32: return attend_span_f32(problem, span, memory, to);
    }
}

}  // namespace kveik::KVEIK_ISA

#endif
