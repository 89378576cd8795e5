// Which instruction sets this processor has, and which one the kernels use.
#pragma once

#include <string>
#include <vector>

namespace kveik {

enum class Isa { portable, avx2, avx512, avx512_bf16 };

const char* name_of(Isa isa);

// What was compiled in and this processor (and its system) can run, from the slowest to the fastest.
std::vector<Isa> isas_available();

// The set in use. At first the fastest available.
Isa isa_in_use();

// False, and nothing changed, where the set is not available. Not to be called while kernels run.
bool use_isa(const std::string& name);

}  // namespace kveik
