// A rank of a test of the C API: `program RANK WORLD DIRECTORY`. Exits with 0 if everything was right.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

void *symmpool_alloc_0(ptrdiff_t size, int device, void *stream);
void symmpool_free_0(void *pointer, size_t size, int device, void *stream);

static void refuses_nonsense(symmpool_pool pool) {
  const char *why = NULL;
  void *block = NULL;
  bool yes = false;
  size_t count = 0;
  symmpool_pool other = 0;
  symmpool_group none = 0;
  IS(INVALID_ARGUMENT, symmpool_alloc(pool, 8, 0, NULL, NULL));
  IS(INVALID_ARGUMENT, symmpool_alloc(12345678, 8, 0, NULL, &block));
  IS(INVALID_ARGUMENT, symmpool_alloc(pool, 8, 3, NULL, &block));
  IS(OUT_OF_MEMORY, symmpool_alloc(pool, (size_t)1 << 50, 0, NULL, &block));
  symmpool_last_error(&why);
  HOLDS(why != NULL && strstr(why, "range") != NULL);
  HOLDS(block == NULL);
  IS(INVALID_ARGUMENT, symmpool_free(pool, (void *)8));
  IS(INVALID_ARGUMENT, symmpool_free_unordered(pool, NULL));
  IS(INVALID_ARGUMENT, symmpool_is_window(pool, &yes, 1, NULL));
  IS(INVALID_ARGUMENT, symmpool_windows(pool, NULL, 1, NULL));
  IS(INVALID_ARGUMENT, symmpool_peer_pointer(pool, 0, &yes, &block));
  IS(INVALID_ARGUMENT, symmpool_pool_create(77, "cpu", 0, 0, &other));
  IS(INVALID_ARGUMENT, symmpool_group_in_directory(0, 1, NULL, 5, &none));
  IS(INVALID_ARGUMENT, symmpool_group_in_directory(0, 1, "/tmp", -1, &none));
  IS(INVALID_ARGUMENT, symmpool_group_in_directory(0, 1, "/tmp", 1e-300, &none));
  IS(INVALID_ARGUMENT, symmpool_group_over_tcp(2, 2, "127.0.0.1:1", NULL, 5, &none));
  IS(INVALID_ARGUMENT, symmpool_slot_release(63));
  IS(INVALID_ARGUMENT, symmpool_comm_destroy(pool));
  OK(symmpool_windows(pool, NULL, 0, &count));
  IS(INVALID_ARGUMENT, symmpool_record_stream(pool, (void *)8, NULL));
  IS(INVALID_ARGUMENT, symmpool_group_from_env(-1, &none));
  IS(INVALID_ARGUMENT, symmpool_group_from_env(5, NULL));
}

