// A whole step in one parallel region: from token ids to the wanted tokens' hidden states, and from those to logits.
#pragma once

#include "forward/model.h"
#include "forward/row_parts.h"
#include "forward/workspace.h"

namespace kveik {

class Forward {
public:
    explicit Forward(ModelParts parts) : model_(std::move(parts)) {}

    ModelParts& model() { return model_; }

    // Writes the step's keys and values and gives hidden [wanted_count, hidden], after the last norm.
    void run(const Step& step, float* hidden, int threads);

    // hidden [rows, hidden] -> logits [rows, vocab]
    void logits(const float* hidden, int rows, float* logits, int threads);

    // Bytes of the workspace as it has grown so far.
    size_t workspace_bytes() const;

private:
    void reserve(const Step& step, int threads);
    void embed(const Step& step, Team& team);
    void turn(const Step& step, Team& team);
    void layer(const LayerParts& layer, const Step& step, bool last, Team& team);
    void queries_keys_values(const LayerParts& layer, const RowParts& parts, Team& team);
    void attend(const LayerParts& layer, const Step& step, Team& team);
    // The first `decodes` of `rows` rows of the stream are decodes; likewise below.
    void behind_attention(const LayerParts& layer, int rows, int decodes, Team& team);
    void feed_forward(const LayerParts& layer, int rows, int decodes, Team& team);
    // Rows of the stream from `first` on += the product of x, normed where there is a norm.
    void add_to_stream(const Product& product, const Activations& x, const float* norm, int first, Team& team);
    void product(const Product& product, const Activations& x, float* out, int64_t stride, bool add, Team& team);
    void keep(const Step& step, Team& team);

    ModelParts model_;
    Buffer stream_, qkv_, attended_, inner_, quantised_, inner_quantised_, turns_, ids_, attention_;
};

}  // namespace kveik
