// Paged attention on the CPU: stores the new K and V of a launch, then attends with its queries.
//
// A vector holds one number each of as many queries as it has lanes: the query heads that share a KV head, for one new
// token after the other. So every query goes through the same operations in the same order, whatever stands in the
// other lanes, and its result has the same bits in any batch. Both products are then one loop: a number of K or V, the
// same for every lane, times a vector, added up by fused multiply-add. (Compiled with -ffp-contract=fast, a * b + c is
// that one instruction wherever the processor has it.)
//
// Where keys are cut depends on their positions alone. BLOCK keys are scored at once and join a running softmax; every
// CHUNK keys it starts anew, so threads can share a long row, and the chunks' results are folded first to last. A key
// that a query does not see weighs exactly 0 and changes no bit: that is what lets queries that see different keys
// share a vector. K and V must be finite, as 0 times infinity is not 0; places behind the end of a row are never read.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr int BLOCK = 64;           // keys; the K and V of a block stay in the first cache
constexpr int CHUNK = 512;          // keys, a multiple of BLOCK
constexpr int MOST_QUERIES = 48;    // that share a pass over K and V, if more than one token's
constexpr int64_t QUANTUM = 60000;  // vector multiply-adds that are worth waking a thread for
constexpr float NOTHING = -1e30f;   // the peak of no scores; finite, so that it can be subtracted from itself

struct Strides {
    int64_t row, head, token;  // in elements; those of the last dimension are consecutive
};

// What attention/native.py passes, field by field.
struct Call {
    const float* query;  // [B, Hq, L, D]
    const void *key, *value;  // [B, Hkv, L, D], in the dtype of the cache
    void* cache;  // [pages, 2, Hkv, page_size, D]
    const int32_t *tables, *lengths, *starts;  // [R, table_width], [R], [R + 1]
    const int64_t* slots;  // [T]
    float* out;  // [T, Hq, D]
    Strides query_strides, key_strides, value_strides;
    int64_t table_width, length;  // length: L
    int32_t rows, tokens, heads, kv_heads, head_dim, page_size, window, dtype, threads;  // window 0: there is none
    float scale, softcap;  // softcap 0: there is none
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

enum DType { FLOAT32, BFLOAT16, FLOAT16 };

// `count` numbers of the cache as floats: themselves, or converted into `into`.
inline const float* floats(const char* from, int dtype, int64_t count, float* into) {
    if (dtype == FLOAT32) return reinterpret_cast<const float*>(from);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; ++i) into[i] = from_bfloat16(halves[i]);
    else
        for (int64_t i = 0; i < count; ++i) into[i] = from_float16(halves[i]);
    return into;
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= 0, at most 2e-7 off, exactly 1 at 0 and exactly 0 far below. The polynomial is that of Cephes' exp2f.
inline Floats exp2(Floats x) {
    const Floats shift = Floats{} + 0x1.8p23f, shifted = x + shift;  // its low bits are x, rounded
    const Floats r = x - (shifted - shift);
    Floats power = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    power = power * r + 9.618437357674640e-3f;
    power = power * r + 5.550332471162809e-2f;
    power = power * r + 2.402264791363012e-1f;
    power = power * r + 6.931472028550421e-1f;
    power = power * r + 1.0f;
    const Floats scaled = Floats(Ints(power) + (Ints(shifted) << 23));
    return x < -126.0f ? Floats{} : scaled;
}

inline Floats tanh(Floats x) {
    const Floats size = x < 0.0f ? -x : x, square = x * x;
    const Floats e = exp2(size * -2.8853900817779268f);
    const Floats far = (1.0f - e) / (1.0f + e);
    Floats near = square * (62.0f / 2835) - 17.0f / 315;
    near = near * square + 2.0f / 15;
    near = near * square - 1.0f / 3;
    near = near * square * size + size;  // where `far` would cancel
    const Floats result = size < 0.25f ? near : far;
    return x < 0.0f ? -result : result;
}

// One row's query heads of one KV head, for some of its new tokens.
struct Group {
    int row, kv_head, token, tokens;  // tokens `token` onwards of the launch
    int oldest, newest;               // positions of the first and the last of them
    int first;                        // the first position that any of them sees
    int part, chunks;                 // where its chunks are among those of all groups
    int vectors;
};

// A softmax under way: for each query the largest score, the sum of the weights, the weighted sum of V.
struct State {
    int vectors, dim;
    Floats* peak;
    Floats* total() const { return peak + vectors; }
    Floats* out() const { return peak + 2 * vectors; }  // [D, vectors]
    static int64_t size(int vectors, int dim) { return int64_t(vectors) * (2 + dim); }
    void clear() const {
        std::fill(peak, peak + vectors, Floats{} + NOTHING);
        std::fill(total(), peak + size(vectors, dim), Floats{});
    }
    void fold(const State& next) const;
};

__attribute__((noinline)) void State::fold(const State& next) const {
    for (int v = 0; v < vectors; ++v) {
        const Floats both = max(peak[v], next.peak[v]);
        const Floats mine = exp2(peak[v] - both), other = exp2(next.peak[v] - both);
        peak[v] = both;
        for (int i = v + vectors; i < size(vectors, dim); i += vectors) {
            const Floats added = next.peak[i] * other;
            peak[i] = peak[i] * mine + added;  // the total, then `out`
        }
    }
}

// The scores of `N` keys for `V` vectors of queries.
template <int N, int V>
inline void score(const float* const* key, int dim, const Floats* query, int vectors, Floats* scores) {
    const float* from[N];
    Floats sum[N][V] = {};
    for (int n = 0; n < N; ++n) from[n] = key[n];
    for (int d = 0; d < dim; ++d, query += vectors)
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) sum[n][v] = from[n][d] * query[v] + sum[n][v];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) scores[n * vectors + v] = sum[n][v];
}

