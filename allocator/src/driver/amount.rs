//! Amounts of memory as people read them.

use std::fmt;

/// A number of bytes; shown as `2 MiB`, `1.50 GiB` or, below one KiB, as bytes.
pub(super) struct Amount(pub(super) u64);

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} bytes", self.0);
        }
        let power = (self.0.ilog2() / 10) as usize;
        let unit = 1u64 << (10 * power);
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {}", self.0 / unit, UNITS[power - 1])
        } else {
            write!(f, "{:.2} {}", self.0 as f64 / unit as f64, UNITS[power - 1])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Amount;

    #[test]
    fn amounts_are_exact_where_they_can_be() {
        let shown = [0, 1023, 1024, 2 << 20, 3 << 29, u64::MAX].map(|n| Amount(n).to_string());
        assert_eq!(shown, ["0 bytes", "1023 bytes", "1 KiB", "2 MiB", "1.50 GiB", "16.00 EiB"]);
    }
}
