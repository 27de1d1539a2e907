//! Kernels of plans compile: every plan of two ranks with one compiler, and some with every compiler, for every
//! architecture, and for more ranks. All of them everywhere would take minutes.

use super::*;
use crate::plan::cuda::{ENTRY, source};
use crate::plan::testing::plans;

#[test]
fn kernels_of_plans_compile_for_every_architecture() {
    for (compiler, nvrtc) in compilers().into_iter().enumerate() {
        let jit = Jit::new(options(nvrtc, Some(&kept())));
        for world in [2, 4, 8] {
            let number = world.to_string();
            for (index, checked) in plans(world).into_iter().enumerate() {
                // With more ranks a fourth of the plans, another one for 4 ranks than for 8.
                let chosen = match (compiler, world) {
                    (0, 2) => true,
                    (0, _) => index % 4 == world as usize / 4,
                    _ => checked.plan().name.contains("two_shot") && world != 4,
                };
                if !chosen {
                    continue;
                }
                // The ends of chains and trees, and what is between them.
                let rank = if checked.plan().name.len() % 2 == 0 { 0 } else { world / 2 };
                let text = source(&checked, checked.schedule(), rank);
                let name = &checked.plan().name;
                let kernel = KernelSource {
                    name,
                    path: "plan.cu",
                    entry: ENTRY,
                    source: &text,
                    asks_for_blocks: false,
                    variants: &[],
                };
                // One program for all architectures, and every one for one of them.
                let all = PROCESSORS.iter().enumerate();
                let some = all.filter(|(nth, _)| {
                    world == 2 && name.as_str() == "two_shot"
                        || *nth == name.len() % PROCESSORS.len()
                });
                for (nth, ((major, minor), processor)) in some {
                    let (dtype, op) = [("1", "1"), ("4", "1"), ("6", "5"), ("9", "1")][nth % 4];
                    let world_is = ("WORLD", number.as_str());
                    let defines = [world_is, ("DTYPE", dtype), ("OP", op), ("THREADS", "512")];
                    let variant = Variant { kernel: &kernel, defines: &defines };
                    let image = jit.compile(&variant, arch(*major, *minor));
                    let image = image.unwrap_or_else(|error| panic!("{error}\n{text}"));
                    let Some(used) = look(&image, &kernel).expect("machine code") else { continue };
                    println!("{name} of {world} on {major}.{minor}, type {dtype}: {used:?}");
                    assert!(processor.holds(&used, 512) >= 1, "{name} of {world}: {used:?}");
                }
            }
        }
    }
}
