// Numbers as slots store them, to float32 and back, sixteen at a time, on every instruction set.
#pragma once

#include "kernels/attention.h"
#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(16)));
typedef int8_t i8x16 __attribute__((vector_size(16), aligned(16)));

template <class Vector>
inline Vector load_as(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline f32x16 widen_bf16(const uint8_t* from) {
    return (f32x16)(__builtin_convertvector(load_as<u16x16>(from), u32x16) << 16);
}

// Bits of a small float, moved to where float32 has them, are the number times a power of two; subnormal ones too.
template <int mantissa_bits>
inline f32x16 widen_fp8(const uint8_t* from) {
    const u32x16 bits = __builtin_convertvector(load_as<u8x16>(from), u32x16);
    const f32x16 magnitude = (f32x16)((bits & 0x7f) << (23 - mantissa_bits));
    // 2^(127 - bias): bias 7 for e4m3, 15 for e5m2.
    const f32x16 scaled = magnitude * (mantissa_bits == 3 ? 0x1p120f : 0x1p112f);
    return (f32x16)((u32x16)scaled | (bits & 0x80) << 24);
}

// Numbers 0 to 15 at `from`, before their scale.
template <KvType type>
inline f32x16 load_stored(const uint8_t* from) {
    if constexpr (type == KvType::f32) return load(reinterpret_cast<const float*>(from));
    if constexpr (type == KvType::bf16) return widen_bf16(from);
    if constexpr (type == KvType::int8) return to_f32(__builtin_convertvector(load_as<i8x16>(from), i32x16));
    if constexpr (type == KvType::fp8_e4m3) return widen_fp8<3>(from);
    if constexpr (type == KvType::fp8_e5m2) return widen_fp8<2>(from);
}

// The scale of slot `within` of a record; 1 where the type has none.
template <KvType type>
inline float scale_of(const uint8_t* record, int64_t scales_offset, int within) {
    if constexpr (!has_scales(type)) return 1.0f;
    uint16_t bits;
    std::memcpy(&bits, record + scales_offset + 2 * within, 2);
    return bf16_to_f32(bits);
}

// The largest number of a type, which the largest of a head's numbers is scaled to.
constexpr float most_stored(KvType type) {
    return type == KvType::int8 ? 127.0f : type == KvType::fp8_e4m3 ? 448.0f : 57344.0f;
}

inline void store_bf16(f32x16 v, uint8_t* to) {
    u32x16 bits = (u32x16)v;
    const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = (u32x16)(v != v) ? (bits >> 16) | 0x40 : rounded;
    const u16x16 narrow = __builtin_convertvector(bits, u16x16);
    std::memcpy(to, &narrow, 32);
}

// To the nearest, ties to even. |v| is at most the largest number of the type.
template <int mantissa_bits>
inline void store_fp8(f32x16 v, uint8_t* to) {
    constexpr int shift = 23 - mantissa_bits, bias = mantissa_bits == 3 ? 7 : 15;
    const u32x16 sign = ((u32x16)v >> 24) & 0x80;
    const f32x16 magnitude = abs(v);
    const u32x16 bits = (u32x16)magnitude;
    const u32x16 rounded = (bits + ((1u << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift;
    const u32x16 normal = rounded - ((127 - bias) << mantissa_bits);
    // Below the smallest normal number the steps are even: adding 1.5 * 2^23 steps leaves the rounded count in the low bits.
    constexpr float step = mantissa_bits == 3 ? 0x1p-9f : 0x1p-16f;
    const u32x16 subnormal = (u32x16)(magnitude + 12582912.0f * step) & 0xff;
    constexpr float smallest = mantissa_bits == 3 ? 0x1p-6f : 0x1p-14f;
    const u32x16 code = (u32x16)(magnitude < smallest) ? subnormal : normal;
    const u8x16 narrow = __builtin_convertvector(code | sign, u8x16);
    std::memcpy(to, &narrow, 16);
}

inline void store_int8(f32x16 v, uint8_t* to) {
    const f32x16 rounded = (v + 12582912.0f) - 12582912.0f;
    const i8x16 narrow = __builtin_convertvector(__builtin_convertvector(rounded, i32x16), i8x16);
    std::memcpy(to, &narrow, 16);
}

template <KvType type>
inline void store_number(f32x16 v, uint8_t* to) {
    if constexpr (type == KvType::f32) store(reinterpret_cast<float*>(to), v);
    if constexpr (type == KvType::bf16) store_bf16(v, to);
    if constexpr (type == KvType::int8) store_int8(v, to);
    if constexpr (type == KvType::fp8_e4m3) store_fp8<3>(v, to);
    if constexpr (type == KvType::fp8_e5m2) store_fp8<2>(v, to);
}

// A head's scale, as kveik/kernels/kv_types.py defines it: rounded up, so that no number exceeds the largest of the type; NaN
// where a number is NaN or infinite. Returns its inverse, 0 where all that is stored is zeros.
template <KvType type>
inline float store_scale(const float* head, int head_dim, uint8_t* to) {
    // Magnitudes in order as integers; those of NaN and infinity are the largest.
    i32x16 bits_most{};
    for (int i = 0; i < head_dim; i += 16) {
        const i32x16 bits = (i32x16)abs(load(head + i));
        bits_most = bits > bits_most ? bits : bits_most;
    }
    int32_t most = 0;
    for (int i = 0; i < 16; ++i) most = std::max(most, bits_most[i]);
    if (most >= 0x7f800000) {
        const uint16_t nan = 0x7fc0;
        std::memcpy(to, &nan, 2);
        return 0.0f;
    }
    float magnitude;
    std::memcpy(&magnitude, &most, 4);
    const float ratio = std::max(magnitude / most_stored(type), 0x1p-126f);
    uint32_t wide;
    std::memcpy(&wide, &ratio, 4);
    uint16_t bits = uint16_t((wide + 0xffff) >> 16);
    float inverse = 1.0f / bf16_to_f32(bits);
    if (magnitude == 0) {
        bits = 0x3f80;
        inverse = 1.0f;
    }
    std::memcpy(to, &bits, 2);
    return inverse;
}

// One token's head [head_dim] into slot `within` of a record. A head with a NaN or an infinity gets the scale NaN, so that
// whoever reads it gets NaN.
template <KvType type>
inline void store_slot(const float* head, int head_dim, uint8_t* record, int64_t scales_offset, int within) {
    uint8_t* to = record + int64_t(within) * head_dim * value_bytes(type);
    float inverse = 1.0f;
    if constexpr (has_scales(type)) {
        inverse = store_scale<type>(head, head_dim, record + scales_offset + 2 * within);
        if (inverse == 0.0f) {
            std::memset(to, 0, head_dim);
            return;
        }
    }
    for (int i = 0; i < head_dim; i += 16) store_number<type>(load(head + i) * inverse, to + i * value_bytes(type));
}

}  // namespace kveik::KVEIK_ISA
