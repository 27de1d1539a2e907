// Helpers of the programs that test the C API: calls and conditions that end a program with the line where they
// stand.

#ifndef SYMMPOOL_TESTS_CHECK_H
#define SYMMPOOL_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "symmpool.h"

static void fail(const char *what, int line) {
  const char *why = NULL;
  symmpool_status status = symmpool_last_error(&why);
  fprintf(stderr, "line %d: %s: status %d: %s\n", line, what, (int)status, why ? why : "");
  exit(1);
}

#define OK(call) \
  if ((call) != SYMMPOOL_STATUS_OK) fail(#call, __LINE__)
#define IS(wanted, call) \
  if ((call) != SYMMPOOL_STATUS_##wanted || symmpool_last_error(NULL) != SYMMPOOL_STATUS_##wanted) fail(#call, __LINE__)
#define HOLDS(condition) \
  if (!(condition)) fail(#condition, __LINE__)

#endif
