// A span of bfloat16 or fp8 keys and values by bfloat16 products (vdpbf16ps), summed up in float32.
//
// Keys: sixteen slots at a time. Four rows of four 128-bit lanes are transposed to vectors that hold some dimensions of four
// slots; a query's dimensions, repeated in all four lanes, meet them. Every head of the group uses the same vectors.
// Values: rows of two slots are interleaved to pairs of one dimension, which meet the pair of weights.
// Numbers of one byte become bfloat16 by a table on the way; their scales go to the scores and to the weights.
#include "kernels/attention_reader.h"

#if defined(__AVX512BF16__)

namespace kveik::KVEIK_ISA {

namespace {

[[gnu::always_inline]] inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

template <class Rows>
class Bf16Reader : public SpanReader<Bf16Reader<Rows>> {
    using Base = SpanReader<Bf16Reader<Rows>>;
    using Base::halves_, Base::head_dim_, Base::mask_, Base::row_bytes_;
    using Base::prepared, Base::query, Base::scores, Base::scales_of;

public:
    using Base::Base;

    static constexpr bool has_scales = Rows::has_scales, has_nans = !has_scales;
    static constexpr int bytes_per_number = Rows::bytes_per_number;
    static constexpr int scored_most = 8, weighed_most = 6;

    // [8 dimensions]: as bfloat16, four times over.
    void prepare(int head) {
        uint8_t* to = prepared(head);
        for (int i = 0; i < head_dim_; i += 16, to += 128) {
            const __m512i numbers = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(query(head) + i)));
            _mm512_store_si512(to, _mm512_shuffle_i32x4(numbers, numbers, 0x00));
            _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(numbers, numbers, 0x55));
        }
    }

    template <int heads, bool tail>
    [[gnu::noinline]] void score(int head, Ahead& ahead) const {
        for (int i = 0; i < halves_.groups; ++i) {
            ahead.some();
            const Half* group = halves_.at + 2 * i;
            f32x16 scales = splat(1.0f);
            if constexpr (has_scales) scales = scales_of(group, 0);
            score_group<heads, tail>(group, scales, prepared(head), scores(head) + group_slots * i);
        }
    }

    // Weights, times the scales of their values, become bfloat16, all of them at the row's start.
    void narrow(int head) {
        for (int i = 0; i < halves_.groups; ++i) {
            f32x16 weight = load(scores(head) + group_slots * i);
            // Outside the span scales may be anything.
            if constexpr (has_scales)
                weight = weight == f32x16{} ? weight : weight * scales_of(halves_.at + 2 * i, halves_.values);
            _mm256_store_si256(reinterpret_cast<__m256i*>(scores(head) + half_slots * i),
                               (__m256i)_mm512_cvtneps_pbh((__m512)weight));
        }
    }

    template <int heads, bool tail>
    [[gnu::noinline]] void weigh(int head, int chunk, Ahead& ahead) {
        __m512 sums[heads][4];
#pragma GCC unroll 8
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) sums[h][v] = _mm512_setzero_ps();
        const float* weights = scores(head);
        const __mmask16 masks[2] = {mask_of(row_bytes_ - chunk), mask_of(row_bytes_ - chunk - 64)};
        for (int i = 0; i < 2 * halves_.groups; ++i, weights += half_slots / 2) {
            if (i % 2 == 0) ahead.some();
            weigh_rows<heads, tail>(halves_.at[i].rows + halves_.values + chunk, weights, masks, sums);
        }
        constexpr int lines = 2 / Rows::parts;
        for (int h = 0; h < heads; ++h)
            for (int l = 0; l < lines; ++l) {
                const int dim = (chunk + 64 * l) / Rows::bytes_per_number;
                if (dim < head_dim_)
                    Rows::add(sums[h] + 2 * Rows::parts * l, Base::sums(head + h) + dim,
                              std::min(head_dim_ - dim, 32 * Rows::parts));
            }
    }

