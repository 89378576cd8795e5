#include "core/cpu.h"

namespace kveik {

const char* name_of(Isa isa) {
    switch (isa) {
        case Isa::portable: return "portable";
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
        case Isa::avx512_bf16: return "avx512_bf16";
    }
    return "";
}

std::vector<Isa> isas_available() {
    std::vector<Isa> isas{Isa::portable};
#if KVEIK_X86
    __builtin_cpu_init();
    const auto has2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("f16c");
    if (has2) isas.push_back(Isa::avx2);
    const auto has512 = has2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    if (has512) isas.push_back(Isa::avx512);
    if (has512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        isas.push_back(Isa::avx512_bf16);
#endif
    return isas;
}

static Isa& chosen() {
    static Isa isa = isas_available().back();
    return isa;
}

Isa isa_in_use() { return chosen(); }

bool use_isa(const std::string& name) {
    for (Isa isa : isas_available()) {
        if (name == name_of(isa)) {
            chosen() = isa;
            return true;
        }
    }
    return false;
}

}  // namespace kveik
