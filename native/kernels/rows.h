// What happens to rows between products: norms and activations, float32 in; int8 rows for the next product, or float32, out.
#pragma once

#include <cstdint>

#include "core/table.h"
#include "core/team.h"
#include "kernels/linear.h"

namespace kveik {

enum class Activation : int { silu, gelu_tanh };

struct RowKernels {
    // RMSNorm, x / sqrt(mean(x^2) + eps) * weight, then quantised. x [rows, to.inputs], `stride` floats from row to row.
    void (*norm_quantise)(const float* x, int64_t stride, const float* weight, float eps, const Activations& to, Team& team);

    // activation(gate) * up, then quantised. gate_up [rows, 2 * to.inputs]: gate first, then up.
    void (*act_mul_quantise)(const float* gate_up, int64_t stride, Activation activation, const Activations& to, Team& team);

    // out[row] = RMSNorm(x[row]); `add`: out[row] += it. out may be x.
    void (*norm)(const float* x, int64_t stride, int rows, int width, const float* weight, float eps, float* out,
                 int64_t out_stride, bool add, Team& team);

    // x = cap * tanh(x / cap)
    void (*soft_cap)(float* x, int64_t count, float cap, Team& team);
};

KVEIK_TABLE(RowKernels, row_kernels)

}  // namespace kveik
