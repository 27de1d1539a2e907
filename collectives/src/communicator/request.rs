//! The one door of the collectives: a call is a [`Request`], whatever memory it is on and whoever chooses its algorithm.

#![allow(unsafe_code)] // callers hand over raw memory, and promise what it is

use std::marker::PhantomData;

use symmpool_allocator::{Block, Error, Result, Stream};

use super::decision::Chosen;
use super::{Communicator, Inner};
use crate::algorithm::{AUTO, Source};
use crate::call::{Arguments, CallDescription, OpType, StandardCall};
use crate::{Algorithm, DType, Element, Place, ReduceOp, StandardCollective};

/// A call of a collective: on which memory, with how many elements, and by which algorithm.
///
/// Every rank makes the same one, but for where its memory lies. A rank whose request is refused gets the error at once,
/// and the other ranks get one too.
///
/// ```
/// # use symmpool_allocator::{Driver, Group, Pool, Result, Stream};
/// # use symmpool_collectives::{Communicator, ReduceOp, Request, StandardCollective};
/// # let group = Group::in_process(1)?.remove(0);
/// # let pool = Pool::builder(group).driver(Driver::host()?).build()?;
/// # let comm = Communicator::new(&pool)?;
/// let (x, out) = (pool.alloc::<f32>(1000)?, pool.alloc::<f32>(1000)?);
/// let request = Request::new(StandardCollective::AllReduce, &out, &x).op(ReduceOp::Max);
/// comm.call(&request.algorithm("two_shot"), &Stream::DEFAULT)?;
/// # Ok::<(), symmpool_allocator::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "`Communicator::call` makes the call"]
pub struct Request<'a> {
    pub(super) callee: Callee<'a>,
    /// The name of the algorithm, if the call names one.
    pub(super) algorithm: Option<&'a str>,
    pub(super) input: RequestMemory,
    pub(super) output: RequestMemory,
    /// Elements of a part, where these are addresses.
    count: usize,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: u32,
    borrowed: PhantomData<&'a [u8]>,
}

/// Subject of a call: a collective, or an algorithm, registered or not.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Callee<'a> {
    /// A collective, by an algorithm that the call names or that is chosen for it.
    Collective(StandardCollective),
    /// An algorithm, of a collective or of a program's own.
    Algorithm(&'a Algorithm),
}

impl From<StandardCollective> for Callee<'_> {
    fn from(collective: StandardCollective) -> Self {
        Self::Collective(collective)
    }
}

impl<'a> From<&'a Algorithm> for Callee<'a> {
    fn from(algorithm: &'a Algorithm) -> Self {
        Self::Algorithm(algorithm)
    }
}

impl Callee<'_> {
    /// The collective, if it is none of a program's own.
    pub(super) fn standard(&self) -> Option<StandardCollective> {
        match self {
            Self::Collective(collective) => Some(*collective),
            Self::Algorithm(algorithm) => StandardCollective::named(algorithm.collective()),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Collective(collective) => collective.name(),
            Self::Algorithm(algorithm) => algorithm.collective(),
        }
    }

    /// Whether the output is the input as well. Broadcasts by programs may have one beside it.
    fn is_on_output_alone(&self) -> bool {
        let collective = match self {
            Self::Collective(collective) => *collective,
            Self::Algorithm(algorithm) => match algorithm.source() {
                Source::BuiltIn(built_in) => built_in.collective,
                _ => return false,
            },
        };
        collective == StandardCollective::Broadcast
    }

    /// How many elements of input and output a rank has, for parts of `count`. `None` stands for more than can be.
    fn lengths(&self, rank: u32, world: u32, count: usize) -> [Option<usize>; 2] {
        match self {
            Self::Collective(collective) => collective.lengths(world, count),
            Self::Algorithm(algorithm) => algorithm.lengths(rank, world, count),
        }
    }
}

/// Memory of an input or output.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestMemory {
    Block {
        address: *mut u8,
        /// Its place in a rank's slot.
        offset: u64,
        /// Elements.
        length: usize,
    },
    Slice {
        address: *mut u8,
        length: usize,
    },
    /// Memory for as many elements as the call says.
    Address(*mut u8),
}

