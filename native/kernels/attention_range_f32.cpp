// A range of positions in float32 arithmetic, for every type and instruction set.
#include "kernels/attention_range.h"
#include "kernels/kv_types.h"

namespace kveik::KVEIK_ISA {

namespace {

// The part of a record's slots that lies in the task's range, and the block they are in.
template <class Work>
void each_block(const RangeTask& task, int block_size, Work&& work) {
    for (int first = task.first; first < task.stop;) {
        const int block = first / block_size, within = first % block_size;
        const int count = std::min(block_size - within, task.stop - first);
        work(int64_t(task.table[block]), within, count, first - task.first);
        first += count;
    }
}

template <KvType type, int heads>
void score(const Problem& problem, const RangeTask& task, int head, float* scores) {
    const CacheView& cache = problem.cache;
    const int head_dim = cache.head_dim;
    const float* query = task.query + head * head_dim;
    each_block(task, cache.block_size, [&](int64_t block, int within, int count, int at) {
        const uint8_t* record = cache.keys(block, task.kv_head);
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
void weigh(const Problem& problem, const RangeTask& task, int head, const float* weights, float* sums) {
    const CacheView& cache = problem.cache;
    const int head_dim = cache.head_dim;
    for (int h = 0; h < heads; ++h) std::memset(sums + (head + h) * head_dim, 0, sizeof(float) * head_dim);
    each_block(task, cache.block_size, [&](int64_t block, int within, int count, int at) {
        const uint8_t* record = cache.values(block, task.kv_head);
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

// Heads go four at a time: keys and values are converted once for all four.
template <KvType type, class Four, class One>
void by_heads(int group, Four&& four, One&& one) {
    int head = 0;
    for (; head + 4 <= group; head += 4) four(head);
    for (; head < group; ++head) one(head);
}

template <KvType type>
void attend(const Problem& problem, const RangeTask& task, float* scores, const Partial& to) {
    const int group = problem.group;
    by_heads<type>(
        group, [&](int head) { score<type, 4>(problem, task, head, scores); },
        [&](int head) { score<type, 1>(problem, task, head, scores); });
    exponentiate(scores, group, task.stop - task.first, problem.soft_cap, to);
    by_heads<type>(
        group, [&](int head) { weigh<type, 4>(problem, task, head, scores, to.sum); },
        [&](int head) { weigh<type, 1>(problem, task, head, scores, to.sum); });
}

}  // namespace

void attend_range_f32(const Problem& problem, const RangeTask& task, float* scores, const Partial& to) {
    switch (problem.cache.type) {
        case KvType::f32: return attend<KvType::f32>(problem, task, scores, to);
        case KvType::bf16: return attend<KvType::bf16>(problem, task, scores, to);
        case KvType::int8: return attend<KvType::int8>(problem, task, scores, to);
        case KvType::fp8_e4m3: return attend<KvType::fp8_e4m3>(problem, task, scores, to);
        case KvType::fp8_e5m2: return attend<KvType::fp8_e5m2>(problem, task, scores, to);
    }
}

}  // namespace kveik::KVEIK_ISA
