//! Which all-reduce algorithm was measured to be the fastest, up to which size, on known devices.

use std::sync::OnceLock;

use crate::AllReduceAlgorithm as Algorithm;
use crate::algorithm::table_format::{AlgorithmTable, TableRow};
use crate::cuda::all_reduce::constraints::{AllReduceShape, fits_lamport};
use crate::cuda::all_reduce::row::AllReduce;

/// All files of `collectives/tables`.
const FILES: &[&str] =
    &[include_str!("../../../tables/h100.json"), include_str!("../../../tables/h200.json")];

fn tables() -> &'static [AlgorithmTable] {
    static TABLES: OnceLock<Vec<AlgorithmTable>> = OnceLock::new();
    TABLES.get_or_init(|| {
        let read = |text: &&str| {
            let table = serde_json::from_str(text);
            table.map_err(|error| tracing::error!(%error, "a table of algorithms")).ok()
        };
        FILES.iter().filter_map(read).collect()
    })
}

/// The rows for the devices and the number of ranks of a communicator.
#[derive(Debug, Default)]
pub(in crate::cuda) struct MeasuredTable(Vec<(TableRow, Algorithm)>);

impl MeasuredTable {
    /// The rows for ranks on devices of these names. There are none unless all devices are of one kind that
    /// was measured with as many ranks. So every rank has the same rows.
    pub(in crate::cuda) fn of(devices: &[&str]) -> Self {
        Self::among(tables(), devices)
    }

    fn among(tables: &[AlgorithmTable], devices: &[&str]) -> Self {
        let Some(table) = tables.iter().find(|table| table.is_for(devices)) else {
            return Self::default();
        };
        let rows = table.rows.iter().filter(|row| row.world as usize == devices.len());
        let named = |row: &TableRow| {
            let algorithm = AllReduce::named(Algorithm::named(&row.algorithm)?)?;
            Some((row.clone(), algorithm.name))
        };
        Self(rows.filter_map(named).collect())
    }

    /// The fastest algorithm for this shape, if that was measured.
    pub(in crate::cuda) fn find(&self, shape: &AllReduceShape) -> Option<Algorithm> {
        let fits =
            |row: &TableRow| row.fits(fits_lamport(shape.dtype), shape.output_window, shape.bytes);
        self.0.iter().find(|(row, _)| fits(row)).map(|(_, algorithm)| *algorithm)
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::layout::params::Footprint;
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::DType;
    use crate::cuda::layout::params::ControlLayout;

    #[test]
    fn every_file_is_held_and_means_something() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tables");
        assert_eq!(fs::read_dir(folder).expect("the tables").count(), FILES.len());
        assert_eq!(tables().len(), FILES.len(), "one cannot be read");
        let mut devices: Vec<&String> = tables().iter().flat_map(|table| &table.devices).collect();
        let all = devices.len();
        devices.sort();
        devices.dedup();
        assert_eq!(devices.len(), all, "a device is in two tables");
        for row in tables().iter().flat_map(|table| &table.rows) {
            let named = Algorithm::named(&row.algorithm).and_then(AllReduce::named);
            let algorithm = named.unwrap_or_else(|| panic!("no algorithm: {row:?}")).name;
            // The algorithm can serve the largest size of the row.
            let bytes = row.up_to.unwrap_or(1 << 30);
            let dtype = if row.lamport == Some(true) { DType::Bf16 } else { DType::I32 };
            let window = row.windows == Some(true);
            let shape = AllReduceShape {
                input_window: window,
                output_window: window,
                ..AllReduceShape::between_windows(bytes, dtype, row.world)
            };
            let control = ControlLayout::new(row.world, Footprint::ample(32 << 20, 192 << 20))
                .expect("a world that is served");
            assert!(shape.can_serve(algorithm, &control), "{row:?}");
        }
        // Groups are in order, and nothing follows a row without end.
        for table in tables() {
            let mut last = BTreeMap::new();
            for row in &table.rows {
                let group = (row.world, row.lamport, row.windows);
                let up_to = row.up_to.unwrap_or(u64::MAX);
                let before = last.insert(group, up_to);
                assert!(before.is_none_or(|before| before < up_to), "{row:?}");
            }
        }
    }

    #[test]
    fn rows_are_those_of_the_device_and_the_number_of_ranks() {
        let shape = |bytes, dtype| AllReduceShape::between_windows(bytes, dtype, 4);
        let measured = MeasuredTable::of(&["NVIDIA H200"; 4]);
        let found = |bytes| measured.find(&shape(bytes, DType::Bf16));
        assert_eq!(found(256 << 10), Some(Algorithm::OneShotLamport));
        assert_eq!(found((256 << 10) + 1), Some(Algorithm::TwoShotLamport));
        assert_eq!(found(16 << 20), Some(Algorithm::TwoShotLamport));
        assert_eq!(found((16 << 20) + 1), Some(Algorithm::TwoShotPush));
        let integers = measured.find(&shape(512 << 10, DType::I64));
        assert_eq!(integers, Some(Algorithm::OneShotLl128));
        let ordinary = AllReduceShape { output_window: false, ..shape(1 << 30, DType::F64) };
        assert_eq!(measured.find(&ordinary), Some(Algorithm::TwoShotPipeline));
        let three = MeasuredTable::of(&["NVIDIA H200"; 3]);
        assert!(three.find(&shape(1, DType::Bf16)).is_none(), "not measured");
        let mixed = ["NVIDIA H200", "NVIDIA H200", "NVIDIA H100", "NVIDIA H200"];
        assert!(MeasuredTable::of(&mixed).find(&shape(1, DType::Bf16)).is_none());
        assert!(MeasuredTable::of(&["NVIDIA H200 NVL"; 4]).find(&shape(1, DType::Bf16)).is_none());
    }
}