// Adds `N` dimensions, from the `d`th, of `count` weighted values to `out`, for `V` vectors of queries.
template <int N, int V>
inline void add(const float* const* value, int count, int d, const Floats* weights, int vectors, Floats* out) {
    Floats sum[N][V];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) sum[n][v] = out[n * vectors + v];
    for (int j = 0; j < count; ++j, weights += vectors)
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) sum[n][v] = value[j][d + n] * weights[v] + sum[n][v];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) out[n * vectors + v] = sum[n][v];
}

// As many keys, or dimensions, at once as registers hold the sums of, for one, two or three vectors.
template <typename Tile> void tiled(int count, int vectors, Tile tile) {
    auto column = [&](auto width, int v) {
        constexpr int V = decltype(width)::value, N = V == 1 ? 8 : 4;
        int n = 0;
        for (; n + N <= count; n += N) tile(std::integral_constant<int, N>{}, width, n, v);
        for (; n < count; ++n) tile(std::integral_constant<int, 1>{}, width, n, v);
    };
    int v = 0;
    for (; v + 3 <= vectors; v += 3) column(std::integral_constant<int, 3>{}, v);
    if (vectors - v == 2) column(std::integral_constant<int, 2>{}, v);
    if (vectors - v == 1) column(std::integral_constant<int, 1>{}, v);
}

// Scratch memory of a thread, which grows and stays.
struct Scratch {
    std::vector<Floats> query, scores, states;
    std::vector<Ints> positions;
    std::vector<float> converted;
    static Floats* of(std::vector<Floats>& memory, int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size);
        return memory.data();
    }
};

class Launch {
public:
    explicit Launch(const Call& call) : call(call), dim(call.head_dim), share(call.heads / call.kv_heads), item(call.dtype == FLOAT32 ? 4 : 2) {
        plan();
    }

    void run() {
        static thread_local Scratch shared;
        const bool split = int64_t(groups.size()) < 32 * call.threads;  // else there is enough to do, and less to keep
        const int64_t size = State::size(most_vectors, dim);
        Floats* parts = split ? Scratch::of(shared.states, size * int64_t(tasks.size())) : nullptr;
        const int threads = int(std::min<int64_t>(call.threads, 1 + work / QUANTUM));
        #pragma omp parallel num_threads(threads) if (threads > 1)
        {
            static thread_local Scratch scratch;
            #pragma omp for
            for (int token = 0; token < call.tokens; ++token) store(token);
            if (split) {
                #pragma omp for schedule(dynamic)
                for (size_t i = 0; i < tasks.size(); ++i) {
                    const Group& group = groups[tasks[i].group];
                    load(group, scratch);
                    attend(group, tasks[i].chunk, scratch, State{group.vectors, dim, parts + i * size});
                }
                #pragma omp for
                for (size_t g = 0; g < groups.size(); ++g) {
                    const State state{groups[g].vectors, dim, parts + groups[g].part * size};
                    for (int i = 1; i < groups[g].chunks; ++i) state.fold({state.vectors, dim, state.peak + i * size});
                    write(groups[g], state);
                }
            } else {
                #pragma omp for schedule(dynamic)
                for (size_t g = 0; g < groups.size(); ++g) whole(groups[g], scratch);
            }
        }
    }

private:
    struct Task {
        int group, chunk;
    };

