// Products with quantised weights. Arrays are checked here; nothing below checks again.
#include "kernels/linear.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kveik {

KVEIK_TABLE_CHOICE(LinearKernels, linear_kernels)

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

// Rows may be apart, values may not.
template <class Array>
void check_rows(const Array& rows, size_t width) {
    check(rows.shape(1) == width, "the matrix has another number of columns");
    check(width == 1 || rows.stride(1) == 1, "the matrix's rows must be contiguous");
}

void check_format(WeightFormat format, int outputs, int inputs) {
    check(format >= WeightFormat::q4_0 && format <= WeightFormat::q6_k, "no such format");
    check(outputs > 0 && fits(format, inputs) && inputs % group_inputs == 0, "the format cannot have these sizes");
}

PackedWeight packed_weight(WeightFormat format, int outputs, int inputs, const Bytes& packed) {
    check_format(format, outputs, inputs);
    check(packed.shape(0) == packed_bytes(format, outputs, inputs), "packed is not of packed_bytes(format, outputs, inputs)");
    return {format, outputs, inputs, packed.data()};
}

size_t packed_bytes_checked(WeightFormat format, int outputs, int inputs) {
    check_format(format, outputs, inputs);
    return packed_bytes(format, outputs, inputs);
}

size_t activation_bytes_checked(int rows, int inputs, int span) {
    check(rows > 0 && inputs > 0 && inputs % group_inputs == 0, "rows must be positive, inputs a multiple of 32");
    check(span == 32 || span == 128, "span must be 32 or 128");
    return activation_bytes(rows, inputs, span);
}

void pack(WeightFormat format, int outputs, int inputs, const Bytes& blocks, const BytesOut& packed, int threads) {
    check_format(format, outputs, inputs);
    const FormatTraits traits = traits_of(format);
    check(blocks.shape(0) == size_t(outputs) * size_t(inputs / traits.block_inputs) * size_t(traits.block_bytes),
          "blocks is not of the size that the format has");
    check(packed.shape(0) == packed_bytes(format, outputs, inputs), "packed is not of packed_bytes(format, outputs, inputs)");
    nb::gil_scoped_release release;
    with_team(threads, [&](Team& team) {
        linear_kernels().pack(format, blocks.data(), outputs, inputs, packed.data(), team);
    });
}

void unpack(WeightFormat format, int outputs, int inputs, const Bytes& packed, const Indices& wanted, const MatrixOut& out,
            int threads) {
    const PackedWeight weight = packed_weight(format, outputs, inputs, packed);
    check_rows(out, size_t(inputs));
    const size_t count = wanted.shape(0);
    check(out.shape(0) == count && (count < 2 || out.stride(0) == inputs), "out must be contiguous [wanted, inputs]");
    for (size_t i = 0; i < count; ++i) check(wanted(i) >= 0 && wanted(i) < outputs, "an output is wanted that does not exist");
    nb::gil_scoped_release release;
    with_team(threads, [&](Team& team) { linear_kernels().unpack(weight, wanted.data(), int(count), out.data(), team); });
}

void quantise(const Matrix& x, const BytesOut& activations, int threads, int span) {
    const int rows = int(x.shape(0)), inputs = int(x.shape(1));
    check_rows(x, size_t(inputs));
    check(activations.shape(0) == activation_bytes_checked(rows, inputs, span), "not of activation_bytes(rows, inputs, span)");
    const Activations to{activations.data(), rows, inputs, span};
    nb::gil_scoped_release release;
    with_team(threads, [&](Team& team) { linear_kernels().quantise(x.data(), x.stride(0), to, team); });
}

void linear(WeightFormat format, int outputs, int inputs, const Bytes& packed, const BytesOut& activations,
            const std::optional<Vector>& bias, const MatrixOut& out, bool add, int threads, int span) {
    const PackedWeight weight = packed_weight(format, outputs, inputs, packed);
    const int rows = int(out.shape(0));
    check_rows(out, size_t(outputs));
    check(activations.shape(0) == activation_bytes_checked(rows, inputs, span), "not of activation_bytes(rows, inputs, span)");
    check(!bias || bias->shape(0) == size_t(outputs), "the bias has another number of outputs");
    const Activations x{activations.data(), rows, inputs, span};
    nb::gil_scoped_release release;
    with_team(threads, [&](Team& team) {
        linear_kernels().linear(weight, x, bias ? bias->data() : nullptr, out.data(), out.stride(0), add, team);
    });
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::enum_<WeightFormat>(m, "WeightFormat", "How a packed weight's values are stored.")
        .value("Q4_0", WeightFormat::q4_0).value("Q4_1", WeightFormat::q4_1).value("Q5_0", WeightFormat::q5_0)
        .value("Q5_1", WeightFormat::q5_1).value("Q8_0", WeightFormat::q8_0).value("Q4_K", WeightFormat::q4_k)
        .value("Q5_K", WeightFormat::q5_k).value("Q6_K", WeightFormat::q6_k);
    m.attr("ROWS_MANY") = rows_many;
    m.def("packed_bytes", &packed_bytes_checked, "format"_a, "outputs"_a, "inputs"_a, "Bytes of a packed weight.");
    m.def("activation_bytes", &activation_bytes_checked, "rows"_a, "inputs"_a, "span"_a = 128, "Bytes of quantised rows.");
    m.def("span_of", &span_of, "format"_a, "Inputs that share a scale where rows are many.");
    m.def("pack", &pack, "format"_a, "outputs"_a, "inputs"_a, nb::arg("blocks").noconvert(), nb::arg("packed").noconvert(),
          "threads"_a, "A GGUF tensor's own bytes into the order in which products read them.");
    m.def("unpack", &unpack, "format"_a, "outputs"_a, "inputs"_a, nb::arg("packed").noconvert(), nb::arg("wanted").noconvert(),
          nb::arg("out").noconvert(), "threads"_a, "Rows of a packed weight as float32 [wanted, inputs].");
    m.def("quantise", &quantise, nb::arg("x").noconvert(), nb::arg("activations").noconvert(), "threads"_a,
          "span"_a = 128, "float32 [rows, inputs] -> int8; a scale for 32 inputs, or for `span` of them where rows are many.");
    m.def("linear", &linear, "format"_a, "outputs"_a, "inputs"_a, nb::arg("packed").noconvert(),
          nb::arg("activations").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("out").noconvert(), "add"_a,
          "threads"_a, "span"_a = 128,
          "out [rows, outputs] = rows times the weight, transposed, + bias; += where `add`.");
}

}  // namespace kveik
