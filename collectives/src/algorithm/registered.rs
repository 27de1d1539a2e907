//! Algorithms as things: what communicators have and programs make, register and run.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::known::remember;
use super::{
    AlgorithmId, AlgorithmOrigin, Constraints, LaunchShape, NativeKernel, StandardCollective,
};
use crate::plan::{CheckedPlan, Plan, PlanError};

/// An algorithm of a collective: a built-in one, or what a program brought along: a plan that was proved, or a kernel.
///
/// [`Communicator::algorithms`](crate::Communicator::algorithms) lists those of a communicator,
/// [`Communicator::register`](crate::Communicator::register) adds one under its name, and
/// a [`Request`](crate::Request) for one runs it as it is. Clones share what they hold.
#[derive(Clone)]
pub struct Algorithm {
    source: Source,
}

/// Origin of an algorithm, which runs it.
#[derive(Clone)]
pub(crate) enum Source {
    BuiltIn(Arc<BuiltIn>),
    Plan(Arc<CheckedPlan>),
    Native(Arc<NativeKernel>),
}

/// A built-in algorithm of a communicator.
pub(crate) struct BuiltIn {
    pub(crate) collective: StandardCollective,
    /// Its number in call descriptions.
    pub(crate) id: AlgorithmId,
    /// `None` if it fits no call among these ranks.
    pub(crate) constraints: Option<Constraints>,
}

impl Algorithm {
    /// Checks a plan.
    ///
    /// # Errors
    ///
    /// A [`PlanError`] with the rank and the line, if the plan is wrong.
    pub fn from_plan(plan: Plan) -> Result<Self, PlanError> {
        Ok(Self { source: Source::Plan(Arc::new(plan.check()?)) }.remembered())
    }

    /// An algorithm that is a CUDA kernel, for communicators on devices. It is compiled by a call that needs it.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for what cannot be a kernel: no source or name, or a grid that no device has.
    pub fn native(kernel: NativeKernel) -> symmpool_allocator::Result<Self> {
        kernel.check()?;
        Ok(Self { source: Source::Native(Arc::new(kernel)) }.remembered())
    }

    /// Has errors know it by its name.
    fn remembered(self) -> Self {
        remember(self.hash(), self.name(), self.collective());
        self
    }

    pub(crate) fn built_in(built_in: BuiltIn) -> Self {
        Self { source: Source::BuiltIn(Arc::new(built_in)) }
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// The name, under which it is registered.
    pub fn name(&self) -> &str {
        match &self.source {
            Source::BuiltIn(built_in) => built_in.id.name(built_in.collective).unwrap_or_default(),
            Source::Plan(plan) => &plan.plan().name,
            Source::Native(kernel) => &kernel.name,
        }
    }

    /// The name of what it computes.
    pub fn collective(&self) -> &str {
        match &self.source {
            Source::BuiltIn(built_in) => built_in.collective.name(),
            Source::Plan(plan) => plan.plan().collective.name(),
            Source::Native(kernel) => kernel.collective.name(),
        }
    }

    /// Where it comes from.
    pub fn origin(&self) -> AlgorithmOrigin {
        match &self.source {
            Source::BuiltIn(_) => AlgorithmOrigin::BuiltIn,
            Source::Plan(_) => AlgorithmOrigin::Plan,
            Source::Native(_) => AlgorithmOrigin::Native,
        }
    }

    /// Which calls it can serve. `None` for a built-in one that serves no call of its communicator, as the ranks are
    /// not linked as it needs them.
    pub fn constraints(&self) -> Option<Constraints> {
        match &self.source {
            Source::BuiltIn(built_in) => built_in.constraints.clone(),
            Source::Plan(plan) => Some(Constraints::of_plan(plan)),
            Source::Native(kernel) => Some(kernel.constraints()),
        }
    }

    /// Chunks of scratch that a plan needs, of which a call's scratch holds pieces; 0 for built-in ones, which take what
    /// there is.
    pub fn scratch(&self) -> u32 {
        self.plan().map_or(0, |plan| plan.plan().scratch)
    }

    /// How it is launched on devices, where it says so.
    pub fn launch(&self) -> LaunchShape {
        match &self.source {
            Source::BuiltIn(_) => LaunchShape::default(),
            Source::Plan(plan) => LaunchShape { blocks: plan.plan().blocks, threads: None },
            Source::Native(kernel) => {
                LaunchShape { blocks: kernel.blocks, threads: Some(kernel.threads) }
            }
        }
    }

    /// How many equal parts the input has among so many ranks. A part is what the `count` of a call counts.
    pub fn input_parts(&self, world: u32) -> usize {
        let parts = match &self.source {
            Source::BuiltIn(built_in) => built_in.collective.both_parts(world)[0],
            Source::Plan(plan) => plan.plan().input_parts(),
            Source::Native(kernel) => kernel.collective.both_parts(world)[0],
        };
        parts.max(1) as usize
    }

    /// The elements of `rank`'s input and output in a call of `count` elements among so many ranks. `None` stands for a
    /// number that is too large.
    pub fn lengths(&self, rank: u32, world: u32, count: usize) -> [Option<usize>; 2] {
        match &self.source {
            Source::BuiltIn(built_in) => built_in.collective.lengths(world, count),
            Source::Plan(plan) => plan.lengths(rank, count),
            Source::Native(kernel) => kernel.collective.lengths(world, count),
        }
    }

    /// Returns the same plan, launched with at most so many thread blocks on devices. `None` for an algorithm that is
    /// no plan.
    pub fn with_blocks(&self, blocks: u32) -> Option<Self> {
        let plan = Plan { blocks: Some(blocks), ..self.plan()?.plan().clone() };
        Self::from_plan(plan).ok()
    }

    /// A hash of what ranks must have the same of. That of a plan is compared at each call.
    pub fn hash(&self) -> u64 {
        match &self.source {
            Source::BuiltIn(_) => {
                let text =
                    format!("{} {} {}", self.collective(), self.name(), env!("CARGO_PKG_VERSION"));
                let hash = blake3::hash(text.as_bytes());
                let mut first = [0; 8];
                first.copy_from_slice(&hash.as_bytes()[..8]);
                u64::from_le_bytes(first)
            }
            Source::Plan(plan) => plan.hash(),
            Source::Native(kernel) => kernel.hash(),
        }
    }

    /// The kernel, if it is one of a program.
    pub fn kernel(&self) -> Option<&NativeKernel> {
        match &self.source {
            Source::BuiltIn(_) | Source::Plan(_) => None,
            Source::Native(kernel) => Some(kernel),
        }
    }

    /// The plan, if it is one.
    pub fn plan(&self) -> Option<&Arc<CheckedPlan>> {
        match &self.source {
            Source::BuiltIn(_) | Source::Native(_) => None,
            Source::Plan(plan) => Some(plan),
        }
    }
}

/// Algorithms are equal that ranks may take for each other: of one name and collective, with one program, kernel or
/// built-in algorithm. The file and lines of a program do not matter.
impl PartialEq for Algorithm {
    fn eq(&self, other: &Self) -> bool {
        let parts = |it: &Self| (it.hash(), it.origin().name());
        (self.name(), self.collective()) == (other.name(), other.collective())
            && parts(self) == parts(other)
    }
}

impl Eq for Algorithm {}

impl Hash for Algorithm {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash().hash(state);
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, collective) = (self.name(), self.collective());
        match self.plan() {
            Some(plan) => {
                write!(f, "Algorithm({name}, {collective} of {} ranks)", plan.plan().world)
            }
            None => write!(f, "Algorithm({name}, {collective}, {})", self.origin().name()),
        }
    }
}
