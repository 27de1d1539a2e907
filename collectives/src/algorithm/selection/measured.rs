//! Tables of algorithms that a program loads: read from files, checked, and reduced to the rows for a communicator.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use symmpool_allocator::{Error, Result, short};

use crate::algorithm::StandardCollective;
use crate::algorithm::table_format::{AlgorithmTable, TABLES_VERSION, TableRow, all_reduce};
use crate::plan::unreadable;

/// The environment variable with the files that communicators load, separated by colons.
pub(crate) const TABLES_VARIABLE: &str = "SYMMPOOL_TABLES";

/// Larger files are no tables.
const MAX_BYTES: u64 = 16 << 20;
/// More blocks than any device runs at once.
const MAX_BLOCKS: u32 = 1 << 16;

impl AlgorithmTable {
    /// Whether it is for devices of all these names.
    pub(crate) fn is_for(&self, devices: &[&str]) -> bool {
        devices.iter().all(|device| self.devices.iter().any(|name| name == device))
    }
}

impl TableRow {
    /// Whether it is for calls of so many bytes, of types that the Lamport protocol can carry or others, into outputs that
    /// are windows or others.
    pub(crate) fn fits(&self, lamport: bool, windows: bool, bytes: u64) -> bool {
        self.lamport.is_none_or(|of| of == lamport)
            && self.windows.is_none_or(|of| of == windows)
            && self.up_to.is_none_or(|most| bytes <= most)
    }
}

/// The files that options name, or the environment if they name none.
pub(crate) fn table_files(option: &[PathBuf]) -> Vec<PathBuf> {
    if !option.is_empty() {
        return option.to_vec();
    }
    let value = std::env::var_os(TABLES_VARIABLE).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// The rows of a file for ranks on devices of these names. There are none if the file is for other devices, or another
/// number of ranks.
///
/// # Errors
///
/// `is_invalid_argument` for a file that cannot be read or is no table; it names the file and the field.
pub(crate) fn read_rows(
    path: &Path,
    devices: &[&str],
) -> Result<Vec<(StandardCollective, TableRow)>> {
    let table = read(path).map_err(|why| {
        Error::invalid_argument(format!("the table of algorithms {}: {why}", path.display()))
    })?;
    if !table.is_for(devices) {
        tracing::debug!(path = %path.display(), ?devices, "a table for other devices");
        return Ok(Vec::new());
    }
    let rows = table.rows.into_iter().filter(|row| row.world as usize == devices.len());
    Ok(rows.filter_map(|row| Some((StandardCollective::named(&row.collective)?, row))).collect())
}

fn read(path: &Path) -> std::result::Result<AlgorithmTable, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    // A pipe does not say beforehand how long it is.
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_BYTES {
        return Err(format!("more than {MAX_BYTES} bytes, which no table has"));
    }
    parse(&text)
}

/// For fuzz targets: whether a text is a table, or why not.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub fn read_table(text: &str) -> std::result::Result<(), String> {
    parse(text).map(drop)
}

/// Reads a table. The error begins with the name of the field.
fn parse(text: &str) -> std::result::Result<AlgorithmTable, String> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
    let Value::Object(file) = value else { return Err("it is no object".to_owned()) };
    // Fields of another version may mean something else.
    let version: Option<u32> = field(&file, "", "symmpool_tables")?;
    if let Some(version) = version.filter(|version| *version != TABLES_VERSION) {
        return Err(format!(
            "symmpool_tables: version {version}; this version of symmpool reads version {TABLES_VERSION}"
        ));
    }
    only(&file, "", &["symmpool_tables", "devices", "rows"])?;
    let devices = field(&file, "", "devices")?.ok_or("devices: it is missing")?;
    let listed: Vec<Value> = field(&file, "", "rows")?.ok_or("rows: it is missing")?;
    let mut rows: Vec<TableRow> = Vec::new();
    // The limit of the last row of each group.
    let mut limits = BTreeMap::new();
    for (nth, each) in listed.iter().enumerate() {
        let place = format!("rows[{nth}]");
        let Value::Object(each) = each else { return Err(format!("{place}: it is no object")) };
        let row = row(each, &format!("{place}."))?;
        let group = (row.collective.clone(), row.world, row.lamport, row.windows);
        let limit = row.up_to.unwrap_or(u64::MAX);
        if let Some(before) = limits.insert(group, limit)
            && before >= limit
        {
            return Err(format!(
                "{place}.up_to: {limit} after {before}; rows of a group are in order of size"
            ));
        }
        rows.push(row);
    }
    Ok(AlgorithmTable { symmpool_tables: TABLES_VERSION, devices, rows })
}

fn row(each: &Map<String, Value>, place: &str) -> std::result::Result<TableRow, String> {
    only(
        each,
        place,
        &["collective", "world", "lamport", "windows", "up_to", "algorithm", "blocks"],
    )?;
    let collective = field(each, place, "collective")?.unwrap_or_else(all_reduce);
    if StandardCollective::named(&collective).is_none() {
        let names = StandardCollective::ALL.map(StandardCollective::name).join(", ");
        return Err(format!("{place}collective: {:?} is none of {names}", short(&collective)));
    }
    let world: u32 = field(each, place, "world")?.ok_or(format!("{place}world: it is missing"))?;
    if world == 0 {
        return Err(format!("{place}world: no ranks"));
    }
    let algorithm: String =
        field(each, place, "algorithm")?.ok_or(format!("{place}algorithm: it is missing"))?;
    if algorithm.is_empty() {
        return Err(format!("{place}algorithm: no name"));
    }
    let blocks: Option<u32> = field(each, place, "blocks")?;
    if let Some(blocks) = blocks.filter(|blocks| !(1..=MAX_BLOCKS).contains(blocks)) {
        return Err(format!("{place}blocks: {blocks}, of 1 to {MAX_BLOCKS}"));
    }
    let (lamport, windows) = (field(each, place, "lamport")?, field(each, place, "windows")?);
    let up_to = field(each, place, "up_to")?;
    Ok(TableRow { collective, world, lamport, windows, up_to, algorithm, blocks })
}

