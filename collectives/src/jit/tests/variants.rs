//! The variants of kernels that tests compile: all for compute capability 9.0 with the newest compiler. Every mode of a
//! kernel is compiled once more, for another architecture or with the oldest compiler.
//!
//! Nearly all time goes into optimising and assembling, which no two variants share. So what is compiled is chosen:
//! each pair of a compiler and an architecture for every variant would take ten times as long, and find little that
//! these do not. The kernels have few lines for single architectures, all variants of one mode have them alike, and
//! [`super::device_api`] compiles the public headers for each architecture with each compiler.
//!
//! Needs of a kernel's variants are recorded ([`super::recorded`]). A kernel is compiled if anything that it is made
//! from, but for comments, is another than when it was recorded. So is one of the others in each run, another one each time. With
//! `SYMMPOOL_VARIANTS=all` every kernel is, whatever was recorded and kept of earlier runs.

use std::cmp::Reverse;
use std::sync::atomic::AtomicUsize;
use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::Table;

use super::super::sources::sharing_threads;
use super::recorded::{Needs, Recorded};
use super::*;
use crate::cuda::kernels;

/// Architectures that have nearly the same instructions, and need nearly the same registers.
const OLDER: [(u32, u32); 3] = [(8, 0), (8, 6), (8, 9)];

/// Targets that modes of a kernel are compiled for by turns: an architecture, and whether the oldest compiler makes
/// its code.
const TURNS: [((u32, u32), bool); 6] = [
    ((8, 0), true),
    ((12, 0), false),
    ((9, 0), true),
    ((8, 6), false),
    ((10, 0), false),
    ((8, 9), true),
];

type Defines = Vec<(&'static str, &'static str)>;

/// A mode as it shares SMs with other communicators ([`KernelSpec::sharing`](crate::cuda::kernel::spec::KernelSpec::sharing)).
fn sharing(mode: &Defines) -> Defines {
    let has_two_blocks = mode.contains(&("BLOCKS", "2"));
    // A mode for any number of ranks has to serve the most.
    let world = number(mode, "WORLD").unwrap_or(u32::MAX);
    let threads = sharing_threads(world).to_string().leak();
    let wide = |(name, value): &(&'static str, &'static str)| match *name {
        "THREADS" if has_two_blocks => ("THREADS", &*threads),
        _ => (*name, *value),
    };
    mode.iter().map(wide).chain([("SHARES_SMS", "1")]).collect()
}

/// A variant of a kernel, and what it is compiled with and for.
struct VariantJob {
    kernel: &'static KernelSource<'static>,
    defines: Defines,
    compiler: usize,
    arch: (u32, u32),
}

impl VariantJob {
    fn variant(&self) -> Variant<'_> {
        Variant { kernel: self.kernel, defines: &self.defines }
    }

    /// The device, the compiler's version and the variant.
    fn describe(&self, jits: &[Jit]) -> String {
        let ((major, minor), version) = (self.arch, version(&jits[self.compiler]));
        format!("{major}.{minor} by {}.{}: {}", version.0, version.1, self.variant())
    }

    /// The macros and other options that it is compiled with.
    fn options(&self, jits: &[Jit]) -> Vec<String> {
        let (variant, jit) = (self.variant(), &jits[self.compiler]);
        let compilation = jit.compilation(&variant, arch(self.arch.0, self.arch.1));
        compilation.expect("a device that it makes code for").options
    }
}

/// The lines of a source without comments and the space around them, which change no machine code.
fn code_of(source: &str) -> String {
    let mut code = String::new();
    for line in source.lines() {
        let mut end = line.len();
        // Whether a text in quotes is open: what looks like a comment in it is none.
        let mut is_text = false;
        for (at, c) in line.char_indices() {
            match c {
                '"' if !line[..at].ends_with('\\') => is_text = !is_text,
                '/' if !is_text && line[at..].starts_with("//") => {
                    end = at;
                    break;
                }
                _ => {}
            }
        }
        let rest = line[..end].trim();
        if !rest.is_empty() {
            code.push_str(rest);
            code.push('\n');
        }
    }
    code
}

