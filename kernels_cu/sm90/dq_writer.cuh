#pragma once
#include <sm90/q_copy_warps.cuh>

// The last warp of the producer warpgroup, which is called the dQ writer. By bulk copies, it adds the parts of dQ that
// consumers stage in shared memory to the sums in global memory, or loads these sums for consumers that finish dQ.
namespace cuflash::sm90 {

template <class Config>
struct DqWriter : QCopyWarps<Config> {
  using Base = QCopyWarps<Config>;
  using typename Base::PipelineState, typename Base::SharedStorage, typename Base::StepMessage;
  using Base::dq_offset, Base::kBlockKv, Base::kDqPartBytes, Base::kNumConsumers, Base::shared;

  // Release a part of the staging buffer of dQ, once all but the newest kPending bulk copies have read their sources.
  // Called by a warp.
  template <int kPending>
  static CUFLASH_DEVICE void release_dq(int part, bool is_end) {
    ptx::bulk_wait_read<kPending>();
    __syncwarp();
    if (!is_end) ptx::bar_arrive(kDqEmpty + part, kWarpgroupThreads + 32);
    __syncwarp();  // lanes advance together, so that the simulator detects a lane that arrives too early
  }

  // Return the address of a part of the staging buffer.
  static CUFLASH_DEVICE uint32_t dq_address(int part) {
    return ptx::shared_address(ptx::dynamic_shared<unsigned char>() + dq_offset(part));
  }

  // Load the sums of a step's queries into the staging buffer, where consumers add their parts. No copy of the calling
  // warp may still be reading the buffer. Called by a warp.
  static CUFLASH_DEVICE void load_dq_sum(const float* sum, int phase) {
    SharedStorage& smem = shared();
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&smem.dq_sum_loaded), kNumConsumers * kDqPartBytes);
      ptx::bulk_load(dq_address(0), sum, kNumConsumers * kDqPartBytes, ptx::shared_address(&smem.dq_sum_loaded));
    }
    __syncwarp();
    ptx::mbarrier_wait(ptx::shared_address(&smem.dq_sum_loaded), phase);
    __syncwarp();
  }

  // Store a staged part of dQ as sums in global memory, or add it to the sums, by a bulk copy. Called by a warp.
  static CUFLASH_DEVICE void store_dq_sum(float* sum, int part, bool stores) {
    ptx::fence_proxy_async();  // makes the consumers' writes, which the barrier has ordered, visible to bulk copies
    float* const part_sum = sum + part * kDqPartBytes / 4;
    if (stores) ptx::bulk_store(part_sum, dq_address(part), kDqPartBytes);
    else ptx::bulk_add(part_sum, dq_address(part), kDqPartBytes);
    ptx::bulk_commit();
  }

  // Return how many tiles of keys store or add to the sums of a step's queries before the step's own tile of keys does,
  // in kernels that add in the order of the tiles (kAddsDqInOrder).
  static CUFLASH_DEVICE int num_key_tiles_before(int stage) {
    const SharedStorage& smem = shared();
    return smem.queries[stage].stats.visitors.last - smem.works[smem.messages[stage].work].tile.first / kBlockKv;
  }
  // Wait until `num_before` tiles of keys have finished their access to the sums of a step's queries. Return whether
  // `num_before` is 0. Called by a warp.
  static CUFLASH_DEVICE bool wait_for_key_tiles(const int* num_done, int num_before) {
    if (num_before > 0) tile::wait_at_least(num_done, num_before);
    return num_before == 0;
  }
  // Signal that a step has finished its access to its sums. Called by a warp.
  static CUFLASH_DEVICE void signal_addition(int* num_done) {
    tile::wait_bulk_copies();
    tile::signal(num_done, 1);
  }

  // Run the dQ writer: for each step, wait until a consumer warpgroup has staged its part of dQ, add the part to the
  // sums, and release the buffer once the copy has read it. If a step finishes dQ, load the sums for the consumers
  // instead. Called by a warp.
  static CUFLASH_DEVICE void dq_writer() {
    SharedStorage& smem = shared();
    int phase = 0;
    int* unsignalled = nullptr;  // counter of the previous step; its additions are signaled once they are complete
    for (PipelineState state;; state = state.next()) {
      tile::wait_full(smem.q[state.stage], state.phase);
      const StepMessage& message = smem.messages[state.stage];
      const int flags = message.flags;
      const bool is_end = flags & StepMessage::kEndOfWork,
                 finishes = Config::kFinishesDqInOrder && flags & StepMessage::kFinalizesDq;
      float* const sum = message.dq_sum;
      int* const arrivals = message.arrivals;
      DqSemaphoreOp dq{};
      if (Config::kFinishesDqInOrder && flags & StepMessage::kUsesDqSemaphore) dq = message.dq;
      const int num_before = Config::kAddsDqInOrder && !is_end ? num_key_tiles_before(state.stage) : 0;
      tile::arrive(smem.q[state.stage].empty);
      if (dq.awaited_bits_or_count != 0) wait_dq_semaphore(dq, finishes);
      if (finishes) {  // the previous tile has signaled that its copies are complete
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
      if constexpr (Config::kAddsDqInOrder) {
        if (unsignalled != nullptr) signal_addition(unsignalled);
        unsignalled = arrivals;
      }
      if (is_end) return;
      const bool is_first = Config::kAddsDqInOrder && wait_for_key_tiles(arrivals, num_before);
#pragma unroll
      for (int part = 0; part < kNumConsumers; ++part) {
        ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
        store_dq_sum(sum, part, is_first || (Config::kFinishesDqInOrder && flags & StepMessage::kStoresDq));
      }
      if (dq.stored != 0 || dq.is_done) signal_dq_semaphore(dq);
    }
  }

  // Run the dQ writer in kernels in which the last tile of keys that arrives at a tile of queries finishes its dQ. A
  // warp signals its earlier additions before it waits, so that no two blocks wait for each other. Called by a warp.
  static CUFLASH_DEVICE void dq_writer_fused() {
    SharedStorage& smem = shared();
    int phase = 0, count = 0;
    int* unsignalled = nullptr;  // counter of the previous step; its additions are signaled once they are complete
    const auto signal_previous = [&] {
      if (unsignalled == nullptr) return;
      tile::wait_bulk_copies();
      tile::signal(unsignalled, kArrivalIsDone);
      unsignalled = nullptr;
    };
    const auto arrive_early = [&](const PipelineState& state) {  // early, since the atomic has a high latency
      tile::wait_full(smem.q[state.stage], state.phase);
      if (!smem.messages[state.stage].is(StepMessage::kEndOfWork))
        count = tile::start_fetch_increment(smem.messages[state.stage].arrivals);
    };
    PipelineState state;
    arrive_early(state);
    while (!smem.messages[state.stage].is(StepMessage::kEndOfWork)) {
      const StepMessage& message = smem.messages[state.stage];
      count = tile::broadcast_lane_0(count);
      const auto arrival = DqArrival::of(count, smem.queries[state.stage].stats.visitors.num);
      const bool is_last = arrival.is_last, is_first = arrival.before == 0;
      if (count / kArrivalIsDone < arrival.num_awaited) signal_previous();
      wait_for_arrivals(arrival, message.arrivals);  // with acquire semantics, which the counting alone does not have
      if (!is_first) ptx::fence_proxy_async_global();
      if (ptx::elect_one())
        smem.dq_finish = !is_last ? DqFinish::kNot : is_first ? DqFinish::kAlone : DqFinish::kWithSums;
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
};

}  // namespace cuflash::sm90
