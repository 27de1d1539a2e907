//! How many registers and how much memory a compiled kernel needs, and how long its code is, read from its machine code.

use object::{Object, ObjectSection, ObjectSymbol, SymbolIndex};

/// Needs of a thread or a block of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    /// Registers of a thread.
    pub(super) registers: u32,
    /// Bytes of a thread's stack, in device memory, for spilled registers and for arrays with indices that are not known
    /// at compile time.
    pub(super) stack_bytes: u32,
    /// Bytes of a block's static shared memory. From compute capability 9.0 on this includes the 1 KiB that the system
    /// keeps for itself, if there are any.
    pub(super) shared_bytes: u64,
    /// Bytes of machine code: of the kernel, with the functions that it calls. `None` where that was not recorded.
    pub(super) code_bytes: Option<u64>,
}

impl Usage {
    /// Whether a recorded usage is this one, as far as it was recorded.
    pub(super) fn is_as(&self, recorded: &Self) -> bool {
        let code_bytes = recorded.code_bytes.and(self.code_bytes);
        Self { code_bytes, ..*self } == *recorded
    }
}

/// Attributes in `.nv.info` whose values are pairs of a symbol and a number.
const FRAME_SIZE: u8 = 0x11;
const REGISTERS: u8 = 0x2f;
/// The format of such values: a length, and so many bytes. Values of other formats have no bytes behind their head.
const SIZED: u8 = 0x04;
const HEAD: usize = 4;

/// The usage of the kernel `entry`. The error says where the image differs from the known format of cubins.
pub(super) fn usage(cubin: &[u8], entry: &str) -> Result<Usage, String> {
    let file = object::File::parse(cubin).map_err(|error| error.to_string())?;
    let info = file.section_by_name(".nv.info").ok_or("no section .nv.info")?;
    let info = info.data().map_err(|error| error.to_string())?;
    let mut found = Usage { registers: 0, stack_bytes: 0, shared_bytes: 0, code_bytes: None };
    let mut at = 0;
    while let Some(head) = info.get(at..at + HEAD) {
        at += HEAD;
        if head[0] != SIZED {
            continue;
        }
        let length = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let value = info.get(at..at + length).ok_or("an attribute is cut off")?;
        at += length;
        let word = |at: usize| value.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let (Some(symbol), Some(number)) = (word(0), word(4)) else { continue };
        let symbol = file.symbol_by_index(SymbolIndex(symbol as usize));
        if symbol.and_then(|symbol| symbol.name()).ok() != Some(entry) {
            continue;
        }
        match head[1] {
            REGISTERS => found.registers = number,
            FRAME_SIZE => found.stack_bytes = number,
            _ => {}
        }
    }
    if found.registers == 0 {
        return Err(format!("no registers are noted for {entry}"));
    }
    let shared = file.section_by_name(&format!(".nv.shared.{entry}"));
    found.shared_bytes = shared.map_or(0, |section| section.size());
    let code = file.section_by_name(&format!(".text.{entry}"));
    found.code_bytes = Some(code.ok_or_else(|| format!("no machine code of {entry}"))?.size());
    Ok(found)
}
