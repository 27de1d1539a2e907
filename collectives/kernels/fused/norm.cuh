//! What follows a sum of all ranks in a fused all-reduce: a bias and the residual are added, rows are normed by their root
//! mean square, and the result is stored as it is or as 8-bit floats with scales.
//! Defines: WORLD, DTYPE (F32, F16 or BF16), PROTOCOL (LAMPORT), BLOCKS (1), THREADS, UNITS, HELD, OUTPUT (SUM_ONLY, NORM,
//! FP8_STATIC, FP8_TOKEN or FP8_GROUP).
//!
//! A row is the hidden vector of one token. A block has one row at a time, whose elements are in units of eight: thread
//! `t` has the units `t`, `t + THREADS`, and so on. THREADS follows from the length of a row alone, and so does the tree
//! in which squares are added up: a thread adds the squares of its units one after the other, and the threads' sums are
//! added in pairs of neighbours. So bits depend neither on the number of blocks nor on the algorithm (rule S7), and
//! `host/kernels/norm.rs` gives the same ones.
//!
//! Each step is rounded to the element type as separate operations would round it: the sum, the sum with the bias, the
//! sum with the residual, and the norm before it is quantised.

#pragma once

#include <fused/norm_layout.cuh>
#include <symmpool/impl/comm.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// Outputs that are made of the sum with the residual.
enum class Output { SUM_ONLY, NORM, FP8_STATIC, FP8_TOKEN, FP8_GROUP };
constexpr Output MADE = Output::OUTPUT;
constexpr bool QUANTIZES = MADE != Output::SUM_ONLY && MADE != Output::NORM;

constexpr u32 LANES_OF_UNIT = 8;
constexpr u32 GROUP_UNITS = 16;  // units that share a scale in FP8_GROUP
// Vectors of 16 bytes in a unit.
constexpr u32 PARTS = DTYPE == F32 ? 2 : 1;
constexpr u32 PART_LANES = LANES_OF_UNIT / PARTS;
constexpr u32 UNIT_BYTES = 16 * PARTS;
constexpr u32 ROW_WARPS = THREADS / 32;

// The largest number of the 8-bit type, and the least scales, which are those of vLLM's kernels.
constexpr float LARGEST = 448.0f;
constexpr float MIN_TOKEN_SCALE = 1.0f / (448.0f * 512.0f);
constexpr float MIN_GROUP_MAXIMUM = 1e-10f;

static_assert(LANES<DTYPE> == PART_LANES, "a type of 16 or 32 bits");

struct Unit {
    uint4 parts[PARTS];
};

struct Wide {
    float lanes[LANES_OF_UNIT];
};

__device__ __forceinline__ Unit load_unit(const char* row, u32 unit) {
    Unit found;
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        found.parts[part] = load_plain(row + UNIT_BYTES * unit + 16 * part);
    }
    return found;
}

__device__ __forceinline__ void store_unit(char* row, u32 unit, const Unit& value) {
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        store_plain(row + UNIT_BYTES * unit + 16 * part, value.parts[part]);
    }
}

__device__ __forceinline__ Wide widen(const Unit& unit) {
    Wide wide;
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        float some[PART_LANES];
        unpack<DTYPE, float>(unit.parts[part], some);
#pragma unroll
        for (u32 i = 0; i < PART_LANES; ++i) {
            wide.lanes[part * PART_LANES + i] = some[i];
        }
    }
    return wide;
}

__device__ __forceinline__ Unit narrow(const Wide& wide) {
    Unit unit;
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        float some[PART_LANES];
#pragma unroll
        for (u32 i = 0; i < PART_LANES; ++i) {
            some[i] = wide.lanes[part * PART_LANES + i];
        }
        unit.parts[part] = pack<DTYPE, float>(some);
    }
    return unit;
}

// The rounded sum of two units.
__device__ __forceinline__ Unit plus(const Unit& a, const Unit& b) {
    Unit sum;
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
        sum.parts[part] = Reduce<DTYPE, SUM>::plus(a.parts[part], b.parts[part]);
    }
    return sum;
}

// Units of a row, as this thread has them.
struct Units {
    u32 count;
    u32 steps;  // in each of which a thread has UNITS units

    __device__ __forceinline__ explicit Units(const NormWork& work)
        : count(work.hidden / LANES_OF_UNIT),
          steps(HELD ? 1 : (count + UNITS * THREADS - 1) / (UNITS * THREADS)) {}

    __device__ __forceinline__ u32 index(u32 step, u32 nth) const {
        return (step * UNITS + nth) * THREADS + threadIdx.x;
    }
    // Index of a unit, or of the row's last one in place of units that it does not have: to read this once more costs less
    // than to find out that there is nothing to read, which keeps loads from being under way together.
    __device__ __forceinline__ u32 some_index(u32 step, u32 nth) const {
        const u32 unit = index(step, nth);
        return unit < count ? unit : count - 1;
    }
    __device__ __forceinline__ u32 vectors() const { return PARTS * count; }
    __device__ __forceinline__ u64 bytes() const { return u64{UNIT_BYTES} * count; }

