// A span of bfloat16 keys and values by bfloat16 products (vdpbf16ps), summed up in float32.
//
// Keys: sixteen slots at a time. Four rows of four 128-bit lanes are transposed to vectors that hold eight dimensions of four
// slots; a query's eight dimensions, repeated in all four lanes, meet them. Every head of the group uses the same vectors.
// Values: rows of two slots are interleaved to pairs of one dimension, which meet the pair of weights.
#include "kernels/attention_groups.h"
#include "kernels/avx512.h"

#if defined(__AVX512BF16__)

namespace kveik::KVEIK_ISA {

namespace {

// How far memory is read ahead: latency times bandwidth is some 4 KB, and values are read in another order than they lie.
constexpr int bytes_ahead = 12288;

inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// The bytes of a row from `chunk` on, 64 at most; zeros behind the row's end.
inline __m512i line(const uint8_t* row, int chunk, int row_bytes) {
    const int left = row_bytes - chunk;
    return left >= 64 ? _mm512_loadu_si512(row + chunk) : _mm512_maskz_loadu_epi32(0xff, row + chunk);
}

// [head][64 bytes of dimensions][lane]: eight dimensions in bfloat16, four times over; zeros behind the last.
void prepare(const float* query, int group, int head_dim, uint8_t* prepared) {
    for (int head = 0; head < group; ++head, query += head_dim) {
        uint8_t* to = prepared + head * prepared_bytes(1, head_dim);
        for (int i = 0; i < head_dim; i += 32, to += 256) {
            const __m512 low = _mm512_loadu_ps(query + i);
            const __m512 high = i + 16 < head_dim ? _mm512_loadu_ps(query + i + 16) : _mm512_setzero_ps();
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            _mm512_store_si512(to, _mm512_shuffle_i32x4(both, both, 0x00));
            _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(both, both, 0x55));
            _mm512_store_si512(to + 128, _mm512_shuffle_i32x4(both, both, 0xaa));
            _mm512_store_si512(to + 192, _mm512_shuffle_i32x4(both, both, 0xff));
        }
    }
}

// Scores of sixteen slots by `heads` heads, [head, range_positions], before any scale.
template <int heads>
void score_group(const Group& group, int row_bytes, const uint8_t* queries, int query_bytes, float* scores, Ahead& ahead) {
    __m512 sums[4][heads];
    for (int pass = 0; pass < 2; ++pass) {
        __m512 a[heads], b[heads];
        for (int h = 0; h < heads; ++h) a[h] = b[h] = _mm512_setzero_ps();
        // Slots e, e + 4, e + 8, e + 12 go together, so that the sums come out in order.
        const uint8_t* low = group.rows[0] + 2 * pass * row_bytes;
        const uint8_t* high = group.rows[1] + 2 * pass * row_bytes;
        for (int chunk = 0; chunk < row_bytes; chunk += 64) {
            __m512i even[4], odd[4];
            transpose_lanes(line(low, chunk, row_bytes), line(low + 4 * row_bytes, chunk, row_bytes),
                            line(high, chunk, row_bytes), line(high + 4 * row_bytes, chunk, row_bytes), even);
            transpose_lanes(line(low + row_bytes, chunk, row_bytes), line(low + 5 * row_bytes, chunk, row_bytes),
                            line(high + row_bytes, chunk, row_bytes), line(high + 5 * row_bytes, chunk, row_bytes), odd);
            const uint8_t* q = queries + 4 * chunk;
            ahead.more();
            ahead.more();
#pragma GCC unroll 4
            for (int lane = 0; lane < 4; ++lane)
#pragma GCC unroll 8
                for (int h = 0; h < heads; ++h) {
                    const __m512i part = _mm512_load_si512(q + h * query_bytes + 64 * lane);
                    a[h] = dot(a[h], even[lane], part);
                    b[h] = dot(b[h], odd[lane], part);
                }
        }
        for (int h = 0; h < heads; ++h) {
            sums[2 * pass][h] = a[h];
            sums[2 * pass + 1][h] = b[h];
        }
    }
    for (int h = 0; h < heads; ++h)
        _mm512_store_ps(scores + h * range_positions, sums_of_lanes(sums[0][h], sums[1][h], sums[2][h], sums[3][h]));
}

template <int heads>
void score(const Problem& problem, const Span& span, int first, int stop, const SpanMemory& memory, int head, Ahead& ahead) {
    const int row_bytes = 2 * problem.cache.head_dim, query_bytes = int(prepared_bytes(1, problem.cache.head_dim));
    for (int at = first; at < stop; at += group_slots) {
        const Group group = group_at<Part::keys>(problem, span, at, memory.slots);
        score_group<heads>(group, row_bytes, memory.queries + head * query_bytes, query_bytes,
                           memory.scores + head * range_positions + (at - first), ahead);
    }
}

// A head's scores of groups in [first, stop) become weights in bfloat16, at the row's start; 0 outside the span.
void exponentiate(const Problem& problem, const Span& span, int first, int stop, float* scores, int head, const Partial& to) {
    const float scale = problem.soft_cap == 0 ? problem.scale * log2e : problem.scale;
    f32x16 most = splat(to.most[head]);
    for (int at = first; at < stop; at += group_slots) {
        float* score = scores + (at - first);
        f32x16 s = load(score) * scale;
        if (problem.soft_cap != 0) s = capped(s, problem.soft_cap) * log2e;
        s = (f32x16)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(lanes_in(span, at)), (__m512)s);
        store(score, s);
        most = max(most, s);
    }
    raise(to, head, std::ceil(largest(most)), problem.cache.head_dim);
    f32x16 total{};
    for (int at = 0; at < stop - first; at += group_slots) {
        const f32x16 weight = exp2(load(scores + at) - to.most[head]);
        total += weight;
        // Weights are half as wide as scores: they never overwrite one that is still to be read.
        _mm256_store_si256(reinterpret_cast<__m256i*>(scores + at / 2), (__m256i)_mm512_cvtneps_pbh((__m512)weight));
    }
    to.total[head] += sum(total);
}

