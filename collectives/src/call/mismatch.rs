//! The errors of ranks that made different calls.

use std::cmp::Reverse;

use symmpool_allocator::Error;

use super::{CallDescription, OpType, PEER_BLOCKS_SHIFT};

/// The error for ranks that made different calls. It says which ranks made which call; every rank makes the same
/// error from the same calls.
pub(crate) fn mismatch(number: u64, calls: &[CallDescription]) -> Error {
    let mut groups: Vec<(CallDescription, Vec<u32>)> = Vec::new();
    for (rank, call) in (0u32..).zip(calls) {
        match groups.iter_mut().find(|(seen, _)| seen == call) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((*call, vec![rank])),
        }
    }
    if groups.len() == 1 {
        return Error::mismatch(format!(
            "ranks made the same call ({}) as call {number}, but through communicators with \
             different options, or of different versions of symmpool; build them with the same \
             options of the same version on every rank",
            calls[0]
        ));
    }
    let mut message = format!("ranks entered different collectives as call {number}:");
    for (call, ranks) in &groups {
        message.push_str(&format!("\n  {}: {call}", rank_list(ranks)));
    }
    message.push_str(
        "\nNothing was written and the communicator stays usable; every rank must make the same \
         call with the same arguments.",
    );
    Error::mismatch(message).naming(ranks_at_fault(&groups))
}

/// The ranks to blame: those that refused the call, if there are such, else those that are not in the largest group.
/// Of equally large groups, the one with the lowest rank counts as the largest.
fn ranks_at_fault(groups: &[(CallDescription, Vec<u32>)]) -> Vec<u32> {
    let refused =
        |(call, _): &&(CallDescription, Vec<u32>)| call.operation() == Some(OpType::Declined);
    if let Some((_, ranks)) = groups.iter().find(refused) {
        return ranks.clone();
    }
    let usual = groups.iter().max_by_key(|(_, ranks)| (ranks.len(), Reverse(ranks[0])));
    groups
        .iter()
        .filter(|group| Some(*group) != usual)
        .flat_map(|(_, ranks)| ranks.clone())
        .collect()
}

/// The error of a rank on a device, which has compared its call with that of one peer only.
pub(crate) fn mismatch_of_two(
    number: u64,
    rank: u32,
    ours: &CallDescription,
    peer: u32,
    theirs: &CallDescription,
) -> Error {
    mismatch_at(&format!("call {number}"), (rank, ours), (peer, theirs))
}

/// The error of a rank that captures a first large call, or makes it, where a peer comes to another call or makes it in the other
/// way. Each comes with whether it captures the call.
pub(crate) fn mismatch_of_first_large(
    (rank, ours, we_capture): (u32, &CallDescription, bool),
    (peer, theirs, they_capture): (u32, &CallDescription, bool),
) -> Error {
    if ours != theirs {
        return mismatch_at("a first large call", (rank, ours), (peer, theirs));
    }
    debug_assert!(we_capture != they_capture, "nothing differs");
    let (captures, calls) = if we_capture { (rank, peer) } else { (peer, rank) };
    Error::mismatch(format!(
        "ranks made the same call ({ours}), which rank {captures} captures in a graph and rank {calls} does not. Until a \
         communicator whose memory grows has had its first large call, large calls are captured in graphs on all ranks or on \
         none. The communicator has failed: make a new one."
    ))
    .naming([rank, peer])
}

