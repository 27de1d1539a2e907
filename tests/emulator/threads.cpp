//! The threads of a block, or of the blocks of a cluster, as fibers of one thread of the process.
//!
//! They take turns in an order that is random in every round, and yield where the threads of a device could be
//! interrupted: at accesses to memory that others write, at barriers and at votes. What would hang a device or have
//! undefined results ends the process: threads of a warp at different votes, or a barrier that some never reach.

#include "threads.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace emulated {
namespace {

constexpr size_t STACK_BYTES = 128 << 10;
// Stacks begin at different places of their pages, as those of all threads would share a few lines of the caches.
constexpr size_t STACK_SHIFT = 320, STACK_SHIFTS = 100;
constexpr unsigned WARP = 32;
// How many line accesses a thread of a group may be ahead of another.
constexpr unsigned AHEAD = 64;
// For how many rounds a block of a cluster is the one that gets ahead.
constexpr unsigned ROUNDS_AHEAD = 256;
// After how many rounds without progress a block sleeps, and for how many nanoseconds: the first time, and at most.
constexpr unsigned PATIENCE = 8;
constexpr long NAP = 50000;
constexpr long LONGEST_NAP = 1000000;

// Where a fiber, or the scheduler, goes on, for the compiler's own setjmp and longjmp. Those of the C library look through
// clean-up handlers each time, which takes longer than most fibers run. As a function may not both set a context and go on
// there, those that do either are not inlined.
using Context = void* [5];
[[noreturn]] __attribute__((noinline)) void go_on(Context& context) { __builtin_longjmp(context, 1); }

struct Line {
    unsigned long long nth = 0;  // the number of this access in its group, from 1 on
    const char* at = nullptr;
    unsigned came = 0;
    uint4 parts[8];
};

// Eight threads that access lines of 128 bytes together.
struct LineGroup {
    Line loads[AHEAD], stores[AHEAD];
};

struct Warp {
    unsigned long long values[2][WARP];
    char kinds[WARP];
    unsigned waiting = 0, live = 0, ended = 0, turn = 0;
    unsigned without[2];  // the threads that had ended at the time of the vote
};

// A barrier of some warps of a block.
struct GroupBarrier {
    unsigned waiting = 0;
    int predicate = 0, answer = 0;
};

constexpr unsigned BARRIERS = 16;

enum State { READY, AT_CLUSTER, AT_BLOCK, AT_GROUP, AT_WARP, ENDED };

struct Block;

struct Fiber {
    Place place;
    Block* block;
    State state = READY;
    unsigned barrier = 0;  // which one it is at
    bool begun = false;
    Context here;
    void* stack = nullptr;
    unsigned long long loads = 0, stores = 0;
};

struct Block {
    std::span<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<std::unique_ptr<LineGroup>> groups;  // made when one first accesses a line: each takes 20 KB
    unsigned live = 0, waiting = 0;
    int predicate = 0, answer = 0;
    GroupBarrier barriers[BARRIERS];
};

// Cluster that one thread of the process runs.
struct Cluster {
    const Call* call;
    std::vector<Fiber> fibers;  // those of all blocks, one after the other
    std::vector<Block> blocks;
    Context scheduler;
    unsigned live = 0, waiting = 0;
    // Whether a thread made progress in this round, and how many rounds had none.
    bool moved = false;
    unsigned idle = 0;
    unsigned long long luck;
};

__thread Cluster* cluster_here = nullptr;
__thread Fiber* fiber_here = nullptr;

std::mutex stacks_lock;
std::vector<void*>* const free_stacks = new std::vector<void*>();

void* take_stack() {
    {
        std::lock_guard<std::mutex> held(stacks_lock);
        if (!free_stacks->empty()) {
            void* found = free_stacks->back();
            free_stacks->pop_back();
            return found;
        }
    }
    void* made = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
        perror("emulated device: a thread's stack");
        abort();
    }
    return made;
}

void give_stack(void* stack) {
    std::lock_guard<std::mutex> held(stacks_lock);
    free_stacks->push_back(stack);
}

