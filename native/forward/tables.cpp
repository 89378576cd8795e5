#include "kernels/rows.h"

namespace kveik {

KVEIK_TABLE_CHOICE(RowKernels, row_kernels)

}  // namespace kveik
