// A panel of queries over a row's keys. Lanes of a vector are queries: everything that softmax keeps per query is a vector, and
// nothing is ever added up across lanes, so that a query's result does not depend on its neighbours.
//
//     scores  [key][lane]  = keys [key][dim] * queries [dim][lane]       a strip of 48 lanes at most, a tile of 128 keys
//     weights [key][lane]  = exp(scores - most)
//     sums    [dim][lane] += values [key][dim] * weights [key][lane]
#include "kernels/attention_chunk.h"

#include <type_traits>

#include "kernels/attention_exp.h"
#include "kernels/attention_products.h"
#include "kernels/attention_strip.h"

namespace kveik::KVEIK_ISA {

namespace {

// Accumulators of a product that the registers hold: rows times vectors.
#if defined(__AVX512F__)
constexpr int product_rows = 8, product_vectors = 3;
#elif defined(__AVX2__)
constexpr int product_rows = 4, product_vectors = 1;
#else
constexpr int product_rows = 2, product_vectors = 1;
#endif

// What a panel's strips have in common.
struct Work {
    const Problem& problem;
    const Panel& panel;
    Memory memory;
    int first, stop;  // positions that any of its queries may see
    int64_t token;    // of the row's first query
    int position;     // of that query
};

template <class Products>
class Chunk {
public:
    explicit Chunk(const Work& work)
        : work_(work), problem_(work.problem), memory_(work.memory), strips_(strips_of(work.panel)) {}

    // All that the panel sees, to its rows of `out`.
    template <KvType type>
    void attend() {
        begin<type>(work_.first, work_.stop);
        const int first = chunk_span_of(work_.first), last = chunk_span_of(work_.stop - 1);
        for (int span = first; span <= last; ++span) {
            read<type>(span, work_.stop, [&](const Strip& strip) { return span == first ? strip.all : strip.span; });
            if (span == first) continue;
            for (int s = 0; s < strips_; ++s) {
                const Strip strip = this->strip(s);
                fold(strip.all, strip.span, strip.width, head_dim());
            }
        }
        for (int s = 0; s < strips_; ++s) finish(s, strip(s).all);
    }

    // What it sees in a span, which may be nothing, to `kept`: a partial for each strip.
    template <KvType type>
    void attend_span(int span, uint8_t* kept) {
        const int first = std::max(work_.first, chunk_span_begin(span)), stop = std::min(work_.stop, chunk_span_begin(span + 1));
        begin<type>(first, stop);
        int index = 0;
        read<type>(span, stop, [&](const Strip&) { return partial_at(kept + index++ * strip_partial_bytes(head_dim())); });
    }

    int width_of(int strip) const { return (lanes_of(strip) + 15) / 16 * 16; }

    // A strip's rows of `out`.
    void finish(int index, const StripPartial& all) {
        for (int l = 0; l < lanes_of(index); ++l) {
            const Lane to = lane(index, l);
            float* out = problem_.out + (work_.token + to.query) * problem_.out_stride + to.head * head_dim();
            const float inverse = 1.0f / all.total[l];
            for (int i = 0; i < head_dim(); ++i) out[i] = all.sums[i * strip_lanes + l] * inverse;
        }
    }

private:
    static constexpr int per_word = Products::per_word;

    int head_dim() const { return problem_.cache.head_dim; }
    int steps() const { return head_dim() / per_word; }
    int lanes_of(int strip) const {
        return std::min(strip_lanes, work_.panel.last - work_.panel.first - strip * strip_lanes);
    }
    Strip strip(int index) const { return memory_.strip(index, width_of(index)); }

    // The offset of a lane's head from its row's first token.
    struct Lane {
        int query, head;
    };
    Lane lane(int strip, int index) const {
        const int lane = work_.panel.first + strip * strip_lanes + index;
        return {lane / problem_.group, work_.panel.kv_head * problem_.group + lane % problem_.group};
    }

    // Positions [first, stop) will be read. Queries to words, lane by lane; lanes that are none see what the last one sees.
    template <KvType type>
    void begin(int first, int stop) {
        fetched_ = first;
        fetch_stop_ = std::min(stop, first / tile_keys * tile_keys + tile_keys);
        fetch<type>(tile_keys);
        uint32_t* row = memory_.rows();
        for (int s = 0; s < strips_; ++s) {
            const Strip strip = this->strip(s);
            for (int l = 0; l < strip_lanes; ++l) {
                const Lane from = lane(s, std::min(l, lanes_of(s) - 1));
                const float* query = problem_.queries + (work_.token + from.query) * problem_.stride + from.head * head_dim();
                for (int i = 0; i < head_dim(); i += 16)
                    Products::template unpack<KvType::f32>(reinterpret_cast<const uint8_t*>(query + i), row + i / per_word);
                for (int step = 0; step < steps(); ++step) strip.queries[step * strip_lanes + l] = row[step];
                strip.positions[l] = work_.position + from.query;
            }
        }
    }

