// A rank of a test of the C API: `hosts RANK WORLD DIRECTORY`. Each rank pretends to be on a host of its own. Pools span
// hosts, and communicators of C do not: all ranks get an error that says so, and go on.

#include "check.h"

#include <string.h>

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  uint32_t rank = (uint32_t)atoi(argv[1]), world = (uint32_t)atoi(argv[2]);
  HOLDS(setenv("SYMMPOOL_HOST_ID", argv[1], 1) == 0);
  symmpool_group group = 0;
  symmpool_pool pool = 0;
  symmpool_comm comm = 0;
  OK(symmpool_group_in_directory(rank, world, argv[3], 30, &group));
  OK(symmpool_pool_create(group, "cpu", (uint64_t)1 << 36, 0, &pool));
  OK(symmpool_commit(pool, NULL));
  for (int again = 0; again < 2; ++again) {
    const char *why = NULL;
    IS(UNSUPPORTED, symmpool_comm_create(pool, 30, &comm));
    symmpool_last_error(&why);
    HOLDS(strstr(why, "2 hosts") != NULL && strstr(why, "make a group of the ranks of one host") != NULL);
    HOLDS(comm == 0);
    OK(symmpool_commit(pool, NULL));
  }
  OK(symmpool_pool_destroy(pool));
  OK(symmpool_group_destroy(group));
  puts("everything was right");
  return 0;
}