private:
    // Scores of sixteen slots, [head, range_positions].
    template <int heads, bool tail>
    [[gnu::always_inline]] void score_group(const Half* group, f32x16 scales, const uint8_t* queries, float* scores) const {
        __m512 sums[4][heads];
        for (int pass = 0; pass < 2; ++pass) {
            // Slots e, e + 4, e + 8, e + 12 go together, so that the sums come out in order.
            const uint8_t* low = group[0].rows + 2 * pass * row_bytes_;
            const uint8_t* high = group[1].rows + 2 * pass * row_bytes_;
            __m512 even[heads], odd[heads];
            for (int h = 0; h < heads; ++h) even[h] = odd[h] = _mm512_setzero_ps();
            int chunk = 0;
            for (; chunk + 64 <= row_bytes_; chunk += 64)
                meet<heads, false>(low + chunk, high + chunk, queries + 4 * Rows::parts * chunk, even, odd);
            if constexpr (tail) meet<heads, true>(low + chunk, high + chunk, queries + 4 * Rows::parts * chunk, even, odd);
            for (int h = 0; h < heads; ++h) {
                sums[2 * pass][h] = even[h];
                sums[2 * pass + 1][h] = odd[h];
            }
        }
        for (int h = 0; h < heads; ++h) {
            const __m512 sum = sums_of_lanes(sums[0][h], sums[1][h], sums[2][h], sums[3][h]);
            store(scores + h * range_positions, (f32x16)sum * scales);
        }
    }

    // Rows 0 and 4 from `low` and from `high` on, and those behind them: two sets, because a query's part is read for both.
    template <int heads, bool tail>
    [[gnu::always_inline]] void meet(const uint8_t* low, const uint8_t* high, const uint8_t* queries, __m512 (&even)[heads],
              __m512 (&odd)[heads]) const {
        const auto at = [&](const uint8_t* from, int row) { return line<tail>(from + row * row_bytes_, mask_); };
        __m512i first[4], second[4];
        transpose_lanes(at(low, 0), at(low, 4), at(high, 0), at(high, 4), first);
        transpose_lanes(at(low, 1), at(low, 5), at(high, 1), at(high, 5), second);
        const size_t query_bytes = prepared_bytes(1, head_dim_);
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane) {
            __m512i a[Rows::parts], b[Rows::parts];
            rows_.expand(first[lane], a);
            rows_.expand(second[lane], b);
#pragma GCC unroll 2
            for (int p = 0; p < Rows::parts; ++p)
#pragma GCC unroll 8
                for (int h = 0; h < heads; ++h) {
                    const __m512i part = _mm512_load_si512(queries + h * query_bytes + 64 * (Rows::parts * lane + p));
                    even[h] = dot(even[h], a[p], part);
                    odd[h] = dot(odd[h], b[p], part);
                }
        }
    }

    // Eight rows by four pairs of weights of each head.
    template <int heads, bool tail>
    [[gnu::always_inline]] void weigh_rows(const uint8_t* row, const float* weights, const __mmask16 (&masks)[2],
                                           __m512 (&sums)[heads][4]) const {
#pragma GCC unroll 1
        for (int pair = 0; pair < 4; ++pair, row += 2 * row_bytes_) {
            __m512i values[4];
#pragma GCC unroll 2
            for (int v = 0; v < 4; v += 2 * Rows::parts) {
                const uint8_t* from = row + 32 * v;
                const __mmask16 mask = v ? masks[1] : masks[0];
                rows_.interleave(line<tail>(from, mask), line<tail>(from + row_bytes_, mask), values + v);
            }
#pragma GCC unroll 8
            for (int h = 0; h < heads; ++h) {
                const __m512i both = _mm512_castps_si512(_mm512_set1_ps(weights[h * range_positions + pair]));
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) sums[h][v] = dot(sums[h][v], values[v], both);
            }
        }
    }

    const Rows rows_{};
};

}  // namespace

void attend_span_bf16(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to) {
    switch (problem.cache.type) {
        case KvType::bf16: return Bf16Reader<Bf16Rows>(problem, span, memory, to).attend();
        case KvType::fp8_e4m3: return Bf16Reader<ByteRows<KvType::fp8_e4m3>>(problem, span, memory, to).attend();
        case KvType::fp8_e5m2: return Bf16Reader<ByteRows<KvType::fp8_e5m2>>(problem, span, memory, to).attend();
        case KvType::int8: return attend_span_int8(problem, span, memory, to);
        case KvType::f32: return attend_span_f32(problem, span, memory, to);
    }
}

}  // namespace kveik::KVEIK_ISA

#endif