    const Call& call;
    const int dim, share, item;  // share: query heads of a KV head; item: bytes of a number of the cache
    std::vector<Group> groups;
    std::vector<Task> tasks;
    int most_vectors = 0;
    int64_t work = 0;

    void plan() {
        const int step = std::max(1, MOST_QUERIES / share);
        for (int row = 0; row < call.rows; ++row) {
            const int start = call.starts[row], count = call.starts[row + 1] - start;
            for (int token = 0; token < count; token += step) {
                const int tokens = std::min(step, count - token), oldest = call.lengths[row] - count + token;
                const int newest = oldest + tokens - 1, vectors = (tokens * share + LANES - 1) / LANES;
                const int first = call.window ? std::max(0, oldest - call.window + 1) : 0;
                const int chunk = first / CHUNK, chunks = newest / CHUNK - chunk + 1;
                most_vectors = std::max(most_vectors, vectors);
                work += int64_t(newest + 1 - first) * vectors * dim * 2 * call.kv_heads;
                for (int head = 0; head < call.kv_heads; ++head) {
                    const int part = int(tasks.size());
                    for (int i = 0; i < chunks; ++i) tasks.push_back({int(groups.size()), chunk + i});
                    groups.push_back({row, head, start + token, tokens, oldest, newest, first, part, chunks, vectors});
                }
            }
        }
    }

    char* place(int64_t page, int which, int head, int offset) const {
        const int64_t heads = (page * 2 + which) * call.kv_heads + head;
        return static_cast<char*>(call.cache) + (heads * call.page_size + offset) * dim * item;
    }

    void store(int token) const {
        const int64_t page = call.slots[token] / call.page_size, b = token / call.length, l = token % call.length;
        const int offset = int(call.slots[token] % call.page_size);
        const auto copy = [&](int which, const void* from, const Strides& strides) {
            const char* at = static_cast<const char*>(from) + (b * strides.row + l * strides.token) * item;
            for (int head = 0; head < call.kv_heads; ++head)
                std::memcpy(place(page, which, head, offset), at + head * strides.head * item, dim * item);
        };
        copy(0, call.key, call.key_strides);
        copy(1, call.value, call.value_strides);
    }

    // Brings the queries of a group into lanes, scaled so that scores are exponents of 2 (or what is capped).
    void load(const Group& group, Scratch& scratch) const {
        float* query = reinterpret_cast<float*>(Scratch::of(scratch.query, int64_t(dim) * group.vectors));
        scratch.positions.assign(group.vectors, Ints{} + group.newest);
        std::memset(query, 0, sizeof(Floats) * dim * group.vectors);
        const float factor = call.softcap ? call.scale / call.softcap : call.scale * float(M_LOG2E);
        for (int m = 0; m < group.tokens * share; ++m) {
            const int64_t token = group.token + m / share, head = group.kv_head * share + m % share;
            const Strides& strides = call.query_strides;
            const float* from = call.query + token / call.length * strides.row + token % call.length * strides.token;
            for (int d = 0; d < dim; ++d)
                query[d * group.vectors * LANES + m] = from[head * strides.head + d] * factor;
            scratch.positions[m / LANES][m % LANES] = group.oldest + m / share;
        }
    }

    // Attends to the keys of a chunk that the group sees.
    void attend(const Group& group, int chunk, Scratch& scratch, const State& state) const {
        state.clear();
        const int end = std::min(group.newest + 1, (chunk + 1) * CHUNK);
        for (int begin = std::max(group.first, chunk * CHUNK), stop; begin < end; begin = stop) {
            stop = std::min(end, (begin / BLOCK + 1) * BLOCK);
            block(group, begin, stop - begin, scratch, state);
        }
    }