fn mismatch_at(
    number: &str,
    (rank, ours): (u32, &CallDescription),
    (peer, theirs): (u32, &CallDescription),
) -> Error {
    let mut both = [(rank, ours), (peer, theirs)];
    both.sort_by_key(|(rank, _)| *rank);
    let pieces = both.map(|(_, call)| call.piece_number());
    // The algorithm may differ, too.
    if ours.is_in_large_area() != theirs.is_in_large_area()
        && ours.without_growth() == theirs.without_growth()
    {
        let [(low, first), (high, _)] = both;
        let small = if first.is_in_large_area() { high } else { low };
        return Error::mismatch(format!(
            "ranks made the same call ({ours}) as {number}, but rank {small} alone by the memory for small calls: it \
             captured the call while a device had no room for the memory for large ones. Capture large calls on all ranks \
             or on none until there is room. The communicator has failed."
        ))
        .naming([rank, peer]);
    }
    // Whatever follows from the number of pieces may differ, too.
    let whole = |call: &CallDescription| call.piece(0).peer_blocks(0);
    if whole(ours) == whole(theirs) && pieces[0] != pieces[1] {
        let [(low, _), (high, _)] = both;
        return Error::mismatch(format!(
            "ranks are at different pieces of the same call ({ours}) as {number}: rank {low} at piece {} and rank \
             {high} at piece {}. A rank failed in the middle of the call, or its communicator divides calls in other ways; all \
             ranks need the same options and the same memory of the communicator. What that call should have written is \
             undefined. The communicator has failed: make a new one.",
            pieces[0] + 1,
            pieces[1] + 1
        ))
        .naming([rank, peer]);
    }
    if ours.peer_blocks(0) == theirs.peer_blocks(0) {
        let [(low, mine), (high, other)] =
            both.map(|(rank, call)| (rank, call.words[3] >> PEER_BLOCKS_SHIFT));
        if mine == 0 || other == 0 {
            let cut = if mine == 0 { high } else { low };
            return Error::mismatch(format!(
                "ranks made the same call ({ours}) as {number}, but on rank {cut} alone it goes by copy engines in \
                 pieces. All ranks need the same CUDA_DEVICE_MAX_CONNECTIONS, the same option beside_compute of the \
                 communicator, and buffers in the same kind of memory. The communicator has failed."
            ))
            .naming([rank, peer]);
        }
        return Error::mismatch(format!(
            "ranks made the same call ({ours}) as {number}, but the device of rank {low} divides it \
             among {mine} blocks and that of rank {high} among {other}. All ranks need devices with the same \
             number of SMs, the same share of them left to the process (MPS), and kernels compiled by the \
             same NVRTC; for native kernels also the same SM budget, or a grid that all have room for. The \
             communicator has failed."
        ))
        .naming([rank, peer]);
    }
    let mut message = format!("ranks entered different collectives as {number}:");
    for (rank, call) in both {
        message.push_str(&format!("\n  rank {rank}: {call}"));
    }
    if ours.is_growth() != theirs.is_growth() && ours.without_growth() == theirs.without_growth() {
        message.push_str(
            "\nUntil a communicator whose memory grows has had its first large call, large calls are captured in graphs on \
             all ranks or on none.",
        );
    }
    let alike = ours.without_parts().operation() == theirs.without_parts().operation();
    if alike && (ours.is_copied() || theirs.is_copied()) {
        message.push_str(
            "\nCopy engines write large equal parts into outputs that are windows, and these must lie at the \
             same offset on all ranks: allocate outputs in the same order on every rank, as with \
             pool.empty, or choose another algorithm for all-to-alls (all_to_all=\"direct\" of the \
             communicator, or SYMMPOOL_ALL_TO_ALL=direct).",
        );
    }
    message.push_str(
        "\nWhat that call should have written is undefined. The communicator has failed: make a new \
         one; every rank must make the same call with the same arguments.",
    );
    let refused = both.iter().filter(|(_, call)| call.operation() == Some(OpType::Declined));
    let refused: Vec<u32> = refused.map(|(rank, _)| *rank).collect();
    // It is not known what the other ranks called.
    Error::mismatch(message).naming(refused).naming([rank, peer])
}

