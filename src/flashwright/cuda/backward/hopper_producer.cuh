// What does not compute in the Hopper backward: one thread starts the copy engine's copies, and takes the tiles of a
// persistent thread block; others send weights, have dQ added, wait for turns and pass them on.
#pragma once
#include "backward/hopper_shared.cuh"
#include "ptx/atomics.cuh"

// Copies everything that the consumers read, in the order in which they read it.
struct Producer {
    const HopperArguments &args;
    const SharedMemory &shared;
    QPlace Q_place;
    dOPlace dO_place;

    // What a tile needs. Its steps are counted from `first_step`, and it is the thread block's tile number `index`.
    DEVICE void copy(const Work &work, int steps, int first_step, int index) {
        const KeysPlace place = KeysPlace::after(index);
        if (steps > 0)
            fill_Q(work, 0, first_step);
        for (int group = 0; group < shape::key_groups; ++group)
            fill_keys(work, shared.K(group, place.stage), args.K, group, place.lap); // @operand K
        if constexpr (cfg::paired)
            fill_other_keys(work);
        if (steps > 0)
            fill_dO(work, 0);
        for (int group = 0; group < shape::key_groups; ++group)
            fill_keys(work, shared.V(group, place.stage), args.V, group, place.lap); // @operand V
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
            fill_Q(work, step, first_step);
            fill_dO(work, step);
        }
    }

  private:
    // Packed tensors have one batch.
    static DEVICE int batch(const Work &work) { return variant::variable_lengths ? 0 : work.tile.batch; }
    static DEVICE int first_key(const Work &work) { return work.sequence.kv_start + work.first_key; }
    DEVICE QueryStep at(const Work &work, int step) const { return QuerySteps<Work>{args.backward, work}.at(step); }
    DEVICE int64 padded(const Work &work, const QueryStep &at) const {
        return padded_row<cfg::B_r>(args.backward, work.sequence, at.head, work.tile.batch) + at.first_row;
    }

    DEVICE void fill_keys(const Work &work, const Slot &slot, const TensorMap &map, int group, uint32 lap) const {
        // The consumers have left the tile before. With two stages they have left the one before that: none is announced
        // sooner.
        if constexpr (shape::announces_tiles && !cfg::keys_ahead)
            slot.wait_until_empty(lap);
        fill<warpgroup_rows, shape::panels>(slot, map, first_key(work) + group * warpgroup_rows, work.tile.kv_head,
                                            batch(work));
    }
    // There is room for them as soon as there is for the thread block's own, which are read with them.
    DEVICE void fill_other_keys(const Work &work) const {
        const int rank = rank_in_cluster();
        const int first_other = first_key(work) + (rank ? -cfg::B_c : cfg::B_c);
        for (int group = 0; group < shape::key_groups; ++group) {
            const Slot slot = shared.other_K(group);
            mbarrier_arrive_expecting(slot.full, shape::other_K_bytes);
            for (int panel = 0; panel < shape::panels / shape::together; ++panel)
                bulk_copy_tile(slot.data + panel * panel_bytes<warpgroup_rows>, args.K, slot.full, // @operand K
                               (shape::together * panel + rank) * panel_columns, first_other + group * warpgroup_rows,
                               work.tile.kv_head, batch(work));
        }
    }
    DEVICE void fill_Q(const Work &work, int step, int first_step) {
        const QueryStep at = this->at(work, step);
        const Slot slot = shared.Q(Q_place.stage);
        slot.wait_until_empty(Q_place.lap); // @operand Q
        const bool masked = at.block < work.queries.plain_begin || at.block >= work.queries.plain_end;
        const int rows = min(work.sequence.q_length - at.first_row, cfg::B_r);
        float *const sums = dQ_sums_of(args.backward, work, at);
        // The arrival that announces the copies makes the note visible too.
        StepNote{at.first_row, rows, masked, sums}.write(shared.note(first_step + step));
        fill<cfg::B_r, shape::panels, shape::terms_bytes>(slot, args.Q, // @operand Q
                                                          work.sequence.q_start + at.first_row, at.head, batch(work));
        bulk_copy_bytes(shared.lse(Q_place.stage), args.backward.row_lse + padded(work, at), slot.full, shape::terms_bytes);
        Q_place.advance();
    }
    DEVICE void fill_dO(const Work &work, int step) {
        const QueryStep at = this->at(work, step);
        const Slot slot = shared.dO(dO_place.stage);
        slot.wait_until_empty(dO_place.lap); // @operand dO
        fill<cfg::B_r, shape::panels, shape::terms_bytes>(slot, args.dO, // @operand dO
                                                          work.sequence.q_start + at.first_row, at.head, batch(work));
        bulk_copy_bytes(shared.dots(dO_place.stage), args.backward.row_dot + padded(work, at), slot.full,
                        shape::terms_bytes);
        dO_place.advance();
    }
};

