//! Streams, events and graphs: a stream is a thread; while it is captured, a list of what is to run.

#include "streams.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include <time.h>

namespace emulated {

namespace {

// Something that others wait for.
struct Done {
    bool is = false;
    unsigned long long at = 0;
};
using Waits = std::vector<std::shared_ptr<Done>>;

struct Op {
    Work work;
    Waits after;
    std::shared_ptr<Done> done;
};

struct Node {
    Work work;
    std::vector<size_t> after;
    size_t lane;
};

}  // namespace

struct Graph {
    std::vector<Node> nodes;
    size_t lanes = 0;
};

namespace {

// A capture that is under way.
struct Capture {
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    Stream* origin;
    std::set<Stream*> streams;
    unsigned long long id;
    // Whether there was a call that a capture cannot have, so that it ends in an error.
    bool is_spoiled = false;
    bool has_ended = false;
};

}  // namespace

struct Stream {
    bool waits_for_default;
    std::deque<Op> ops;
    std::shared_ptr<Done> last;
    bool ends = false;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> tails;  // the nodes that the next one depends on
    size_t lane = 0;
};

struct Event {
    std::shared_ptr<Done> done;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> tails;
};

namespace {

// `CU_STREAM_PER_THREAD`: the handle of another stream in each thread. The smaller ones are the default stream's.
constexpr size_t PER_THREAD = 2;

// Never destroyed: streams may still be at work when the process ends.
struct State {
    std::mutex lock;
    std::condition_variable changed;
    std::set<Stream*> streams;
    Stream* of_default = nullptr;
    // Threads of the blocks that are running; kernels in the order of their launches.
    unsigned taken = 0;
    unsigned blocks = 0;
    unsigned long long next_kernel = 0, turn = 0, captures = 0;
    // Captures under way that threads must not disturb by what waits or asks, unless their mode is relaxed.
    std::set<std::shared_ptr<Capture>> global_captures;
};
State& state = *new State();
using Held = std::unique_lock<std::mutex>;

void finish(Held&, Done& done) {
    done.is = true;
    done.at = emulated_nanoseconds();
    state.changed.notify_all();
}

void await(Held& held, const Waits& waits) {
    for (const auto& each : waits) {
        state.changed.wait(held, [&] { return each == nullptr || each->is; });
    }
}

void serve(Stream* stream) {
    Held held(state.lock);
    for (;;) {
        state.changed.wait(held, [&] { return stream->ends || !stream->ops.empty(); });
        if (stream->ops.empty()) {
            delete stream;
            return;
        }
        Op op = std::move(stream->ops.front());
        stream->ops.pop_front();
        await(held, op.after);
        held.unlock();
        op.work();
        op.work = nullptr;
        held.lock();
        finish(held, *op.done);
    }
}

Stream* make(Held&, bool waits_for_default) {
    Stream* made = new Stream{};
    made->waits_for_default = waits_for_default;
    state.streams.insert(made);
    std::thread(serve, made).detach();
    return made;
}

Stream* default_stream(Held& held) {
    if (state.of_default == nullptr) {
        state.of_default = make(held, false);
    }
    return state.of_default;
}

// The queue in which a stream's work waits. The default stream and those that wait for it have one queue.
Waits order(Stream* stream) {
    Waits found;
    if (stream == state.of_default) {
        for (Stream* other : state.streams) {
            if (other->waits_for_default && other->last != nullptr) {
                found.push_back(other->last);
            }
        }
    } else if (stream->waits_for_default && state.of_default != nullptr) {
        found.push_back(state.of_default->last);
    }
    return found;
}

void append(Held&, Stream* stream, Work work, Waits after) {
    if (stream->capture != nullptr) {
        Graph& graph = *stream->capture->graph;
        graph.nodes.push_back({std::move(work), stream->tails, stream->lane});
        stream->tails = {graph.nodes.size() - 1};
        return;
    }
    for (auto& each : order(stream)) {
        after.push_back(each);
    }
    stream->last = std::make_shared<Done>();
    stream->ops.push_back({std::move(work), std::move(after), stream->last});
    state.changed.notify_all();
}

void run_graph(const Graph& graph) {
    std::vector<Done> done(graph.nodes.size());
    auto lane = [&](size_t number) {
        for (size_t at = 0; at < graph.nodes.size(); ++at) {
            const Node& node = graph.nodes[at];
            if (node.lane != number) {
                continue;
            }
            Held held(state.lock);
            for (size_t before : node.after) {
                state.changed.wait(held, [&] { return done[before].is; });
            }
            held.unlock();
            node.work();
            held.lock();
            finish(held, done[at]);
        }
    };
    std::vector<std::thread> others;
    for (size_t number = 1; number < graph.lanes; ++number) {
        others.emplace_back(lane, number);
    }
    lane(0);
    for (std::thread& other : others) {
        other.join();
    }
}

}  // namespace

Stream* stream_of(void* handle) {
    Held held(state.lock);
    const size_t number = reinterpret_cast<size_t>(handle);
    if (number < PER_THREAD) {
        return default_stream(held);
    }
    if (number == PER_THREAD) {
        thread_local Stream* of_thread = make(held, true);
        return of_thread;
    }
    Stream* stream = static_cast<Stream*>(handle);
    return state.streams.count(stream) ? stream : nullptr;
}

Stream* new_stream(bool waits_for_default) {
    Held held(state.lock);
    return make(held, waits_for_default);
}

void drop_stream(Stream* stream) {
    Held held(state.lock);
    state.streams.erase(stream);
    stream->ends = true;
    state.changed.notify_all();
}

void put(Stream* stream, Work work) {
    Held held(state.lock);
    append(held, stream, std::move(work), {});
}

void synchronize(Stream* stream) {
    Held held(state.lock);
    Waits all = order(stream);
    all.push_back(stream->last);
    await(held, all);
}

bool is_idle(Stream* stream) {
    Held held(state.lock);
    Waits all = order(stream);
    all.push_back(stream->last);
    for (const auto& each : all) {
        if (each != nullptr && !each->is) {
            return false;
        }
    }
    return true;
}

void synchronize_all() {
    Held held(state.lock);
    Waits all;
    for (Stream* stream : state.streams) {
        all.push_back(stream->last);
    }
    await(held, all);
}

void run_in_order(const Work& work) {
    Held held(state.lock);
    Stream* stream = default_stream(held);
    append(held, stream, work, {});
    await(held, {stream->last});
}

Event* new_event() { return new Event{}; }
void drop_event(Event* event) { delete event; }

void spoil(const std::shared_ptr<Capture>& capture) {
    if (capture != nullptr) {
        capture->is_spoiled = true;
    }
}

void record(Event* event, Stream* stream) {
    Held held(state.lock);
    event->capture = stream->capture;
    if (stream->capture != nullptr) {
        event->tails = stream->tails;
        return;
    }
    append(held, stream, [] {}, {});
    event->done = stream->last;
}

Crossing wait(Stream* stream, Event* event) {
    Held held(state.lock);
    if (event->capture != nullptr && event->capture->has_ended) {
        spoil(stream->capture);
        return Crossing::ENDED;
    }
    if (stream->capture != nullptr && event->capture == nullptr && event->done != nullptr) {
        spoil(stream->capture);
        return Crossing::ISOLATION;
    }
    if (stream->capture != nullptr && event->capture != nullptr && stream->capture != event->capture) {
        spoil(stream->capture);
        spoil(event->capture);
        return Crossing::MERGE;
    }
    if (event->capture != nullptr) {
        if (stream->capture == nullptr) {
            stream->capture = event->capture;
            stream->tails.clear();
            stream->lane = ++event->capture->graph->lanes - 1;
            event->capture->streams.insert(stream);
        }
        stream->tails.insert(stream->tails.end(), event->tails.begin(), event->tails.end());
    } else if (event->done != nullptr) {
        append(held, stream, [] {}, {event->done});
    }
    return Crossing::NONE;
}

Crossing is_done(Event* event, bool* done) {
    Held held(state.lock);
    if (event->capture != nullptr) {
        bool ended = event->capture->has_ended;
        spoil(event->capture);
        return ended ? Crossing::ENDED : Crossing::CAPTURED;
    }
    *done = event->done == nullptr || event->done->is;
    return Crossing::NONE;
}

void synchronize(Event* event) {
    Held held(state.lock);
    await(held, {event->done});
}

bool elapsed(double* milliseconds, Event* from, Event* to) {
    Held held(state.lock);
    if (!from->done || !to->done || !from->done->is || !to->done->is) {
        return false;
    }
    *milliseconds = (static_cast<double>(to->done->at) - static_cast<double>(from->done->at)) / 1e6;
    return true;
}

bool is_capturing(Stream* stream) {
    Held held(state.lock);
    return stream->capture != nullptr;
}

bool spoil_capture(Stream* stream) {
    Held held(state.lock);
    spoil(stream->capture);
    return stream->capture != nullptr;
}

unsigned long long capture_of(Stream* stream) {
    Held held(state.lock);
    return stream->capture == nullptr ? 0 : stream->capture->id;
}

bool spoil_global_captures() {
    Held held(state.lock);
    for (const auto& capture : state.global_captures) {
        spoil(capture);
    }
    return !state.global_captures.empty();
}

bool begin_capture(Stream* stream, bool is_global) {
    Held held(state.lock);
    if (stream->capture != nullptr || stream == state.of_default) {
        return false;
    }
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->streams.insert(stream);
    stream->capture->graph->lanes = 1;
    stream->capture->id = ++state.captures;
    if (is_global) {
        state.global_captures.insert(stream->capture);
    }
    stream->tails.clear();
    stream->lane = 0;
    return true;
}

Graph* end_capture(Stream* stream) {
    Held held(state.lock);
    std::shared_ptr<Capture> capture = stream->capture;
    if (capture == nullptr || capture->origin != stream) {
        return nullptr;
    }
    for (Stream* other : capture->streams) {
        other->capture = nullptr;
        other->tails.clear();
    }
    capture->has_ended = true;
    state.global_captures.erase(capture);
    return capture->is_spoiled ? nullptr : new Graph(*capture->graph);
}

void put(Stream* stream, Graph* graph) {
    // The graph may be destroyed before it has run.
    auto kept = std::make_shared<Graph>(*graph);
    put(stream, [kept] { run_graph(*kept); });
}

void drop_graph(Graph* graph) { delete graph; }
Graph* copy(Graph* graph) { return new Graph(*graph); }

void be_late_by_chance() {
    thread_local unsigned long long luck = emulated_nanoseconds();
    luck = luck * 6364136223846793005ull + 1442695040888963407ull;
    if (luck >> 61 == 0) {
        const timespec late = {0, static_cast<long>(luck >> 33 & 0x3ffff)};
        nanosleep(&late, nullptr);
    }
}

void run_kernel(const Call& call, Shape shape, unsigned room, unsigned places) {
    be_late_by_chance();
    std::vector<std::thread> clusters;
    Held held(state.lock);
    const unsigned long long mine = state.next_kernel++;
    state.changed.wait(held, [&] { return state.turn == mine; });
    const unsigned together = call.cluster;
    const unsigned threads = together * std::min(shape.threads, static_cast<unsigned>(PROCESSOR_THREADS));
    for (unsigned first = 0; first < shape.blocks; first += together) {
        state.changed.wait(held, [&] {
            return state.taken == 0 || (state.taken + threads <= room && state.blocks + together <= places);
        });
        state.taken += threads;
        state.blocks += together;
        clusters.emplace_back([&call, shape, first, together, threads] {
            run_cluster(call, shape, first);
            Held held(state.lock);
            state.taken -= threads;
            state.blocks -= together;
            state.changed.notify_all();
        });
    }
    // Blocks of the next kernel begin only after all blocks of this one have.
    state.turn += 1;
    state.changed.notify_all();
    held.unlock();
    for (std::thread& cluster : clusters) {
        cluster.join();
    }
}

}  // namespace emulated