static void collectives(symmpool_pool pool, symmpool_comm comm, uint32_t rank, uint32_t world) {
  enum { N = 1000 };
  float *x = NULL, *y = NULL;
  size_t counts[64];
  OK(symmpool_alloc(pool, N * sizeof *x, 0, NULL, (void **)&x));
  OK(symmpool_alloc(pool, world * N * sizeof *y, 4096, NULL, (void **)&y));
  HOLDS((uintptr_t)y % 4096 == 0);
  OK(symmpool_record_stream(pool, x, NULL));
  for (int i = 0; i < N; i++) x[i] = (float)(rank + 1);
  OK(symmpool_all_reduce(comm, x, x, N, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_SUM, NULL));
  for (int i = 0; i < N; i++) HOLDS(x[i] == (float)(world * (world + 1) / 2));
  for (int i = 0; i < N; i++) x[i] = (float)rank;
  OK(symmpool_all_gather(comm, y, x, N, SYMMPOOL_DTYPE_F32, NULL));
  for (uint32_t i = 0; i < world * N; i++) HOLDS(y[i] == (float)(i / N));
  OK(symmpool_reduce_scatter(comm, x, y, N, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_MAX, NULL));
  for (int i = 0; i < N; i++) HOLDS(x[i] == (float)rank);
  OK(symmpool_broadcast(comm, x, N, SYMMPOOL_DTYPE_F32, world - 1, NULL));
  for (int i = 0; i < N; i++) HOLDS(x[i] == (float)(world - 1));
  // Ordinary memory is copied.
  float *plain = malloc(world * N * sizeof *plain), *got = malloc(world * N * sizeof *got);
  for (uint32_t i = 0; i < world * N; i++) plain[i] = (float)(rank * 100 + i / N);
  OK(symmpool_all_to_all(comm, got, plain, N, SYMMPOOL_DTYPE_F32, NULL));
  for (uint32_t i = 0; i < world * N; i++) HOLDS(got[i] == (float)(i / N * 100 + rank));
  for (uint32_t r = 0; r < world; r++) counts[r] = N;
  OK(symmpool_all_to_all_v(comm, y, plain, counts, counts, SYMMPOOL_DTYPE_F32, NULL));
  HOLDS(memcmp(y, got, world * N * sizeof *y) == 0);
  // Some types can be moved, but not reduced.
  OK(symmpool_broadcast(comm, plain, N / 4, SYMMPOOL_DTYPE_COMPLEX128, 0, NULL));
  for (int i = 0; i < N; i++) HOLDS(plain[i] == 0.0f);
  OK(symmpool_all_gather(comm, got, plain, N, SYMMPOOL_DTYPE_BYTES4, NULL));
  IS(INVALID_ARGUMENT, symmpool_all_reduce(comm, x, x, N, SYMMPOOL_DTYPE_BOOL, SYMMPOOL_OP_SUM, NULL));
  free(plain);
  free(got);
  IS(INVALID_ARGUMENT, symmpool_comm_set_timeout(comm, 0));
  IS(INVALID_ARGUMENT, symmpool_comm_set_timeout(0, 20));
  OK(symmpool_comm_set_timeout(comm, 20));
  OK(symmpool_barrier(comm, NULL));
  OK(symmpool_comm_synchronize(comm, NULL));
  // An invalid argument on one rank is an error on all ranks, and the next call works again.
  uint32_t dtype = rank == 0 ? 99 : SYMMPOOL_DTYPE_F32;
  symmpool_status status = symmpool_all_reduce(comm, x, x, N, dtype, SYMMPOOL_OP_SUM, NULL);
  HOLDS(status == (rank == 0 ? SYMMPOOL_STATUS_INVALID_ARGUMENT : SYMMPOOL_STATUS_DIVERGED));
  OK(symmpool_barrier(comm, NULL));
  // A peer's copy is one stride away.
  symmpool_layout_info layout;
  void *peer = NULL;
  OK(symmpool_layout(pool, &layout));
  OK(symmpool_peer_pointer(pool, (rank + 1) % world, x, &peer));
  uint64_t there = (uint64_t)x + ((rank + 1) % world) * layout.stride - rank * layout.stride;
  HOLDS((uint64_t)peer == there && layout.rank == rank && layout.world == world);
  OK(symmpool_free(pool, y));
  OK(symmpool_free(pool, x));
}

