//! Tests with real compilers: those named in `SYMMPOOL_TEST_NVRTC` (paths separated by colons), or the one that
//! programs would find, if any.

mod device_api;
mod plans;
mod recorded;
mod variants;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::thread;

use super::search::Candidate;
use super::sources::REDUCE_LOCAL;
use super::usage::{Usage, usage};
use super::*;

/// Bytes of stack that a call of a function takes that is not inlined. Waits that take long call such functions.
const CALL_FRAME: u32 = 24;

/// The registers, threads, blocks and bytes of shared memory of an SM, by compute capability.
const PROCESSORS: [((u32, u32), Processor); 6] = [
    ((8, 0), Processor { registers: 65_536, threads: 2048, blocks: 32, shared: 164 << 10 }),
    ((8, 6), Processor { registers: 65_536, threads: 1536, blocks: 16, shared: 100 << 10 }),
    ((8, 9), Processor { registers: 65_536, threads: 1536, blocks: 24, shared: 100 << 10 }),
    ((9, 0), Processor { registers: 65_536, threads: 2048, blocks: 32, shared: 228 << 10 }),
    ((10, 0), Processor { registers: 65_536, threads: 2048, blocks: 32, shared: 228 << 10 }),
    ((12, 0), Processor { registers: 65_536, threads: 1536, blocks: 24, shared: 100 << 10 }),
];

#[derive(Clone, Copy, Debug)]
struct Processor {
    registers: u32,
    threads: u32,
    blocks: u32,
    shared: u64,
}

impl Processor {
    /// How many blocks of so many threads it runs at once.
    fn holds(&self, used: &Usage, threads: u32) -> u32 {
        // Warps get registers in units of 256, and the system takes 1 KiB of shared memory for each block.
        let warps = threads.div_ceil(32);
        let by_registers = self.registers / ((used.registers * 32).next_multiple_of(256) * warps);
        let by_shared = (self.shared / (used.shared_bytes + 1024)) as u32;
        by_registers.min(by_shared).min(self.threads / threads).min(self.blocks)
    }
}

fn arch(major: u32, minor: u32) -> Arch {
    Arch::new(major, minor).expect("new enough")
}

pub(crate) fn options(nvrtc: Option<PathBuf>, cache: Option<&Path>) -> JitOptions {
    let cache = cache.map(Path::to_owned);
    let environment = JitOptions::from_env();
    let nvrtc = nvrtc.or(environment.nvrtc.clone());
    JitOptions { nvrtc, cache, strict: true, ..environment }
}

/// The compilers to test with. Those that the variable names must work.
pub(crate) fn compilers() -> Vec<Option<PathBuf>> {
    if let Some(paths) = env::var_os("SYMMPOOL_TEST_NVRTC").filter(|paths| !paths.is_empty()) {
        return env::split_paths(&paths).map(Some).collect();
    }
    match Jit::new(options(None, None)).nvrtc() {
        Ok(_) => vec![None],
        Err(error) => {
            eprintln!("skipped: no NVRTC: {error}");
            Vec::new()
        }
    }
}

/// The cache that is kept between runs, so that only what has changed is compiled.
fn kept() -> PathBuf {
    let program = env::current_exe().expect("a program");
    program.parent().expect("a folder").join("compiled-kernels")
}

/// Needs of the machine code; `None` for intermediate code, which the driver translates.
fn look(image: &Image, kernel: &KernelSource<'_>) -> Result<Option<Usage>> {
    match image.kind {
        ImageKind::Cubin => usage(&image.bytes, kernel.entry)
            .map(Some)
            .map_err(|why| Error::system("reading machine code", why)),
        ImageKind::Ptx => {
            let text = std::str::from_utf8(&image.bytes).expect("text");
            assert!(text.contains(&format!(".entry {}(", kernel.entry)) && text.ends_with('\0'));
            Ok(None)
        }
    }
}

const EMPTY: KernelSource<'static> = KernelSource {
    name: "empty",
    path: "empty.cu",
    entry: "empty",
    source: "extern \"C\" __global__ void empty() {}",
    asks_for_blocks: false,
    variants: &[],
};

fn plain<'a>(kernel: &'a KernelSource<'a>) -> Variant<'a> {
    Variant { kernel, defines: &[] }
}

