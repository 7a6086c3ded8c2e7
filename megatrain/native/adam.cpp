// AdamW on a layer's slabs, one pass over memory, on a pool of threads that hold no Python lock.
//
// The arithmetic is that of torch's vectorised fused AdamW kernel for x86, operation by operation, so that a slab ends
// there with the same bits whichever of the two ran, and on every processor with those: fused multiply-adds stand
// where they have torch's bits and nowhere else (compile with -ffp-contract=off). Elements do not depend on each
// other, so neither the number of threads nor where a block begins can be seen in the result.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>

#include <pthread.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add in hardware the bits would not be torch's, and std::fma would be slow"
#endif

namespace {

// Elements handed to a thread at a time: 2 to 4 MB of memory. Every block begins without what the processor has
// learnt to prefetch, so small ones cost up to a fifth; smaller only where each thread would not get SHARES of them.
constexpr int64_t BLOCK = 1 << 18, SMALLEST_BLOCK = 1 << 15, SHARES = 8;

// Processors do not fetch all of so many arrays ahead by themselves, those of 16 bits least: while a tile is updated,
// what comes so many elements later is asked for. Its size, in bytes of a moment, was found by trying.
constexpr int64_t TILE = 512, AHEAD = 512, CACHE_LINE = 64;

// ---- element types

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr uint32_t NAN_BITS = 0x7FC00000u;  // one pattern for every NaN: carries could turn another into a number

inline float wide(uint16_t x) { return from_bits(uint32_t(x) << 16); }
inline float wide(float x) { return x; }

// to nearest, a tie to even
inline uint16_t narrow(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t(x != x ? NAN_BITS >> 16 : rounded);
}

// up or down, by the lower 16 bits of `drawn`: megatrain/stochastic_rounding.py
inline uint16_t narrow(float x, uint32_t drawn) {
    const uint32_t bits = x != x ? NAN_BITS : to_bits(x);
    return uint16_t((bits + (drawn & 0xFFFFu)) >> 16);
}

inline uint32_t draw(uint32_t place, uint32_t key) {
    uint32_t x = place;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15) ^ key) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline void put(uint16_t& to, float x, uint32_t drawn) { to = narrow(x, drawn); }
inline void put(float& to, float x, uint32_t) { to = x; }

// ---- where the fp32 value of a parameter comes from and goes to, by precision

struct Rounded {  // bf16: the weight is all there is
    using Weight = uint16_t;
    using Kept = uint8_t;  // nothing
    static float load(Weight w, Kept) { return wide(w); }
    static void store(Weight& w, Kept&, float p, uint32_t drawn) { w = narrow(p, drawn); }
};

struct Split {  // bf16_split: the lower half of the master beside the weight
    using Weight = uint16_t;
    using Kept = int16_t;
    static float load(Weight w, Kept low) { return from_bits((uint32_t(w) << 16) + uint32_t(int32_t(low))); }
    static void store(Weight& w, Kept& low, float p, uint32_t) {
        const uint32_t bits = p != p ? NAN_BITS : to_bits(p);
        low = Kept(bits);
        w = Weight((bits + 0x8000u) >> 16);
    }
};

struct Master {  // bf16_fp32: a whole master
    using Weight = uint16_t;
    using Kept = float;
    static float load(Weight, Kept master) { return master; }
    static void store(Weight& w, Kept& master, float p, uint32_t) {
        master = p;
        w = narrow(p);
    }
};

struct Plain {  // fp32: the weight is the master
    using Weight = float;
    using Kept = uint8_t;  // nothing
    static float load(Weight w, Kept) { return w; }
    static void store(Weight& w, Kept&, float p, uint32_t) { w = p; }
};

// A step's numbers, as native/adam.py's Coefficients has them.
struct Step {
    float kept, lerp, beta2, square, correction, eps, size;
    float scale;         // of the gradient
    uint32_t from_mean;  // all ones where the interpolation starts at the mean, zero: at the gradient
    uint32_t start, key;  // of what is drawn; start that of the first element

    Step from(int64_t element) const {
        Step later = *this;
        later.start += uint32_t(element);
        return later;
    }
};

