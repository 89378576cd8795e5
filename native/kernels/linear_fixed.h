// Weights in units of their span, in fixed point.
//
// Values of less than 8 bits become (q * factor + offset) >> 8 in 16 bits, factor and offset being 256 times what the group's
// own scale and minimum are in units; values of 8 bits, with factors up to 1, are multiplied in 15 bits.
#pragma once

#include "kernels/linear_vectors.h"

namespace kveik::KVEIK_ISA {

// Half a unit for rounding, and 128 units, because what comes out is stored unsigned.
constexpr int fixed_extra = 128 + 32768;

#if defined(__AVX512BW__)

// For each output, twice in 16 bits: what its values are multiplied with, and what is added.
struct Lanes {
    __m512i factor, offset;
};

inline __m512i twice(__m512i x) {
    return _mm512_or_si512(_mm512_slli_epi32(x, 16), _mm512_and_si512(x, _mm512_set1_epi32(0xffff)));
}

// `minimum` or else `zero` says where the values begin; both factors are rounded. Those that are not finite become anything.
template <int bits, int zero>
inline Lanes lanes_of(Floats factor, const Floats* minimum) {
    const __m512i rounded = _mm512_cvtps_epi32(factor.v);
    __m512i offset = _mm512_setzero_si512();
    if (minimum) offset = _mm512_cvtps_epi32(minimum->v);
    else if constexpr (bits < 8) offset = _mm512_mullo_epi32(rounded, _mm512_set1_epi32(-zero));
    return {twice(rounded), twice(_mm512_add_epi32(offset, _mm512_set1_epi32(fixed_extra)))};
}

template <int bits>
inline void convert(Bytes values, const Lanes& lanes, uint8_t* to) {
    const __m512i upper = _mm512_set1_epi16(int16_t(0xff00)), flip = _mm512_set1_epi16(int16_t(0x8000));
    __m512i even, odd;
    if constexpr (bits == 8) {
        even = _mm512_mulhrs_epi16(_mm512_xor_si512(_mm512_slli_epi16(values.v, 8), flip), lanes.factor);
        odd = _mm512_mulhrs_epi16(_mm512_xor_si512(_mm512_and_si512(values.v, upper), flip), lanes.factor);
    } else {
        even = _mm512_mullo_epi16(_mm512_andnot_si512(upper, values.v), lanes.factor);
        odd = _mm512_mullo_epi16(_mm512_srli_epi16(values.v, 8), lanes.factor);
    }
    even = _mm512_srli_epi16(_mm512_add_epi16(even, lanes.offset), 8);
    odd = _mm512_add_epi16(odd, lanes.offset);
    // (odd & upper) | even
    _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(odd, upper, even, 0xea));
}

#else

struct Lanes {
    int16_t factor[16], offset[16];
};

// Out of range only where the scale is not finite, and then the values do not matter.
inline int rounded_or_0(float x) { return std::fabs(x) < 32768.0f ? int(std::nearbyint(x)) : 0; }

template <int bits, int zero>
inline Lanes lanes_of(Floats factor, const Floats* minimum) {
    float factors[16], minima[16] = {};
    store_floats(factors, factor);
    if (minimum) store_floats(minima, *minimum);
    Lanes lanes;
    for (int o = 0; o < 16; ++o) {
        const int rounded = rounded_or_0(factors[o]);
        lanes.factor[o] = int16_t(rounded);
        lanes.offset[o] = int16_t((minimum ? rounded_or_0(minima[o]) : (bits < 8 ? -zero * rounded : 0)) + fixed_extra);
    }
    return lanes;
}

template <int bits>
inline void convert(Bytes vector, const Lanes& lanes, uint8_t* to) {
    uint8_t values[64];
    store_bytes(values, vector);
    for (int i = 0; i < 64; ++i) {
        const int factor = lanes.factor[i / 4], offset = lanes.offset[i / 4];
        const int scaled = bits == 8 ? ((values[i] - 128) * 256 * factor + 16384) >> 15 : values[i] * factor;
        to[i] = uint8_t(uint16_t(scaled + offset) >> 8);
    }
}

#endif

}  // namespace kveik::KVEIK_ISA
