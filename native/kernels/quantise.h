// A row of floats -> int8 with a scale per chunk, and the sums that the weights' offsets and minima are multiplied with.
#pragma once

#include <limits>

#include "kernels/linear_layout.h"
#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

// One row's places in its tile; consecutive ones are `step` apart.
struct ActivationRow {
    int32_t* values;
    float* scales;
    int32_t* sums256;
    float* sums32;  // null where there are `rows_many` rows or more
    int32_t *minus32, *minus16;
    int step;
};

inline ActivationRow row_of(const Activations& activations, int row) {
    const TileLayout at = tile_layout(activations.rows, activations.inputs);
    uint8_t* tile = static_cast<uint8_t*>(activations.bytes) + at.bytes * (row / at.rows);
    const int within = row % at.rows;
    const auto ints = [=](int64_t offset) { return reinterpret_cast<int32_t*>(tile + offset) + within; };
    const auto floats = [=](int64_t offset) { return reinterpret_cast<float*>(tile + offset) + within; };
    const bool few = activations.rows < rows_many;
    return {ints(0),          floats(at.scales),  ints(at.sums256), few ? floats(at.sums32) : nullptr,
            ints(at.minus32), ints(at.minus16), at.rows};
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

// Below this a chunk counts as zeros: 127 / largest must be finite.
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

inline void put_strided(const int32_t* from, int count, int32_t* to, int step) {
    if (step == 1) std::memcpy(to, from, size_t(count) * 4);
    else
        for (int i = 0; i < count; ++i) to[i * step] = from[i];
}

// Of a chunk's values, zeros where it is shorter.
struct ChunkSums {
    alignas(64) int32_t of16[16];
    alignas(32) int32_t of32[8];
    int32_t all;
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
    to.all = 0;
    for (int g = 0; g < 8; ++g) to.all += to.of32[g];
}

// x[0..count), at most a chunk of it, from input `first` of the row on.
inline void quantise_chunk(const float* x, int first, int count, const ActivationRow& to) {
    const int32_t bits = largest_bits(x, count);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const bool finite = bits < 0x7f800000;
    const float factor = finite && largest > quantise_smallest ? 127.0f / largest : 0.0f;
    const int chunk = first / chunk_inputs * to.step;
    to.scales[chunk] = finite ? (factor == 0.0f ? 0.0f : largest / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    alignas(64) int8_t values[chunk_inputs];
    if (count < chunk_inputs || factor == 0.0f) std::memset(values, 0, sizeof values);
    for (int i = 0; i < count && factor != 0.0f; i += 32) round_32(x + i, factor, values + i);
    ChunkSums sums;
    sum_values(values, sums);
    to.sums256[chunk] = -128 * sums.all;
    put_strided(reinterpret_cast<const int32_t*>(values), count / 4, to.values + first / 4 * to.step, to.step);
    if (to.sums32 == nullptr) return;
    for (int g = 0; g < count / 32; ++g) {
        const int at = (first / 32 + g) * to.step;
        to.sums32[at] = float(sums.of32[g]);
        to.minus32[at] = -sums.of32[g];
        to.minus16[2 * at] = -sums.of16[2 * g];
        to.minus16[2 * at + to.step] = -sums.of16[2 * g + 1];
    }
}

// x [inputs] -> one row of the activations.
inline void quantise_row(const float* x, int inputs, const ActivationRow& to) {
    for (int first = 0; first < inputs; first += chunk_inputs)
        quantise_chunk(x + first, first, inputs - first < chunk_inputs ? inputs - first : chunk_inputs, to);
}

}  // namespace kveik::KVEIK_ISA
