//! Programs that link against the library: C programs that run as ranks, and a C++ program through which an exception
//! is thrown.

mod common;

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Compiles a program against the library, with the compiler that the environment variable or, without it, `usual`
/// names. The program's path begins in this folder. `None` if there is no such compiler.
fn compile(
    source: &str,
    (variable, usual): (&str, &str),
    options: &[&str],
    folder: &Path,
) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = common::library();
    let libraries = library.parent().expect("a folder");
    let program = folder.join("program");
    let compiled = Command::new(std::env::var_os(variable).unwrap_or_else(|| usual.into()))
        .args(options)
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(here.join("tests").join(source))
        .arg("-I")
        .arg(here.join("include"))
        .arg("-L")
        .arg(libraries)
        .args(["-lsymmpool", "-Wl,-rpath"])
        .arg(libraries)
        .output()
        .ok()?;
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(program)
}

/// Runs a program with the library it was linked against: cargo's search path has an older one where the package was built
/// by itself once.
fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

/// Compiles a program of this folder, runs it as `world` ranks, and returns the exit status and output of each.
fn ranks(source: &str, world: usize) -> Vec<Output> {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ["-std=c11", "-D_POSIX_C_SOURCE=200809L"];
    let program = compile(source, ("CC", "cc"), &options, folder.path()).expect("a C compiler");
    let store = folder.path().join("store");
    std::fs::create_dir(&store).expect("a folder");
    let ranks: Vec<_> = (0..world)
        .map(|rank| {
            run(&program)
                .args([rank.to_string(), world.to_string()])
                .arg(&store)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("the program")
        })
        .collect();
    ranks.into_iter().map(|process| process.wait_with_output().expect("its end")).collect()
}

fn was_right(rank: usize, output: &Output) {
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "rank {rank}: {}: {stdout}{stderr}", output.status);
    assert!(stdout.contains("everything was right"), "rank {rank}: {stdout}{stderr}");
}

#[test]
fn a_c_program_uses_every_function_on_two_ranks() {
    for (rank, output) in ranks("program.c", 2).iter().enumerate() {
        was_right(rank, output);
    }
}

#[test]
fn a_c_program_sends_tokens_to_experts() {
    for world in [2, 3] {
        for (rank, output) in ranks("experts.c", world).iter().enumerate() {
            was_right(rank, output);
        }
    }
}

#[test]
fn communicators_over_hosts_are_refused_on_all_ranks() {
    for (rank, output) in ranks("hosts.c", 2).iter().enumerate() {
        was_right(rank, output);
    }
}

#[test]
fn the_example_adds_up_and_describes_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let example = "../../examples/first.c";
    let program = compile(example, ("CC", "cc"), &["-std=c11"], folder.path());
    let program = program.expect("a C compiler");
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a free port").port().to_string();
    let start = |rank: usize| {
        run(&program)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program")
    };
    for (rank, process) in [start(0), start(1)].into_iter().enumerate() {
        let output = process.wait_with_output().expect("its end");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, format!("rank {rank} of 2: 3\n"), "{output:?}");
    }
    let help = run(&program).arg("--help").output().expect("the program");
    let source =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(example));
    let source = source.expect("the example");
    let first = source.lines().next().and_then(|line| line.strip_prefix("// ")).expect("a comment");
    assert!(String::from_utf8_lossy(&help.stdout).starts_with(first), "{help:?}");
    assert!(help.status.success(), "{help:?}");
    // A launcher's variables are missing, and so are options.
    let alone =
        run(&program).env_remove("RANK").env("WORLD_SIZE", "2").output().expect("the program");
    assert_eq!(alone.status.code(), Some(1), "{alone:?}");
    assert!(String::from_utf8_lossy(&alone.stderr).contains("RANK"), "{alone:?}");
    let unknown = run(&program).arg("--no-such-option").output().expect("the program");
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
}

#[test]
fn a_dead_rank_ends_no_other_by_a_signal() {
    // Rust programs and Python ignore SIGPIPE; other programs are ended by it.
    let ended = ranks("lost.c", 3);
    assert_eq!(ended[2].status.signal(), Some(9));
    for (rank, output) in ended[..2].iter().enumerate() {
        was_right(rank, output);
    }
}

#[test]
fn the_header_is_plain_c_and_plain_cpp() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/symmpool.h");
    for (variable, usual, language, standards) in
        [("CC", "cc", "c", ["c99", "c11"]), ("CXX", "c++", "c++", ["c++11", "c++20"])]
    {
        let compiler = std::env::var_os(variable).unwrap_or_else(|| usual.into());
        for standard in standards {
            let compiled = Command::new(&compiler)
                .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"])
                // The header itself is the main file of this compilation.
                .args([&format!("-std={standard}"), "-x", language])
                .arg(&header)
                .output();
            let Ok(compiled) = compiled else {
                eprintln!("skipped: there is no {usual}");
                break;
            };
            let why = String::from_utf8_lossy(&compiled.stderr);
            assert!(compiled.status.success(), "{standard}: {why}");
        }
    }
}

#[test]
fn what_fails_under_torch_is_thrown_through_the_library() {
    let folder = tempfile::tempdir().expect("a folder");
    let compiler = ("CXX", "c++");
    let Some(program) = compile("throws.cpp", compiler, &["-std=c++17"], folder.path()) else {
        eprintln!("skipped: there is no C++ compiler");
        return;
    };
    let output = run(&program).output().expect("the program");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {stdout}", output.status);
    assert!(stdout.contains("everything was right"), "{stdout}");
}
