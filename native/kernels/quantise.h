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

inline int32_t sum(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += v[i];
    return total;
#endif
}

// The bits of the largest magnitude among x[0..count): as integers they are in order, and a NaN's are beyond an infinity's.
inline int32_t largest_bits(const float* x, int count) {
    i32x16 most{};
    for (int i = 0; i < count; i += 16) {
        const i32x16 bits = (i32x16)load(x + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
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

// x[0..count), at most a chunk of it, from input `first` of the row on.
inline void quantise_chunk(const float* x, int first, int count, const ActivationRow& to) {
    const int32_t bits = largest_bits(x, count);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const bool finite = bits < 0x7f800000;
    const float factor = finite && largest > quantise_smallest ? 127.0f / largest : 0.0f;
    const int chunk = first / chunk_inputs * to.step;
    to.scales[chunk] = finite ? (factor == 0.0f ? 0.0f : largest / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    i32x16 total{};
    int32_t half = 0;
    for (int i = 0; i < count; i += 16) {
        // Rounded to nearest by adding 1.5 * 2^23; a chunk that is not finite becomes zeros.
        const f32x16 magic = product(load(x + i), factor) + 12582912.0f;
        const i32x16 rounded = finite ? (i32x16)magic - 0x4b400000 : i32x16{};
        const i8x16 bytes = __builtin_convertvector(rounded, i8x16);
        int32_t quads[4];
        std::memcpy(quads, &bytes, 16);
        int32_t* values = to.values + (first + i) / 4 * to.step;
        for (int k = 0; k < 4; ++k) values[k * to.step] = quads[k];
        total += rounded;
        if (to.sums32 == nullptr) continue;
        const int32_t of16 = sum(rounded);
        to.minus16[(first + i) / 16 * to.step] = -of16;
        if (i % 32 == 0) {
            half = of16;
        } else {
            to.minus32[(first + i) / 32 * to.step] = -(half + of16);
            to.sums32[(first + i) / 32 * to.step] = float(half + of16);
        }
    }
    to.sums256[chunk] = -128 * sum(total);
}

// x [inputs] -> one row of the activations.
inline void quantise_row(const float* x, int inputs, const ActivationRow& to) {
    for (int first = 0; first < inputs; first += chunk_inputs)
        quantise_chunk(x + first, first, inputs - first < chunk_inputs ? inputs - first : chunk_inputs, to);
}

}  // namespace kveik::KVEIK_ISA
