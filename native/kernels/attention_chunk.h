// Many queries of one row over its keys: the unit of prefill. Keys come in tiles, and softmax is kept up to date tile by tile
// (FlashAttention: Dao et al. 2022, arXiv:2205.14135).
#pragma once

#include "kernels/attention_span.h"

namespace kveik::KVEIK_ISA {

// Keys are cut at multiples of this, wherever chunks begin and end: a query's sums are always made the same way.
constexpr int tile_keys = 128;

// Lanes are queries: a strip is as many as a tile of scores has columns, a panel several strips that use the same packed keys.
constexpr int strip_lanes = 48;
constexpr int panel_strips_most = 4;

// Lanes [first, last) of a row for the heads of one kv head: lane l is head l % group of the row's query l / group.
struct Panel {
    int row, kv_head, first, last;
};

size_t panel_bytes(int head_dim);

// memory: panel_bytes, aligned to 64.
void attend_panel(const Problem& problem, const Panel& panel, uint8_t* memory);

}  // namespace kveik::KVEIK_ISA
