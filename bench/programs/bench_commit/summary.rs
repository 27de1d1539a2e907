//! A table of what all ranks measured, with a column for each rank.

use serde_json::{Map, Value, json};

use crate::figures::Figures;
use crate::phases::PHASES;

/// Prints and returns the durations of each rank's phases in one kind of commit. `ranks` are their reports.
pub(crate) fn by_rank(ranks: &[&Value]) -> Value {
    let begins = begins(ranks);
    let mut all: Vec<Map<String, Value>> = vec![Map::new(); ranks.len()];
    let mut columns = String::new();
    for rank in 0..ranks.len() {
        columns += &format!(" {:>23}", format!("rank {rank}"));
    }
    println!("    {:<26}{columns}", "us: median (least-most)");
    let mut add = |kind: &str, name: &str, values: Vec<Value>| {
        row(name, values.iter().map(span));
        for (rank, value) in all.iter_mut().zip(values) {
            if kind.is_empty() {
                rank.insert(name.into(), value);
            } else {
                rank.entry(kind).or_insert_with(|| json!({}))[name] = value;
            }
        }
    };
    add("", "begins after the first", begins);
    let commit = |rank: &&Value| Figures::of(&numbers(&rank["commit_us"])).json();
    add("", "commit", ranks.iter().map(commit).collect());
    for (at, name) in PHASES.iter().enumerate() {
        add("phases", name, ranks.iter().map(|rank| rank["phases"][at].clone()).collect());
    }
    println!("    {:<26}{columns}", "calls: n x median (most)");
    let calls = ranks[0]["calls"].as_array().map_or(0, Vec::len);
    for at in 0..calls {
        let name = ranks[0]["calls"][at]["call"].as_str().unwrap_or_default();
        row(name, ranks.iter().map(|rank| call(&rank["calls"][at])));
    }
    for (entry, rank) in all.iter_mut().zip(ranks) {
        entry.insert("calls".into(), rank["calls"].clone());
    }
    json!(all)
}

fn row(name: &str, cells: impl Iterator<Item = String>) {
    let cells: String = cells.map(|cell| format!(" {cell:>23}")).collect();
    println!("    {name:<26}{cells}");
}

fn span(figures: &Value) -> String {
    let number = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
    format!("{:.1} ({:.1}-{:.1})", number("median"), number("least"), number("most"))
}

fn call(entry: &Value) -> String {
    let number = |name: &str| entry[name].as_f64().unwrap_or(f64::NAN);
    format!("{:.0} x {:.1} ({:.1})", number("per_commit"), number("median"), number("most"))
}

/// How long after the first rank each rank began its commits.
fn begins(ranks: &[&Value]) -> Vec<Value> {
    let all: Vec<Vec<u64>> = ranks
        .iter()
        .map(|rank| {
            rank["begins_ns"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
        })
        .collect();
    let first = |at: usize| all.iter().filter_map(|begins| begins.get(at)).min().copied();
    let after = |begins: &Vec<u64>| {
        let late = begins.iter().enumerate().filter_map(|(at, begin)| Some(begin - first(at)?));
        Figures::of(&late.map(|late| late as f64 / 1e3).collect::<Vec<_>>()).json()
    };
    all.iter().map(after).collect()
}

/// For each repetition, the time of the slowest rank.
pub(crate) fn slowest<'a>(ranks: impl Iterator<Item = &'a Value>) -> Vec<f64> {
    let mut slowest: Vec<f64> = Vec::new();
    for times in ranks {
        for (at, time) in numbers(times).into_iter().enumerate() {
            match slowest.get_mut(at) {
                Some(most) => *most = most.max(time),
                None => slowest.push(time),
            }
        }
    }
    slowest
}

fn numbers(list: &Value) -> Vec<f64> {
    let list = list.as_array().into_iter().flatten();
    list.map(|time| time.as_f64().unwrap_or(f64::MAX)).collect()
}
