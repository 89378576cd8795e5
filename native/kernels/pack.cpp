// The file's blocks -> panels of 16 outputs (linear_layout.h).
#include "kernels/pack.h"

#include <cmath>

#include "kernels/ggml_blocks.h"

namespace kveik::KVEIK_ISA {

// One output's 32 values of a group into its lanes of the group's vectors, which are zeros so far.
static void put_group(int bits, const uint8_t* values, int output, uint8_t* group) {
    uint8_t* lane = group + 4 * output;
    if (bits == 8) {
        for (int quad = 0; quad < 8; ++quad) std::memcpy(lane + 64 * quad, values + 4 * quad, 4);
        return;
    }
    for (int quad = 0; quad < 4; ++quad)
        for (int b = 0; b < 4; ++b) {
            const int low = values[4 * quad + b], high = values[16 + 4 * quad + b];
            lane[64 * quad + b] = uint8_t((low & 15) | (high & 15) << 4);
            if (bits == 5) lane[256 + b] |= uint8_t((low >> 4) << quad | (high >> 4) << (quad + 4));
            if (bits == 6) {
                lane[256 + b] |= uint8_t((low >> 4) << (2 * quad));
                lane[320 + b] |= uint8_t((high >> 4) << (2 * quad));
            }
        }
}

static void put_half(uint8_t* lanes, int output, const uint8_t* half) { std::memcpy(lanes + 2 * output, half, 2); }

// The 6-bit factors of one output's block into the chunk's scales.
static void put_factors(const uint8_t* block, int output, uint8_t* to) {
    const Factors6 factors = read_factors(block + super_scales);
    for (int g = 0; g < 4; ++g) {
        const int at = g * 16 + output, s0 = factors.scale[g], s4 = factors.scale[g + 4], m0 = factors.minimum[g],
                  m4 = factors.minimum[g + 4];
        to[at] = uint8_t((s0 & 15) | (s4 & 15) << 4);
        to[64 + at] = uint8_t((m0 & 15) | (m4 & 15) << 4);
        to[128 + at] = uint8_t(s0 >> 4 | (s4 >> 4) << 2 | (m0 >> 4) << 4 | (m4 >> 4) << 6);
    }
    put_half(to + 192, output, block);
    put_half(to + 224, output, block + 2);
}

// One output's scales of a chunk, whose blocks are given.
static void put_scales(WeightFormat format, const uint8_t* blocks, int groups, int output, uint8_t* to) {
    const FormatTraits traits = traits_of(format);
    if (format == WeightFormat::q6_k) {
        for (int half = 0; half < 16; ++half) to[half * 16 + output] = blocks[q6_k_scales + half];
        put_half(to + 256, output, blocks + q6_k_d);
    } else if (traits.super) {
        put_factors(blocks, output, to);
    } else {
        for (int g = 0; g < groups; ++g) {
            put_half(to + 32 * g, output, blocks + g * traits.block_bytes);
            if (traits.minimum) put_half(to + 32 * (groups + g), output, blocks + g * traits.block_bytes + 2);
        }
    }
}

static void pack_panel(WeightFormat format, const uint8_t* blocks, int outputs, int inputs, uint8_t* panel) {
    const FormatTraits traits = traits_of(format);
    const int64_t row_bytes = int64_t(inputs) / traits.block_inputs * traits.block_bytes;
    std::memset(panel, 0, size_t(panel_bytes(format, inputs)));
    uint8_t* chunk = panel;
    for (int first = 0; first < inputs; first += chunk_inputs) {
        const int groups = std::min(chunk_inputs, inputs - first) / group_inputs;
        uint8_t* weights = chunk + scale_bytes(format, groups);
        for (int o = 0; o < outputs; ++o) {
            const uint8_t* block = blocks + o * row_bytes + int64_t(first) / traits.block_inputs * traits.block_bytes;
            put_scales(format, block, groups, o, chunk);
            uint8_t values[chunk_inputs];
            for (int at = 0; at < groups * group_inputs; at += traits.block_inputs, block += traits.block_bytes)
                read_values(format, block, values + at);
            for (int g = 0; g < groups; ++g)
                put_group(traits.bits, values + g * group_inputs, o, weights + g * group_bytes(format));
        }
        chunk += chunk_bytes(format, groups);
    }
}

void pack(WeightFormat format, const uint8_t* blocks, int outputs, int inputs, uint8_t* packed, Team& team) {
    const FormatTraits traits = traits_of(format);
    const int64_t row_bytes = int64_t(inputs) / traits.block_inputs * traits.block_bytes;
    team.each(outputs, panel_outputs, [&](int64_t first, int64_t last) {
        pack_panel(format, blocks + first * row_bytes, int(last - first), inputs,
                   packed + first / panel_outputs * panel_bytes(format, inputs));
    });
}

}  // namespace kveik::KVEIK_ISA
