//! The variants of kernels that tests compile: all for compute capability 9.0 with every compiler, and every mode of
//! a kernel for every other architecture.
//!
//! Nearly all time goes into optimising and assembling, which no two variants share. So what is compiled is chosen:
//! each pair of a compiler and an architecture for every variant would take four times as long, and find little that
//! these do not. The kernels have few lines for single architectures, and all variants of one mode have them alike.

use std::cmp::Reverse;
use std::sync::atomic::AtomicUsize;

use comfy_table::Table;

use super::super::sources::KERNELS;
use super::*;

type Defines = Vec<(&'static str, &'static str)>;

/// A variant of a kernel, and what it is compiled with and for.
struct Job {
    kernel: &'static Kernel<'static>,
    defines: Defines,
    compiler: usize,
    arch: (u32, u32),
}

impl Job {
    fn variant(&self) -> Variant<'_> {
        Variant { kernel: self.kernel, defines: &self.defines }
    }
}

/// What a job's machine code needs; `None` for intermediate code.
type Done<'a> = (&'a Job, Option<Usage>);

/// The compilers, the oldest first.
fn jits() -> Vec<Jit> {
    let mut jits: Vec<Jit> =
        compilers().into_iter().map(|nvrtc| Jit::new(options(nvrtc, Some(&kept())))).collect();
    jits.sort_by_key(|jit| jit.nvrtc().expect("the compiler").version);
    jits
}

/// Compiles on all processors, and prints what is needed of a device. Each failure is an error.
fn compile<'a>(jits: &[Jit], jobs: &'a [Job]) -> Vec<Done<'a>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let image = jits[job.compiler]
                        .compile(&job.variant(), arch(job.arch.0, job.arch.1))
                        .and_then(|image| look(&image, job.kernel));
                    match image {
                        Ok(used) => lock(&done).push((job, used)),
                        Err(error) => lock(&failed).push(format!("{}: {error}", job.variant())),
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no panic");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let done = done.into_inner().expect("no panic");
    assert_eq!(done.len(), jobs.len());
    for (compiler, jit) in jits.iter().enumerate() {
        let nvrtc = jit.nvrtc().expect("the compiler");
        println!(
            "NVRTC {}.{} ({}), {} compiled now; registers, stack and shared bytes:\n{}",
            nvrtc.version.0,
            nvrtc.version.1,
            nvrtc.place,
            jit.compiled(),
            table(done.iter().filter(|(job, _)| job.compiler == compiler))
        );
    }
    done
}

fn table<'a>(done: impl Iterator<Item = &'a Done<'a>>) -> Table {
    let mut rows: BTreeMap<String, BTreeMap<(u32, u32), String>> = BTreeMap::new();
    let mut archs = BTreeSet::new();
    for (job, used) in done {
        archs.insert(job.arch);
        let cell = match used {
            Some(Usage { registers, stack_bytes, shared_bytes }) => {
                format!("{registers} {stack_bytes} {shared_bytes}")
            }
            None => "PTX".to_owned(),
        };
        rows.entry(job.variant().to_string()).or_default().insert(job.arch, cell);
    }
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    let names = archs.iter().map(|(major, minor)| format!("{major}.{minor}"));
    table.set_header(["".to_owned()].into_iter().chain(names));
    for (variant, cells) in rows {
        let cells = archs.iter().map(|arch| cells.get(arch).cloned().unwrap_or_default());
        table.add_row([variant].into_iter().chain(cells));
    }
    table
}

fn value<'a>(defines: &[(&str, &'a str)], name: &str) -> Option<&'a str> {
    defines.iter().find(|(define, _)| *define == name).map(|(_, value)| *value)
}

fn number(defines: &[(&str, &str)], name: &str) -> Option<u32> {
    value(defines, name).map(|value| value.parse().expect("a number"))
}

/// Whether it reads, makes or sums 8-bit floats.
fn has_8_bit_floats(defines: &[(&str, &str)]) -> bool {
    matches!(value(defines, "DTYPE"), Some("9" | "10"))
        || value(defines, "OUTPUT").is_some_and(|output| output.starts_with("FP8"))
        || value(defines, "QUANTIZES") == Some("1")
}

