// A rank of a test of the C API's experts: `experts RANK WORLD DIRECTORY`. Exits with 0 if everything was right.
//
// Token t of rank r has the value 16 * r + t + 1 in every channel, and its first expert is on rank (r + t) % world.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#define SAYS(part) HOLDS(strstr(why(), part) != NULL)

enum { HIDDEN = 128, LOCAL = 2, TOP_K = 2, MAX_TOKENS = 8, ROW = HIDDEN * sizeof(float) };

static uint32_t rank, world;

static const char *why(void) {
  const char *text = NULL;
  symmpool_last_error(&text);
  return text ? text : "";
}

// Memory of a multiple of 16 bytes, all 0x55.
static void *memory(size_t bytes) {
  bytes = (bytes + 16) / 16 * 16;
  void *found = aligned_alloc(16, bytes);
  HOLDS(found != NULL);
  return memset(found, 0x55, bytes);
}

// Rank 0 has one token, rank 1 has two, and so on.
static size_t tokens_of(uint32_t of) { return of + 1; }

static float value(uint32_t of, size_t token) { return (float)(16 * of + token + 1); }

// The first expert of a token; the second is none for even tokens, and the next rank's first expert for odd ones.
static int64_t expert(uint32_t of, size_t token, int k) {
  uint32_t first = (uint32_t)((of + token) % world);
  if (k == 0) return first * LOCAL + (int64_t)(token % LOCAL);
  return token % 2 == 0 ? -1 : (int64_t)((first + 1) % world) * LOCAL;
}

static float weight(uint32_t of, size_t token, int k) { return (float)(1 + of + token) / (float)(2 + 2 * k); }

static int goes_to(uint32_t of, size_t token, uint32_t to) {
  for (int k = 0; k < TOP_K; k++)
    if (expert(of, token, k) >= 0 && expert(of, token, k) / LOCAL == to) return 1;
  return 0;
}

static symmpool_experts_shape shape(void) {
  symmpool_experts_shape made = {0};
  made.hidden = HIDDEN;
  made.max_tokens = MAX_TOKENS;
  made.experts = LOCAL * world;
  made.top_k = TOP_K;
  made.dtype = SYMMPOOL_DTYPE_F32;
  return made;
}

// The tokens of this rank with 64-bit ids.
typedef struct {
  float *x, *weights;
  int64_t *ids;
  size_t count;
} Tokens;

static Tokens own_tokens(void) {
  Tokens own = {memory(MAX_TOKENS * ROW), memory(MAX_TOKENS * TOP_K * 4), memory(MAX_TOKENS * TOP_K * 8), tokens_of(rank)};
  for (size_t t = 0; t < own.count; t++) {
    for (int i = 0; i < HIDDEN; i++) own.x[t * HIDDEN + i] = value(rank, t);
    for (int k = 0; k < TOP_K; k++) own.ids[t * TOP_K + k] = expert(rank, t, k);
    for (int k = 0; k < TOP_K; k++) own.weights[t * TOP_K + k] = weight(rank, t, k);
  }
  return own;
}

static void free_tokens(Tokens own) {
  free(own.x);
  free(own.ids);
  free(own.weights);
}

static symmpool_dispatch_info dispatch_of(Tokens own) {
  symmpool_dispatch_info made = {0};
  made.input = own.x;
  made.ids = own.ids;
  made.weights = own.weights;
  made.tokens = own.count;
  made.ids_dtype = SYMMPOOL_DTYPE_I64;
  return made;
}

static const int32_t *part(const void *handle, size_t at) { return (const void *)((const char *)handle + at); }

