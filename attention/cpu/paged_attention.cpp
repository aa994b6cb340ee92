// Paged attention on the CPU: stores the new K and V of a launch, then attends with its queries.
//
// The bits of a query's result follow from the query, its position and the K and V it sees, and from nothing else in
// the launch. Queries that share a KV head (the heads of a group, for one new token after the other) stand side by side
// in vectors and go through the same operations in the same order, wherever they stand. Each has two lanes: a score is
// the sum over even dimensions plus the sum over odd ones, the weights of even and of odd positions are summed apart,
// and every other sum is a chain of multiply-adds over keys, in their order. A key that a query does not see weighs
// exactly 0 and changes no bit, so queries that see different keys can share a vector. That asks for finite K and V: 0
// times infinity is not 0.
//
// Where keys are cut depends on their positions alone. A block of them is scored at once and joins a running softmax,
// which starts anew with every chunk, so that threads can share a long row; chunks are then folded first to last.
// Places behind the end of a row, or before all its windows, are never read.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define NOINLINE __attribute__((noinline))  // one copy, so one choice of instructions, and its own registers
#define UNROLL _Pragma("GCC unroll 16")                // or GCC keeps sums in memory

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int64_t Pairs __attribute__((vector_size(4 * LANES)));

constexpr int HALF = LANES / 2;     // queries in a vector: each has two lanes, for neighbouring dimensions or keys
constexpr int BLOCK = 64;           // keys; K or V of a block fit into the first cache
constexpr int CHUNK = 256;          // keys, a multiple of BLOCK
constexpr int LINE = 64;            // bytes
constexpr int MOST_QUERIES = 48;    // that share a pass over K and V, unless one token brings more
constexpr int64_t QUANTUM = 8000;   // vector multiply-adds that are worth another thread
constexpr float NOTHING = -1e30f;   // the peak of no scores; finite, so that it can be subtracted from itself

enum DType { FLOAT32, BFLOAT16, FLOAT16 };

struct Strides {
    int64_t row, head, token;  // in elements; those of the last dimension are consecutive
};

// What native_backend.py passes, field by field.
struct Call {
    const float* query;               // [B, Hq, L, D]
    const void *key, *value;          // [B, Hkv, L, D], in the dtype of the cache
    void* cache;                      // [pages, 2, Hkv, page_size, D]
    const int32_t *tables, *lengths;  // [R, table_width], [R]
    const int32_t* starts;            // [R + 1]
    const int64_t* slots;             // [T]
    float* out;                       // [T, Hq, D]
    Strides query_strides, key_strides, value_strides;
    int64_t table_width, new_tokens;  // new_tokens: L
    int32_t rows, tokens, heads, kv_heads, head_dim, page_size, window, dtype, threads;  // window 0: there is none
    float scale, softcap;                                                                // softcap 0: there is none
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline float from_bfloat16(uint16_t bits) { return as_float(uint32_t(bits) << 16); }

inline float from_float16(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, size = uint32_t(bits & 0x7fff) << 13;
    const float value = as_float(size) * 0x1p112f;  // the bias of the exponent differs by 112
    return size < 0x0f800000 ? (sign ? -value : value) : as_float(sign | size | 0x7f800000);
}

inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats broadcast_two(const float* x) {
    int64_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return Floats(pair - Pairs{});
}

// a * b + c, in one instruction and named: compilers that may choose (-ffp-contract=fast) split some chains of them.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
    return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__aarch64__)
    return Floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
    return a * b + c;
#endif
}

// Sums of neighbouring lanes: those of `a` in the first half, those of `b` in the second.
inline Floats sum_twos(Floats a, Floats b) {
#if defined(__AVX512F__)
    const __m512 x = __m512(a), y = __m512(b);
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
    return Floats(_mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_castps_si512(sums)));
#elif defined(__AVX__)
    const __m256 low = _mm256_permute2f128_ps(__m256(a), __m256(b), 0x20);
    const __m256 high = _mm256_permute2f128_ps(__m256(a), __m256(b), 0x31);
    return Floats(_mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)));
#elif defined(__aarch64__)
    return Floats(vpaddq_f32(float32x4_t(a), float32x4_t(b)));
#else
    Floats sums;
    for (int i = 0; i < HALF; ++i) sums[i] = a[2 * i] + a[2 * i + 1], sums[HALF + i] = b[2 * i] + b[2 * i + 1];
    return sums;
#endif
}

