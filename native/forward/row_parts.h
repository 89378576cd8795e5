// Which rows of a step are multiplied together.
#pragma once

#include "kernels/linear_layout.h"

namespace kveik {

// A product of `rows_many` rows or more goes another way than one of fewer, and its sums differ slightly. What is sampled
// must not depend on who else is in the step, so decodes, which are a step's first rows, always go in parts of fewer. The
// rest goes the way for many where it is many, unless `few` says that the product's formats gain nothing by it.
class RowParts {
public:
    struct Part {
        int first, count;
    };

    // The first `decodes` of `rows` are decodes. At most `most` rows in a part that goes the way for many; it has
    // `rows_many` at least, for which `most` must be twice as large or take all of them.
    RowParts(int rows, int decodes, int most, bool few)
        : rows_(rows), few_(few || rows - decodes < rows_many ? rows : decodes), few_parts_(parts(few_, rows_many - 1)),
          many_parts_(parts(rows - few_, most)) {}

    int count() const { return few_parts_ + many_parts_; }

    Part operator[](int i) const {
        return i < few_parts_ ? equal(0, few_, few_parts_, i) : equal(few_, rows_ - few_, many_parts_, i - few_parts_);
    }

private:
    static int parts(int rows, int most) { return rows == 0 ? 0 : (rows + most - 1) / most; }

    static Part equal(int from, int rows, int parts, int i) {
        const int first = int(int64_t(rows) * i / parts), last = int(int64_t(rows) * (i + 1) / parts);
        return {from + first, last - first};
    }

    int rows_, few_, few_parts_, many_parts_;
};

}  // namespace kveik
