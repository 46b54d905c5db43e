// Ends a launch whose kernel loops without calling an operation, and turns a fault of the kernel into a failure.
#pragma once

#include <csignal>

#include "cta.hpp"

namespace cuflash::sim {

// A thread that waits for the launch to end. After the time limit it interrupts the kernel's OS thread with a signal
// (SIGURG, which processes ignore by default). If kernel code is running, the handler abandons the kernel; otherwise the
// next operation reads the flag `expired`. ThreadSanitizer delays signals in a loop that calls nothing. Then the process
// is ended after twice the time limit, since nothing else would end the loop.
class Watchdog {
 public:
  explicit Watchdog(double seconds);
  ~Watchdog();

 private:
  static void* watch(void* watchdog);
  void watch();
  bool is_over_within(double seconds);   // called with the mutex held
  const double seconds_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t ended_;
  bool over_ = false;
  struct sigaction before_ {};
  pthread_t thread_;
};

// Handlers of SIGSEGV and similar signals while a launch runs; with a sanitizer these signals keep the sanitizer's
// handlers.
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
