// cp.async: the schedule chooses when copies complete, at the latest when their thread waits for them.
#include <cstdio>

#include "memory.hpp"
#include "residents.hpp"

namespace cuflash::sim {

namespace {

void land(Copy& copy) {
  as_engine(copy.engine, copy.caller, [&] {
    kernel_reads(copy.source, static_cast<size_t>(copy.source_bytes));
    kernel_writes(copy.destination, static_cast<size_t>(copy.bytes));
    Unwatched unwatched;
    if (copy.source_bytes)
      note_access(*self().cta, copy.source, static_cast<size_t>(copy.source_bytes), Kind::read, {copy.caller, {}});
    memcpy(copy.destination, copy.source, static_cast<size_t>(copy.source_bytes));
    memset(copy.destination + copy.source_bytes, 0, static_cast<size_t>(copy.bytes - copy.source_bytes));
    release(copy.engine);
  });
  copy.landed = true;
}

// Earlier reads and writes must be complete by now, because the copy may complete at any time after its issue.
void leave_in_flight(Copy& copy) {
  as_engine(copy.engine, copy.caller, [&] {
    kernel_writes(copy.destination, static_cast<size_t>(copy.bytes));
    Unwatched unwatched;
    if (launch->request.schedule.poison) memset(copy.destination, 0xff, static_cast<size_t>(copy.bytes));
  });
}

// Completes the copies of all groups except the newest `pending`, and optionally those that are not committed.
void wait_for(Thread& thread, int pending, bool uncommitted) {
  auto& copies = thread.copies;
  size_t done = 0;
  while (done < copies.size() && (uncommitted || copies[done].group < thread.groups - pending)) {
    if (!copies[done].landed) land(copies[done]);
    acquire(copies[done].engine);
    ++done;
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace

void cp_async(uint32_t destination, const void* source, int bytes, int source_bytes, const char* name, Location where) {
  Entry entry(name, where);
  Thread& me = self();
  unsigned char* to = shared_bytes(destination, static_cast<size_t>(bytes), static_cast<size_t>(bytes), name, where);
  if (source_bytes < 0 || source_bytes > bytes)
    fail(where, "%s copies from 0 to %d bytes; got %d", name, bytes, source_bytes);
  check_aligned(source, static_cast<size_t>(bytes), name, where);
  if (void* outside = source_bytes ? first_poisoned(source, static_cast<size_t>(source_bytes)) : nullptr)
    fail(where, "%s reads %d bytes at %p, of which %p is outside its buffer", name, source_bytes, source, outside);

  void*& engine = me.engines[me.groups % kCopyEngines];
  if (!engine) {
    char title[64];
    snprintf(title, sizeof title, "cp.async of CUDA thread %d", me.linear);
    engine = new_fiber(title);
  }
  release(&me.groups);
  as_engine(engine, nullptr, [&] { acquire(&me.groups); });
  Copy copy{to, source, bytes, source_bytes, me.groups, false, engine, __builtin_return_address(0)};
  const Copies when = launch->request.schedule.copies;
  if (when == Copies::eager || (when == Copies::random && launch->random.one_in(2))) land(copy);
  else leave_in_flight(copy);
  me.copies.push_back(copy);
}

void cp_async_commit(Location where) {
  Entry entry("cp_async_commit", where);
  ++self().groups;
}

void cp_async_wait(int pending, Location where) {
  Entry entry("cp_async_wait", where);
  wait_for(self(), pending, false);
}

void cp_async_wait_all(Location where) {
  Entry entry("cp_async_wait_all", where);
  wait_for(self(), 0, true);
}

}  // namespace cuflash::sim
