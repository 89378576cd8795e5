// Attention over a step's rows: who computes what, and how the parts come together.
//
// Decode rows are cut into spans. A unit is a row and a kv head; the spans of all units, in order, are shared out in contiguous
// pieces. A unit that lies in one piece is folded together by whoever has it; the spans of a unit that is cut are kept, and
// folded when all are there: in the same order, so that who had them cannot be seen.
//
// The queries of other rows are cut into panels; where these are too few for the threads, each span of a panel's keys is an item.
#include "kernels/attention.h"

#include "kernels/attention_chunk.h"
#include "kernels/attention_span.h"
#include "kernels/rope_write.h"

namespace kveik::KVEIK_ISA {

namespace {

// Pieces per thread: more even out what differs between them, fewer cut fewer units.
constexpr int pieces_per_thread = 4;

constexpr size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr size_t partial_bytes(int group, int head_dim) { return padded(sizeof(float) * (2 * group + group * head_dim)); }

// A partial over `memory`; the sums come first, so that they lie at a cache line's start.
Partial partial_at(uint8_t* memory, int group, int head_dim) {
    float* sum = reinterpret_cast<float*>(memory);
    float* most = sum + group * head_dim;
    return {most, most + group, sum};
}

// Where in the workspace things lie: what each thread has for itself, then the spans of units that are cut.
struct Workspace {
    uint8_t* base;
    int group, head_dim;

    size_t scores_bytes() const { return padded(sizeof(float) * group * range_positions); }
    size_t slots_bytes() const { return padded(size_t(64) * head_dim); }
    size_t own_bytes() const {
        const size_t partials = 2 * partial_bytes(group, head_dim);
        const size_t spans = scores_bytes() + prepared_bytes(group, head_dim) + slots_bytes() + partials;
        return padded(std::max(spans, panel_bytes(head_dim)));
    }
    size_t units_bytes(int threads) const {
        return threads * pieces_per_thread * spans_most * partial_bytes(group, head_dim);
    }
    size_t bytes(int threads, int context_most) const {
        // Panels are cut where there are fewer than items wanted.
        const size_t strips = threads == 1 ? 0 : threads * pieces_per_thread * panel_strips_most;
        const size_t spans = chunk_span_of(std::max(context_most, 1) - 1) + 1;
        return threads * own_bytes() + units_bytes(threads) + strips * spans * strip_partial_bytes(head_dim);
    }

    // A thread has spans or a panel at a time.
    uint8_t* panel(int rank) const { return base + rank * own_bytes(); }
    SpanMemory memory(int rank) const {
        uint8_t* own = base + rank * own_bytes();
        float* scores = reinterpret_cast<float*>(own);
        uint8_t* queries = own + scores_bytes();
        return {scores, queries, queries + prepared_bytes(group, head_dim)};
    }
    Partial folded(int rank) const { return partial_at(partials(rank), group, head_dim); }
    Partial next(int rank) const {
        return partial_at(partials(rank) + partial_bytes(group, head_dim), group, head_dim);
    }
    uint8_t* partials(int rank) const { return memory(rank).slots + slots_bytes(); }
    Partial kept(int threads, int cut, int span) const {
        return partial_at(base + threads * own_bytes() + (int64_t(cut) * spans_most + span) * partial_bytes(group, head_dim),
                          group, head_dim);
    }
    uint8_t* kept_panels(int threads) const { return base + threads * own_bytes() + units_bytes(threads); }
};

// A decode row's positions, and the spans that they are cut into. The cut depends on nothing else.
struct Cut {
    int first, stop, size, spans;
};

Cut cut_of(const StepRows& rows, int row) {
    const int stop = rows.contexts[row], first = rows.window ? std::max(0, stop - rows.window) : 0;
    const int steps = (stop - first + span_step - 1) / span_step;
    const int size = span_step * ((steps + spans_most - 2) / (spans_most - 1));
    return {first, stop, size, (stop - 1) / size - first / size + 1};
}

// The spans of all decode rows, in order: row, kv head, span.
class Spans {
public:
    Spans(const Problem& problem, const Workspace& workspace, Team& team)
        : problem_(problem), workspace_(workspace), team_(team) {
        for (int row = 0; row < problem.rows.decodes; ++row) total_ += int64_t(cut_of(problem.rows, row).spans) * heads();
        pieces = int(std::min<int64_t>(total_, team.size == 1 ? 1 : team.size * pieces_per_thread));
    }

    int pieces;