#[test]
fn comments_are_no_code() {
    let source = "//! A kernel.\n\n#include <a.cuh>  // here\n    asm(\"// %0;\" : \"=r\"(x));\n    // End.\n}\n";
    assert_eq!(code_of(source), "#include <a.cuh>\nasm(\"// %0;\" : \"=r\"(x));\n}\n");
    assert_eq!(code_of("a(\"\\\"\");  // b"), "a(\"\\\"\");\n");
    assert_ne!(code_of("a; b;"), code_of("a;\nb;"));
}

fn version(jit: &Jit) -> (u32, u32) {
    jit.nvrtc().expect("the compiler").version
}

/// A job with the needs of its machine code; `None` for intermediate code.
type Done<'a> = (&'a VariantJob, Option<Usage>);

/// Whether every kernel is to be compiled.
fn compiles_all() -> bool {
    env::var_os("SYMMPOOL_VARIANTS").is_some_and(|which| which == "all")
}

/// The compilers, the oldest first.
fn jits() -> Vec<Jit> {
    let kept = (!compiles_all()).then(kept);
    let jit = |nvrtc| Jit::new(options(nvrtc, kept.as_deref()));
    let mut jits: Vec<Jit> = compilers().into_iter().map(jit).collect();
    jits.sort_by_key(version);
    jits
}

/// Compiles on all processors. Each failure is an error.
fn compile<'a>(jits: &[Jit], jobs: &[&'a VariantJob]) -> Vec<Done<'a>> {
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
                        Ok(used) => lock(&done).push((*job, used)),
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
    done
}

/// Prints what is needed of a device.
fn print(jits: &[Jit], done: &[Done<'_>]) {
    for (compiler, jit) in jits.iter().enumerate() {
        let nvrtc = jit.nvrtc().expect("the compiler");
        println!(
            "NVRTC {}.{} ({}), {} compiled now; registers, stack and shared bytes, bytes of code:\n{}",
            nvrtc.version.0,
            nvrtc.version.1,
            nvrtc.place,
            jit.compiled(),
            table(done.iter().filter(|(job, _)| job.compiler == compiler))
        );
    }
}

/// The hash of all that a kernel's variants are made from. All jobs are of one kernel.
fn hash_of(jits: &[Jit], jobs: &[&VariantJob]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &str| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    };
    let source = jobs.first().map_or("", |job| job.kernel.source);
    add(&code_of(source));
    for (name, text) in headers_of(source) {
        add(name);
        add(&code_of(text));
    }
    for job in jobs {
        add(&job.describe(jits));
        job.options(jits).iter().for_each(|option| add(option));
    }
    hasher.finalize().to_hex().to_string()
}

