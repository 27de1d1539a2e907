//! All-to-alls whose parts copy engines carry, with a companion kernel of SMs (`ops/copy_engine`).

use super::row::{Exchange, Use};
use crate::algorithm::COPY;
use crate::jit::kernel_beside;
use crate::jit::sources::{KernelSource, ODD, WIDE, WORLD};

/// Kernel of SMs while copy engines carry an all-to-all or an all-gather.
pub(in crate::cuda) const COMPANION: KernelSource<'static> =
    kernel_beside!("all_to_all" / "copy_companion", [WORLD, WIDE], [ODD, WIDE],);

pub(in crate::cuda) static ROW: Exchange =
    Exchange { id: COPY, copies: Use::Always, ..Exchange::DIRECTLY };
