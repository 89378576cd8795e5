// Many queries of one row over its keys: the unit of prefill. Keys come in tiles, and softmax is kept up to date tile by tile
// (FlashAttention: Dao et al. 2022, arXiv:2205.14135).
#pragma once

#include "kernels/attention_span.h"

namespace kveik::KVEIK_ISA {

// Keys are cut where these end, wherever chunks begin and end: a query's sums are always made the same way. Tiles are added up
// one after the other, and spans of tiles folded together one after the other.
constexpr int tile_keys = 128;

// Where span i begins: a span is at most a quarter of what lies before it, or 512 keys, so that threads can share the keys of
// one row and yet have little to keep. In steps of 512: 0, 1 ... 8, 10 ... 16, 20 ... 32, 40 and so on.
constexpr int chunk_span_begin(int index) {
    constexpr int step = 512;
    return index < 8 ? index * step : ((index - 8) % 4 + 4) * step << (index - 4) / 4;
}
constexpr int chunk_span_of(int position) {
    int index = 0;
    while (chunk_span_begin(index + 1) <= position) ++index;
    return index;
}

// Lanes are queries: a strip is as many as a tile of scores has columns, a panel several strips that use the same packed keys.
constexpr int strip_lanes = 48;
constexpr int panel_strips_most = 4;

// Lanes [first, last) of a row for the heads of one kv head: lane l is head l % group of the row's query l / group.
struct Panel {
    int row, kv_head, first, last;
};

constexpr int strips_of(const Panel& panel) { return (panel.last - panel.first + strip_lanes - 1) / strip_lanes; }

// memory, of all that follow: panel_bytes, aligned to 64.
size_t panel_bytes(int head_dim);
void attend_panel(const Problem& problem, const Panel& panel, uint8_t* memory);

// A panel in parts. kept: strip_partial_bytes for each of its strips, aligned to 64.
constexpr size_t strip_partial_bytes(int head_dim) { return sizeof(float) * strip_lanes * (2 + head_dim); }
void attend_panel_span(const Problem& problem, const Panel& panel, int span, uint8_t* memory, uint8_t* kept);

// Once all are there: the first of `spans` is at `kept`, the next ones `span_bytes` further each.
void finish_panel(const Problem& problem, const Panel& panel, uint8_t* kept, int spans, int64_t span_bytes);

}  // namespace kveik::KVEIK_ISA
