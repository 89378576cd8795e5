// A panel's spans -> int8 with one scale per output and span: w = scale * (value - 128), rounded to the nearest such.
#include "kernels/linear_fixed.h"
#include "kernels/linear_many.h"
#include "kernels/linear_scales.h"

namespace kveik::KVEIK_ISA {

// Scales of a group: q6_k has two.
template <WeightFormat format>
constexpr int parts = format == WeightFormat::q6_k ? 2 : 1;

// The largest magnitude of an output that groups [begin, end) can stand for, NaN where a scale is.
template <WeightFormat format>
static Floats largest_value(const ChunkScales<format>& scales, int begin, int end) {
    constexpr FormatTraits traits = traits_of(format);
    Floats largest = zero_floats();
    for (int i = parts<format> * begin; i < parts<format> * end; ++i) {
        if constexpr (traits.minimum) {
            const Floats low = scales.minimum(i), high = fma(scales.scale(i), splat_floats(float((1 << traits.bits) - 1)), low);
            largest = larger(larger(largest, size_of(low)), size_of(high));
        } else {
            largest = larger(largest, size_of(scales.scale(i) * splat_floats(float(traits.zero))));
        }
    }
    return largest;
}

template <WeightFormat format, int k, int last>
static void convert_quads(const uint8_t* group, const Lanes& lanes, uint8_t* to) {
    if constexpr (k < last) {
        constexpr int bits = traits_of(format).bits;
        convert<bits>(quad<bits, k>(group), lanes, to + 64 * strip_panels * k);
        convert_quads<format, k + 1, last>(group, lanes, to);
    }
}

// One scale's quads of a group.
template <WeightFormat format, int k, int last>
static void expand_quads(const uint8_t* group, const ChunkScales<format>& scales, int i, Floats units, uint8_t* to) {
    constexpr FormatTraits traits = traits_of(format);
    const Floats factor = scales.scale(i) * units;
    if constexpr (traits.minimum) {
        const Floats minimum = scales.minimum(i) * units;
        convert_quads<format, k, last>(group, lanes_of<traits.bits, traits.zero>(factor, &minimum), to);
    } else {
        const Floats widened = traits.bits == 8 ? factor * splat_floats(128) : factor;
        convert_quads<format, k, last>(group, lanes_of<traits.bits, traits.zero>(widened, nullptr), to);
    }
}

// Groups [begin, end) of a chunk, a span.
template <WeightFormat format>
static void expand_span(const uint8_t* group, const ChunkScales<format>& scales, int begin, int end, uint8_t* to,
                        float* scale) {
    const Floats largest = largest_value<format>(scales, begin, end), units = quotient_or_0(256 * 127, largest);
    store_floats(scale, quotient(largest, 127));
    for (int g = begin; g < end; ++g, group += group_bytes(format), to += 8 * 64 * strip_panels) {
        expand_quads<format, 0, 8 / parts<format>>(group, scales, parts<format> * g, units, to);
        if constexpr (parts<format> == 2) expand_quads<format, 4, 8>(group, scales, 2 * g + 1, units, to);
    }
}

// A span of one group without a minimum is int8 as it is.
template <WeightFormat format, int k = 0>
static void raise_quads(const uint8_t* group, uint8_t* to) {
    if constexpr (k < 8) {
        constexpr FormatTraits traits = traits_of(format);
        store_bytes(to + 64 * strip_panels * k, raised(quad<traits.bits, k>(group), 128 - traits.zero));
        raise_quads<format, k + 1>(group, to);
    }
}

template <WeightFormat format>
static void expand_panel(const uint8_t* panel, int inputs, int span, int place, const Strip& to) {
    constexpr bool simple = !traits_of(format).minimum && parts<format> == 1;
    const int per_span = span / group_inputs;
    const uint8_t* chunk = panel;
    uint8_t* values = to.values + 64 * place;
    float* scale = to.scales + 16 * place;
    for (int first = 0; first < inputs; first += chunk_inputs) {
        const int left = (inputs - first) / group_inputs, groups = left < 8 ? left : 8;
        const ChunkScales<format> scales(chunk, groups);
        const uint8_t* group = chunk + scale_bytes(format, groups);
        for (int begin = 0; begin < groups; begin += per_span, scale += 16 * strip_panels) {
            const int end = groups - begin < per_span ? groups : begin + per_span;
            if (simple && per_span == 1) {
                raise_quads<format>(group, values);
                store_floats(scale, scales.scale(begin));
            } else {
                expand_span<format>(group, scales, begin, end, values, scale);
            }
            group += (end - begin) * group_bytes(format);
            values += (end - begin) * 8 * 64 * strip_panels;
        }
        chunk += chunk_bytes(format, groups);
    }
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
    }
}

}  // namespace kveik::KVEIK_ISA
