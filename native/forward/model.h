// A decoder as pointers and numbers: what `forward` reads. Whoever builds one keeps the memory behind it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/linear.h"
#include "kernels/rows.h"

namespace kveik {

// One product whose rows may lie in several weights, one after another, because a file keeps them in different formats.
struct Product {
    std::vector<PackedWeight> parts;
    const float* bias = nullptr;  // [outputs] or null
    int inputs = 0;
    int outputs = 0;
    int span = 128;  // of its activations: the least that one of its parts asks for
};

struct LayerParts {
    int group = 0;
    int place = 0;  // which of the group's layers
    int rope = 0;   // which of the model's ropes
    const float* attention_norm = nullptr;     // [hidden]
    Product qkv;                               // hidden -> (heads + 2 kv_heads) * head_dim
    const float* query_norm = nullptr;         // [head_dim] or null
    const float* key_norm = nullptr;
    const float* key_mean = nullptr;           // [kv_heads, head_dim] or null: see CacheView; not for float32
    Product output;                            // heads * head_dim -> hidden
    const float* attention_post_norm = nullptr;     // [hidden] or null
    const float* feed_forward_norm = nullptr;       // [hidden]
    Product gate_up;                                // hidden -> 2 * intermediate: gate, then up
    Product down;                                   // intermediate -> hidden
    const float* feed_forward_post_norm = nullptr;  // [hidden] or null
};

struct Rope {
    std::vector<float> frequencies;  // [head_dim / 2], radians per position
    float factor = 1;                // of cosines and sines
};

struct ModelParts {
    int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
    float norm_eps = 0, attention_scale = 0, attention_soft_cap = 0, final_soft_cap = 0, embedding_scale = 1;
    Activation activation = Activation::silu;
    PackedWeight embedding{};  // [vocab, hidden]
    Product projection;        // hidden -> vocab
    const float* norm = nullptr;
    std::vector<Rope> ropes;
    std::vector<LayerParts> layers;

    int qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
};

// One group of layers in one step.
struct GroupStep {
    uint8_t* storage;      // of block 0, layer 0
    int64_t block_stride;  // bytes from block to block
    int64_t layer_stride;  // bytes from layer to layer in a block
    int block_size;
    KvType type;
    StepRows rows;
};

struct Step {
    const int64_t* token_ids;  // [tokens]
    const int64_t* positions;  // [tokens]
    int tokens;
    const int64_t* wanted;  // [wanted_count] ascending: tokens whose final hidden state is asked for
    int wanted_count;
    std::vector<GroupStep> groups;
};

}  // namespace kveik