    // The strips meet a span, tile by tile; `where(strip)`, asked in order, is where they keep what they see. `last` is where
    // reading will end, in this span or a later one.
    template <KvType type, class Where>
    void read(int span, int last, Where&& where) {
        Strip strips[panel_strips_most];
        StripPartial partials[panel_strips_most];
        for (int s = 0; s < strips_; ++s) {
            strips[s] = strip(s);
            partials[s] = where(strips[s]);
            clear(partials[s], head_dim());
        }
        const int first = std::max(work_.first, chunk_span_begin(span)), stop = std::min(work_.stop, chunk_span_begin(span + 1));
        for (int tile = first / tile_keys * tile_keys; tile < stop; tile += tile_keys) {
            fetch_stop_ = std::min(last, tile + 2 * tile_keys);
            pack<type>(tile);
            for (int s = 0; s < strips_; ++s) visit<type>(strips[s], partials[s], tile);
        }
    }

    // The tile's keys and values as words. What lies outside the panel's positions becomes 0, whatever it is.
    template <KvType type>
    void pack(int tile) {
        const CacheView& cache = problem_.cache;
        const int32_t* table = problem_.rows.tables + work_.panel.row * problem_.rows.table_stride;
        const int64_t row_bytes = int64_t(head_dim()) * value_bytes(type);
        uint32_t *zeros = memory_.rows() + 2 * head_dim(), *pair[2] = {memory_.rows(), memory_.rows() + head_dim()};
        std::memset(zeros, 0, row_bytes);
        const int count = keys_of(tile, work_.stop);
        for (int key = 0; key < count; ++key) {
            const int position = tile + key, within = position % cache.block_size;
            const bool inside = position >= work_.first && position < work_.stop;
            const int64_t block = inside ? table[position / cache.block_size] : 0;
            const auto row_of = [&](const uint8_t* record, float* scale) {
                if (!inside) return reinterpret_cast<const uint8_t*>(zeros);
                if constexpr (has_scales(type)) *scale = scale_of<type>(record, cache.scales_offset(), within);
                return record + within * row_bytes;
            };
            memory_.scales()[key] = memory_.scales()[tile_keys + key] = 0;
            const uint8_t* k = row_of(cache.keys(block, work_.panel.kv_head), memory_.scales() + key);
            const uint8_t* v = row_of(cache.values(block, work_.panel.kv_head), memory_.scales() + tile_keys + key);
            unpack_row<type>(k, memory_.keys() + key * steps());
            if constexpr (per_word == 1) unpack_row<type>(v, memory_.values() + key * head_dim());
            else {
                unpack_row<type>(v, pair[key % 2]);
                if (key % 2) interleave(pair[0], pair[1], memory_.values() + key / 2 * head_dim());
            }
        }
    }

    // Asks for the keys and values of the next `count` positions that are to be read, as far as `fetch_stop_`. Records lie
    // anywhere, so that the processor cannot foresee where; asked for all at once, many would not be fetched.
    template <KvType type>
    [[gnu::noinline]] void fetch(int count) {
        const CacheView& cache = problem_.cache;
        const int32_t* table = problem_.rows.tables + work_.panel.row * problem_.rows.table_stride;
        const int row_bytes = head_dim() * value_bytes(type);
        for (const int stop = std::min(fetched_ + count, fetch_stop_); fetched_ < stop; ++fetched_) {
            const int within = fetched_ % cache.block_size;
            const uint8_t* keys = cache.keys(table[fetched_ / cache.block_size], work_.panel.kv_head);
            for (const uint8_t* record : {keys, keys + cache.kv_heads * cache.record_bytes()}) {
                for (int i = 0; i < row_bytes; i += 64) __builtin_prefetch(record + within * row_bytes + i, 0, 2);
                if (has_scales(type) && within == 0) __builtin_prefetch(record + cache.scales_offset(), 0, 2);
            }
        }
    }

    template <KvType type>
    void unpack_row(const uint8_t* from, uint32_t* to) const {
        for (int i = 0; i < head_dim(); i += 16)
            Products::template unpack<type>(from + i * value_bytes(type), to + i / per_word);
    }

