// Ends a launch whose kernel loops without ever calling an operation, and turns a fault of the kernel into a failure.
#pragma once

#include <csignal>

#include "cta.hpp"

namespace cuflash::sim {

// A thread that waits for the launch to end. When the time is up it interrupts the kernel's OS thread with a signal
// (SIGURG: ignored unless someone asks for it). The handler leaves the kernel for good if kernel code is running, and
// otherwise the next operation sees the mark. A signal can be held back, as ThreadSanitizer does in a loop that calls
// nothing: then, after as long again, the process is ended, since nothing else would end the loop.
class Watchdog {
 public:
  explicit Watchdog(double seconds);
  ~Watchdog();

 private:
  static void* watch(void* watchdog);
  void watch();
  bool is_over_within(double seconds);   // by who holds the mutex
  const double seconds_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t ended_;
  bool over_ = false;
  struct sigaction before_ {};
  pthread_t thread_;
};

// Handlers of SIGSEGV and its like for as long as the launch lasts; with a sanitizer these stay the sanitizer's.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();

 private:
  static constexpr int kSignals[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  struct sigaction before_[4] {};
  stack_t stack_before_ {};
};

}  // namespace cuflash::sim
