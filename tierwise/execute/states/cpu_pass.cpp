// The formulas of rules.py in one pass over memory: gradient in, fp32 weights and states updated in place, weights out in the parameter's type.
// Compiled without contraction (-ffp-contract=off), so every operation rounds by itself, as torch's single ops do. Called through ctypes, which
// lets other Python threads run meanwhile. A pool of threads takes blocks in any order: elements do not depend on each other.

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 1 << 15;  // of elements, which one thread takes
constexpr int64_t RUN = 1 << 10;    // of results, which wait in the nearest cache to be written

struct Bf16 { uint16_t bits; };

inline float load(const float* from, int64_t i) { return from[i]; }
inline float load(const Bf16* from, int64_t i) {
    uint32_t wide = uint32_t(from[i].bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t round_to_bf16(float value) {  // to nearest, ties to even; a NaN stays one
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    uint32_t rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
    return (wide & 0x7FFFFFFF) > 0x7F800000 ? uint16_t(0x7FC0) : uint16_t(rounded);
}

inline void store(float* to, int64_t i, float value) { to[i] = value; }
inline void store(Bf16* to, int64_t i, float value) { to[i].bits = round_to_bf16(value); }

inline float rounded_like(const float*, float value) { return value; }
inline float rounded_like(const Bf16*, float value) {
    Bf16 narrow{round_to_bf16(value)};
    return load(&narrow, 0);
}

struct Nothing {};
inline void store(Nothing*, int64_t, float) {}

// Weights that go out are not read again here. Past the caches they are written only; a cache would read their lines from memory first.
template <class Out>
inline void write_past_caches(Out* to, const Out* from, int64_t count) {
    int64_t done = 0, bytes = count * int64_t(sizeof(Out));
#ifdef __SSE2__
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
        for (; done + 16 <= bytes; done += 16)
            _mm_stream_si128((__m128i*)((char*)to + done), _mm_load_si128((const __m128i*)((const char*)from + done)));
#endif
    std::memcpy((char*)to + done, (const char*)from + done, size_t(bytes - done));
}
inline void write_past_caches(Nothing*, const Nothing*, int64_t) {}

inline void end_of_writes() {  // before anyone is told that the block is done
#ifdef __SSE2__
    _mm_sfence();
#endif
}

class Pool {
public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; ++i) workers.emplace_back([this] { serve(); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex);
            closing = true;
        }
        begin.notify_all();
        for (auto& worker : workers) worker.join();
    }
    void run(int64_t count, const std::function<void(int64_t, int64_t)>& pass) {
        int64_t blocks = (count + BLOCK - 1) / BLOCK;
        std::lock_guard<std::mutex> alone(one_at_a_time);
        if (blocks <= 1 || workers.empty()) {
            pass(0, count);
            return;
        }
        {
            std::lock_guard<std::mutex> hold(mutex);
            work = &pass, total = count, next = 0, busy = int(workers.size()), ++turn;
        }
        begin.notify_all();
        take();
        std::unique_lock<std::mutex> hold(mutex);
        over.wait(hold, [this] { return busy == 0; });
    }

private:
    void take() {
        for (int64_t start = next.fetch_add(BLOCK); start < total; start = next.fetch_add(BLOCK))
            (*work)(start, start + BLOCK < total ? start + BLOCK : total);
    }
    void serve() {
        int64_t seen = 0;
        std::unique_lock<std::mutex> hold(mutex);
        for (;;) {
            begin.wait(hold, [&] { return closing || turn != seen; });
            if (closing) return;
            seen = turn;
            hold.unlock();
            take();
            hold.lock();
            if (--busy == 0) over.notify_one();
        }
    }
    std::vector<std::thread> workers;
    std::mutex mutex, one_at_a_time;
    std::condition_variable begin, over;
    const std::function<void(int64_t, int64_t)>* work = nullptr;
    std::atomic<int64_t> next{0};
    int64_t total = 0, turn = 0;
    int busy = 0;
    bool closing = false;
};

