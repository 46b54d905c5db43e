// The early end of a launch: the first failure writes its message and abandons the block.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "cta.hpp"

namespace cuflash::sim {

Text text(const char* format, ...) {
  Text made;
  va_list values;
  va_start(values, format);
  vsnprintf(made.letters, sizeof made.letters, format, values);
  va_end(values);
  return made;
}

Text place(Location where) { return text("%s:%u", where.file_name(), where.line()); }

namespace {

// Writes the message and ends the launch. It allocates no memory, because it also runs inside signal handlers.
[[noreturn]] void fail_with(const char* file, unsigned line, const char* format, va_list values) {
  launch->in_kernel.store(false, std::memory_order_relaxed);
  const Thread& thread = self();
  char* out = launch->message;
  const size_t room = sizeof launch->message;
  size_t used = static_cast<size_t>(snprintf(out, room, "%s:%u: ", file, line));
  used += static_cast<size_t>(vsnprintf(out + used, room - used, format, values));
  if (used < room && thread.cta)
    snprintf(out + used, room - used, "\n  in block (%u, %u, %u), thread %d (warp %d, lane %d)", thread.cta->index.x,
             thread.cta->index.y, thread.cta->index.z, thread.linear, thread.linear / 32, thread.lane);
  launch->failed = true;
  abandon_block();
}

}  // namespace

void fail(Location where, const char* format, ...) {
  va_list values;
  va_start(values, format);
  fail_with(where.file_name(), where.line(), format, values);
}

void fail_at(const char* file, unsigned line, const char* format, ...) {
  va_list values;
  va_start(values, format);
  fail_with(file, line, format, values);
}

void check_time_limit(Location where) {
  if (launch->expired.load(std::memory_order_relaxed))
    fail(where, "the launch passed its time limit of %g s here, in %s: a loop that never ends, or too small a limit%s",
         launch->request.time_limit, self().doing, launch->residents ? residency().letters : "");
}

}  // namespace cuflash::sim
