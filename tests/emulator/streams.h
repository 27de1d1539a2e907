//! Streams, events and graphs: what is put on them runs on threads of their own.

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

// The stream that a handle means: the default stream, or one of `new_stream`. Null if it is none.
Stream* stream_of(void* handle);
Stream* new_stream(bool waits_for_default);
void drop_stream(Stream* stream);
// Behind what is on the stream; a part of its graph while it is captured.
void put(Stream* stream, Work work);
void synchronize(Stream* stream);
// All streams of the process.
void synchronize_all();
// What runs when the default stream comes to it, and is waited for.
void run_in_order(const Work& work);

Event* new_event();
void drop_event(Event* event);
void record(Event* event, Stream* stream);
// What came of it where a capture begins or ends between a stream and an event, as CUDA was seen to
// answer (driver 580): all but `NONE` spoil the captures concerned.
enum class Crossing { NONE, ISOLATION, MERGE, CAPTURED, ENDED };
Crossing wait(Stream* stream, Event* event);
Crossing is_done(Event* event, bool* done);
void synchronize(Event* event);
// False where either has not come yet.
bool elapsed(double* milliseconds, Event* from, Event* to);

bool is_capturing(Stream* stream);
// The number of the capture that a stream is part of, 0 for none.
unsigned long long capture_of(Stream* stream);
bool begin_capture(Stream* stream);
// Null where the stream was not captured, or others that joined it were not joined again.
Graph* end_capture(Stream* stream);
void put(Stream* stream, Graph* graph);
void drop_graph(Graph* graph);
Graph* copy(Graph* graph);

// A kernel: as many blocks at once as the device has room for, in threads, and in order.
void run_kernel(const Call& call, Shape shape, unsigned room, unsigned places);

}  // namespace emulated