inline Floats swap_halves(Floats x) {
#if defined(__AVX512F__)
    return Floats(_mm512_shuffle_f32x4(__m512(x), __m512(x), 0x4e));
#elif defined(__AVX__)
    return Floats(_mm256_permute2f128_ps(__m256(x), __m256(x), 1));
#else
    Floats swapped;
    for (int i = 0; i < LANES; ++i) swapped[i] = x[(i + HALF) % LANES];
    return swapped;
#endif
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= 0, about 2e-7 off, exactly 1 at 0 and exactly 0 far below. The polynomial is that of Cephes' exp2f.
inline Floats exp2(Floats x) {
    const Floats shift = broadcast(0x1.8p23f), shifted = x + shift;  // whose low bits are x, rounded
    const Floats r = x - (shifted - shift);
    Floats power = broadcast(1.535336188319500e-4f);
    for (const float next : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                             6.931472028550421e-1f, 1.0f})
        power = fma(power, r, broadcast(next));
    const Floats scaled = Floats(Ints(power) + (Ints(shifted) << 23));
    return x < -126.0f ? Floats{} : scaled;
}

inline Floats tanh(Floats x) {
    const Floats size = x < 0.0f ? -x : x, square = x * x, e = exp2(size * float(-2 * M_LOG2E));
    const Floats far = (1.0f - e) / (1.0f + e);
    Floats near = broadcast(62.0f / 2835);  // Taylor, where `far` would cancel
    for (const float next : {-17.0f / 315, 2.0f / 15, -1.0f / 3}) near = fma(near, square, broadcast(next));
    near = fma(near * square, size, size);
    const Floats result = size < 0.25f ? near : far;
    return x < 0.0f ? -result : result;
}

// One row's query heads of one KV head, for some of its new tokens.
struct Group {
    int row, kv_head, token, queries;  // from token `token` of the launch onwards
    int oldest, newest, first;         // positions of its first and last token, and the first that any of them sees
    int task, chunks;                  // where its chunks are among those of all groups
    int vectors() const { return (queries + HALF - 1) / HALF; }
};

// A softmax under way: for each query the largest score, the sum of the weights, the weighted sum of V.
struct State {
    int queries, vectors, width;                             // width: vectors of a head
    Floats *peak, *total = peak + vectors, *out = total + vectors;  // [vectors], [vectors], [queries, width]
    static int64_t size(int queries, int vectors, int width) { return 2 * vectors + int64_t(queries) * width; }

    void clear() const {
        std::fill(peak, total, broadcast(NOTHING));
        std::fill(total, out + queries * width, Floats{});
    }

    // Adds what was found in the keys behind.
    NOINLINE void fold(const State& next) const {
        for (int v = 0; v < vectors; ++v) {
            const Floats both = max(peak[v], next.peak[v]);
            const Floats mine = exp2(peak[v] - both), other = exp2(next.peak[v] - both);
            peak[v] = both;
            total[v] = fma(total[v], mine, next.total[v] * other);
            for (int m = v * HALF; m < std::min(queries, (v + 1) * HALF); ++m)
                for (int i = m * width; i < (m + 1) * width; ++i)
                    out[i] = fma(out[i], broadcast(mine[m % HALF]), next.out[i] * other[m % HALF]);
        }
    }
};

// The inner step of both products: each of `N` vectors, in which one or two numbers repeat, times each of `V` others.
template <int N, int V, typename Number, typename Vector>
inline void multiply_add(Number number, Vector vector, Floats (&sum)[N][V]) {
    Floats factor[V];
    UNROLL for (int v = 0; v < V; ++v) {
        factor[v] = vector(v);
#if defined(__x86_64__)
        asm("" : "+x"(factor[v]));  // in a register: GCC would load it again for every n, and loads are what is short
#endif
    }
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int v = 0; v < V; ++v) sum[n][v] = fma(number(n), factor[v], sum[n][v]);
}

// Prefetches rows into the first cache while others are worked on: one cache line per call, because the processor drops
// prefetches that come in bursts, and in the order of their addresses, which its own prefetching expects.
struct Fetch {
    const char *const *row, *const *last;
    const char *at, *end;
    int64_t bytes, pace;  // bytes of a row; distance from one call to the next

    // All of `count` rows are prefetched in about `calls` calls. Without any, the first is.
    Fetch(const char* const* rows, int count, int64_t bytes, int64_t calls)
        : row(rows), last(rows + std::max(count - 1, 0)), at(*rows), end(at + bytes), bytes(bytes),
          pace((count * bytes + calls - 1) / calls) {}