// Rows by rank, and the same routing again with other tokens.
static void by_rank(symmpool_experts experts) {
  Tokens own = own_tokens();
  symmpool_dispatch_info dispatch = dispatch_of(own);
  symmpool_experts_handle_info parts;
  symmpool_experts_received_info received;
  symmpool_combine_info combine = {0};
  OK(symmpool_experts_handle(experts, &parts));
  OK(symmpool_experts_received(experts, &received));
  HOLDS(received.capacity == MAX_TOKENS * world);
  void *handle = memory(parts.bytes);
  float *answers = memory(received.capacity * ROW), *sums = memory(MAX_TOKENS * ROW);
  for (int again = 0; again < 2; again++) {
    OK(symmpool_dispatch(experts, handle, &dispatch, NULL));
    const float *rows = received.rows;
    size_t row = 0;
    for (uint32_t from = 0; from < world; from++) {
      HOLDS(part(handle, parts.source_offsets)[from] == (int32_t)row);
      for (size_t t = 0; t < tokens_of(from); t++) {
        if (!goes_to(from, t, rank)) continue;
        for (int i = 0; i < HIDDEN; i++) HOLDS(rows[row * HIDDEN + i] == value(from, t) * (float)(1 + again));
        HOLDS(part(handle, parts.source_index)[row] == (int32_t)t);
        for (int k = 0; k < TOP_K && again == 0; k++) {
          int64_t id = expert(from, t, k);
          int here = id >= 0 && id / LOCAL == rank;
          HOLDS(received.ids[row * TOP_K + k] == (here ? (int32_t)(id % LOCAL) : -1));
          HOLDS(!here || received.weights[row * TOP_K + k] == weight(from, t, k));
        }
        row++;
      }
    }
    HOLDS(part(handle, parts.source_offsets)[world] == (int32_t)row);
    HOLDS(part(handle, parts.head)[0] == (int32_t)row && part(handle, parts.head)[1] == (int32_t)own.count);
    for (size_t i = 0; i < row * HIDDEN; i++) answers[i] = 10 * rows[i];
    combine.input = answers;
    combine.output = sums;
    combine.tokens = own.count;
    OK(symmpool_combine(experts, handle, &combine, NULL));
    for (size_t t = 0; t < own.count; t++) {
      float ranks = 0;
      for (uint32_t to = 0; to < world; to++) ranks += (float)goes_to(rank, t, to);
      for (int i = 0; i < HIDDEN; i++)
        HOLDS(sums[t * HIDDEN + i] == 10 * ranks * value(rank, t) * (float)(1 + again));
    }
    // The handle says where tokens go now.
    for (size_t i = 0; i < own.count * HIDDEN; i++) own.x[i] *= 2;
    dispatch.known = true;
    dispatch.ids = NULL;
    dispatch.weights = NULL;
  }
  free(handle);
  free(answers);
  free(sums);
  free_tokens(own);
}

// Rows by expert, one after the other or a part for each, of 32-bit ids; the weights are the dispatch's or are given.
static void by_expert(symmpool_experts experts, uint32_t layout) {
  Tokens own = own_tokens();
  symmpool_dispatch_info dispatch = dispatch_of(own);
  symmpool_experts_handle_info parts;
  symmpool_combine_info combine = {0};
  size_t room = 0;
  OK(symmpool_experts_handle(experts, &parts));
  OK(symmpool_experts_rows_by_expert(experts, 4, &room));
  if (layout == SYMMPOOL_EXPERTS_LAYOUT_PACKED) room = MAX_TOKENS * world;
  size_t rows = layout == SYMMPOOL_EXPERTS_LAYOUT_PACKED ? LOCAL * room : room;
  void *handle = memory(parts.bytes);
  float *output = memory(rows * ROW), *sums = memory(MAX_TOKENS * ROW);
  int32_t ids[MAX_TOKENS * TOP_K];
  for (size_t i = 0; i < own.count * TOP_K; i++) ids[i] = (int32_t)own.ids[i];
  dispatch.ids = ids;
  dispatch.ids_dtype = SYMMPOOL_DTYPE_I32;
  dispatch.layout = layout;
  dispatch.alignment = 4;
  dispatch.output = output;
  dispatch.output_rows = room;
  symmpool_dispatch_sizes sizes;
  size_t counts[LOCAL];
  OK(symmpool_dispatch_exact(experts, handle, &dispatch, &sizes, counts, NULL));
  HOLDS(sizes.rows == (size_t)part(handle, parts.head)[0]);
  HOLDS(layout == SYMMPOOL_EXPERTS_LAYOUT_PACKED || sizes.rows_by_expert == (size_t)part(handle, parts.head)[2]);
  for (int32_t local = 0; local < LOCAL; local++) {
    int32_t count = 0, begin = part(handle, parts.expert_offsets)[local];
    if (layout == SYMMPOOL_EXPERTS_LAYOUT_PACKED) begin = local * (int32_t)room;
    HOLDS(begin % 4 == 0);
    for (uint32_t from = 0; from < world; from++)
      for (size_t t = 0; t < tokens_of(from); t++)
        for (int k = 0; k < TOP_K; k++) {
          if (expert(from, t, k) != (int64_t)rank * LOCAL + local) continue;
          for (int i = 0; i < HIDDEN; i++) HOLDS(output[(begin + count) * HIDDEN + i] == value(from, t));
          count++;
        }
    HOLDS(part(handle, parts.expert_counts)[local] == count && counts[local] == (size_t)count);
  }
  combine.input = output;
  combine.output = sums;
  combine.tokens = own.count;
  combine.layout = layout;
  for (int given = 0; given < 2; given++) {
    for (size_t i = 0; i < own.count * TOP_K && given; i++) own.weights[i] = 3;
    combine.weights = given ? own.weights : NULL;
    OK(symmpool_combine(experts, handle, &combine, NULL));
    for (size_t t = 0; t < own.count; t++) {
      float sum = 0;
      for (int k = 0; k < TOP_K; k++)
        if (expert(rank, t, k) >= 0) sum += given ? 3 : weight(rank, t, k);
      for (int i = 0; i < HIDDEN; i++) HOLDS(fabsf(sums[t * HIDDEN + i] - sum * value(rank, t)) < 1e-3f);
    }
  }
  free(handle);
  free(output);
  free(sums);
  free_tokens(own);
}

