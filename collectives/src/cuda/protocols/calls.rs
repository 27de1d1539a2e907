//! Epochs of calls, their descriptions, and what the leader block does in each of them.

use symmpool_allocator::models::{deeper, mutant};

use super::memory::{MemoryPlace, MemoryWord};
use super::search::{Answer, KernelModel};

/// The largest epoch.
pub(super) const LAST: u32 = u32::MAX;

/// The epoch after another one: `Session::next_epoch`.
pub(super) fn next_epoch(epoch: u32) -> u32 {
    let first = if mutant("mutant_epoch_wraps_to_one") { 1 } else { 2 };
    if epoch == LAST { first } else { epoch + 1 }
}

/// Epochs of `count` calls in a row, and of more where models are to be deeper.
pub(super) fn epochs(first: u32, count: usize) -> Vec<u32> {
    std::iter::successors(Some(first), |epoch| Some(next_epoch(*epoch)))
        .take(count + deeper())
        .collect()
}

/// The flag that calls before `first` have left in places of a parity: none in fresh memory.
pub(super) fn left_flag(first: u32, parity: u32) -> u32 {
    let before = |epoch: u32| if epoch == 2 { LAST } else { epoch - 1 };
    let [one, two] = [before(first), before(before(first).max(1))];
    let flag = if one % 2 == parity { one } else { two };
    if first <= 2 { 0 } else { flag }
}

/// The two halves of a word of 16 bytes in the LL protocol: `ll_pack`.
pub(super) fn ll_halves(data: [u32; 2], flag: u32) -> [MemoryWord; 2] {
    data.map(|data| (data, flag))
}

/// Whether words of which these are the halves have arrived: `ll_arrived`.
pub(super) fn ll_arrived(found: &[MemoryWord], flag: u32) -> bool {
    let is_there = |flags: &[MemoryWord]| flags.iter().all(|half| half.1 == flag);
    if mutant("mutant_any_flag") {
        found.iter().all(|half| half.1 != 0)
    } else if mutant("mutant_one_flag_of_two") {
        found.chunks(2).all(|halves| is_there(&halves[..1]))
    } else {
        is_there(found)
    }
}

/// Data that differs from call to call, from rank to rank, and within a call.
pub(super) fn data(epoch: u32, rank: u32, nth: u32) -> u32 {
    (epoch & 0xff) << 8 | rank << 4 | nth | 1 << 20
}

/// The data of words in the LL protocol, without their flags.
pub(super) fn ll_data(found: &[MemoryWord]) -> Vec<u32> {
    found.iter().map(|half| half.0).collect()
}

/// Ranks that make calls with handshakes of so many words.
#[derive(Clone, Copy)]
pub(super) struct ModelRanks {
    pub(super) world: u32,
    /// Words of a description.
    pub(super) words: u32,
    /// The first epoch of the model.
    pub(super) first: u32,
}

impl ModelRanks {
    pub(super) fn peers(self, rank: u32) -> impl Iterator<Item = u32> {
        (0..self.world).filter(move |peer| *peer != rank)
    }

    /// The halves of the words that `from` sends to `owner`: `handshake_slot`.
    pub(super) fn handshake(
        self,
        model: &mut KernelModel,
        epoch: u32,
        owner: u32,
        from: u32,
    ) -> Vec<MemoryPlace> {
        let parity = if mutant("mutant_one_handshake_slot") { 0 } else { epoch & 1 };
        let flag = left_flag(self.first, parity);
        let place = |half| {
            let name = format!("half {half} of the handshake of {from} at {owner}, {parity}");
            model.place(name, (data(flag, from, half), flag))
        };
        (0..2 * self.words).map(place).collect()
    }

    /// The halves of the words of a description.
    fn description(self, epoch: u32, rank: u32) -> Vec<MemoryWord> {
        let word = |word| [2 * word, 2 * word + 1].map(|half| data(epoch, rank, half));
        (0..self.words).flat_map(|nth| ll_halves(word(nth), epoch)).collect()
    }

    /// `send_handshake`: with RELEASE, there is a fence before.
    pub(super) fn send_handshake(
        self,
        model: &mut KernelModel,
        thread: usize,
        (rank, epoch): (u32, u32),
        releases: bool,
    ) {
        if releases && !mutant("mutant_handshake_unfenced") {
            model.fence(thread);
        }
        let mut stores = Vec::new();
        for peer in self.peers(rank) {
            let places = self.handshake(model, epoch, peer, rank);
            stores.extend(places.into_iter().zip(self.description(epoch, rank)));
        }
        model.store(thread, "sends its description", stores);
    }

    /// `compare_handshakes`, or with `acquires` `await_handshakes<true>`.
    pub(super) fn await_handshakes(
        self,
        model: &mut KernelModel,
        thread: usize,
        (rank, epoch): (u32, u32),
        acquires: bool,
    ) {
        let (mut places, mut expected) = (Vec::new(), Vec::new());
        for peer in self.peers(rank) {
            places.extend(self.handshake(model, epoch, rank, peer));
            expected.extend(ll_data(&self.description(epoch, peer)));
        }
        let judge = move |found: &[MemoryWord]| {
            Answer::when(ll_arrived(found, epoch), ll_data(found) == expected)
        };
        let says = "looks at descriptions";
        if acquires && !mutant("mutant_handshake_not_acquired") {
            model.acquire(thread, says, places, judge);
        } else {
            model.look(thread, says, places, judge);
        }
    }

    /// The leader block in a call: `run_leader_block`.
    pub(super) fn lead(
        self,
        model: &mut KernelModel,
        thread: usize,
        (rank, epoch): (u32, u32),
        releases: bool,
    ) {
        model.kernel(thread, epoch);
        self.send_handshake(model, thread, (rank, epoch), releases);
        if !mutant("mutant_leaves_without_handshake") {
            self.await_handshakes(model, thread, (rank, epoch), false);
        }
    }

    /// Threads of the leader blocks of all ranks, for all calls.
    pub(super) fn leaders(self, model: &mut KernelModel, epochs: &[u32], releases: bool) {
        for rank in 0..self.world {
            let thread = model.thread(rank, "leader");
            for epoch in epochs {
                self.lead(model, thread, (rank, *epoch), releases);
            }
        }
    }
}
