// Products of float rows with quantised weights: rows become int8, the sums are integers within a group, scales are float.
#pragma once

#include <cstdint>

#include "core/table.h"
#include "core/team.h"
#include "kernels/linear_layout.h"

namespace kveik {

// All functions are called by every member of the team with the same arguments, and end with a barrier.
struct LinearKernels {
    // The file's own blocks, row after row -> packed, `packed_bytes` of it.
    void (*pack)(WeightFormat format, const uint8_t* blocks, int outputs, int inputs, uint8_t* packed, Team& team);
    // Rows of the weight as the float32 values that the file's blocks stand for -> out [count, inputs].
    void (*unpack)(const PackedWeight& weight, const int32_t* outputs_wanted, int count, float* out, Team& team);
    // x [rows, inputs], `stride` floats apart -> to. to.inputs is a multiple of 32.
    void (*quantise)(const float* x, int64_t stride, const Activations& to, Team& team);
    // out[row * stride + output] = sum + bias (bias may be null), or += where `add`. x.inputs == weight.inputs.
    void (*linear)(const PackedWeight& weight, const Activations& x, const float* bias, float* out, int64_t stride, bool add,
                   Team& team);
};

KVEIK_TABLE(LinearKernels, linear_kernels)

}  // namespace kveik
