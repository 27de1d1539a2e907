//! Needs of the variants of kernels on a device, in a file: `needs.txt`. The compilers are deterministic: a kernel whose
//! code, macros and options are those of when it was recorded needs what it needed then, and is not compiled again.
//! Comments take no part. Reviewers see in the file which registers and how much machine code a change costs.

use std::fmt::Write as _;

use super::*;

/// Needs of a variant's machine code, by the device, the compiler and the variant; `None` for intermediate code.
pub(super) type Needs = BTreeMap<String, Option<Usage>>;

const HEAD: &str = "\
# What each variant of a kernel needs: registers of a thread, bytes of its stack, bytes of shared memory of a block, and bytes of
# machine code (- where it was compiled before that was recorded); or PTX, which the driver compiles. Behind a kernel's name is
# the hash of all that its variants are made from: sources without comments, macros, options, and the versions of the compilers.
# SYMMPOOL_BLESS=1 make test-variants writes this file.
";

/// A kernel's hash, and what its variants need, by the kernel's name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recorded(pub(super) BTreeMap<String, (String, Needs)>);

impl Recorded {
    fn path() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/jit/tests/needs.txt")
    }

    pub(super) fn read() -> Self {
        Self::parse(&fs::read_to_string(Self::path()).expect("the file"))
    }

    pub(super) fn write(&self) {
        fs::write(Self::path(), self.text()).expect("the file");
    }

    /// Recorded needs of a kernel that is made from the same sources.
    pub(super) fn of(&self, kernel: &str, hash: &str) -> Option<&Needs> {
        self.0.get(kernel).filter(|(of, _)| of == hash).map(|(_, needs)| needs)
    }

    fn text(&self) -> String {
        let mut text = HEAD.to_owned();
        for (kernel, (hash, needs)) in &self.0 {
            let _ = write!(text, "\n{kernel} {hash}\n");
            for (variant, need) in needs {
                let _ = match need {
                    Some(Usage { registers, stack_bytes, shared_bytes, code_bytes }) => {
                        let code = code_bytes.map_or("-".to_owned(), |bytes| bytes.to_string());
                        writeln!(
                            text,
                            "{registers} {stack_bytes} {shared_bytes} {code} : {variant}"
                        )
                    }
                    None => writeln!(text, "PTX : {variant}"),
                };
            }
        }
        text
    }

    fn parse(text: &str) -> Self {
        let mut kernels = BTreeMap::new();
        let of_kernels = text.split("\n\n").skip(1);
        for lines in of_kernels {
            let mut lines = lines.lines();
            let (kernel, hash) =
                lines.next().and_then(|line| line.split_once(' ')).expect("a kernel");
            let needs = lines.map(|line| {
                let (need, variant) = line.split_once(" : ").expect("a variant");
                (variant.to_owned(), Self::parse_need(need))
            });
            kernels.insert(kernel.to_owned(), (hash.to_owned(), needs.collect()));
        }
        Self(kernels)
    }

    fn parse_need(need: &str) -> Option<Usage> {
        if need == "PTX" {
            return None;
        }
        let words: Vec<&str> = need.split(' ').collect();
        let [registers, stack_bytes, shared_bytes, code_bytes] = words[..] else {
            panic!("{need:?}")
        };
        let number = |word: &str| word.parse::<u64>().expect("a number");
        let small = |word: &str| u32::try_from(number(word)).expect("a small number");
        let code_bytes = (code_bytes != "-").then(|| number(code_bytes));
        let (registers, stack_bytes) = (small(registers), small(stack_bytes));
        Some(Usage { registers, stack_bytes, shared_bytes: number(shared_bytes), code_bytes })
    }
}

#[test]
fn what_is_recorded_is_read_again() {
    let usage =
        Usage { registers: 128, stack_bytes: 24, shared_bytes: 1 << 40, code_bytes: Some(7) };
    let older = Usage { code_bytes: None, ..usage };
    let needs = Needs::from([
        ("9.0 by 13.0: copy (WORLD=2)".to_owned(), Some(usage)),
        ("8.0 by 13.0: copy (WORLD=2)".to_owned(), Some(older)),
        ("10.0 by 12.4: copy (WORLD=2)".to_owned(), None),
    ]);
    assert!(usage.is_as(&usage) && usage.is_as(&older) && !older.is_as(&usage));
    assert!(!usage.is_as(&Usage { registers: 127, ..older }));
    let other = Needs::from([("9.0 by 13.0: barrier".to_owned(), Some(usage))]);
    let recorded = Recorded(BTreeMap::from([
        ("copy".to_owned(), ("abc".to_owned(), needs.clone())),
        ("barrier".to_owned(), ("def".to_owned(), other)),
    ]));
    assert_eq!(Recorded::parse(&recorded.text()), recorded);
    assert_eq!(recorded.of("copy", "abc"), Some(&needs));
    assert!(recorded.of("copy", "def").is_none() && recorded.of("pull", "abc").is_none());
    assert_eq!(Recorded::parse(HEAD), Recorded::default());
}
