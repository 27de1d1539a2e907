// An allocation that fails throws an exception through the library, with a function that the caller sets. The library
// works after that.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>

extern "C" {
void *symmpool_process_alloc(ptrdiff_t size, int device, void *stream);
void symmpool_process_free(void *pointer, size_t size, int device, void *stream);
int symmpool_process_throw_by(void *address);
}

static void thrower(const char *, const char *, uint32_t, const char *message) {
  throw std::runtime_error(message);
}

struct Guard {
  int &count;
  ~Guard() { count++; }
};

int main() {
  int unwound = 0;
  // Before the function is set, failed allocations return NULL.
  if (symmpool_process_alloc(1, 1000, nullptr) != nullptr) return 1;
  if (symmpool_process_throw_by(nullptr) == 0) return 2;
  if (symmpool_process_throw_by(reinterpret_cast<void *>(&thrower)) != 0) return 3;
  for (int i = 0; i < 1000; i++) {
    try {
      Guard guard{unwound};
      symmpool_process_alloc(i % 2 ? 1 : -1, 1000, nullptr);
      return 4;
    } catch (const std::runtime_error &error) {
      if (std::strncmp(error.what(), "symmpool: ", 10) != 0) {
        std::puts(error.what());
        return 5;
      }
    }
  }
  // Frees return no errors.
  symmpool_process_free(nullptr, 0, 0, nullptr);
  symmpool_process_free(&unwound, 0, 0, nullptr);
  std::puts("everything was right");
  return unwound == 1000 ? 0 : 6;
}
