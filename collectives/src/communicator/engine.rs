//! A communicator's engine: the one of host memory, the one of a device, or the one over hosts.

use std::ops::{Deref, DerefMut};

use symmpool_allocator::{Error, Result};

use crate::HostEngine;
use crate::algorithm::{BuiltIn, CallShape, Constraints, StandardCollective};
use crate::cuda::{Area, CudaEngine};
use crate::engine::Engine;
use crate::spanning::SpanningEngine;

/// An engine of any kind. What all have are methods of [`Engine`]; the rest belongs to devices.
pub(super) enum AnyEngine {
    Host(Box<HostEngine>),
    Cuda(Box<CudaEngine>),
    Spanning(Box<SpanningEngine>),
}

impl Deref for AnyEngine {
    type Target = dyn Engine;

    #[inline]
    fn deref(&self) -> &Self::Target {
        match self {
            Self::Host(host) => &**host,
            Self::Cuda(cuda) => &**cuda,
            Self::Spanning(spanning) => &**spanning,
        }
    }
}

impl DerefMut for AnyEngine {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Host(host) => &mut **host,
            Self::Cuda(cuda) => &mut **cuda,
            Self::Spanning(spanning) => &mut **spanning,
        }
    }
}

impl AnyEngine {
    /// The area of memory that the call under way uses; in host memory there is one.
    pub(super) fn area(&self) -> Area {
        match self {
            Self::Host(_) | Self::Spanning(_) => Area::Small,
            Self::Cuda(cuda) => cuda.area(),
        }
    }

    /// Has the call under way use an area of memory.
    pub(super) fn use_area(&mut self, area: Area) {
        if let Self::Cuda(cuda) = self {
            cuda.use_area(area);
        }
    }

    /// The engine of a device, for calls that need no engine in host memory.
    pub(super) fn cuda(&mut self) -> Result<&mut CudaEngine> {
        match self {
            Self::Cuda(cuda) => Ok(cuda),
            Self::Host(_) => Err(Error::invalid_state("the engine is in host memory")),
            Self::Spanning(spanning) => Err(spanning.not_across("this call")),
        }
    }

    /// All built-in algorithms.
    pub(super) fn built_in(&self) -> Vec<BuiltIn> {
        let world = self.world();
        let of = |collective: StandardCollective| {
            self.algorithms(collective).into_iter().map(move |id| {
                let fits = |shape: &CallShape| self.may_fit(id, shape);
                let constraints = Constraints::of_built_in(collective, world, fits);
                BuiltIn { collective, id, constraints }
            })
        };
        StandardCollective::ALL.into_iter().flat_map(of).collect()
    }
}
