// Attention over paged keys and values. Plain pointers and sizes; who owns which block is not known here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/table.h"
#include "core/team.h"

namespace kveik {

// What a slot's numbers are stored as. int8 and fp8 have one bfloat16 scale per token and head: value = scale * stored.
enum class KvType : int { f32, bf16, int8, fp8_e4m3, fp8_e5m2 };

constexpr int head_dim_most = 1024;

constexpr bool has_scales(KvType type) { return type >= KvType::int8; }
constexpr int value_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::bf16 ? 2 : 1; }

// One layer's part of a group's storage. The record of a kv head in a block, its keys or its values:
//
//     [slot][dim] block_size * head_dim numbers | [slot] block_size scales, where the type has them
//
// A block's records of one layer follow each other: the keys of all kv heads, then the values of all kv heads.
struct CacheView {
    uint8_t* base;
    int64_t block_stride;  // bytes from one block of this layer to the next
    int kv_heads, head_dim, block_size;  // head_dim: a multiple of 16; block_size: a power of two from 8
    KvType type;
    const float* key_mean = nullptr;  // [kv_heads, head_dim] or null: taken off every key before rope_write stores it

    int64_t scales_offset() const { return int64_t(block_size) * head_dim * value_bytes(type); }
    int64_t record_bytes() const { return scales_offset() + (has_scales(type) ? 2 * block_size : 0); }
    uint8_t* keys(int64_t block, int head) const { return base + block * block_stride + head * record_bytes(); }
    uint8_t* values(int64_t block, int head) const { return keys(block, kv_heads + head); }
};

// Where a step's tokens read and write, as kveik/kernels/batch.py tells it. Row i's queries are tokens
// [query_starts[i], query_starts[i + 1]) and sit at positions [contexts[i] - queries_i, contexts[i]).
struct StepRows {
    const int32_t* tables;  // [rows, table_stride]; entries wholly outside a row's window or context are never followed
    int64_t table_stride;
    const int32_t* query_starts;  // [rows + 1]
    const int32_t* contexts;      // [rows]
    const int64_t* slots;         // [tokens]: block * block_size + slot
    int rows;
    int decodes;  // the first so many rows have one query each
    int window;   // a query at i reads keys j with i - window < j <= i; 0: all j <= i
};

struct AttentionKernels {
    // qkv [tokens, stride]: heads * head_dim queries, kv_heads * head_dim keys, as many values. Queries and keys are
    // normalised head by head where the weights [head_dim] are given (RMSNorm), then turned by cos, sin [tokens, head_dim / 2]:
    // dimension i against i + head_dim / 2. Queries stay in place; keys (unchanged in qkv) and values go to their slots.
    void (*rope_write)(float* qkv, int64_t stride, int tokens, int heads, const float* cos, const float* sin,
                       const float* query_norm, const float* key_norm, float eps, const CacheView& cache,
                       const StepRows& rows, Team& team);

    // keys, values: [tokens, kv_heads, head_dim], token t at t * stride.
    void (*write_f32)(const float* keys, int64_t key_stride, const float* values, int64_t value_stride, int tokens,
                      const CacheView& cache, const StepRows& rows, Team& team);
    void (*write_bf16)(const uint16_t* keys, int64_t key_stride, const uint16_t* values, int64_t value_stride, int tokens,
                       const CacheView& cache, const StepRows& rows, Team& team);

    // softmax(cap(scale * Q K^T)) V for every query over what it may see; cap(s) = soft_cap * tanh(s / soft_cap), 0: none.
    // queries [tokens, stride] and out [tokens, out_stride]: heads * head_dim each. A row's result does not depend, in any
    // bit, on the other rows or on the size of the team.
    void (*attend)(const float* queries, int64_t stride, int heads, float scale, float soft_cap, const CacheView& cache,
                   const StepRows& rows, float* out, int64_t out_stride, void* workspace, Team& team);

    // Bytes of workspace, which is aligned to 64, for steps whose contexts are at most `context_most`.
    size_t (*attend_workspace)(int heads, int kv_heads, int head_dim, int context_most, int threads);
};

KVEIK_TABLE(AttentionKernels, attention_kernels)

}  // namespace kveik