    void interleave(const uint32_t* first, const uint32_t* second, uint32_t* to) const {
        for (int i = 0; i < head_dim(); i += 16)
            store_words(to + i, Products::interleave(first + i / per_word, second + i / per_word));
    }

    // Keys of the tile before `stop`, in whole sixteens.
    static int keys_of(int tile, int stop) { return (std::min(tile_keys, stop - tile) + 15) / 16 * 16; }

    // A strip meets a tile. Keys that none of its queries sees are left out, which changes nothing.
    template <KvType type>
    void visit(const Strip& strip, const StripPartial& partial, int tile) {
        const int window = problem_.rows.window;
        const int first = strip.positions[0], last = strip.positions[strip_lanes - 1];
        const int oldest = window ? std::max(0, first - window + 1) : 0;
        if (tile > last || tile + tile_keys <= oldest) return;
        const int low = std::max(0, oldest - tile) / 16 * 16, high = keys_of(tile, last + 1);
        const bool all = tile + high - 1 <= first && (!window || tile + low > last - window);
        float most[strip_lanes];
        std::memcpy(most, partial.most, sizeof most);
        const Sight sight{strip.positions, tile, window};
        by_vectors(strip.width, [&](int v, auto vectors) {
            if (all) score<type, false, vectors()>(strip.queries + v, v, low, high, sight, most);
            else score<type, true, vectors()>(strip.queries + v, v, low, high, sight, most);
        });
        weigh<type>(strip.width, partial, low, high, most);
        by_vectors(strip.width, [&](int v, auto vectors) { sum<type, vectors()>(v, partial, low, high, most); });
    }

    struct Sight {
        const int32_t* positions;
        int tile, window;
    };

    // work(first lane, vectors) for so many lanes, as many vectors at a time as registers hold.
    template <class Work>
    static void by_vectors(int lanes, Work&& work) {
        int v = 0;
        for (; v + 16 * product_vectors <= lanes; v += 16 * product_vectors)
            work(v, std::integral_constant<int, product_vectors>{});
        if constexpr (product_vectors > 1)
            if (v + 32 == lanes) return work(v, std::integral_constant<int, 2>{});
        if (v < lanes) work(v, std::integral_constant<int, 1>{});
    }

    // Scores in units of log 2, into memory; `most` grows.
    template <KvType type, bool masked, int vectors>
    void score(const uint32_t* queries, int v, int low, int high, const Sight& sight, float* most) {
        for (int key = low; key < high; key += product_rows) {
            if (fetched_ < fetch_stop_) fetch<type>(product_rows / 2);
            f32x16 sum[product_rows][vectors]{};
            multiply<Products>(queries, memory_.keys() + key * steps(), steps(), 1, steps(), strip_lanes, sum);
            for (int r = 0; r < product_rows; ++r)
                for (int i = 0; i < vectors; ++i) {
                    const int at = v + 16 * i;
                    f32x16 s = scaled<type>(sum[r][i], key + r);
                    if constexpr (masked) s = seen(sight, key + r, at) ? s : splat(-INFINITY);
                    store(memory_.scores() + (key + r) * strip_lanes + at, s);
                    store(most + at, max(load(most + at), s));
                }
        }
    }

    template <KvType type>
    f32x16 scaled(f32x16 sum, int key) const {
        const float scale = has_scales(type) ? problem_.scale * memory_.scales()[key] : problem_.scale;
        if (problem_.soft_cap == 0) return sum * (scale * log2e);
        return capped(sum * scale, problem_.soft_cap) * log2e;
    }

    static i32x16 seen(const Sight& sight, int key, int at) {
        const i32x16 positions = load_as<i32x16>(sight.positions + at);
        const int position = sight.tile + key;
        const i32x16 causal = positions >= position;
        return sight.window ? causal & (positions < position + sight.window) : causal;
    }

    // Scores become weights, as words in the same memory; `most` becomes what earlier sums are to be multiplied with.
    template <KvType type>
    void weigh(int width, const StripPartial& partial, int low, int high, float* most) {
        uint32_t* words = reinterpret_cast<uint32_t*>(memory_.scores());
        for (int v = 0; v < width; v += 16) {
            const f32x16 now = whole_above(load(most + v));
            // Where nothing has been seen yet, weights are exp(-infinity).
            const f32x16 top = now == splat(-INFINITY) ? f32x16{} : now;
            f32x16 total{};
            for (int key = low; key < high; key += per_word) {
                f32x16 weight[per_word];
                for (int i = 0; i < per_word; ++i) {
                    weight[i] = exp2(load(memory_.scores() + (key + i) * strip_lanes + v) - top);
                    total += weight[i];
                    if constexpr (has_scales(type)) weight[i] *= memory_.scales()[tile_keys + key + i];
                }
                // Words are written where scores have been read.
                uint32_t* to = words + key / per_word * strip_lanes + v;
                if constexpr (per_word == 1) store_words(to, Products::pack(weight[0]));
                else store_words(to, Products::pack(weight[0], weight[1]));
            }
            const f32x16 kept = exp2(load(partial.most + v) - top);
            store(partial.total + v, load(partial.total + v) * kept + total);
            store(partial.most + v, now);
            store(most + v, kept);
        }
    }