    void operator()() {
        __builtin_prefetch(at);
        at += pace;
        if (at >= end) {
            row = std::min(row + 1, last);
            at = *row + (at - end);
            end = *row + bytes;
        }
    }
};

// Scores of `N` keys, two in a vector, for `V` of the `vectors` that hold queries.
template <int N, int V>
NOINLINE void score(const float* const* keys, int64_t dim, const Floats* query, int64_t vectors, Floats* scores,
                    Fetch& fetch) {
    const float* key[N];
    Floats sum[N][V] = {};
    UNROLL for (int n = 0; n < N; ++n) key[n] = keys[n];
    Fetch ahead = fetch;  // in registers
    for (int64_t d = 0; d < dim; d += 2, query += vectors) {
        ahead();
        multiply_add<N, V>([&](int n) { return broadcast_two(key[n] + d); }, [&](int v) { return query[v]; }, sum);
    }
    fetch = ahead;
    UNROLL for (int n = 0; n < N; n += 2)
        UNROLL for (int v = 0; v < V; ++v) scores[n / 2 * vectors + v] = sum_twos(sum[n][v], sum[n + 1][v]);
}

constexpr int lines(int vectors) { return (vectors * LANES * 4 + LINE - 1) / LINE; }

// Adds `V` vectors of each value, from dimension `d` onwards, to the sums of `N` queries, `width` vectors each. `first`
// is the first of them; the weights for the next two values lie `stride` behind.
template <int N, int V>
NOINLINE void add(const float* const* values, int count, int64_t d, const float* weights, int first, int64_t stride,
                  Floats* out, int64_t width, Fetch& fetch) {
    Floats sum[N][V];
    int64_t lane[N];
    UNROLL for (int n = 0; n < N; ++n) {
        lane[n] = (first + n) / HALF * LANES + (first + n) % HALF;
        UNROLL for (int v = 0; v < V; ++v) sum[n][v] = out[n * width + v];
    }
    Fetch ahead = fetch;
    for (int j = 0; j < count; j += 2, weights += stride)
        UNROLL for (int i = 0; i < 2; ++i) {
            for (int line = 0; line < lines(V); ++line) ahead();
            const Unaligned* value = reinterpret_cast<const Unaligned*>(values[j + i] + d);
            multiply_add<N, V>([&](int n) { return broadcast(weights[lane[n] + i * HALF]); },
                               [&](int v) { return Floats(value[v]); }, sum);
        }
    fetch = ahead;
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int v = 0; v < V; ++v) out[n * width + v] = sum[n][v];
}

template <int N> constexpr std::integral_constant<int, N> constant{};

// Covers `rows` with tiles, each as high as the first of `Heights` that fits.
template <int... Heights, typename Tile> void cover(int rows, Tile tile) {
    int row = 0;
    const auto go = [&](auto height) {
        for (; row + height <= rows; row += height) tile(height, row);
    };
    (go(constant<Heights>), ...);
}

// Where the keys and values of a block are in the cache.
struct Rows {
    const char *keys[BLOCK], *values[BLOCK];
    int count;  // even
};

// Memory of a thread, which grows and stays.
struct Scratch {
    std::vector<Floats> query, scores, states;
    std::vector<Ints> positions;
    std::vector<float> converted;
};

template <typename T> T* of(std::vector<T>& memory, int64_t size) {
    if (int64_t(memory.size()) < size) memory.resize(size);
    return memory.data();
}

class Launch {
public:
    explicit Launch(const Call& call)
        : call(call), dim(call.head_dim), width((dim + LANES - 1) / LANES), padded(width * LANES),
          share(call.heads / call.kv_heads), item(call.dtype == FLOAT32 ? 4 : 2) {
        plan();
    }

