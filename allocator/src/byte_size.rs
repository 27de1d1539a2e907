//! Amounts of memory in readable form.

use std::fmt;

/// A number of bytes, shown as `2 MiB`, `1.50 GiB` or, below one KiB, as `512 bytes`. With `{:#}` a number
/// that is not a multiple of its unit is followed by the exact number of bytes.
pub(crate) struct ByteSize(pub(crate) u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let bytes = self.0;
        if bytes < 1024 {
            return write!(f, "{bytes} byte{}", if bytes == 1 { "" } else { "s" });
        }
        let power = (bytes.ilog2() / 10) as usize;
        let unit = 1u64 << (10 * power);
        if bytes.is_multiple_of(unit) {
            return write!(f, "{} {}", bytes / unit, UNITS[power - 1]);
        }
        write!(f, "{:.2} {}", bytes as f64 / unit as f64, UNITS[power - 1])?;
        if f.alternate() { write!(f, " ({bytes} bytes)") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::ByteSize;

    #[test]
    fn amounts_are_exact_where_they_can_be() {
        let shown = [0, 1, 1023, 1024, 2 << 20, 3 << 29, u64::MAX].map(|n| ByteSize(n).to_string());
        let expected =
            ["0 bytes", "1 byte", "1023 bytes", "1 KiB", "2 MiB", "1.50 GiB", "16.00 EiB"];
        assert_eq!(shown, expected);
        let exact = [512, 2 << 20, (2 << 20) + 1].map(|n| format!("{:#}", ByteSize(n)));
        assert_eq!(exact, ["512 bytes", "2 MiB", "2.00 MiB (2097153 bytes)"]);
    }
}
