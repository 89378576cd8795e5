// A panel of queries over a row's keys. Lanes of a vector are queries: everything that softmax keeps per query is a vector, and
// nothing is ever added up across lanes, so that a query's result does not depend on its neighbours.
//
//     scores  [key][lane]  = keys [key][dim] * queries [dim][lane]       a strip of 48 lanes, a tile of 128 keys
//     weights [key][lane]  = exp(scores - most)
//     sums    [dim][lane] += values [key][dim] * weights [key][lane]
#include "kernels/attention_chunk.h"

#include "kernels/attention_exp.h"
#include "kernels/attention_products.h"

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

// One strip's state.
struct Strip {
    uint32_t* queries;   // [steps][strip_lanes]
    float* sums;         // [head_dim][strip_lanes]
    float* most;         // [strip_lanes], in units of log 2
    float* total;        // [strip_lanes]
    int32_t* positions;  // [strip_lanes]
};

// Where things lie in a panel's memory.
struct Memory {
    uint8_t* base;
    int head_dim;

    template <class Number>
    Number* at(size_t offset) const {
        return reinterpret_cast<Number*>(base + offset);
    }
    size_t row() const { return size_t(4) * head_dim; }
    size_t strip_bytes() const { return strip_lanes * (2 * row() + 3 * 4); }
    Strip strip(int index) const {
        uint8_t* first = base + index * strip_bytes();
        const size_t part = strip_lanes * row();
        float* most = reinterpret_cast<float*>(first + 2 * part);
        return {reinterpret_cast<uint32_t*>(first), reinterpret_cast<float*>(first + part), most, most + strip_lanes,
                reinterpret_cast<int32_t*>(most + 2 * strip_lanes)};
    }
    size_t strips() const { return panel_strips_most * strip_bytes(); }
    uint32_t* keys() const { return at<uint32_t>(strips()); }                           // [tile_keys][steps]
    uint32_t* values() const { return at<uint32_t>(strips() + tile_keys * row()); }     // [tile_keys / per_word][head_dim]
    float* scores() const { return at<float>(strips() + 2 * tile_keys * row()); }       // [tile_keys][strip_lanes]
    float* scales() const { return scores() + tile_keys * strip_lanes; }                // keys, then values
    uint32_t* rows() const { return reinterpret_cast<uint32_t*>(scales() + 2 * tile_keys); }  // two rows, and zeros
    size_t bytes() const { return strips() + 2 * tile_keys * row() + 4 * tile_keys * (strip_lanes + 2) + 3 * row(); }
};

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
    Chunk(const Work& work) : work_(work), problem_(work.problem), memory_(work.memory) {}

    template <KvType type>
    void attend() {
        const int lanes = work_.panel.last - work_.panel.first, strips = (lanes + strip_lanes - 1) / strip_lanes;
        for (int s = 0; s < strips; ++s) begin(s);
        for (int tile = work_.first / tile_keys * tile_keys; tile < work_.stop; tile += tile_keys) {
            pack<type>(tile);
            for (int s = 0; s < strips; ++s) visit<type>(memory_.strip(s), tile);
        }
        for (int s = 0; s < strips; ++s) finish(s);
    }

