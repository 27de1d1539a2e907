//! Balances the copies of what is read directly: a rank that receives much leaves a part of it to senders that
//! receive less, which write it into its output themselves.
//!
//! Every rank computes this from the same matrix, so all ranks come to the same result without messages. The load of
//! a rank is the number of bytes that it copies. Ranks above the mean load give what is above it to senders below
//! the mean, in rank order. The result need not be optimal, but where all ranks send to one, the load of that one
//! is reduced as far as possible.

/// Bytes by which a load must exceed the mean to be balanced. What senders write lies in their
/// caches, not in the receiver's, so a receiver that reads it at once gains only from this size on (measured on 16
/// cores, with inputs that had just been written).
const MIN_IMBALANCE: usize = 64 << 10;
/// The fewest bytes that a sender takes over.
const MIN_SHARE: usize = 16 << 10;
/// Bytes of a cache line: a sender's share is a multiple of it.
const LINE: usize = 64;

/// Who copies how much in one call, as far as one rank needs to know it. Kept between calls to save allocations.
#[derive(Debug, Default)]
pub(crate) struct LoadBalance {
    loads: Vec<usize>,
    /// For each rank, how many bytes at the end of what it sends to this rank it writes itself.
    pub(in crate::host) written_by_sender: Vec<usize>,
    /// For each rank, how many bytes at the end of what this rank sends to it this rank writes.
    pub(in crate::host) written_by_this_rank: Vec<usize>,
}

impl LoadBalance {
    /// Computes the balance of a call. `received` gives the bytes that a rank receives from each rank, as far as
    /// its output has room for them; `may_write` says whether a sender may write into a receiver's output.
    pub(in crate::host) fn plan<I: Iterator<Item = usize>>(
        &mut self,
        (me, world): (u32, u32),
        received: impl Fn(u32) -> I,
        may_write: impl Fn(u32, u32) -> bool,
    ) {
        let Self { loads, written_by_sender, written_by_this_rank } = self;
        for list in [&mut *written_by_sender, &mut *written_by_this_rank] {
            list.clear();
            list.resize(world as usize, 0);
        }
        loads.clear();
        loads.extend((0..world).map(|rank| received(rank).sum::<usize>()));
        let mean = loads.iter().sum::<usize>().div_ceil(world as usize);
        for receiver in 0..world {
            if loads[receiver as usize] <= mean + MIN_IMBALANCE {
                continue;
            }
            for (sender, bytes) in (0..world).zip(received(receiver)) {
                let room = mean.saturating_sub(loads[sender as usize]);
                let above = loads[receiver as usize].saturating_sub(mean);
                let share = above.min(room).min(bytes) / LINE * LINE;
                if share < MIN_SHARE || sender == receiver || !may_write(sender, receiver) {
                    continue;
                }
                loads[sender as usize] += share;
                loads[receiver as usize] -= share;
                if receiver == me {
                    written_by_sender[sender as usize] = share;
                }
                if sender == me {
                    written_by_this_rank[receiver as usize] = share;
                }
            }
        }
    }

    /// Whether this rank writes into any other rank's output.
    pub(in crate::host) fn writes(&self) -> bool {
        self.written_by_this_rank.iter().any(|bytes| *bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The balance of every rank for a matrix with a row for each sender.
    fn balances(
        matrix: &[Vec<usize>],
        may_write: impl Fn(u32, u32) -> bool + Copy,
    ) -> Vec<LoadBalance> {
        let world = matrix.len() as u32;
        let received = |rank: u32| matrix.iter().map(move |row| row[rank as usize]);
        (0..world)
            .map(|me| {
                let mut balance = LoadBalance::default();
                balance.plan((me, world), received, may_write);
                balance
            })
            .collect()
    }

    #[test]
    fn senders_share_the_load_of_a_rank_that_all_send_to() {
        let mut matrix = vec![vec![0; 4]; 4];
        matrix.iter_mut().for_each(|row| row[0] = 1 << 20);
        let found = balances(&matrix, |_, _| true);
        assert_eq!(found[0].loads, [1 << 20; 4]);
        assert_eq!(found[0].written_by_sender, [0, 1 << 20, 1 << 20, 1 << 20]);
        assert_eq!(found[3].written_by_this_rank, [1 << 20, 0, 0, 0]);
        let found = balances(&matrix, |sender, _| sender != 2);
        assert_eq!(found[0].written_by_sender, [0, 1 << 20, 0, 1 << 20]);
    }

    #[test]
    fn nearly_equal_loads_are_left_as_they_are() {
        let almost = [[1 << 20, 1 << 20], [(1 << 20) + MIN_IMBALANCE, 1 << 20]].map(Vec::from);
        for each in balances(&almost, |_, _| true) {
            assert_eq!([each.written_by_sender, each.written_by_this_rank], [[0, 0], [0, 0]]);
        }
    }

    proptest! {
        #[test]
        fn ranks_agree_and_no_load_exceeds_the_former_maximum(
            world in 1usize..7,
            cells in proptest::collection::vec(prop_oneof![Just(0usize), 0usize..1 << 20], 36),
            may: u64,
        ) {
            let matrix: Vec<Vec<usize>> = cells.chunks(6).take(world).map(|row| row[..world].to_vec()).collect();
            let allowed = |sender: u32, receiver: u32| may >> (sender * 6 + receiver) & 1 == 1;
            let found = balances(&matrix, allowed);
            let pulled = |rank: usize| matrix.iter().map(|row| row[rank]).sum::<usize>();
            let most = (0..world).map(pulled).max().unwrap_or(0);
            for (me, each) in found.iter().enumerate() {
                let mut load = pulled(me);
                for (peer, theirs) in found.iter().enumerate() {
                    prop_assert_eq!(each.written_by_this_rank[peer], theirs.written_by_sender[me]);
                    prop_assert!(each.written_by_this_rank[peer] <= matrix[me][peer]);
                    prop_assert!(each.written_by_this_rank[peer] == 0 || peer != me && allowed(me as u32, peer as u32));
                    load = load + each.written_by_this_rank[peer] - each.written_by_sender[peer];
                }
                prop_assert_eq!(load, each.loads[me]);
                prop_assert!(load <= most);
            }
        }
    }
}
