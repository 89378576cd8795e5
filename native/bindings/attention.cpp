// Attention and its writes on numpy arrays. No arithmetic here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>

#include "bindings/bindings.h"
#include "kernels/attention.h"

namespace nb = nanobind;

namespace kveik {

KVEIK_TABLE_CHOICE(AttentionKernels, attention_kernels)

namespace {

template <class Number, int dimensions>
using Array = nb::ndarray<Number, nb::ndim<dimensions>, nb::device::cpu>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// One group's step: the arrays of an AttentionBatch.
struct Rows {
    Array<const int32_t, 2> tables;
    Array<const int32_t, 1> query_starts, contexts;
    Array<const int64_t, 1> slots;
    int decodes, window;

    int tokens() const { return int(slots.shape(0)); }
    StepRows view() const {
        return {tables.data(), tables.stride(0), query_starts.data(), contexts.data(), slots.data(),
                int(contexts.shape(0)), decodes, window};
    }
};

Rows rows_of(Array<const int32_t, 2> tables, Array<const int64_t, 1> slots, Array<const int32_t, 1> query_starts,
             Array<const int32_t, 1> contexts, int decodes, int window) {
    require(tables.stride(1) == 1 && slots.stride(0) == 1 && query_starts.stride(0) == 1 && contexts.stride(0) == 1,
            "a step's arrays must be contiguous");
    require(tables.shape(0) == contexts.shape(0) && query_starts.shape(0) == contexts.shape(0) + 1, "rows disagree");
    require(decodes >= 0 && decodes <= int(contexts.shape(0)) && window >= 0, "decodes or window out of range");
    return {tables, query_starts, contexts, slots, decodes, window};
}

// One layer's view of a group's storage, as bytes: [blocks, 2 * kv_heads * record_bytes].
CacheView cache_of(Array<uint8_t, 2> layer, int type, int kv_heads, int head_dim, int block_size) {
    CacheView view{layer.data(), layer.stride(0), kv_heads, head_dim, block_size, KvType(type)};
    require(type >= 0 && type <= int(KvType::fp8_e5m2), "no such type of keys and values");
    require(head_dim % 16 == 0 && head_dim <= head_dim_most, "head_dim must be a multiple of 16, 1024 at most");
    require(layer.stride(1) == 1 && int64_t(layer.shape(1)) == 2 * kv_heads * view.record_bytes(), "layer of another shape");
    return view;
}

template <class Number>
using Heads = Array<const Number, 3>;

template <class Number>
void check_heads(const Heads<Number>& heads, int tokens, int head_dim) {
    require(int(heads.shape(0)) == tokens && int(heads.shape(2)) == head_dim, "heads of another shape");
    require(heads.stride(2) == 1 && heads.stride(1) == head_dim, "a token's heads must be contiguous");
}

void write(nb::handle keys, nb::handle values, Array<uint8_t, 2> layer, int type, int block_size, const Rows& rows,
           int threads) {
    const auto put = [&](auto keys_array, auto values_array, auto kernel) {
        const int head_dim = int(keys_array.shape(2));
        check_heads(keys_array, rows.tokens(), head_dim);
        check_heads(values_array, rows.tokens(), head_dim);
        require(keys_array.shape(1) == values_array.shape(1), "keys and values disagree");
        const CacheView cache = cache_of(layer, type, int(keys_array.shape(1)), head_dim, block_size);
        nb::gil_scoped_release released;
        with_team(threads, [&](Team& team) {
            kernel(keys_array.data(), keys_array.stride(0), values_array.data(), values_array.stride(0), rows.tokens(), cache,
                   rows.view(), team);
        });
    };
    if (nb::isinstance<Heads<float>>(keys))
        put(nb::cast<Heads<float>>(keys), nb::cast<Heads<float>>(values), attention_kernels().write_f32);
    else
        put(nb::cast<Heads<uint16_t>>(keys), nb::cast<Heads<uint16_t>>(values), attention_kernels().write_bf16);
}

void rope_write(Array<float, 2> qkv, int heads, int kv_heads, Array<const float, 2> cos, Array<const float, 2> sin,
                std::optional<Array<const float, 1>> query_norm, std::optional<Array<const float, 1>> key_norm, float eps,
                Array<uint8_t, 2> layer, int type, int block_size, const Rows& rows, int threads) {
    const int head_dim = 2 * int(cos.shape(1)), tokens = rows.tokens();
    require(int(qkv.shape(0)) == tokens && qkv.stride(1) == 1, "qkv has other tokens than the step");
    require(int(qkv.shape(1)) == (heads + 2 * kv_heads) * head_dim, "qkv of another width");
    require(int(cos.shape(0)) == tokens && int(sin.shape(0)) == tokens && sin.shape(1) == cos.shape(1), "angles disagree");
    require(cos.stride(0) == head_dim / 2 && sin.stride(0) == head_dim / 2, "angles must be contiguous");
    for (const auto* norm : {&query_norm, &key_norm})
        require(!*norm || (int((*norm)->shape(0)) == head_dim && (*norm)->stride(0) == 1), "norm of another width");
    const CacheView cache = cache_of(layer, type, kv_heads, head_dim, block_size);
    nb::gil_scoped_release released;
    with_team(threads, [&](Team& team) {
        attention_kernels().rope_write(qkv.data(), qkv.stride(0), tokens, heads, cos.data(), sin.data(),
                                       query_norm ? query_norm->data() : nullptr, key_norm ? key_norm->data() : nullptr, eps,
                                       cache, rows.view(), team);
    });
}

void attend(Heads<float> queries, float scale, float soft_cap, Array<uint8_t, 2> layer, int type, int kv_heads, int block_size,
            const Rows& rows, nb::ndarray<float, nb::ndim<3>, nb::device::cpu> out, int threads) {
    const int heads = int(queries.shape(1)), head_dim = int(queries.shape(2));
    check_heads(queries, rows.tokens(), head_dim);
    check_heads<float>(Heads<float>(out), rows.tokens(), head_dim);
    require(kv_heads > 0 && heads % kv_heads == 0 && int(out.shape(1)) == heads, "heads must be a multiple of kv_heads");
    const CacheView cache = cache_of(layer, type, kv_heads, head_dim, block_size);
    int context_most = 0;
    for (int i = 0; i < rows.view().rows; ++i) context_most = std::max(context_most, rows.contexts.data()[i]);
    nb::gil_scoped_release released;
    const size_t bytes = attention_kernels().attend_workspace(heads, kv_heads, head_dim, context_most, threads);
    const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
    if (!workspace) throw std::bad_alloc();
    with_team(threads, [&](Team& team) {
        attention_kernels().attend(queries.data(), queries.stride(0), heads, scale, soft_cap, cache, rows.view(), out.data(),
                                   out.stride(0), workspace.get(), team);
    });
}

}  // namespace

void bind_attention(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Rows>(module, "AttentionRows")
        .def_static("of", &rows_of, "tables"_a.noconvert(), "slots"_a.noconvert(), "query_starts"_a.noconvert(),
                    "contexts"_a.noconvert(), "decodes"_a, "window"_a);
    module.def("attention_write", &write, "keys"_a, "values"_a, "layer"_a.noconvert(), "type"_a, "block_size"_a, "rows"_a,
               "threads"_a);
    module.def("attention_rope_write", &rope_write, "qkv"_a.noconvert(), "heads"_a, "kv_heads"_a, "cos"_a.noconvert(),
               "sin"_a.noconvert(), "query_norm"_a.noconvert().none(), "key_norm"_a.noconvert().none(), "eps"_a,
               "layer"_a.noconvert(), "type"_a, "block_size"_a, "rows"_a, "threads"_a);
    module.def("attention_attend", &attend, "queries"_a.noconvert(), "scale"_a, "soft_cap"_a, "layer"_a.noconvert(), "type"_a,
               "kv_heads"_a, "block_size"_a, "rows"_a, "out"_a.noconvert(), "threads"_a);
}

}  // namespace kveik
