// A row of floats -> int8 with a scale per group or span, and the sums that weights' offsets and minima are multiplied with.
#pragma once

#include <limits>

#include "core/team.h"
#include "kernels/linear_layout.h"
#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

// One row's places in its tile; consecutive ones are `step` apart.
struct ActivationRow {
    int span;  // of many rows, and 0 for few: there are no sums of groups then, otherwise no minus128
    int step;
    int32_t* values;
    float *scales, *sums;
    int32_t *minus32, *minus16, *minus128;
};

// Row `within` of the tile that begins at `tile`.
inline ActivationRow row_in(uint8_t* tile, const TileLayout& at, int within, int span) {
    const auto ints = [=](int64_t offset) { return reinterpret_cast<int32_t*>(tile + offset) + within; };
    const auto floats = [=](int64_t offset) { return reinterpret_cast<float*>(tile + offset) + within; };
    return {span, at.rows, ints(0), floats(at.scales), floats(at.sums), ints(at.minus32), ints(at.minus16), ints(at.minus128)};
}

// 0 for few rows.
inline int span_in(const Activations& to) { return to.rows >= rows_many ? to.span : 0; }

typedef int8_t i8x16 __attribute__((vector_size(16)));

// Below this a group or span counts as zeros: 127 / largest must be finite.
constexpr float quantise_smallest = 1e-36f;

// The bits of the largest magnitude among x[0..count): as integers they are in order, and a NaN's are beyond an infinity's.
inline int32_t largest_bits(const float* x, int count) {
    i32x16 most{}, other{};
    for (int i = 0; i < count; i += 32) {
        const i32x16 a = (i32x16)load(x + i) & 0x7fffffff, b = (i32x16)load(x + i + 16) & 0x7fffffff;
        most = a > most ? a : most;
        other = b > other ? b : other;
    }
    most = other > most ? other : most;
    int32_t largest = 0;
    for (int i = 0; i < 16; ++i) largest = most[i] > largest ? most[i] : largest;
    return largest;
}

// The same for each of the 8 groups of a whole chunk.
inline void largest_of_groups(const float* x, int32_t* bits) {
#if defined(__AVX512F__)
    const auto group = [&](int g) {
        const __m512i sizes = _mm512_set1_epi32(0x7fffffff);
        const __m512i a = _mm512_loadu_si512(x + 32 * g), b = _mm512_loadu_si512(x + 32 * g + 16);
        return _mm512_max_epi32(_mm512_and_si512(a, sizes), _mm512_and_si512(b, sizes));
    };
    // 16 lanes of a group become 8, side by side with another's, then 4 with those of three others, then 2.
    const auto halves = [](__m512i a, __m512i b) {
        return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
    };
    const auto quarters = [](__m512i a, __m512i b) {
        return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    };
    const __m512i first = quarters(halves(group(0), group(1)), halves(group(2), group(3)));
    const __m512i second = quarters(halves(group(4), group(5)), halves(group(6), group(7)));
    const __m512i two = _mm512_max_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m512i one = _mm512_max_epi32(two, _mm512_srli_epi64(two, 32));
    // Of the quadwords, the even ones are groups 0 to 3 and the odd ones groups 4 to 7.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_store_si256(reinterpret_cast<__m256i*>(bits), _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, one)));
#else
    for (int g = 0; g < 8; ++g) bits[g] = largest_bits(x + 32 * g, 32);
#endif
}

// A product that the compiler does not fuse with what follows, so that every instruction set rounds alike.
inline f32x16 product(f32x16 a, float b) {
    f32x16 p = a * b;
#if defined(__AVX512F__)
    asm("" : "+v"(p));
#else
    asm("" : "+m"(p));
#endif
    return p;
}

// x * factor, rounded to the nearest integer by adding 1.5 * 2^23.
inline i32x16 rounded(const float* x, float factor) {
    const f32x16 magic = product(load(x), factor) + 12582912.0f;
    return (i32x16)magic - 0x4b400000;
}

// The same for 32 numbers of magnitudes up to 127.
inline void round_32(const float* x, float factor, int8_t* to) {
    const i32x16 a = rounded(x, factor), b = rounded(x + 16, factor);
#if defined(__AVX512BW__)
    // One store: what is stored in parts cannot be loaded whole soon after.
    const __m512i pairs = _mm512_packs_epi32((__m512i)a, (__m512i)b);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(_mm512_permutexvar_epi64(order, pairs)));
#else
    const i8x16 bytes[2] = {__builtin_convertvector(a, i8x16), __builtin_convertvector(b, i8x16)};
    std::memcpy(to, bytes, 32);
#endif
}

template <class Number>
inline void put_strided(const Number* from, int count, Number* to, int step) {
    if (step == 1) std::memcpy(to, from, size_t(count) * 4);
    else
        for (int i = 0; i < count; ++i) to[i * step] = from[i];
}

// Of a chunk's values, zeros where it is shorter.
struct ChunkSums {
    alignas(64) int32_t of16[16];
    alignas(32) int32_t of32[8];
};