    template <KvType type, int vectors>
    void sum(int v, const StripPartial& partial, int low, int high, const float* kept) {
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(memory_.scores()) + low / per_word * strip_lanes + v;
        const uint32_t* values = memory_.values() + low / per_word * head_dim();
        for (int dim = 0; dim < head_dim(); dim += product_rows) {
            if (fetched_ < fetch_stop_) fetch<type>(tile_keys / 2 * product_rows / head_dim());
            f32x16 sum[product_rows][vectors]{};
            multiply<Products>(weights, values + dim, 1, head_dim(), (high - low) / per_word, strip_lanes, sum);
            for (int r = 0; r < product_rows; ++r)
                for (int i = 0; i < vectors; ++i) {
                    float* to = partial.sums + (dim + r) * strip_lanes + v + 16 * i;
                    store(to, load(to) * load(kept + v + 16 * i) + sum[r][i]);
                }
        }
    }

    const Work& work_;
    const Problem& problem_;
    const Memory memory_;
    const int strips_;
    int fetched_ = 0, fetch_stop_ = 0;  // positions that have been asked for, and that may be
};

// work(type), the type as a constant.
template <class Visit>
void with_type(KvType type, Visit&& visit) {
    switch (type) {
        case KvType::f32: return visit(std::integral_constant<KvType, KvType::f32>{});
        case KvType::bf16: return visit(std::integral_constant<KvType, KvType::bf16>{});
        case KvType::int8: return visit(std::integral_constant<KvType, KvType::int8>{});
        case KvType::fp8_e4m3: return visit(std::integral_constant<KvType, KvType::fp8_e4m3>{});
        case KvType::fp8_e5m2: return visit(std::integral_constant<KvType, KvType::fp8_e5m2>{});
    }
}

// visit(chunk, type) with the products that the type's numbers are for.
template <class Visit>
void with_chunk(const Work& work, Visit&& visit) {
    with_type(work.problem.cache.type, [&](auto type) {
#if defined(__AVX512BF16__)
        if constexpr (type() != KvType::f32) return visit(Chunk<Bf16Products>(work), type);
#endif
        visit(Chunk<F32Products>(work), type);
    });
}

Work work_of(const Problem& problem, const Panel& panel, uint8_t* memory) {
    const StepRows& rows = problem.rows;
    const int64_t token = rows.query_starts[panel.row];
    const int position = rows.contexts[panel.row] - int(rows.query_starts[panel.row + 1] - token);
    const int first = position + panel.first / problem.group, last = position + (panel.last - 1) / problem.group;
    return {problem, panel, {memory, problem.cache.head_dim}, rows.window ? std::max(0, first - rows.window + 1) : 0,
            last + 1, token, position};
}

}  // namespace

size_t panel_bytes(int head_dim) { return Memory{nullptr, head_dim}.bytes(); }

void attend_panel(const Problem& problem, const Panel& panel, uint8_t* memory) {
    with_chunk(work_of(problem, panel, memory), [](auto chunk, auto type) { chunk.template attend<type()>(); });
}

void attend_panel_span(const Problem& problem, const Panel& panel, int span, uint8_t* memory, uint8_t* kept) {
    with_chunk(work_of(problem, panel, memory),
               [&](auto chunk, auto type) { chunk.template attend_span<type()>(span, kept); });
}

void finish_panel(const Problem& problem, const Panel& panel, uint8_t* kept, int spans, int64_t span_bytes) {
    const int head_dim = problem.cache.head_dim;
    const Work work = work_of(problem, panel, nullptr);
    Chunk<F32Products> chunk(work);
    for (int s = 0; s < strips_of(panel); ++s, kept += strip_partial_bytes(head_dim)) {
        for (int span = 1; span < spans; ++span)
            fold(partial_at(kept), partial_at(kept + span * span_bytes), chunk.width_of(s), head_dim);
        chunk.finish(s, partial_at(kept));
    }
}

}  // namespace kveik::KVEIK_ISA