// Tokens that are quantised when they are sent have scales; those that are quantised already travel as they are.
static void quantised(symmpool_experts experts) {
  Tokens own = own_tokens();
  symmpool_dispatch_info dispatch = dispatch_of(own);
  symmpool_experts_handle_info parts;
  symmpool_experts_received_info received;
  OK(symmpool_experts_handle(experts, &parts));
  OK(symmpool_experts_received(experts, &received));
  void *handle = memory(parts.bytes);
  dispatch.quantize = SYMMPOOL_QUANTIZE_FP8;
  OK(symmpool_dispatch(experts, handle, &dispatch, NULL));
  size_t row = 0;
  for (uint32_t from = 0; from < world; from++)
    for (size_t t = 0; t < tokens_of(from); t++) {
      if (!goes_to(from, t, rank)) continue;
      HOLDS(fabsf(((float *)received.scales)[row] - value(from, t) / 448) < 1e-6f);
      // 448 as F8E4M3.
      for (int i = 0; i < HIDDEN; i++) HOLDS(((uint8_t *)received.rows)[row * HIDDEN + i] == 0x7e);
      row++;
    }
  uint8_t *bytes = memory(MAX_TOKENS * HIDDEN), scales[MAX_TOKENS];
  for (size_t t = 0; t < own.count; t++) {
    memset(bytes + t * HIDDEN, (int)value(rank, t), HIDDEN);
    scales[t] = (uint8_t)(100 + t);
  }
  dispatch.quantize = SYMMPOOL_QUANTIZE_NONE;
  dispatch.quantized = true;
  dispatch.input = bytes;
  dispatch.scales = scales;
  dispatch.scale_bytes = 1;
  OK(symmpool_dispatch(experts, handle, &dispatch, NULL));
  row = 0;
  for (uint32_t from = 0; from < world; from++)
    for (size_t t = 0; t < tokens_of(from); t++) {
      if (!goes_to(from, t, rank)) continue;
      HOLDS(((uint8_t *)received.scales)[row] == 100 + t);
      for (int i = 0; i < HIDDEN; i++) HOLDS(((uint8_t *)received.rows)[row * HIDDEN + i] == (uint8_t)value(from, t));
      row++;
    }
  free(bytes);
  free(handle);
  free_tokens(own);
}

