// Few rows: the weights' own scales and groups, one panel of 16 outputs times a tile of up to 12 rows at a time.
#pragma once

#include "kernels/linear_put.h"
#include "kernels/linear_scales.h"

namespace kveik::KVEIK_ISA {

// One panel and one tile, and where the sums go.
struct FewJob {
    const uint8_t* panel;
    const uint8_t* tile;
    TileLayout at;
    int inputs;
    const float* bias;  // of the panel's outputs, or null
    float* out;
    int64_t stride;
    int rows, outputs;  // that exist: of the tile's, and of 16
    bool add;
    const uint8_t* ahead;  // what is to be read next, and how many bytes of it are fetched with every group
    int ahead_bytes;
    int row = 0;  // of the tile, with which the kernel begins
};

using FewKernel = void (*)(const FewJob&);

#if defined(__AVX512VNNI__)
// A kernel for each height of a tile.
constexpr bool whole_tiles = true;
#else
// A tile is taken in pieces of a few rows: more would not fit in registers, and takes minutes to compile.
constexpr bool whole_tiles = false;
#endif

constexpr int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

// sums[row] += quads [k, last) of a group times the rows' values; quads are `step` apart.
template <int bits, int k, int last, int height>
inline void add_quads(Ints (&sums)[height], const uint8_t* group, const int32_t* values, int step) {
    if constexpr (k < last) {
        const auto w = factors<bits>(quad<bits, k>(group));
#pragma GCC unroll 12
        for (int r = 0; r < height; ++r) sums[r] = dot<bits>(sums[r], w, values[k * step + r]);
        add_quads<bits, k + 1, last, height>(sums, group, values, step);
    }
}

// The rows' sums over the quads of one scale, less the offset: integers.
template <WeightFormat format, int k, int last, int height>
inline void whole_quads(Ints (&sums)[height], const uint8_t* group, const int32_t* values, int step, const int32_t* minus) {
    constexpr FormatTraits traits = traits_of(format);
#pragma GCC unroll 12
    for (int r = 0; r < height; ++r)
        sums[r] = traits.zero ? shift_left<log2_of(traits.zero)>(splat_ints(minus[r])) : zero_ints();
    add_quads<traits.bits, k, last, height>(sums, group, values, step);
}

// Where a group's rows lie in the tile.
struct GroupRows {
    const int32_t *values, *minus;
    const float *scales, *sums;
};

template <WeightFormat format, int height>
inline void few_group(Floats (&sums)[height], const uint8_t* group, const ChunkScales<format>& scales, int g,
                      const GroupRows& rows, int step) {
    Ints whole[height];
    if constexpr (format == WeightFormat::q6_k) {
        Floats halves[height];
        whole_quads<format, 0, 4>(whole, group, rows.values, step, rows.minus);
        const Floats first = scales.scale(2 * g), second = scales.scale(2 * g + 1);
#pragma GCC unroll 12
        for (int r = 0; r < height; ++r) halves[r] = to_floats(whole[r]) * first;
        whole_quads<format, 4, 8>(whole, group, rows.values, step, rows.minus + step);
#pragma GCC unroll 12
        for (int r = 0; r < height; ++r)
            sums[r] = fma(fma(to_floats(whole[r]), second, halves[r]), splat_floats(rows.scales[r]), sums[r]);
    } else {
        whole_quads<format, 0, 8>(whole, group, rows.values, step, rows.minus);
        const Floats scale = scales.scale(g);
#pragma GCC unroll 12
        for (int r = 0; r < height; ++r) sums[r] = fma(to_floats(whole[r]), scale * splat_floats(rows.scales[r]), sums[r]);
    }
    if constexpr (traits_of(format).minimum) {
        const Floats minimum = scales.minimum(g);
#pragma GCC unroll 12
        for (int r = 0; r < height; ++r) sums[r] = fma(splat_floats(rows.sums[r]), minimum, sums[r]);
    }
}

template <WeightFormat format, int height>
inline void few_chunk(Floats (&sums)[height], const uint8_t* chunk, const FewJob& job, int first, int groups) {
    constexpr int parts = format == WeightFormat::q6_k ? 2 : 1;
    const ChunkScales<format> scales(chunk, groups);
    const int step = whole_tiles ? height : job.at.rows, group = first / group_inputs;
    const auto floats = [&](int64_t at) { return reinterpret_cast<const float*>(job.tile + at) + group * step + job.row; };
    const int64_t minus = parts == 2 ? job.at.minus16 : job.at.minus32;
    GroupRows rows{reinterpret_cast<const int32_t*>(job.tile) + 8 * group * step + job.row,
                   reinterpret_cast<const int32_t*>(job.tile + minus) + parts * group * step + job.row, floats(job.at.scales),
                   floats(job.at.sums)};
    const uint8_t* weights = chunk + scale_bytes(format, groups);
    const uint8_t* ahead = job.ahead + int64_t(group) * job.ahead_bytes;
    for (int g = 0; g < groups; ++g) {
        for (const uint8_t* end = ahead + job.ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
        few_group<format, height>(sums, weights, scales, g, rows, step);
        weights += group_bytes(format);
        rows = {rows.values + 8 * step, rows.minus + parts * step, rows.scales + step, rows.sums + step};
    }
}

template <WeightFormat format, int height>
void few_panel(const FewJob& job) {
    Floats sums[height];
#pragma GCC unroll 12
    for (int r = 0; r < height; ++r) sums[r] = zero_floats();
    const uint8_t* chunk = job.panel;
    for (int first = 0; first < job.inputs; first += chunk_inputs) {
        const int left = (job.inputs - first) / group_inputs, groups = left < 8 ? left : 8;
        few_chunk<format, height>(sums, chunk, job, first, groups);
        chunk += chunk_bytes(format, groups);
    }
    const int rows = job.rows - job.row < height ? job.rows - job.row : height;
#pragma GCC unroll 12
    for (int r = 0; r < height; ++r)
        if (r < rows) put(sums[r], job.bias, job.out + (job.row + r) * job.stride, job.outputs, job.add);
}

#if defined(__AVX512VNNI__)
template <WeightFormat format>
constexpr FewKernel few_kernels[tile_rows_max] = {
    few_panel<format, 1>, few_panel<format, 2>,  few_panel<format, 3>,  few_panel<format, 4>,
    few_panel<format, 5>, few_panel<format, 6>,  few_panel<format, 7>,  few_panel<format, 8>,
    few_panel<format, 9>, few_panel<format, 10>, few_panel<format, 11>, few_panel<format, 12>};
template <WeightFormat format>
FewKernel few_kernel_of(int height) {
    return few_kernels<format>[height - 1];
}
#else
#if defined(__AVX2__)
constexpr int piece = 4;
#else
constexpr int piece = 1;
#endif
template <WeightFormat format>
void few_pieces(const FewJob& whole) {
    FewJob job = whole;
    for (; job.rows - job.row >= piece; job.row += piece) few_panel<format, piece>(job);
    for (; job.row < job.rows; ++job.row) few_panel<format, 1>(job);
}
template <WeightFormat format>
FewKernel few_kernel_of(int) {
    return few_pieces<format>;
}
#endif

// One per source, so that they are compiled side by side.
FewKernel few_kernel_4(WeightFormat format, int height);
FewKernel few_kernel_5(WeightFormat format, int height);
FewKernel few_kernel_8(WeightFormat format, int height);

}  // namespace kveik::KVEIK_ISA