// x / y, to the bit, for x >= 0 where one y has many x: a multiplication and two fused multiply-adds for what takes a
// divider as long as all else together (Markstein, IBM Journal of Research and Development 34 (1990), 111-119).
inline float quotient(float x, float y, float inverse) {
    const float close = x * inverse;
    const float rest = std::fma(-close, y, x);  // exact; not a number where x is infinite
    return std::fma(from_bits(to_bits(rest) & -uint32_t(to_bits(x) < INFINITY_BITS)), inverse, close);
}

// What a precision does not keep is read and written here, one element that nobody looks at.
template <typename P>
inline int place(int i) { return std::is_same_v<typename P::Kept, uint8_t> ? 0 : i; }

// The pointers are arguments, as compilers believe __restrict nowhere else, and without it they do not vectorise.
template <typename P, typename G, typename M>
__attribute__((noinline)) void block(
    typename P::Weight* __restrict w, typename P::Kept* __restrict kept, const G* __restrict g, M* __restrict m,
    M* __restrict v, Step s, int n) {
    const float inverse = 1.0f / s.correction;
    for (int i = 0; i < n; ++i) {  // as wide as what it is hashed to
        const float grad = wide(g[i]) * s.scale;
        const float old = wide(m[i]);
        // bits under a mask: compilers do not vectorise a choice that is the same for every element
        const float base = from_bits((to_bits(old) & s.from_mean) | (to_bits(grad) & ~s.from_mean));
        const float mean = std::fma(s.lerp, grad - old, base);
        const float var = std::fma(s.square * grad, grad, wide(v[i]) * s.beta2);
        const uint32_t drawn = draw(s.start + uint32_t(i), s.key);  // optimised away where nothing is drawn
        put(m[i], mean, drawn >> 16);
        put(v[i], var, drawn >> 16);
        const float denominator = quotient(std::sqrt(var), s.correction, inverse) + s.eps;
        const float p = P::load(w[i], kept[place<P>(i)]) * s.kept + s.size * mean / denominator;
        P::store(w[i], kept[place<P>(i)], p, drawn);
    }
}

// ---- threads

class Pool {
public:
    // Calls work(begin, end) on blocks that cover [0, n), on `threads` threads of which the caller is one.
    void run(int64_t n, int threads, const std::function<void(int64_t, int64_t)>& work) {
        const int64_t share = std::clamp(n / (threads * SHARES), SMALLEST_BLOCK, BLOCK);
        const int64_t block = share / SMALLEST_BLOCK * SMALLEST_BLOCK;
        threads = int(std::min<int64_t>(threads, (n + block - 1) / block));
        if (threads <= 1) {
            work(0, n);
            return;
        }
        std::lock_guard<std::mutex> one_at_a_time(busy_);
        {
            std::lock_guard<std::mutex> guard(state_);
            while (helpers_ < threads - 1) {
                try {
                    std::thread(&Pool::serve, this, helpers_).detach();
                } catch (const std::system_error&) {  // a limit of processes, say: those that are there do it all
                    break;
                }
                ++helpers_;
            }
            work_ = &work;
            n_ = n;
            block_ = block;
            next_ = 0;
            wanted_ = running_ = std::min(helpers_, threads - 1);
            ++turn_;
        }
        wake_.notify_all();
        take(work, n, block);
        std::unique_lock<std::mutex> guard(state_);
        done_.wait(guard, [this] { return running_ == 0; });
    }

private:
    void take(const std::function<void(int64_t, int64_t)>& work, int64_t n, int64_t block) {
        for (int64_t begin; (begin = next_.fetch_add(block)) < n;) {
            work(begin, std::min(begin + block, n));
        }
    }

    void serve(int number) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> guard(state_);
        for (;;) {
            wake_.wait(guard, [&] { return turn_ != seen; });
            seen = turn_;
            if (number >= wanted_) {
                continue;
            }
            const auto* work = work_;
            const int64_t n = n_, block = block_;
            guard.unlock();
            take(*work, n, block);
            guard.lock();
            if (--running_ == 0) {
                done_.notify_one();
            }
        }
    }

    std::mutex busy_, state_;
    std::condition_variable wake_, done_;
    std::atomic<int64_t> next_{0};
    const std::function<void(int64_t, int64_t)>* work_ = nullptr;
    int64_t n_ = 0, block_ = 0;
    int helpers_ = 0, wanted_ = 0, running_ = 0;
    uint64_t turn_ = 0;
};

