// One function per topic that adds its bindings to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace kveik {

void bind_attention(nanobind::module_& module);
void bind_linear(nanobind::module_& m);
void bind_forward(nanobind::module_& module);

}  // namespace kveik
