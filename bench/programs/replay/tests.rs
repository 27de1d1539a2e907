//! Tests of the whole program: from arguments to text and exit code.

use std::path::PathBuf;

use serde_json::Value;

use super::*;

/// Runs the program with a trace file of its own, and returns exit code and output.
fn program(trace: &str, arguments: &[&str]) -> Result<(u8, String)> {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("test").replace(':', "-");
    let path = std::env::temp_dir().join(format!("symmpool-{}-{test}.csv", std::process::id()));
    std::fs::write(&path, trace).expect("a writable temporary folder");
    let path_text = path.to_string_lossy().into_owned();
    let all = ["replay", "--trace", &path_text].into_iter().chain(arguments.iter().copied());
    let args = Args::try_parse_from(all).expect("arguments that parse");
    let mut out = Vec::new();
    let code = run(&args, &mut out);
    std::fs::remove_file(&path).expect("the file made above");
    Ok((code?, String::from_utf8(out).expect("text")))
}

fn random_trace(events: usize) -> String {
    let mut text = Vec::new();
    Trace::synthetic(events, 1).write(&mut text).expect("writing to memory");
    String::from_utf8(text).expect("text")
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).expect("one JSON object")
}

#[test]
fn json_has_exactly_these_fields() {
    let (code, text) = program(&random_trace(1000), &["--ranks", "3", "--json"]).unwrap();
    assert_eq!(code, FINE);
    let object = parse(&text);
    let mut fields: Vec<_> = object.as_object().expect("an object").keys().cloned().collect();
    fields.sort();
    assert_eq!(
        fields,
        [
            "digest",
            "digests_equal",
            "error",
            "events",
            "ns_per_event",
            "peak_live_bytes",
            "peak_reserved_bytes",
            "ranks",
            "segments",
            "windows"
        ]
    );
    assert_eq!((&object["ranks"], &object["events"]), (&3.into(), &1000.into()));
    assert_eq!((&object["digests_equal"], &object["error"]), (&true.into(), &Value::Null));
    assert_eq!(object["digest"].as_str().map(str::len), Some(16));
    assert!(object["peak_reserved_bytes"].as_u64() >= object["peak_live_bytes"].as_u64());
}

#[test]
fn other_addresses_and_drivers_give_the_same_digest() {
    let trace = random_trace(1000);
    let digest = |more: &[&str]| {
        let arguments: Vec<_> = ["--json"].iter().chain(more).copied().collect();
        parse(&program(&trace, &arguments).unwrap().1)["digest"].clone()
    };
    let plain = digest(&[]);
    for more in [
        &["--permute-addresses", "7"][..],
        &["--driver", "host"],
        &["--shuffle-unordered", "3"],
        &["--ranks", "1"],
    ] {
        assert_eq!(digest(more), plain, "{more:?}");
    }
    assert_ne!(digest(&["--policy", "per-segment"]), plain);
}

#[test]
fn a_divergence_is_reported_with_its_place() {
    let trace = "op,id,bytes,stream\nalloc,1,100,0\nalloc,2,9000,0\nfree,1,,\ncommit\n";
    let (code, text) = program(trace, &["--ranks", "4", "--diverge", "2:1", "--json"]).unwrap();
    assert_eq!(code, FAILED);
    let object = parse(&text);
    assert_eq!(object["digests_equal"], false);
    let error = &object["error"];
    assert_eq!((&error["lane"], &error["counter"]), (&"replay".into(), &1.into()));
    assert_eq!((&error["event"], &error["same_on_every_rank"]), (&3.into(), &true.into()));
    assert_eq!(error["sides"][0]["ranks"], serde_json::json!([0, 1, 3]));
    assert_eq!(error["sides"][1]["ranks"], serde_json::json!([2]));
    assert!(error["message"].as_str().is_some_and(|text| text.contains("diverged")));

    let (code, text) = program(trace, &["--ranks", "4", "--diverge", "2:1"]).unwrap();
    assert_eq!(code, FAILED);
    for part in ["DIFFERENT", "at operation 3", "diverged in lane \"replay\" at event 1", "rank 2"]
    {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn a_limit_that_is_too_low_is_a_failure() {
    let trace = "op,id,bytes,stream\nalloc,1,100,0\nalloc,2,99000000,0\n";
    let (code, text) = program(trace, &["--limit", "50000000", "--json"]).unwrap();
    assert_eq!(code, FAILED);
    let object = parse(&text);
    assert_eq!((&object["digests_equal"], &object["error"]["lane"]), (&true.into(), &Value::Null));
    assert!(object["error"]["message"].as_str().is_some_and(|text| text.contains("limit")));
}

#[test]
fn a_bad_line_is_refused_with_its_number() {
    let error = program("op,id,bytes,stream\nalloc,1,5,0\nboom\n", &[]).unwrap_err();
    assert!(error.is_invalid_argument());
    assert!(error.to_string().contains("line 3: unknown op \"boom\""), "{error}");
}

#[test]
fn invalid_arguments_are_refused() {
    let trace = random_trace(10);
    for arguments in [
        &["--driver", "cuda"][..],
        &["--policy", "loose"],
        &["--ranks", "0"],
        &["--diverge", "1"],
        &["--diverge", "2:1"],
        &["--diverge", "0:10"],
    ] {
        let error = program(&trace, arguments).unwrap_err();
        assert!(error.is_invalid_argument(), "{arguments:?}: {error}");
    }
    for arguments in [&["replay"][..], &["replay", "--trace", "x", "--generate", "1:1"]] {
        assert!(Args::try_parse_from(arguments).is_err(), "{arguments:?}");
    }
}

#[test]
fn a_generated_trace_replays() {
    let file = tempfile_path();
    let text = file.to_string_lossy().into_owned();
    let args = ["replay", "--generate", "2000:5", "--out", &text];
    let code = run(&Args::try_parse_from(args).unwrap(), &mut Vec::new()).unwrap();
    assert_eq!(code, FINE);
    let mut out = Vec::new();
    let args = ["replay", "--trace", &text, "--ranks", "2"];
    let code = run(&Args::try_parse_from(args).unwrap(), &mut out).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(code, FINE);
    let table = String::from_utf8(out).unwrap();
    assert!(table.contains("2000") && table.contains("equal"), "{table}");

    let args = ["replay", "--generate", "3:5"];
    let mut out = Vec::new();
    run(&Args::try_parse_from(args).unwrap(), &mut out).unwrap();
    assert_eq!(out.iter().filter(|&&byte| byte == b'\n').count(), 4);
}

fn tempfile_path() -> PathBuf {
    std::env::temp_dir().join(format!("symmpool-generated-{}.csv", std::process::id()))
}

#[test]
fn help_documents_the_exit_codes() {
    let help = Args::try_parse_from(["replay", "--help"]).unwrap_err();
    assert!(!help.use_stderr());
    for part in ["Exit codes: 0", "1 ranks diverged", "2 the arguments", "--permute-addresses"] {
        assert!(help.to_string().contains(part), "{part:?} is not in:\n{help}");
    }
}
