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
        const Terms terms = shared.terms(Q_place.stage);
        const int64 row = padded_row<cfg::B_r>(backward, work.sequence, at.head, work.tile.batch) + at.first_row;
        const bool masked = at.block < work.queries.plain_begin || at.block >= work.queries.plain_end;
        const int rows = min(work.sequence.q_length - at.first_row, cfg::B_r);
        // The arrival that announces the copies makes the note visible too.
        StepNote{at.first_row, rows, masked, backward.dQ_sums + row * cfg::d_head}.write(shared.note(step));
        fill<cfg::B_r, shape::panels, Terms::bytes>(slot, args.Q, // @operand Q
                                                    work.sequence.q_start + at.first_row, at.head, batch);
        bulk_copy_bytes(terms.shared, backward.row_lse + row, slot.full, Terms::array_bytes);
        bulk_copy_bytes(terms.shared + Terms::array_bytes, backward.row_dot + row, slot.full, Terms::array_bytes);
        Q_place.advance();
    };
    const auto fill_dO = [&](int step) {
        const QueryStep at = query_steps.at(step);
        const Slot slot = shared.dO(dO_place.stage);
        slot.wait_until_empty(dO_place.lap); // @operand dO
        fill<cfg::B_r, shape::panels>(slot, args.dO, work.sequence.q_start + at.first_row, at.head, batch); // @operand dO
        dO_place.advance();
    };

    for (int group = 0; group < shape::key_groups; ++group)
        fill_keys(shared.K(group), args.K, group); // @operand K
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

// Waits until it is this thread block's turn to add to each block of dQ, and passes the turn on when it has added.
DEVICE void keep_turns(const HopperArguments &args, const Work &work, const SharedMemory &shared) {
    const QuerySteps<Work> query_steps{args.backward, work};
    const int steps = work.steps(args.backward);
    const Slot slot = shared.turn();
    TurnPlace place;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const Turn turn = Turn::of<Work, cfg::B_r, cfg::B_c>(args.backward, work, query_steps.at(step));
        turn.wait();
        mbarrier_arrive(slot.full);
        place.advance();
        slot.wait_until_empty(place.lap); // all consumers have added
        turn.pass();
    }
}
