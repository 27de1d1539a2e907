//! The headers of kernels that are made of the structs that the host defines, and what holds them equal.

use std::fmt::Write as _;
use std::path::Path;

use symmpool_allocator::Result;

use super::control::MAX_STAGE_BLOCKS;
use super::fault::{AsyncError, FaultRecord};
use super::params::{
    AreaFlags, CallParams, CommFields, Departure, GemmProblem, LocalReduceWork, LocalState,
    MatmulSmallMWork, MatmulWork, NormWork, PlanWork, SmLock, StreamK, Traffic,
};
use crate::call::experts::ExpertsWork;
use crate::jit::tests::{compilers, options};
use crate::jit::{Arch, Jit, KernelSource, Variant};
use crate::types::kernel_struct::{KernelType, StructLayout};

/// A header that is made of structs.
struct Header {
    path: &'static str,
    /// Where the structs are defined, below `collectives/src`.
    sources: &'static str,
    includes: &'static [&'static str],
    /// Structs of kernels that no host has, but pointers to them.
    pointed_at: &'static [&'static str],
    constants: Vec<Constant>,
    structs: Vec<StructLayout>,
}

/// A constant of 32 bits that the host defines, and what a header says of it.
struct Constant {
    name: &'static str,
    value: u32,
    comment: &'static str,
}

fn layout<T: KernelType>() -> StructLayout {
    T::struct_layout().expect("a struct")
}

fn headers() -> Vec<Header> {
    let params = "cuda/layout/params.rs";
    let with_types = |path, sources, structs| Header {
        path,
        sources,
        includes: &["symmpool/impl/types.cuh"],
        pointed_at: &[],
        constants: Vec::new(),
        structs,
    };
    let traffic = Header {
        constants: vec![Constant {
            name: "MAX_STAGE_BLOCKS",
            value: MAX_STAGE_BLOCKS,
            comment: "Most stages of the pipeline through scratch, as if for so many blocks: `cuda/layout/control.rs` says why.",
        }],
        ..with_types("all_to_all/traffic_layout.cuh", params, vec![layout::<Traffic>()])
    };
    vec![
        with_types(
            "symmpool/impl/comm_layout.cuh",
            "cuda/layout/params.rs` and `cuda/layout/fault.rs",
            vec![
                layout::<AsyncError>(),
                layout::<FaultRecord>(),
                layout::<Departure>(),
                layout::<AreaFlags>(),
                layout::<LocalState>(),
                layout::<SmLock>(),
                layout::<CommFields>(),
                layout::<CallParams>(),
            ],
        ),
        with_types("symmpool/impl/plan_layout.cuh", params, vec![layout::<PlanWork>()]),
        traffic,
        with_types(
            "reduce_local/reduce_local_layout.cuh",
            params,
            vec![layout::<LocalReduceWork>()],
        ),
        with_types("fused/norm_layout.cuh", params, vec![layout::<NormWork>()]),
        with_types(
            "experts/params_layout.cuh",
            "call/experts/layout.rs",
            vec![layout::<ExpertsWork>()],
        ),
        Header {
            path: "fused/matmul_layout.cuh",
            sources: params,
            includes: &["symmpool/impl/ptx_tensor.cuh", "symmpool/impl/types.cuh"],
            pointed_at: &["MatmulControl"],
            constants: Vec::new(),
            structs: vec![
                layout::<GemmProblem>(),
                layout::<StreamK>(),
                layout::<MatmulWork>(),
                layout::<MatmulSmallMWork>(),
            ],
        },
    ]
}

impl Header {
    fn text(&self) -> String {
        let mut text = format!(
            "//! Structs that the host and kernels share, made of those in `{}`.\n\
             //! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.\n\n\
             #pragma once\n\n",
            self.sources
        );
        for include in self.includes {
            let _ = writeln!(text, "#include <{include}>");
        }
        text.push_str("\nnamespace symmpool {\n");
        for name in self.pointed_at {
            let _ = write!(text, "\nstruct {name};\n");
        }
        for Constant { name, value, comment } in &self.constants {
            let _ = write!(text, "\n// {comment}\nconstexpr u32 {name} = {value};\n");
        }
        for each in &self.structs {
            let _ = write!(text, "\n{}", each.definition());
        }
        text.push_str("\n}  // namespace symmpool\n");
        text
    }

    /// Makes a program that compiles if all fields lie where the host has them.
    fn assertions(&self) -> String {
        let mut text = format!("#include <{}>\n", self.path);
        for each in &self.structs {
            let name = each.name;
            for (field, offset, bytes) in each.offsets() {
                let _ = writeln!(
                    text,
                    "static_assert(offsetof(symmpool::{name}, {field}) == {offset} && \
                     sizeof(symmpool::{name}::{field}) == {bytes}, \"{name}.{field}\");"
                );
            }
        }
        text
    }
}

#[test]
fn committed_headers_are_those_that_the_structs_make() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for header in headers() {
        let (path, made) = (kernels.join(header.path), header.text());
        if std::env::var_os("SYMMPOOL_BLESS").is_some() {
            std::fs::write(&path, &made).expect("writing a header");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == made,
            "collectives/kernels/{} is out of date; \
             SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes it anew",
            header.path
        );
    }
}

/// The macro of C's headers, which NVRTC does not have: for that and for the emulator's compiler.
const OFFSETOF: &str = "\
#ifdef __CUDACC_RTC__
#define offsetof(type, field) __INTADDR__(&((type*)0)->field)
#else
#define offsetof __builtin_offsetof
#endif
";

/// Compiles assertions with every compiler: the error of the first one that refuses.
pub(in crate::cuda) fn compile_assertions(source: &str, defines: &[(&str, &str)]) -> Result<()> {
    let source = format!("{OFFSETOF}{source}extern \"C\" __global__ void assertions() {{}}\n");
    let (name, path) = ("assertions", "assertions.cu");
    let kernel = KernelSource {
        name,
        path,
        entry: name,
        source: &source,
        asks_for_blocks: false,
        variants: &[],
    };
    compilers().into_iter().try_for_each(|nvrtc| {
        let variant = Variant { kernel: &kernel, defines };
        Jit::new(options(nvrtc, None)).compile(&variant, Arch::new(9, 0)?).map(|_| ())
    })
}

#[test]
fn compilers_lay_fields_out_as_the_host_does() {
    for header in headers() {
        compile_assertions(&header.assertions(), &[])
            .unwrap_or_else(|error| panic!("{}: {error}", header.path));
    }
}

#[test]
fn fields_in_another_order_are_refused() {
    let all = headers();
    let plan = all.iter().find(|header| header.path == "symmpool/impl/plan_layout.cuh");
    let assertions = plan.expect("the header").assertions();
    let swapped = assertions
        .replace("PlanWork, part) == 0", "PlanWork, part) == 8")
        .replace("PlanWork, chunk) == 8", "PlanWork, chunk) == 0");
    assert_ne!(swapped, assertions);
    if compilers().is_empty() {
        return;
    }
    let error = compile_assertions(&swapped, &[]).expect_err("they lie otherwise").to_string();
    assert!(error.contains("PlanWork.part") && error.contains("PlanWork.chunk"), "{error}");
    assert!(!error.contains("PlanWork.begin"), "the others lie where they are said to: {error}");
}
