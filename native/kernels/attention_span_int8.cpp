// A span of int8 keys and values by products of bytes (vpdpbusd), summed up in integers.
//
// Queries and weights are numbers of 15 and 16 bits, each in two bytes that make a product of their own. They are rounded to
// bfloat16 before: that costs quality nothing beside the rounding of keys and values, and what a chunk of many queries computes
// of the same token, as after a preemption, is then hardly ever different enough to turn an answer.
// Keys: as bfloat16 ones, sixteen slots at a time, four slots' 128-bit lanes to a vector. One operand has no sign: keys get 128
// more, and what that adds to a score is known from the query alone.
// Values: rows of four slots are interleaved to fours of one dimension, which meet four weights. Weights include the scales of
// values, and are relative to the largest of their range.
#include "kernels/attention_reader.h"

#if defined(__AVX512BF16__)

namespace kveik::KVEIK_ISA {

namespace {

constexpr int query_most = 127 * 128, weight_most = 65535;

// Where a head's weights end, in floats, and their scale is.
constexpr int weights_scale = range_positions / 2;

// Of a query's head: what its integers are to be multiplied by, and 128 times their sum.
struct QueryScale {
    float scale;
    int32_t excess;
};

// Sums of products with the upper bytes and with the lower ones.
template <int count>
struct Sums {
    __m512i high[count], low[count];

    [[gnu::always_inline]] void clear() {
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) high[i] = low[i] = _mm512_setzero_si512();
    }

    // An upper byte is worth 2^bits.
    template <int bits>
    [[gnu::always_inline]] __m512i whole(int i) const {
        return _mm512_add_epi32(_mm512_slli_epi32(high[i], bits), low[i]);
    }
};

inline f32x16 rounded_to_bf16(f32x16 v) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)v);
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
}

class Int8Reader : public SpanReader<Int8Reader> {
public:
    using SpanReader::SpanReader;

    static constexpr bool has_scales = true, has_nans = false;
    static constexpr int bytes_per_number = 1;
    static constexpr int scored_most = 4, weighed_most = 6;

    // [16 dimensions]: the upper bytes four times over, then the lower ones.
    void prepare(int head) {
        const float* from = query(head);
        uint8_t* to = prepared(head);
        __m512i most = _mm512_setzero_si512();
        // Magnitudes in order as integers; those of NaN and infinity are the largest.
        for (int i = 0; i < head_dim_; i += 16) most = _mm512_max_epu32(most, (__m512i)abs(rounded_to_bf16(load(from + i))));
        const float magnitude = float_of(_mm512_reduce_max_epu32(most));
        const bool finite = magnitude < INFINITY;
        const float inverse = finite && magnitude >= 0x1p-100f ? query_most / magnitude : 0.0f;
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < head_dim_; i += 16, to += 128) {
            const __m512i whole = finite ? _mm512_cvtps_epi32((__m512)(rounded_to_bf16(load(from + i)) * inverse)) : total;
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
            const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7));
            _mm512_store_si512(to, _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(high)));
            _mm512_store_si512(to + 64, _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(low)));
            total = _mm512_add_epi32(total, whole);
        }
        scale_of(head) = {finite ? magnitude / query_most : NAN, 128 * _mm512_reduce_add_epi32(total)};
    }

    template <int heads, bool tail>
    [[gnu::noinline]] void score(int head, Ahead& ahead) const {
        for (int i = 0; i < halves_.groups; ++i) {
            ahead.some();
            const Half* group = halves_.at + 2 * i;
            __m512i sums[4][heads];
            score_rows<heads, tail>(group, 0, prepared(head), sums[0], sums[1]);
            score_rows<heads, tail>(group, 2, prepared(head), sums[2], sums[3]);
            const f32x16 scales = scales_of(group, 0);
            for (int h = 0; h < heads; ++h) {
                const QueryScale& query = scale_of(head + h);
                const __m512i sum = sums_of_lanes(sums[0][h], sums[1][h], sums[2][h], sums[3][h]);
                const __m512 score = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(query.excess)));
                store(scores(head + h) + group_slots * i, (f32x16)score * query.scale * scales);
            }
        }
    }

    // Weights, times the scales of their values, become integers, all of them at the row's start: [16 slots], the upper bytes,
    // then the lower ones.
    void narrow(int head) {
        float* weights = scores(head);
        uint8_t* to = reinterpret_cast<uint8_t*>(weights);
        __m512i most = _mm512_setzero_si512();
        for (int i = 0; i < halves_.groups; ++i) {
            f32x16 weight = load(weights + group_slots * i);
            // Outside the span scales may be anything.
            weight = weight == f32x16{} ? weight : weight * scales_of(halves_.at + 2 * i, halves_.values);
            weight = rounded_to_bf16(weight);
            store(weights + group_slots * i, weight);
            most = _mm512_max_epu32(most, (__m512i)weight);
        }
        const float largest = float_of(_mm512_reduce_max_epu32(most));
        const float inverse = largest >= 0x1p-100f ? weight_most / largest : 0.0f;
        for (int i = 0; i < halves_.groups; ++i, to += 2 * group_slots) {
            const __m512i whole = _mm512_cvtps_epi32((__m512)(load(weights + group_slots * i) * inverse));
            const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)), low = _mm512_cvtepi32_epi8(whole);
            _mm_store_si128(reinterpret_cast<__m128i*>(to), high);
            _mm_store_si128(reinterpret_cast<__m128i*>(to + group_slots), low);
        }
        weights[weights_scale] = largest / weight_most;
    }

    template <int heads, bool tail>
    [[gnu::noinline]] void weigh(int head, int at, Ahead& ahead) {
        __m512 found[heads][4];
        weigh_half<heads, tail, 0>(head, at, ahead, found);
        weigh_half<heads, tail, 1>(head, at, ahead, found);
        for (int h = 0; h < heads; ++h) add_fours(found[h], sums(head + h) + at, std::min(head_dim_ - at, 64));
    }

