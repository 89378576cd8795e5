// A decoder, put together from arrays, and its steps. Checks shapes, holds on to the arrays, releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <tuple>

#include "bindings/bindings.h"
#include "forward/forward.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kveik {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Storage = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// format, outputs, inputs, packed bytes
using Part = std::tuple<WeightFormat, int, int, Bytes>;

// storage, block stride and layer stride in bytes, block size, type, tables, slots, query starts, contexts, decodes, window
using Group = std::tuple<Storage, int64_t, int64_t, int, int, Table, Longs, Ints, Ints, int, int>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

class Model {
public:
    explicit Model(ModelParts parts) : forward_(std::move(parts)) {}

    void set_embedding(const Part& part) {
        forward_.model().embedding = weight(part);
        require(forward_.model().embedding.outputs == parts().vocab && forward_.model().embedding.inputs == parts().hidden,
                "the embedding table is not [vocab, hidden]");
    }

    void set_projection(const std::vector<Part>& weights, const std::optional<Floats>& bias) {
        parts().projection = product(weights, bias, parts().hidden, parts().vocab);
    }

    void set_norm(const Floats& weight) { parts().norm = floats(weight, parts().hidden); }

    void add_rope(const Floats& frequencies, float factor) {
        const float* first = floats(frequencies, parts().head_dim / 2);
        parts().ropes.push_back({std::vector<float>(first, first + frequencies.size()), factor});
    }

    void add_layer(int group, int place, int rope, const Floats& attention_norm, const std::vector<Part>& qkv,
                   const std::optional<Floats>& qkv_bias, const std::optional<Floats>& query_norm,
                   const std::optional<Floats>& key_norm, const std::optional<Floats>& key_mean, const std::vector<Part>& output,
                   const std::optional<Floats>& output_bias, const std::optional<Floats>& attention_post_norm,
                   const Floats& feed_forward_norm, const std::vector<Part>& gate_up, const std::optional<Floats>& gate_up_bias,
                   const std::vector<Part>& down, const std::optional<Floats>& down_bias,
                   const std::optional<Floats>& feed_forward_post_norm) {
        const ModelParts& m = parts();
        LayerParts layer;
        layer.group = group;
        layer.place = place;
        layer.rope = rope;
        layer.attention_norm = floats(attention_norm, m.hidden);
        layer.qkv = product(qkv, qkv_bias, m.hidden, m.qkv_width());
        layer.query_norm = floats(query_norm, m.head_dim);
        layer.key_norm = floats(key_norm, m.head_dim);
        layer.key_mean = floats(key_mean, m.kv_heads * m.head_dim);
        layer.output = product(output, output_bias, m.heads * m.head_dim, m.hidden);
        layer.attention_post_norm = floats(attention_post_norm, m.hidden);
        layer.feed_forward_norm = floats(feed_forward_norm, m.hidden);
        layer.gate_up = product(gate_up, gate_up_bias, m.hidden, 2 * m.intermediate);
        layer.down = product(down, down_bias, m.intermediate, m.hidden);
        layer.feed_forward_post_norm = floats(feed_forward_post_norm, m.hidden);
        require(rope >= 0 && rope < int(m.ropes.size()), "the layer's rope is not there");
        parts().layers.push_back(std::move(layer));
    }

    void forward(const Longs& token_ids, const Longs& positions, const Longs& wanted, const std::vector<Group>& groups,
                 Rows& hidden, int threads) {
        Step step{token_ids.data(), positions.data(), int(token_ids.size()), wanted.data(), int(wanted.size()), {}};
        require(positions.size() == token_ids.size(), "positions and token ids differ in number");
        require(hidden.shape(0) == wanted.size() && int(hidden.shape(1)) == parts().hidden, "hidden is not [wanted, hidden]");
        for (const Group& group : groups) step.groups.push_back(checked(group, token_ids.size()));
        nb::gil_scoped_release released;
        forward_.run(step, hidden.data(), threads);
    }

    void logits(const ConstRows& hidden, Rows& logits, int threads) {
        require(int(hidden.shape(1)) == parts().hidden, "hidden is not [rows, hidden]");
        require(logits.shape(0) == hidden.shape(0) && int(logits.shape(1)) == parts().vocab, "logits are not [rows, vocab]");
        nb::gil_scoped_release released;
        forward_.logits(hidden.data(), int(hidden.shape(0)), logits.data(), threads);
    }

    size_t workspace_bytes() const { return forward_.workspace_bytes(); }

private:
    ModelParts& parts() { return forward_.model(); }

