// The time limit of a launch, and the handling of faults of its kernel.
#include "watchdog.hpp"

#include <dlfcn.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace cuflash::sim {

namespace {

bool kernel_is_running() {
  return launch && launch->in_kernel.load(std::memory_order_relaxed) &&
         pthread_equal(pthread_self(), launch->os_thread);
}

// Returns the offset of the interrupted instruction in the kernel's library, from which a report finds the line, or 0.
void note_instruction(void* context) {
  [[maybe_unused]] auto* interrupted = static_cast<ucontext_t*>(context);
  uint64_t instruction = 0;
#if defined(__linux__) && defined(__x86_64__)
  instruction = static_cast<uint64_t>(interrupted->uc_mcontext.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
  instruction = interrupted->uc_mcontext.pc;
#endif
  Dl_info here, kernel;
  if (dladdr(reinterpret_cast<void*>(instruction), &here) &&
      dladdr(reinterpret_cast<void*>(launch->request.kernel), &kernel) && here.dli_fbase == kernel.dli_fbase)
    launch->fault_offset = instruction - reinterpret_cast<uint64_t>(here.dli_fbase);
}

void on_time_up(int, siginfo_t*, void* context) {
  if (!kernel_is_running()) return;   // the flag `expired` ends the launch at the next operation
  note_instruction(context);
  fail(self().where,
       "the launch passed its time limit of %g s in a loop without operations, entered after this one (%s)",
       launch->request.time_limit, self().doing);
}

void on_fault(int number, siginfo_t* information, void* context) {
  if (!kernel_is_running()) {
    signal(number, SIG_DFL);          // not a fault of the kernel: it occurs again on return, and ends the process
    return;
  }
  note_instruction(context);
  const char* address = static_cast<const char*>(information->si_addr);
  const Thread& me = self();
  if (number == SIGFPE)
    fail(me.where, "integer division by zero, after the operation here (%s)", me.doing);
  if (address < me.stack && address >= me.stack - getpagesize())
    fail(me.where, "the thread's stack of %zu bytes overflowed, after the operation here (%s)", kStackBytes, me.doing);
  fail(me.where,
       "a load or store at %p, which is not memory of this process, after the operation here (%s); building with "
       "sanitize=\"address\" names the buffer that the access missed",
       static_cast<const void*>(address), me.doing);
}

// Returns the CPU time of a thread, or the elapsed time if the system does not measure CPU time.
double seconds_run([[maybe_unused]] pthread_t thread) {
  clockid_t clock = CLOCK_MONOTONIC;
#if defined(__linux__)
  pthread_getcpuclockid(thread, &clock);
#endif
  timespec time {};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

// POSIX threads, because the C++ headers for threads take long to compile.
Watchdog::Watchdog(double seconds) : seconds_(seconds) {
  struct sigaction action {};
  action.sa_sigaction = on_time_up;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK | SA_RESTART;
  sigaction(SIGURG, &action, &before_);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&ended_, &attributes);
  pthread_condattr_destroy(&attributes);
  if (pthread_create(&thread_, nullptr, watch, this) == 0) return;
  perror("cuflash.sim: no thread to watch the launch");
  abort();
}

Watchdog::~Watchdog() {
  pthread_mutex_lock(&mutex_);
  over_ = true;
  pthread_cond_signal(&ended_);
  pthread_mutex_unlock(&mutex_);
  pthread_join(thread_, nullptr);
  pthread_cond_destroy(&ended_);
  sigaction(SIGURG, &before_, nullptr);
}

bool Watchdog::is_over_within(double seconds) {
  timespec until {};
  clock_gettime(CLOCK_MONOTONIC, &until);
  const double end = static_cast<double>(until.tv_nsec) + 1e9 * seconds;
  until.tv_sec += static_cast<time_t>(end / 1e9);
  until.tv_nsec = static_cast<long>(end - 1e9 * static_cast<double>(static_cast<time_t>(end / 1e9)));
  while (!over_ && pthread_cond_timedwait(&ended_, &mutex_, &until) == 0) {}
  return over_;
}

void* Watchdog::watch(void* watchdog) {
  Watchdog& own = *static_cast<Watchdog*>(watchdog);
  pthread_mutex_lock(&own.mutex_);
  own.watch();
  pthread_mutex_unlock(&own.mutex_);
  return nullptr;
}

void Watchdog::watch() {
  if (is_over_within(seconds_)) return;
  launch->expired = true;
  // A thread that calls operations ends at its next one, once the system lets it run. Repeated signals are for a thread
  // that has run without an operation for a while; a signal that interrupts code of the runtime only leaves the flag.
  const double had_run = seconds_run(launch->os_thread);
  for (double waited = 0; waited < seconds_ + 1; waited += 0.05) {
    if (is_over_within(0.05)) return;
    if (seconds_run(launch->os_thread) - had_run > 0.02) pthread_kill(launch->os_thread, SIGURG);
  }
  fprintf(stderr,
          "cuflash.sim: the launch passed its time limit of %g s in a loop without operations, entered after %s:%u\n",
          seconds_, self().where.file_name(), self().where.line());
  _exit(70);
}

FaultHandlers::FaultHandlers() {
  if (kSanitized) return;
  // Handlers need a separate stack, because the kernel's stack may have overflowed.
  static char stack[64 << 10];
  stack_t own {};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  sigaltstack(&own, &stack_before_);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &before_[i]);
}

FaultHandlers::~FaultHandlers() {
  if (kSanitized) return;
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  sigaltstack(&stack_before_, nullptr);
}

}  // namespace cuflash::sim