private:
    static float float_of(uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }

    // Behind what is prepared of a head.
    QueryScale& scale_of(int head) const { return *reinterpret_cast<QueryScale*>(prepared(head + 1) - prepared_extra); }

    // Slots e, e + 4, e + 8, e + 12 of a group go together, so that the sums come out in order: `even` with e = row, `odd` with
    // the next.
    template <int heads, bool tail>
    [[gnu::always_inline]] void score_rows(const Half* group, int row, const uint8_t* queries, __m512i (&even)[heads],
                                           __m512i (&odd)[heads]) const {
        const uint8_t *low = group[0].rows + row * row_bytes_, *high = group[1].rows + row * row_bytes_;
        Sums<heads> first, second;
        first.clear();
        second.clear();
        int chunk = 0;
        for (; chunk + 64 <= row_bytes_; chunk += 64)
            meet<heads, false>(low + chunk, high + chunk, queries + 8 * chunk, first, second);
        if constexpr (tail) meet<heads, true>(low + chunk, high + chunk, queries + 8 * chunk, first, second);
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h) {
            even[h] = first.template whole<7>(h);
            odd[h] = second.template whole<7>(h);
        }
    }

    template <int heads, bool tail>
    [[gnu::always_inline]] void meet(const uint8_t* low, const uint8_t* high, const uint8_t* queries, Sums<heads>& even,
                                     Sums<heads>& odd) const {
        const auto at = [&](const uint8_t* from, int row) {
            return _mm512_xor_si512(line<tail>(from + row * row_bytes_, mask_), _mm512_set1_epi8(char(0x80)));
        };
        __m512i first[4], second[4];
        transpose_lanes(at(low, 0), at(low, 4), at(high, 0), at(high, 4), first);
        transpose_lanes(at(low, 1), at(low, 5), at(high, 1), at(high, 5), second);
        const size_t query_bytes = prepared_bytes(1, head_dim_);
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane)
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h) {
                const uint8_t* query = queries + h * query_bytes + 128 * lane;
                const __m512i upper = _mm512_load_si512(query), lower = _mm512_load_si512(query + 64);
                even.high[h] = _mm512_dpbusd_epi32(even.high[h], first[lane], upper);
                odd.high[h] = _mm512_dpbusd_epi32(odd.high[h], second[lane], upper);
                even.low[h] = _mm512_dpbusd_epi32(even.low[h], first[lane], lower);
                odd.low[h] = _mm512_dpbusd_epi32(odd.low[h], second[lane], lower);
            }
    }

    // Dimensions 0 to 7 of every 16, or 8 to 15.
    template <int heads, bool tail, int half>
    [[gnu::always_inline]] void weigh_half(int head, int chunk, Ahead& ahead, __m512 (&found)[heads][4]) const {
        Sums<2 * heads> sums;
        sums.clear();
        const __mmask16 mask = mask_of(row_bytes_ - chunk);
        const uint8_t* weights = reinterpret_cast<const uint8_t*>(scores(head));
        for (int i = 0; i < 2 * halves_.groups; ++i) {
            if (i % 4 == 2 * half) ahead.some();
            const uint8_t* row = halves_.at[i].rows + halves_.values + chunk;
            const uint8_t* eight = weights + i / 2 * 2 * group_slots + i % 2 * half_slots;
            weigh_four<heads, tail, half>(row, eight, mask, sums);
            weigh_four<heads, tail, half>(row + 4 * row_bytes_, eight + 4, mask, sums);
        }
#pragma GCC unroll 8
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const __m512 sum = _mm512_cvtepi32_ps(sums.template whole<8>(2 * h + v));
                found[h][2 * half + v] = _mm512_mul_ps(sum, _mm512_set1_ps(scores(head + h)[weights_scale]));
            }
    }

    // Four rows by four weights of each head.
    template <int heads, bool tail, int half>
    [[gnu::always_inline]] void weigh_four(const uint8_t* row, const uint8_t* weights, __mmask16 mask,
                                           Sums<2 * heads>& sums) const {
        const auto pairs = [&](const uint8_t* from) {
            const __m512i a = line<tail>(from, mask), b = line<tail>(from + row_bytes_, mask);
            return half ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
        };
        const __m512i first = pairs(row), second = pairs(row + 2 * row_bytes_);
        const __m512i values[2] = {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second)};
#pragma GCC unroll 8
        for (int h = 0; h < heads; ++h) {
            const uint8_t* from = weights + h * range_positions * sizeof(float);
            const __m512i upper = _mm512_castps_si512(_mm512_set1_ps(*reinterpret_cast<const float*>(from)));
            const __m512i lower = _mm512_castps_si512(_mm512_set1_ps(*reinterpret_cast<const float*>(from + group_slots)));
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                sums.high[2 * h + v] = _mm512_dpbusd_epi32(sums.high[2 * h + v], upper, values[v]);
                sums.low[2 * h + v] = _mm512_dpbusd_epi32(sums.low[2 * h + v], lower, values[v]);
            }
        }
    }
};

}  // namespace

void attend_span_int8(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to) {
    Int8Reader(problem, span, memory, to).attend();
}

}  // namespace kveik::KVEIK_ISA

#endif
