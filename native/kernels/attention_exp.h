// What softmax needs, sixteen lanes at a time. Scores are in units of log 2.
#pragma once

#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

constexpr float log2e = 1.44269504088896341f;

// 2^x, relative error below 2e-7; 0 far below 0, NaN stays NaN.
inline f32x16 exp2(f32x16 x) {
#if defined(__AVX512F__)
    // The second operand is what comes out where one is NaN. 2^-200 is 0 in float32.
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(bounded, whole);
    // A polynomial on [-1/2, 1/2], fitted for the smallest relative error.
    __m512 p = _mm512_set1_ps(1.3276472106e-03f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6755413356e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5507132731e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022119724e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314696706e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return (f32x16)_mm512_scalef_ps(p, whole);
#else
    return exp(x * 0.693147180559945309f);
#endif
}

// The next whole number. Weights are taken relative to a whole power of two: their rounding to bfloat16, and the scaling of
// sums when the power grows, are the same whatever it is, and a result hardly depends on how its context was cut.
inline f32x16 whole_above(f32x16 x) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#else
    for (int i = 0; i < 16; ++i) x[i] = std::ceil(x[i]);
    return x;
#endif
}

// soft_cap * tanh(score / soft_cap), score and result in natural units.
inline f32x16 capped(f32x16 score, float soft_cap) {
    const f32x16 grown = exp(score * (2.0f / soft_cap));
    return soft_cap * (1.0f - 2.0f / (grown + 1.0f));
}

}  // namespace kveik::KVEIK_ISA
