// Reading packed weights: the scales of a chunk and the values of a group, as vectors of sixteen outputs.
#pragma once

#include "kernels/linear_layout.h"
#include "kernels/linear_vectors.h"

namespace kveik::KVEIK_ISA {

// The scales of a chunk, each made when it is wanted: of a group, or of a half group (q6_k).
template <WeightFormat format, bool super = traits_of(format).super>
struct ChunkScales {
    const uint8_t* chunk;
    int groups;
    ChunkScales(const uint8_t* chunk, int groups) : chunk(chunk), groups(groups) {}
    Floats scale(int g) const { return load_halves(chunk + g * 32); }
    Floats minimum(int g) const { return load_halves(chunk + (groups + g) * 32); }
};

// q4_k and q5_k: 6-bit factors of d, and of dmin, which is subtracted.
template <WeightFormat format>
struct ChunkScales<format, true> {
    uint8_t scales[128], minima[128];
    Floats d, dmin;
    ChunkScales(const uint8_t* chunk, int) : d(load_halves(chunk + 192)), dmin(load_halves(chunk + 224) * splat_floats(-1.0f)) {
        const Bytes scale = load_bytes(chunk), minimum = load_bytes(chunk + 64), upper = load_bytes(chunk + 128);
        store_bytes(scales, with_high<0, 0x30>(low_nibbles(scale), upper));
        store_bytes(scales + 64, with_high<2, 0x30>(high_nibbles(scale), upper));
        store_bytes(minima, with_high<4, 0x30>(low_nibbles(minimum), upper));
        store_bytes(minima + 64, with_high<6, 0x30>(high_nibbles(minimum), upper));
    }
    Floats scale(int g) const { return d * load_uint8(scales + 16 * g); }
    Floats minimum(int g) const { return dmin * load_uint8(minima + 16 * g); }
};

template <>
struct ChunkScales<WeightFormat::q6_k, true> {
    const uint8_t* chunk;
    Floats d;
    ChunkScales(const uint8_t* chunk, int) : chunk(chunk), d(load_halves(chunk + 256)) {}
    Floats scale(int half) const { return d * load_int8(chunk + 16 * half); }
};

// Quad k of a group, unsigned.
template <int bits, int k>
inline Bytes quad(const uint8_t* group) {
    if constexpr (bits == 8) return load_bytes(group + 64 * k);
    else {
        const Bytes both = load_bytes(group + 64 * (k % 4));
        const Bytes value = k < 4 ? low_nibbles(both) : high_nibbles(both);
        if constexpr (bits == 5) return with_high<k, 0x10>(value, load_bytes(group + 256));
        else if constexpr (bits == 6) return with_high<2 * (k % 4), 0x30>(value, load_bytes(group + 256 + 64 * (k / 4)));
        else return value;
    }
}

}  // namespace kveik::KVEIK_ISA
