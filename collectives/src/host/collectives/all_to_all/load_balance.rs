//! Who copies how much of what is read directly: a receiver of much leaves a part to senders that
//! receive less, which write it into its output themselves.
//!
//! Every rank works this out of the same matrix, so all come to the same without talk. Loads are the bytes
//! that a rank copies. Ranks above the mean give what is above it to those below, one after the other,
//! in the order of the ranks: this need not be the best there is, but one rank that all send to is relieved
//! as far as can be.

/// Loads that are less above the mean are left alone; bytes. What senders write lies in their caches, not
/// in the receiver's, so a receiver that reads it at once gains from here on only (measured on 16 cores,
/// with inputs that were written just before).
const UNEVEN: usize = 64 << 10;
/// No sender takes less than this.
const LEAST: usize = 16 << 10;
/// Shares end at lines.
const LINE: usize = 64;

/// One call's shares, as one rank needs them; kept to spare calls an allocation.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    loads: Vec<usize>,
    /// Of what each rank sends to this one, how much it writes itself: the end of it.
    pub(super) by_sender: Vec<usize>,
    /// The same of what this rank sends to each.
    pub(super) by_me: Vec<usize>,
}

impl Shares {
    /// `received` has what a rank is sent by each, as far as its output holds it; `shares` says of a
    /// sender and a receiver whether the one may write for the other.
    pub(super) fn plan<I: Iterator<Item = usize>>(
        &mut self,
        (me, world): (u32, u32),
        received: impl Fn(u32) -> I,
        shares: impl Fn(u32, u32) -> bool,
    ) {
        let Self { loads, by_sender, by_me } = self;
        for list in [&mut *by_sender, &mut *by_me] {
            list.clear();
            list.resize(world as usize, 0);
        }
        loads.clear();
        loads.extend((0..world).map(|rank| received(rank).sum::<usize>()));
        let mean = loads.iter().sum::<usize>().div_ceil(world as usize);
        for receiver in 0..world {
            if loads[receiver as usize] <= mean + UNEVEN {
                continue;
            }
            for (sender, bytes) in (0..world).zip(received(receiver)) {
                let room = mean.saturating_sub(loads[sender as usize]);
                let above = loads[receiver as usize].saturating_sub(mean);
                let share = above.min(room).min(bytes) / LINE * LINE;
                if share < LEAST || sender == receiver || !shares(sender, receiver) {
                    continue;
                }
                loads[sender as usize] += share;
                loads[receiver as usize] -= share;
                if receiver == me {
                    by_sender[sender as usize] = share;
                }
                if sender == me {
                    by_me[receiver as usize] = share;
                }
            }
        }
    }

    /// Whether this rank writes anything of what others receive.
    pub(super) fn writes(&self) -> bool {
        self.by_me.iter().any(|bytes| *bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Everyone's shares of a matrix whose rows are senders'.
    fn shares(matrix: &[Vec<usize>], may: impl Fn(u32, u32) -> bool + Copy) -> Vec<Shares> {
        let world = matrix.len() as u32;
        let received = |rank: u32| matrix.iter().map(move |row| row[rank as usize]);
        (0..world)
            .map(|me| {
                let mut shares = Shares::default();
                shares.plan((me, world), received, may);
                shares
            })
            .collect()
    }

    #[test]
    fn one_that_all_send_to_is_relieved_by_all() {
        let mut matrix = vec![vec![0; 4]; 4];
        matrix.iter_mut().for_each(|row| row[0] = 1 << 20);
        let found = shares(&matrix, |_, _| true);
        assert_eq!(found[0].loads, [1 << 20; 4]);
        assert_eq!(found[0].by_sender, [0, 1 << 20, 1 << 20, 1 << 20]);
        assert_eq!(found[3].by_me, [1 << 20, 0, 0, 0]);
        let found = shares(&matrix, |sender, _| sender != 2);
        assert_eq!(found[0].by_sender, [0, 1 << 20, 0, 1 << 20]);
    }

    #[test]
    fn what_is_even_is_left_alone() {
        let almost = [[1 << 20, 1 << 20], [(1 << 20) + UNEVEN, 1 << 20]].map(Vec::from);
        for each in shares(&almost, |_, _| true) {
            assert_eq!([each.by_sender, each.by_me], [[0, 0], [0, 0]]);
        }
    }

    proptest! {
        #[test]
        fn ranks_agree_and_no_load_grows_beyond_the_most(
            world in 1usize..7,
            cells in proptest::collection::vec(prop_oneof![Just(0usize), 0usize..1 << 20], 36),
            may: u64,
        ) {
            let matrix: Vec<Vec<usize>> = cells.chunks(6).take(world).map(|row| row[..world].to_vec()).collect();
            let allowed = |sender: u32, receiver: u32| may >> (sender * 6 + receiver) & 1 == 1;
            let found = shares(&matrix, allowed);
            let pulled = |rank: usize| matrix.iter().map(|row| row[rank]).sum::<usize>();
            let most = (0..world).map(pulled).max().unwrap_or(0);
            for (me, each) in found.iter().enumerate() {
                let mut load = pulled(me);
                for (peer, theirs) in found.iter().enumerate() {
                    prop_assert_eq!(each.by_me[peer], theirs.by_sender[me]);
                    prop_assert!(each.by_me[peer] <= matrix[me][peer]);
                    prop_assert!(each.by_me[peer] == 0 || peer != me && allowed(me as u32, peer as u32));
                    load = load + each.by_me[peer] - each.by_sender[peer];
                }
                prop_assert_eq!(load, each.loads[me]);
                prop_assert!(load <= most);
            }
        }
    }
}
