// The table, and how a product's work is shared.
#include "kernels/linear.h"

#include <memory>

#include "kernels/linear_few.h"
#include "kernels/linear_many.h"
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
    each_chunk(to, team, [&](int row, int first, int count, const ActivationRow& place) {
        quantise_chunk(x + row * stride + first, first, count, place);
    });
}

static void linear_few(const PackedWeight& weight, const Activations& x, const float* bias, float* out, int64_t stride,
                       bool add, Team& team) {
    const TileLayout at = tile_layout(x.rows, x.inputs, x.span);
    const FewKernel kernel = few_kernel(weight.format, at.rows);
    const int64_t bytes = panel_bytes(weight.format, weight.inputs);
    // While a panel meets the tiles, the next one is fetched, a part with each.
    const int groups = x.inputs / group_inputs, tiles = tiles_of(x.rows);
    const int ahead_bytes = round_up(int(bytes / (int64_t(groups) * tiles)), 64);
    const Team::Share mine = team.share(round_up(weight.outputs, panel_outputs) / panel_outputs);
    for (int64_t panel = mine.first; panel < mine.last; ++panel) {
        const int64_t output = panel * panel_outputs;
        const uint8_t* weights = weight.bytes + panel * bytes;
        const int outputs = int(std::min<int64_t>(panel_outputs, weight.outputs - output));
        FewJob job{weights, nullptr, at, x.inputs, bias ? bias + output : nullptr, nullptr, stride, 0, outputs, add, nullptr,
                   ahead_bytes};
        for (int tile = 0; tile < tiles; ++tile) {
            job.tile = static_cast<const uint8_t*>(x.bytes) + at.bytes * tile;
            job.out = out + int64_t(tile) * at.rows * stride + output;
            job.rows = std::min(at.rows, x.rows - tile * at.rows);
            job.ahead = weights + bytes + int64_t(tile) * groups * ahead_bytes;
            kernel(job);
        }
    }
    team.barrier();
}

// The strip that a thread works on: as large as its largest weight has needed, and kept.
static Strip strip_of(int inputs) {
    static thread_local std::unique_ptr<uint8_t[]> memory;
    static thread_local int inputs_most = 0;
    if (inputs > inputs_most) {
        const size_t scales = size_t(spans_of(inputs, group_inputs)) * strip_panels * 64;
        memory.reset(new uint8_t[size_t(inputs) * strip_panels * 16 + scales + 64]);
        inputs_most = inputs;
    }
    uint8_t* values = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64);
    return {values, reinterpret_cast<float*>(values + size_t(inputs) * strip_panels * 16)};
}

static void linear_many(const PackedWeight& weight, const Activations& x, const float* bias, float* out, int64_t stride,
                        bool add, Team& team) {
    const TileLayout at = tile_layout(x.rows, x.inputs, x.span);
    const int64_t bytes = panel_bytes(weight.format, weight.inputs);
    const Strip strip = strip_of(weight.inputs);
    team.each(weight.outputs, strip_panels * panel_outputs, [&](int64_t first, int64_t last) {
        for (int place = 0; place < strip_panels && first + place * panel_outputs < last; ++place)
            expand(weight.format, weight.bytes + (first / panel_outputs + place) * bytes, weight.inputs, x.span, place, strip);
        ManyJob job{strip, nullptr, at, x.inputs, x.span, bias ? bias + first : nullptr, nullptr, stride, 0,
                    int(last - first), add};
        for (int tile = 0; tile < tiles_of(x.rows); ++tile) {
            job.tile = static_cast<const uint8_t*>(x.bytes) + at.bytes * tile;
            job.out = out + int64_t(tile) * at.rows * stride + first;
            job.rows = std::min(at.rows, x.rows - tile * at.rows);
            many_tile(job);
        }
    });
}

static void linear(const PackedWeight& weight, const Activations& x, const float* bias, float* out, int64_t stride, bool add,
                   Team& team) {
    // A chunk that is not its prompt's last wants no rows behind the last attention.
    if (x.rows == 0) return;
    (x.rows < rows_many ? linear_few : linear_many)(weight, x, bias, out, stride, add, team);
}

extern const LinearKernels linear_kernels_table{pack, unpack, quantise, linear};

}  // namespace kveik::KVEIK_ISA