/// `rank 3`, or `ranks 0-2, 5`.
pub(crate) fn rank_list(ranks: &[u32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    for run in ranks.chunk_by(|a, b| a + 1 == *b) {
        match run {
            [one] => parts.push(one.to_string()),
            [first, .., last] => parts.push(format!("{first}-{last}")),
            [] => {}
        }
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{COPY, LL, SCRATCH};
    use crate::call::*;
    use crate::{DType, ReduceOp};

    #[test]
    fn mismatches_group_ranks_by_what_they_called() {
        let a = CallDescription::new(OpType::Barrier);
        let b = CallDescription::new(OpType::Broadcast).elements(DType::U8, 3).root(2);
        let text = mismatch(7, &[a, a, b, a]).to_string();
        assert!(text.contains("ranks 0-1, 3: barrier"), "{text}");
        assert!(text.contains("rank 2: broadcast of 3 u8 from rank 2"), "{text}");
        assert_eq!(mismatch(7, &[a, a, b, a]).ranks(), [2]);
        assert_eq!(
            mismatch(7, &[a, b]).ranks(),
            [1],
            "of two groups of one rank, the one with the lower rank counts as the larger"
        );
        let refused = CallDescription::new(OpType::Declined);
        assert_eq!(mismatch(7, &[refused, refused, a]).ranks(), [0, 1]);
        assert_eq!(mismatch_of_two(7, 3, &a, 1, &b).ranks(), [1, 3]);
        assert_eq!(mismatch_of_two(7, 3, &refused, 1, &b).ranks(), [3]);
        assert!(mismatch(7, &[a, a]).to_string().contains("different options"));
    }

    #[test]
    fn calls_that_take_memory_on_some_ranks_only_are_named_with_the_reason() {
        let call = |count| CallDescription::new(OpType::AllReduce).elements(DType::F32, count);
        let sum = |count| call(count).reduce(ReduceOp::Sum);
        let made = sum(1 << 20).input(Place::Window(0x80)).output(Place::Window(0x80));
        let text = mismatch_of_two(7, 0, &sum(1 << 20).grows(), 1, &made).to_string();
        let grows = "rank 0: the first large call, before which the communicator takes memory: all_reduce sum of";
        assert!(text.contains(&format!("{grows} 1048576 f32\n")), "{text}");
        assert!(text.contains("captured in graphs on all ranks or on none"), "{text}");
        for other in
            [sum(8), sum(1 << 20).reduce(ReduceOp::Max), CallDescription::new(OpType::Barrier)]
        {
            let text = mismatch_of_two(7, 0, &sum(1 << 20).grows(), 1, &other).to_string();
            assert!(text.contains(grows) && !text.contains("captured"), "{text}");
        }
    }

    #[test]
    fn a_first_large_call_that_one_rank_captures_alone_is_named_with_the_reason() {
        let sum = |count| {
            let call = CallDescription::new(OpType::AllReduce).elements(DType::F32, count);
            call.reduce(ReduceOp::Sum).grows()
        };
        let (one, other) = (sum(1 << 20), sum(1 << 21));
        for (ours, theirs) in [(true, false), (false, true)] {
            let error = mismatch_of_first_large((2, &one, ours), (0, &one, theirs));
            let (captures, calls) = if ours { (2, 0) } else { (0, 2) };
            let text = error.to_string();
            assert!(
                text.contains(&format!("rank {captures} captures in a graph and rank {calls}"))
            );
            assert!(error.is_diverged() && error.ranks() == [0, 2], "{text}");
        }
        let text = mismatch_of_first_large((2, &one, true), (0, &other, true)).to_string();
        assert!(text.contains("different collectives as a first large call:"), "{text}");
    }

    #[test]
    fn a_call_in_the_memory_for_small_calls_on_one_rank_alone_is_named_with_the_reason() {
        let sum = CallDescription::new(OpType::AllReduce).elements(DType::F32, 1 << 20);
        let sum = sum.reduce(ReduceOp::Sum);
        let (small, large) =
            (sum.algorithm(LL).piece(2), sum.algorithm(SCRATCH).in_large_area(true));
        for (ours, theirs, alone) in [(&small, &large, 3), (&large, &small, 1)] {
            let text = mismatch_of_two(7, 3, ours, 1, theirs).to_string();
            assert!(
                text.contains(&format!("rank {alone} alone by the memory for small")),
                "{text}"
            );
        }
        let other = large.elements(DType::F32, 8);
        let text = mismatch_of_two(7, 3, &small, 1, &other).to_string();
        assert!(text.contains("different collectives"), "{text}");
        assert_eq!(large.to_string(), sum.algorithm(SCRATCH).to_string(), "text has no areas");
    }

    #[test]
    fn different_grids_give_another_error_than_different_calls() {
        let call =
            CallDescription::new(OpType::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Sum);
        let call = call.output(Place::Window(0x40));
        let (few, more) = (call.peer_blocks(17), call.peer_blocks(133));
        assert_eq!((few.to_string(), few.peer_blocks(0)), (call.to_string(), call));
        let text = mismatch_of_two(7, 3, &few, 1, &more).to_string();
        assert!(
            text.contains("rank 1 divides it among 133 blocks and that of rank 3 among 17"),
            "{text}"
        );
        let other = more.root(1);
        let text = mismatch_of_two(7, 3, &few, 1, &other).to_string();
        assert!(text.contains("different collectives"), "{text}");
    }

    #[test]
    fn different_pieces_of_a_call_give_an_error_of_their_own() {
        let call =
            CallDescription::new(OpType::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Sum);
        let text = mismatch_of_two(7, 3, &call.piece(2), 1, &call.peer_blocks(9)).to_string();
        assert!(text.contains("rank 1 at piece 1 and rank 3 at piece 3"), "{text}");
        let other = CallDescription::new(OpType::Barrier).piece(2);
        let text = mismatch_of_two(7, 3, &other, 1, &call).to_string();
        assert!(text.contains("different collectives"), "{text}");
    }

    #[test]
    fn outputs_that_copy_engines_cannot_reach_are_named_with_what_to_do() {
        let copied = |offset| {
            let call = CallDescription::new(OpType::AllToAll).elements(DType::F32, 8);
            call.output(Place::Window(offset)).algorithm(COPY)
        };
        let pushed = CallDescription::new(OpType::AllToAllV).elements(DType::F32, 1);
        for (other, words) in
            [(copied(0x80), "window offset 0x80, by copy"), (pushed, "rows of 1 f32\n")]
        {
            let text = mismatch_of_two(7, 0, &copied(0x40), 1, &other).to_string();
            assert!(text.contains("rank 0: all_to_all of 8 f32 to window offset 0x40, by copy"));
            assert!(text.contains(words) && text.contains("pool.empty"), "{text}");
            assert!(text.contains("all_to_all=\"direct\""), "{text}");
        }
        let (barrier, other) =
            (CallDescription::new(OpType::Barrier), pushed.elements(DType::F32, 2));
        for (one, another) in [(pushed, barrier), (pushed, other), (copied(0x40), barrier)] {
            let text = mismatch_of_two(7, 0, &one, 1, &another).to_string();
            assert!(!text.contains("pool.empty"), "{text}");
        }
    }
}