    void block(const Group& group, int begin, int count, Scratch& scratch, const State& state) const {
        const float *keys[BLOCK], *values[BLOCK];
        locate(group, begin, count, scratch, keys, values);
        const int vectors = group.vectors, dim = this->dim;
        const Floats* query = scratch.query.data();
        Floats* scores = Scratch::of(scratch.scores, int64_t(BLOCK) * vectors);
        tiled(count, vectors, [&](auto n, auto width, int j, int v) {
            score<n, width>(keys + j, dim, query + v, vectors, scores + j * vectors + v);
        });
        const bool hides = begin + count - 1 > group.oldest || (call.window && begin <= group.newest - call.window);
        for (int v = 0; v < vectors; ++v) {
            if (call.softcap) cap(count, vectors, scores + v);
            if (hides) hide(begin, count, vectors, scratch.positions[v], scores + v);
            weigh(count, scores, state, v);
        }
        tiled(dim, vectors, [&](auto n, auto width, int d, int v) {
            add<n, width>(values, count, d, scores + v, vectors, state.out() + d * vectors + v);
        });
    }

    // Where `count` keys and values from position `begin` onwards are.
    void locate(const Group& group, int begin, int count, Scratch& scratch, const float** keys,
                const float** values) const {
        if (call.dtype != FLOAT32) scratch.converted.resize(2 * BLOCK * dim);
        float* converted = scratch.converted.data();
        const int32_t* table = call.tables + group.row * call.table_width;
        for (int j = 0; j < count;) {
            const int page = (begin + j) / call.page_size, offset = (begin + j) % call.page_size;
            const int same = std::min(count - j, call.page_size - offset);
            const auto at = [&](int which) {
                float* into = converted + int64_t(which * BLOCK + j) * dim;
                return floats(place(table[page], which, group.kv_head, offset), call.dtype, int64_t(same) * dim, into);
            };
            const float *key = at(0), *value = at(1);
            for (const int stop = j + same; j < stop; ++j, key += dim, value += dim) keys[j] = key, values[j] = value;
        }
    }

    void cap(int count, int vectors, Floats* scores) const {
        const Floats most = Floats{} + call.softcap * float(M_LOG2E);
        for (int j = 0; j < count; ++j) scores[j * vectors] = tanh(scores[j * vectors]) * most;
    }

    void hide(int begin, int count, int vectors, Ints position, Floats* scores) const {
        const Ints first = call.window ? position - (call.window - 1) : Ints{};
        for (int key = begin; key < begin + count; ++key, scores += vectors)
            *scores = (position >= key) & (first <= key) ? *scores : Floats{} - INFINITY;
    }

    // Turns the scores of vector `v` into weights, in whose measure the state then is.
    static void weigh(int count, Floats* scores, const State& state, int v) {
        const int vectors = state.vectors;
        Floats peak = state.peak[v];
        for (int j = 0; j < count; ++j) peak = max(peak, scores[j * vectors + v]);
        const Floats decay = exp2(state.peak[v] - peak);
        Floats total = state.total()[v] * decay;
        for (int j = 0; j < count; ++j) {
            const Floats weight = exp2(scores[j * vectors + v] - peak);
            scores[j * vectors + v] = weight;
            total += weight;
        }
        state.peak[v] = peak;
        state.total()[v] = total;
        for (int d = 0; d < state.dim; ++d) state.out()[d * vectors + v] *= decay;
    }

    void whole(const Group& group, Scratch& scratch) const {
        const int64_t size = State::size(group.vectors, dim);
        Floats* memory = Scratch::of(scratch.states, 2 * size);
        const State sum{group.vectors, dim, memory}, next{group.vectors, dim, memory + size};
        load(group, scratch);
        attend(group, group.first / CHUNK, scratch, sum);
        for (int i = 1; i < group.chunks; ++i) {
            attend(group, group.first / CHUNK + i, scratch, next);
            sum.fold(next);
        }
        write(group, sum);
    }

    void write(const Group& group, const State& state) const {
        for (int v = 0; v < state.vectors; ++v)
            for (int d = 0; d < dim; ++d) state.out()[d * state.vectors + v] /= state.total()[v];
        const float* from = reinterpret_cast<const float*>(state.out());
        for (int m = 0; m < group.tokens * share; ++m) {
            const int64_t token = group.token + m / share, head = group.kv_head * share + m % share;
            float* out = call.out + (token * call.heads + head) * dim;
            for (int d = 0; d < dim; ++d) out[d] = from[d * state.vectors * LANES + m];
        }
    }
};

}  // namespace

extern "C" void paged_attention(const Call* call) { Launch(*call).run(); }