template <class Gradient>
inline float gradient_of(const Gradient* g, int64_t i, float scale, float sign, float l2, float w) {
    return rounded_like(g, load(g, i) * scale) * sign + w * l2;
}

template <class Gradient, class Out>
void adam(float* __restrict w, const Gradient* __restrict g, float* __restrict m, float* __restrict v, Out* __restrict out, float scale,
          const float* n, int64_t count) {
    const float sign = n[0], l2 = n[1], decay = n[2], beta1 = n[3], rest1 = n[4], beta2 = n[5], rest2 = n[6], root = n[7], eps = n[8], step = n[9];
    for (int64_t i = 0; i < count; ++i) {
        float grad = gradient_of(g, i, scale, sign, l2, w[i]);
        float mean = m[i] * beta1 + grad * rest1;
        float square = v[i] * beta2 + (grad * grad) * rest2;
        float weight = w[i] * decay - (mean / (std::sqrt(square) * root + eps)) * step;
        m[i] = mean, v[i] = square, w[i] = weight;
        store(out, i, weight);
    }
}

template <class Gradient, class Out>
void momentum(float* __restrict w, const Gradient* __restrict g, float* __restrict m, float*, Out* __restrict out, float scale, const float* n,
              int64_t count) {
    const float sign = n[0], l2 = n[1], keep = n[2], take = n[3], direct = n[4], through = n[5], lr = n[6];
    for (int64_t i = 0; i < count; ++i) {
        float grad = gradient_of(g, i, scale, sign, l2, w[i]);
        float mean = m[i] * keep + grad * take;
        float weight = w[i] - (grad * direct + mean * through) * lr;
        m[i] = mean, w[i] = weight;
        store(out, i, weight);
    }
}

template <class Gradient, class Out>
void plain(float* __restrict w, const Gradient* __restrict g, float*, float*, Out* __restrict out, float scale, const float* n,
           int64_t count) {
    const float sign = n[0], l2 = n[1], lr = n[2];
    for (int64_t i = 0; i < count; ++i) {
        float weight = w[i] - gradient_of(g, i, scale, sign, l2, w[i]) * lr;
        w[i] = weight;
        store(out, i, weight);
    }
}

template <class Gradient, class Out>
void update(Pool* pool, int rule, float* w, const Gradient* g, float* m, float* v, Out* out, float scale, const float* n, int64_t count) {
    auto formula = rule == 0 ? adam<Gradient, Out> : rule == 1 ? momentum<Gradient, Out> : plain<Gradient, Out>;
    pool->run(count, [=](int64_t start, int64_t stop) {
        alignas(64) Out results[RUN];
        for (int64_t i = start; i < stop; i += RUN) {
            const int64_t many = i + RUN < stop ? RUN : stop - i;
            formula(w + i, g + i, m ? m + i : m, v ? v + i : v, results, scale, n, many);
            write_past_caches(out ? out + i : out, results, many);
        }
        end_of_writes();
    });
}

template <class Gradient>
void update_out(Pool* pool, int rule, float* w, const Gradient* g, float* m, float* v, void* out, int out_type, float scale, const float* n, int64_t count) {
    if (out_type == 0) update(pool, rule, w, g, m, v, (float*)out, scale, n, count);
    else if (out_type == 1) update(pool, rule, w, g, m, v, (Bf16*)out, scale, n, count);
    else update(pool, rule, w, g, m, v, (Nothing*)nullptr, scale, n, count);
}

}  // namespace

extern "C" {

void* pool_open(int threads) { return new Pool(threads); }
void pool_close(void* pool) { delete (Pool*)pool; }

// Types: 0 float, 1 bf16; for `out` also 2, none.
void run_pass(void* pool, int rule, float* w, const void* g, int g_type, float* m, float* v, void* out, int out_type, float scale, const float* n, int64_t count) {
    if (g_type == 0) update_out((Pool*)pool, rule, w, (const float*)g, m, v, out, out_type, scale, n, count);
    else update_out((Pool*)pool, rule, w, (const Bf16*)g, m, v, out, out_type, scale, n, count);
}

}