impl RequestMemory {
    fn of_block<T: Element>(block: &Block<T>) -> Self {
        Self::Block { address: block.as_ptr().cast(), offset: block.offset(), length: block.len() }
    }

    pub(super) fn address(&self) -> *mut u8 {
        match *self {
            Self::Block { address, .. } | Self::Slice { address, .. } | Self::Address(address) => {
                address
            }
        }
    }

    fn length(&self) -> Option<usize> {
        match *self {
            Self::Block { length, .. } | Self::Slice { length, .. } => Some(length),
            Self::Address(_) => None,
        }
    }
}

/// How long the memory of a call is on a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Elements of a part.
    count: usize,
    /// Bytes; they saturate, and no memory is that long then.
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

// The methods on addresses are unsafe, and say what must hold of those for as long as the call is under way. Blocks and slices
// are borrowed.
impl<'a> Request<'a> {
    #[inline]
    fn on(
        callee: Callee<'a>,
        output: RequestMemory,
        input: RequestMemory,
        count: usize,
        dtype: DType,
    ) -> Self {
        Self {
            callee,
            algorithm: None,
            input,
            output,
            count,
            dtype,
            op: ReduceOp::Sum,
            root: 0,
            borrowed: PhantomData,
        }
    }

    /// A call on blocks, which have as many elements as the collective has there. Both may be one block, where a call may be
    /// in place. A broadcast uses `out` alone, and a rank that has no output may pass any block. You must call
    /// [`Block::record_use`] before you let go of a block that a call on another stream than the block's still uses on a
    /// device: its memory may be given out again before that call has ended.
    pub fn new<T: Element>(
        callee: impl Into<Callee<'a>>,
        out: &'a Block<T>,
        input: &'a Block<T>,
    ) -> Self {
        Self::on(
            callee.into(),
            RequestMemory::of_block(out),
            RequestMemory::of_block(input),
            0,
            T::DTYPE,
        )
    }

    /// A call on slices, which pass through the communicator's scratch: in host memory only.
    pub fn on_slices<T: Element>(
        callee: impl Into<Callee<'a>>,
        out: &'a mut [T],
        input: &'a [T],
    ) -> Self {
        let output = RequestMemory::Slice { address: out.as_mut_ptr().cast(), length: out.len() };
        let address = input.as_ptr().cast_mut().cast();
        let input = RequestMemory::Slice { address, length: input.len() };
        Self::on(callee.into(), output, input, 0, T::DTYPE)
    }

    /// A call on one slice, as input and output.
    pub fn on_slice<T: Element>(callee: impl Into<Callee<'a>>, data: &'a mut [T]) -> Self {
        let memory = RequestMemory::Slice { address: data.as_mut_ptr().cast(), length: data.len() };
        Self::on(callee.into(), memory, memory, 0, T::DTYPE)
    }

    /// A call on addresses, for callers whose memory is no [`Block`], such as tensors of another language: for `count` elements
    /// of each part (see [`Plan::input_parts`](crate::plan::Plan::input_parts)); of a program's own collective, for an input of
    /// `count` elements. Memory inside a window is used where it lies, other memory is staged through scratch: which of the two
    /// it is follows from the address alone. A broadcast uses `output` alone.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable for the elements of all parts by whoever runs the call (the CPU in host
    /// memory, else the device), from when it is made until `stream` is past it. Nobody else touches them meanwhile, in any
    /// rank's slot where they lie in a window.
    #[inline]
    pub unsafe fn at(
        callee: impl Into<Callee<'a>>,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
    ) -> Self {
        let (output, input) =
            (RequestMemory::Address(output), RequestMemory::Address(input.cast_mut()));
        Self::on(callee.into(), output, input, count, dtype)
    }

