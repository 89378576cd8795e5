// Where what lies: quantised activations and packed weights. Integers only; each source has its own copy of every function,
// because what the compiler made of it for one instruction set must not serve another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kveik {

// The formats of GGUF files: ggml-common.h of https://github.com/ggml-org/ggml.
enum class WeightFormat : int { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

// Quantised rows, as `quantise` wrote them. `rows` and `inputs` must be those that it was called with.
struct Activations {
    void* bytes;
    int rows;
    int inputs;
    int span;  // with `rows_many` rows or more: inputs that share a scale, 32 or 128
};

struct PackedWeight {
    WeightFormat format;
    int outputs, inputs;
    const uint8_t* bytes;
};

constexpr int panel_outputs = 16;  // One lane of a vector each.
constexpr int group_inputs = 32;   // Inputs that share a scale in most formats.
constexpr int chunk_inputs = 256;  // Inputs whose weights lie together in a panel; the last chunk of a row may be shorter.
constexpr int tile_rows_max = 12;

// From this many rows on, weights are first expanded to int8 with one scale per output and span of inputs, and rows have one
// scale per span instead of one per group. The sums then differ slightly from those of fewer rows; on either side a row's sums
// do not depend on the other rows. forward/row_parts.h decides which rows of a step meet.
constexpr int rows_many = 72;

static constexpr int round_up(int count, int to) { return (count + to - 1) / to * to; }
static constexpr int64_t round_up(int64_t count, int to) { return (count + to - 1) / to * to; }
static constexpr int spans_of(int inputs, int span) { return (inputs + span - 1) / span; }

// ---- Activations: tiles of rows that are multiplied together, the last one padded. In a tile, what belongs to one place of
// all its rows lies side by side:
//   values   int8  [inputs / 4][rows][4]
//   scales   float [inputs / 32][rows]     value = scale * int8; NaN where the group holds a NaN or an infinity
//   sums     float [inputs / 32][rows]     the sum of the group's values
//   minus32  int32 [inputs / 32][rows]     the negative sum of its int8
//   minus16  int32 [inputs / 16][rows]     the negative sums of half groups
// With `rows_many` rows or more:
//   values   as above
//   scales   float [spans][rows]
//   minus128 int32 [spans][rows]           -128 times the sum of the span's int8
static constexpr int tile_rows(int rows) {
    if (rows >= rows_many) return tile_rows_max;
    const int tiles = (rows + tile_rows_max - 1) / tile_rows_max;
    return tiles == 0 ? 1 : (rows + tiles - 1) / tiles;
}
static constexpr int tiles_of(int rows) { return (rows + tile_rows(rows) - 1) / tile_rows(rows); }

struct TileLayout {
    int rows;
    int64_t scales, sums, minus32, minus16, minus128, bytes;  // where they begin
};

static constexpr TileLayout tile_layout(int rows, int inputs, int span) {
    const int height = tile_rows(rows);
    const int64_t values = round_up(int64_t(inputs) * height, 64);
    const int64_t per_group = round_up(int64_t(inputs / group_inputs) * height * 4, 64);
    const int64_t per_span = round_up(int64_t(spans_of(inputs, span)) * height * 4, 64);
    if (rows >= rows_many) return {height, values, 0, 0, 0, values + per_span, values + 2 * per_span};
    return {height, values, values + per_group, values + 2 * per_group, values + 3 * per_group, 0, values + 5 * per_group};
}

// Never less than for fewer rows, so that memory for the most rows does for all.
static constexpr size_t activation_bytes(int rows, int inputs, int span) {
    const int few = rows < rows_many ? rows : rows_many - 1;
    const int64_t as_few = tile_layout(few, inputs, span).bytes * tiles_of(few);
    const int64_t as_they_are = tile_layout(rows, inputs, span).bytes * tiles_of(rows);
    return size_t(as_few > as_they_are ? as_few : as_they_are);
}

// ---- Packed weights: panels of 16 outputs, the last one padded with zeros; a panel is its chunks of 256 inputs, one after
// another (the last may be shorter), each its scales and then its groups of 32 inputs. `quad` k of a group is inputs 4k to
// 4k + 3; a vector [16 outputs][4 inputs] holds one quad.
//   scales, q4_0 q5_0 q8_0: f16 d [groups][16];  q4_1 q5_1: and f16 m [groups][16]
//           q4_k q5_k: 64 bytes [4][16] with the low halves of the scales of groups g and, in the upper nibble, g + 4; 64 bytes
//                      with those of the minima; 64 bytes with their upper pairs of bits (scale g, scale g + 4, minimum g,
//                      minimum g + 4); f16 d [16], f16 dmin [16]
//           q6_k: int8 [16 half groups][16], f16 d [16]
//   group,  nibbles: 4 vectors with quad k, and in the upper nibble quad k + 4
//           fifth bits: 1 vector, bit k is quad k's;  sixth: 2 vectors, pairs of bits of quads 0 to 3, and of 4 to 7
//           q8_0: 8 vectors, a quad each, value + 128
struct FormatTraits {
    int bits;            // of an unsigned value
    int zero;            // what is subtracted from it
    bool minimum;        // a minimum is added (q4_1, q5_1) or subtracted (q4_k, q5_k) after scaling
    bool super;          // blocks of 256 inputs with scales of scales
    int block_inputs, block_bytes;  // in the file
};

static constexpr FormatTraits traits_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::q4_0: return {4, 8, false, false, 32, 18};
        case WeightFormat::q4_1: return {4, 0, true, false, 32, 20};
        case WeightFormat::q5_0: return {5, 16, false, false, 32, 22};
        case WeightFormat::q5_1: return {5, 0, true, false, 32, 24};
        case WeightFormat::q8_0: return {8, 128, false, false, 32, 34};
        case WeightFormat::q4_k: return {4, 0, true, true, 256, 144};
        case WeightFormat::q5_k: return {5, 0, true, true, 256, 176};
        default: return {6, 32, false, true, 256, 210};
    }
}

// Inputs that share a scale where rows are many. The formats whose own blocks have 256 inputs are for wide models, which bear
// 128; narrow ones have outliers that would spoil so many neighbours.
static constexpr int span_of(WeightFormat format) { return traits_of(format).super ? 128 : 32; }

static constexpr int scale_bytes(WeightFormat format, int groups) {
    if (format == WeightFormat::q6_k) return 288;
    if (traits_of(format).super) return 256;
    return groups * (traits_of(format).minimum ? 64 : 32);
}
static constexpr int group_bytes(WeightFormat format) { return traits_of(format).bits * 64; }
static constexpr int chunk_bytes(WeightFormat format, int groups) {
    return scale_bytes(format, groups) + groups * group_bytes(format);
}
static constexpr int64_t panel_bytes(WeightFormat format, int inputs) {
    const int whole = inputs / chunk_inputs, rest = inputs % chunk_inputs / group_inputs;
    const int64_t bytes = int64_t(whole) * chunk_bytes(format, chunk_inputs / group_inputs);
    return round_up(bytes + (rest ? chunk_bytes(format, rest) : 0), 64);
}
static constexpr size_t packed_bytes(WeightFormat format, int outputs, int inputs) {
    return size_t(round_up(outputs, panel_outputs) / panel_outputs) * size_t(panel_bytes(format, inputs));
}
// Whether weights of this format can have this many inputs.
static constexpr bool fits(WeightFormat format, int inputs) {
    return inputs > 0 && inputs % traits_of(format).block_inputs == 0;
}

}  // namespace kveik
