// Where sums go: a panel's outputs of one row.
#pragma once

#include "kernels/linear_layout.h"
#include "kernels/linear_vectors.h"

namespace kveik::KVEIK_ISA {

// out[0..count) (+)= sums + bias.
inline void put(Floats sums, const float* bias, float* out, int count, bool add) {
    if (count == panel_outputs) {
        if (bias) sums = sums + load_floats(bias);
        if (add) sums = sums + load_floats(out);
        store_floats(out, sums);
        return;
    }
    float values[panel_outputs];
    store_floats(values, sums);
    for (int o = 0; o < count; ++o) {
        const float value = bias ? values[o] + bias[o] : values[o];
        out[o] = add ? value + out[o] : value;
    }
}

}  // namespace kveik::KVEIK_ISA