    /// The operation of a reduction, else [`ReduceOp::Sum`].
    #[inline]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = op;
        self
    }

    /// The root of a broadcast, else rank 0.
    #[inline]
    pub fn root(mut self, root: u32) -> Self {
        self.root = root;
        self
    }

    /// The name of the algorithm, registered or built in. `None` chooses as calls do that name none. Of no meaning where the
    /// request is made for an algorithm.
    #[inline]
    pub fn algorithm(mut self, name: impl Into<Option<&'a str>>) -> Self {
        self.algorithm = name.into();
        self
    }

    /// Elements of a part, among `world` ranks.
    #[inline]
    fn count(&self, world: u32) -> usize {
        let (Some(input), Some(output)) = (self.input.length(), self.output.length()) else {
            return self.count;
        };
        match self.callee {
            _ if self.callee.is_on_output_alone() => output,
            Callee::Collective(StandardCollective::ReduceScatter) => output,
            Callee::Collective(collective) => input / collective.both_parts(world)[0] as usize,
            Callee::Algorithm(algorithm) => input / algorithm.input_parts(world),
        }
    }

    /// How long memory is on a rank, unless blocks or slices are too short or too long.
    #[inline]
    pub(super) fn size(&self, rank: u32, world: u32) -> Result<Size> {
        let count = self.count(world);
        let [inputs, outputs] = self.callee.lengths(rank, world, count);
        let is_wrong = |memory: RequestMemory, needed: Option<usize>| {
            memory.length().is_some_and(|length| needed != Some(length))
        };
        // A rank that has no output may pass any.
        let wrong = match (self.input, self.output) {
            (input, _) if is_wrong(input, inputs) && !self.callee.is_on_output_alone() => {
                Some((input, inputs))
            }
            (_, output) if is_wrong(output, outputs) && outputs != Some(0) => {
                Some((output, outputs))
            }
            _ => None,
        };
        if let Some((memory, needed)) = wrong {
            let length = memory.length().unwrap_or(0);
            crate::host::expect_length(self.callee.name(), rank, length, needed)?;
        }
        let bytes = |elements: Option<usize>| match elements {
            Some(elements) => elements.saturating_mul(self.dtype.size()),
            None => usize::MAX,
        };
        Ok(Size { count, inputs: bytes(inputs), outputs: bytes(outputs) })
    }
}

impl Communicator {
    /// Makes a call.
    ///
    /// # Errors
    ///
    /// The errors of the collective's calls. `is_invalid_argument` for a name that no algorithm has here, for memory
    /// whose lengths do not fit each other, if the elements do not divide as the algorithm needs them, or if buffers
    /// are in place where that is wrong; `is_unsupported` for an algorithm that does not fit the call, for slices on
    /// devices, and there for programs that are too long for a kernel. The other ranks get an error too.
    #[inline]
    pub fn call(&self, request: &Request<'_>, stream: &Stream) -> Result<()> {
        if let (Callee::Collective(collective), None) = (request.callee, request.algorithm) {
            let mut inner = self.begin(stream)?;
            let size = self.size(&mut inner, request, stream)?;
            let arguments = self.arguments(&mut inner, request, size, stream)?;
            let call = StandardCall { collective, algorithm: AUTO, arguments };
            // SAFETY: whoever made the request has promised what is said of addresses; windows are covered (`place_at`).
            // Blocks and slices are borrowed, so live and mapped, for lengths that were checked; behind the call blocks stay
            // mapped until a commit, which waits for the device. Whoever else touches blocks meanwhile, here or on a peer,
            // does so through raw pointers as well: there are no references into them.
            return unsafe { self.run(inner, &call, stream) };
        }
        self.call_named(request, stream)
    }

    /// Makes a call by the algorithm that it names.
    fn call_named(&self, request: &Request<'_>, stream: &Stream) -> Result<()> {
        let chosen = self.named(request).map_err(|why| self.decline(why, stream))?;
        let mut inner = self.begin(stream)?;
        let size = self.size(&mut inner, request, stream)?;
        let (Some(collective), Some(chosen)) = (request.callee.standard(), chosen) else {
            let Callee::Algorithm(algorithm) = request.callee else {
                let why = Error::invalid_state("a collective without an algorithm");
                return Err(inner.engine.decline(why, stream));
            };
            return self.call_own(inner, algorithm, request, size, stream);
        };
        let arguments = self.arguments(&mut inner, request, size, stream)?;
        let call = StandardCall { collective, algorithm: AUTO, arguments };
        // SAFETY: whoever made the request promised that addresses are there for their lengths, and `place_at` has
        // found that windows cover them. Blocks and slices are borrowed, so live and mapped, for lengths that were
        // checked.
        unsafe { self.run_named(&mut inner, &chosen, &call, stream) }
    }

