// How a topic's kernels are found: one table of functions per instruction set, `const Topic topic` in the set's namespace.
#pragma once

#include "core/cpu.h"

// In a header outside kernels/: KVEIK_TABLE(Linear, linear) declares the tables and `const Linear& linear()`, the one in use.
#define KVEIK_TABLE(Type, name)              \
    namespace portable {                     \
    extern const Type name##_table;          \
    }                                        \
    namespace avx2 {                         \
    extern const Type name##_table;          \
    }                                        \
    namespace avx512 {                       \
    extern const Type name##_table;          \
    }                                        \
    namespace avx512_bf16 {                  \
    extern const Type name##_table;          \
    }                                        \
    const Type& name();

// In one source outside kernels/: the choice.
#if KVEIK_X86
#define KVEIK_TABLE_CHOICE(Type, name)                                       \
    const Type& name() {                                                     \
        switch (isa_in_use()) {                                              \
            case Isa::avx2: return avx2::name##_table;                       \
            case Isa::avx512: return avx512::name##_table;                   \
            case Isa::avx512_bf16: return avx512_bf16::name##_table;         \
            default: return portable::name##_table;                          \
        }                                                                    \
    }
#else
#define KVEIK_TABLE_CHOICE(Type, name) \
    const Type& name() { return portable::name##_table; }
#endif
