// Attention over a step's rows: what is computed by whom, and how the parts come together.
#include "kernels/attention.h"

#include "kernels/attention_range.h"
#include "kernels/rope_write.h"

namespace kveik::KVEIK_ISA {

namespace {

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t partial_bytes(int group, int head_dim) { return padded(sizeof(float) * (2 * group + group * head_dim)); }

// A partial over `memory`; the sums come first, so that they lie at a cache line's start.
Partial partial_at(void* memory, int group, int head_dim) {
    float* sum = static_cast<float*>(memory);
    float* most = sum + group * head_dim;
    return {most, most + group, sum};
}

// What one thread needs.
struct Own {
    float* scores;
    Partial folded, next;
};

size_t own_bytes(int group, int head_dim) {
    return padded(sizeof(float) * group * range_positions) + 2 * partial_bytes(group, head_dim);
}

Own own_at(void* workspace, int rank, int group, int head_dim) {
    uint8_t* at = static_cast<uint8_t*>(workspace) + rank * own_bytes(group, head_dim);
    uint8_t* folded = at + padded(sizeof(float) * group * range_positions);
    return {reinterpret_cast<float*>(at), partial_at(folded, group, head_dim),
            partial_at(folded + partial_bytes(group, head_dim), group, head_dim)};
}

// One token of a row, at `position`, by the heads of one kv head.
void attend_token(const Problem& problem, int row, int64_t token, int position, int kv_head, const Own& own) {
    const int group = problem.group, head_dim = problem.cache.head_dim, window = problem.rows.window;
    const int64_t offset = int64_t(kv_head) * group * head_dim;
    const int first = window ? std::max(0, position - window + 1) : 0, stop = position + 1;
    RangeTask task{problem.queries + token * problem.stride + offset,
                   problem.rows.tables + row * problem.rows.table_stride, kv_head, first, stop};
    for (int at = first; at < stop;) {
        task.first = at;
        task.stop = at = std::min(stop, (at / range_positions + 1) * range_positions);
        attend_range_f32(problem, task, own.scores, task.first == first ? own.folded : own.next);
        if (task.first != first) fold(own.folded, own.next, group, head_dim);
    }
    finish(own.folded, group, head_dim, problem.out + token * problem.out_stride + offset);
}

void attend(const float* queries, int64_t stride, int heads, float scale, float soft_cap, const CacheView& cache,
            const StepRows& rows, float* out, int64_t out_stride, void* workspace, Team& team) {
    const int group = heads / cache.kv_heads;
    const Problem problem{queries, stride, out, out_stride, heads, group, scale, soft_cap, cache, rows};
    const Own own = own_at(workspace, team.rank, group, cache.head_dim);
    team.each(int64_t(rows.rows) * cache.kv_heads, 1, [&](int64_t item, int64_t) {
        const int row = int(item / cache.kv_heads), kv_head = int(item % cache.kv_heads);
        const int first = rows.query_starts[row], stop = rows.query_starts[row + 1];
        for (int token = first; token < stop; ++token)
            attend_token(problem, row, token, rows.contexts[row] - (stop - token), kv_head, own);
    });
}

size_t attend_workspace(int heads, int kv_heads, int head_dim, int /*context_most*/, int threads) {
    return threads * own_bytes(heads / kv_heads, head_dim);
}

}  // namespace

extern const AttentionKernels attention_kernels_table{rope_write, write_f32, write_bf16, attend, attend_workspace};

}  // namespace kveik::KVEIK_ISA
