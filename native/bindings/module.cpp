// The module: which instruction set is in use, and the topics' bindings. No arithmetic here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <omp.h>

#include "bindings/bindings.h"
#include "core/cpu.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    module.doc() = "Native kernels of kveik. Import torch first: both then share one OpenMP runtime.";
    module.def("isas_available", [] {
        std::vector<std::string> names;
        for (kveik::Isa isa : kveik::isas_available()) names.emplace_back(kveik::name_of(isa));
        return names;
    }, "Instruction sets that this processor can run, from the slowest to the fastest.");
    module.def("isa_in_use", [] { return std::string(kveik::name_of(kveik::isa_in_use())); });
    module.def("use_isa", &kveik::use_isa, nb::arg("name"), "False, and nothing changed, where the set is not available.");
    module.def("threads_at_most", [] { return omp_get_max_threads(); }, "Threads of the OpenMP pool shared with torch.");
    kveik::bind_attention(module);
    kveik::bind_linear(module);
    kveik::bind_forward(module);
}