struct ReadsOnly {
    DEVICE void operator()(int) const {}
};

// The tiles of a thread block, for one thread: `visit` is given each with its steps, the number of steps before them, and
// its own number. `announce` is called before each tile of a persistent thread block is known.
template <class Visit, class Announce = ReadsOnly>
DEVICE void for_each_tile(const HopperArguments &args, const SharedMemory &shared, const Visit &visit,
                          const Announce &announce = {}) {
    if constexpr (shape::announces_tiles) {
        int first_step = 0;
#pragma unroll 1
        for (int index = 0;; ++index) {
            announce(index);
            const Slot slot = shared.tile(index);
            slot.wait_until_full(TilePlace::after(index).lap);
            const TileNote note = TileNote::read(slot.data);
            if (note.is_none())
                return;
            visit(work_of(args.backward, note.tile), note.steps, first_step, index);
            first_step += note.steps;
            TileNote::release(slot);
        }
    } else {
        const Work work = work_of(args.backward, blockIdx.x);
        if (const int steps = work.steps(args.backward); steps > 0)
            visit(work, steps, 0, 0);
    }
}

// Takes the tiles of a persistent thread block and announces them to all that read them, the thread that copies among
// them: the first by the thread block's own number, then each that nobody has taken when the copies for the one before
// have been started. Later would leave the copy engine idle; earlier would leave a tile to a thread block that is busy
// while others have none. In order, the first is taken too: tiles wait for those before them, which are then all of thread
// blocks that have begun.
//
// A pair takes two neighbouring tiles, which have the same steps, when the copies of its first thread block have been
// started.
struct Announcer {
    const BackwardArguments &args;
    const SharedMemory &shared;

    DEVICE void announce(int index) const {
        const int tiles = key_tiles(args);
        int tile = index == 0 && !cfg::ordered ? blockIdx.x : take();
        // Packed sequences have places for tiles that they do not need.
        while (tile < tiles && !work_of(args, tile).exists())
            tile = take();
        const bool is_none = tile >= tiles;
        const Slot slot = shared.tile(index);
        slot.wait_until_empty(TilePlace::after(index).lap);
        const int steps = is_none ? TileNote::none : work_of(args, tile).steps(args);
        TileNote{tile, steps}.announce(slot);
        if constexpr (cfg::paired) {
            TileNote{tile + 1, steps}.announce_in_block(slot, 1);
            // Until the last tile has been released: nothing arrives from the other thread block when this one has ended.
            if (is_none)
                shared.tile(index + 1).wait_until_empty(TilePlace::after(index + 1).lap);
        }
    }

  private:
    DEVICE int take() const {
        return (cfg::ordered ? 0 : gridDim.x) + shape::together * (int)add_relaxed(args.tiles_taken, 1);
    }
};

DEVICE void produce(const HopperArguments &args, const SharedMemory &shared) {
    Producer producer{args, shared};
    const Announcer announcer{args.backward, shared};
    for_each_tile(
        args, shared,
        [&](const Work &work, int steps, int first_step, int index) { producer.copy(work, steps, first_step, index); },
        [&](int index) {
            if (!cfg::paired || rank_in_cluster() == 0)
                announcer.announce(index);
        });
}

