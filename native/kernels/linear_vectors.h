// The vectors of products on each instruction set: sixteen outputs side by side, as 4 bytes, an int32 or a float each.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

#if defined(__AVX512BW__)

struct Bytes {
    __m512i v;
};
struct Ints {
    __m512i v;
};
struct Floats {
    __m512 v;
};

inline Bytes load_bytes(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
inline void store_bytes(uint8_t* to, Bytes b) { _mm512_storeu_si512(to, b.v); }
inline Bytes low_nibbles(Bytes b) { return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes b) { return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))}; }

// value | (bits of `high` from `from` on, as `mask` has them at 4 and up).
template <int from, int mask>
inline Bytes with_high(Bytes value, Bytes high) {
    __m512i moved = high.v;
    if constexpr (from < 4) moved = _mm512_slli_epi16(moved, 4 - from);
    if constexpr (from > 4) moved = _mm512_srli_epi16(moved, from - 4);
    return {_mm512_ternarylogic_epi32(moved, _mm512_set1_epi8(mask), value.v, 0xea)};  // (moved & mask) | value
}

inline Ints zero_ints() { return {_mm512_setzero_si512()}; }
inline Ints splat_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
template <int by>
inline Ints shift_left(Ints x) {
    return {__m512i((i32x16)x.v << by)};
}

inline Floats to_floats(Ints x) { return {__m512(to_f32((i32x16)x.v))}; }
inline Floats zero_floats() { return {_mm512_setzero_ps()}; }
inline Floats splat_floats(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load_floats(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x.v); }
inline Floats load_halves(const uint8_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline __m128i load_16(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline Floats load_int8(const uint8_t* from) { return to_floats({_mm512_cvtepi8_epi32(load_16(from))}); }
inline Floats load_uint8(const uint8_t* from) { return to_floats({_mm512_cvtepu8_epi32(load_16(from))}); }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats quotient(Floats a, float b) { return {_mm512_div_ps(a.v, _mm512_set1_ps(b))}; }
// a / b, or 0 where b is not above 0.
inline Floats quotient_or_0(float a, Floats b) {
    return {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(b.v, _mm512_setzero_ps(), _CMP_GT_OQ), _mm512_set1_ps(a), b.v)};
}
inline Floats size_of(Floats a) { return {__m512((i32x16)a.v & 0x7fffffff)}; }
// NaN where either is.
inline Floats larger(Floats a, Floats b) {
    return {_mm512_mask_mov_ps(_mm512_max_ps(b.v, a.v), _mm512_cmp_ps_mask(b.v, b.v, _CMP_UNORD_Q), b.v)};
}
inline Bytes raised(Bytes a, int by) { return {_mm512_add_epi8(a.v, _mm512_set1_epi8(char(by)))}; }

#if defined(__AVX512VNNI__)
// What `dot` multiplies: values of `bits` bits as they are.
template <int bits>
using Factors = Bytes;
template <int bits>
inline Bytes factors(Bytes b) {
    return b;
}
// acc + the sum over an output's 4 bytes, unsigned, times `quad`'s 4, signed.
template <int bits>
inline Ints dot(Ints acc, Bytes w, const int32_t& quad) {
    // As an intrinsic it makes the compiler copy sums from register to register, and spill them.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(quad));
    return acc;
}
#else
// Two products are added in 16 bits: enough up to 7 bits. Of 8, the lower 7 and the uppermost are summed apart.
template <int bits>
struct Factors {
    __m512i low, top;
};
template <int bits>
inline Factors<bits> factors(Bytes b) {
    if constexpr (bits < 8) return {b.v, b.v};
    const __m512i one = _mm512_set1_epi8(1);
    return {_mm512_and_si512(b.v, _mm512_set1_epi8(127)), _mm512_and_si512(_mm512_srli_epi16(b.v, 7), one)};
}
template <int bits>
inline Ints dot(Ints acc, Factors<bits> w, int32_t quad) {
    const __m512i a = _mm512_set1_epi32(quad);
    __m512i sums = _mm512_madd_epi16(_mm512_maddubs_epi16(w.low, a), _mm512_set1_epi16(1));
    if constexpr (bits == 8)
        sums = _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w.top, a), _mm512_set1_epi16(128)));
    return {_mm512_add_epi32(acc.v, sums)};
}
#endif