// Each rank gives its neighbours data and takes some, with either engine.
static void one_sided(symmpool_pool pool, symmpool_comm comm, uint32_t rank, uint32_t world) {
  enum { N = 1000 };
  uint32_t next = (rank + 1) % world, before = (rank + world - 1) % world;
  uint32_t *inbox = NULL, mine[N], got[N];
  OK(symmpool_alloc(pool, N * sizeof *inbox, 0, NULL, (void **)&inbox));
  for (uint32_t engine = SYMMPOOL_ENGINE_KERNEL; engine <= SYMMPOOL_ENGINE_WITHOUT_SMS; engine++) {
    memset(inbox, 0, N * sizeof *inbox);
    // All ranks have cleared their inboxes, which are windows after the first of these.
    OK(symmpool_barrier(comm, NULL));
    for (uint32_t i = 0; i < N; i++) mine[i] = 1000 * rank + i + engine;
    OK(symmpool_put(comm, inbox, mine, sizeof mine, next, engine, NULL));
    OK(symmpool_signal(comm, next, 3, engine, NULL));
    OK(symmpool_wait(comm, before, 3, 30, engine, NULL));
    for (uint32_t i = 0; i < N; i++) HOLDS(inbox[i] == 1000 * before + i + engine);
    OK(symmpool_get(comm, got, inbox, sizeof got, next, engine, NULL));
    for (uint32_t i = 0; i < N; i++) HOLDS(got[i] == mine[i]);
    OK(symmpool_barrier(comm, NULL));
    IS(INVALID_ARGUMENT, symmpool_put(comm, mine, got, sizeof got, next, engine, NULL));
    IS(INVALID_ARGUMENT, symmpool_get(comm, NULL, inbox, 4, next, engine, NULL));
    IS(INVALID_ARGUMENT, symmpool_put(comm, inbox, mine, 4, world, engine, NULL));
    IS(INVALID_ARGUMENT, symmpool_signal(comm, next, 16, engine, NULL));
    IS(INVALID_ARGUMENT, symmpool_wait(comm, next, 0, -1, engine, NULL));
    IS(TIMEOUT, symmpool_wait(comm, next, 4, 1e-3, engine, NULL));
  }
  IS(INVALID_ARGUMENT, symmpool_put(comm, inbox, mine, 4, next, 2, NULL));
  IS(INVALID_ARGUMENT, symmpool_signal(comm, next, 0, 2, NULL));
  OK(symmpool_free(pool, inbox));
}

// Counts what it is asked, and chooses the registered algorithm for large calls.
static const char *choose(const symmpool_call_info *call, void *data) {
  ++*(int *)data;
  HOLDS(call->dtype == SYMMPOOL_DTYPE_F32 && call->op == SYMMPOOL_OP_SUM && call->output_window);
  return call->bytes > 64 ? "pulled" : NULL;
}

// A plan in which every rank reads all inputs.
static void write_plan(char *json, uint32_t world) {
  json += sprintf(json, "{\"symmpool_plan\":1,\"name\":\"pulled\",\"collective\":\"all_reduce\",");
  json += sprintf(json, "\"world\":%u,\"chunks\":1,\"programs\":[", world);
  for (uint32_t me = 0; me < world; me++) {
    json += sprintf(json, "%s[{\"op\":\"barrier\"},{\"op\":\"reduce\",", me == 0 ? "" : ",");
    json += sprintf(json, "\"dst\":{\"buffer\":\"output\",\"index\":0},\"srcs\":[");
    for (uint32_t r = 0; r < world; r++)
      json += sprintf(json, "%s{\"buffer\":\"input\",\"index\":0,\"rank\":%u}", r == 0 ? "" : ",", r);
    json += sprintf(json, "]},{\"op\":\"barrier\"}]");
  }
  sprintf(json, "]}");
}

