//! Times every all-reduce algorithm on this device and number of ranks, and writes which was the fastest up to
//! which size into a table of `collectives/tables`.

use std::path::Path;
use std::{fs, io};

use symmpool_allocator::{Block, Error, Pool, Result};
use symmpool_collectives::{AllReduceAlgorithm, DType};

use crate::bench::{AlgorithmTimes, Bench, LONG_GRAPHS, show};
use crate::cuda::driver;
use crate::{ORDINARY, Options};

#[path = "../../../collectives/src/algorithm/table_format.rs"]
mod table_format;

use table_format::{AlgorithmTable, TABLES_VERSION, TableRow, all_reduce};

/// The best algorithm of a size is kept for the next size unless another one is faster by more than this fraction.
const MARGIN: f64 = 0.02;
/// If this number of bytes or more was timed, the last row is for all larger sizes, too.
const ENDLESS: u64 = 16 << 20;

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let Some(path) = &options.out else {
        return Err(Error::invalid_argument("tune: --out FILE is needed, the table to write into"));
    };
    let (name, world) = (driver(pool).facts().name.clone(), pool.world());
    // Read before anything is timed; every rank reads the same.
    let mut table = read(path, &name)?;
    let most = options.largest();
    let ordinary = pool.lane(ORDINARY)?;
    let windows: (Block<u8>, Block<u8>) = (pool.alloc(most)?, pool.alloc(most)?);
    let other: (Block<u8>, Block<u8>) = (ordinary.alloc(most)?, ordinary.alloc(most)?);
    pool.commit()?;
    // The algorithms of devices that leave nothing open.
    let algorithms: Vec<_> = AllReduceAlgorithm::ALL
        .into_iter()
        .filter(|algorithm| algorithm.checked().is_some())
        .collect();
    let mut bench = Bench::new(pool, LONG_GRAPHS)?;
    for (dtype, lamport) in [(DType::Bf16, true), (DType::I32, false)] {
        for (blocks, windows) in [(&windows, true), (&other, false)] {
            let times = bench.measure(options, (&blocks.0, &blocks.1), dtype, &algorithms)?;
            let new = fastest(&times).into_iter().map(|(up_to, algorithm)| TableRow {
                collective: all_reduce(),
                world,
                lamport: Some(lamport),
                windows: Some(windows),
                up_to,
                algorithm,
                blocks: None,
            });
            if pool.rank() == 0 {
                println!("{}, {}", dtype.name(), if windows { "windows" } else { "ordinary" });
                show(&times, world);
            }
            replace(&mut table, new.collect());
        }
    }
    if pool.rank() == 0 && bench.right {
        fs::write(path, text(&table)).map_err(|error| failed(path, &error))?;
        println!("{} rows in {}", table.rows.len(), path.display());
    }
    Ok(bench.right)
}

fn failed(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::system(format!("the table {}", path.display()), error)
}

/// The table of the file, or a new one if there is no file.
fn read(path: &Path, device: &str) -> Result<AlgorithmTable> {
    let table: AlgorithmTable = match fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| failed(path, &error))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => AlgorithmTable {
            symmpool_tables: TABLES_VERSION,
            devices: vec![device.to_owned()],
            rows: Vec::new(),
        },
        Err(error) => return Err(failed(path, &error)),
    };
    if table.devices.iter().any(|name| name == device) {
        return Ok(table);
    }
    Err(Error::invalid_argument(format!(
        "the table {} is of {:?}; this device is a {device:?}: name another file",
        path.display(),
        table.devices
    )))
}

/// The fastest algorithms, each with the largest size that it is the fastest for.
fn fastest(times: &AlgorithmTimes) -> Vec<(Option<u64>, String)> {
    let mut rows: Vec<(Option<u64>, String)> = Vec::new();
    for (bytes, row) in times {
        let Some((best, us)) = row.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else { continue };
        match rows.last_mut() {
            Some((up_to, name))
                if row.iter().any(|(other, at)| other == name && *at <= us * (1.0 + MARGIN)) =>
            {
                *up_to = Some(*bytes);
            }
            _ => rows.push((Some(*bytes), best.clone())),
        }
    }
    if let Some((up_to, _)) = rows.last_mut().filter(|(up_to, _)| *up_to >= Some(ENDLESS)) {
        *up_to = None;
    }
    rows
}

