//! The algorithms of all-reduces, by name.

/// Declares the algorithms: for each its description, its name here, the number in call descriptions, and the name that
/// programs use.
macro_rules! all_reduces {
    ($($(#[$about:meta])* $name:ident = $code:literal, $text:literal;)+) => {
        /// The algorithm of an all-reduce. Results have the same bits with each of them on one host (rule S7).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(u8)]
        pub enum AllReduceAlgorithm {
            $($(#[$about])* $name = $code,)+
        }

        impl AllReduceAlgorithm {
            /// All algorithms, `Auto` first.
            pub const ALL: [Self; [$($code),+].len()] = [$(Self::$name),+];

            /// The name used in options and reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

all_reduces! {
    /// Chosen by links, size, number of ranks and kind of memory.
    #[default]
    Auto = 0, "auto";
    /// Every rank reduces everything: in host memory through scratch, on devices by the first of the `OneShot...` forms that can
    /// serve the call.
    OneShot = 1, "one_shot";
    /// Every rank reduces a share and gives the result to the others; on devices by the first of the `TwoShot...` forms that can
    /// serve the call.
    TwoShot = 2, "two_shot";
    /// On devices: one shot, in the LL protocol, whose vectors of 16 bytes are half flags. Any type; fastest
    /// for a few KiB.
    OneShotLl = 3, "one_shot_ll";
    /// On devices: one shot, in the Lamport protocol, whose receivers poll the data itself; floats but `f64`.
    OneShotLamport = 4, "one_shot_lamport";
    /// On devices: one shot, by loads from every rank's scratch.
    OneShotPull = 5, "one_shot_pull";
    /// On devices: two shots, in the LL protocol.
    TwoShotLl = 6, "two_shot_ll";
    /// On devices: two shots, in the Lamport protocol; floats but `f64`.
    TwoShotLamport = 7, "two_shot_lamport";
    /// On devices: two shots between windows; ranks load their shares from inputs and store results to outputs.
    TwoShotPull = 8, "two_shot_pull";
    /// On devices: two shots by stores, which write results directly into outputs that are windows.
    TwoShotPush = 9, "two_shot_push";
    /// In host memory: moves data over direct links only, where there are two groups of ranks, all linked inside,
    /// whose ranks are linked in pairs. `Auto` uses it on a hybrid cube mesh.
    CubeMesh = 10, "cube_mesh";
    /// On devices that are all linked by NVLink, or are one: one shot, in the LL128 protocol, whose lines of
    /// 128 bytes have 8 bytes of flags. Any type; fastest from some tens to some hundreds of KiB, for types
    /// that the Lamport protocol does not carry.
    OneShotLl128 = 11, "one_shot_ll128";
    /// On devices: two shots by copy engines, with kernels that reduce between them, from 1 MiB: into windows, or
    /// into ordinary memory where each rank has a device of its own with several queues. Fastest from some hundreds of MiB. Copies
    /// that were submitted to copy engines cannot be cancelled: if the call fails, the content of its output is undefined on
    /// every rank, also on ranks that did not make the call.
    TwoShotCopy = 12, "two_shot_copy";
    /// On devices: two shots by stores in stages through scratch, of which a part of the data is enough, into outputs
    /// anywhere.
    TwoShotPipeline = 13, "two_shot_pipeline";
}

impl AllReduceAlgorithm {
    /// The algorithm of this [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}
