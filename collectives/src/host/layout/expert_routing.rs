//! Which ranks tokens go to, as this rank counts it.

use symmpool_allocator::{Error, Result};

use crate::call::experts::ExpertsWork;
use crate::host::layout::numbers::Numbers;

/// The number of a token and an id of it that is no expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadId {
    pub(crate) token: u32,
    pub(crate) id: i64,
}

impl BadId {
    /// The error, which is the same on every rank.
    pub(crate) fn error(&self, rank: u32, experts: u32) -> Error {
        let Self { token, id } = self;
        Error::invalid_argument(format!(
            "dispatch to experts: token {token} of rank {rank} names expert {id}; there are experts 0 to {}, and -1 \
             for none. That id counted as -1, all other rows were sent, and the communicator stays usable",
            experts - 1
        ))
        .naming([rank])
    }
}

/// The ids of tokens, read once, and the places of their rows among those that this rank sends to each rank.
#[derive(Debug, Default)]
pub(crate) struct Routing {
    /// The experts of each token; -1 for none.
    pub(crate) ids: Vec<i32>,
    /// For each token and rank the place, or -1.
    pub(crate) positions: Vec<i32>,
    /// How many rows go to each rank.
    pub(crate) counts: Vec<u32>,
    /// The first id that is no expert.
    pub(crate) bad: Option<BadId>,
}

impl Routing {
    /// Makes room for the ids of a call on a rank of a group.
    ///
    /// # Errors
    ///
    /// `is_out_of_memory` where there is none.
    pub(crate) fn reserve(&mut self, work: &ExpertsWork, (rank, world): (u32, u32)) -> Result<()> {
        let tokens = work.tokens as usize;
        let (ids, positions) = (tokens * work.top_k as usize, tokens * world as usize);
        self.ids.clear();
        self.positions.clear();
        let made = self.ids.try_reserve(ids);
        made.and_then(|()| self.positions.try_reserve(positions)).map_err(|_| {
            let bytes = (ids + positions) * size_of::<i32>();
            Error::out_of_memory(format!(
                "experts on rank {rank}: no memory for {bytes} bytes of ids and places of tokens"
            ))
        })
    }

    /// Reads the ids of a call, for which there is room.
    ///
    /// # Safety
    ///
    /// They are aligned and readable for the tokens of the call.
    #[allow(unsafe_code)] // reads the ids by address
    pub(crate) unsafe fn read(&mut self, work: &ExpertsWork, world: u32) {
        let (tokens, top_k) = (work.tokens as usize, work.top_k as usize);
        let local = (work.experts / world) as usize;
        self.ids.clear();
        self.positions.clear();
        self.counts.clear();
        self.bad = None;
        self.positions.resize(tokens * world as usize, -1);
        self.counts.resize(world as usize, 0);
        // SAFETY: the caller promised that the ids are aligned and readable for the tokens; `narrow` is read where
        // they are `i32` alone.
        let narrow = unsafe { Numbers::<i32>::new(work.ids, tokens * top_k) };
        // SAFETY: the caller promised that the ids are aligned and readable for the tokens; `wide` is read where they
        // are `i64` alone.
        let wide = unsafe { Numbers::<i64>::new(work.ids, tokens * top_k) };
        for token in 0..tokens {
            let positions = &mut self.positions[token * world as usize..][..world as usize];
            for at in token * top_k..(token + 1) * top_k {
                let id = if work.wide == 0 { i64::from(narrow.get(at)) } else { wide.get(at) };
                let expert = usize::try_from(id).ok().filter(|id| *id < work.experts as usize);
                if expert.is_none() && id != -1 {
                    self.bad.get_or_insert(BadId { token: token as u32, id });
                }
                self.ids.push(expert.map_or(-1, |expert| expert as i32));
                if let Some(rank) = expert.map(|expert| expert / local)
                    && positions[rank] < 0
                {
                    positions[rank] = self.counts[rank] as i32;
                    self.counts[rank] += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)] // passes ids by address

    use super::*;
    use crate::{DType, ExpertShape};

    fn routing<T>(ids: &[T], wide: bool) -> Routing {
        let shape = ExpertShape {
            hidden: 8,
            experts: 6,
            top_k: 2,
            max_tokens: 8,
            dtype: DType::Bf16,
            capacity: None,
        };
        let work = ExpertsWork {
            ids: ids.as_ptr() as u64,
            tokens: ids.len() as u32 / 2,
            wide: u32::from(wide),
            ..ExpertsWork::new(&shape, 3, 0, 0)
        };
        let mut routing = Routing::default();
        // SAFETY: the slice has this length.
        unsafe { routing.read(&work, 3) };
        routing
    }

    #[test]
    fn a_token_goes_to_each_rank_once() {
        let found = routing(&[0_i32, 1, 5, 0, -1, -1, 3, 3], false);
        assert_eq!(found.counts, [2, 1, 1]);
        assert_eq!(found.positions, [0, -1, -1, 1, -1, 0, -1, -1, -1, -1, 0, -1]);
        assert_eq!(found.bad, None);
    }

    #[test]
    fn the_first_id_that_is_no_expert_is_kept_and_goes_nowhere() {
        let found = routing(&[0_i64, 1, i64::MIN, 6, -2, 2], true);
        assert_eq!(found.bad, Some(BadId { token: 1, id: i64::MIN }));
        assert_eq!(found.ids, [0, 1, -1, -1, -1, 2]);
        assert_eq!(found.counts, [1, 1, 0]);
    }
}