/// A member of an object; `None` if it is absent or null.
fn field<T: DeserializeOwned>(
    object: &Map<String, Value>,
    place: &str,
    name: &str,
) -> std::result::Result<Option<T>, String> {
    match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let read = T::deserialize(value).map(Some);
            read.map_err(|error| format!("{place}{name}: {}", unreadable(&error)))
        }
    }
}

fn only(
    object: &Map<String, Value>,
    place: &str,
    known: &[&str],
) -> std::result::Result<(), String> {
    match object.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(format!(
            "{place}{}: there is no such field; there are {}",
            short(key),
            known.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_and_errors_name_the_field() {
        let table = |row: &str| parse(&format!(r#"{{"devices":["cpu"],"rows":[{row}]}}"#));
        let row = r#"{"world":2,"up_to":10,"algorithm":"mine"}"#;
        let found = table(row).unwrap();
        assert_eq!(
            (found.rows[0].collective.as_str(), found.rows[0].up_to),
            ("all_reduce", Some(10))
        );
        let more = r#"{"collective":"all_gather","world":2,"lamport":true,"windows":false,"algorithm":"a","blocks":4}"#;
        assert_eq!(table(more).unwrap().rows[0].blocks, Some(4));
        for (wrong, field) in [
            (r#"{"up_to":10,"algorithm":"mine"}"#, "rows[0].world: it is missing"),
            (r#"{"world":0,"algorithm":"mine"}"#, "rows[0].world: no ranks"),
            (r#"{"world":"two","algorithm":"mine"}"#, "rows[0].world: invalid type"),
            (r#"{"world":-2,"algorithm":"mine"}"#, "rows[0].world: invalid value"),
            (r#"{"world":2}"#, "rows[0].algorithm: it is missing"),
            (r#"{"world":2,"algorithm":""}"#, "rows[0].algorithm: no name"),
            (r#"{"world":2,"algorithm":"a","speed":3}"#, "rows[0].speed: there is no such field"),
            (
                r#"{"world":2,"algorithm":"a","collective":"gossip"}"#,
                "rows[0].collective: \"gossip\"",
            ),
            (r#"{"world":2,"algorithm":"a","blocks":0}"#, "rows[0].blocks: 0"),
            (r#"{"world":2,"algorithm":"a","up_to":1.5}"#, "rows[0].up_to: invalid type"),
            (r#"{"world":2,"algorithm":"a","windows":1}"#, "rows[0].windows: invalid type"),
            ("3", "rows[0]: it is no object"),
        ] {
            let why = table(wrong).unwrap_err();
            assert!(why.starts_with(field), "{wrong}: {why}");
        }
        let why = table(&format!("{row},{row}")).unwrap_err();
        assert!(why.starts_with("rows[1].up_to: 10 after 10"), "{why}");
        for (wrong, word) in [
            ("", "no JSON"),
            ("[]", "no object"),
            ("{}", "devices: it is missing"),
            (r#"{"devices":["cpu"]}"#, "rows: it is missing"),
            (r#"{"devices":"cpu","rows":[]}"#, "devices: invalid type"),
            (r#"{"devices":[],"rows":[],"more":1}"#, "more: there is no such field"),
            (
                r#"{"symmpool_tables":2,"devices":[],"rows":[],"more":1}"#,
                "symmpool_tables: version 2",
            ),
        ] {
            let why = parse(wrong).unwrap_err();
            assert!(why.contains(word), "{wrong}: {why}");
        }
    }

    #[test]
    fn errors_do_not_repeat_a_whole_file_and_many_groups_take_no_time() {
        let long = "x".repeat(1 << 20);
        for text in [
            format!(r#"{{"devices":[],"rows":[],"{long}":1}}"#),
            format!(r#"{{"devices":"{long}","rows":[]}}"#),
            format!(r#"{{"devices":[],"rows":[{{"world":"{long}"}}]}}"#),
            format!(r#"{{"devices":[],"rows":[{{"world":1,"collective":"{long}"}}]}}"#),
        ] {
            let why = parse(&text).unwrap_err();
            assert!(why.len() < 1024, "{} bytes", why.len());
        }
        // Each row is of a group of its own: comparing it with all before it would take an hour.
        let rows: Vec<String> =
            (1..200_000).map(|world| format!(r#"{{"world":{world},"algorithm":"a"}}"#)).collect();
        let text = format!(r#"{{"devices":[],"rows":[{}]}}"#, rows.join(","));
        assert_eq!(parse(&text).unwrap().rows.len(), rows.len());
        // A file without an end is not read to it.
        let error = read_rows(Path::new("/dev/zero"), &["cpu"]).unwrap_err().to_string();
        assert!(error.contains("more than"), "{error}");
    }

    #[test]
    fn rows_are_those_of_the_devices_and_the_number_of_ranks() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tables");
        let of = |devices: &[&str]| read_rows(&folder.join("h200.json"), devices).unwrap();
        assert!(!of(&["NVIDIA H200"; 4]).is_empty());
        assert!(of(&["NVIDIA H200"; 4]).iter().all(|(_, row)| row.world == 4));
        assert!(of(&["NVIDIA H200", "cpu"]).is_empty() && of(&["cpu"; 4]).is_empty());
        let error = read_rows(&folder.join("nowhere.json"), &["cpu"]).unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("nowhere.json"),
            "{error}"
        );
    }
}