inline void sum_values(const int8_t* values, ChunkSums& to) {
#if defined(__AVX512BW__)
    // Sums of 8 bytes at a time, as if unsigned: 128 is added to each before, and 8 * 128 taken off after.
    const __m512i flip = _mm512_set1_epi8(char(0x80)), zero = _mm512_setzero_si512();
    const auto sums8 = [&](int at) {
        return _mm512_sad_epu8(_mm512_xor_si512(_mm512_load_si512(values + at), flip), zero);
    };
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    const auto sums16 = [&](int at) {
        const __m512i a = sums8(at), b = sums8(at + 64);
        const __m512i both = _mm512_add_epi64(_mm512_permutex2var_epi64(a, even, b), _mm512_permutex2var_epi64(a, odd, b));
        return _mm512_cvtepi64_epi32(_mm512_sub_epi64(both, _mm512_set1_epi64(2048)));
    };
    const __m512i of16 = _mm512_inserti64x4(_mm512_castsi256_si512(sums16(0)), sums16(128), 1);
    const __m256i of32 = _mm512_cvtepi64_epi32(_mm512_add_epi64(of16, _mm512_srli_epi64(of16, 32)));
    _mm512_store_si512(to.of16, of16);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to.of32), of32);
#else
    for (int half = 0; half < 16; ++half) {
        to.of16[half] = 0;
        for (int i = 0; i < 16; ++i) to.of16[half] += values[16 * half + i];
    }
    for (int g = 0; g < 8; ++g) to.of32[g] = to.of16[2 * g] + to.of16[2 * g + 1];
#endif
}

// How a chunk's groups, or its spans, become int8: times factor, and back times scale.
struct Scalings {
    alignas(32) float factor[8];
    alignas(32) float scale[8];
};

inline void scalings_of(const int32_t* bits, Scalings& to) {
    for (int g = 0; g < 8; ++g) {
        float largest;
        std::memcpy(&largest, bits + g, 4);
        const bool finite = bits[g] < 0x7f800000, some = finite && largest > quantise_smallest;
        to.factor[g] = some ? 127.0f / largest : 0.0f;
        to.scale[g] = some ? largest / 127.0f : (finite ? 0.0f : std::numeric_limits<float>::quiet_NaN());
    }
}

// x[0..count) -> values, the `alike` following one another with one factor.
inline void round_values(const float* x, int count, int alike, const Scalings& scalings, int8_t* values) {
    for (int i = 0; i < count; i += group_inputs) {
        const float factor = scalings.factor[i / alike];
        // What is not finite must not be computed with.
        if (factor == 0.0f) std::memset(values + i, 0, group_inputs);
        else round_32(x + i, factor, values + i);
    }
}

// x[0..count), at most a chunk and whole groups, from input `first` of the row on, a multiple of the chunk's size.
inline void quantise_chunk(const float* x, int first, int count, const ActivationRow& to) {
    alignas(64) int8_t values[chunk_inputs];
    if (count < chunk_inputs) std::memset(values, 0, sizeof values);
    const int alike = to.span ? to.span : group_inputs, scales = (count + alike - 1) / alike;
    alignas(32) int32_t bits[8] = {};
    if (count == chunk_inputs && alike == group_inputs) largest_of_groups(x, bits);
    else
        for (int i = 0; i < count; i += alike) bits[i / alike] = largest_bits(x + i, count - i < alike ? count - i : alike);
    Scalings scalings;
    scalings_of(bits, scalings);
    round_values(x, count, alike, scalings, values);
    put_strided(reinterpret_cast<const int32_t*>(values), count / 4, to.values + first / 4 * to.step, to.step);
    put_strided(scalings.scale, scales, to.scales + first / alike * to.step, to.step);
    ChunkSums sums;
    sum_values(values, sums);
    if (to.span) {
        const int groups = to.span / group_inputs;
        for (int i = 0; i < scales; ++i) {
            int32_t total = 0;
            for (int g = 0; g < groups; ++g) total += sums.of32[groups * i + g];
            to.minus128[(first / to.span + i) * to.step] = -128 * total;
        }
        return;
    }
    alignas(32) float scaled[8];
    for (int g = 0; g < 8; ++g) scaled[g] = scalings.scale[g] * float(sums.of32[g]);
    for (int32_t& sum : sums.of32) sum = -sum;
    for (int32_t& sum : sums.of16) sum = -sum;
    put_strided(scaled, scales, to.sums + first / 32 * to.step, to.step);
    put_strided(sums.of32, scales, to.minus32 + first / 32 * to.step, to.step);
    put_strided(sums.of16, 2 * scales, to.minus16 + first / 16 * to.step, to.step);
}

// work(row, first, count, to) for every row's chunks: inputs [first, first + count) of row `row`, which belong to `to`. Ends with
// a barrier. A member has whole chunks of whole tiles: rows lie side by side there, and what two cores write at once in one
// line goes back and forth between them.
template <class Work>
inline void each_chunk(const Activations& to, Team& team, Work&& work) {
    const TileLayout at = tile_layout(to.rows, to.inputs, to.span);
    const int chunks = (to.inputs + chunk_inputs - 1) / chunk_inputs;
    const Team::Share mine = team.share(int64_t(tiles_of(to.rows)) * chunks);
    for (int64_t i = mine.first; i < mine.last; ++i) {
        const int64_t tile = i / chunks;
        const int row = int(tile) * at.rows, first = int(i % chunks) * chunk_inputs;
        const int rows = at.rows < to.rows - row ? at.rows : to.rows - row;
        const int count = to.inputs - first < chunk_inputs ? to.inputs - first : chunk_inputs;
        for (int r = 0; r < rows; ++r)
            work(row + r, first, count, row_in(static_cast<uint8_t*>(to.bytes) + at.bytes * tile, at, r, span_in(to)));
    }
    team.barrier();
}

}  // namespace kveik::KVEIK_ISA