#[test]
fn memory_and_disk_save_compilations() {
    for nvrtc in compilers() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path().join("cache");
        let first = Jit::new(options(nvrtc.clone(), Some(&cache)));
        let image = first.compile(&plain(&EMPTY), arch(9, 0)).expect("compiled");
        let again = first.compile(&plain(&EMPTY), arch(9, 0)).expect("remembered");
        assert!(Arc::ptr_eq(&image.bytes, &again.bytes));
        assert_eq!(first.compiled(), 1);

        let second = Jit::new(options(nvrtc.clone(), Some(&cache)));
        let loaded = second.compile(&plain(&EMPTY), arch(9, 0)).expect("from disk");
        assert_eq!((loaded.kind, &loaded.bytes), (image.kind, &image.bytes));
        assert_eq!(second.compiled(), 0);
        second.compile(&plain(&EMPTY), arch(8, 0)).expect("compiled for another device");
        let defines = Variant { kernel: &EMPTY, defines: &[("X", "1")] };
        second.compile(&defines, arch(9, 0)).expect("compiled with other defines");
        assert_eq!(second.compiled(), 2);

        // A file in the place of the folder: there is no cache, and kernels are compiled all the same.
        let file = folder.path().join("file");
        fs::write(&file, "").expect("written");
        let third = Jit::new(options(nvrtc, Some(&file)));
        third.compile(&plain(&EMPTY), arch(9, 0)).expect("compiled");
        assert_eq!(third.compiled(), 1);
    }
}

#[test]
fn threads_share_one_compilation() {
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, None));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| jit.compile(&plain(&EMPTY), arch(8, 0)).expect("compiled"));
            }
        });
        assert_eq!(jit.compiled(), 1);
    }
}

#[test]
fn a_wrong_kernel_is_an_error_with_the_log_of_the_compiler() {
    const WRONG: KernelSource<'static> = KernelSource {
        name: "wrong",
        path: "wrong.cu",
        entry: "wrong",
        source: "#include <symmpool/impl/types.cuh>\nextern \"C\" __global__ void wrong() { undeclared = WIDTH; }",
        asks_for_blocks: false,
        variants: &[],
    };
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, None));
        let variant = Variant { kernel: &WRONG, defines: &[("WIDTH", "16")] };
        for _ in 0..2 {
            let error = jit.compile(&variant, arch(9, 0)).expect_err("it is wrong").to_string();
            for part in ["wrong (WIDTH=16)", "sm_90a", "wrong.cu(2)", "\"undeclared\" is undefined"]
            {
                assert!(error.contains(part), "{error}");
            }
        }
        assert_eq!(jit.compiled(), 2);
        let zero = Variant { kernel: &EMPTY, defines: &[("A", "1\0")] };
        let error = jit.compile(&zero, arch(9, 0)).expect_err("no option holds a NUL");
        assert!(error.to_string().contains("NUL"), "{error}");
    }
}

#[test]
fn a_warning_is_an_error_only_to_the_strict() {
    const HASTY: KernelSource<'static> = KernelSource {
        name: "hasty",
        path: "hasty.cu",
        entry: "hasty",
        source: "extern \"C\" __global__ void hasty() { int never_used; }",
        asks_for_blocks: false,
        variants: &[],
    };
    for nvrtc in compilers() {
        let strict = Jit::new(options(nvrtc.clone(), None));
        let error = strict.compile(&plain(&HASTY), arch(9, 0)).expect_err("it has a warning");
        assert!(error.to_string().contains("never_used"), "{error}");
        let lax = Jit::new(JitOptions { strict: false, ..options(nvrtc, None) });
        lax.compile(&plain(&HASTY), arch(9, 0)).expect("a warning is no error");
    }
}

/// Rule S7.
#[test]
fn reductions_round_every_operation_for_itself() {
    // Nothing fused, flushed or approximated, so the bits are the host's.
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, Some(&kept())));
        for dtype in ["1", "2", "3", "4", "9", "10"] {
            for (op, expected) in [("1", "add"), ("2", "mul"), ("5", "div")] {
                let defines = [("DTYPE", dtype), ("OP", op)];
                let variant = Variant { kernel: &REDUCE_LOCAL, defines: &defines };
                let image = jit.compile(&variant, arch(99, 0)).expect("compiled");
                let text = std::str::from_utf8(&image.bytes).expect("text of PTX");
                let float = if dtype == "2" { "f64" } else { "f32" };
                assert!(text.contains(&format!("{expected}.rn.{float}")), "{variant}");
                for wrong in ["fma.", "mad.rn", ".ftz", ".approx", "div.full"] {
                    assert!(!text.contains(wrong), "{variant} has {wrong}");
                }
            }
        }
    }
}

