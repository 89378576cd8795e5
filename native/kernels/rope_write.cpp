// A step's new keys and values into their slots: normalised, turned and quantised on the way.
#include "kernels/rope_write.h"

#include "kernels/kv_types.h"

namespace kveik::KVEIK_ISA {

namespace {

// Turns dimension i against i + head_dim / 2. RoPE: Su et al. 2021, arXiv:2104.09864.
void turn(const float* head, int head_dim, const float* cos, const float* sin, const float* norm, float eps, float* to) {
    const int half = head_dim / 2;
    float length = 1.0f;
    if (norm) {
        f32x16 squares{};
        for (int i = 0; i < head_dim; i += 16) squares += load(head + i) * load(head + i);
        length = 1.0f / std::sqrt(sum(squares) / float(head_dim) + eps);
    }
    const auto pair = [&](int i, auto low, auto high, auto cos_i, auto sin_i, auto norm_low, auto norm_high, auto put) {
        if (norm) {
            low = low * length * norm_low;
            high = high * length * norm_high;
        }
        put(to + i, low * cos_i - high * sin_i);
        put(to + i + half, high * cos_i + low * sin_i);
    };
    const float* weight = norm ? norm : head;
    int i = 0;
    for (; i + 16 <= half; i += 16)
        pair(i, load(head + i), load(head + half + i), load(cos + i), load(sin + i), load(weight + i), load(weight + half + i),
             [](float* at, f32x16 v) { store(at, v); });
    for (; i < half; ++i)
        pair(i, head[i], head[half + i], cos[i], sin[i], weight[i], weight[half + i], [](float* at, float x) { *at = x; });
}

struct Slot {
    int64_t block;
    int within;
};

Slot slot_of(int64_t slot, int block_size) { return {slot / block_size, int(slot % block_size)}; }

void store_head(const float* head, const CacheView& cache, uint8_t* record, int within) {
    const int64_t offset = cache.scales_offset();
    switch (cache.type) {
        case KvType::f32: return store_slot<KvType::f32>(head, cache.head_dim, record, offset, within);
        case KvType::bf16: return store_slot<KvType::bf16>(head, cache.head_dim, record, offset, within);
        case KvType::int8: return store_slot<KvType::int8>(head, cache.head_dim, record, offset, within);
        case KvType::fp8_e4m3: return store_slot<KvType::fp8_e4m3>(head, cache.head_dim, record, offset, within);
        case KvType::fp8_e5m2: return store_slot<KvType::fp8_e5m2>(head, cache.head_dim, record, offset, within);
    }
}

void take_off(const float* mean, int head_dim, float* head) {
    for (int i = 0; i < head_dim; i += 16) store(head + i, load(head + i) - load(mean + i));
}

void widen(const float* from, int head_dim, float* to) { std::memcpy(to, from, sizeof(float) * head_dim); }
void widen(const uint16_t* from, int head_dim, float* to) {
    for (int i = 0; i < head_dim; i += 16) store(to + i, widen_bf16(reinterpret_cast<const uint8_t*>(from + i)));
}

template <class Number>
void write(const Number* keys, int64_t key_stride, const Number* values, int64_t value_stride, int tokens,
           const CacheView& cache, const StepRows& rows, Team& team) {
    const int heads = cache.kv_heads, head_dim = cache.head_dim;
    const auto mine = team.share(int64_t(tokens) * heads);
    alignas(64) float wide[head_dim_most];
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
        const int64_t token = unit / heads;
        const int head = int(unit % heads);
        const Slot slot = slot_of(rows.slots[token], cache.block_size);
        widen(keys + token * key_stride + head * head_dim, head_dim, wide);
        store_head(wide, cache, cache.keys(slot.block, head), slot.within);
        widen(values + token * value_stride + head * head_dim, head_dim, wide);
        store_head(wide, cache, cache.values(slot.block, head), slot.within);
    }
    team.barrier();
}

}  // namespace

void rope_write(float* qkv, int64_t stride, int tokens, int heads, const float* cos, const float* sin, const float* query_norm,
                const float* key_norm, float eps, const CacheView& cache, const StepRows& rows, Team& team) {
    const int kv_heads = cache.kv_heads, head_dim = cache.head_dim, units = heads + 2 * kv_heads;
    const auto mine = team.share(int64_t(tokens) * units);
    alignas(64) float turned[head_dim_most];
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
        const int64_t token = unit / units;
        const int head = int(unit % units), kv_head = (head - heads) % kv_heads;
        const float* from = qkv + token * stride + head * head_dim;
        if (head >= heads + kv_heads) {
            const Slot slot = slot_of(rows.slots[token], cache.block_size);
            store_head(from, cache, cache.values(slot.block, kv_head), slot.within);
            continue;
        }
        const bool query = head < heads;
        const int64_t angles = token * (head_dim / 2);
        float* to = query ? qkv + token * stride + head * head_dim : turned;
        turn(from, head_dim, cos + angles, sin + angles, query ? query_norm : key_norm, eps, to);
        if (query) continue;
        if (cache.key_mean) take_off(cache.key_mean + kv_head * head_dim, head_dim, turned);
        const Slot slot = slot_of(rows.slots[token], cache.block_size);
        store_head(turned, cache, cache.keys(slot.block, kv_head), slot.within);
    }
    team.barrier();
}

void write_f32(const float* keys, int64_t key_stride, const float* values, int64_t value_stride, int tokens,
               const CacheView& cache, const StepRows& rows, Team& team) {
    write(keys, key_stride, values, value_stride, tokens, cache, rows, team);
}

void write_bf16(const uint16_t* keys, int64_t key_stride, const uint16_t* values, int64_t value_stride, int tokens,
                const CacheView& cache, const StepRows& rows, Team& team) {
    write(keys, key_stride, values, value_stride, tokens, cache, rows, team);
}

}  // namespace kveik::KVEIK_ISA
