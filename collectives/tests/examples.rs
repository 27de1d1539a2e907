//! Runs the examples between two ranks. `cargo test` builds them with the tests.

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

/// The command that runs an example.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().expect("this test");
    let folder = test.parent().and_then(|deps| deps.parent()).expect("the build's folder");
    let program = folder.join("examples").join(name);
    assert!(program.exists(), "no {}: run cargo build --examples first", program.display());
    Command::new(program)
}

/// Runs an example as two ranks. Returns the output of each.
fn ranks(name: &str) -> Vec<Output> {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a free port").port().to_string();
    let start = |rank: u32| {
        example(name)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process")
    };
    let processes = [start(0), start(1)];
    processes.into_iter().map(|each| each.wait_with_output().expect("its end")).collect()
}

/// Returns what a program printed, which must have ended well.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn a_first_program_adds_up() {
    for (rank, output) in ranks("first").iter().enumerate() {
        assert_eq!(said(output), format!("rank {rank}: 3\n"));
    }
}

#[test]
fn calls_on_a_stream_of_the_programs_own_add_up() {
    for (rank, output) in ranks("on_a_stream").iter().enumerate() {
        let text = said(output);
        if let Some(why) = text.strip_prefix("skipped: ") {
            eprintln!("skipped: {why}");
        } else {
            assert_eq!(text, format!("rank {rank}: 3 and 0 wrong\n"));
        }
    }
}

#[test]
fn examples_describe_themselves() {
    for (name, words) in
        [("first", "Sums up every rank's number"), ("on_a_stream", "All-reduces on a stream")]
    {
        let help = example(name).arg("--help").output().expect("the example");
        assert!(said(&help).starts_with(words), "{help:?}");
        let unknown = example(name).arg("--no-such-option").output().expect("the example");
        assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
    }
}