// Checks calls that are refused, and the error of every rank. The communicator stays usable.
static void refused(symmpool_comm comm, symmpool_experts experts) {
  Tokens own = own_tokens();
  symmpool_dispatch_info dispatch = dispatch_of(own), wrong = dispatch;
  symmpool_combine_info combine = {0};
  symmpool_experts_handle_info parts;
  symmpool_experts_shape made = shape();
  symmpool_experts small = 0;
  OK(symmpool_experts_handle(experts, &parts));
  void *handle = memory(parts.bytes);
  float *sums = memory(MAX_TOKENS * ROW);
  // An id that is no expert is an error of every rank, and counts as none.
  int64_t id = own.ids[0];
  own.ids[0] = rank == 0 ? 1000 : id;
  IS(INVALID_ARGUMENT, symmpool_dispatch(experts, handle, &dispatch, NULL));
  SAYS("rank 0");
  SAYS("1000");
  own.ids[0] = id;
  OK(symmpool_dispatch(experts, handle, &dispatch, NULL));
  // A refusal on one rank is an error on all.
  wrong.tokens = rank == 1 ? MAX_TOKENS + 1 : own.count;
  symmpool_status status = symmpool_dispatch(experts, handle, &wrong, NULL);
  HOLDS(status == (rank == 1 ? SYMMPOOL_STATUS_INVALID_ARGUMENT : SYMMPOOL_STATUS_DIVERGED));
  SAYS("rank 1");
  wrong = dispatch;
  wrong.layout = rank == 1 ? 3 : 0;
  status = symmpool_dispatch(experts, handle, &wrong, NULL);
  HOLDS(status == (rank == 1 ? SYMMPOOL_STATUS_INVALID_ARGUMENT : SYMMPOOL_STATUS_DIVERGED));
  wrong = dispatch;
  wrong.quantize = 4;
  IS(INVALID_ARGUMENT, symmpool_dispatch(experts, handle, &wrong, NULL));
  wrong = dispatch;
  wrong.ids_dtype = SYMMPOOL_DTYPE_F32;
  IS(INVALID_ARGUMENT, symmpool_dispatch(experts, handle, &wrong, NULL));
  wrong = dispatch;
  wrong.layout = SYMMPOOL_EXPERTS_LAYOUT_BY_EXPERT;
  wrong.output = sums;
  wrong.output_rows = 1;
  wrong.quantize = SYMMPOOL_QUANTIZE_FP8;
  IS(INVALID_ARGUMENT, symmpool_dispatch(experts, handle, &wrong, NULL));
  SAYS("output_scales");
  IS(INVALID_ARGUMENT, symmpool_dispatch(experts, handle, NULL, NULL));
  IS(INVALID_ARGUMENT, symmpool_dispatch(experts, NULL, &dispatch, NULL));
  // Sizes are those of a new routing, and need a place.
  symmpool_dispatch_sizes sizes = {7, 7};
  wrong = dispatch;
  wrong.known = true;
  IS(INVALID_ARGUMENT, symmpool_dispatch_exact(experts, handle, &wrong, &sizes, NULL, NULL));
  SAYS("handle");
  IS(INVALID_ARGUMENT, symmpool_dispatch_exact(experts, handle, &dispatch, NULL, NULL, NULL));
  SAYS("sizes");
  IS(INVALID_ARGUMENT, symmpool_dispatch_exact(experts, handle, NULL, &sizes, NULL, NULL));
  HOLDS(sizes.rows == 7 && sizes.rows_by_expert == 7);
  OK(symmpool_dispatch_exact(experts, handle, &dispatch, &sizes, NULL, NULL));
  HOLDS(sizes.rows == (size_t)part(handle, parts.head)[0] && sizes.rows_by_expert == 0);
  IS(INVALID_ARGUMENT, symmpool_combine(experts, handle, NULL, NULL));
  combine.tokens = own.count;
  combine.output = sums;
  IS(INVALID_ARGUMENT, symmpool_combine(experts, handle, &combine, NULL));
  combine.input = sums;
  IS(INVALID_ARGUMENT, symmpool_combine(experts, handle, &combine, NULL));
  SAYS("overlaps");
  combine.input = own.x;
  combine.layout = 9;
  IS(INVALID_ARGUMENT, symmpool_combine(experts, handle, &combine, NULL));
  // Without room for all rows every rank gets the error, and the last ones are missing.
  made.capacity = 1;
  OK(symmpool_experts_create(comm, &made, &small));
  OK(symmpool_experts_handle(small, &parts));
  void *other = memory(parts.bytes);
  for (size_t i = 0; i < own.count * TOP_K; i++) own.ids[i] = 0;
  IS(OVERFLOW, symmpool_dispatch(small, other, &dispatch, NULL));
  SAYS("rank 0");
  OK(symmpool_experts_destroy(small));
  IS(INVALID_ARGUMENT, symmpool_dispatch(small, other, &dispatch, NULL));
  OK(symmpool_barrier(comm, NULL));
  free(other);
  free(handle);
  free(sums);
  free_tokens(own);
}