// Sums of `lines` times 32 dimensions, in the order that interleaving leaves them in: [line][low, high].
template <int heads, int lines>
void weigh_group(const Group& group, int row_bytes, int chunk, const float* weights, __m512 sums[heads][2 * lines]) {
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; ++pair) {
        const uint8_t* row = group.rows[pair / 4] + (2 * pair % 8) * row_bytes;
        __m512i values[2 * lines];
        for (int l = 0; l < lines; ++l) {
            const __m512i a = line(row, chunk + 64 * l, row_bytes), b = line(row + row_bytes, chunk + 64 * l, row_bytes);
            values[2 * l] = _mm512_unpacklo_epi16(a, b);
            values[2 * l + 1] = _mm512_unpackhi_epi16(a, b);
        }
        for (int h = 0; h < heads; ++h) {
            const __m512i both = _mm512_castps_si512(_mm512_set1_ps(weights[h * range_positions + pair]));
            for (int v = 0; v < 2 * lines; ++v) sums[h][v] = dot(sums[h][v], values[v], both);
        }
    }
}

// What interleaving did to the order of 32 dimensions, undone; added to sums [32], or [16] at the end of an odd row.
inline void add_in_order(__m512 low, __m512 high, float* sum, bool both) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), _mm512_permutex2var_ps(low, first, high)));
    if (both) _mm512_storeu_ps(sum + 16, _mm512_add_ps(_mm512_loadu_ps(sum + 16), _mm512_permutex2var_ps(low, second, high)));
}

template <int heads, int lines>
void weigh(const Problem& problem, const Span& span, int first, int stop, const SpanMemory& memory, int head, const Partial& to,
           Ahead& ahead) {
    const int head_dim = problem.cache.head_dim, row_bytes = 2 * head_dim;
    for (int chunk = 0; chunk < row_bytes; chunk += 64 * lines) {
        __m512 sums[heads][2 * lines];
        for (int h = 0; h < heads; ++h)
            for (int v = 0; v < 2 * lines; ++v) sums[h][v] = _mm512_setzero_ps();
        for (int at = first; at < stop; at += group_slots) {
            const Group group = group_at<Part::values>(problem, span, at, memory.slots);
            for (int i = 0; i < 4 * lines; ++i) ahead.more();
            weigh_group<heads, lines>(group, row_bytes, chunk, memory.scores + head * range_positions + (at - first) / 2, sums);
        }
        for (int h = 0; h < heads; ++h)
            for (int l = 0; l < lines; ++l) {
                const int dim = chunk / 2 + 32 * l;
                add_in_order(sums[h][2 * l], sums[h][2 * l + 1], to.sum + (head + h) * head_dim + dim, dim + 16 < head_dim);
            }
    }
}

// As many heads at once as registers hold sums for.
template <int heads>
void attend_heads(const Problem& problem, const Span& span, int first, int stop, const SpanMemory& memory, int head,
                  const Partial& to, Ahead& ahead) {
    score<heads>(problem, span, first, stop, memory, head, ahead);
    for (int h = head; h < head + heads; ++h)
        exponentiate(problem, span, first, stop, memory.scores + h * range_positions, h, to);
    if (heads <= 6 && problem.cache.head_dim % 64 == 0)
        weigh<heads, heads <= 6 ? 2 : 1>(problem, span, first, stop, memory, head, to, ahead);
    else
        weigh<heads, 1>(problem, span, first, stop, memory, head, to, ahead);
}

constexpr int heads_most = 8;

template <int heads>
void attend_some(int count, const Problem& problem, const Span& span, int first, int stop, const SpanMemory& memory, int head,
                 const Partial& to, Ahead& ahead) {
    if (count == heads) return attend_heads<heads>(problem, span, first, stop, memory, head, to, ahead);
    if constexpr (heads > 1) attend_some<heads - 1>(count, problem, span, first, stop, memory, head, to, ahead);
}

}  // namespace

void attend_span_bf16(const Problem& problem, const Span& span, const SpanMemory& memory, const Partial& to) {
    const int group = problem.group, head_dim = problem.cache.head_dim;
    prepare(span.query, group, head_dim, memory.queries);
    clear(to, group, head_dim);
    Ahead ahead(problem, span, 32768);
    // Parts of equal size: 14 heads are 7 and 7.
    const int parts = (group + heads_most - 1) / heads_most;
    for (int first = span.first / group_slots * group_slots; first < span.stop; first += range_positions) {
        const int stop = std::min(first + range_positions, span.stop);
        for (int part = 0; part < parts; ++part) {
            const int head = group * part / parts, count = group * (part + 1) / parts - head;
            attend_some<heads_most>(count, problem, span, first, stop, memory, head, to, ahead);
        }
    }
}

}  // namespace kveik::KVEIK_ISA

#endif
