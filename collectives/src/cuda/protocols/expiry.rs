//! Flags of old calls, which go before epochs repeat: `expire_old_flags` in `symmpool/impl/handshake.cuh`.

use symmpool_allocator::models::{mutant, with_fault};

use super::calls::{LAST, ModelRanks, data, epochs, next_epoch};
use super::memory::{MemoryPlace, MemoryWord};
use super::search::{Answer, KernelModel, prove};

/// Epochs of which the lowest bits are 0 or 1 expire flags: three times and the first call, while epochs go round once.
pub(super) const EXPIRY_MASK: u32 = LAST >> 2;
/// An epoch in which flags expire.
const EXPIRES: u32 = EXPIRY_MASK + 1;

/// Epochs that begin anew behind `last`, which is one less than a power of two.
#[derive(Clone, Copy)]
struct EpochRound {
    last: u32,
}

impl EpochRound {
    fn next(self, epoch: u32) -> u32 {
        if epoch == self.last { next_epoch(LAST) } else { epoch + 1 }
    }

    /// `must_expire_flags`.
    fn expires(self, epoch: u32) -> bool {
        let parts = if mutant("mutant_expires_once_a_round") { 0 } else { 2 };
        epoch & (self.last >> parts) < 2
    }

    /// The flag in place of one that has expired.
    fn expired(self, epoch: u32) -> u32 {
        epoch.wrapping_sub(2) & self.last
    }

    /// `failed_flag`.
    fn failed(self, epoch: u32) -> u32 {
        !epoch & self.last | 2
    }

    /// Whether no call waits for a flag that a call has left, until it expires.
    fn expires_in_time(self, flag: u32, from: u32) -> bool {
        let mut epoch = from;
        for _ in 0..=self.last {
            epoch = self.next(epoch);
            if epoch % 2 == from % 2 && epoch == flag {
                return false;
            }
            if epoch % 2 == from % 2 && self.expires(epoch) {
                return true;
            }
        }
        false
    }

    fn holds(self) -> bool {
        (1..=self.last).all(|epoch| {
            let is_old = !self.expires(epoch) || self.expires_in_time(self.expired(epoch), epoch);
            let failed = self.failed(epoch);
            // The flag of a failed handshake is no flag of a call with the same slot, and not what fresh memory holds.
            let is_apart = failed != 0 && failed % 2 != epoch % 2;
            is_old && is_apart && self.expires_in_time(epoch, epoch)
        })
    }
}

/// Rounds of few epochs, of which each is followed. A round of 2^32 has the same parts.
#[test]
fn no_call_waits_for_a_flag_that_came_before_epochs_repeated() {
    assert_eq!(EpochRound { last: LAST }.last >> 2, EXPIRY_MASK);
    let rounds = || (4..=9).map(|bits| EpochRound { last: (1 << bits) - 1 });
    assert!(rounds().all(EpochRound::holds));
    let name = "mutant_expires_once_a_round";
    assert!(with_fault(Some(name), || !rounds().any(EpochRound::holds)), "{name}");
}

/// Areas of memory, in each of which is a place that a call may use.
pub(super) const AREAS: u32 = 2;

/// A call: the area that it uses, and whether it uses the place there.
#[derive(Clone, Copy)]
struct Call {
    area: u32,
    uses: bool,
}

/// The place of an area: a word with a flag of LL, a flag of a peer block, or an escape mark. A round ago a call has left
/// a flag there which a call of the model has again.
fn place(model: &mut KernelModel, owner: u32, area: u32, parity: u32) -> MemoryPlace {
    let old = (1, EXPIRES + 2 + parity);
    model.place(format!("the place of area {area} at {owner}, {parity}"), old)
}

/// Stores of the leader block behind its handshakes, where flags expire: `expire_region` of both areas.
fn expired(
    model: &mut KernelModel,
    rank: u32,
    epoch: u32,
    call: Call,
) -> Vec<(MemoryPlace, MemoryWord)> {
    let round = EpochRound { last: LAST };
    let is_second = epoch & EXPIRY_MASK == 1;
    if !round.expires(epoch)
        || mutant("mutant_flags_kept")
        || is_second && mutant("mutant_one_parity_expires")
    {
        return Vec::new();
    }
    let parity = if mutant("mutant_next_parity_expires") { epoch + 1 } else { epoch } & 1;
    let old = round.expired(epoch);
    let is_used = |area| area == call.area && call.uses && !mutant("mutant_live_flags_expire");
    let is_kept = |area| area != call.area && mutant("mutant_other_area_kept");
    (0..AREAS)
        .filter(|area| !is_used(*area) && !is_kept(*area))
        .map(|area| (place(model, rank, area, parity), (old, old)))
        .collect()
}

fn calls_around_expiry(first: u32, calls: &[Call]) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world: 2, words: 1, first });
    let epochs = epochs(first, calls.len());
    for rank in 0..ranks.world {
        let [leader, worker] = ["leader", "worker"].map(|name| model.thread(rank, name));
        for (&epoch, &call) in epochs.iter().zip(calls.iter().chain(std::iter::repeat(&calls[0]))) {
            ranks.lead(&mut model, leader, (rank, epoch), false);
            let old = expired(&mut model, rank, epoch, call);
            if !old.is_empty() {
                model.store(leader, "expires flags", old);
            }
            model.kernel(worker, epoch);
            if call.uses {
                let peer = 1 - rank;
                let there = place(&mut model, peer, call.area, epoch & 1);
                model.store(worker, "sends a word", vec![(there, (data(epoch, rank, 0), epoch))]);
                let (here, expected) =
                    (place(&mut model, rank, call.area, epoch & 1), data(epoch, peer, 0));
                model.look(worker, "looks at a word", vec![here], move |found| {
                    Answer::when(found[0].1 == epoch, found[0].0 == expected)
                });
            }
        }
    }
    model
}

/// Six calls, in the third and fourth of which flags expire. The last two have the flags that are there from the beginning.
#[test]
fn flags_expire_beside_calls() {
    let mutants = [
        "mutant_flags_kept",
        "mutant_one_parity_expires",
        "mutant_next_parity_expires",
        "mutant_live_flags_expire",
        "mutant_other_area_kept",
    ];
    let idle = Call { area: 0, uses: false };
    let in_area = |area| Call { area, uses: true };
    prove(&mutants, || {
        let mut models = Vec::new();
        for third in [idle, in_area(0), in_area(1)] {
            for fourth in [idle, in_area(0), in_area(1)] {
                for [fifth, sixth] in [[0, 0], [0, 1], [1, 0], [1, 1]] {
                    let calls = [idle, idle, third, fourth, in_area(fifth), in_area(sixth)];
                    models.push(calls_around_expiry(EXPIRES - 2, &calls));
                }
            }
        }
        models
    });
}