static void algorithms(symmpool_pool pool, symmpool_comm comm, uint32_t rank, uint32_t world) {
  static char plan[1 << 16], names[256];
  enum { N = 1000 };
  size_t length = 0;
  int asked = 0;
  float *x = NULL, *y = NULL;
  OK(symmpool_alloc(pool, N * sizeof *x, 0, NULL, (void **)&x));
  OK(symmpool_alloc(pool, N * sizeof *y, 0, NULL, (void **)&y));
  for (int i = 0; i < N; i++) x[i] = (float)(rank + 1);
  write_plan(plan, world);
  OK(symmpool_comm_register_plan(comm, plan));
  OK(symmpool_comm_register_plan(comm, plan));
  IS(INVALID_ARGUMENT, symmpool_comm_register_plan(comm, "{}"));
  IS(INVALID_ARGUMENT, symmpool_comm_register_plan(comm, NULL));
  write_plan(plan, world + 1);
  IS(INVALID_ARGUMENT, symmpool_comm_register_plan(comm, plan));
  OK(symmpool_comm_algorithms(comm, "all_reduce", names, sizeof names, &length));
  HOLDS(length == strlen(names) + 1 && strncmp(names, "pulled\none_shot\ntwo_shot", 24) == 0);
  OK(symmpool_comm_algorithms(comm, "all_reduce", names, 4, &length));
  HOLDS(strcmp(names, "pul") == 0 && length > 4);
  OK(symmpool_comm_algorithms(comm, "all_reduce", NULL, 0, &length));
  IS(INVALID_ARGUMENT, symmpool_comm_algorithms(comm, "gossip", names, sizeof names, &length));
  IS(INVALID_ARGUMENT, symmpool_comm_algorithms(comm, "all_reduce", NULL, 1, &length));
  // There are no kernels in host memory.
  const char *kernel = "extern \"C\" __global__ void mine() {}";
  OK(symmpool_comm_register_kernel(comm, "all_reduce", "mine", kernel, false, true, false, 0, 0, 256));
  IS(UNSUPPORTED, symmpool_collective(comm, "all_reduce", "mine", y, x, N, SYMMPOOL_DTYPE_F32, 0, 0, NULL));
  IS(INVALID_ARGUMENT, symmpool_comm_register_kernel(comm, "all_reduce", "mine", kernel, false, true, false, 1 << 20, 8, 256));
  IS(INVALID_ARGUMENT, symmpool_comm_register_kernel(comm, "all_reduce", "other", kernel, false, true, false, 0, 0, 100));
  IS(INVALID_ARGUMENT, symmpool_comm_register_kernel(comm, "all_reduce", NULL, kernel, false, true, false, 0, 0, 256));
  const char *of[] = {"pulled", "one_shot", "two_shot", NULL};
  for (int i = 0; i < 4; i++) {
    OK(symmpool_collective(comm, "all_reduce", of[i], y, x, N, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_SUM, 0, NULL));
    for (int j = 0; j < N; j++) HOLDS(y[j] == (float)(world * (world + 1) / 2));
  }
  OK(symmpool_collective(comm, "broadcast", "scratch", x, NULL, N, SYMMPOOL_DTYPE_F32, 0, world - 1, NULL));
  HOLDS(x[0] == (float)world);
  IS(INVALID_ARGUMENT, symmpool_collective(comm, "gossip", NULL, y, x, N, 0, 0, 0, NULL));
  IS(INVALID_ARGUMENT, symmpool_collective(comm, "all_reduce", "rumour", y, x, N, 0, 0, 0, NULL));
  IS(UNSUPPORTED, symmpool_collective(comm, "all_reduce", "one_shot_ll", y, x, N, 0, 0, 0, NULL));
  OK(symmpool_comm_select(comm, "all_reduce", choose, &asked));
  OK(symmpool_all_reduce(comm, y, x, N, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_SUM, NULL));
  OK(symmpool_all_reduce(comm, y, x, 1, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_SUM, NULL));
  HOLDS(asked == 2 && y[0] == (float)(world * world));
  IS(INVALID_ARGUMENT, symmpool_comm_select(comm, NULL, choose, &asked));
  OK(symmpool_comm_select(comm, "all_reduce", NULL, NULL));
  OK(symmpool_all_reduce(comm, y, x, N, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_SUM, NULL));
  HOLDS(asked == 2);
  OK(symmpool_free(pool, y));
  OK(symmpool_free(pool, x));
}

