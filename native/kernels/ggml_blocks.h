// Blocks of GGUF files (ggml-common.h of https://github.com/ggml-org/ggml): their values as unsigned bytes, and 6-bit factors.
#pragma once

#include <cstring>

#include "kernels/linear_layout.h"

namespace kveik::KVEIK_ISA {

// Where in a block its parts lie.
constexpr int super_scales = 4, q5_k_fifth = 16, q6_k_pairs = 128, q6_k_scales = 192, q6_k_d = 208;

// nibbles [count] -> values [2 * count]: first the lower halves.
inline void split_nibbles(const uint8_t* from, int count, uint8_t* values) {
    for (int i = 0; i < count; ++i) {
        values[i] = from[i] & 15;
        values[count + i] = from[i] >> 4;
    }
}

inline void read_q5(const uint8_t* fifth, const uint8_t* nibbles, uint8_t* values) {
    uint32_t bits;
    std::memcpy(&bits, fifth, 4);
    split_nibbles(nibbles, 16, values);
    for (int i = 0; i < 32; ++i) values[i] |= uint8_t((bits >> i & 1) << 4);
}

inline void read_q8_0(const uint8_t* from, uint8_t* values) {
    for (int i = 0; i < 32; ++i) values[i] = from[i] ^ 0x80;
}

inline void read_q4_k(const uint8_t* nibbles, uint8_t* values) {
    for (int pair = 0; pair < 4; ++pair) split_nibbles(nibbles + 32 * pair, 32, values + 64 * pair);
}

inline void read_q5_k(const uint8_t* fifth, uint8_t* values) {
    read_q4_k(fifth + 32, values);
    for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 32; ++i) values[32 * g + i] |= uint8_t((fifth[i] >> g & 1) << 4);
}

inline void read_q6_k(const uint8_t* block, uint8_t* values) {
    for (int half = 0; half < 2; ++half) {
        split_nibbles(block + 64 * half, 64, values + 128 * half);
        const uint8_t* pairs = block + q6_k_pairs + 32 * half;
        for (int g = 0; g < 4; ++g)
            for (int i = 0; i < 32; ++i) values[128 * half + 32 * g + i] |= uint8_t((pairs[i] >> (2 * g) & 3) << 4);
    }
}

// A block's values, its zero not yet subtracted.
inline void read_values(WeightFormat format, const uint8_t* block, uint8_t* values) {
    switch (format) {
        case WeightFormat::q4_0: return split_nibbles(block + 2, 16, values);
        case WeightFormat::q4_1: return split_nibbles(block + 4, 16, values);
        case WeightFormat::q5_0: return read_q5(block + 2, block + 6, values);
        case WeightFormat::q5_1: return read_q5(block + 4, block + 8, values);
        case WeightFormat::q8_0: return read_q8_0(block + 2, values);
        case WeightFormat::q4_k: return read_q4_k(block + 16, values);
        case WeightFormat::q5_k: return read_q5_k(block + q5_k_fifth, values);
        case WeightFormat::q6_k: return read_q6_k(block, values);
        default: return;
    }
}

struct Factors6 {
    uint8_t scale[8], minimum[8];
};

// The 8 scales and 8 minima of 6 bits in the 12 bytes of q4_k and q5_k.
inline Factors6 read_factors(const uint8_t* from) {
    Factors6 factors;
    for (int g = 0; g < 4; ++g) {
        factors.scale[g] = from[g] & 63;
        factors.minimum[g] = from[4 + g] & 63;
        factors.scale[4 + g] = uint8_t((from[8 + g] & 15) | (from[g] >> 6) << 4);
        factors.minimum[4 + g] = uint8_t(from[8 + g] >> 4 | (from[4 + g] >> 6) << 4);
    }
    return factors;
}

}  // namespace kveik::KVEIK_ISA