[[noreturn]] void refuse(const char* what) {
    const Place& place = fiber_here->place;
    fprintf(stderr, "emulated device: block %u of %u, thread %u of %u: %s\n", place.block.x,
            place.grid_dim.x, place.thread.x, place.block_dim.x, what);
    abort();
}

// xorshift64*. Any order will do.
unsigned long long drawn() {
    unsigned long long& luck = cluster_here->luck;
    luck ^= luck >> 12, luck ^= luck << 25, luck ^= luck >> 27;
    return luck * 0x2545f4914f6cdd1dull;
}

__attribute__((noinline)) void back_to_scheduler() {
    if (__builtin_setjmp(fiber_here->here) == 0) {
        go_on(cluster_here->scheduler);
    }
}

void release_cluster() {
    cluster_here->moved = true;
    cluster_here->waiting = 0;
    for (Fiber& fiber : cluster_here->fibers) {
        if (fiber.state == AT_CLUSTER) {
            fiber.state = READY;
        }
    }
}

void release_block(Block& block) {
    cluster_here->moved = true;
    block.answer = block.predicate;
    block.predicate = 0;
    block.waiting = 0;
    for (Fiber& fiber : block.fibers) {
        if (fiber.state == AT_BLOCK) {
            fiber.state = READY;
        }
    }
}

void release_warp(Block& block, unsigned number) {
    Warp& warp = block.warps[number];
    warp.waiting = 0;
    warp.without[warp.turn] = warp.ended;
    warp.turn ^= 1;
    char kind = 0;
    for (unsigned lane = 0; lane < WARP; ++lane) {
        const size_t at = number * size_t{WARP} + lane;
        if (at >= block.fibers.size() || block.fibers[at].state != AT_WARP) {
            continue;
        }
        if (kind != 0 && kind != warp.kinds[lane]) {
            refuse("threads of its warp are at different votes");
        }
        kind = warp.kinds[lane];
        block.fibers[at].state = READY;
    }
}

void ended() {
    Fiber& fiber = *fiber_here;
    Block& block = *fiber.block;
    fiber.state = ENDED;
    cluster_here->moved = true;
    const unsigned number = fiber.place.thread.x / WARP;
    Warp& warp = block.warps[number];
    warp.ended |= 1u << fiber.place.thread.x % WARP;
    warp.live -= 1;
    block.live -= 1;
    cluster_here->live -= 1;
    // Threads that have ended are not waited for.
    if (warp.waiting != 0 && warp.waiting == warp.live) {
        release_warp(block, number);
    }
    if (block.waiting != 0 && block.waiting == block.live) {
        release_block(block);
    }
    if (cluster_here->waiting != 0 && cluster_here->waiting == cluster_here->live) {
        release_cluster();
    }
}

void enter() {
    cluster_here->call->run(cluster_here->call->arguments);
    ended();
    go_on(cluster_here->scheduler);
}

