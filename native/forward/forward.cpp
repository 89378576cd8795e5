#include "forward/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kveik {

// Rows that go through the feed-forward part together: their inner values, the widest of a step, then stay in the cache.
constexpr int feed_forward_rows = 256;

static float* row_of(float* first, int64_t row, int64_t width) { return first + row * width; }

// A step's rows as `product` splits them; `most` in a part that goes the way for many.
static RowParts parts_for(const Product& product, int rows, int decodes, int most) {
    return {rows, decodes, most, product.span == group_inputs};
}

void Forward::run(const Step& step, float* hidden, int threads) {
    reserve(step, threads);
    with_team(threads, [&](Team& team) {
        embed(step, team);
        turn(step, team);
        for (size_t i = 0; i < model_.layers.size(); ++i) layer(model_.layers[i], step, i + 1 == model_.layers.size(), team);
        row_kernels().norm(stream_.floats(0), model_.hidden, step.wanted_count, model_.hidden, model_.norm, model_.norm_eps,
                           hidden, model_.hidden, false, team);
    });
}

void Forward::logits(const float* hidden, int rows, float* logits, int threads) {
    void* quantised = quantised_.reserve(activation_bytes(std::min(rows, rows_many - 1), model_.hidden, group_inputs));
    with_team(threads, [&](Team& team) {
        // All of them are sampled from: none may depend on how many others are.
        const RowParts parts(rows, rows, rows, true);
        for (int i = 0; i < parts.count(); ++i) {
            const auto [first, count] = parts[i];
            const Activations x{quantised, count, model_.hidden, model_.projection.span};
            linear_kernels().quantise(hidden + int64_t(first) * model_.hidden, model_.hidden, x, team);
            product(model_.projection, x, row_of(logits, first, model_.vocab), model_.vocab, false, team);
        }
        if (model_.final_soft_cap > 0)
            row_kernels().soft_cap(logits, int64_t(rows) * model_.vocab, model_.final_soft_cap, team);
    });
}

size_t Forward::workspace_bytes() const {
    size_t total = 0;
    for (const Buffer* buffer :
         {&stream_, &qkv_, &attended_, &inner_, &quantised_, &inner_quantised_, &turns_, &ids_, &attention_})
        total += buffer->size();
    return total;
}

void Forward::reserve(const Step& step, int threads) {
    const size_t tokens = size_t(step.tokens), rows = std::min<size_t>(tokens, feed_forward_rows);
    const int attended = model_.heads * model_.head_dim;
    stream_.floats(tokens * model_.hidden);
    qkv_.floats(tokens * model_.qkv_width());
    attended_.floats(tokens * attended);
    // The feed-forward part's inner values, and what a product leaves for a norm behind it.
    inner_.floats(std::max(rows * 2 * model_.intermediate, tokens * model_.hidden));
    quantised_.reserve(activation_bytes(step.tokens, std::max(model_.hidden, attended), group_inputs));
    inner_quantised_.reserve(activation_bytes(int(rows), model_.intermediate, group_inputs));
    turns_.floats(model_.ropes.size() * tokens * model_.head_dim);
    ids_.reserve(tokens * sizeof(int32_t));
    int32_t context_most = 0;
    for (const GroupStep& group : step.groups)
        context_most = std::max(context_most, *std::max_element(group.rows.contexts, group.rows.contexts + group.rows.rows));
    attention_.reserve(attention_kernels().attend_workspace(model_.heads, model_.kv_heads, model_.head_dim, context_most, threads));
}

void Forward::embed(const Step& step, Team& team) {
    int32_t* ids = static_cast<int32_t*>(ids_.reserve(0));
    float* stream = stream_.floats(0);
    if (team.rank == 0) std::copy(step.token_ids, step.token_ids + step.tokens, ids);
    team.barrier();
    linear_kernels().unpack(model_.embedding, ids, step.tokens, stream, team);
    if (model_.embedding_scale == 1) return;
    team.each(step.tokens, 16, [&](int64_t first, int64_t last) {
        for (int64_t i = first * model_.hidden; i < last * model_.hidden; ++i) stream[i] *= model_.embedding_scale;
    });
}

// Cosines, then sines, [tokens, head_dim / 2] each, rope after rope. The angle is rounded to float32, as in transformers.
void Forward::turn(const Step& step, Team& team) {
    const int pairs = model_.head_dim / 2;
    for (size_t r = 0; r < model_.ropes.size(); ++r) {
        const Rope& rope = model_.ropes[r];
        float* cos = turns_.floats(0) + int64_t(r) * 2 * step.tokens * pairs;
        float* sin = cos + int64_t(step.tokens) * pairs;
        team.each(step.tokens, 1, [&](int64_t token, int64_t) {
            for (int i = 0; i < pairs; ++i) {
                const float angle = float(step.positions[token]) * rope.frequencies[i];
                cos[token * pairs + i] = std::cos(angle) * rope.factor;
                sin[token * pairs + i] = std::sin(angle) * rope.factor;
            }
        });
    }
}

void Forward::layer(const LayerParts& layer, const Step& step, bool last, Team& team) {
    const int decodes = step.groups[0].rows.decodes;
    queries_keys_values(layer, parts_for(layer.qkv, step.tokens, decodes, step.tokens), team);
    attend(layer, step, team);
    if (!last) return behind_attention(layer, step.tokens, decodes, team);
    // Behind the last attention only the wanted tokens matter.
    keep(step, team);
    const int wanted_decodes = int(std::lower_bound(step.wanted, step.wanted + step.wanted_count, decodes) - step.wanted);
    behind_attention(layer, step.wanted_count, wanted_decodes, team);
}

