//! `Communicator.row_exchange`, deprecated: makes `symmpool.row_exchange.RowExchange`, which is Python.

use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::convert::{self, deprecated, long_name};
use crate::number::Number;
use crate::pool::dimensions;

pub(crate) fn make<'py>(
    comm: &Bound<'py, Communicator>,
    rows: Number<u64>,
    row_shape: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = comm.py();
    let new = "symmpool.experts.Buffer with top_k=1, or Communicator.all_to_all_v";
    deprecated(py, "Communicator.row_exchange", new)?;
    let (rows, lengths) = (rows.or_raise(py, "rows")?, dimensions(row_shape)?);
    let name = long_name(convert::dtype(dtype)?);
    let device = comm.get().calls.device.name();
    let exchange = py.import("symmpool.row_exchange")?.getattr("RowExchange")?;
    exchange.call1((comm, device, rows, lengths, dtype, name))
}