    void run() {
        static thread_local Scratch shared;
        [[maybe_unused]] const int threads = int(std::min<int64_t>(call.threads, 1 + work / QUANTUM));
        const bool split = int64_t(groups.size()) < 32 * call.threads;  // else whole groups are enough to share out
        Floats* parts = split ? of(shared.states, part_size * int64_t(tasks.size())) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            static thread_local Scratch scratch;
#pragma omp for
            for (int token = 0; token < call.tokens; ++token) store(token);
            if (split) {
                int loaded = -1;
#pragma omp for schedule(static)  // a thread's chunks follow each other, so its fetching ahead is not for others
                for (int i = 0; i < int(tasks.size()); ++i) {
                    const Group& group = groups[tasks[i].group];
                    if (tasks[i].group != loaded) load(group, scratch), loaded = tasks[i].group;
                    attend(group, tasks[i].chunk, scratch, state_of(group, parts + i * part_size));
                }
#pragma omp for
                for (int g = 0; g < int(groups.size()); ++g) {
                    Floats* part = parts + groups[g].task * part_size;
                    const State sum = state_of(groups[g], part);
                    for (int i = 1; i < groups[g].chunks; ++i) sum.fold(state_of(groups[g], part + i * part_size));
                    write(groups[g], sum);
                }
            } else {
#pragma omp for schedule(dynamic)
                for (int g = 0; g < int(groups.size()); ++g) attend_all(groups[g], scratch);
            }
        }
    }

