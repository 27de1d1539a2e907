//! A call in words, as errors and events name it.

use std::fmt;

use super::{CallDescription, GROWS, IN_PLACE, INPUT_WINDOW, OFFSET, OUTPUT_WINDOW, OpType};
use crate::algorithm::{AUTO, AlgorithmId, known};
use crate::{DType, MatmulKind, NormOutput, ReduceOp};

impl CallDescription {
    /// Writes the text behind the name and the type of a dispatch to experts, a combine, or the making of their
    /// buffer.
    fn fmt_experts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [_, shape, rows, output] = self.words;
        let (hidden, experts, top_k) =
            (shape & 0xff_ffff, shape >> 24 & 0xffff, shape >> 40 & 0xff);
        let (max_tokens, capacity) = (rows & 0x1f_ffff, rows >> 21);
        write!(f, ", hidden {hidden}, {experts} experts, top_k {top_k}, max_tokens {max_tokens}")?;
        if capacity > 0 {
            write!(f, ", capacity {capacity}")?;
        }
        if self.operation() == Some(OpType::ExpertBuffer) {
            if output > 0 {
                write!(f, ", num_sms {output}")?;
            }
            let any_layout = self.expert_mode().by_expert;
            return f.write_str(if any_layout { ", for weights" } else { "" });
        }
        write!(f, ", {}", self.expert_mode())?;
        write!(f, ", in a buffer at window offset {:#x}", output & OFFSET)
    }

    /// A fused matmul of matrices in words.
    fn fmt_matmul(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, rows, row, rest] = self.words;
        let name = MatmulKind::from_code((head >> 40) as u8).map_or("?", MatmulKind::name);
        let dtype = DType::from_code((head >> 8) as u8).map_or("?", DType::name);
        let (inner, columns) = (row as u32, row >> 32);
        match (inner, columns) {
            (0, _) => write!(f, "{name} of a product of {rows} x {columns} {dtype}")?,
            _ => write!(f, "{name} of a shard of {rows} x {inner} {dtype}")?,
        }
        write!(
            f,
            ", whose other arguments (shape, dimension, reduction, types) have the hash {rest:016x}"
        )
    }
}

impl fmt::Display for CallDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, count, input, output] = self.piece(0).in_large_area(false).words;
        let (count, input, output) = (count & OFFSET, input & OFFSET, output & OFFSET);
        let Some(operation) = self.operation() else {
            return write!(f, "an operation this version does not know ({:#x})", head as u8);
        };
        let grows = head & GROWS != 0;
        if grows {
            f.write_str("the first large call, before which the communicator takes memory: ")?;
        }
        if operation == OpType::FusedMatmul {
            return self.fmt_matmul(f);
        }
        let known = self.registered_hash().and_then(known);
        match &known {
            Some(known) if operation == OpType::Custom => f.write_str(&known.collective)?,
            _ => f.write_str(operation.name())?,
        }
        if matches!(operation, OpType::Declined | OpType::Barrier) {
            return Ok(());
        }
        if operation == OpType::AllReduceNorm {
            let (dtype, fields) = (DType::from_code((head >> 8) as u8), self.norm_fields());
            let rows = self.words[1].checked_div(fields.hidden.into()).unwrap_or(0);
            let made = NormOutput::from_code(fields.output).map_or("?", NormOutput::name);
            let dtype = dtype.map_or("?", DType::name);
            write!(
                f,
                " of {rows} rows of {} {dtype} to {made}, epsilon {}",
                fields.hidden, fields.epsilon
            )?;
            for (given, name) in [
                (fields.residual, "a residual"),
                (fields.bias, "a bias"),
                (fields.powers_of_two, "scales that are powers of two"),
            ] {
                if given {
                    write!(f, ", with {name}")?;
                }
            }
            if fields.weight_bias != 0.0 {
                write!(f, ", {} added to weights", fields.weight_bias)?;
            }
            return match fields.algorithm {
                1 => write!(f, ", by one_shot"),
                2 => write!(f, ", by two_shot"),
                _ => Ok(()),
            };
        }
        let is_of_experts = matches!(
            operation,
            OpType::ExpertDispatch | OpType::ExpertCombine | OpType::ExpertBuffer
        );
        if let Some(op) = ReduceOp::from_code((head >> 16) as u8) {
            write!(f, " {}", op.name())?;
        }
        if let Some(dtype) = DType::from_code((head >> 8) as u8) {
            if operation == OpType::AllToAllV && count == 0 {
                write!(f, " of {}", dtype.name())?;
            } else if operation == OpType::AllToAllV {
                write!(f, " of rows of {count} {}", dtype.name())?;
            } else if is_of_experts {
                write!(f, " of {}", dtype.name())?;
            } else {
                write!(f, " of {count} {}", dtype.name())?;
            }
        }
        if is_of_experts {
            return self.fmt_experts(f);
        }
        if operation == OpType::Broadcast {
            write!(f, " from rank {}", head >> 40)?;
        }
        if grows {
            // Places are compared by the call itself.
            return Ok(());
        }
        let (from_window, to_window) = (head & INPUT_WINDOW != 0, head & OUTPUT_WINDOW != 0);
        let place = |window: bool, offset: u64| {
            if window { format!("window offset {offset:#x}") } else { "ordinary memory".to_owned() }
        };
        if head & IN_PLACE != 0 {
            write!(f, " in place at {}", place(from_window || to_window, input.max(output)))?;
        } else if operation == OpType::ReduceScatter {
            // Outputs are not described, as they may differ.
            write!(f, " from {}", place(from_window, input))?;
        } else if !self.is_exchange() {
            write!(f, " from {} to {}", place(from_window, input), place(to_window, output))?;
        } else {
            for (word, window, offset) in [("from", from_window, input), ("to", to_window, output)]
            {
                if window {
                    write!(f, " {word} {}", place(window, offset))?;
                }
            }
        }
        if let Some(hash) = self.registered_hash() {
            let name = known.map_or_else(String::new, |known| format!("{:?}, ", known.name));
            return write!(f, ", by {name}a registered algorithm of hash {hash:08x}");
        }
        let id = AlgorithmId::from_code((head >> 24) as u8);
        match operation.standard().and_then(|collective| id.name(collective)) {
            _ if id == AUTO => Ok(()),
            Some(name) => write!(f, ", by {name}"),
            None => write!(f, ", by algorithm {}", id.code()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExpertShape;

    #[test]
    fn the_making_of_a_buffer_for_experts_is_named_with_its_options() {
        let shape = ExpertShape {
            hidden: 64,
            experts: 8,
            top_k: 2,
            max_tokens: 5,
            dtype: DType::F32,
            capacity: Some(9),
        };
        let made = "making of a buffer for experts of f32, hidden 64, 8 experts, top_k 2, max_tokens 5, capacity 9";
        let plain = CallDescription::expert_buffer(&shape, 0, false);
        assert_eq!(plain.to_string(), made);
        let text = CallDescription::expert_buffer(&shape, 4, true).to_string();
        assert_eq!(text, format!("{made}, num_sms 4, for weights"));
        let more =
            CallDescription::expert_buffer(&ExpertShape { max_tokens: 6, ..shape }, 0, false);
        assert!(more != plain && plain.operation() == Some(OpType::ExpertBuffer));
    }
}
