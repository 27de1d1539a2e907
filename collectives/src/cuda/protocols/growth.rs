//! A second area of memory, which a communicator gets while kernels of graphs may run: `CudaEngine::grow`.

use symmpool_allocator::models::mutant;

use super::calls::{data, epochs};
use super::memory::MemoryWord;
use super::search::{Answer, KernelModel, prove};
use crate::cuda::engine::LAMPORT_PATTERN;

/// Where an area lies, whose upper and lower halves the host writes one after the other, and how long it is.
const PLACE: [u32; 2] = [0x5000, 0xffff_fffe];
const LENGTH: u32 = 4096;

/// The host writes where flags of the new area lie. Kernels of a graph that was launched before expire flags meanwhile.
fn words_of_an_area(kernels: usize) -> KernelModel {
    let mut model = KernelModel::default();
    let [low, high, length] =
        ["the lower half", "the upper half", "the length"].map(|name| model.place(name, (0, 0)));
    let host = model.host(0);
    let places = vec![(low, (PLACE[0], 0)), (high, (PLACE[1], 0))];
    let lengths = vec![(length, (LENGTH, 0))];
    if mutant("mutant_lengths_before_places") {
        model.store(host, "writes the length", lengths);
        model.settle(host);
        model.store(host, "writes the place", places);
    } else {
        model.store(host, "writes the place", places);
        if !mutant("mutant_lengths_with_places") {
            model.settle(host);
        }
        model.store(host, "writes the length", lengths);
    }
    let leader = model.thread(0, "leader");
    for epoch in epochs(1, kernels) {
        model.kernel(leader, epoch);
        // It takes nanoseconds, for which the host waits milliseconds: so it is one step.
        model.look(leader, "expires flags of the other area", vec![length, low, high], |found| {
            let [length, low, high] = [0, 1, 2].map(|nth: usize| found[nth].0);
            Answer::of(length == 0 || [length, low, high] == [LENGTH, PLACE[0], PLACE[1]])
        });
    }
    model
}

/// All ranks fill their areas, commit them, and make calls there.
fn first_calls_in_an_area(world: u32) -> KernelModel {
    let empty: MemoryWord = (LAMPORT_PATTERN, LAMPORT_PATTERN);
    let mut model = KernelModel::default();
    let inbox = |model: &mut KernelModel, owner, from| {
        // Memory that was something else before.
        model.place(format!("the vector of {from} at {owner}"), (1, 1))
    };
    for rank in 0..world {
        let peers = || (0..world).filter(move |peer| *peer != rank);
        let thread = model.thread(rank, "rank");
        if !mutant("mutant_area_unfilled") {
            let fill = peers().map(|peer| (inbox(&mut model, rank, peer), empty)).collect();
            model.store(thread, "fills its area", fill);
        }
        if !mutant("mutant_fill_unawaited") {
            model.settle(thread);
        }
        if !mutant("mutant_area_used_before_all_have_it") {
            model.meet(thread, 1);
        }
        model.kernel(thread, 1);
        let word = |of| (data(1, of, 0), data(1, of, 1));
        let stores = peers().map(|peer| (inbox(&mut model, peer, rank), word(rank))).collect();
        model.store(thread, "sends vectors", stores);
        let places = peers().map(|peer| inbox(&mut model, rank, peer)).collect();
        let expected: Vec<MemoryWord> = peers().map(word).collect();
        model.look(thread, "looks at vectors", places, move |found| {
            let is_there =
                |word: &MemoryWord| word.0 != LAMPORT_PATTERN && word.1 != LAMPORT_PATTERN;
            Answer::when(found.iter().all(is_there), found == expected)
        });
    }
    model
}

#[test]
fn kernels_that_run_see_an_area_whole_or_not_at_all() {
    let mutants = ["mutant_lengths_with_places", "mutant_lengths_before_places"];
    prove(&mutants, || vec![words_of_an_area(4)]);
}

#[test]
fn an_area_is_used_when_all_ranks_have_filled_theirs() {
    let mutants =
        ["mutant_area_unfilled", "mutant_fill_unawaited", "mutant_area_used_before_all_have_it"];
    prove(&mutants, || vec![first_calls_in_an_area(2), first_calls_in_an_area(3)]);
}