/// One type and operation for each mode of a kernel, for the fewest ranks that share work and for the most. 8-bit
/// floats are a mode of their own.
fn modes(kernel: &Kernel<'static>) -> Vec<Defines> {
    let mut met = BTreeSet::new();
    let mut modes = kernel.test_variants();
    modes.retain(|defines| {
        let mut mode = defines.clone();
        mode.retain(|(name, _)| !["DTYPE", "OP"].contains(name));
        matches!(value(defines, "WORLD"), None | Some("2" | "8"))
            && met.insert((mode, has_8_bit_floats(defines)))
    });
    modes
}

/// A processor that holds as many blocks as a kernel is bound to, without registers in memory.
fn check((job, used): &Done<'_>) {
    // For devices that the compiler does not know there is no machine code.
    let Some(used) = used else { return };
    let name = format!("{} on {}.{}", job.variant(), job.arch.0, job.arch.1);
    // For 12.0, NVRTC 13 spills up to ten words in all-to-alls of few ranks.
    let most = if job.arch.0 == 12 { CALL_FRAME + 8 } else { CALL_FRAME };
    assert!(used.stack_bytes <= most, "{name}: registers are spilled, {used:?}");
    if let Some(threads) = number(&job.defines, "THREADS") {
        let (_, processor) =
            PROCESSORS.iter().find(|(of, _)| *of == job.arch).expect("one of them");
        let wanted = number(&job.defines, "BLOCKS").unwrap_or(1);
        let held = processor.holds(used, threads);
        assert!(held >= wanted, "{name}: {held} blocks of {used:?}");
    }
}

#[test]
fn every_variant_compiles_with_every_compiler_spills_nothing_and_fits() {
    let jits = jits();
    let mut jobs = Vec::new();
    for compiler in 0..jits.len() {
        for kernel in KERNELS.iter().copied() {
            let variants = kernel.test_variants().into_iter();
            jobs.extend(variants.map(|defines| Job { kernel, defines, compiler, arch: (9, 0) }));
        }
    }
    for done in &compile(&jits, &jobs) {
        assert!(done.1.is_some(), "every compiler makes machine code for 9.0");
        check(done);
    }
}

#[test]
fn every_mode_compiles_for_every_architecture_spills_nothing_and_fits() {
    let jits = jits();
    let Some(newest) = jits.len().checked_sub(1) else { return };
    let mut jobs = Vec::new();
    for kernel in KERNELS.iter().copied() {
        let mut add = |defines: &Defines, compiler, arch| {
            jobs.push(Job { kernel, defines: defines.clone(), compiler, arch });
        };
        for (at, defines) in modes(kernel).iter().enumerate() {
            // Where the oldest compiler can make machine code, it and the newest one take turns.
            let turns = if at / 2 % 2 == 0 { [0, newest] } else { [newest, 0] };
            add(defines, turns[0], (8, 0));
            // 8.6 and 8.9 have equal processors, and different instructions only for 8-bit floats.
            let both = has_8_bit_floats(defines);
            for (nth, arch) in [(8, 6), (8, 9)].into_iter().enumerate() {
                if both || nth == at % 2 {
                    add(defines, turns[1], arch);
                }
            }
            add(defines, newest, (10, 0));
            add(defines, newest, (12, 0));
        }
        // What a device gets whose compiler is older than itself.
        add(&modes(kernel)[0], 0, (10, 0));
    }
    // The longest first, so that no processor is idle at the end.
    jobs.sort_by_key(|job| Reverse(job.kernel.source.len()));
    let done = compile(&jits, &jobs);
    done.iter().for_each(check);
    for kernel in KERNELS {
        for (arch, _) in PROCESSORS.iter().filter(|(arch, _)| *arch != (9, 0)) {
            let of = |(job, _): &&Done<'_>| job.kernel.name == kernel.name && job.arch == *arch;
            assert!(done.iter().any(|done| of(&done)), "{} for {arch:?}", kernel.name);
        }
    }
    // With its newest supported version, machine code is made for every architecture.
    if jits[newest].nvrtc().expect("the compiler").version >= (13, 0) {
        let made = |(job, used): &Done<'_>| job.compiler != newest || used.is_some();
        assert!(done.iter().all(made));
    }
}
