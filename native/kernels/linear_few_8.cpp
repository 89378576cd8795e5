// The kernels for few rows and 6-bit and 8-bit weights.
#include "kernels/linear_few.h"

namespace kveik::KVEIK_ISA {

FewKernel few_kernel_8(WeightFormat format, int height) {
    switch (format) {
        case WeightFormat::q8_0: return few_kernel_of<WeightFormat::q8_0>(height);
        default: return few_kernel_of<WeightFormat::q6_k>(height);
    }
}

}  // namespace kveik::KVEIK_ISA
