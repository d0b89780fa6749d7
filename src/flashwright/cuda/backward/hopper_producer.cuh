// What does not compute in the Hopper backward: one thread starts the copy engine's copies, another waits for turns.
#pragma once
#include "backward/hopper_shared.cuh"

// Copies everything that the consumers read, in the order in which they read it.
DEVICE void produce(const HopperArguments &args, const Work &work, const SharedMemory &shared) {
    const BackwardArguments &backward = args.backward;
    const QuerySteps<Work> query_steps{backward, work};
    const int batch = variant::variable_lengths ? 0 : work.tile.batch; // packed tensors have one batch
    const int first_key = work.sequence.kv_start + work.first_key;
    const int steps = work.steps(backward);
    QPlace Q_place;
    dOPlace dO_place;

    const auto fill_keys = [&](const Slot &slot, const TensorMap &map, int group) {
        fill<warpgroup_rows, shape::panels>(slot, map, first_key + group * warpgroup_rows, work.tile.kv_head, batch);
    };
    const auto fill_Q = [&](int step) {
        const QueryStep at = query_steps.at(step);
        const Slot slot = shared.Q(Q_place.stage);
        slot.wait_until_empty(Q_place.lap); // @operand Q
        const int64 row = padded_row<cfg::B_r>(backward, work.sequence, at.head, work.tile.batch) + at.first_row;
        const bool masked = at.block < work.queries.plain_begin || at.block >= work.queries.plain_end;
        const int rows = min(work.sequence.q_length - at.first_row, cfg::B_r);
        // The arrival that announces the copies makes the note visible too.
        StepNote{at.first_row, rows, masked, backward.dQ_sums + row * cfg::d_head}.write(shared.note(step));
        fill<cfg::B_r, shape::panels, shape::terms_bytes>(slot, args.Q, // @operand Q
                                                          work.sequence.q_start + at.first_row, at.head, batch);
        bulk_copy_bytes(shared.lse(Q_place.stage), backward.row_lse + row, slot.full, shape::terms_bytes);
        Q_place.advance();
    };
    const auto fill_dO = [&](int step) {
        const QueryStep at = query_steps.at(step);
        const Slot slot = shared.dO(dO_place.stage);
        slot.wait_until_empty(dO_place.lap); // @operand dO
        fill<cfg::B_r, shape::panels, shape::terms_bytes>(slot, args.dO, // @operand dO
                                                          work.sequence.q_start + at.first_row, at.head, batch);
        const int64 row = padded_row<cfg::B_r>(backward, work.sequence, at.head, work.tile.batch) + at.first_row;
        bulk_copy_bytes(shared.dots(dO_place.stage), backward.row_dot + row, slot.full, shape::terms_bytes);
        dO_place.advance();
    };

    for (int group = 0; group < shape::key_groups; ++group)
        fill_keys(shared.K(group), args.K, group); // @operand K
    if constexpr (cfg::paired) {
        const int rank = rank_in_cluster();
        const int first_other = first_key + (rank ? -cfg::B_c : cfg::B_c);
        for (int group = 0; group < shape::key_groups; ++group) {
            const Slot slot = shared.other_K(group);
            mbarrier_arrive_expecting(slot.full, shape::other_K_bytes);
            for (int panel = 0; panel < shape::panels / shape::together; ++panel)
                bulk_copy_tile(slot.data + panel * panel_bytes<warpgroup_rows>, args.K, slot.full, // @operand K
                               (shape::together * panel + rank) * panel_columns, first_other + group * warpgroup_rows,
                               work.tile.kv_head, batch);
        }
    }
    fill_Q(0);
    for (int group = 0; group < shape::key_groups; ++group)
        fill_keys(shared.V(group), args.V, group); // @operand V
    fill_dO(0);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
        fill_Q(step);
        fill_dO(step);
    }
}

// Sends dS to the other thread block of a pair, and announces what that one sends.
DEVICE void send_weights(const HopperArguments &args, const Work &work, const SharedMemory &shared) {
    constexpr int bytes = shape::key_groups * shape::weight_group_bytes;
    const uint32 other = rank_in_cluster() ^ 1;
    const int steps = work.steps(args.backward);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const Slot received = shared.received_slot(step);
        if (step >= shape::weight_stages)
            received.wait_until_full(WeightsPlace::after(step - shape::weight_stages).lap);
        mbarrier_arrive_expecting(received.full, bytes);
        // Written after the other has read what was sent in the same stage before.
        shared.weights(step).wait_until_full(WeightsPlace::after(step).lap);
        bulk_copy_to_block(address_in_block(shared.received(step, 0), other), shared.dS(step, 0),
                           address_in_block(received.full, other), bytes);
    }
}

DEVICE Turn turn_of(const HopperArguments &args, const Work &work, const QueryStep &step) {
    return Turn::of<Work, cfg::B_r, cfg::B_c, shape::together>(args.backward, work, step,
                                                               cfg::paired ? rank_in_cluster() : 0);
}

// Gives each part of dQ back as soon as the copy engine has read it.
template <int part = 0> DEVICE void free_parts_of_dQ(const SharedMemory &shared) {
    if constexpr (part < cfg::n_consumers) {
        bulk_wait_until_read<cfg::n_consumers - 1 - part>();
        mbarrier_arrive(shared.dQ(part).empty);
        free_parts_of_dQ<part + 1>(shared);
    }
}

// Has the copy engine add each block of dQ that the consumers leave in shared memory, a warpgroup's part at a time: none
// waits for another.
DEVICE void add_blocks_of_dQ(const HopperArguments &args, const Work &work, const SharedMemory &shared) {
    const QuerySteps<Work> query_steps{args.backward, work};
    const int steps = work.steps(args.backward);
    TurnPlace place;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const QueryStep at = query_steps.at(step);
        const Turn turn = turn_of(args, work, at);
        const int64 row = padded_row<cfg::B_r>(args.backward, work.sequence, at.head, work.tile.batch) + at.first_row;
        if constexpr (cfg::ordered)
            turn.wait();
#pragma unroll
        for (int part = 0; part < cfg::n_consumers; ++part) {
            const Slot slot = shared.dQ(part);
            slot.wait_until_full(place.lap);
            bulk_add_floats(args.backward.dQ_sums + row * cfg::d_head + part * (shape::dQ_part_bytes / (int)sizeof(float)),
                            slot.data, shape::dQ_part_bytes);
            bulk_commit_group();
        }
        free_parts_of_dQ(shared);
        if constexpr (cfg::ordered) {
            bulk_wait_until_added();
            turn.pass();
        }
        place.advance();
    }
    bulk_wait_until_added();
}

// Waits until it is this thread block's turn to add to each block of dQ that it adds to, and passes the turn on when it
// has added.
DEVICE void keep_turns(const HopperArguments &args, const Work &work, const SharedMemory &shared) {
    const QuerySteps<Work> query_steps{args.backward, work};
    const int steps = work.steps(args.backward);
    const Slot slot = shared.turn();
    TurnPlace place;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const Turn turn = turn_of(args, work, query_steps.at(step));
        turn.wait();
        mbarrier_arrive(slot.full);
        place.advance();
        slot.wait_until_empty(place.lap); // all consumers have added
        turn.pass();
    }
}
