// The table, and how a product's work is shared.
#include "kernels/linear.h"

#include "kernels/linear_few.h"
#include "kernels/pack.h"
#include "kernels/quantise.h"

namespace kveik::KVEIK_ISA {

static FewKernel few_kernel(WeightFormat format, int height) {
    switch (traits_of(format).bits) {
        case 4: return few_kernel_4(format, height);
        case 5: return few_kernel_5(format, height);
        default: return few_kernel_8(format, height);
    }
}

static void quantise(const float* x, int64_t stride, const Activations& to, Team& team) {
    const int chunks = chunks_of(to.inputs);
    // Chunks rather than rows, so that one row is shared too.
    const Team::Share mine = team.share(int64_t(to.rows) * chunks);
    for (int64_t i = mine.first; i < mine.last; ++i) {
        const int row = int(i / chunks), first = int(i % chunks) * chunk_inputs;
        const int count = to.inputs - first < chunk_inputs ? to.inputs - first : chunk_inputs;
        quantise_chunk(x + row * stride + first, first, count, row_of(to, row));
    }
    team.barrier();
}

static void linear(const PackedWeight& weight, const Activations& x, const float* bias, float* out, int64_t stride, bool add,
                   Team& team) {
    const TileLayout at = tile_layout(x.rows, x.inputs);
    const FewKernel kernel = few_kernel(weight.format, at.rows);
    const int64_t bytes = panel_bytes(weight.format, weight.inputs);
    const Team::Share mine = team.share(round_up(weight.outputs, panel_outputs) / panel_outputs);
    for (int64_t panel = mine.first; panel < mine.last; ++panel) {
        const int64_t output = panel * panel_outputs;
        const int outputs = int(std::min<int64_t>(panel_outputs, weight.outputs - output));
        for (int row = 0; row < x.rows; row += at.rows) {
            const auto* tile = static_cast<const uint8_t*>(x.bytes) + at.bytes * (row / at.rows);
            kernel({weight.bytes + panel * bytes, tile, at, x.inputs, bias ? bias + output : nullptr, out + row * stride + output,
                    stride, std::min(at.rows, x.rows - row), outputs, add});
        }
    }
    team.barrier();
}

extern const LinearKernels linear_kernels_table{pack, pack_f32, unpack, quantise, linear};

}  // namespace kveik::KVEIK_ISA