// Checks calls that are refused before ranks talk.
static void refuses_nonsense(symmpool_comm comm, symmpool_experts experts) {
  symmpool_experts_shape wrong = shape();
  symmpool_experts none = 0;
  size_t count = 0;
  wrong.hidden = 3;
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, &wrong, &none));
  SAYS("hidden=3");
  SAYS(rank == 0 ? "rank 0" : rank == 1 ? "rank 1" : "rank 2");
  wrong = shape();
  wrong.experts = LOCAL * world + 1;
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, &wrong, &none));
  wrong = shape();
  wrong.dtype = SYMMPOOL_DTYPE_I64;
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, &wrong, &none));
  wrong = shape();
  wrong.num_sms = 1;
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, &wrong, &none));
  wrong = shape();
  wrong.capacity = MAX_TOKENS * world + 1;
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, &wrong, &none));
  wrong = shape();
  IS(INVALID_ARGUMENT, symmpool_experts_create(experts, &wrong, &none));
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, NULL, &none));
  IS(INVALID_ARGUMENT, symmpool_experts_create(comm, &wrong, NULL));
  HOLDS(none == 0);
  IS(INVALID_ARGUMENT, symmpool_experts_bytes(&wrong, 0, &count));
  IS(INVALID_ARGUMENT, symmpool_experts_bytes(NULL, world, &count));
  IS(INVALID_ARGUMENT, symmpool_experts_bytes(&wrong, world, NULL));
  IS(INVALID_ARGUMENT, symmpool_experts_memory(experts, NULL));
  IS(INVALID_ARGUMENT, symmpool_experts_received(experts, NULL));
  IS(INVALID_ARGUMENT, symmpool_experts_handle(experts, NULL));
  IS(INVALID_ARGUMENT, symmpool_experts_rows_by_expert(experts, 1, NULL));
  IS(INVALID_ARGUMENT, symmpool_experts_set_num_sms(experts, 1));
  IS(INVALID_ARGUMENT, symmpool_experts_destroy(comm));
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  rank = (uint32_t)atoi(argv[1]);
  world = (uint32_t)atoi(argv[2]);
  symmpool_group group = 0;
  symmpool_pool pool = 0;
  symmpool_comm comm = 0;
  symmpool_experts experts = 0;
  symmpool_experts_shape made = shape();
  symmpool_experts_memory_info held;
  size_t bytes = 0;
  OK(symmpool_group_in_directory(rank, world, argv[3], 30, &group));
  OK(symmpool_pool_create(group, "cpu", (uint64_t)1 << 36, 0, &pool));
  OK(symmpool_comm_create(pool, 30, &comm));
  OK(symmpool_experts_create(comm, &made, &experts));
  OK(symmpool_experts_bytes(&made, world, &bytes));
  OK(symmpool_experts_memory(experts, &held));
  HOLDS(held.total == bytes && held.received_rows >= MAX_TOKENS * world * ROW && held.handle > 0);
  HOLDS(held.total == held.received_rows + held.received_scales + held.routing + held.combined_rows);
  OK(symmpool_experts_set_num_sms(experts, 24));
  OK(symmpool_experts_set_num_sms(experts, 0));
  refuses_nonsense(comm, experts);
  by_rank(experts);
  by_expert(experts, SYMMPOOL_EXPERTS_LAYOUT_BY_EXPERT);
  by_expert(experts, SYMMPOOL_EXPERTS_LAYOUT_PACKED);
  quantised(experts);
  refused(comm, experts);
  by_rank(experts);
  OK(symmpool_experts_destroy(experts));
  IS(INVALID_ARGUMENT, symmpool_experts_destroy(experts));
  OK(symmpool_barrier(comm, NULL));
  OK(symmpool_comm_destroy(comm));
  OK(symmpool_pool_destroy(pool));
  OK(symmpool_group_destroy(group));
  puts("everything was right");
  return 0;
}
