// The two ways in which a chunk's products are computed: pairs of bfloat16 numbers, or single float32 ones. A word is either.
#pragma once

#include "kernels/kv_types.h"

namespace kveik::KVEIK_ISA {

// Sixteen words: numbers of sixteen lanes, or pairs of them.
typedef u32x16 Words;

inline Words load_words(const uint32_t* from) { return load_as<Words>(from); }
inline void store_words(uint32_t* to, Words v) { std::memcpy(to, &v, 64); }

struct F32Products {
    static constexpr int per_word = 1;

    static f32x16 dot(f32x16 sum, Words a, uint32_t b) {
        float x;
        std::memcpy(&x, &b, 4);
        return sum + (f32x16)a * x;
    }
    // Sixteen stored numbers to as many words.
    template <KvType type>
    static void unpack(const uint8_t* from, uint32_t* to) {
        store_words(to, (Words)load_stored<type>(from));
    }
    static Words pack(f32x16 only) { return (Words)only; }
};

#if defined(__AVX512BF16__)
struct Bf16Products {
    static constexpr int per_word = 2;

    static f32x16 dot(f32x16 sum, Words a, uint32_t b) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)_mm512_set1_epi32(int(b)));
    }
    // Sixteen stored numbers to eight words.
    template <KvType type>
    static void unpack(const uint8_t* from, uint32_t* to) {
        if constexpr (type == KvType::bf16) std::memcpy(to, from, 32);
        else _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)load_stored<type>(from)));
    }
    // Lane by lane, the first of a pair and the second.
    static Words pack(f32x16 first, f32x16 second) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                               23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
    // Numbers 0 to 15 of two rows of bfloat16, number by number.
    static Words interleave(const uint32_t* first, const uint32_t* second) {
        const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
        const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
        return (Words)_mm512_or_si512(a, _mm512_slli_epi32(b, 16));
    }
};
#endif

// sum += the products of `rows` times `vectors`: a [steps][strip_lanes] words, b: row r's words at r * b_row, step by b_step.
template <class Products, int rows, int vectors>
inline void multiply(const uint32_t* a, const uint32_t* b, int64_t b_row, int64_t b_step, int steps, int a_step,
                     f32x16 (&sum)[rows][vectors]) {
    for (int step = 0; step < steps; ++step, a += a_step, b += b_step) {
        Words words[vectors];
        for (int v = 0; v < vectors; ++v) words[v] = load_words(a + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sum[r][v] = Products::dot(sum[r][v], words[v], b[r * b_row]);
    }
}

}  // namespace kveik::KVEIK_ISA