__attribute__((noinline)) void resume(Fiber& fiber) {
    fiber_here = &fiber;
    emulated_place = &fiber.place;
    if (__builtin_setjmp(cluster_here->scheduler) != 0) {
        return;
    }
    if (fiber.begun) {
        go_on(fiber.here);
    }
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    fiber.stack = take_stack();
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = STACK_BYTES - fiber.place.thread.x % STACK_SHIFTS * STACK_SHIFT;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

LineGroup& line_group() {
    std::unique_ptr<LineGroup>& group = fiber_here->block->groups[fiber_here->place.thread.x / 8];
    if (group == nullptr) {
        group = std::make_unique<LineGroup>();
    }
    return *group;
}

Line& line_of(Line (&lines)[AHEAD], unsigned long long nth) {
    Line& line = lines[nth % AHEAD];
    if (line.nth != nth) {
        if (line.came % 8 != 0) {
            refuse("a line of 128 bytes was left to fewer than eight threads");
        }
        line.nth = nth;
        line.came = 0;
    }
    return line;
}

char* line_at(Line& line, const void* address) {
    const size_t whole = reinterpret_cast<size_t>(address);
    char* at = reinterpret_cast<char*>(whole / 128 * 128);
    if (line.came == 0) {
        line.at = at;
    }
    if (line.at != at || whole % 128 / 16 != fiber_here->place.thread.x % 8) {
        refuse("eight threads are not at the parts of one line of 128 bytes");
    }
    return at;
}

void copy_half(void* to, const void* from) {
    const unsigned long long* source = static_cast<const unsigned long long*>(from);
    unsigned long long* target = static_cast<unsigned long long*>(to);
    __atomic_store_n(target, __atomic_load_n(source, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
}

// Runs every thread that can go on once, beginning with any, in one of two directions; or those of one block alone. Returns
// whether there were any.
bool run_round(const Block* alone) {
    std::vector<Fiber>& fibers = cluster_here->fibers;
    const unsigned long long luck = drawn();
    const size_t from = luck % fibers.size();
    const bool back = luck >> 40 & 1;
    bool ran = false;
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[(from + (back ? fibers.size() - i : i)) % fibers.size()];
        if (fiber.state == READY && (alone == nullptr || fiber.block == alone)) {
            ran = true;
            resume(fiber);
        }
    }
    return ran;
}

void check_lines(const LineGroup& group) {
    for (const Line& line : group.stores) {
        if (line.came % 8 != 0) {
            refuse("a line of 128 bytes was stored by fewer than eight threads");
        }
    }
}

}  // namespace

void run_cluster(const Call& call, Shape shape, unsigned first) {
    static std::atomic<unsigned long long> runs{0};
    Cluster cluster;
    cluster.call = &call;
    cluster.blocks.resize(call.cluster);
    const unsigned all = call.cluster * shape.threads;
    cluster.fibers.resize(all);
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    cluster.luck = (now.tv_nsec ^ getpid() * 0x9e3779b97f4a7c15ull ^ runs++ << 40) | 1;
    for (unsigned nth = 0; nth < call.cluster; ++nth) {
        Block& block = cluster.blocks[nth];
        block.fibers = std::span(cluster.fibers).subspan(nth * shape.threads, shape.threads);
        block.warps.resize((shape.threads + WARP - 1) / WARP);
        block.groups.resize((shape.threads + 7) / 8);
        for (unsigned i = 0; i < shape.threads; ++i) {
            block.fibers[i].place = {{i, 0, 0}, {first + nth, 0, 0}, {shape.threads, 1, 1}, {shape.blocks, 1, 1}};
            block.fibers[i].block = &block;
            block.warps[i / WARP].live += 1;
        }
        block.live = shape.threads;
    }
    cluster.live = all;
    cluster_here = &cluster;
    const Block* ahead = nullptr;
    for (unsigned round = 0; cluster.live != 0; ++round) {
        // A block gets far ahead of its neighbours: they wait while it moves.
        if (call.cluster > 1 && round % ROUNDS_AHEAD == 0) {
            ahead = &cluster.blocks[(drawn() >> 32) % call.cluster];
        }
        cluster.moved = false;
        if (!(ahead != nullptr && cluster.idle == 0 && run_round(ahead)) && !run_round(nullptr)) {
            refuse("threads are at a barrier or a vote that others never come to");
        }
        // Blocks that only poll leave the processor to those that they wait for. They sleep longer each time, as what
        // takes long, such as compiling another rank's kernel, may take longer still.
        cluster.idle = cluster.moved ? 0 : cluster.idle + 1;
        if (cluster.idle > PATIENCE) {
            const long naps = cluster.idle - PATIENCE;
            const timespec pause = {0, naps < LONGEST_NAP / NAP ? naps * NAP : LONGEST_NAP};
            nanosleep(&pause, nullptr);
        } else if (cluster.idle != 0) {
            sched_yield();
        }
    }
    for (Fiber& fiber : cluster.fibers) {
        give_stack(fiber.stack);
    }
    for (const Block& block : cluster.blocks) {
        for (const std::unique_ptr<LineGroup>& group : block.groups) {
            if (group != nullptr) {
                check_lines(*group);
            }
        }
    }
    cluster_here = nullptr;
    fiber_here = nullptr;
}

extern "C" {

__thread Place* emulated_place = nullptr;

void emulated_look() { back_to_scheduler(); }

void emulated_between() {
    if (drawn() >> 61 == 0) {  // once in eight calls
        back_to_scheduler();
    }
}

void emulated_act() {
    cluster_here->moved = true;
    emulated_between();
}

void emulated_cluster() {
    cluster_here->waiting += 1;
    fiber_here->state = AT_CLUSTER;
    if (cluster_here->waiting == cluster_here->live) {
        release_cluster();
    }
    back_to_scheduler();
}

void emulated_neighbour(unsigned block) {
    if (cluster_here->blocks[block].live == 0) {
        refuse("a block of its cluster whose shared memory it needs has ended");
    }
}

int emulated_block(int predicate) {
    Block& block = *fiber_here->block;
    block.predicate |= predicate != 0;
    block.waiting += 1;
    fiber_here->state = AT_BLOCK;
    if (block.waiting == block.live) {
        release_block(block);
    }
    back_to_scheduler();
    return block.answer;
}

int emulated_group(unsigned number, unsigned threads, int predicate) {
    Block& block = *fiber_here->block;
    if (number == 0 || number >= BARRIERS || threads % WARP != 0 || threads > block.fibers.size()) {
        refuse("a barrier of some warps that there is not, or of parts of warps");
    }
    GroupBarrier& barrier = block.barriers[number];
    barrier.predicate |= predicate != 0;
    barrier.waiting += 1;
    fiber_here->state = AT_GROUP;
    fiber_here->barrier = number;
    if (barrier.waiting == threads) {
        cluster_here->moved = true;
        barrier.answer = barrier.predicate;
        barrier.predicate = 0;
        barrier.waiting = 0;
        for (Fiber& fiber : block.fibers) {
            if (fiber.state == AT_GROUP && fiber.barrier == number) {
                fiber.state = READY;
            }
        }
    }
    back_to_scheduler();
    return barrier.answer;
}

const unsigned long long* emulated_warp(unsigned long long value, char kind, unsigned* ended) {
    Block& block = *fiber_here->block;
    const unsigned thread = fiber_here->place.thread.x, number = thread / WARP, lane = thread % WARP;
    Warp& warp = block.warps[number];
    const unsigned turn = warp.turn;
    warp.values[turn][lane] = value;
    warp.kinds[lane] = kind;
    warp.waiting += 1;
    fiber_here->state = AT_WARP;
    if (warp.waiting == warp.live) {
        release_warp(block, number);
    }
    back_to_scheduler();
    *ended = warp.without[turn];
    return warp.values[turn];
}

void emulated_load_line(const void* from, uint4* value) {
    emulated_look();
    LineGroup& group = line_group();
    Line& line = line_of(group.loads, ++fiber_here->loads);
    const char* at = line_at(line, from);
    if (line.came++ == 0) {
        // The flags, which are last, are read before the data.
        for (int half = 15; half >= 0; --half) {
            copy_half(reinterpret_cast<char*>(line.parts) + 8 * half, at + 8 * half);
        }
    }
    *value = line.parts[fiber_here->place.thread.x % 8];
}

void emulated_store_line(void* to, const uint4* value) {
    LineGroup& group = line_group();
    Line& line = line_of(group.stores, ++fiber_here->stores);
    char* at = line_at(line, to);
    cluster_here->moved = true;
    line.parts[fiber_here->place.thread.x % 8] = *value;
    if (++line.came == 8) {
        for (int half = 0; half < 16; ++half) {
            copy_half(at + 8 * half, reinterpret_cast<const char*>(line.parts) + 8 * half);
        }
    }
}

unsigned long long emulated_nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull + now.tv_nsec;
}
}

}  // namespace emulated
