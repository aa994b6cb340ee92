// Paged attention on the CPU: stores the new K and V of a launch, then attends with its queries.
//
// The bits of a query's result follow from the query, its position and the K and V it sees, and from nothing else in
// the launch. Queries that share a KV head (the heads of a group, for one new token after the other) stand in the lanes
// of vectors and go through the same operations in the same order, wherever they stand: every sum is a chain of
// multiply-adds over dimensions or keys, in their order. A key that a query does not see weighs exactly 0 and changes no
// bit, so queries that see different keys can share a vector. That asks for finite K and V: 0 times infinity is not 0.
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

#if defined(__FMA__) || defined(__AVX512F__)
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

constexpr int BLOCK = 64;           // keys; K or V of a block fit into the first cache
constexpr int CHUNK = 256;          // keys, a multiple of BLOCK
constexpr int LINE = 64;            // bytes
constexpr int MOST_QUERIES = 48;    // that share a pass over K and V, unless one token brings more
constexpr int64_t QUANTUM = 60000;  // vector multiply-adds that are worth another thread
constexpr float NOTHING = -1e30f;   // the peak of no scores; finite, so that it can be subtracted from itself

enum DType { FLOAT32, BFLOAT16, FLOAT16 };

struct Strides {
    int64_t row, head, token;  // in elements; those of the last dimension are consecutive
};

// What attention/native.py passes, field by field.
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
    int vectors() const { return (queries + LANES - 1) / LANES; }
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
            for (int m = v * LANES; m < std::min(queries, (v + 1) * LANES); ++m)
                for (int i = m * width; i < (m + 1) * width; ++i)
                    out[i] = fma(out[i], broadcast(mine[m % LANES]), next.out[i] * other[m % LANES]);
        }
    }
};

// The inner step of both products: each of `N` numbers times each of `V` vectors.
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
        UNROLL for (int v = 0; v < V; ++v) sum[n][v] = fma(broadcast(number(n)), factor[v], sum[n][v]);
}

// Brings rows into the first cache, line by line in the order in which they lie there, as the processor's own
// prefetching expects it, and a few lines at a time, as those that are on their way are few.
struct Fetch {
    const char* const* rows;
    int count, bytes;
    int row = 0, byte = 0;
    void operator()(int lines) {
        for (; lines > 0 && row < count; --lines) {
            __builtin_prefetch(rows[row] + byte);
            byte += LINE;
            if (byte >= bytes) byte = 0, ++row;
        }
    }
};

// Scores of `N` keys for `V` of the `vectors` that hold queries.
template <int N, int V>
NOINLINE void score(const float* const* keys, int dim, const Floats* query, int vectors, Floats* scores,
                    Fetch& fetch) {
    const float* key[N];
    Floats sum[N][V] = {};
    UNROLL for (int n = 0; n < N; ++n) key[n] = keys[n];
    for (int64_t d = 0; d < dim;) {
        fetch(N);
        for (const int64_t stop = std::min<int64_t>(dim, d + LINE / 4); d < stop; ++d, query += vectors)
            multiply_add<N, V>([&](int n) { return key[n][d]; }, [&](int v) { return query[v]; }, sum);
    }
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int v = 0; v < V; ++v) scores[n * vectors + v] = sum[n][v];
}

// Adds `V` vectors of each value, from dimension `d` onwards, to the sums of `N` queries, whose weights for the next
// value lie `stride` behind. The sums are `width` vectors each.
template <int N, int V>
NOINLINE void add(const float* const* values, int count, int64_t d, const float* weights, int stride, Floats* out,
                  int width, Fetch& fetch) {
    Floats sum[N][V];
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int v = 0; v < V; ++v) sum[n][v] = out[n * width + v];
    for (int j = 0; j < count;) {
        fetch(8);
        for (const int stop = std::min(count, j + 8); j < stop; ++j, weights += stride) {
            const Unaligned* value = reinterpret_cast<const Unaligned*>(values[j] + d);
            multiply_add<N, V>([&](int n) { return weights[n]; }, [&](int v) { return Floats(value[v]); }, sum);
        }
    }
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int v = 0; v < V; ++v) out[n * width + v] = sum[n][v];
}

