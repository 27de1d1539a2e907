//! Which headers a kernel includes, directly and through others. A kernel is compiled with these alone, and is kept until
//! one of them changes.

use super::sources::{HEADERS, KernelSource};

/// The name of a header, and its text.
pub(super) type SourceHeader = (&'static str, &'static str);

/// The headers of [`HEADERS`] that a source includes: all of them if its text does not show which.
pub(super) fn headers_of(source: &str) -> Vec<SourceHeader> {
    let mut taken = vec![false; HEADERS.len()];
    let mut texts = vec![source];
    while let Some(text) = texts.pop() {
        let Some(names) = included(text) else { return HEADERS.to_vec() };
        for (nth, (name, header)) in HEADERS.iter().enumerate() {
            if !taken[nth] && names.contains(name) {
                taken[nth] = true;
                texts.push(header);
            }
        }
    }
    let all = HEADERS.iter().zip(taken);
    all.filter_map(|(header, taken)| taken.then_some(*header)).collect()
}

/// For each of these kernels and every header: its folder, and its path and text with those of all that it includes.
pub(crate) fn sources_below(
    kernels: impl Iterator<Item = &'static KernelSource<'static>>,
) -> impl Iterator<Item = (&'static str, Vec<SourceHeader>)> {
    let kernels = kernels.map(|kernel| (kernel.path, kernel.source));
    kernels.chain(HEADERS.iter().copied()).map(|(path, source)| {
        let folder = path.split_once('/').map_or("", |(folder, _)| folder);
        let mut files = headers_of(source);
        files.push((path, source));
        (folder, files)
    })
}

/// Whether a source or a header that it includes has memory that the threads of a block share.
pub(crate) fn shares_memory(source: &str) -> bool {
    let shared = "__shared__";
    source.contains(shared) || headers_of(source).iter().any(|(_, text)| text.contains(shared))
}

/// The names between angle brackets or quotation marks behind each `#include`, whatever conditions it stands under. `None`
/// where one is a macro, or the word stands in a place where what is included may be said in other ways.
fn included(text: &str) -> Option<Vec<&str>> {
    let mut names = Vec::new();
    for (at, word) in text.match_indices("include") {
        let before = text[..at].trim_end_matches([' ', '\t']);
        if !before.ends_with('#') {
            // Mostly a word of a comment. But a line break or a comment may part it from its `#`, and there is
            // `__has_include`.
            if ["\\\n", "*/", "__has_"].iter().any(|end| before.ends_with(end)) {
                return None;
            }
            continue;
        }
        let rest = text[at + word.len()..].trim_start_matches([' ', '\t']);
        let close = match rest.chars().next()? {
            '<' => '>',
            '"' => '"',
            _ => return None,
        };
        let (name, _) = rest[1..].split_once(close)?;
        names.push(name);
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels;
    use crate::jit::sources::ONE_SIDED;

    fn names(source: &str) -> Vec<&'static str> {
        headers_of(source).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn headers_come_with_what_they_include_themselves() {
        assert_eq!(names("int x;  // includes nothing"), [""; 0]);
        assert_eq!(names("#include <stdint.h>"), [""; 0]);
        let types = names("#include <symmpool/impl/types.cuh>");
        assert!(types.contains(&"symmpool/impl/types.cuh"), "{types:?}");
        let device = names("  #  include\t\"symmpool/device.cuh\"\n");
        for name in [
            "symmpool/device.cuh",
            "symmpool/ll128_channel.cuh",
            "symmpool/impl/ll128.cuh",
            "symmpool/impl/ptx.cuh",
        ] {
            assert!(device.contains(&name), "{device:?}");
        }
        assert!(!device.contains(&"fused/norm.cuh"), "{device:?}");
        let one_sided = names(ONE_SIDED.source);
        assert!(!one_sided.contains(&"experts/token_tile.cuh"), "{one_sided:?}");
    }

    #[test]
    fn a_source_that_may_include_anything_gets_all() {
        for source in [
            "#define NAME <symmpool/impl/types.cuh>\n#include NAME",
            "#\\\ninclude <symmpool/impl/types.cuh>",
            "# /* why */ include <symmpool/impl/types.cuh>",
            "#if __has_include(<symmpool/impl/types.cuh>)\n#endif",
            "#include <symmpool/impl/types.cuh",
            "#include",
        ] {
            assert_eq!(headers_of(source).len(), HEADERS.len(), "{source:?}");
        }
    }

    #[test]
    fn every_include_of_ours_is_a_header_of_ours() {
        let sources = kernels().map(|kernel| kernel.source);
        for text in sources.chain(HEADERS.iter().map(|(_, text)| *text)) {
            for name in included(text).expect("plain includes") {
                assert!(HEADERS.iter().any(|(header, _)| *header == name), "{name}");
            }
        }
    }
}