// Sends dS to the other thread block of a pair, and announces what that one sends.
DEVICE void send_weights(const HopperArguments &args, const SharedMemory &shared) {
    constexpr int bytes = shape::key_groups * shape::weight_group_bytes;
    const uint32 other = rank_in_cluster() ^ 1;
    for_each_tile(args, shared, [&](const Work &, int steps, int first_step, int) {
#pragma unroll 1
        for (int step = first_step; step < first_step + steps; ++step) {
            const Slot received = shared.received_slot(step);
            // What was expected in the same stage before has come: the consumers have waited for it before they wrote dS of
            // the last step, for which this thread has waited.
            mbarrier_arrive_expecting(received.full, bytes);
            // Written after the other has read what was sent in the same stage before.
            shared.weights(step).wait_until_full(WeightsPlace::after(step).lap);
            bulk_copy_to_block(address_in_block(shared.received(step, 0), other), shared.dS(step, 0),
                               address_in_block(received.full, other), bytes);
        }
    });
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
DEVICE void add_blocks_of_dQ(const HopperArguments &args, const SharedMemory &shared) {
    TurnPlace place;
    for_each_tile(args, shared, [&](const Work &work, int steps, int, int) {
        const QuerySteps<Work> query_steps{args.backward, work};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const QueryStep at = query_steps.at(step);
            const Turn turn = turn_of(args.backward, work, at);
            float *const sums = dQ_sums_of(args.backward, work, at);
            if constexpr (cfg::ordered)
                turn.wait();
#pragma unroll
            for (int part = 0; part < cfg::n_consumers; ++part) {
                const Slot slot = shared.dQ(part);
                slot.wait_until_full(place.lap);
                bulk_add_floats(sums + part * (shape::dQ_part_bytes / (int)sizeof(float)), slot.data,
                                shape::dQ_part_bytes);
                bulk_commit_group();
            }
            free_parts_of_dQ(shared);
            if constexpr (cfg::ordered) {
                bulk_wait_until_added();
                turn.pass();
            }
            place.advance();
        }
    });
    // What it has read, it adds before the grid ends.
}

// Out of order: takes the turn for both thread blocks of a pair, so that their columns have the same order.
DEVICE int take_turn(const SharedMemory &shared, const Turn &turn, int turns) {
    if constexpr (!shape::sends_turns)
        return turn.take();
    const Slot slot = shared.taken_turn(turns);
    const uint32 lap = OrderPlace::after(turns).lap;
    if (rank_in_cluster() == 0) {
        const int number = turn.take();
        slot.wait_until_empty(lap);
        TakenTurn::send(slot, number);
        return number;
    }
    slot.wait_until_full(lap);
    const int number = TakenTurn::read(slot);
    TakenTurn::release(slot);
    return number;
}

// Waits until it is this thread block's turn to add to each block of dQ that it adds to, and tells the consumers.
DEVICE void wait_for_turns(const HopperArguments &args, const SharedMemory &shared) {
    int turns = 0;
    for_each_tile(args, shared, [&](const Work &work, int steps, int, int) {
        const QuerySteps<Work> query_steps{args.backward, work};
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ++turns) {
            const QueryStep at = query_steps.at(step);
            Turn turn = turn_of(args.backward, work, at);
            if constexpr (cfg::ordered)
                turn.wait<true>();
            shared.passed_turn(turns).wait_until_empty(OrderPlace::after(turns).lap);
            // Not sooner: those that take a later turn wait for this one.
            if constexpr (!cfg::ordered) {
                turn.own = take_turn(shared, turn, turns);
                turn.wait<false>();
            }
            const Slot slot = shared.turn(turns);
            if constexpr (cfg::finishes_dQ)
                TurnNote{turn.is_first(), turn.is_last(), dQ_rows_of(args.backward, work, at)}.write(slot.data);
            mbarrier_arrive(slot.full);
        }
    });
}

// Passes each turn on when all consumers have added: another thread, for that takes as long as a step of some kernels, and
// so does looking for the next turn.
DEVICE void pass_turns(const HopperArguments &args, const SharedMemory &shared) {
    int turns = 0;
    for_each_tile(args, shared, [&](const Work &work, int steps, int, int) {
        const QuerySteps<Work> query_steps{args.backward, work};
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ++turns) {
            const Turn turn = turn_of(args.backward, work, query_steps.at(step));
            mbarrier_wait(shared.turn(turns).empty, OrderPlace::after(turns).lap);
            turn.pass<cfg::ordered>();
            mbarrier_arrive(shared.passed_turn(turns).empty);
        }
    });
}