static void slots(symmpool_pool pool) {
  uint32_t slot = 99;
  symmpool_commit_report report;
  OK(symmpool_slot_bind(pool, &slot));
  HOLDS(slot == 0);
  char *block = symmpool_alloc_0(4 << 20, 0, NULL);
  HOLDS(block != NULL);
  memset(block, 7, 4 << 20);
  OK(symmpool_commit(pool, &report));
  bool yes = false;
  OK(symmpool_is_window(pool, block, 4 << 20, &yes));
  HOLDS(yes);
  symmpool_free_0(block, 4 << 20, 0, NULL);
  OK(symmpool_commit(pool, &report));
  HOLDS(report.blocks_returned == 1);
  OK(symmpool_slot_release(slot));
  HOLDS(symmpool_alloc_0(1, 0, NULL) == NULL);
  HOLDS(symmpool_last_error(NULL) == SYMMPOOL_STATUS_INVALID_STATE);
  symmpool_free_0(block, 4 << 20, 0, NULL);
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  uint32_t rank = (uint32_t)atoi(argv[1]), world = (uint32_t)atoi(argv[2]), found = 99;
  symmpool_group group = 0;
  symmpool_pool pool = 0;
  symmpool_comm comm = 0;
  bool due = true;
  const char *why = NULL;
  HOLDS(strchr(symmpool_version(), '.') != NULL);
  OK(symmpool_group_in_directory(rank, world, argv[3], 30, &group));
  OK(symmpool_group_size(group, &found, NULL));
  HOLDS(found == rank);
  // An invalid argument on one rank is an error on all ranks, and all of them count this pool.
  IS(INVALID_ARGUMENT, symmpool_pool_create(group, rank == 0 ? "tpu" : "cpu", 0, 0, &pool));
  symmpool_last_error(&why);
  HOLDS(strstr(why, "rank 0 failed in the handshake") != NULL && strstr(why, "tpu") != NULL);
  IS(INVALID_ARGUMENT, symmpool_pool_create(group, "cpu", 0, rank == 1 ? 64 : 0, &pool));
  symmpool_last_error(&why);
  HOLDS(strstr(why, "rank 1 failed in the handshake") != NULL && strstr(why, "flags") != NULL);
  IS(INVALID_ARGUMENT, symmpool_pool_create(group, "cpu", 0, 0, rank == 1 ? NULL : &pool));
  OK(symmpool_pool_create(group, "cpu", (uint64_t)1 << 36, 0, &pool));
  OK(symmpool_group_destroy(group));
  IS(INVALID_ARGUMENT, symmpool_group_destroy(group));
  refuses_nonsense(pool);
  IS(INVALID_ARGUMENT, symmpool_register_nccl(pool, NULL, NULL));
  HOLDS(symmpool_unregister_nccl(pool, NULL) != SYMMPOOL_STATUS_OK);
  // An invalid pointer for the report is an error on all ranks, before anything is shared.
  _Alignas(8) char bytes[sizeof(symmpool_commit_report) + 1];
  symmpool_commit_report *misaligned = (void *)(bytes + 1);
  symmpool_pool_stats before, after;
  OK(symmpool_stats(pool, &before));
  HOLDS(symmpool_commit(pool, rank == 1 ? misaligned : NULL) != SYMMPOOL_STATUS_OK);
  symmpool_last_error(&why);
  HOLDS(strstr(why, "report is not aligned") != NULL);
  OK(symmpool_stats(pool, &after));
  HOLDS(after.commits == before.commits);
  OK(symmpool_resync(pool));
  IS(INVALID_ARGUMENT, symmpool_register_nccl(pool, NULL, rank == 1 ? (void *)(bytes + 1) : NULL));
  // No rank waits for one that cannot create its communicator.
  HOLDS(symmpool_comm_create(pool, rank == 1 ? -1 : 30, &comm) != SYMMPOOL_STATUS_OK);
  symmpool_last_error(&why);
  HOLDS(strstr(why, "timeout") != NULL);
  OK(symmpool_resync(pool));
  OK(symmpool_comm_create(pool, 30, &comm));
  OK(symmpool_is_commit_due(pool, &due));
  HOLDS(!due);
  OK(symmpool_reserve(pool, 1 << 20, NULL));
  OK(symmpool_comm_forget_stream(comm, NULL));
  OK(symmpool_forget_stream(pool, NULL));
  collectives(pool, comm, rank, world);
  one_sided(pool, comm, rank, world);
  algorithms(pool, comm, rank, world);
  slots(pool);
  symmpool_pool_stats stats;
  OK(symmpool_stats(pool, &stats));
  HOLDS(stats.commits >= 3 && stats.windows >= 1 && stats.reserved >= stats.allocated);
  symmpool_window windows[1];
  size_t count = 0;
  OK(symmpool_windows(pool, windows, 1, &count));
  HOLDS(count == stats.windows && windows[0].bytes > 0);
  OK(symmpool_barrier(comm, NULL));
  OK(symmpool_comm_destroy(comm));
  OK(symmpool_pool_destroy(pool));
  IS(INVALID_ARGUMENT, symmpool_barrier(comm, NULL));
  IS(INVALID_ARGUMENT, symmpool_commit(pool, NULL));
  puts("everything was right");
  return 0;
}
