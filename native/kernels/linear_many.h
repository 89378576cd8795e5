// Many rows: two panels of weights at a time become int8, one scale per output and span, which all rows are multiplied with.
#pragma once

#include "kernels/linear_layout.h"

namespace kveik::KVEIK_ISA {

constexpr int strip_panels = 2;

// Weights as they are multiplied: values [inputs / 4][2 panels][16 outputs][4], int8 + 128, and scales [spans][2 panels][16].
struct Strip {
    uint8_t* values;
    float* scales;
};

// One panel of a packed weight -> its part of a strip.
void expand(WeightFormat format, const uint8_t* panel, int inputs, int span, int place, const Strip& to);

// One strip and one tile of rows, and where the sums go.
struct ManyJob {
    Strip strip;
    const uint8_t* tile;
    TileLayout at;
    int inputs, span;
    const float* bias;  // of the strip's outputs, or null
    float* out;
    int64_t stride;
    int rows, outputs;  // that exist: of the tile's, and of 32
    bool add;
};

void many_tile(const ManyJob& job);

}  // namespace kveik::KVEIK_ISA