/// Needs of the variants of all kernels: as recorded, or compiled now. Says whether some are not recorded, and
/// records these too if SYMMPOOL_BLESS is set.
fn needs<'a>(jits: &[Jit], jobs: &'a [VariantJob]) -> Vec<Done<'a>> {
    let blesses = env::var_os("SYMMPOOL_BLESS").is_some();
    // The file is not read where all of it is to be written anew.
    let recorded = if blesses && compiles_all() { Recorded::default() } else { Recorded::read() };
    let mut by_kernel: BTreeMap<&str, Vec<&VariantJob>> = BTreeMap::new();
    for job in jobs {
        by_kernel.entry(job.kernel.name).or_default().push(job);
    }
    let hashes: BTreeMap<&str, String> =
        by_kernel.iter().map(|(name, jobs)| (*name, hash_of(jits, jobs))).collect();
    let mut unchanged: BTreeMap<&str, &Needs> =
        hashes.iter().filter_map(|(name, hash)| Some((*name, recorded.of(name, hash)?))).collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time");
    let one = now.subsec_nanos() as usize % unchanged.len().max(1);
    let checked: Vec<&str> = unchanged
        .keys()
        .copied()
        .enumerate()
        .filter_map(|(nth, name)| (compiles_all() || nth == one).then_some(name))
        .collect();
    println!(
        "as recorded: {} of {} kernels; compiled again: {checked:?}",
        unchanged.len(),
        hashes.len()
    );
    if !blesses && unchanged.len() < hashes.len() {
        println!("SYMMPOOL_BLESS=1 make test-variants records the others");
    }
    let checked: BTreeMap<&str, &Needs> =
        checked.into_iter().filter_map(|name| unchanged.remove_entry(name)).collect();
    let (as_recorded, wanted): (Vec<&VariantJob>, Vec<&VariantJob>) =
        jobs.iter().partition(|job| unchanged.contains_key(job.kernel.name));
    let mut done = compile(jits, &wanted);
    for (job, used) in &done {
        if let Some(needs) = checked.get(job.kernel.name) {
            let what = job.describe(jits);
            let is_as_recorded = match (used, &needs[&what]) {
                (Some(used), Some(recorded)) => used.is_as(recorded),
                (used, recorded) => used == recorded,
            };
            assert!(is_as_recorded, "{what}: {used:?}, recorded as {:?}", needs[&what]);
        }
    }
    done.extend(as_recorded.into_iter().map(|job| {
        let needs = unchanged[job.kernel.name];
        (job, needs[&job.describe(jits)])
    }));
    if blesses {
        record(jits, hashes, &done);
    }
    done
}