    // What is in one piece.
    void attend(int piece) const {
        const SpanMemory memory = workspace_.memory(team_.rank);
        const int64_t first = begin(piece), stop = begin(piece + 1);
        Unit unit = unit_of(first);
        // The one that is read, and the one behind it, by turns.
        Span spans[2];
        spans[first % 2] = span_of(unit, first);
        for (int64_t at = first; at < stop; ++at) {
            const Unit next = at + 1 < unit.end() ? unit : after(unit);
            Span& span = spans[at % 2];
            if (at + 1 < stop) {
                spans[(at + 1) % 2] = span_of(next, at + 1);
                spans[(at + 1) % 2].foreseen = true;
                spans[(at + 1) % 2].prepared = next.begin == unit.begin;
                span.next = &spans[(at + 1) % 2];
            }
            if (unit.begin < first || unit.end() > stop)
                attend_span(span, memory, kept(piece_after(unit.begin), int(at - unit.begin)));
            else attend_part(unit, at, span, memory);
            unit = next;
        }
    }

    // The units that are cut, once everybody is done; ends with a barrier where there are any.
    void fold_cut() const {
        bool any = false;
        for (int piece = 1; piece < pieces; ++piece) {
            const Unit unit = unit_of(begin(piece));
            if (unit.begin == begin(piece)) continue;
            any = true;
            // A unit in more than two pieces is found at each of its cuts.
            if (piece_after(unit.begin) != piece || piece % team_.size != team_.rank) continue;
            for (int span = 1; span < unit.cut.spans; ++span)
                fold(kept(piece, 0), kept(piece, span), problem_.group, head_dim());
            finish(kept(piece, 0), problem_.group, head_dim(), out_of(unit));
        }
        if (any) team_.barrier();
    }

private:
    struct Unit {
        int row, kv_head;
        int64_t begin;
        Cut cut;

        int64_t end() const { return begin + cut.spans; }
    };

    int heads() const { return problem_.cache.kv_heads; }
    int head_dim() const { return problem_.cache.head_dim; }
    int64_t begin(int piece) const { return total_ * piece / pieces; }

    // The first piece that begins behind `at`.
    int piece_after(int64_t at) const { return int(((at + 1) * pieces + total_ - 1) / total_); }

    Unit unit_of(int64_t at) const {
        int64_t begin = 0;
        for (int row = 0;; ++row) {
            const Cut cut = cut_of(problem_.rows, row);
            const int64_t spans = int64_t(cut.spans) * heads();
            if (at < begin + spans) {
                const int kv_head = int((at - begin) / cut.spans);
                return {row, kv_head, begin + int64_t(kv_head) * cut.spans, cut};
            }
            begin += spans;
        }
    }

    Unit after(const Unit& unit) const {
        const int64_t begin = unit.end();
        if (unit.kv_head + 1 < heads()) return {unit.row, unit.kv_head + 1, begin, unit.cut};
        const int row = unit.row + 1;
        return {row, 0, begin, row < problem_.rows.decodes ? cut_of(problem_.rows, row) : unit.cut};
    }

    // Where a unit that is first cut where `piece` begins keeps its spans.
    Partial kept(int piece, int span) const { return workspace_.kept(team_.size, piece, span); }

    int64_t offset(const Unit& unit) const { return int64_t(unit.kv_head) * problem_.group * head_dim(); }
    float* out_of(const Unit& unit) const { return problem_.out + unit.row * problem_.out_stride + offset(unit); }

    Span span_of(const Unit& unit, int64_t at) const {
        const int64_t low = (unit.cut.first / unit.cut.size + at - unit.begin) * unit.cut.size;
        return {problem_.queries + unit.row * problem_.stride + offset(unit),
                problem_.rows.tables + unit.row * problem_.rows.table_stride,
                unit.kv_head,
                int(std::max<int64_t>(low, unit.cut.first)),
                int(std::min<int64_t>(low + unit.cut.size, unit.cut.stop)),
                nullptr,
                false,
                false};
    }

    void attend_span(const Span& span, const SpanMemory& memory, const Partial& to) const {
#if defined(__AVX512BF16__)
        attend_span_bf16(problem_, span, memory, to);
#else
        attend_span_f32(problem_, span, memory, to);
#endif
    }

    // The next span of a unit that is all in one piece.
    void attend_part(const Unit& unit, int64_t at, const Span& span, const SpanMemory& memory) const {
        const Partial folded = workspace_.folded(team_.rank), next = workspace_.next(team_.rank);
        attend_span(span, memory, at == unit.begin ? folded : next);
        if (at != unit.begin) fold(folded, next, problem_.group, head_dim());
        if (at + 1 == unit.end()) finish(folded, problem_.group, head_dim(), out_of(unit));
    }