#[test]
fn devices_newer_than_the_compiler_get_code_to_translate() {
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, None));
        let image = jit.compile(&plain(&EMPTY), arch(99, 0)).expect("compiled");
        assert_eq!(image.kind, ImageKind::Ptx);
        assert!(look(&image, &EMPTY).expect("text").is_none());
    }
}

#[test]
fn usage_has_stack_and_shared_memory() {
    const GREEDY: KernelSource<'static> = KernelSource {
        name: "greedy",
        path: "greedy.cu",
        entry: "greedy",
        source: "extern \"C\" __global__ void greedy(int* p) {
            __shared__ int shared[100];
            volatile int stack[64];
            stack[p[0]] = 1;
            shared[threadIdx.x] = stack[p[1]];
            __syncthreads();
            p[2] = shared[p[3]];
        }",
        asks_for_blocks: false,
        variants: &[],
    };
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, None));
        for (major, minor, shared) in [(8, 0, 400), (9, 0, 1024 + 400)] {
            let image = jit.compile(&plain(&GREEDY), arch(major, minor)).expect("compiled");
            let used = look(&image, &GREEDY).expect("machine code").expect("machine code");
            assert!((4..64).contains(&used.registers), "{used:?}");
            assert_eq!((used.stack_bytes, used.shared_bytes), (256, shared));
            let code = used.code_bytes.expect("machine code");
            assert!(code > 128 && code < image.bytes.len() as u64, "{used:?}");
        }
    }
}

#[test]
fn a_compiler_that_is_loaded_already_is_found_unless_the_driver_is_older() {
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, None));
        let Ok(Nvrtc { version: (major, minor), .. }) = jit.nvrtc() else { panic!("a compiler") };
        let name = search::NAMES.into_iter().find(|name| name.ends_with(&major.to_string()));
        let loaded = [Candidate::Loaded(name.expect("a known version"))];
        let found = Nvrtc::open(&loaded, Some(*major)).expect("it is loaded");
        assert_eq!(found.version, (*major, *minor));
        let error = Nvrtc::open(&loaded, Some(*major - 1)).err().expect("too new for the driver");
        assert!(error.is_unsupported() && error.to_string().contains("too new"), "{error}");
    }
}

#[test]
fn keys_change_with_everything_that_matters() {
    const OTHER: KernelSource<'static> =
        KernelSource { source: "extern \"C\" __global__ void empty() { }", ..EMPTY };
    const RENAMED: KernelSource<'static> = KernelSource { path: "void.cu", ..EMPTY };
    let key = |version, kernel, defines, target: &str| {
        let variant = Variant { kernel, defines };
        let options = super::options(&variant, &Target::Cubin(target.to_owned()));
        let headers = headers_of(variant.kernel.source);
        format!("{:?}", super::key(version, &variant, &headers, &options))
    };
    let keys = BTreeSet::from([
        key((12, 4), &EMPTY, &[], "sm_80"),
        key((12, 5), &EMPTY, &[], "sm_80"),
        key((12, 4), &OTHER, &[], "sm_80"),
        key((12, 4), &RENAMED, &[], "sm_80"),
        key((12, 4), &EMPTY, &[], "sm_90a"),
        key((12, 4), &EMPTY, &[("A", "1")], "sm_80"),
        key((12, 4), &EMPTY, &[("A", "2")], "sm_80"),
    ]);
    assert_eq!(keys.len(), 7);
    assert!(keys.contains(&key((12, 4), &EMPTY, &[], "sm_80")));
}

#[test]
fn the_environment_says_where_compiled_kernels_are_kept() {
    let cache = |variables: &[(&str, &str)]| {
        let options = JitOptions::from_variables(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| value.into())
        });
        options.cache.map(|path| path.display().to_string())
    };
    let all = [("SYMMPOOL_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
    assert_eq!(cache(&all).as_deref(), Some("/a/jit"));
    assert_eq!(cache(&all[1..]).as_deref(), Some("/b/symmpool/jit"));
    assert_eq!(cache(&all[2..]).as_deref(), Some("/c/.cache/symmpool/jit"));
    assert_eq!(cache(&[("XDG_CACHE_HOME", "relative"), all[2]]), cache(&all[2..]));
    assert_eq!(cache(&[]), None);
    assert_eq!(cache(&[("SYMMPOOL_CACHE_DIR", ""), all[2]]), None);
}