/// Records what all variants need, and the hashes of their kernels.
fn record(jits: &[Jit], hashes: BTreeMap<&str, String>, done: &[Done<'_>]) {
    let of = |kernel: &str| {
        let of_kernel = done.iter().filter(|(job, _)| job.kernel.name == kernel);
        of_kernel.map(|(job, used)| (job.describe(jits), *used)).collect()
    };
    let kernels = hashes.into_iter().map(|(name, hash)| (name.to_owned(), (hash, of(name))));
    Recorded(kernels.collect()).write();
}

fn table<'a>(done: impl Iterator<Item = &'a Done<'a>>) -> Table {
    let mut rows: BTreeMap<String, BTreeMap<(u32, u32), String>> = BTreeMap::new();
    let mut archs = BTreeSet::new();
    for (job, used) in done {
        archs.insert(job.arch);
        let cell = match used {
            Some(Usage { registers, stack_bytes, shared_bytes, code_bytes }) => {
                let code = code_bytes.map_or("-".to_owned(), |bytes| bytes.to_string());
                format!("{registers} {stack_bytes} {shared_bytes} {code}")
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

/// One type, operation and number of ranks for each mode of a kernel: the most ranks, or the fewest for all-to-alls,
/// which take most registers. 8-bit floats are a mode of their own, and so are the blocks of few ranks where they are
/// larger.
fn modes(kernel: &KernelSource<'static>) -> Vec<Defines> {
    let mut met = BTreeSet::new();
    let mut modes = kernel.test_variants();
    modes.sort_by_key(|defines| Reverse(number(defines, "WORLD")));
    if kernel.name == "all_to_all" {
        modes.reverse();
    }
    modes.retain(|defines| {
        let mut mode = defines.clone();
        mode.retain(|(name, _)| !["DTYPE", "OP", "WORLD"].contains(name));
        met.insert((mode, has_8_bit_floats(defines)))
    });
    modes
}

/// Flaws of a job's machine code: registers in memory, or a processor that holds fewer blocks than the kernel is
/// bound to. Code for one of the older architectures is judged for all of them.
fn flaws((job, used): &Done<'_>) -> Vec<String> {
    // For devices that the compiler does not know there is no machine code.
    let Some(used) = used else { return Vec::new() };
    let mut flaws = Vec::new();
    // For 12.0, NVRTC 13 spills up to ten words in all-to-alls of few ranks.
    let most = if job.arch.0 == 12 { CALL_FRAME + 8 } else { CALL_FRAME };
    if used.stack_bytes > most {
        flaws.push("registers are spilled".to_owned());
    }
    if let Some(threads) = number(&job.defines, "THREADS") {
        let shares_sms = value(&job.defines, "SHARES_SMS").is_some();
        let blocks = number(&job.defines, "BLOCKS").filter(|_| !shares_sms);
        let wanted = blocks.unwrap_or(1);
        let is_like = |arch: &(u32, u32)| {
            *arch == job.arch || (OLDER.contains(arch) && OLDER.contains(&job.arch))
        };
        for (arch, processor) in PROCESSORS.iter().filter(|(arch, _)| is_like(arch)) {
            let held = processor.holds(used, threads);
            if held < wanted {
                flaws.push(format!("a processor of {arch:?} holds {held} blocks"));
            }
        }
    }
    let what =
        format!("{} on {:?} by compiler {}: {used:?}", job.variant(), job.arch, job.compiler);
    flaws.into_iter().map(|flaw| format!("{what}: {flaw}")).collect()
}

#[test]
fn every_variant_compiles_spills_nothing_and_fits() {
    let jits = jits();
    let Some(newest) = jits.len().checked_sub(1) else { return };
    let mut jobs = Vec::new();
    for kernel in kernels() {
        let job = |defines: &Defines, compiler, arch| VariantJob {
            kernel,
            defines: defines.clone(),
            compiler,
            arch,
        };
        jobs.extend(kernel.test_variants().iter().map(|defines| job(defines, newest, (9, 0))));
        let modes = modes(kernel);
        let with_8_bit_floats = modes.iter().position(|defines| has_8_bit_floats(defines));
        // Every mode and every entry of TURNS occurs at least once.
        let met: BTreeSet<_> = (0..modes.len().max(TURNS.len()))
            .map(|turn| (turn % modes.len(), turn % TURNS.len()))
            .collect();
        for (at, defines) in modes.iter().enumerate() {
            for (turn, &(arch, old)) in TURNS.iter().enumerate() {
                // All that converts 8-bit floats is compiled where that takes most registers, and once where there are
                // instructions for it.
                if met.contains(&(at, turn))
                    || (arch == (8, 0) && has_8_bit_floats(defines))
                    || (arch == (8, 9) && with_8_bit_floats == Some(at))
                {
                    jobs.push(job(defines, if old { 0 } else { newest }, arch));
                }
            }
        }
        // Every mode as it shares SMs, of which each block has one.
        if kernel.asks_for_blocks {
            // Those with the largest blocks have the fewest registers.
            let all = kernel.test_variants();
            let largest = all.iter().filter(|defines| {
                [("BLOCKS", "2"), ("WORLD", "2")].iter().all(|define| defines.contains(define))
            });
            let shared: BTreeSet<Defines> = modes.iter().chain(largest).map(sharing).collect();
            jobs.extend(shared.iter().map(|defines| job(defines, newest, (9, 0))));
        }
        // A device gets this code whose compiler is older than itself.
        if newest > 0 {
            jobs.push(job(&modes[0], 0, (10, 0)));
        }
    }
    // The longest first, so that no processor is idle at the end.
    jobs.sort_by_key(|job| Reverse(job.kernel.source.len()));
    let done = needs(&jits, &jobs);
    print(&jits, &done);
    let flaws: Vec<String> = done.iter().flat_map(flaws).collect();
    assert!(flaws.is_empty(), "{}", flaws.join("\n"));
    for kernel in kernels() {
        for (arch, _) in &PROCESSORS {
            let of = |(job, _): &&Done<'_>| job.kernel.name == kernel.name && job.arch == *arch;
            assert!(done.iter().any(|done| of(&done)), "{} for {arch:?}", kernel.name);
        }
    }
    for (job, used) in &done {
        assert!(used.is_some() || job.arch > (9, 0), "every compiler makes machine code for 9.0");
        // With its newest supported version, machine code is made for every architecture.
        let all = version(&jits[job.compiler]) >= (13, 0);
        assert!(used.is_some() || !all, "{} on {:?}", job.variant(), job.arch);
    }
}
