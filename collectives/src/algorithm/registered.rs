//! Algorithms as things: what a program makes, registers with communicators and runs.

use std::fmt;
use std::sync::Arc;

use crate::plan::{CheckedPlan, Plan, PlanError};

/// An algorithm that a program brought along: a plan that was proved.
///
/// It is for one number of ranks. [`Communicator::register`](crate::Communicator::register) makes it known under its
/// name, and [`Communicator::execute_at`](crate::Communicator::execute_at) runs it as it is. Clones share the plan.
#[derive(Clone)]
pub struct Algorithm {
    plan: Arc<CheckedPlan>,
}

impl Algorithm {
    /// Checks a plan.
    ///
    /// # Errors
    ///
    /// What is wrong with the plan, with the rank and the line.
    pub fn from_plan(plan: Plan) -> Result<Self, PlanError> {
        Ok(Self { plan: Arc::new(plan.check()?) })
    }

    /// The name, under which it is registered.
    pub fn name(&self) -> &str {
        &self.plan.plan().name
    }

    /// The name of what it computes.
    pub fn collective(&self) -> &str {
        self.plan.plan().collective.name()
    }

    /// A hash of what ranks must have the same of. It is compared at each call.
    pub fn hash(&self) -> u64 {
        self.plan.hash()
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<CheckedPlan> {
        &self.plan
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.plan.plan();
        write!(f, "Algorithm({}, {} of {} ranks)", plan.name, plan.collective.name(), plan.world)
    }
}
