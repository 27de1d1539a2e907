//! Locks that are std's outside of models, and std's behind loom's inside of one.

#![allow(missing_docs)] // methods are those of std

use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

use super::{AtomicBool, is_running};

/// Whose turn it is, inside a model. Loom's `try_lock` waits for a thread that takes the lock at the same time, so this has
/// a flag, which loom's mutex guards for moments only.
#[derive(Debug)]
struct ModelLock {
    taken: loom::sync::Mutex<bool>,
    free: loom::sync::Condvar,
}

type Taken<'a> = loom::sync::MutexGuard<'a, bool>;

impl ModelLock {
    fn new() -> Self {
        Self { taken: loom::sync::Mutex::new(false), free: loom::sync::Condvar::new() }
    }

    fn taken(&self) -> Taken<'_> {
        self.taken.lock().expect("loom's are not poisoned")
    }

    fn take<'a>(&'a self, mut taken: Taken<'a>) -> Turn<'a> {
        while *taken {
            taken = self.free.wait(taken).expect("loom's are not poisoned");
        }
        *taken = true;
        Turn(self)
    }

    fn try_take(&self) -> Option<Turn<'_>> {
        let mut taken = self.taken();
        (!std::mem::replace(&mut *taken, true)).then(|| Turn(self))
    }

    /// Ends a turn to wait on a condition variable, then takes the next one.
    fn wait<'a>(&'a self, turn: Turn<'a>, queue: &loom::sync::Condvar) -> Turn<'a> {
        std::mem::forget(turn);
        let mut taken = self.taken();
        *taken = false;
        self.free.notify_one();
        self.take(queue.wait(taken).expect("loom's are not poisoned"))
    }
}

/// The right to use what a [`Mutex`] guards, which ends with this.
struct Turn<'a>(&'a ModelLock);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if is_running() {
            *self.0.taken() = false;
            self.0.free.notify_one();
        }
    }
}

/// A mutex. Inside a model, threads take turns by loom's, so that std's is free for whose turn it is.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized> {
    /// Made by the first access inside a model, of which there is one for each interleaving.
    turns: std::sync::OnceLock<ModelLock>,
    data: std::sync::Mutex<T>,
}

/// The guard of a [`Mutex`].
pub struct MutexGuard<'a, T: ?Sized> {
    // Let go in this order.
    data: std::sync::MutexGuard<'a, T>,
    turn: Option<Turn<'a>>,
    mutex: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    /// A mutex of this value.
    pub const fn new(data: T) -> Self {
        Self { turns: std::sync::OnceLock::new(), data: std::sync::Mutex::new(data) }
    }
}

impl<T: ?Sized> Mutex<T> {
    fn turns(&self) -> Option<&ModelLock> {
        is_running().then(|| self.turns.get_or_init(ModelLock::new))
    }

    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let turn = self.turns().map(|turns| turns.take(turns.taken()));
        self.in_turn(turn)
    }

    fn in_turn<'a>(&'a self, turn: Option<Turn<'a>>) -> LockResult<MutexGuard<'a, T>> {
        match self.data.lock() {
            Ok(data) => Ok(MutexGuard { data, turn, mutex: self }),
            Err(poisoned) => {
                let data = poisoned.into_inner();
                Err(PoisonError::new(MutexGuard { data, turn, mutex: self }))
            }
        }
    }

    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        let turn = match self.turns().map(ModelLock::try_take) {
            Some(None) => return Err(TryLockError::WouldBlock),
            Some(turn) => turn,
            None => None,
        };
        match self.data.try_lock() {
            Ok(data) => Ok(MutexGuard { data, turn, mutex: self }),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(poisoned)) => {
                let data = poisoned.into_inner();
                Err(PoisonError::new(MutexGuard { data, turn, mutex: self }).into())
            }
        }
    }

    pub fn is_poisoned(&self) -> bool {
        self.data.is_poisoned()
    }

    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.data.get_mut()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.data
    }
}

impl<T: ?Sized + std::fmt::Debug> std::fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.data.fmt(f)
    }
}

/// A condition variable. Inside a model nobody is woken for nothing, and no wait ends because time has passed, so a
/// wake-up that is lost is a deadlock, which loom reports.
#[derive(Debug, Default)]
pub struct Condvar {
    queue: std::sync::OnceLock<loom::sync::Condvar>,
    plain: std::sync::Condvar,
}

/// Whether a wait has ended because time has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    /// A condition variable on which nobody waits.
    pub const fn new() -> Self {
        Self { queue: std::sync::OnceLock::new(), plain: std::sync::Condvar::new() }
    }

    fn queue(&self) -> Option<&loom::sync::Condvar> {
        is_running().then(|| self.queue.get_or_init(loom::sync::Condvar::new))
    }

    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let long = Duration::from_secs(3600 * 24 * 365);
        match self.wait_timeout(guard, long) {
            Ok((guard, _)) => Ok(guard),
            Err(poisoned) => Err(PoisonError::new(poisoned.into_inner().0)),
        }
    }

    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let MutexGuard { data, turn, mutex } = guard;
        if let (Some(queue), Some(turn)) = (self.queue(), turn) {
            drop(data);
            let turn = turn.0.wait(turn, queue);
            let late = WaitTimeoutResult(false);
            return match mutex.in_turn(Some(turn)) {
                Ok(guard) => Ok((guard, late)),
                Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), late))),
            };
        }
        let guard = |data| MutexGuard { data, turn: None, mutex };
        match self.plain.wait_timeout(data, limit) {
            Ok((data, late)) => Ok((guard(data), WaitTimeoutResult(late.timed_out()))),
            Err(poisoned) => {
                let (data, late) = poisoned.into_inner();
                Err(PoisonError::new((guard(data), WaitTimeoutResult(late.timed_out()))))
            }
        }
    }

    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        limit: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let begin = std::time::Instant::now();
        loop {
            if !condition(&mut guard) {
                return Ok((guard, WaitTimeoutResult(false)));
            }
            let left = limit.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            guard = self.wait_timeout(guard, left)?.0;
        }
    }

    pub fn notify_one(&self) {
        match self.queue() {
            Some(queue) => queue.notify_one(),
            None => self.plain.notify_one(),
        }
    }

    pub fn notify_all(&self) {
        match self.queue() {
            Some(queue) => queue.notify_all(),
            None => self.plain.notify_all(),
        }
    }
}

/// A cell that is set once.
#[derive(Debug)]
pub struct OnceLock<T> {
    is_set: AtomicBool,
    turns: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> OnceLock<T> {
    /// A cell that is not set.
    pub fn new() -> Self {
        let (is_set, turns) = (AtomicBool::new(false), Mutex::new(()));
        Self { is_set, turns, value: std::sync::OnceLock::new() }
    }

    pub fn get(&self) -> Option<&T> {
        if is_running() && !self.is_set.load(Ordering::Acquire) {
            return None;
        }
        self.value.get()
    }

    pub fn set(&self, value: T) -> Result<(), T> {
        let kept = self.value.set(value);
        if kept.is_ok() {
            self.is_set.store(true, Ordering::Release);
        }
        kept
    }

    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if !is_running() {
            let value = self.value.get_or_init(make);
            self.is_set.store(true, Ordering::Release);
            return value;
        }
        if let Some(value) = self.get() {
            return value;
        }
        let _turn = self.turns.lock();
        if !self.is_set.load(Ordering::Acquire) {
            let _ = self.set(make());
        }
        self.value.get().expect("set")
    }

    pub fn take(&mut self) -> Option<T> {
        self.is_set = AtomicBool::new(false);
        self.value.take()
    }
}
