// Vectors of sixteen lanes on every instruction set: GCC's vector extensions, with intrinsics where they do better.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kveik::KVEIK_ISA {

typedef float f32x16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(64)));

inline f32x16 load(const float* from) {
    f32x16 v;
    std::memcpy(&v, from, 64);
    return v;
}
inline void store(float* to, f32x16 v) { std::memcpy(to, &v, 64); }
inline f32x16 splat(float x) { return f32x16{} + x; }
inline f32x16 to_f32(i32x16 v) { return __builtin_convertvector(v, f32x16); }

inline float sum(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < 16; ++i) total += v[i];
    return total;
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline float largest(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < 16; ++i) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

inline f32x16 abs(f32x16 v) { return (f32x16)((i32x16)v & 0x7fffffff); }

// exp(x), relative error below 2e-7 for x in [-87, 88]; 0 below, NaN stays NaN.
// Range reduction by powers of two and a polynomial for the rest (Cephes' expf).
inline f32x16 exp(f32x16 x) {
    const f32x16 low = splat(-87.3f), high = splat(88.3f);
    const auto under = x < low;
    f32x16 t = x > high ? high : x;
    t = under ? low : t;
    f32x16 n = t * 1.44269504088896341f;
    // Rounding to the nearest integer by adding 1.5 * 2^23.
    n = (n + 12582912.0f) - 12582912.0f;
    f32x16 r = t - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    const f32x16 result = p * (f32x16)power;
    return x != x ? x : (under ? f32x16{} : result);
}

inline float bf16_to_f32(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

// Rounded to nearest, ties to even; a NaN stays one.
inline uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    uint32_t wide;
    float x;
    if (exponent == 0) {
        x = std::ldexp(float(mantissa), -24);
        return sign ? -x : x;
    }
    wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | (mantissa << 13);
    std::memcpy(&x, &wide, 4);
    return x;
#endif
}

}  // namespace kveik::KVEIK_ISA
