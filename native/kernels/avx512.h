// What the AVX-512 kernels of attention share.
#pragma once

#include "kernels/simd.h"

#if defined(__AVX512F__)

namespace kveik::KVEIK_ISA {

// 2^x for x >= -200, relative error below 1e-7; smaller x count as that, NaN stays NaN. A polynomial on [-1/2, 1/2], fitted
// for the smallest relative error.
inline __m512 exp2_of(__m512 x) {
    // The second operand is what comes out where one is NaN.
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3276472106e-03f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6755413356e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5507132731e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022119724e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314696706e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

constexpr float log2e = 1.44269504088896341f;

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