// Covers `rows` and the columns from `column` onwards with tiles of N x V, lower ones for the last rows, and returns
// the column that is left.
template <int N, int V, typename Tile> int tiled(int rows, int column, int columns, Tile tile) {
    const auto down = [&](auto height, int row) {
        for (; row + height <= rows; row += height) tile(height, std::integral_constant<int, V>{}, row, column);
        return row;
    };
    for (; column + V <= columns; column += V) {
        const int row = down(std::integral_constant<int, N / 2>{}, down(std::integral_constant<int, N>{}, 0));
        down(std::integral_constant<int, 1>{}, row);
    }
    return column;
}

// Where the keys and values of a block are in the cache.
struct Rows {
    const char *keys[BLOCK], *values[BLOCK];
    int count;
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
        : call(call), dim(call.head_dim), width((dim + LANES - 1) / LANES), share(call.heads / call.kv_heads),
          item(call.dtype == FLOAT32 ? 4 : 2) {
        plan();
    }

    void run() {
        static thread_local Scratch shared;
        const int threads = int(std::min<int64_t>(call.threads, 1 + work / QUANTUM));
        const bool split = int64_t(groups.size()) < 32 * call.threads;  // else whole groups are enough to share out
        Floats* parts = split ? of(shared.states, part_size * int64_t(tasks.size())) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            static thread_local Scratch scratch;
#pragma omp for
            for (int token = 0; token < call.tokens; ++token) store(token);
            if (split) {
#pragma omp for schedule(static)  // a thread's chunks follow each other, so its fetching ahead is not for others
                for (int i = 0; i < int(tasks.size()); ++i) {
                    const Group& group = groups[tasks[i].group];
                    load(group, scratch);
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
    const int dim, width, share, item;  // width: vectors of a head; share: heads of a group; item: bytes of a number
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
                work += int64_t(newest + 1 - first) * group.vectors() * dim * 2 * call.kv_heads;
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
        scratch.query.assign(int64_t(dim) * vectors, Floats{});
        scratch.positions.assign(vectors, Ints{} + group.newest);
        float* query = reinterpret_cast<float*>(scratch.query.data());
        for (int m = 0; m < group.queries; ++m) {
            const int token = group.token + m / share, head = group.kv_head * share + m % share;
            const float* from =
                call.query + at(call.query_strides, token / call.new_tokens, head, token % call.new_tokens);
            for (int d = 0; d < dim; ++d) query[d * lanes + m] = from[d] * factor;
            scratch.positions[m / LANES][m % LANES] = group.oldest + m / share;
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
        int begin = std::max(group.first, chunk * CHUNK);
        const int end = std::min(group.newest + 1, (chunk + 1) * CHUNK);
        state.clear();
        locate(group, begin, rows[0]);
        for (int i = 0; begin < end; begin += rows[i].count, i = 1 - i) {
            locate(group, begin + rows[i].count, rows[1 - i]);
            attend(group, begin, rows[i], rows[1 - i], scratch, state);
        }
    }

    // Where the keys and values of a block are that the group sees, from position `begin` onwards.
    void locate(const Group& group, int begin, Rows& rows) const {
        const int32_t* table = call.tables + group.row * call.table_width;
        rows.count = std::max(0, std::min(group.newest + 1, (begin / BLOCK + 1) * BLOCK) - begin);
        for (int j = 0; j < rows.count;) {
            const int page = (begin + j) / call.page_size, offset = (begin + j) % call.page_size;
            const int stop = std::min(rows.count, j + call.page_size - offset);
            const char* key = place(table[page], 0, group.kv_head, offset);
            const char* value = place(table[page], 1, group.kv_head, offset);
            for (; j < stop; ++j, key += dim * item, value += dim * item) rows.keys[j] = key, rows.values[j] = value;
        }
    }

    // Attends to the keys of a block, while the next block is fetched.
    void attend(const Group& group, int begin, const Rows& rows, const Rows& next, Scratch& scratch,
                const State& state) const {
        const float *keys[BLOCK], *values[BLOCK];
        Fetch next_keys{next.keys, next.count, dim * item}, next_values{next.values, next.count, dim * item};
        read(rows, scratch, keys, values);
        const int count = rows.count, vectors = state.vectors, lanes = vectors * LANES;
        const Floats* query = scratch.query.data();
        Floats* scores = of(scratch.scores, BLOCK * int64_t(vectors));
        const auto score_tile = [&](auto n, auto v, int key, int column) {
            score<n, v>(keys + key, dim, query + column, vectors, scores + key * vectors + column, next_keys);
        };
        tiled<8, 1>(count, tiled<4, 2>(count, tiled<4, 3>(count, 0, vectors, score_tile), vectors, score_tile), vectors,
                    score_tile);
        const bool hides = begin + count - 1 > group.oldest || (call.window && begin <= group.newest - call.window);
        for (int v = 0; v < vectors; ++v) {
            if (call.softcap) cap(count, vectors, scores + v);
            if (hides) hide(begin, count, vectors, scratch.positions[v], scores + v);
            weigh(count, scores + v, state, v);
        }
        const float* weights = reinterpret_cast<const float*>(scores);
        const auto add_tile = [&](auto n, auto v, int query, int column) {
            Floats* out = state.out + query * width + column;
            add<n, v>(values, count, column * LANES, weights + query, lanes, out, width, next_values);
        };
        tiled<6, 1>(state.queries, tiled<6, 2>(state.queries, 0, width, add_tile), width, add_tile);
    }

    // The rows as floats, with whole vectors to read: where they are, or converted.
    void read(const Rows& rows, Scratch& scratch, const float** keys, const float** values) const {
        const bool converts = call.dtype != FLOAT32 || dim % LANES;
        const int stride = width * LANES;
        float* converted = converts ? of(scratch.converted, 2 * BLOCK * int64_t(stride)) : nullptr;
        for (int j = 0; j < rows.count; ++j) {
            keys[j] = converts ? convert(rows.keys[j], converted + j * stride) : as_floats(rows.keys[j]);
            values[j] = converts ? convert(rows.values[j], converted + (BLOCK + j) * stride) : as_floats(rows.values[j]);
        }
    }

    static const float* as_floats(const char* row) { return reinterpret_cast<const float*>(row); }

    const float* convert(const char* from, float* into) const {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
        if (call.dtype == FLOAT32) std::memcpy(into, from, dim * item);
        if (call.dtype == BFLOAT16)
            for (int d = 0; d < dim; ++d) into[d] = from_bfloat16(halves[d]);
        if (call.dtype == FLOAT16)
            for (int d = 0; d < dim; ++d) into[d] = from_float16(halves[d]);
        return into;
    }

    void cap(int count, int vectors, Floats* scores) const {
        const float most = call.softcap * float(M_LOG2E);
        for (int j = 0; j < count; ++j) scores[j * vectors] = tanh(scores[j * vectors]) * most;
    }

    void hide(int begin, int count, int vectors, Ints position, Floats* scores) const {
        const Ints first = call.window ? position - (call.window - 1) : Ints{};
        for (int key = begin; key < begin + count; ++key, scores += vectors)
            *scores = (position >= key) & (first <= key) ? *scores : broadcast(-INFINITY);
    }

    // Turns the scores of vector `v` into weights, after bringing the state to the same measure.
    NOINLINE static void weigh(int count, Floats* scores, const State& state, int v) {
        Floats peak = state.peak[v];
        for (int j = 0; j < count; ++j) peak = max(peak, scores[j * state.vectors]);
        const Floats decay = exp2(state.peak[v] - peak);
        Floats total = state.total[v] * decay;
        for (int j = 0; j < count; ++j) {
            const Floats weight = exp2(scores[j * state.vectors] - peak);
            scores[j * state.vectors] = weight;
            total += weight;
        }
        state.peak[v] = peak;
        state.total[v] = total;
        for (int m = v * LANES; m < std::min(state.queries, (v + 1) * LANES); ++m)
            for (int i = m * state.width; i < (m + 1) * state.width; ++i) state.out[i] *= decay[m % LANES];
    }

    void write(const Group& group, const State& state) const {
        for (int m = 0; m < group.queries; ++m) {
            const int64_t token = group.token + m / share, head = group.kv_head * share + m % share;
            const float* from = reinterpret_cast<const float*>(state.out + m * width);
            float *out = call.out + (token * call.heads + head) * dim, total = state.total[m / LANES][m % LANES];
            for (int d = 0; d < dim; ++d) out[d] = from[d] / total;
        }
    }
};

}  // namespace

extern "C" void paged_attention(const Call* call) { Launch(*call).run(); }
