// The formulas of rules.py in one pass over memory: gradient in, fp32 weights and states updated in place, weights out in the parameter's type.
// Compiled without contraction (-ffp-contract=off), so every operation rounds by itself, as torch's single ops do. Called through ctypes, which
// lets other Python threads run meanwhile. A pool of threads takes blocks in any order: elements do not depend on each other.

#include <array>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t BLOCK = 1 << 15;  // of elements, which one thread takes
constexpr int64_t RUN = 1 << 10;    // of results, which wait in the nearest cache to be written
constexpr int NICE = 10;            // of a thread that updates, to those that launch the device's work

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

// A thread that launches kernels and meets one of these on its processor would wait for 3 ms or more, and the device with it; these only ever wait
// for memory, and whoever launches is done in a moment. Linux has this for each thread, others for the whole process.
inline void give_way() {
#ifdef __linux__
    const id_t me = id_t(syscall(SYS_gettid));
    setpriority(PRIO_PROCESS, me, getpriority(PRIO_PROCESS, me) + NICE);
#endif
}

// Threads that take blocks of the oldest job first, and of the next one as soon as that has none left: whoever hands in a job before the one under
// way is over never has them wait.
class Pool {
public:
    using Pass = std::function<void(int64_t, int64_t)>;

    struct Job {
        Pass pass;
        int64_t total;
        std::atomic<int64_t> next{0}, left;
        Job(Pass pass, int64_t total) : pass(std::move(pass)), total(total), left((total + BLOCK - 1) / BLOCK) {}
    };

    explicit Pool(int threads) {
        for (int i = 0; i < threads; ++i) workers.emplace_back([this] { give_way(), serve(); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex);
            closing = true;
        }
        begin.notify_all();
        for (auto& worker : workers) worker.join();
    }
    std::shared_ptr<Job> start(int64_t count, Pass pass) {
        auto job = std::make_shared<Job>(std::move(pass), count);
        if (count <= BLOCK) {  // waking somebody would take longer
            job->pass(0, count);
            job->left = 0;
            return job;
        }
        {
            std::lock_guard<std::mutex> hold(mutex);
            jobs.push_back(job);
        }
        begin.notify_all();
        return job;
    }
    void finish(const std::shared_ptr<Job>& job) {
        std::unique_lock<std::mutex> hold(mutex);
        over.wait(hold, [&] { return job->left == 0; });
    }

private:
    void take(Job& job) {
        for (int64_t start = job.next.fetch_add(BLOCK); start < job.total; start = job.next.fetch_add(BLOCK)) {
            job.pass(start, start + BLOCK < job.total ? start + BLOCK : job.total);
            if (job.left.fetch_sub(1) == 1) {
                std::lock_guard<std::mutex> hold(mutex);
                over.notify_all();
            }
        }
    }
    void serve() {
        std::unique_lock<std::mutex> hold(mutex);
        for (;;) {
            begin.wait(hold, [&] { return closing || !jobs.empty(); });
            if (jobs.empty()) return;
            auto job = jobs.front();
            hold.unlock();
            take(*job);
            hold.lock();
            if (!jobs.empty() && jobs.front() == job) jobs.pop_front();
        }
    }
    std::vector<std::thread> workers;
    std::deque<std::shared_ptr<Job>> jobs;  // of which some blocks may be left to take
    std::mutex mutex;
    std::condition_variable begin, over;
    bool closing = false;
};
using Started = std::shared_ptr<Pool::Job>;

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

using Numbers = std::array<float, 10>;

template <class Gradient, class Out>
Started update(Pool* pool, int rule, float* w, const Gradient* g, float* m, float* v, Out* out, float scale, Numbers n, int64_t count) {
    auto formula = rule == 0 ? adam<Gradient, Out> : rule == 1 ? momentum<Gradient, Out> : plain<Gradient, Out>;
    return pool->start(count, [=](int64_t start, int64_t stop) {
        alignas(64) Out results[RUN];
        for (int64_t i = start; i < stop; i += RUN) {
            const int64_t many = i + RUN < stop ? RUN : stop - i;
            formula(w + i, g + i, m ? m + i : m, v ? v + i : v, results, scale, n.data(), many);
            write_past_caches(out ? out + i : out, results, many);
        }
        end_of_writes();
    });
}

template <class Gradient>
Started update_out(Pool* pool, int rule, float* w, const Gradient* g, float* m, float* v, void* out, int out_type, float scale, Numbers n, int64_t count) {
    if (out_type == 0) return update(pool, rule, w, g, m, v, (float*)out, scale, n, count);
    if (out_type == 1) return update(pool, rule, w, g, m, v, (Bf16*)out, scale, n, count);
    return update(pool, rule, w, g, m, v, (Nothing*)nullptr, scale, n, count);
}

}  // namespace

extern "C" {

void* pool_open(int threads) { return new Pool(threads); }
void pool_close(void* pool) { delete (Pool*)pool; }

// Types: 0 float, 1 bf16; for `out` also 2, none. What comes back is for finish_pass, which waits until all of it is written.
void* start_pass(void* pool, int rule, float* w, const void* g, int g_type, float* m, float* v, void* out, int out_type, float scale, const float* n,
                 int64_t n_count, int64_t count) {
    Numbers numbers{};
    for (int64_t i = 0; i < n_count && i < int64_t(numbers.size()); ++i) numbers[size_t(i)] = n[i];
    return new Started(g_type == 0 ? update_out((Pool*)pool, rule, w, (const float*)g, m, v, out, out_type, scale, numbers, count)
                                   : update_out((Pool*)pool, rule, w, (const Bf16*)g, m, v, out, out_type, scale, numbers, count));
}
void finish_pass(void* pool, void* started) {
    ((Pool*)pool)->finish(*(Started*)started);
    delete (Started*)started;
}

}
