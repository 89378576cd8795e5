// The kernels for few rows and 5-bit weights.
#include "kernels/linear_few.h"

namespace kveik::KVEIK_ISA {

FewKernel few_kernel_5(WeightFormat format, int height) {
    switch (format) {
        case WeightFormat::q5_0: return few_kernel_of<WeightFormat::q5_0>(height);
        case WeightFormat::q5_1: return few_kernel_of<WeightFormat::q5_1>(height);
        default: return few_kernel_of<WeightFormat::q5_k>(height);
    }
}

}  // namespace kveik::KVEIK_ISA
