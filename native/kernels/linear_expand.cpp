// A panel's spans -> int8 with one scale per output and span: w = scale * (value - 128), rounded to the nearest such.
//
// A value q of less than 8 bits becomes (q * factor + offset) >> 8 in 16 bits, factor and offset being 256 times what the
// group's own scale and minimum are in units of the span's; values of 8 bits, with factors up to 1, are multiplied in 15 bits.
#include "kernels/linear_many.h"

#include <cmath>

#include "kernels/linear_scales.h"

namespace kveik::KVEIK_ISA {

// Of a chunk: [half groups or groups][16 outputs].
struct Scales {
    alignas(64) float scale[16][16];
    alignas(64) float minimum[8][16];
};

template <WeightFormat format>
static void load_scales(const uint8_t* chunk, int groups, Scales& to) {
    const ChunkScales<format> scales(chunk, groups);
    for (int i = 0; i < (format == WeightFormat::q6_k ? 16 : groups); ++i) {
        store_floats(to.scale[i], scales.scale(i));
        if constexpr (traits_of(format).minimum) store_floats(to.minimum[i], scales.minimum(i));
    }
}

// 127 units of an output's span: the largest magnitude that its groups can stand for. A NaN or an infinity makes it NaN.
template <WeightFormat format>
static void largest_values(const Scales& scales, int begin, int end, float* largest) {
    constexpr FormatTraits traits = traits_of(format);
    constexpr float most = float((1 << traits.bits) - 1);
    bool finite[16];
    for (int o = 0; o < 16; ++o) {
        largest[o] = 0;
        finite[o] = true;
    }
    for (int i = begin; i < end; ++i)
        for (int o = 0; o < 16; ++o) {
            const float scale = scales.scale[i][o], low = traits.minimum ? scales.minimum[i][o] : scale * float(traits.zero);
            const float high = traits.minimum ? low + most * scale : low;
            const float size = std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
            finite[o] = finite[o] && std::fabs(low) < INFINITY && std::fabs(high) < INFINITY;
            largest[o] = size > largest[o] ? size : largest[o];
        }
    for (int o = 0; o < 16; ++o) largest[o] = finite[o] ? largest[o] : NAN;
}

// For each byte of a vector [16 outputs][4]: what its value is multiplied with, and what is added.
struct Lanes {
    alignas(64) int16_t factor[64];
    alignas(64) int16_t offset[64];
};

template <WeightFormat format>
static void lanes_of(const float* scale, const float* minimum, const float* units, Lanes& to) {
    constexpr FormatTraits traits = traits_of(format);
    for (int o = 0; o < 16; ++o) {
        const float per_unit = units[o];
        // Out of range only where the scale is not finite, and then the values do not matter.
        const float wanted = std::nearbyint(scale[o] * per_unit * (traits.bits == 8 ? 128.0f : 1.0f));
        const int factor = std::fabs(wanted) < 32768.0f ? int(wanted) : 0;
        const float low = traits.minimum ? std::nearbyint(minimum[o] * per_unit) : 0.0f;
        const int offset = traits.minimum ? (std::fabs(low) < 32768.0f ? int(low) : 0) : -traits.zero * factor;
        for (int b = 0; b < 4; ++b) {
            to.factor[4 * o + b] = int16_t(factor);
            // Half a unit for rounding; 128 units, because values are stored unsigned.
            to.offset[4 * o + b] = int16_t((traits.bits == 8 ? 0 : offset) + 128 + 32768);
        }
    }
}

template <int bits>
static void convert(const uint8_t* values, const Lanes& lanes, uint8_t* to) {
    for (int i = 0; i < 64; ++i) {
        if constexpr (bits == 8) {
            const int16_t value = int16_t((values[i] - 128) * 256);
            const int16_t scaled = int16_t((value * lanes.factor[i] + 16384) >> 15);
            to[i] = uint8_t(uint16_t(scaled + lanes.offset[i]) >> 8);
        } else {
            to[i] = uint8_t(uint16_t(values[i] * lanes.factor[i] + lanes.offset[i]) >> 8);
        }
    }
}

template <WeightFormat format, int k, int last>
static void convert_quads(const uint8_t* group, const Lanes& lanes, uint8_t* to) {
    if constexpr (k < last) {
        constexpr int bits = traits_of(format).bits;
        alignas(64) uint8_t values[64];
        store_bytes(values, quad<bits, k>(group));
        convert<bits>(values, lanes, to + 64 * strip_panels * k);
        convert_quads<format, k + 1, last>(group, lanes, to);
    }
}

// Groups [begin, end) of a chunk, a span.
template <WeightFormat format>
static void expand_span(const uint8_t* group, const Scales& scales, int begin, int end, uint8_t* values, float* scale) {
    constexpr int parts = format == WeightFormat::q6_k ? 2 : 1;
    float largest[16], units[16];
    largest_values<format>(scales, parts * begin, parts * end, largest);
    for (int o = 0; o < 16; ++o) {
        units[o] = largest[o] > 0 ? 256 * 127 / largest[o] : 0.0f;
        scale[o] = largest[o] / 127;
    }
    for (int g = begin; g < end; ++g, group += group_bytes(format), values += 8 * 64 * strip_panels) {
        Lanes lanes;
        lanes_of<format>(scales.scale[parts * g], scales.minimum[g], units, lanes);
        convert_quads<format, 0, 8 / parts>(group, lanes, values);
        if constexpr (parts == 2) {
            lanes_of<format>(scales.scale[2 * g + 1], nullptr, units, lanes);
            convert_quads<format, 4, 8>(group, lanes, values);
        }
    }
}

template <WeightFormat format>
static void expand_panel(const uint8_t* panel, int inputs, int span, int place, const Strip& to) {
    const int per_span = span / group_inputs;
    const uint8_t* chunk = panel;
    uint8_t* values = to.values + 64 * place;
    float* scale = to.scales + 16 * place;
    for (int first = 0; first < inputs; first += chunk_inputs) {
        const int left = (inputs - first) / group_inputs, groups = left < 8 ? left : 8;
        Scales scales{};
        load_scales<format>(chunk, groups, scales);
        const uint8_t* group = chunk + scale_bytes(format, groups);
        for (int begin = 0; begin < groups; begin += per_span, scale += 16 * strip_panels) {
            const int end = groups - begin < per_span ? groups : begin + per_span;
            expand_span<format>(group, scales, begin, end, values, scale);
            group += (end - begin) * group_bytes(format);
            values += (end - begin) * 8 * 64 * strip_panels;
        }
        chunk += chunk_bytes(format, groups);
    }
}

// w8 is what is wanted already.
static void copy_panel(const uint8_t* panel, int inputs, int span, int place, const Strip& to) {
    for (int i = 0; i < spans_of(inputs, span); ++i) std::memcpy(to.scales + 16 * (strip_panels * i + place), panel, 64);
    const uint8_t* values = panel + panel_head(WeightFormat::w8);
    for (int quad = 0; quad < inputs / 4; ++quad)
        std::memcpy(to.values + 64 * (strip_panels * quad + place), values + 64 * quad, 64);
}

void expand(WeightFormat format, const uint8_t* panel, int inputs, int span, int place, const Strip& to) {
    switch (format) {
        case WeightFormat::q4_0: return expand_panel<WeightFormat::q4_0>(panel, inputs, span, place, to);
        case WeightFormat::q4_1: return expand_panel<WeightFormat::q4_1>(panel, inputs, span, place, to);
        case WeightFormat::q5_0: return expand_panel<WeightFormat::q5_0>(panel, inputs, span, place, to);
        case WeightFormat::q5_1: return expand_panel<WeightFormat::q5_1>(panel, inputs, span, place, to);
        case WeightFormat::q8_0: return expand_panel<WeightFormat::q8_0>(panel, inputs, span, place, to);
        case WeightFormat::q4_k: return expand_panel<WeightFormat::q4_k>(panel, inputs, span, place, to);
        case WeightFormat::q5_k: return expand_panel<WeightFormat::q5_k>(panel, inputs, span, place, to);
        case WeightFormat::q6_k: return expand_panel<WeightFormat::q6_k>(panel, inputs, span, place, to);
        case WeightFormat::w8: return copy_panel(panel, inputs, span, place, to);
    }
}

}  // namespace kveik::KVEIK_ISA
