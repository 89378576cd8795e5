// Weights into the order in which products read them, and back.
#pragma once

#include "kernels/linear.h"

namespace kveik::KVEIK_ISA {

void pack(WeightFormat format, const uint8_t* blocks, int outputs, int inputs, uint8_t* packed, Team& team);
void unpack(const PackedWeight& weight, const int32_t* outputs_wanted, int count, float* out, Team& team);

}  // namespace kveik::KVEIK_ISA
