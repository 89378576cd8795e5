// The rows between products, sixteen numbers at a time. See rows.h.
#include "kernels/rows.h"

#include <vector>

#include "kernels/quantise.h"
#include "kernels/simd.h"

namespace kveik::KVEIK_ISA {

// A row that is only on its way to where it is added. One per thread; grows to the widest row that it has seen.
static float* passing_row(int width) {
    thread_local std::vector<float> row;
    if (int(row.size()) < width + 16) row.resize(width + 16);
    return row.data();
}

// 1 / sqrt(mean(x^2) + eps). Sixteen partial sums, added up in one order whatever the instruction set.
static float norm_factor(const float* x, int width, float eps) {
    f32x16 squares{};
    int i = 0;
    for (; i + 16 <= width; i += 16) {
        const f32x16 v = load(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < width; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / float(width) + eps);
}

static void scale_row(const float* x, int width, const float* weight, float factor, float* out) {
    int i = 0;
    for (; i + 16 <= width; i += 16) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

static void norm_row(const float* x, int width, const float* weight, float eps, float* out) {
    scale_row(x, width, weight, norm_factor(x, width, eps), out);
}

static f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
static f32x16 gelu_tanh(f32x16 x) {
    const f32x16 u = (x + x * x * x * 0.044715f) * 0.7978845608028654f;
    return x / (exp(u * -2.0f) + 1.0f);
}

template <f32x16 (*activation)(f32x16)>
static void act_mul_row(const float* gate, const float* up, int width, float* out) {
    int i = 0;
    for (; i + 16 <= width; i += 16) store(out + i, activation(load(gate + i)) * load(up + i));
    if (i == width) return;
    float ends[32] = {};
    std::copy(gate + i, gate + width, ends);
    std::copy(up + i, up + width, ends + 16);
    store(ends, activation(load(ends)) * load(ends + 16));
    std::copy(ends, ends + (width - i), out + i);
}

static void norm_quantise(const float* x, int64_t stride, const float* weight, float eps, const Activations& to, Team& team) {
    alignas(64) float passing[chunk_inputs];
    // Of the tile at hand, by place. Each member that has a chunk of a row finds its factor: that is sooner done than waited for.
    float factors[tile_rows_max];
    int known[tile_rows_max];
    std::fill(known, known + tile_rows_max, -1);
    const int height = tile_rows(to.rows);
    each_chunk(to, team, [&](int row, int first, int count, const ActivationRow& place) {
        const float* from = x + row * stride;
        const int within = row % height;
        if (known[within] != row) {
            factors[within] = norm_factor(from, to.inputs, eps);
            known[within] = row;
        }
        scale_row(from + first, count, weight + first, factors[within], passing);
        quantise_chunk(passing, first, count, place);
    });
}

static void act_mul_quantise(const float* gate_up, int64_t stride, Activation activation, const Activations& to, Team& team) {
    alignas(64) float passing[chunk_inputs];
    each_chunk(to, team, [&](int row, int first, int count, const ActivationRow& place) {
        const float* gate = gate_up + row * stride + first;
        if (activation == Activation::silu) act_mul_row<silu>(gate, gate + to.inputs, count, passing);
        else act_mul_row<gelu_tanh>(gate, gate + to.inputs, count, passing);
        quantise_chunk(passing, first, count, place);
    });
}

static void norm(const float* x, int64_t stride, int rows, int width, const float* weight, float eps, float* out,
                 int64_t out_stride, bool add, Team& team) {
    team.each(rows, 1, [&](int64_t row, int64_t) {
        float* to = out + row * out_stride;
        if (!add) return norm_row(x + row * stride, width, weight, eps, to);
        float* passing = passing_row(width);
        norm_row(x + row * stride, width, weight, eps, passing);
        for (int i = 0; i < width; ++i) to[i] += passing[i];
    });
}

static void soft_cap(float* x, int64_t count, float cap, Team& team) {
    // tanh(u) = 2 / (1 + exp(-2u)) - 1
    team.each(count, 4096, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i += 16) {
            const int lanes = int(std::min<int64_t>(16, last - i));
            float part[16] = {};
            std::copy(x + i, x + i + lanes, part);
            store(part, (splat(2.0f) / (exp(load(part) * (-2.0f / cap)) + 1.0f) - 1.0f) * cap);
            std::copy(part, part + lanes, x + i);
        }
    });
}

const RowKernels row_kernels_table{norm_quantise, act_mul_quantise, norm, soft_cap};

}  // namespace kveik::KVEIK_ISA