private:
    struct Task {
        int group, chunk;
    };

    const Call& call;
    // width: vectors of a head; padded: their numbers; share: heads of a group; item: bytes of a number in the cache
    const int dim, width, padded, share, item;
    std::vector<Group> groups;
    std::vector<Task> tasks;
    int64_t part_size = 0, work = 0;

    void plan() {
        const int step = std::max(1, MOST_QUERIES / share);
        for (int row = 0; row < call.rows; ++row) {
            const int start = call.starts[row], count = call.starts[row + 1] - start;
            for (int token = 0; token < count; token += step) {
                const int tokens = std::min(step, count - token), oldest = call.lengths[row] - count + token;
                const int newest = oldest + tokens - 1, first = call.window ? std::max(0, oldest - call.window + 1) : 0;
                const int chunk = first / CHUNK, chunks = newest / CHUNK - chunk + 1;
                Group group{row, 0, start + token, tokens * share, oldest, newest, first, 0, chunks};
                part_size = std::max(part_size, State::size(group.queries, group.vectors(), width));
                const int64_t each_key = group.vectors() * padded / 2 + group.queries * width;
                work += (newest + 1 - first) * each_key * call.kv_heads;
                for (; group.kv_head < call.kv_heads; ++group.kv_head) {
                    group.task = int(tasks.size());
                    for (int i = 0; i < chunks; ++i) tasks.push_back({int(groups.size()), chunk + i});
                    groups.push_back(group);
                }
            }
        }
    }

    State state_of(const Group& group, Floats* memory) const { return {group.queries, group.vectors(), width, memory}; }

    char* place(int64_t page, int which, int head, int offset) const {
        const int64_t heads = (page * 2 + which) * call.kv_heads + head;
        return static_cast<char*>(call.cache) + (heads * call.page_size + offset) * dim * item;
    }

    static int64_t at(const Strides& strides, int64_t row, int64_t head, int64_t token) {
        return row * strides.row + head * strides.head + token * strides.token;
    }

    void store(int token) const {
        const int64_t page = call.slots[token] / call.page_size, row = token / call.new_tokens;
        const int offset = int(call.slots[token] % call.page_size), l = int(token % call.new_tokens);
        const char *key = static_cast<const char*>(call.key), *value = static_cast<const char*>(call.value);
        for (int head = 0; head < call.kv_heads; ++head) {
            std::memcpy(place(page, 0, head, offset), key + at(call.key_strides, row, head, l) * item, dim * item);
            std::memcpy(place(page, 1, head, offset), value + at(call.value_strides, row, head, l) * item, dim * item);
        }
    }

    // Brings the queries of a group into lanes, scaled so that scores are exponents of 2 (or what is capped).
    void load(const Group& group, Scratch& scratch) const {
        const int vectors = group.vectors(), lanes = vectors * LANES;
        const float factor = call.softcap ? call.scale / call.softcap : call.scale * float(M_LOG2E);
        scratch.query.assign(int64_t(padded) / 2 * vectors, Floats{});
        scratch.positions.assign(vectors, Ints{});
        float* query = reinterpret_cast<float*>(scratch.query.data());
        for (int m = 0; m < group.queries; ++m) {
            const int token = group.token + m / share, head = group.kv_head * share + m % share;
            const float* from =
                call.query + at(call.query_strides, token / call.new_tokens, head, token % call.new_tokens);
            for (int d = 0; d < dim; ++d) query[int64_t(d / 2) * lanes + 2 * m + d % 2] = from[d] * factor;
            Ints& positions = scratch.positions[m / HALF];
            positions[m % HALF] = positions[m % HALF + HALF] = group.oldest + m / share;
        }
    }

    void attend_all(const Group& group, Scratch& scratch) const {
        Floats* memory = of(scratch.states, 2 * part_size);
        const State sum = state_of(group, memory), next = state_of(group, memory + part_size);
        load(group, scratch);
        for (int i = 0; i < group.chunks; ++i) {
            attend(group, group.first / CHUNK + i, scratch, i ? next : sum);
            if (i) sum.fold(next);
        }
        write(group, sum);
    }

    // Attends to what the group sees of a chunk.
    void attend(const Group& group, int chunk, Scratch& scratch, const State& state) const {
        Rows rows[2];
        int begin = std::max(group.first, chunk * CHUNK) / 2 * 2;
        const int end = std::min(group.newest + 1, (chunk + 1) * CHUNK);
        state.clear();
        locate(group, begin, rows[0]);
        for (int i = 0; begin < end; begin += rows[i].count, i = 1 - i) {
            locate(group, begin + rows[i].count, rows[1 - i]);
            attend(group, begin, rows[i], rows[1 - i], scratch, state);
        }
    }

    // Where the keys and values of a block are that the group sees, from position `begin` onwards, two by two. One that
    // it does not see is taken to be where the other one is.
    void locate(const Group& group, int begin, Rows& rows) const {
        const int32_t* table = call.tables + group.row * call.table_width;
        const int stop = std::min(group.newest + 1, (begin / BLOCK + 1) * BLOCK);
        rows.count = std::max(0, (stop - begin + 1) / 2 * 2);
        rows.keys[0] = rows.values[0] = static_cast<const char*>(call.cache);
        for (int j = 0; j < rows.count;) {
            const int seen = std::min(std::max(begin + j, group.first), group.newest);
            const int page = seen / call.page_size, offset = seen % call.page_size;
            const char* key = place(table[page], 0, group.kv_head, offset);
            const char* value = place(table[page], 1, group.kv_head, offset);
            const int end = seen == begin + j ? std::min(stop - begin, j + call.page_size - offset) : j + 1;
            for (; j < end; ++j, key += dim * item, value += dim * item) rows.keys[j] = key, rows.values[j] = value;
        }
    }

    // Attends to the keys of a block, while the next block is fetched.
    void attend(const Group& group, int begin, const Rows& rows, const Rows& next, Scratch& scratch,
                const State& state) const {
        const int pairs = rows.count / 2, vectors = state.vectors;
        Floats* scores = of(scratch.scores, BLOCK / 2 * int64_t(vectors));
        score_all(rows, next, scratch, vectors, scores);
        const bool hides =
            begin + rows.count - 1 > group.oldest || (call.window && begin <= group.newest - call.window);
        for (int v = 0; v < vectors; ++v) {
            if (call.softcap) cap(pairs, vectors, scores + v);
            if (hides) hide(begin, pairs, vectors, scratch.positions[v], scores + v);
            weigh(pairs, scores + v, state, v);
        }
        add_all(rows, next, scratch, reinterpret_cast<const float*>(scores), state);
    }

    void score_all(const Rows& rows, const Rows& next, Scratch& scratch, int vectors, Floats* scores) const {
        const Floats* query = scratch.query.data();
        const float* converted[BLOCK];
        const float* const* keys = read(rows.keys, rows.count, scratch, converted);
        const int columns = (vectors + 2) / 3;
        const int tiles = vectors == 1 ? (rows.count + 7) / 8 : (rows.count + 3) / 4 * columns;
        Fetch fetch(next.keys, next.count, dim * item, tiles * (padded / 2));
        const auto tile = [&](auto n, auto v, int key, int column) {
            Floats* to = scores + key / 2 * vectors + column;
            score<n, v>(keys + key, padded, query + column, vectors, to, fetch);
        };
        if (vectors == 1) return cover<8, 4, 2>(rows.count, [&](auto n, int key) { tile(n, constant<1>, key, 0); });
        cover<4, 2>(rows.count, [&](auto n, int key) {
            int column = 0;
            for (; vectors - column > 4 || vectors - column == 3; column += 3) tile(n, constant<3>, key, column);
            for (; column < vectors; column += 2) tile(n, constant<2>, key, column);
        });
    }

    void add_all(const Rows& rows, const Rows& next, Scratch& scratch, const float* weights, const State& state) const {
        const float* converted[BLOCK];
        const float* const* values = read(rows.values, rows.count, scratch, converted);
        const int queries = state.queries, stride = state.vectors * LANES;
        const bool few = queries < 6;
        const int tiles = few ? (queries + 3) / 4 * (width / 3 * lines(3) + lines(width % 3))
                              : (queries + 5) / 6 * (width / 2 * lines(2) + lines(width % 2));
        Fetch fetch(next.values, next.count, dim * item, int64_t(tiles) * rows.count);
        const auto tile = [&](auto n, auto v, int query, int column) {
            Floats* out = state.out + query * width + column;
            add<n, v>(values, rows.count, column * LANES, weights, query, stride, out, width, fetch);
        };
        int column = 0;
        for (; few && column + 3 <= width; column += 3)
            cover<4, 3, 2, 1>(queries, [&](auto n, int query) { tile(n, constant<3>, query, column); });
        for (; column + 2 <= width; column += 2)
            cover<6, 3, 2, 1>(queries, [&](auto n, int query) { tile(n, constant<2>, query, column); });
        for (; column < width; ++column)
            cover<6, 3, 2, 1>(queries, [&](auto n, int query) { tile(n, constant<1>, query, column); });
    }

    // The rows as floats, with whole vectors to read: where they are, or converted.
    const float* const* read(const char* const* rows, int count, Scratch& scratch, const float** floats) const {
        if (call.dtype == FLOAT32 && dim == padded) return reinterpret_cast<const float* const*>(rows);
        float* converted = of(scratch.converted, BLOCK * int64_t(padded));
        for (int j = 0; j < count; ++j, converted += padded) floats[j] = convert(rows[j], converted);
        return floats;
    }

    const float* convert(const char* from, float* into) const {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
        if (call.dtype == FLOAT32) std::memcpy(into, from, dim * item);
        if (call.dtype == BFLOAT16)
            for (int d = 0; d < dim; ++d) into[d] = from_bfloat16(halves[d]);
        if (call.dtype == FLOAT16)
            for (int d = 0; d < dim; ++d) into[d] = from_float16(halves[d]);
        std::fill(into + dim, into + padded, 0.0f);
        return into;
    }

    void cap(int pairs, int vectors, Floats* scores) const {
        const float most = call.softcap * float(M_LOG2E);
        for (int j = 0; j < pairs; ++j) scores[j * vectors] = tanh(scores[j * vectors]) * most;
    }

    void hide(int begin, int pairs, int vectors, Ints position, Floats* scores) const {
        const Ints first = call.window ? position - (call.window - 1) : Ints{};
        Ints key;
        for (int i = 0; i < LANES; ++i) key[i] = begin + i / HALF;
        for (int j = 0; j < pairs; ++j, key += 2, scores += vectors)
            *scores = (position >= key) & (first <= key) ? *scores : broadcast(-INFINITY);
    }

    // Turns the scores of vector `v` into weights, after bringing the state to the same measure.
    NOINLINE static void weigh(int pairs, Floats* scores, const State& state, int v) {
        Floats peak = state.peak[v];
        for (int j = 0; j < pairs; ++j) peak = max(peak, scores[j * state.vectors]);
        peak = max(peak, swap_halves(peak));
        const Floats decay = exp2(state.peak[v] - peak);
        Floats total = state.total[v] * decay;
        for (int j = 0; j < pairs; ++j) {
            const Floats weight = exp2(scores[j * state.vectors] - peak);
            scores[j * state.vectors] = weight;
            total += weight;
        }
        state.peak[v] = peak;
        state.total[v] = total;
        for (int m = v * HALF; m < std::min(state.queries, (v + 1) * HALF); ++m)
            for (int i = m * state.width; i < (m + 1) * state.width; ++i) state.out[i] *= decay[m % HALF];
    }

    void write(const Group& group, const State& state) const {
        for (int m = 0; m < group.queries; ++m) {
            const int64_t token = group.token + m / share, head = group.kv_head * share + m % share;
            const float* from = reinterpret_cast<const float*>(state.out + m * width);
            const Floats& totals = state.total[m / HALF];
            const float total = totals[m % HALF] + totals[m % HALF + HALF];
            float* out = call.out + (token * call.heads + head) * dim;
            for (int d = 0; d < dim; ++d) out[d] = from[d] / total;
        }
    }
};

}  // namespace

extern "C" void paged_attention(const Call* call) { Launch(*call).run(); }
