//! Compiles kernels that programs bring along where there is no device, so that mistakes in them are found there.

use symmpool_allocator::{Error, Result, short};

use super::generated_kernel::{GeneratedKernel, GeneratedSource};
use super::modules::compile_without_device;
use crate::algorithm::NativeKernel;
use crate::jit::{Image, ImageKind};
use crate::{DType, ReduceOp};

impl NativeKernel {
    /// Compiles the kernel as a call among `world` ranks would, for devices of compute capability `(major, minor)`, and
    /// returns the bytes of code. No device is needed, but NVRTC is. If the collective reduces, it is for elements of that
    /// type and that operation.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a source that does not compile, with the compiler's messages and lines, or that lacks
    /// the kernel, with the kernels that there are and their lines; `is_unsupported` where there is no NVRTC, or none
    /// for such devices.
    pub fn compile(
        &self,
        arch: (u32, u32),
        world: u32,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<usize> {
        self.check()?;
        let name = short(&self.name);
        let possible = self.constraints().world;
        if !possible.contains(&world) {
            let (least, most) = (possible.start(), possible.end());
            return Err(Error::invalid_argument(format!(
                "the native algorithm {name:?} for {world} ranks: it is for {least} to {most}"
            )));
        }
        let (dtype, op) =
            if self.collective.reduces() { (dtype, op) } else { (DType::U8, ReduceOp::Sum) };
        if self.collective.reduces() && !dtype.is_reduced() {
            let (dtype, collective) = (dtype.name(), self.collective);
            return Err(Error::invalid_argument(format!(
                "the native algorithm {name:?} of {dtype}, which no {collective} has"
            )));
        }
        let (key, source) = (self.key(world, dtype, op), self.generated());
        let image = compile_without_device(arch, (&key, &source)).map_err(|why| {
            if why.is_unsupported() { why } else { Error::invalid_argument(why.to_string()) }
        })?;
        if !has_entry(&image, &self.kernel) {
            return Err(Error::invalid_argument(self.lacks_entry()));
        }
        Ok(image.bytes.len())
    }

    /// Variant that is compiled for `world` ranks.
    pub(in crate::cuda) fn key(&self, world: u32, dtype: DType, op: ReduceOp) -> GeneratedKernel {
        GeneratedKernel {
            world,
            hash: self.hash(),
            rank: 0,
            dtype: dtype as u8,
            op: op as u8,
            threads: self.threads,
            // Blocks of all ranks have equal numbers, whatever each rank has room for.
            shares_sms: false,
        }
    }

    /// Source and macros for the compiler.
    pub(in crate::cuda) fn generated(&self) -> GeneratedSource {
        GeneratedSource {
            name: self.name.clone(),
            path: self.path.clone(),
            entry: self.kernel.clone(),
            source: self.source.clone(),
        }
    }

    /// Why a source that compiles lacks the kernel.
    fn lacks_entry(&self) -> String {
        let Self { kernel, path, source, .. } = self;
        let found = kernels_of(source);
        if let Some((line, _)) = found.iter().find(|(_, name)| name == kernel) {
            return format!("{path}:{line}: {kernel} must be extern \"C\" __global__");
        }
        let names: Vec<String> =
            found.iter().map(|(line, name)| format!("{name} in line {line}")).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        format!(
            "{path} has no kernel {kernel}: it must have one that is extern \"C\" __global__; its kernels are: {names}"
        )
    }
}

/// Whether compiled code has an entry of this name.
fn has_entry(image: &Image, entry: &str) -> bool {
    let mark = match image.kind {
        // The section of a kernel's code, in the table of names.
        ImageKind::Cubin => format!("\0.text.{entry}\0"),
        ImageKind::Ptx => format!(".entry {entry}("),
    };
    image.bytes.windows(mark.len()).any(|part| part == mark.as_bytes())
}

/// The lines and names of what a source declares as kernels.
fn kernels_of(source: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, mark) in source.match_indices("__global__") {
        // `__launch_bounds__(THREADS, 2)` may stand before the name.
        let mut rest = &source[at + mark.len()..];
        while let Some(open) = rest.find('(') {
            let word = rest[..open].trim_end().rsplit(|each: char| !is_of_name(each)).next();
            match word {
                Some("__launch_bounds__") => {
                    rest = rest[open..].split_once(')').map_or("", |(_, behind)| behind);
                }
                Some(name) if !name.is_empty() => {
                    let line = source[..at].matches('\n').count() + 1;
                    found.push((line, short(name).to_string()));
                    break;
                }
                _ => break,
            }
        }
    }
    found
}

fn is_of_name(each: char) -> bool {
    each.is_ascii_alphanumeric() || each == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_with_their_lines() {
        let source = "// one\nextern \"C\" __global__ void first(int) {}\n\n\
            extern \"C\" __launch_bounds__(THREADS, 2)\n__global__ void __launch_bounds__(64) second\n(int) {}\n__global__";
        let found = kernels_of(source);
        assert_eq!(found, [(2, "first".to_owned()), (5, "second".to_owned())]);
    }
}
