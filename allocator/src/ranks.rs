//! Ranks in words.

/// Lists ranks in short form: `0, 2-5, 7`.
pub(crate) fn list(ranks: &[u32]) -> String {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut out = String::new();
    let mut i = 0;
    while i < sorted.len() {
        let mut j = i;
        while j + 1 < sorted.len() && sorted[j + 1] == sorted[j] + 1 {
            j += 1;
        }
        if !out.is_empty() {
            out.push_str(", ");
        }
        match j - i {
            0 => out.push_str(&sorted[i].to_string()),
            1 => out.push_str(&format!("{}, {}", sorted[i], sorted[j])),
            _ => out.push_str(&format!("{}-{}", sorted[i], sorted[j])),
        }
        i = j + 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_lists_are_short() {
        assert_eq!(list(&[3]), "3");
        assert_eq!(list(&[2, 1]), "1, 2");
        assert_eq!(list(&[7, 0, 2, 3, 4, 5, 5]), "0, 2-5, 7");
    }
}
