// Rows of packed weights -> the float32 values that the file's blocks stand for, bit for bit.
#include "kernels/ggml_blocks.h"
#include "kernels/pack.h"
#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

static float half_at(const uint8_t* lanes, int output) {
    uint16_t bits;
    std::memcpy(&bits, lanes + 2 * output, 2);
    return f16_to_f32(bits);
}

// A value that the compiler does not fuse into the addition that follows: the file's format rounds twice.
static float rounded(float x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#else
    asm("" : "+w"(x));
#endif
    return x;
}

// One output's value `i` of a group, its zero not yet subtracted.
static int value_at(int bits, const uint8_t* group, int output, int i) {
    const int quad = i / 4, b = 4 * output + i % 4;
    if (bits == 8) return group[64 * quad + b];
    const int both = group[64 * (quad % 4) + b], nibble = quad < 4 ? both & 15 : both >> 4;
    if (bits == 5) return nibble | (group[256 + b] >> quad & 1) << 4;
    if (bits == 6) return nibble | (group[256 + 64 * (quad / 4) + b] >> (2 * (quad % 4)) & 3) << 4;
    return nibble;
}

struct Scale {
    float scale, minimum;
};

// Of a group, or for q6_k of a half group.
static Scale scale_at(WeightFormat format, const uint8_t* chunk, int groups, int output, int index) {
    const FormatTraits traits = traits_of(format);
    if (format == WeightFormat::q6_k)
        return {half_at(chunk + 256, output) * float(int8_t(chunk[16 * index + output])), 0};
    if (!traits.super)
        return {half_at(chunk + 32 * index, output), traits.minimum ? half_at(chunk + 32 * (groups + index), output) : 0};
    const int at = index % 4 * 16 + output, shift = index / 4 * 4, upper = chunk[128 + at] >> (index / 4 * 2);
    const int scale = (chunk[at] >> shift & 15) | (upper & 3) << 4;
    const int minimum = (chunk[64 + at] >> shift & 15) | (upper >> 4 & 3) << 4;
    return {half_at(chunk + 192, output) * float(scale), -(half_at(chunk + 224, output) * float(minimum))};
}

static void unpack_row(const PackedWeight& weight, int output, float* out) {
    const FormatTraits traits = traits_of(weight.format);
    const int lane = output % panel_outputs, per_scale = weight.format == WeightFormat::q6_k ? 16 : 32;
    const uint8_t* chunk = weight.bytes + output / panel_outputs * panel_bytes(weight.format, weight.inputs);
    for (int first = 0; first < weight.inputs; first += chunk_inputs) {
        const int groups = std::min(chunk_inputs, weight.inputs - first) / group_inputs;
        const uint8_t* values = chunk + scale_bytes(weight.format, groups);
        for (int at = 0; at < groups * group_inputs; at += per_scale) {
            const Scale by = scale_at(weight.format, chunk, groups, lane, at / per_scale);
            const uint8_t* group = values + at / group_inputs * group_bytes(weight.format);
            for (int i = 0; i < per_scale; ++i) {
                const float value = float(value_at(traits.bits, group, lane, at % group_inputs + i) - traits.zero);
                const float scaled = rounded(value * by.scale);
                out[first + at + i] = traits.minimum ? scaled + by.minimum : scaled;
            }
        }
        chunk += chunk_bytes(weight.format, groups);
    }
}

void unpack(const PackedWeight& weight, const int32_t* outputs_wanted, int count, float* out, Team& team) {
    team.each(count, 1, [&](int64_t first, int64_t) {
        unpack_row(weight, outputs_wanted[first], out + first * weight.inputs);
    });
}

}  // namespace kveik::KVEIK_ISA