private:
    static constexpr int per_word = Products::per_word;

    int head_dim() const { return problem_.cache.head_dim; }
    int steps() const { return head_dim() / per_word; }
    int lanes_of(int strip) const {
        return std::min(strip_lanes, work_.panel.last - work_.panel.first - strip * strip_lanes);
    }

    // The offset of a lane's head from its row's first token.
    struct Lane {
        int query, head;
    };
    Lane lane(int strip, int index) const {
        const int lane = work_.panel.first + strip * strip_lanes + index;
        return {lane / problem_.group, work_.panel.kv_head * problem_.group + lane % problem_.group};
    }

    // Queries to words, lane by lane; lanes that are none see what the last one sees.
    void begin(int index) {
        const Strip strip = memory_.strip(index);
        const int lanes = lanes_of(index);
        uint32_t* row = memory_.rows();
        for (int l = 0; l < strip_lanes; ++l) {
            const Lane from = lane(index, std::min(l, lanes - 1));
            const float* query = problem_.queries + (work_.token + from.query) * problem_.stride + from.head * head_dim();
            for (int i = 0; i < head_dim(); i += 16)
                Products::template unpack<KvType::f32>(reinterpret_cast<const uint8_t*>(query + i), row + i / per_word);
            for (int step = 0; step < steps(); ++step) strip.queries[step * strip_lanes + l] = row[step];
            strip.most[l] = -INFINITY;
            strip.total[l] = 0;
            strip.positions[l] = work_.position + from.query;
        }
        std::memset(strip.sums, 0, sizeof(float) * strip_lanes * head_dim());
    }

    void finish(int index) {
        const Strip strip = memory_.strip(index);
        for (int l = 0; l < lanes_of(index); ++l) {
            const Lane to = lane(index, l);
            float* out = problem_.out + (work_.token + to.query) * problem_.out_stride + to.head * head_dim();
            const float inverse = 1.0f / strip.total[l];
            for (int i = 0; i < head_dim(); ++i) out[i] = strip.sums[i * strip_lanes + l] * inverse;
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
    void visit(const Strip& strip, int tile) {
        const int window = problem_.rows.window;
        const int first = strip.positions[0], last = strip.positions[strip_lanes - 1];
        const int oldest = window ? std::max(0, first - window + 1) : 0;
        if (tile > last || tile + tile_keys <= oldest) return;
        const int low = std::max(0, oldest - tile) / 16 * 16, high = keys_of(tile, last + 1);
        const bool all = tile + high - 1 <= first && (!window || tile + low > last - window);
        float most[strip_lanes];
        std::memcpy(most, strip.most, sizeof most);
        const Sight sight{strip.positions, tile, window};
        if (all) score<type, false>(strip, low, high, sight, most);
        else score<type, true>(strip, low, high, sight, most);
        weigh<type>(strip, low, high, most);
        sum(strip, low, high, most);
    }

    struct Sight {
        const int32_t* positions;
        int tile, window;
    };

    // Scores in units of log 2, into memory; `most` grows.
    template <KvType type, bool masked>
    void score(const Strip& strip, int low, int high, const Sight& sight, float* most) const {
        for (int v = 0; v < strip_lanes; v += 16 * product_vectors)
            for (int key = low; key < high; key += product_rows) {
                f32x16 sum[product_rows][product_vectors]{};
                multiply<Products>(strip.queries + v, memory_.keys() + key * steps(), steps(), 1, steps(), strip_lanes, sum);
                for (int r = 0; r < product_rows; ++r)
                    for (int i = 0; i < product_vectors; ++i) {
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
    void weigh(const Strip& strip, int low, int high, float* most) {
        uint32_t* words = reinterpret_cast<uint32_t*>(memory_.scores());
        for (int v = 0; v < strip_lanes; v += 16) {
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
            const f32x16 kept = exp2(load(strip.most + v) - top);
            store(strip.total + v, load(strip.total + v) * kept + total);
            store(strip.most + v, now);
            store(most + v, kept);
        }
    }

    void sum(const Strip& strip, int low, int high, const float* kept) const {
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(memory_.scores()) + low / per_word * strip_lanes;
        const uint32_t* values = memory_.values() + low / per_word * head_dim();
        for (int v = 0; v < strip_lanes; v += 16 * product_vectors)
            for (int dim = 0; dim < head_dim(); dim += product_rows) {
                f32x16 sum[product_rows][product_vectors]{};
                multiply<Products>(weights + v, values + dim, 1, head_dim(), (high - low) / per_word, strip_lanes, sum);
                for (int r = 0; r < product_rows; ++r)
                    for (int i = 0; i < product_vectors; ++i) {
                        float* to = strip.sums + (dim + r) * strip_lanes + v + 16 * i;
                        store(to, load(to) * load(kept + v + 16 * i) + sum[r][i]);
                    }
            }
    }

    const Work& work_;
    const Problem& problem_;
    const Memory memory_;
};

template <class Products>
void attend(const Work& work) {
    Chunk<Products> chunk(work);
    switch (work.problem.cache.type) {
        case KvType::f32: return chunk.template attend<KvType::f32>();
        case KvType::bf16: return chunk.template attend<KvType::bf16>();
        case KvType::int8: return chunk.template attend<KvType::int8>();
        case KvType::fp8_e4m3: return chunk.template attend<KvType::fp8_e4m3>();
        case KvType::fp8_e5m2: return chunk.template attend<KvType::fp8_e5m2>();
    }
}

}  // namespace

size_t panel_bytes(int head_dim) { return Memory{nullptr, head_dim}.bytes(); }

void attend_panel(const Problem& problem, const Panel& panel, uint8_t* memory) {
    const StepRows& rows = problem.rows;
    const int64_t token = rows.query_starts[panel.row];
    const int position = rows.contexts[panel.row] - int(rows.query_starts[panel.row + 1] - token);
    const int first = position + panel.first / problem.group, last = position + (panel.last - 1) / problem.group;
    const Work work{problem, panel, {memory, problem.cache.head_dim}, rows.window ? std::max(0, first - rows.window + 1) : 0,
                    last + 1, token, position};
#if defined(__AVX512BF16__)
    if (problem.cache.type != KvType::f32) return attend<Bf16Products>(work);
#endif
    attend<F32Products>(work);
}

}  // namespace kveik::KVEIK_ISA
