// A rank of a test of the C API: `lost RANK WORLD DIRECTORY`. The last rank is killed. The others get errors, and no
// signal ends them, although they do not ignore SIGPIPE.

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "symmpool.h"

static void fail(const char *what, symmpool_status status) {
  const char *why = NULL;
  symmpool_last_error(&why);
  fprintf(stderr, "%s: status %d: %s\n", what, (int)status, why ? why : "");
  exit(1);
}

static void wants(symmpool_status wanted, const char *what, symmpool_status found) {
  if (found != wanted) fail(what, found);
}

#define OK(call) wants(SYMMPOOL_STATUS_OK, #call, call)
#define LOST(call) wants(SYMMPOOL_STATUS_PEER_LOST, #call, call)

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  uint32_t rank = (uint32_t)atoi(argv[1]), world = (uint32_t)atoi(argv[2]);
  symmpool_group group = 0;
  symmpool_pool pool = 0;
  symmpool_comm comm = 0;
  // The default, which a launcher may have changed.
  signal(SIGPIPE, SIG_DFL);
  OK(symmpool_group_in_directory(rank, world, argv[3], 30, &group));
  OK(symmpool_pool_create(group, "cpu", (uint64_t)1 << 36, 0, &pool));
  OK(symmpool_comm_create(pool, 30, &comm));
  OK(symmpool_barrier(comm, NULL));
  if (rank == world - 1) raise(SIGKILL);
  LOST(symmpool_barrier(comm, NULL));
  // Connections to the killed rank are closed by now.
  for (int again = 0; again < 2; ++again) LOST(symmpool_commit(pool, NULL));
  OK(symmpool_comm_destroy(comm));
  OK(symmpool_pool_destroy(pool));
  OK(symmpool_group_destroy(group));
  puts("everything was right");
  return 0;
}