    PackedWeight weight(const Part& part) {
        const auto& [format, outputs, inputs, bytes] = part;
        require(bytes.size() >= packed_bytes(format, outputs, inputs), "a packed weight is too short");
        bytes_.push_back(bytes);
        return {format, outputs, inputs, bytes.data()};
    }

    Product product(const std::vector<Part>& weights, const std::optional<Floats>& bias, int inputs, int outputs) {
        Product product;
        for (const Part& part : weights) {
            product.parts.push_back(weight(part));
            require(product.parts.back().inputs == inputs, "a product's parts differ in their inputs");
            product.outputs += product.parts.back().outputs;
            product.span = std::min(product.span, span_of(product.parts.back().format));
        }
        product.inputs = inputs;
        require(product.outputs == outputs, "a product's parts do not add up to its outputs");
        product.bias = floats(bias, outputs);
        return product;
    }

    const float* floats(const std::optional<Floats>& array, int size) { return array ? floats(*array, size) : nullptr; }

    const float* floats(const Floats& array, int size) {
        require(int(array.size()) == size, "a norm, bias or rope has the wrong length");
        floats_.push_back(array);
        return array.data();
    }

    static GroupStep checked(const Group& group, size_t tokens) {
        const auto& [storage, block_stride, layer_stride, block_size, type, tables, slots, starts, contexts, decodes, window] =
            group;
        require(slots.size() == tokens, "slots and token ids differ in number");
        require(starts.size() == contexts.size() + 1 && tables.shape(0) == contexts.size(), "rows of a group do not agree");
        StepRows rows{tables.data(), int64_t(tables.shape(1)), starts.data(), contexts.data(), slots.data(),
                      int(contexts.size()), decodes, window};
        return {storage.data(), block_stride, layer_stride, block_size, KvType(type), rows};
    }

    Forward forward_;
    // What the parts point to lives as long as the model does.
    std::vector<Bytes> bytes_;
    std::vector<Floats> floats_;
};

}  // namespace

void bind_forward(nb::module_& module) {
    nb::class_<Model>(module, "Model", "A decoder made of packed weights; runs a whole step in one call.")
        .def("__init__",
             [](Model* self, int hidden, int intermediate, int heads, int kv_heads, int head_dim, int vocab, float norm_eps,
                float attention_scale, float attention_soft_cap, float final_soft_cap, float embedding_scale, int activation) {
                 ModelParts parts;
                 parts.hidden = hidden;
                 parts.intermediate = intermediate;
                 parts.heads = heads;
                 parts.kv_heads = kv_heads;
                 parts.head_dim = head_dim;
                 parts.vocab = vocab;
                 parts.norm_eps = norm_eps;
                 parts.attention_scale = attention_scale;
                 parts.attention_soft_cap = attention_soft_cap;
                 parts.final_soft_cap = final_soft_cap;
                 parts.embedding_scale = embedding_scale;
                 parts.activation = Activation(activation);
                 new (self) Model(std::move(parts));
             },
             nb::kw_only(), "hidden"_a, "intermediate"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "vocab"_a, "norm_eps"_a,
             "attention_scale"_a, "attention_soft_cap"_a, "final_soft_cap"_a, "embedding_scale"_a, "activation"_a)
        .def("set_embedding", &Model::set_embedding, "part"_a)
        .def("set_projection", &Model::set_projection, "parts"_a, "bias"_a.none())
        .def("set_norm", &Model::set_norm, "weight"_a.noconvert())
        .def("add_rope", &Model::add_rope, "frequencies"_a.noconvert(), "factor"_a)
        .def("add_layer", &Model::add_layer, nb::kw_only(), "group"_a, "place"_a, "rope"_a, "attention_norm"_a.noconvert(),
             "qkv"_a, "qkv_bias"_a.none(), "query_norm"_a.none(), "key_norm"_a.none(), "key_mean"_a.none(), "output"_a, "output_bias"_a.none(),
             "attention_post_norm"_a.none(), "feed_forward_norm"_a.noconvert(), "gate_up"_a, "gate_up_bias"_a.none(), "down"_a,
             "down_bias"_a.none(), "feed_forward_post_norm"_a.none())
        .def("forward", &Model::forward, "token_ids"_a.noconvert(), "positions"_a.noconvert(), "wanted"_a.noconvert(),
             "groups"_a, "hidden"_a.noconvert(), "threads"_a)
        .def("logits", &Model::logits, "hidden"_a.noconvert(), "logits"_a.noconvert(), "threads"_a)
        .def_prop_ro("workspace_bytes", &Model::workspace_bytes);
}

}  // namespace kveik