    __device__ __forceinline__ void load(const char* row, u32 step, Unit (&found)[UNITS]) const {
#pragma unroll
        for (u32 nth = 0; nth < UNITS; ++nth) {
            const u32 unit = index(step, nth);
            if (unit < count) {
                found[nth] = load_unit(row, unit);
            }
        }
    }
};

__device__ __forceinline__ float greater(float a, float b) { return b > a ? b : a; }

// Rounds a scale, which is a normal number above 0, up to a power of two.
__device__ __forceinline__ float up_to_power_of_two(float scale) {
    const u32 bits = __float_as_uint(scale);
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

// Makes outputs of rows. All functions are called by all threads of the block. With KEEPS_WEIGHTS weights are loaded
// before the first row is there, and stay in registers.
template <bool KEEPS_WEIGHTS>
class Norm {
public:
    // `shared` is memory that the block's threads share.
    __device__ __forceinline__ Norm(const CallParams& its_call, const NormWork& its_work, const Units& its_units,
                                    float (&shared)[2][ROW_WARPS])
        : call(its_call), work(its_work), units(its_units), of_warps_(shared), turn_(0) {
        if (KEEPS_FACTORS) {
            units.load(work.weight, 0, weights_);
        }
        if (MADE == Output::FP8_STATIC) {
            scale_ = *work.scales;
        }
    }

    // Called once before the first row, when there is time to wait for what the constructor loads.
    __device__ __forceinline__ void begin() {
        if (KEEPS_FACTORS) {
#pragma unroll
            for (u32 nth = 0; nth < UNITS; ++nth) {
                factors_[nth] = factors(weights_[nth]);
            }
        }
        if (MADE == Output::FP8_STATIC) {
            scale_ = __fdiv_rn(1.0f, scale_);
        }
        reciprocal_ = reciprocal(static_cast<int>(work.hidden));
    }

    // Stores all outputs of a row. `take(step, units)` gives this thread's units of the row in that step, and false where
    // they did not arrive. Returns false, in all threads, if it did so in any.
    template <typename Take>
    __device__ __forceinline__ bool row(u32 token, Take take) {
        char* sums = work.residual_out + token * units.bytes();
        Unit row[UNITS];
        float squares = 0.0f;
        bool good = true;
#pragma unroll 1
        for (u32 step = 0; step < units.steps; ++step) {
            good = good && take(step, row);
            // Threads find their units at different looks. Without this a warp's threads go on in several groups, for each
            // of which the processor does the rest of the row once more.
            __syncwarp();
#pragma unroll
            for (u32 nth = 0; nth < UNITS; ++nth) {
                const u32 unit = units.index(step, nth);
                if (good && unit < units.count) {
                    store_unit(sums, unit, row[nth]);
                    squares = add_squares(squares, row[nth]);
                }
            }
        }
        if constexpr (MADE == Output::SUM_ONLY) {
            return good;
        } else {
            if (!combine(squares, good, [](float a, float b) { return add(a, b); })) {
                return false;
            }
            const float mean = divide(squares, static_cast<int>(work.hidden), reciprocal_);
            const float factor = __fdiv_rn(1.0f, __fsqrt_rn(add(mean, work.epsilon)));
            if (MADE == Output::FP8_TOKEN) {
                float most = 0.0f;
                each(sums, row, [&](u32 nth, u32, const Unit& unit, const Wide& weight) {
                    row[nth] = HELD ? normed(unit, weight, factor) : row[nth];
                    most = greater(most, largest(HELD ? row[nth] : normed(unit, weight, factor)));
                });
                combine(most, true, greater);
                scale_ = greater(__fdiv_rn(most, LARGEST), MIN_TOKEN_SCALE);
                scale_ = work.powers_of_two ? up_to_power_of_two(scale_) : scale_;
                if (threadIdx.x == 0) {
                    work.scales[token * work.scale_row] = scale_;
                }
            }
            constexpr bool IS_NORMED = MADE == Output::FP8_TOKEN && HELD;
            each(sums, row, [&](u32, u32 index, const Unit& unit, const Wide& weight) {
                store(token, index, IS_NORMED ? unit : normed(unit, weight, factor));
            });
            return true;
        }
    }

    const CallParams& call;
    const NormWork& work;
    const Units units;

private:
    static __device__ __forceinline__ float add_squares(float sum, const Unit& unit) {
        const Wide wide = widen(unit);
#pragma unroll
        for (u32 i = 0; i < LANES_OF_UNIT; ++i) {
            sum = add(sum, multiply(wide.lanes[i], wide.lanes[i]));
        }
        return sum;
    }

    static __device__ __forceinline__ float largest(const Unit& unit) {
        const Wide wide = widen(unit);
        float most = 0.0f;
#pragma unroll
        for (u32 i = 0; i < LANES_OF_UNIT; ++i) {
            most = greater(most, fabsf(wide.lanes[i]));
        }
        return most;
    }

    // Combines the threads' values in a fixed tree; all threads get the result. Returns whether all are good. Two arrays
    // take turns, so that one barrier is enough: a thread that writes into one has passed the barrier of the other.
    template <typename Join>
    __device__ __forceinline__ bool combine(float& value, bool good, Join join) {
#pragma unroll
        for (u32 apart = 1; apart < 32; apart *= 2) {
            value = join(value, __shfl_xor_sync(~0u, value, apart));
        }
        if constexpr (ROW_WARPS == 1) {
            return !__any_sync(~0u, !good);
        } else {
            turn_ ^= 1;
            if (threadIdx.x % 32 == 0) {
                of_warps_[turn_][threadIdx.x / 32] = value;
            }
            if (__syncthreads_or(!good)) {
                return false;
            }
            value = of_warps_[turn_][threadIdx.x % ROW_WARPS];
#pragma unroll
            for (u32 apart = 1; apart < ROW_WARPS; apart *= 2) {
                value = join(value, __shfl_xor_sync(~0u, value, apart));
            }
            return true;
        }
    }

    // Calls `act(nth, index, unit, weight)` for this thread's units, in all threads as often. Where rows are not held, the
    // units are read from the sums that this thread stored.
    template <typename Act>
    __device__ __forceinline__ void each(const char* sums, const Unit (&row)[UNITS], Act act) const {
#pragma unroll 1
        for (u32 step = 0; step < units.steps; ++step) {
#pragma unroll
            for (u32 nth = 0; nth < UNITS; ++nth) {
                const u32 index = units.index(step, nth);
                const bool has = index < units.count;
                if (!has && MADE != Output::FP8_GROUP) {
                    continue;
                }
                Unit unit = {};
                Wide weight = {};
                if (has) {
                    unit = HELD ? row[nth] : load_unit(sums, index);
                    weight = KEEPS_FACTORS ? factors_[nth] : factors(load_unit(work.weight, index));
                }
                act(nth, index, unit, weight);
            }
        }
    }

    // Factors of a unit: its weights and their bias.
    __device__ __forceinline__ Wide factors(const Unit& weights) const {
        Wide wide = widen(weights);
#pragma unroll
        for (u32 i = 0; i < LANES_OF_UNIT; ++i) {
            wide.lanes[i] = add(wide.lanes[i], work.weight_bias);
        }
        return wide;
    }

    static __device__ __forceinline__ Unit normed(const Unit& unit, const Wide& by, float factor) {
        Wide wide = widen(unit);
#pragma unroll
        for (u32 i = 0; i < LANES_OF_UNIT; ++i) {
            wide.lanes[i] = multiply(multiply(wide.lanes[i], factor), by.lanes[i]);
        }
        return narrow(wide);
    }

    // Stores a unit of the norm. In FP8_GROUP called by all threads, also by those that have no such unit.
    __device__ __forceinline__ void store(u32 token, u32 index, const Unit& unit) {
        const bool has = index < units.count;
        if constexpr (!QUANTIZES) {
            store_unit(call.output + token * units.bytes(), index, unit);
            return;
        }
        float scale = scale_;
        if constexpr (MADE == Output::FP8_GROUP) {
            float most = has ? largest(unit) : 0.0f;
#pragma unroll
            for (u32 apart = 1; apart < GROUP_UNITS; apart *= 2) {
                most = greater(most, __shfl_xor_sync(~0u, most, apart));
            }
            scale = __fdiv_rn(greater(most, MIN_GROUP_MAXIMUM), LARGEST);
            scale = work.powers_of_two ? up_to_power_of_two(scale) : scale;
            if (has && index % GROUP_UNITS == 0) {
                work.scales[token * work.scale_row + index / GROUP_UNITS * work.scale_group] = scale;
            }
        }
        if (!has) {
            return;
        }
        if (work.norm_out != nullptr) {
            store_unit(work.norm_out + token * units.bytes(), index, unit);
        }
        Wide wide = widen(unit);
#pragma unroll
        for (u32 i = 0; i < LANES_OF_UNIT; ++i) {
            const float lane = wide.lanes[i];
            wide.lanes[i] = MADE == Output::FP8_STATIC ? multiply(lane, scale) : __fdiv_rn(lane, scale);
        }
        u32 words[2];
#pragma unroll
        for (u32 word = 0; word < 2; ++word) {
            const float* four = wide.lanes + 4 * word;
            const u32 low = f32_to_e4m3x2(four[0], four[1]), high = f32_to_e4m3x2(four[2], four[3]);
            words[word] = low | high << 16;
        }
        char* to = call.output + u64{LANES_OF_UNIT} * units.count * token + LANES_OF_UNIT * index;
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }

    static constexpr bool KEEPS_FACTORS = MADE != Output::SUM_ONLY && HELD && KEEPS_WEIGHTS;
    Unit weights_[UNITS] = {};
    Wide factors_[UNITS];
    float (&of_warps_)[2][ROW_WARPS];
    float scale_;
    float reciprocal_;  // one divided by the elements of a row
    u32 turn_;
};

}  // namespace symmpool
