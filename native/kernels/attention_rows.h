// Rows of stored numbers as vectors of bfloat16: as they are, or by a table where a number is a byte.
#pragma once

#include "kernels/attention.h"
#include "kernels/simd.h"

#if defined(__AVX512BF16__)

namespace kveik::KVEIK_ISA {

// Four rows of four 128-bit lanes each: out[j] becomes lane j of all four.
[[gnu::always_inline]] inline void transpose_lanes(__m512i a, __m512i b, __m512i c, __m512i d, __m512i out[4]) {
    const __m512i ab_low = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
    const __m512i cd_low = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
    out[0] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
    out[1] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
    out[2] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
    out[3] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// Sums of the four numbers in each 128-bit lane of four vectors: lane L of the result holds those of lane L of a, b, c, d.
[[gnu::always_inline]] inline __m512i sums_of_lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

[[gnu::always_inline]] inline __m512 sums_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// Bits of the bfloat16 that means the same as the byte `magnitude` (0 to 127) of a type. Infinity and NaN are never stored.
constexpr uint16_t bf16_of(KvType type, int magnitude) {
    const int mantissa_bits = type == KvType::fp8_e4m3 ? 3 : 2, bias = type == KvType::fp8_e4m3 ? 7 : 15;
    const int field = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    int number = field == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    int exponent = 127 + 7 + (field == 0 ? 1 : field) - bias - mantissa_bits;
    if (number == 0) return 0;
    // The leading one to bit 7, where the mantissa of a bfloat16 ends.
    while (number < 128) {
        number <<= 1;
        --exponent;
    }
    return uint16_t(exponent << 7 | (number & 127));
}

template <KvType type>
struct Table {
    alignas(64) uint8_t high[128], low[128];

    constexpr Table() : high{}, low{} {
        for (int i = 0; i < 128; ++i) {
            high[i] = uint8_t(bf16_of(type, i) >> 8);
            low[i] = uint8_t(bf16_of(type, i) & 255);
        }
    }
};

// Sums of 64 dimensions, of which vector v holds 4 v to 4 v + 3 of every 16, to [dims].
inline void add_fours(const __m512 sums[4], float* to, int dims) {
    __m512i ordered[4];
    transpose_lanes(_mm512_castps_si512(sums[0]), _mm512_castps_si512(sums[1]), _mm512_castps_si512(sums[2]),
                    _mm512_castps_si512(sums[3]), ordered);
    for (int i = 0; i < dims; i += 16)
        _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), _mm512_castsi512_ps(ordered[i / 16])));
}

struct Bf16Rows {
    static constexpr bool has_scales = false;
    static constexpr int bytes_per_number = 2;
    static constexpr int parts = 1;  // vectors of bfloat16 in a line of 64 bytes

    // Numbers 8 j to 8 j + 7 of each 128-bit lane, j the part.
    [[gnu::always_inline]] void expand(__m512i line, __m512i out[parts]) const { out[0] = line; }

    // Pairs of one number of two rows each, four numbers of every 8 (of every 16 where there are more parts) a vector.
    [[gnu::always_inline]] void interleave(__m512i a, __m512i b, __m512i out[2 * parts]) const {
        out[0] = _mm512_unpacklo_epi16(a, b);
        out[1] = _mm512_unpackhi_epi16(a, b);
    }

    // Sums in the order that interleaving gives, to [dims]: 16 or 32.
    static void add(const __m512 sums[2 * parts], float* to, int dims) {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const auto put = [&](float* at, __m512 v) { _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), v)); };
        put(to, _mm512_permutex2var_ps(sums[0], first, sums[1]));
        if (dims > 16) put(to + 16, _mm512_permutex2var_ps(sums[0], second, sums[1]));
    }
};

template <KvType type>
class ByteRows {
public:
    static constexpr bool has_scales = true;
    static constexpr int bytes_per_number = 1;
    static constexpr int parts = 2;

    [[gnu::always_inline]] void expand(__m512i line, __m512i out[parts]) const {
        // What the table does not tell is the sign; looking up leaves it out of account.
        const __m512i low = _mm512_permutex2var_epi8(low_[0], line, low_[1]);
        const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], line, high_[1]);
        // magnitude | (line & sign)
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, line, sign_, 0xf8);
        out[0] = _mm512_unpacklo_epi8(low, high);
        out[1] = _mm512_unpackhi_epi8(low, high);
    }

    [[gnu::always_inline]] void interleave(__m512i a, __m512i b, __m512i out[2 * parts]) const {
        expand(_mm512_unpacklo_epi8(a, b), out);
        expand(_mm512_unpackhi_epi8(a, b), out + 2);
    }

    static void add(const __m512 sums[2 * parts], float* to, int dims) { add_fours(sums, to, dims); }

private:
    static constexpr Table<type> table_{};

    const __m512i low_[2] = {_mm512_load_si512(table_.low), _mm512_load_si512(table_.low + 64)};
    const __m512i high_[2] = {_mm512_load_si512(table_.high), _mm512_load_si512(table_.high + 64)};
    const __m512i sign_ = _mm512_set1_epi8(char(0x80));
};

}  // namespace kveik::KVEIK_ISA

#endif
