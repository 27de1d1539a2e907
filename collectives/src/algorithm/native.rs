//! Kernels that programs bring along.

use symmpool_allocator::{Error, Result, short};

use super::{Constraints, StandardCollective};
use crate::plan::MAX_NAME;
use crate::{DType, ReduceOp};

/// Bytes of a source at most.
const MAX_SOURCE: usize = 1 << 20;
/// Threads of a block.
const THREADS: [u32; 5] = [32, 64, 128, 256, 512];
/// Blocks of a grid, without the one that does the handshake: there are flags for so many.
const MAX_BLOCKS: u32 = 1056;
/// Ranks on devices.
const MAX_RANKS: u32 = 8;

/// A CUDA kernel for a collective, written against the device API (`docs/kernels.md`). It is compiled by NVRTC when a
/// call first needs it, for the number of ranks and, if the collective reduces, the type and the operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NativeKernel {
    /// The name under which the algorithm is registered.
    pub name: String,
    /// Collective that the kernel computes.
    pub collective: StandardCollective,
    /// CUDA C++.
    pub source: String,
    /// Name of the source in the compiler's messages, such as the file's path.
    pub path: String,
    /// The kernel in the source, which is `extern "C" __global__`.
    pub kernel: String,
    /// The number of ranks that it is for; any if `None`.
    pub world: Option<u32>,
    /// Whether peers access inputs, which must then be windows.
    pub input_window: bool,
    /// Whether peers access outputs, which must then be windows.
    pub output_window: bool,
    /// Whether input and output may be one memory.
    pub in_place: bool,
    /// The most bytes of the larger one of input and output, such as what an inbox has room for; any number if `None`.
    pub max_bytes: Option<u64>,
    /// Thread blocks at most, without the one that does the handshake; `None` leaves it to the size of a call, up to 128.
    pub blocks: Option<u32>,
    /// Threads of a block: 32, 64, 128, 256 or 512. It is the macro THREADS.
    pub threads: u32,
}

impl NativeKernel {
    /// A kernel of this name in the source, for any number of ranks, whose peers access neither input nor output.
    pub fn new(collective: StandardCollective, kernel: &str, source: &str) -> Self {
        Self {
            name: kernel.to_owned(),
            collective,
            source: source.to_owned(),
            path: format!("{kernel}.cu"),
            kernel: kernel.to_owned(),
            world: None,
            input_window: false,
            output_window: false,
            in_place: false,
            max_bytes: None,
            blocks: None,
            threads: 256,
        }
    }

    /// Refuses what cannot be a kernel.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { name, collective, kernel, .. } = self;
        let refuse = |why: String| {
            Err(Error::invalid_argument(format!(
                "the native algorithm {:?} for {collective}: {why}",
                short(name)
            )))
        };
        if name.len() > MAX_NAME {
            return refuse(format!("names have {MAX_NAME} bytes at most"));
        }
        if name.is_empty() || name == "auto" || name.chars().any(char::is_control) {
            return refuse("it needs a name, other than \"auto\"".to_owned());
        }
        let is_word = |each: char| each.is_ascii_alphanumeric() || each == '_';
        let begins_right =
            kernel.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
        if !begins_right || kernel.len() > MAX_NAME || !kernel.chars().all(is_word) {
            return refuse(format!("{:?} is no name of a kernel", short(kernel)));
        }
        if self.source.is_empty() || self.source.len() > MAX_SOURCE {
            let bytes = self.source.len();
            return refuse(format!("a source of {bytes} bytes; 1 to {MAX_SOURCE} are possible"));
        }
        if self.source.contains('\0') || self.path.contains('\0') {
            return refuse("its source or path has a NUL".to_owned());
        }
        if self.world.is_some_and(|world| !(1..=MAX_RANKS).contains(&world)) {
            let world = self.world.unwrap_or(0);
            return refuse(format!("for {world} ranks; 1 to {MAX_RANKS} are possible"));
        }
        if self.blocks.is_some_and(|blocks| !(1..=MAX_BLOCKS).contains(&blocks)) {
            let blocks = self.blocks.unwrap_or(0);
            return refuse(format!("{blocks} blocks; 1 to {MAX_BLOCKS} are possible"));
        }
        if self.max_bytes == Some(0) {
            return refuse("for 0 bytes at most; max_bytes is 1 or more".to_owned());
        }
        if !THREADS.contains(&self.threads) {
            return refuse(format!(
                "blocks of {} threads; 32, 64, 128, 256 or 512 are possible",
                self.threads
            ));
        }
        Ok(())
    }

    /// Which calls it can serve.
    pub(crate) fn constraints(&self) -> Constraints {
        let reduces = self.collective.reduces();
        let dtypes = if reduces { DType::REDUCED.to_vec() } else { DType::all().collect() };
        Constraints {
            world: self.world.unwrap_or(1)..=self.world.unwrap_or(MAX_RANKS),
            topology: None,
            dtypes,
            ops: if reduces { ReduceOp::ALL.to_vec() } else { Vec::new() },
            bytes: 0..=self.max_bytes.unwrap_or(u64::MAX),
            multiple_of: 1,
            input_window: self.input_window,
            output_window: self.output_window,
            in_place: self.in_place,
        }
    }

    /// A hash of what ranks must have the same of. Where the source comes from may differ.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = blake3::Hasher::new();
        let Self { name, collective, source, kernel, .. } = self;
        for text in [name, collective.name(), source, kernel] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        let numbers = [self.world.unwrap_or(0), self.blocks.unwrap_or(0), self.threads];
        for number in numbers {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&self.max_bytes.unwrap_or(u64::MAX).to_le_bytes());
        let yes = [self.input_window, self.output_window, self.in_place].map(u8::from);
        hasher.update(&yes);
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        u64::from_le_bytes(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right() -> NativeKernel {
        NativeKernel::new(
            StandardCollective::AllGather,
            "gather",
            "extern \"C\" __global__ void gather() {}",
        )
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        right().check().expect("a kernel");
        let wrong = [
            (NativeKernel { name: "auto".to_owned(), ..right() }, "auto"),
            (NativeKernel { kernel: "a b".to_owned(), ..right() }, "a b"),
            (NativeKernel { kernel: String::new(), ..right() }, "no name of a kernel"),
            (NativeKernel { source: String::new(), ..right() }, "source of 0 bytes"),
            (NativeKernel { source: "\0".to_owned(), ..right() }, "NUL"),
            (NativeKernel { world: Some(9), ..right() }, "for 9 ranks"),
            (NativeKernel { blocks: Some(0), ..right() }, "0 blocks"),
            (NativeKernel { threads: 100, ..right() }, "100 threads"),
            (NativeKernel { max_bytes: Some(0), ..right() }, "0 bytes at most"),
        ];
        for (kernel, words) in wrong {
            let error = kernel.check().expect_err("nonsense");
            assert!(error.is_invalid_argument() && error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn hashes_differ_with_all_that_ranks_must_agree_on() {
        let same = NativeKernel { path: "/elsewhere.cu".to_owned(), ..right() };
        assert_eq!(same.hash(), right().hash());
        let others = [
            NativeKernel { source: right().source + " ", ..right() },
            NativeKernel { kernel: "gathe".to_owned(), ..right() },
            NativeKernel { threads: 512, ..right() },
            NativeKernel { blocks: Some(4), ..right() },
            NativeKernel { output_window: true, ..right() },
            NativeKernel { max_bytes: Some(1 << 20), ..right() },
        ];
        assert!(others.iter().all(|other| other.hash() != right().hash()));
    }
}