    const Problem& problem_;
    const Workspace& workspace_;
    Team& team_;
    int64_t total_ = 0;
};

// The panels of all rows with several queries, in order: row, kv head, panel, the panel that sees most first; where panels are
// cut, their spans, the latest and largest first.
class Panels {
public:
    Panels(const Problem& problem, const Workspace& workspace, Team& team)
        : problem_(problem), workspace_(workspace), team_(team) {
        // Large panels pack keys less often, small ones even out what threads do; results are the same.
        const int wanted = pieces_per_thread * team.size;
        count = items();
        if (count == 0 || count >= wanted || team.size == 1) return;
        cut_ = true;
        while ((count = items()) < wanted && strips_ > 1) strips_ /= 2;
    }

    int64_t count = 0;

    void attend(int64_t item) const {
        const Place place = place_of(item);
        if (!cut_) return attend_panel(problem_, place.panel, workspace_.panel(team_.rank));
        attend_panel_span(problem_, place.panel, place.first_span + place.span, workspace_.panel(team_.rank), kept(item));
    }

    // The panels that are cut, once everybody is done; ends with a barrier where there are any.
    void fold_cut() const {
        if (!cut_) return;
        int64_t panel = 0;
        for (int64_t item = 0; item < count; ++panel) {
            const Place place = place_of(item);
            if (panel % team_.size == team_.rank)
                finish_panel(problem_, place.panel, kept(item + place.spans - 1), place.spans, -int64_t(item_bytes()));
            item += place.spans;
        }
        team_.barrier();
    }

private:
    // An item: a panel, and which of its row's spans where panels are cut.
    struct Place {
        Panel panel;
        int first_span, spans, span;
    };

    int heads() const { return problem_.cache.kv_heads; }
    int queries_of(int row) const { return problem_.rows.query_starts[row + 1] - problem_.rows.query_starts[row]; }
    int lanes_of(int row) const { return queries_of(row) * problem_.group; }
    int64_t panels_of(int row) const { return (lanes_of(row) + strips_ * strip_lanes - 1) / (strips_ * strip_lanes); }

    // Spans of all that a row's queries see; an item is a whole panel where they are not cut.
    int first_span_of(int row) const {
        const int window = problem_.rows.window, first = problem_.rows.contexts[row] - queries_of(row);
        return window ? chunk_span_of(std::max(0, first - window + 1)) : 0;
    }
    int spans_of(int row) const {
        return cut_ ? chunk_span_of(problem_.rows.contexts[row] - 1) - first_span_of(row) + 1 : 1;
    }

    int64_t items() const {
        int64_t items = 0;
        for (int row = problem_.rows.decodes; row < problem_.rows.rows; ++row)
            items += panels_of(row) * heads() * spans_of(row);
        return items;
    }

    Place place_of(int64_t item) const {
        int row = problem_.rows.decodes;
        for (int64_t items; item >= (items = panels_of(row) * heads() * spans_of(row)); ++row) item -= items;
        const int64_t panels = panels_of(row);
        const int spans = spans_of(row), span = spans - 1 - int(item % spans);
        item /= spans;
        const int first = int(panels - 1 - item % panels) * strips_ * strip_lanes;
        const Panel panel{row, int(item / panels), first, std::min(first + strips_ * strip_lanes, lanes_of(row))};
        return {panel, cut_ ? first_span_of(row) : 0, spans, span};
    }

    size_t item_bytes() const { return strips_ * strip_partial_bytes(problem_.cache.head_dim); }
    uint8_t* kept(int64_t item) const { return workspace_.kept_panels(team_.size) + item * item_bytes(); }

    const Problem& problem_;
    const Workspace& workspace_;
    Team& team_;
    int strips_ = panel_strips_most;
    bool cut_ = false;
};

void attend(const float* queries, int64_t stride, int heads, float scale, float soft_cap, const CacheView& cache,
            const StepRows& rows, float* out, int64_t out_stride, void* memory, Team& team) {
    const Problem problem{queries, stride, out, out_stride, heads / cache.kv_heads, scale, soft_cap, cache, rows};
    const Workspace workspace{static_cast<uint8_t*>(memory), problem.group, cache.head_dim};
    const Spans spans(problem, workspace, team);
    const Panels panels(problem, workspace, team);
    // The large items first: what is left for the end is small.
    team.each(panels.count + spans.pieces, 1, [&](int64_t item, int64_t) {
        if (item < panels.count) panels.attend(item);
        else spans.attend(int(item - panels.count));
    });
    spans.fold_cut();
    panels.fold_cut();
}

size_t attend_workspace(int heads, int kv_heads, int head_dim, int context_most, int threads) {
    return Workspace{nullptr, heads / kv_heads, head_dim}.bytes(threads, context_most);
}

}  // namespace

extern const AttentionKernels attention_kernels_table{rope_write, write_f32, write_bf16, attend, attend_workspace};

}  // namespace kveik::KVEIK_ISA
