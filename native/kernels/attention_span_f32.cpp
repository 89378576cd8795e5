// A span of positions in float32 arithmetic, for every type and instruction set.
#include "kernels/attention_span.h"
#include "kernels/kv_types.h"

namespace kveik::KVEIK_ISA {

namespace {

// work(block, first slot, slots, index of the first in the range) for the blocks that hold positions [first, stop).
template <class Work>
void each_block(const Span& span, int first, int stop, int block_size, Work&& work) {
    for (int at = first; at < stop;) {
        const int within = at % block_size, count = std::min(block_size - within, stop - at);
        work(int64_t(span.table[at / block_size]), within, count, at - first);
        at += count;
    }
}

template <KvType type, int heads>
void score(const Problem& problem, const Span& span, int first, int stop, int head, float* scores) {
    const CacheView& cache = problem.cache;
    const int head_dim = cache.head_dim;
    const float* query = span.query + head * head_dim;
    each_block(span, first, stop, cache.block_size, [&](int64_t block, int within, int count, int at) {
        const uint8_t* record = cache.keys(block, span.kv_head);
        for (int slot = within; slot < within + count; ++slot, ++at) {
            const uint8_t* key = record + int64_t(slot) * head_dim * value_bytes(type);
            f32x16 dots[heads]{};
            for (int i = 0; i < head_dim; i += 16) {
                const f32x16 k = load_stored<type>(key + i * value_bytes(type));
                for (int h = 0; h < heads; ++h) dots[h] += k * load(query + h * head_dim + i);
            }
            const float scale = problem.scale * scale_of<type>(record, cache.scales_offset(), slot);
            for (int h = 0; h < heads; ++h) scores[(head + h) * range_positions + at] = sum(dots[h]) * scale;
        }
    });
}

template <KvType type, int heads>
void weigh(const Problem& problem, const Span& span, int first, int stop, int head, const float* weights, float* sums) {
    const CacheView& cache = problem.cache;
    const int head_dim = cache.head_dim;
    each_block(span, first, stop, cache.block_size, [&](int64_t block, int within, int count, int at) {
        const uint8_t* record = cache.values(block, span.kv_head);
        for (int i = 0; i < head_dim; i += 16) {
            f32x16 sum[heads];
            for (int h = 0; h < heads; ++h) sum[h] = load(sums + (head + h) * head_dim + i);
            for (int slot = 0; slot < count; ++slot) {
                const uint8_t* from = record + (int64_t(within + slot) * head_dim + i) * value_bytes(type);
                const f32x16 v = load_stored<type>(from) * scale_of<type>(record, cache.scales_offset(), within + slot);
                for (int h = 0; h < heads; ++h) sum[h] += v * weights[(head + h) * range_positions + at + slot];
            }
            for (int h = 0; h < heads; ++h) store(sums + (head + h) * head_dim + i, sum[h]);
        }
    });
}

// A head's scores of `count` positions become weights; what lies behind, up to a multiple of 16, becomes 0.
void exponentiate(float* scores, int head, int count, const Problem& problem, const Partial& to) {
    const int whole = (count + 15) / 16 * 16;
    for (int i = 0; i < count; i += 16) {
        const f32x16 score = problem.soft_cap == 0 ? load(scores + i) : capped(load(scores + i), problem.soft_cap);
        store(scores + i, score * log2e);
    }
    for (int i = count; i < whole; ++i) scores[i] = -INFINITY;
    f32x16 most = splat(to.most[head]);
    for (int i = 0; i < whole; i += 16) most = max(most, load(scores + i));
    raise(to, head, std::ceil(largest(most)), problem.cache.head_dim);
    f32x16 total{};
    for (int i = 0; i < whole; i += 16) {
        const f32x16 weight = exp2(load(scores + i) - to.most[head]);
        store(scores + i, weight);
        total += weight;
    }
    to.total[head] += sum(total);
}

template <KvType type>
void attend(const Problem& problem, const Span& span, float* scores, const Partial& to) {
    // Heads go four at a time: keys and values are converted once for all four.
    const auto by_heads = [&](auto&& four, auto&& one) {
        int head = 0;
        for (; head + 4 <= problem.group; head += 4) four(head);
        for (; head < problem.group; ++head) one(head);
    };
    clear(to, problem.group, problem.cache.head_dim);
    for (int first = span.first; first < span.stop; first += range_positions) {
        const int stop = std::min(first + range_positions, span.stop);
        by_heads([&](int head) { score<type, 4>(problem, span, first, stop, head, scores); },
                 [&](int head) { score<type, 1>(problem, span, first, stop, head, scores); });
        for (int head = 0; head < problem.group; ++head)
            exponentiate(scores + head * range_positions, head, stop - first, problem, to);
        by_heads([&](int head) { weigh<type, 4>(problem, span, first, stop, head, scores, to.sum); },
                 [&](int head) { weigh<type, 1>(problem, span, first, stop, head, scores, to.sum); });
    }
}

}  // namespace

void attend_span_f32(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to) {
    switch (problem.cache.type) {
        case KvType::f32: return attend<KvType::f32>(problem, span, memory.scores, to);
        case KvType::bf16: return attend<KvType::bf16>(problem, span, memory.scores, to);
        case KvType::int8: return attend<KvType::int8>(problem, span, memory.scores, to);
        case KvType::fp8_e4m3: return attend<KvType::fp8_e4m3>(problem, span, memory.scores, to);
        case KvType::fp8_e5m2: return attend<KvType::fp8_e5m2>(problem, span, memory.scores, to);
    }
}

}  // namespace kveik::KVEIK_ISA
