//! The kernels of docs/kernels.md compile, with every compiler and for every architecture.

use super::*;

const DOCUMENT: &str = include_str!("../../../../docs/kernels.md");

/// The kernels of the document: the name of each, and its text.
pub(crate) fn kernels() -> Vec<(String, String)> {
    let blocks = DOCUMENT.split("```cuda\n").skip(1);
    let found = blocks.map(|block| {
        let text = block.split("```").next().expect("its end").to_owned();
        let (_, rest) = text.split_once("__global__ void ").expect("a kernel");
        (rest.split('(').next().expect("a name").to_owned(), text)
    });
    found.collect()
}

#[test]
fn kernels_of_the_document_compile_for_every_architecture() {
    let all = kernels();
    assert_eq!(all.len(), 6);
    for nvrtc in compilers() {
        let jit = Jit::new(options(nvrtc, Some(&kept())));
        for (name, text) in &all {
            for (nth, ((major, minor), _)) in PROCESSORS.into_iter().enumerate() {
                // All numbers of ranks for Hopper, one for each other device.
                let worlds = ["1", "2", "8"];
                let wanted = |at: usize| (major, minor) == (9, 0) || at == nth % worlds.len();
                for (_, world) in worlds.into_iter().enumerate().filter(|(at, _)| wanted(*at)) {
                    let kernel = KernelSource {
                        name,
                        path: "kernels.md",
                        entry: name,
                        source: text,
                        asks_for_blocks: false,
                        variants: &[],
                    };
                    let defines =
                        [("WORLD", world), ("DTYPE", "4"), ("OP", "1"), ("THREADS", "256")];
                    let variant = Variant { kernel: &kernel, defines: &defines };
                    let image = jit.compile(&variant, arch(major, minor));
                    let image = image.unwrap_or_else(|error| panic!("{error}"));
                    let used = look(&image, &kernel).expect("machine code");
                    println!("{name} of {world} on {major}.{minor}: {used:?}");
                }
            }
        }
    }
}
