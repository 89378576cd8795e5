// The functions of rope_write.cpp, for the table: see attention.h.
#pragma once

#include "kernels/attention.h"

namespace kveik::KVEIK_ISA {

void rope_write(float* qkv, int64_t stride, int tokens, int heads, const float* cos, const float* sin, const float* query_norm,
                const float* key_norm, float eps, const CacheView& cache, const StepRows& rows, Team& team);
void write_f32(const float* keys, int64_t key_stride, const float* values, int64_t value_stride, int tokens,
               const CacheView& cache, const StepRows& rows, Team& team);
void write_bf16(const uint16_t* keys, int64_t key_stride, const uint16_t* values, int64_t value_stride, int tokens,
                const CacheView& cache, const StepRows& rows, Team& team);

}  // namespace kveik::KVEIK_ISA
