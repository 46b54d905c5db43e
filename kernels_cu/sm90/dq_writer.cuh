#pragma once
#include <sm90/dq_arrivals.cuh>
#include <sm90/q_producer.cuh>

// The last warp of the producer warpgroup: it adds the parts of dQ that consumers stage in shared memory to the sums in
// global memory, by bulk copies, or loads these sums for consumers that finish dQ.
namespace cuflash {

// A part of dQ's room may be written anew, once at most kPending additions are not read.
template <int kPending>
CUFLASH_DEVICE void release_dq(int part, bool is_end) {
  ptx::bulk_wait_read<kPending>();
  __syncwarp();
  if (!is_end) ptx::bar_arrive(kDqEmpty + part, kWarpgroupThreads + 32);
  __syncwarp();  // the simulator's lanes too go on together, so that it sees who arrives too early
}

CUFLASH_DEVICE uint32_t dq_address(int part) {
  return ptx::shared_address(ptx::dynamic_shared<unsigned char>() + dq_offset(part));
}

// Have the sums of a step's queries brought to dQ's room, for consumers to add theirs. Called by a warp, none of whose copies
// reads there.
CUFLASH_DEVICE void load_dq_sum(const float* sum, int phase) {
  SharedStorage& smem = shared();
  if (elect_one()) {
    ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&smem.dq_sum_loaded), kNumConsumers * kDqPartBytes);
    ptx::bulk_load(dq_address(0), sum, kNumConsumers * kDqPartBytes, ptx::shared_address(&smem.dq_sum_loaded));
  }
  __syncwarp();
  ptx::mbarrier_wait(ptx::shared_address(&smem.dq_sum_loaded), phase);
  __syncwarp();
}

// Have a part of dQ, which its consumers have put into its room, stored as sums, or added to them. Called by a warp.
CUFLASH_DEVICE void store_dq_sum(float* sum, int part, bool stores) {
  ptx::fence_proxy_async();  // of what others wrote: they are waited for
  float* const part_sum = sum + part * kDqPartBytes / 4;
  if (stores) ptx::bulk_store(part_sum, dq_address(part), kDqPartBytes);
  else ptx::bulk_add(part_sum, dq_address(part), kDqPartBytes);
  ptx::bulk_commit();
}

// Whether a step is the first to visit its queries; if not, once the first one has stored their sums. Called by a warp.
CUFLASH_DEVICE bool arrives_first(int* arrivals) {
  using attention::kDqIsStored;
  const int num_before = tile::warp_fetch_increment(arrivals);
  if (num_before != 0 && !(num_before & kDqIsStored)) tile::wait_for_bits(arrivals, kDqIsStored);
  return num_before == 0;
}

// Step after step, have what the consumers make of dQ added to the sums, once all of a warpgroup has put it into its room,
// which is left once it is read; or have them add the sums. Called by a warp.
CUFLASH_DEVICE void dq_writer() {
  SharedStorage& smem = shared();
  int phase = 0;
  for (PipelineState state;; state = state.next()) {
    tile::wait_full(smem.q[state.stage], state.phase);
    const StepMessage& message = smem.messages[state.stage];
    const int flags = message.flags;
    const bool is_end = flags & StepMessage::kEndOfWork, finishes = kFinishesDqInOrder &&
        flags & StepMessage::kFinalizesDq;
    float* const sum = message.dq_sum;
    int* const arrivals = message.arrivals;
    attention::DqSemaphoreOp dq{};
    if (kFinishesDqInOrder && flags & StepMessage::kUsesDqSemaphore) dq = message.dq;
    tile::arrive(smem.q[state.stage].empty);
    if (dq.awaited_bits_or_count != 0) attention::wait_dq_semaphore(dq, finishes);
    if (finishes) {  // the tile before has told that all of its own copies are made
      load_dq_sum(sum, phase);
      phase ^= 1;
#pragma unroll
      for (int part = 0; part < kNumConsumers; ++part) ptx::bar_arrive(kDqEmpty + part, kWarpgroupThreads + 32);
#pragma unroll
      for (int part = 0; part < kNumConsumers; ++part) ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
      continue;
    }
    release_dq<1>(0, is_end);
    release_dq<0>(1, is_end);
    if (is_end) return;
    // asked now: nothing of an earlier step is to be done
    const bool is_first = kFirstArrivalStoresDq && arrives_first(arrivals);
#pragma unroll
    for (int part = 0; part < kNumConsumers; ++part) {
      ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
      store_dq_sum(sum, part, is_first || (kFinishesDqInOrder && flags & StepMessage::kStoresDq));
    }
    if (dq.stored != 0 || dq.is_done) attention::signal_dq_semaphore(dq);
    if (is_first) {
      tile::wait_bulk_copies();
      tile::signal(arrivals, attention::kDqIsStored);
    }
  }
}

// The same of a list where the last tile of keys to come to queries finishes their dQ. Whoever comes waits for nobody until
// what it did before is told. Called by a warp.
CUFLASH_DEVICE void dq_writer_fused() {
  SharedStorage& smem = shared();
  int phase = 0, count = 0;
  int* unsignalled = nullptr;  // of the step before, whose additions others are to hear of once they are made
  const auto signal_previous = [&] {
    if (unsignalled == nullptr) return;
    tile::wait_bulk_copies();
    tile::signal(unsignalled, attention::kArrivalIsDone);
    unsignalled = nullptr;
  };
  const auto arrive_early = [&](const PipelineState& state) {  // early: the answer is long in coming
    tile::wait_full(smem.q[state.stage], state.phase);
    if (!smem.messages[state.stage].is(StepMessage::kEndOfWork)) count =
        tile::start_fetch_increment(smem.messages[state.stage].arrivals);
  };
  PipelineState state;
  arrive_early(state);
  while (!smem.messages[state.stage].is(StepMessage::kEndOfWork)) {
    const StepMessage& message = smem.messages[state.stage];
    count = tile::broadcast_lane_0(count);
    const auto arrival = attention::DqArrival::of(count, smem.queries[state.stage].stats.arrivals.expected);
    const bool is_last = arrival.is_last, is_first = arrival.before == 0;
    if (count / attention::kArrivalIsDone < arrival.num_awaited) {
      signal_previous();
      attention::wait_for_arrivals(arrival, message.arrivals);
    }
    if (!is_first) ptx::fence_proxy_async_global();
    if (elect_one()) smem.dq_finish = !is_last ? DqFinish::kNot : is_first ? DqFinish::kAlone : DqFinish::kWithSums;
    __syncwarp();
    if (is_last && !is_first) {
      ptx::bulk_wait_read<0>();
      __syncwarp();
      load_dq_sum(message.dq_sum, phase);
      phase ^= 1;
    }
    release_dq<1>(0, false);
    release_dq<0>(1, false);
    signal_previous();
    const PipelineState next_state = state.next();
    arrive_early(next_state);
#pragma unroll
    for (int part = 0; part < kNumConsumers; ++part) {
      ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
      if (!is_last) store_dq_sum(message.dq_sum, part, is_first);
    }
    unsignalled = is_last ? nullptr : message.arrivals;
    tile::arrive(smem.q[state.stage].empty);
    state = next_state;
  }
  signal_previous();
}

}  // namespace cuflash