void Forward::queries_keys_values(const LayerParts& layer, const RowParts& parts, Team& team) {
    for (int i = 0; i < parts.count(); ++i) {
        const auto [first, count] = parts[i];
        const Activations x{quantised_.reserve(0), count, model_.hidden, layer.qkv.span};
        row_kernels().norm_quantise(row_of(stream_.floats(0), first, model_.hidden), model_.hidden, layer.attention_norm,
                                    model_.norm_eps, x, team);
        product(layer.qkv, x, row_of(qkv_.floats(0), first, model_.qkv_width()), model_.qkv_width(), false, team);
    }
}

void Forward::behind_attention(const LayerParts& layer, int rows, int decodes, Team& team) {
    const int attended_width = model_.heads * model_.head_dim;
    const RowParts parts = parts_for(layer.output, rows, decodes, rows);
    for (int i = 0; i < parts.count(); ++i) {
        const auto [first, count] = parts[i];
        const Activations attended{quantised_.reserve(0), count, attended_width, layer.output.span};
        linear_kernels().quantise(row_of(attended_.floats(0), first, attended_width), attended_width, attended, team);
        add_to_stream(layer.output, attended, layer.attention_post_norm, first, team);
    }
    feed_forward(layer, rows, decodes, team);
}

void Forward::attend(const LayerParts& layer, const Step& step, Team& team) {
    const GroupStep& group = step.groups[layer.group];
    const CacheView cache{group.storage + layer.place * group.layer_stride, group.block_stride, model_.kv_heads,
                          model_.head_dim, group.block_size, group.type,
                          group.type == KvType::f32 ? nullptr : layer.key_mean};
    const int pairs = model_.head_dim / 2;
    const float* cos = turns_.floats(0) + int64_t(layer.rope) * 2 * step.tokens * pairs;
    const float* sin = cos + int64_t(step.tokens) * pairs;
    attention_kernels().rope_write(qkv_.floats(0), model_.qkv_width(), step.tokens, model_.heads, cos, sin, layer.query_norm,
                                   layer.key_norm, model_.norm_eps, cache, group.rows, team);
    attention_kernels().attend(qkv_.floats(0), model_.qkv_width(), model_.heads, model_.attention_scale,
                               model_.attention_soft_cap, cache, group.rows, attended_.floats(0),
                               model_.heads * model_.head_dim, attention_.reserve(0), team);
}

void Forward::feed_forward(const LayerParts& layer, int rows, int decodes, Team& team) {
    // One split for both products: a decode's row goes the way for few rows through each.
    const RowParts parts(rows, decodes, feed_forward_rows,
                         layer.gate_up.span == group_inputs && layer.down.span == group_inputs);
    for (int i = 0; i < parts.count(); ++i) {
        const auto [first, count] = parts[i];
        float* stream = row_of(stream_.floats(0), first, model_.hidden);
        const Activations x{quantised_.reserve(0), count, model_.hidden, layer.gate_up.span};
        row_kernels().norm_quantise(stream, model_.hidden, layer.feed_forward_norm, model_.norm_eps, x, team);
        product(layer.gate_up, x, inner_.floats(0), 2 * model_.intermediate, false, team);
        const Activations inner{inner_quantised_.reserve(0), count, model_.intermediate, layer.down.span};
        row_kernels().act_mul_quantise(inner_.floats(0), 2 * model_.intermediate, model_.activation, inner, team);
        add_to_stream(layer.down, inner, layer.feed_forward_post_norm, first, team);
    }
}

void Forward::add_to_stream(const Product& product, const Activations& x, const float* norm, int first, Team& team) {
    float* stream = row_of(stream_.floats(0), first, model_.hidden);
    if (!norm) return this->product(product, x, stream, model_.hidden, true, team);
    this->product(product, x, inner_.floats(0), model_.hidden, false, team);
    row_kernels().norm(inner_.floats(0), model_.hidden, x.rows, model_.hidden, norm, model_.norm_eps, stream, model_.hidden,
                       true, team);
}

void Forward::product(const Product& product, const Activations& x, float* out, int64_t stride, bool add, Team& team) {
    int64_t offset = 0;
    for (const PackedWeight& part : product.parts) {
        const float* bias = product.bias ? product.bias + offset : nullptr;
        linear_kernels().linear(part, x, bias, out + offset, stride, add, team);
        offset += part.outputs;
    }
}

// The wanted rows of the stream and of what attention gave move to the front; they are in ascending order, so none is lost.
void Forward::keep(const Step& step, Team& team) {
    const size_t width = size_t(model_.heads) * model_.head_dim;
    if (team.rank == 0) {
        for (int i = 0; i < step.wanted_count; ++i) {
            const int64_t from = step.wanted[i];
            if (from == i) continue;
            std::memcpy(row_of(stream_.floats(0), i, model_.hidden), row_of(stream_.floats(0), from, model_.hidden),
                        size_t(model_.hidden) * sizeof(float));
            std::memcpy(row_of(attended_.floats(0), i, int64_t(width)), row_of(attended_.floats(0), from, int64_t(width)),
                        width * sizeof(float));
        }
    }
    team.barrier();
}

}  // namespace kveik
