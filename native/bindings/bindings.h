// One function per topic that adds its bindings to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace kveik {}  // namespace kveik
