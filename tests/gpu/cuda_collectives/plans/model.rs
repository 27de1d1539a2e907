//! A model of plans: their results are computed on the CPU operation by operation, slowly and plainly.
//!
//! Chunks hold whole values here, also where they lie in the place of a shorter one.

use std::collections::{BTreeMap, VecDeque};

use symmpool_collectives::plan::{Buffer, Operation, Plan, Span};
use symmpool_collectives::{DType, ReduceOp};

use crate::oracle::reduce;

type ModelCell = (u32, Buffer, u32);

/// The output of the communicator's `rank`. `inputs` are those of all ranks. `equal` says that the plan takes equal chunks
/// alone.
pub(crate) fn output(
    plan: &Plan,
    inputs: &[Vec<u8>],
    rank: u32,
    (dtype, op): (DType, ReduceOp),
    root: u32,
    equal: bool,
) -> Vec<u8> {
    let world = plan.world;
    let of_plan = |rank: u32| (rank + world - root) % world;
    let mut cells: BTreeMap<ModelCell, Vec<u8>> = BTreeMap::new();
    for (real, input) in (0u32..).zip(inputs) {
        for (index, chunk) in (0u32..).zip(chunks(plan, input, dtype, equal)) {
            cells.insert((of_plan(real), Buffer::Input, index), chunk);
        }
    }
    let mut left: Vec<VecDeque<&Operation>> = Vec::new();
    for program in &plan.programs {
        left.push(program.iter().map(|each| &each.operation).collect());
    }
    let mut signals: BTreeMap<(u32, u32, u32), u32> = BTreeMap::new();
    // Operations of block groups are in the order of the program here, which is one of the orders that they may have.
    while left.iter().any(|program| !program.is_empty()) {
        for rank in 0..world {
            while let Some(operation) = left[rank as usize].front().copied() {
                match operation {
                    Operation::Barrier => break,
                    Operation::Signal { peer, channel } => {
                        *signals.entry((rank, *peer, *channel)).or_default() += 1;
                    }
                    Operation::Wait { peer, channel } => {
                        match signals.get_mut(&(*peer, rank, *channel)) {
                            Some(count) if *count > 0 => *count -= 1,
                            _ => break,
                        }
                    }
                    _ => move_data(operation, &mut cells, (dtype, op)),
                }
                left[rank as usize].pop_front();
            }
        }
        if left.iter().all(|program| program.front() == Some(&&Operation::Barrier)) {
            for program in &mut left {
                program.pop_front();
            }
        }
    }
    let mine = of_plan(rank);
    let all = 0..plan.output_chunks(mine);
    all.flat_map(|index| cells.remove(&(mine, Buffer::Output, index)).unwrap_or_default()).collect()
}

/// The input's chunks: whole lines of 64 bytes where they may differ in length.
fn chunks(plan: &Plan, input: &[u8], dtype: DType, equal: bool) -> Vec<Vec<u8>> {
    let of_part = plan.chunks_of_part() as usize;
    let part = input.len() / plan.input_parts() as usize;
    let each = if equal {
        part / of_part
    } else {
        (part / dtype.size()).div_ceil(of_part).next_multiple_of(64 / dtype.size()) * dtype.size()
    };
    let mut found = Vec::new();
    for at in (0..plan.input_parts() as usize).map(|nth| nth * part) {
        for nth in 0..of_part {
            let (from, to) = ((nth * each).min(part), ((nth + 1) * each).min(part));
            found.push(input[at + from..at + to].to_vec());
        }
    }
    found
}

fn move_data(
    operation: &Operation,
    cells: &mut BTreeMap<ModelCell, Vec<u8>>,
    (dtype, op): (DType, ReduceOp),
) {
    let (dst, srcs): (Span, &[Span]) = match operation {
        Operation::Copy { dst, src }
        | Operation::Put { dst, src }
        | Operation::Get { dst, src } => (*dst, std::slice::from_ref(src)),
        Operation::Reduce { dst, srcs } => (*dst, srcs),
        _ => return,
    };
    for offset in 0..dst.count {
        let cell = |span: &Span| (span.rank, span.buffer, span.index + offset);
        let found: Vec<&[u8]> = srcs.iter().map(|src| cells[&cell(src)].as_slice()).collect();
        let result = match found[..] {
            [one] => one.to_vec(),
            _ => reduce(&found, dtype, op),
        };
        cells.insert(cell(&dst), result);
    }
}