#elif defined(__AVX2__)

struct Bytes {
    __m256i a, b;
};
struct Ints {
    __m256i a, b;
};
struct Floats {
    __m256 a, b;
};

inline __m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline Bytes load_bytes(const uint8_t* from) { return {load256(from), load256(from + 32)}; }
inline void store_bytes(uint8_t* to, Bytes b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), b.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), b.b);
}
inline Bytes masked(Bytes x, int mask) {
    return {_mm256_and_si256(x.a, _mm256_set1_epi8(char(mask))), _mm256_and_si256(x.b, _mm256_set1_epi8(char(mask)))};
}
template <int by>
inline Bytes shifted_right(Bytes x) {
    if constexpr (by < 0) return {_mm256_slli_epi16(x.a, -by), _mm256_slli_epi16(x.b, -by)};
    return {_mm256_srli_epi16(x.a, by), _mm256_srli_epi16(x.b, by)};
}
inline Bytes low_nibbles(Bytes b) { return masked(b, 15); }
inline Bytes high_nibbles(Bytes b) { return masked(shifted_right<4>(b), 15); }
template <int from, int mask>
inline Bytes with_high(Bytes value, Bytes high) {
    const Bytes moved = masked(shifted_right<from - 4>(high), mask);
    return {_mm256_or_si256(value.a, moved.a), _mm256_or_si256(value.b, moved.b)};
}

inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints splat_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
template <int by>
inline Ints shift_left(Ints x) {
    return {_mm256_slli_epi32(x.a, by), _mm256_slli_epi32(x.b, by)};
}

inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat_floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load_floats(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store_floats(float* to, Floats x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
inline Floats load_halves(const uint8_t* from) {
    const auto* at = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline __m128i load_8(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
inline Floats load_int8(const uint8_t* from) {
    return to_floats({_mm256_cvtepi8_epi32(load_8(from)), _mm256_cvtepi8_epi32(load_8(from + 8))});
}
inline Floats load_uint8(const uint8_t* from) {
    return to_floats({_mm256_cvtepu8_epi32(load_8(from)), _mm256_cvtepu8_epi32(load_8(from + 8))});
}
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline Floats quotient(Floats a, float b) {
    return {_mm256_div_ps(a.a, _mm256_set1_ps(b)), _mm256_div_ps(a.b, _mm256_set1_ps(b))};
}
inline __m256 quotient_or_0(__m256 a, __m256 b) {
    return _mm256_and_ps(_mm256_div_ps(a, b), _mm256_cmp_ps(b, _mm256_setzero_ps(), _CMP_GT_OQ));
}
inline Floats quotient_or_0(float a, Floats b) {
    return {quotient_or_0(_mm256_set1_ps(a), b.a), quotient_or_0(_mm256_set1_ps(a), b.b)};
}
inline Floats size_of(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.a), _mm256_andnot_ps(sign, a.b)};
}
inline __m256 larger(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(b, a), b, _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
}
inline Floats larger(Floats a, Floats b) { return {larger(a.a, b.a), larger(a.b, b.b)}; }
inline Bytes raised(Bytes a, int by) {
    return {_mm256_add_epi8(a.a, _mm256_set1_epi8(char(by))), _mm256_add_epi8(a.b, _mm256_set1_epi8(char(by)))};
}

// As above: of 8 bits, the lower 7 and the uppermost are summed apart.
template <int bits>
struct Factors {
    Bytes low, top;
};
template <int bits>
inline Factors<bits> factors(Bytes b) {
    if constexpr (bits < 8) return {b, b};
    return {masked(b, 127), masked(shifted_right<7>(b), 1)};
}
inline __m256i pairs(__m256i w, __m256i a, int16_t weight) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(weight));
}
template <int bits>
inline Ints dot(Ints acc, Factors<bits> w, int32_t quad) {
    const __m256i a = _mm256_set1_epi32(quad);
    acc = {_mm256_add_epi32(acc.a, pairs(w.low.a, a, 1)), _mm256_add_epi32(acc.b, pairs(w.low.b, a, 1))};
    if constexpr (bits == 8)
        acc = {_mm256_add_epi32(acc.a, pairs(w.top.a, a, 128)), _mm256_add_epi32(acc.b, pairs(w.top.b, a, 128))};
    return acc;
}

