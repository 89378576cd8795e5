// What the AVX-512 kernels of attention share.
#pragma once

#include "kernels/simd.h"

#if defined(__AVX512F__)

namespace kveik::KVEIK_ISA {

// Four rows of four 128-bit lanes each: out[j] becomes lane j of all four.
inline void transpose_lanes(__m512i a, __m512i b, __m512i c, __m512i d, __m512i out[4]) {
    const __m512i ab_low = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
    const __m512i cd_low = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
    out[0] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
    out[1] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
    out[2] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
    out[3] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// Sums of the four numbers in each 128-bit lane of four vectors: lane L of the result holds those of lane L of a, b, c, d.
inline __m512 sums_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

}  // namespace kveik::KVEIK_ISA

#endif