/// Replaces a group of rows, or adds it.
fn replace(table: &mut AlgorithmTable, new: Vec<TableRow>) {
    let group = |row: &TableRow| {
        (row.collective.clone(), row.world, row.lamport.map(|is| !is), row.windows.map(|is| !is))
    };
    let Some(which) = new.first().map(group) else { return };
    table.rows.retain(|row| group(row) != which);
    table.rows.extend(new);
    table.rows.sort_by_key(|row| (group(row), row.up_to.unwrap_or(u64::MAX)));
}

/// The text of the file, with one line for each row.
fn text(table: &AlgorithmTable) -> String {
    let plain = |value: serde_json::Result<String>| value.expect("plain data");
    let rows: Vec<String> =
        table.rows.iter().map(|row| format!("    {}", plain(serde_json::to_string(row)))).collect();
    let devices: Vec<String> =
        table.devices.iter().map(|name| plain(serde_json::to_string(name))).collect();
    format!(
        "{{\n  \"devices\": [{}],\n  \"rows\": [\n{}\n  ]\n}}\n",
        devices.join(", "),
        rows.join(",\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(of: &[(u64, f64, f64)]) -> AlgorithmTimes {
        of.iter()
            .map(|(bytes, one, two)| (*bytes, vec![("one".into(), *one), ("two".into(), *two)]))
            .collect()
    }

    #[test]
    fn the_fastest_up_to_each_size_is_found_and_trifles_do_not_count() {
        let few = times(&[(1024, 1.0, 2.0), (2048, 2.01, 2.0), (4096, 3.0, 2.0), (8192, 5.0, 4.0)]);
        let rows = [(Some(2048), "one".to_owned()), (Some(8192), "two".to_owned())];
        assert_eq!(fastest(&few), rows);
        let many = times(&[(1024, 1.0, 2.0), (ENDLESS, 9.0, 8.0)]);
        assert_eq!(fastest(&many)[1], (None, "two".to_owned()));
        assert_eq!(fastest(&AlgorithmTimes::new()), []);
    }

    #[test]
    fn tables_grow_by_groups_and_are_written_as_they_were_read() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../collectives/tables/h200.json");
        let held = fs::read_to_string(&path).unwrap();
        let mut table = read(&path, "NVIDIA H200").unwrap();
        assert_eq!(text(&table), held);
        let row = |world, up_to| TableRow {
            collective: all_reduce(),
            world,
            lamport: Some(true),
            windows: Some(true),
            up_to,
            algorithm: "two_shot_pull".into(),
            blocks: None,
        };
        let before = table.rows.len();
        // A group that is not in the table yet, and one that may be.
        replace(&mut table, vec![row(3, Some(9)), row(3, None)]);
        assert_eq!(table.rows.len(), before + 2);
        assert!(table.rows.windows(2).any(|pair| pair == [row(3, Some(9)), row(3, None)]));
        let group =
            |of: &&TableRow| of.world == 4 && of.lamport == Some(true) && of.windows == Some(true);
        let alike = table.rows.iter().filter(group).count();
        replace(&mut table, vec![row(4, None)]);
        assert_eq!(table.rows.len(), before + 2 + 1 - alike);
        let again: AlgorithmTable = serde_json::from_str(&text(&table)).unwrap();
        assert_eq!(again, table);
        assert!(read(&path, "another").unwrap_err().is_invalid_argument());
        let none = read(Path::new("/nowhere/at/all.json"), "another").unwrap();
        assert_eq!((none.devices, none.rows.len()), (vec!["another".to_owned()], 0));
    }
}
