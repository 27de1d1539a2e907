//! Replacements of `collectives/kernels/symmpool/impl/ptx.cuh` for kernels: the same functions on a CPU. A thread lets
//! others run before it reads memory that they may write.

#pragma once

namespace symmpool {

// Ends the process where a device reports a misaligned address.
inline void check_vector(const void* at) {
    if (reinterpret_cast<unsigned long long>(at) % 16 != 0) {
        __builtin_trap();
    }
}

// Each half of eight bytes is atomic, which is all that LL words need; others may write between the two halves.
inline uint4 load_relaxed(const void* from) {
    check_vector(from);
    emulated::emulated_look();
    const unsigned long long* halves = static_cast<const unsigned long long*>(from);
    const unsigned long long low = __atomic_load_n(halves, __ATOMIC_RELAXED);
    emulated::emulated_between();
    const unsigned long long high = __atomic_load_n(halves + 1, __ATOMIC_RELAXED);
    return make_uint4(static_cast<unsigned>(low), static_cast<unsigned>(low >> 32),
                      static_cast<unsigned>(high), static_cast<unsigned>(high >> 32));
}

inline uint4 load_acquire_vector(const void* from) {
    uint4 value = load_relaxed(from);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return value;
}

inline void store_relaxed(void* to, uint4 value) {
    check_vector(to);
    emulated::emulated_act();
    unsigned long long* halves = static_cast<unsigned long long*>(to);
    __atomic_store_n(halves, static_cast<unsigned long long>(value.y) << 32 | value.x, __ATOMIC_RELAXED);
    emulated::emulated_act();
    __atomic_store_n(halves + 1, static_cast<unsigned long long>(value.w) << 32 | value.z, __ATOMIC_RELAXED);
}

inline uint4 load_line(const void* from) {
    uint4 value;
    emulated::emulated_load_line(from, &value);
    return value;
}

inline void store_line(void* to, uint4 value) { emulated::emulated_store_line(to, &value); }

inline unsigned long long load_acquire(const unsigned long long* from) {
    emulated::emulated_look();
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

inline void store_release(unsigned long long* to, unsigned long long value) {
    emulated::emulated_act();
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Blocks that poll sleep between their looks, so these take longer than the clock.
inline bool is_time_for_clock(unsigned looks) { return (looks & 31) == 0; }

inline unsigned long long nanoseconds() {
    emulated::emulated_look();
    return emulated::emulated_nanoseconds();
}

inline void wait_for_stream() {}
inline void begin_kernel(bool = false) {}

inline bool barrier_of_warps(unsigned barrier, unsigned threads, bool predicate) {
    return emulated::emulated_group(barrier, threads, predicate);
}

// --- bulk copies, each as late as it may be: loads when they are awaited, stores when their end is
//
// A race ends the process: memory that is loaded before a store has read it, waits for what never comes.

// Three ranks have devices without them, so that both ways are run.
#if defined(WORLD) && WORLD == 3
constexpr bool HAS_BULK_COPIES = false;
#else
constexpr bool HAS_BULK_COPIES = true;
#endif

struct BulkCopy {
    char* to;
    const char* from;
    unsigned bytes;
    unsigned long long* arrival;  // for a load
    bool is_read;                 // for a store: `data` has what it stores
    char data[8192];
};

// Copies that have begun and not ended, of the one thread of a block that makes any.
struct BulkQueue {
    static constexpr unsigned MAX_COPIES = 64;
    BulkCopy copies[MAX_COPIES];
    unsigned first = 0, next = 0;

    BulkCopy& operator[](unsigned nth) { return copies[nth % MAX_COPIES]; }
    void push(const BulkCopy& copy) {
        if (next - first == MAX_COPIES || copy.bytes > sizeof copy.data) {
            __builtin_trap();
        }
        (*this)[next++] = copy;
    }
};
static thread_local BulkQueue bulk_loads, bulk_stores;

// It holds how many loads have arrived.
inline void make_mbarrier(unsigned long long* arrival) {
    if (bulk_loads.first != bulk_loads.next || bulk_stores.first != bulk_stores.next) {
        __builtin_trap();  // a block before has ended with copies under way
    }
    *arrival = 0;
}

inline void bulk_load(void* shared, const void* from, unsigned bytes, unsigned long long* arrival) {
    char* to = static_cast<char*>(shared);
    for (unsigned nth = bulk_stores.first; nth != bulk_stores.next; ++nth) {
        const BulkCopy& store = bulk_stores[nth];
        if (!store.is_read && store.from < to + bytes && to < store.from + store.bytes) {
            __builtin_trap();
        }
    }
    __builtin_memset(shared, 0xee, bytes);
    bulk_loads.push({to, static_cast<const char*>(from), bytes, arrival, false, {}});
}

inline void await_mbarrier(unsigned long long* arrival, unsigned nth) {
    while (*arrival == 0 || ((*arrival - 1) & 1) != (nth & 1)) {
        if (bulk_loads.first == bulk_loads.next) {
            __builtin_trap();
        }
        BulkCopy& load = bulk_loads[bulk_loads.first++];
        emulated::emulated_copy(load.to, load.from, load.bytes);
        *load.arrival += 1;
    }
}

inline void end_first_bulk_store() {
    BulkCopy& store = bulk_stores[bulk_stores.first++];
    emulated::emulated_act();
    emulated::emulated_copy(store.to, store.is_read ? store.data : store.from, store.bytes);
}

inline void bulk_store(void* to, const void* shared, unsigned bytes) {
    // A store may end at any time.
    if (bulk_stores.next - bulk_stores.first == BulkQueue::MAX_COPIES) {
        end_first_bulk_store();
    }
    bulk_stores.push({static_cast<char*>(to), static_cast<const char*>(shared), bytes, nullptr, false, {}});
}

template <unsigned LEFT> void await_bulk_reads() {
    for (unsigned nth = bulk_stores.first; bulk_stores.next - nth > LEFT; ++nth) {
        BulkCopy& store = bulk_stores[nth];
        if (!store.is_read) {
            __builtin_memcpy(store.data, store.from, store.bytes);
            store.is_read = true;
        }
    }
}

template <unsigned LEFT> void await_bulk_stores() {
    while (bulk_stores.next - bulk_stores.first > LEFT) {
        end_first_bulk_store();
    }
}

// --- conversions, ties to even

inline unsigned short f32_to_bf16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fff;
    }
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline unsigned f32_to_bf16x2(float low, float high) {
    return f32_to_bf16(low) | static_cast<unsigned>(f32_to_bf16(high)) << 16;
}

inline float f16_to_f32(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    const unsigned wide = exponent == 31 ? 255 : exponent + 112;
    return __uint_as_float(sign | wide << 23 | fraction << 13);
}

inline unsigned short f32_to_f16(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0x7fff;
    }
    if (magnitude >= 0x477ff000u) {  // half way to what is no half any more
        return static_cast<unsigned short>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {
        // Adding this leaves a subnormal's bits at the bottom, rounded.
        const float aligned = __uint_as_float(magnitude) + 0.5f;
        return static_cast<unsigned short>(sign | (__float_as_uint(aligned) - 0x3f000000u));
    }
    return static_cast<unsigned short>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

inline unsigned f32_to_f16x2(float low, float high) {
    return f32_to_f16(low) | static_cast<unsigned>(f32_to_f16(high)) << 16;
}

inline unsigned add_bf16x2(unsigned a, unsigned b) {
    const auto low = [](unsigned pair) { return __uint_as_float(pair << 16); };
    const auto high = [](unsigned pair) { return __uint_as_float(pair & 0xffff0000u); };
    return f32_to_bf16x2(low(a) + low(b), high(a) + high(b));
}

inline unsigned add_f16x2(unsigned a, unsigned b) {
    const auto at = [](unsigned pair, int by) { return f16_to_f32(static_cast<unsigned short>(pair >> by)); };
    return f32_to_f16x2(at(a, 0) + at(b, 0), at(a, 16) + at(b, 16));
}

// Instructions of later devices, which are never called.
inline unsigned e4m3x2_to_f16x2(unsigned short) { __builtin_trap(); }
inline unsigned short f32_to_e4m3x2_finite(float, float) { __builtin_trap(); }
inline unsigned short f32_to_e5m2x2_finite(float, float) { __builtin_trap(); }

}  // namespace symmpool
