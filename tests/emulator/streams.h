//! Streams, events and graphs. The work of each stream runs on a thread of its own.

#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "threads.h"

namespace emulated {

struct Stream;
struct Event;
struct Graph;

using Work = std::function<void()>;

// The stream of a handle: the default stream, or one that `new_stream` made. Null if there is no such.
Stream* stream_of(void* handle);
Stream* new_stream(bool waits_for_default);
void drop_stream(Stream* stream);
// Puts work on the stream; while it is captured, into its graph.
void put(Stream* stream, Work work);
void synchronize(Stream* stream);
// Whether the stream has done what was put on it, and what that waits for.
bool is_idle(Stream* stream);
// Waits for all streams of the process.
void synchronize_all();
// Runs work on the default stream and waits for it.
void run_in_order(const Work& work);

Event* new_event();
void drop_event(Event* event);
void record(Event* event, Stream* stream);
// Errors where a stream and an event are not in the same capture, as CUDA gives them (seen with driver 580). All but
// `NONE` make the captures that are involved invalid.
enum class Crossing { NONE, ISOLATION, MERGE, CAPTURED, ENDED };
Crossing wait(Stream* stream, Event* event);
Crossing is_done(Event* event, bool* done);
void synchronize(Event* event);
// False if the work before either event has not ended.
bool elapsed(double* milliseconds, Event* from, Event* to);

// Makes the capture of a stream end in an error, if it is captured.
bool spoil_capture(Stream* stream);
bool is_capturing(Stream* stream);
// The number of the capture that a stream is part of, or 0.
unsigned long long capture_of(Stream* stream);
// Makes all captures of the global mode end in an error. Whether there are any.
bool spoil_global_captures();
bool begin_capture(Stream* stream, bool is_global);
// Ends a capture. Null if the stream was not captured, or if other streams that joined the capture were not joined with
// it again.
Graph* end_capture(Stream* stream);
void put(Stream* stream, Graph* graph);
void drop_graph(Graph* graph);
Graph* copy(Graph* graph);

// Threads that a processor runs at once. A block of more has a processor of its own.
constexpr int PROCESSOR_THREADS = 512;
// Waits a moment, in one of eight cases: work without an order between it begins in any order.
void be_late_by_chance();
// Runs a kernel: its blocks begin in order, as many at once as the device has space for.
void run_kernel(const Call& call, Shape shape, unsigned room, unsigned places);

}  // namespace emulated
