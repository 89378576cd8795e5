// The product of a strip of weights, two panels of int8, with a tile of rows.
#include "kernels/linear_many.h"

#include "kernels/linear_put.h"
#include "kernels/linear_vectors.h"

namespace kveik::KVEIK_ISA {

// Rows that are multiplied at a time: with two panels each, a span's sums and those of all spans fill the registers.
#if defined(__AVX512VNNI__)
constexpr int piece = 6;
#elif defined(__AVX2__)
constexpr int piece = 2;
#else
constexpr int piece = 1;
#endif
static_assert(tile_rows_max % piece == 0);

// The sums of `piece` rows over one span, less 128 times the sums of the rows' own values.
static inline void span_sums(Ints (&sums)[piece][strip_panels], const uint8_t* weights, const int32_t* values,
                              const int32_t* minus128, int quads) {
#pragma GCC unroll 12
    for (int r = 0; r < piece; ++r) sums[r][0] = sums[r][1] = splat_ints(minus128[r]);
    for (int quad = 0; quad < quads; ++quad, weights += 64 * strip_panels, values += tile_rows_max) {
        const auto first = factors<8>(load_bytes(weights)), second = factors<8>(load_bytes(weights + 64));
#pragma GCC unroll 12
        for (int r = 0; r < piece; ++r) {
            sums[r][0] = dot<8>(sums[r][0], first, values[r]);
            sums[r][1] = dot<8>(sums[r][1], second, values[r]);
        }
    }
}

// The sums of `rows` rows from `row` of the tile on, [rows][2 panels][16], to their outputs.
static inline void put_strip(const float* sums, const ManyJob& job, int row, int rows) {
    float* out = job.out + row * job.stride;
    if (job.outputs == 32) {
        const Floats first = job.bias ? load_floats(job.bias) : zero_floats();
        const Floats second = job.bias ? load_floats(job.bias + 16) : zero_floats();
        for (int r = 0; r < rows; ++r, sums += 32, out += job.stride) {
            Floats a = load_floats(sums) + first, b = load_floats(sums + 16) + second;
            if (job.add) {
                a = a + load_floats(out);
                b = b + load_floats(out + 16);
            }
            store_floats(out, a);
            store_floats(out + 16, b);
        }
        return;
    }
    for (int r = 0; r < rows; ++r, sums += 32, out += job.stride) {
        put(load_floats(sums), job.bias, out, job.outputs < 16 ? job.outputs : 16, job.add);
        if (job.outputs <= 16) continue;
        put(load_floats(sums + 16), job.bias ? job.bias + 16 : nullptr, out + 16, job.outputs - 16, job.add);
    }
}

static void many_piece(const ManyJob& job, int row) {
    Floats total[piece][strip_panels];
    for (int r = 0; r < piece; ++r) total[r][0] = total[r][1] = zero_floats();
    const auto* values = reinterpret_cast<const int32_t*>(job.tile) + row;
    const auto* scales = reinterpret_cast<const float*>(job.tile + job.at.scales) + row;
    const auto* minus128 = reinterpret_cast<const int32_t*>(job.tile + job.at.minus128) + row;
    const float* weight_scales = job.strip.scales;
    for (int first = 0; first < job.inputs; first += job.span) {
        const int quads = (job.inputs - first < job.span ? job.inputs - first : job.span) / 4;
        Ints sums[piece][strip_panels];
        span_sums(sums, job.strip.values + int64_t(first) / 4 * 64 * strip_panels, values, minus128, quads);
        const Floats scale[2] = {load_floats(weight_scales), load_floats(weight_scales + 16)};
#pragma GCC unroll 12
        for (int r = 0; r < piece; ++r) {
            const Floats of_row = splat_floats(scales[r]);
            total[r][0] = fma(to_floats(sums[r][0]), scale[0] * of_row, total[r][0]);
            total[r][1] = fma(to_floats(sums[r][1]), scale[1] * of_row, total[r][1]);
        }
        values += quads * tile_rows_max;
        scales += tile_rows_max;
        minus128 += tile_rows_max;
        weight_scales += 16 * strip_panels;
    }
    alignas(64) float memory[piece * strip_panels * 16];
    for (int r = 0; r < piece; ++r) {
        store_floats(memory + 32 * r, total[r][0]);
        store_floats(memory + 32 * r + 16, total[r][1]);
    }
    put_strip(memory, job, row, job.rows - row < piece ? job.rows - row : piece);
}

void many_tile(const ManyJob& job) {
    for (int row = 0; row < job.rows; row += piece) many_piece(job, row);
}

}  // namespace kveik::KVEIK_ISA
