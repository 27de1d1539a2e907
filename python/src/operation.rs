//! Operations of reductions: by our names, or by torch's constants.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use symmpool_allocator::short;
use symmpool_collectives::ReduceOp;

use crate::reading;

/// The operation of a name; a sum where none is given.
#[inline]
pub(crate) fn reduce_op(op: Option<&Bound<'_, PyAny>>) -> Result<ReduceOp, String> {
    let Some(op) = op else { return Ok(ReduceOp::Sum) };
    let known = match op.cast::<PyString>() {
        Ok(name) => {
            let name = name.to_cow().unwrap_or_default();
            ReduceOp::ALL.into_iter().find(|op| op.name() == name)
        }
        Err(_) => constant_of(op),
    };
    known.ok_or_else(|| {
        let known = ReduceOp::ALL.map(ReduceOp::name).join(", ");
        format!("op: {} is none of {known}", short(&format!("{op:?}")))
    })
}

/// `torch.distributed.ReduceOp`'s constants. Each is one object.
struct ReduceOps {
    /// Each with its hash, which a wrapped one has too.
    constants: Vec<(Py<PyAny>, isize, ReduceOp)>,
    /// The class that wraps one.
    class: Py<PyAny>,
}

/// The names of operations there.
const REDUCE_OPS: [(&str, ReduceOp); 5] = [
    ("SUM", ReduceOp::Sum),
    ("PRODUCT", ReduceOp::Prod),
    ("MIN", ReduceOp::Min),
    ("MAX", ReduceOp::Max),
    ("AVG", ReduceOp::Avg),
];

/// The operation that a constant of `torch.distributed.ReduceOp`, or a `ReduceOp` made of one,
/// stands for; `None` for what is none of them, or has no like here.
fn constant_of(op: &Bound<'_, PyAny>) -> Option<ReduceOp> {
    static OPS: PyOnceLock<ReduceOps> = PyOnceLock::new();
    let py = op.py();
    let known = match OPS.get(py) {
        Some(known) => known,
        None => {
            let distributed = reading::imported(py, "torch.distributed", "ReduceOp")?;
            let class = distributed.getattr("ReduceOp").ok()?;
            let constants = REDUCE_OPS.into_iter().filter_map(|(name, op)| {
                let constant = class.getattr(name).ok()?;
                let hash = constant.hash().ok()?;
                Some((constant.unbind(), hash, op))
            });
            let constants = constants.collect();
            OPS.get_or_init(py, || ReduceOps { constants, class: class.unbind() })
        }
    };
    if let Some((.., found)) = known.constants.iter().find(|(constant, ..)| op.is(constant)) {
        return Some(*found);
    }
    // A `ReduceOp` wraps a constant, and compares equal to it. So do numbers, which are none.
    if !op.is_instance(known.class.bind(py)).ok()? {
        return None;
    }
    let hash = op.hash().ok()?;
    known
        .constants
        .iter()
        .find(|(constant, of_constant, _)| hash == *of_constant && op.eq(constant).unwrap_or(false))
        .map(|(.., found)| *found)
}