    /// The algorithm that a call names, or is made for.
    pub(super) fn named(&self, request: &Request<'_>) -> Result<Option<Chosen>> {
        match (request.callee, request.algorithm) {
            (Callee::Collective(_), None) => Ok(None),
            (Callee::Collective(collective), Some(name)) => {
                let found = self.registry.find(collective, name);
                let unknown = || self.registry.unknown(collective.name(), name, self.rank());
                found.ok_or_else(unknown).map(Some)
            }
            (Callee::Algorithm(algorithm), _) => Ok(Some(match algorithm.source() {
                Source::BuiltIn(built_in) => Chosen::BuiltIn(built_in.id),
                _ => Chosen::Registered(algorithm.clone()),
            })),
        }
    }

    /// How long memory is. Declines a call whose memory cannot be right, whatever its algorithm.
    #[inline]
    fn size(&self, inner: &mut Inner, request: &Request<'_>, stream: &Stream) -> Result<Size> {
        self.size_of(request).map_err(|why| inner.engine.decline(why, stream))
    }

    /// How long memory is, unless it cannot be right.
    #[inline]
    pub(super) fn size_of(&self, request: &Request<'_>) -> Result<Size> {
        let is_slice = matches!(request.output, RequestMemory::Slice { .. });
        if is_slice && self.pool.driver().as_cuda().is_some() {
            let name = request.callee.name();
            return Err(self.not_on_devices(&format!("{name} of a slice")));
        }
        request.size(self.rank(), self.world())
    }

    /// The arguments, with where memory lies.
    #[inline]
    pub(super) fn arguments(
        &self,
        inner: &mut Inner,
        request: &Request<'_>,
        Size { count, inputs, outputs }: Size,
        stream: &Stream,
    ) -> Result<Arguments> {
        let Request { dtype, op, root, .. } = *request;
        let mut at = |memory, bytes| self.place(inner, memory, bytes, stream);
        let (input, output) = if request.callee.is_on_output_alone() {
            let both = at(&request.output, outputs)?;
            (both, both)
        } else {
            (at(&request.input, inputs)?, at(&request.output, outputs)?)
        };
        Ok(Arguments { input, output, count, dtype, op, root })
    }

    /// The error of a call that engines of devices do not have.
    pub(super) fn not_on_devices(&self, what: &str) -> Error {
        Error::unsupported(format!(
            "{what} on rank {}: a communicator on devices has no such call yet; use memory of \
             the device, or a pool in host memory",
            self.rank()
        ))
    }

    /// Where memory lies, for the engine.
    fn place(
        &self,
        inner: &mut Inner,
        memory: &RequestMemory,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Place> {
        match *memory {
            RequestMemory::Block { address, offset, .. } => {
                self.place_block(inner, (address, offset), bytes, stream)
            }
            RequestMemory::Slice { address, .. } => Ok(Place::Unregistered(address)),
            RequestMemory::Address(address) => self.place_at(inner, address, bytes, stream),
        }
    }

    /// Runs an algorithm of a collective of the program's own.
    fn call_own(
        &self,
        mut inner: crate::sync::MutexGuard<'_, Inner>,
        algorithm: &Algorithm,
        request: &Request<'_>,
        size: Size,
        stream: &Stream,
    ) -> Result<()> {
        let call = CallDescription::new(OpType::Custom).elements(request.dtype, size.count);
        self.grow(&mut inner, call.registered(algorithm.hash()), stream)?;
        let arguments = self.arguments(&mut inner, request, size, stream)?;
        match algorithm.source() {
            Source::BuiltIn(_) => {
                let why = Error::invalid_state("a built-in algorithm of no collective");
                Err(inner.engine.decline(why, stream))
            }
            // SAFETY: whoever made the request promised that addresses are there for their lengths, and `place_at`
            // has found that windows cover them. Blocks and slices are borrowed, so live and mapped, for lengths that
            // were checked.
            Source::Plan(plan) => unsafe { inner.engine.run_plan(plan, &arguments, stream) },
            // SAFETY: whoever made the request promised that addresses are there for their lengths, and `place_at`
            // has found that windows cover them. Blocks and slices are borrowed, so live and mapped, for lengths that
            // were checked.
            Source::Native(kernel) => unsafe {
                inner.engine.run_native(kernel, &arguments, stream)
            },
        }
    }
}