std::atomic<Pool*> of_process;  // never destroyed: its threads end with the process

Pool& pool() {
    static const int told = [] {
        of_process = new Pool;
        return pthread_atfork(nullptr, nullptr, [] { of_process = new Pool; });  // a forked process has no such threads
    }();
    (void)told;
    return *of_process;
}

template <typename T>
inline void fetch(const T* array, int64_t n) {
    for (int64_t at = 0; at < n * int64_t(sizeof(T)); at += CACHE_LINE) {
        __builtin_prefetch(reinterpret_cast<const char*>(array) + at);
    }
}

template <typename P, typename G, typename M>
void run(void* weights, void* kept, const void* grad, void* mean, void* var, Step s, int64_t n, int threads) {
    auto* w = static_cast<typename P::Weight*>(weights);
    auto* k = static_cast<typename P::Kept*>(kept);
    auto* g = static_cast<const G*>(grad);
    auto *m = static_cast<M*>(mean), *v = static_cast<M*>(var);
    pool().run(n, threads, [=](int64_t begin, int64_t end) {
        typename P::Kept nothing{};
        constexpr int64_t tile = TILE / sizeof(M);
        for (int64_t at = begin; at < end; at += tile) {
            if (const int64_t later = at + AHEAD; later + tile <= end) {
                fetch(w + later, tile);
                fetch(g + later, tile);
                fetch(m + later, tile);
                fetch(v + later, tile);
                if (k) {
                    fetch(k + later, tile);
                }
            }
            block<P, G, M>(
                w + at, k ? k + at : &nothing, g + at, m + at, v + at, s.from(at), int(std::min(tile, end - at)));
        }
    });
}

// ---- moments of eight bits

constexpr int64_t MOMENTS = 256;  // that share a largest magnitude

// How one of the two moments is stored: what codes stand for, ascending, and native/adam.py's Map.steps.
struct Map {
    const float* values;
    const uint32_t* steps;
};

// Moments [MOMENTS] that codes stand for.
void look_up(const uint8_t* codes, float largest, Map map, float* x);

// Codes of moments [MOMENTS], as shares of the largest.
void encode(const float* x, float largest, Map map, uint8_t* codes);

#ifdef __AVX512F__  // compilers look up an element at a time, which takes twice as long

void look_up(const uint8_t* codes, float largest, Map map, float* x) {
    for (int64_t i = 0; i < MOMENTS; i += 16) {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        const __m512 value = _mm512_i32gather_ps(code, map.values, sizeof(float));
        _mm512_storeu_ps(x + i, _mm512_mul_ps(value, _mm512_set1_ps(largest)));
    }
}

void encode(const float* x, float largest, Map map, uint8_t* codes) {
    const __m512i one = _mm512_set1_epi32(1), lower = _mm512_set1_epi32(0xFFFF), top = _mm512_set1_epi32(INT32_MIN);
    for (int64_t i = 0; i < MOMENTS; i += 16) {
        const __m512i bits = _mm512_castps_si512(_mm512_div_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(largest)));
        const __m512i key = _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi32(bits, 31), top));
        const __m512i step = _mm512_i32gather_epi32(_mm512_srli_epi32(key, 16), map.steps, sizeof(uint32_t));
        const __mmask16 beyond =
            _mm512_cmpgt_epu32_mask(_mm512_and_si512(key, lower), _mm512_and_si512(step, lower));
        const __m512i code = _mm512_srli_epi32(step, 16);
        const __m512i found = _mm512_mask_add_epi32(code, beyond, code, one);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(found));
    }
}

#else

void look_up(const uint8_t* codes, float largest, Map map, float* x) {
    for (int64_t i = 0; i < MOMENTS; ++i) {
        x[i] = map.values[codes[i]] * largest;
    }
}

void encode(const float* x, float largest, Map map, uint8_t* codes) {
    for (int64_t i = 0; i < MOMENTS; ++i) {
        const uint32_t bits = to_bits(x[i] / largest);
        const uint32_t key = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);  // in the order of the floats
        const uint32_t step = map.steps[key >> 16];
        codes[i] = uint8_t((step >> 16) + ((key & 0xFFFFu) > (step & 0xFFFFu)));
    }
}

#endif

