// The kernels for few rows and 4-bit weights.
#include "kernels/linear_few.h"

namespace kveik::KVEIK_ISA {

FewKernel few_kernel_4(WeightFormat format, int height) {
    switch (format) {
        case WeightFormat::q4_0: return few_kernel_of<WeightFormat::q4_0>(height);
        case WeightFormat::q4_1: return few_kernel_of<WeightFormat::q4_1>(height);
        default: return few_kernel_of<WeightFormat::q4_k>(height);
    }
}

}  // namespace kveik::KVEIK_ISA