#else

struct Bytes {
    uint8_t v[64];
};
struct Ints {
    int32_t v[16];
};
struct Floats {
    float v[16];
};

// A vector of To whose every element is made from the one at its place.
template <class To, class Make>
inline To made(int count, Make&& make) {
    To to;
    for (int i = 0; i < count; ++i) to.v[i] = make(i);
    return to;
}
inline Bytes load_bytes(const uint8_t* from) {
    Bytes b;
    std::memcpy(&b, from, 64);
    return b;
}
inline void store_bytes(uint8_t* to, Bytes b) { std::memcpy(to, &b, 64); }
inline Bytes low_nibbles(Bytes b) {
    return made<Bytes>(64, [&](int i) { return uint8_t(b.v[i] & 15); });
}
inline Bytes high_nibbles(Bytes b) {
    return made<Bytes>(64, [&](int i) { return uint8_t(b.v[i] >> 4); });
}
template <int from, int mask>
inline Bytes with_high(Bytes value, Bytes high) {
    return made<Bytes>(64, [&](int i) { return uint8_t(value.v[i] | (((high.v[i] << 4) >> from) & mask)); });
}
inline Ints zero_ints() { return Ints{}; }
inline Ints splat_ints(int32_t x) {
    return made<Ints>(16, [&](int) { return x; });
}
template <int by>
inline Ints shift_left(Ints x) {
    return made<Ints>(16, [&](int i) { return x.v[i] * (1 << by); });
}
inline Floats to_floats(Ints x) {
    return made<Floats>(16, [&](int i) { return float(x.v[i]); });
}
inline Floats zero_floats() { return Floats{}; }
inline Floats splat_floats(float x) {
    return made<Floats>(16, [&](int) { return x; });
}
inline Floats load_floats(const float* from) {
    return made<Floats>(16, [&](int i) { return from[i]; });
}
inline void store_floats(float* to, Floats x) { std::memcpy(to, &x, 64); }
inline Floats load_halves(const uint8_t* from) {
    return made<Floats>(16, [&](int i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        return f16_to_f32(half);
    });
}
inline Floats load_int8(const uint8_t* from) {
    return made<Floats>(16, [&](int i) { return float(int8_t(from[i])); });
}
inline Floats load_uint8(const uint8_t* from) {
    return made<Floats>(16, [&](int i) { return float(from[i]); });
}
inline Floats operator+(Floats a, Floats b) {
    return made<Floats>(16, [&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats operator*(Floats a, Floats b) {
    return made<Floats>(16, [&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return made<Floats>(16, [&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Floats quotient(Floats a, float b) {
    return made<Floats>(16, [&](int i) { return a.v[i] / b; });
}
inline Floats quotient_or_0(float a, Floats b) {
    return made<Floats>(16, [&](int i) { return b.v[i] > 0 ? a / b.v[i] : 0.0f; });
}
inline Floats size_of(Floats a) {
    return made<Floats>(16, [&](int i) { return std::fabs(a.v[i]); });
}
inline Floats larger(Floats a, Floats b) {
    return made<Floats>(16, [&](int i) { return a.v[i] != a.v[i] || b.v[i] <= a.v[i] ? a.v[i] : b.v[i]; });
}
inline Bytes raised(Bytes a, int by) {
    return made<Bytes>(64, [&](int i) { return uint8_t(a.v[i] + by); });
}
template <int bits>
using Factors = Bytes;
template <int bits>
inline Bytes factors(Bytes b) {
    return b;
}
template <int bits>
inline Ints dot(Ints acc, const Bytes& w, int32_t quad) {
    int8_t a[4];
    std::memcpy(a, &quad, 4);
    return made<Ints>(16, [&](int i) {
        const uint8_t* of = w.v + 4 * i;
        return acc.v[i] + of[0] * a[0] + of[1] * a[1] + of[2] * a[2] + of[3] * a[3];
    });
}

#endif

}  // namespace kveik::KVEIK_ISA