inline float largest_of(const float* x) {
    // magnitudes are in the order of their bits; compilers find the largest integer in vectors, if there is no choice
    uint32_t bits = 0;
    for (int64_t i = 0; i < MOMENTS; ++i) {
        const uint32_t magnitude = to_bits(x[i]) & 0x7FFFFFFFu;
        bits = std::max(bits, magnitude & -uint32_t(magnitude <= INFINITY_BITS));  // a NaN is not the largest
    }
    return from_bits(bits);
}

struct Moments {
    uint8_t* codes;
    float* largest;
    Map map;

    void read(int64_t at, float* x) const { look_up(codes + at, largest[at / MOMENTS], map, x); }

    void write(int64_t at, const float* x) const {
        const float found = largest[at / MOMENTS] = largest_of(x);
        encode(x, found > 0.0f ? found : 1.0f, map, codes + at);
    }
};

// Weight decay applies to sorted ranges, pairs of first and last but one, of parameters.
template <typename G>
void run8(
    void* weights, const void* grad, Moments mean, Moments var, Step decaying, const int64_t* ranges, int64_t count,
    int64_t n, int threads) {
    auto* w = static_cast<uint16_t*>(weights);
    auto* g = static_cast<const G*>(grad);
    Step plain = decaying;
    plain.kept = 1.0f;
    pool().run(n, threads, [=](int64_t begin, int64_t end) {
        float m[MOMENTS], v[MOMENTS];
        int64_t next = 0;
        for (int64_t at = begin; at < end; at += MOMENTS) {
            const int64_t stop = at + MOMENTS;
            mean.read(at, m);
            var.read(at, v);
            for (int64_t from = at; from < stop;) {
                while (next < count && ranges[2 * next + 1] <= from) {
                    ++next;
                }
                const bool inside = next < count && ranges[2 * next] <= from;
                const int64_t edge = next == count ? stop : ranges[2 * next + (inside ? 1 : 0)];
                const int64_t to = std::min(stop, edge);
                uint8_t nothing = 0;
                block<Rounded, G, float>(
                    w + from, &nothing, g + from, m + (from - at), v + (from - at),
                    (inside ? decaying : plain).from(from), int(to - from));
                from = to;
            }
            mean.write(at, m);
            var.write(at, v);
        }
    });
}

}  // namespace

// Updates n parameters. `precision`: 0 bf16, 1 bf16_split, 2 bf16_fp32, 3 fp32, 4 bf16_16bit; `kept` is what it keeps
// beside the weights (low halves, master) or null; moments are fp32, bf16 for the last. `wide_grad`: the gradient is
// fp32, else bf16.
extern "C" void megatrain_adam(
    int precision, int wide_grad, int64_t n, int threads, void* weights, const void* grad, void* m, void* v,
    void* kept, Step s) {
    const auto chosen = [&](auto precise, auto moment) {
        using P = decltype(precise);
        using M = decltype(moment);
        const auto go = wide_grad ? run<P, float, M> : run<P, uint16_t, M>;
        go(weights, kept, grad, m, v, s, n, threads);
    };
    switch (precision) {
    case 0: return chosen(Rounded{}, 0.0f);
    case 1: return chosen(Split{}, 0.0f);
    case 2: return chosen(Master{}, 0.0f);
    case 3: return chosen(Plain{}, 0.0f);
    default: return chosen(Rounded{}, uint16_t{});
    }
}

// Updates n bf16 parameters, a multiple of 256, whose moments are codes, uint8 [n], and largest magnitudes, fp32
// [n / 256]; each moment with its map, see Map. `ranges` are the `count` ranges that weight decay applies to.
extern "C" void megatrain_adam8(
    int wide_grad, int64_t n, int threads, void* weights, const void* grad, uint8_t* m_codes, float* m_largest,
    const float* m_values, const uint32_t* m_steps, uint8_t* v_codes, float* v_largest, const float* v_values,
    const uint32_t* v_steps, const int64_t* ranges, int64_t count, Step s) {
    const Moments mean{m_codes, m_largest, {m_values, m_steps}};
    const Moments var{v_codes, v_largest, {v_values, v_steps}};
    const auto go = wide_grad ? run8<float> : run8<uint16_t>;
    go(weights, grad, mean, var, s, ranges, count, n, threads);
}
