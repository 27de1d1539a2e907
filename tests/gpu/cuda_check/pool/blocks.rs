//! A long sequence of allocations, the same on every rank, and patterns written through all windows.

use symmpool_allocator::{Block, Pool};

use super::access::ForeignAccess;
use crate::text;

type Outcome = Result<(), String>;

const SIZES: [usize; 8] =
    [1, 512, 3000, 64 << 10, (1 << 20) + 512, 2 << 20, (7 << 20) + 4096, 64 << 20];

/// How many blocks are live at most. Only one of them has the largest size.
const MAX_LIVE: usize = 40;

/// Pseudo-random numbers that are the same on every rank.
pub(super) struct PseudoRandom(pub(super) u64);

impl PseudoRandom {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// Makes `steps` allocations and frees, in random order.
pub(super) fn churn(
    pool: &Pool,
    live: &mut Vec<Block<u8>>,
    numbers: &mut PseudoRandom,
    steps: usize,
) -> Outcome {
    for _ in 0..steps {
        let free = !live.is_empty() && (live.len() >= MAX_LIVE || numbers.below(5) < 2);
        if free {
            live.swap_remove(numbers.below(live.len())).free().map_err(text)?;
        } else {
            let large = live.iter().any(|block| block.len() == SIZES[SIZES.len() - 1]);
            let size = SIZES[numbers.below(SIZES.len() - usize::from(large))];
            live.push(pool.alloc(size).map_err(text)?);
        }
    }
    Ok(())
}

/// Every rank writes its part of every block of every rank.
pub(super) fn write(
    pool: &Pool,
    access: &ForeignAccess,
    live: &[Block<u8>],
    round: u64,
) -> Outcome {
    for block in live {
        for owner in 0..pool.world() {
            let address = pool.peer_ptr(owner, block.address()).map_err(text)?;
            let (from, count) = part(block, pool.rank(), pool.world());
            let bytes = pattern(seed(block, pool.rank(), owner, round), count);
            // SAFETY: the block is in windows, and only this rank writes this part of it; nobody reads
            // before the commit that follows.
            unsafe { access.write(address + from, &bytes) }.map_err(text)?;
        }
    }
    Ok(())
}

/// Every rank checks all of its own blocks, and what it wrote to its peers'.
pub(super) fn check(
    pool: &Pool,
    access: &ForeignAccess,
    live: &[Block<u8>],
    round: u64,
) -> Outcome {
    for block in live {
        let own = match access {
            ForeignAccess::Host => block.read(),
            ForeignAccess::Cuda(_) => {
                // SAFETY: the block is mapped, and all writers have committed since.
                unsafe { access.read(block.address(), block.bytes()) }
            }
        }
        .map_err(text)?;
        for writer in 0..pool.world() {
            let (from, count) = part(block, writer, pool.world());
            let found = &own[from as usize..(from + count) as usize];
            compare(found, block, writer, pool.rank(), round)?;
        }
        for owner in (0..pool.world()).filter(|&owner| owner != pool.rank()) {
            let address = pool.peer_ptr(owner, block.address()).map_err(text)?;
            let (from, count) = part(block, pool.rank(), pool.world());
            // SAFETY: the block is in windows, so the peer's copy is mapped here, and all writers have committed
            // since.
            let found = unsafe { access.read(address + from, count) }.map_err(text)?;
            compare(&found, block, pool.rank(), owner, round)?;
        }
    }
    Ok(())
}

/// Start and length of `writer`'s part of a block. The last rank also has the rest.
fn part(block: &Block<u8>, writer: u32, world: u32) -> (u64, u64) {
    let share = block.bytes() / u64::from(world);
    let from = u64::from(writer) * share;
    (from, if writer + 1 == world { block.bytes() - from } else { share })
}

fn seed(block: &Block<u8>, writer: u32, owner: u32, round: u64) -> u64 {
    let who = u64::from(writer) << 16 | u64::from(owner);
    (block.counter() << 32 | who).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round
}

fn pattern(seed: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![0; count as usize];
    for (at, word) in (0_u64..).zip(bytes.chunks_mut(8)) {
        let value = (seed ^ at).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
    bytes
}

fn compare(found: &[u8], block: &Block<u8>, writer: u32, owner: u32, round: u64) -> Outcome {
    let wanted = pattern(seed(block, writer, owner, round), found.len() as u64);
    if *found == wanted {
        return Ok(());
    }
    let Some(at) = found.iter().zip(&wanted).position(|(a, b)| a != b) else { return Ok(()) };
    Err(format!(
        "round {round}: {block:?} of rank {owner}, the part that rank {writer} wrote: byte {at} of \
         {} is {:#x}, not {:#x}",
        found.len(),
        found[at],
        wanted[at]
    ))
}
