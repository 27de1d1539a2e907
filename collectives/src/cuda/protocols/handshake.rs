//! Calls without data, and the state of a rank that its blocks read and advance.

use symmpool_allocator::models::mutant;

use super::calls::{LAST, ModelRanks, epochs};
use super::search::{Answer, KernelModel, prove};

/// First epochs of models: of fresh memory, and where epochs begin anew.
const FIRST: [u32; 3] = [1, LAST - 2, LAST - 1];

/// Kernels of leader blocks alone: `barrier/barrier.cu`.
fn handshakes(world: u32, words: u32, first: u32) -> KernelModel {
    let mut model = KernelModel::default();
    ModelRanks { world, words, first }.leaders(&mut model, &epochs(first, 6), false);
    model
}

/// Rules S1, S4, S6.
#[test]
fn descriptions_are_those_of_the_call() {
    let mutants = [
        "mutant_one_handshake_slot",
        "mutant_epoch_wraps_to_one",
        "mutant_any_flag",
        "mutant_one_flag_of_two",
    ];
    prove(&mutants, || {
        let models = FIRST.map(|first| [handshakes(2, 2, first), handshakes(3, 1, first)]);
        models.into_iter().flatten().collect()
    });
}

/// Blocks of one rank, each of which reads the epoch and has the others know: `Session::advance`.
fn state(blocks: u32, first: u32) -> KernelModel {
    let mut model = KernelModel::default();
    let before = if first == 2 { LAST } else { first - 1 };
    let state = model.place("the state", (before, 0));
    let arrived = model.place("the blocks that have arrived", (0, 0));
    let of = if mutant("mutant_first_block_advances") { 1 } else { blocks };
    for block in 0..blocks {
        let thread = model.thread(0, &format!("block {block}"));
        let mut last = before;
        for epoch in epochs(first, 5) {
            let expected = last;
            let judge = move |found: &[(u32, u32)]| Answer::of(found[0].0 == expected);
            if mutant("mutant_state_read_early") {
                model.look(thread, "reads the state", vec![state], judge);
                model.kernel(thread, epoch);
            } else {
                // `begin_kernel` comes before the session's constructor.
                model.kernel(thread, epoch);
                model.look(thread, "reads the state", vec![state], judge);
            }
            let mut then = vec![(state, (epoch, 0))];
            if !mutant("mutant_arrivals_kept") {
                then.push((arrived, (0, 0)));
            }
            model.arrive(thread, arrived, of, then);
            last = epoch;
        }
    }
    model
}

/// Rule S2.
#[test]
fn every_block_has_the_epoch_of_its_call() {
    let mutants =
        ["mutant_first_block_advances", "mutant_state_read_early", "mutant_arrivals_kept"];
    prove(&mutants, || {
        FIRST.iter().flat_map(|first| [state(2, *first), state(3, *first)]).collect()
    });
}
