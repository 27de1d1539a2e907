//! Whether a commit is due: a flag that lanes and commits share without a lock of its own.
//!
//! A lane raises it while it holds its own lock; a commit lowers it while it holds the locks of all
//! symmetric lanes. A commit therefore never lowers it after a growth that it has not seen.

use std::sync::atomic::{AtomicBool, Ordering};

/// An atomic `bool`: std's, or loom's in a model.
pub(crate) trait DueFlag {
    fn lowered() -> Self;
    fn store(&self, value: bool, order: Ordering);
    fn load(&self, order: Ordering) -> bool;
}

macro_rules! flag {
    ($atomic:ty) => {
        impl DueFlag for $atomic {
            fn lowered() -> Self {
                Self::new(false)
            }
            fn store(&self, value: bool, order: Ordering) {
                Self::store(self, value, order);
            }
            fn load(&self, order: Ordering) -> bool {
                Self::load(self, order)
            }
        }
    };
}
flag!(AtomicBool);

/// Raised when a symmetric lane has grown, or has enough deferred frees.
#[derive(Debug)]
pub(crate) struct CommitDue<F = AtomicBool>(F);

impl<F: DueFlag> CommitDue<F> {
    pub(crate) fn new() -> Self {
        Self(F::lowered())
    }

    /// Makes a commit due. The caller holds the lock of the lane that needs it.
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Sets whether a commit is still due. The caller holds the locks of all symmetric lanes.
    pub(crate) fn set(&self, due: bool) {
        self.0.store(due, Ordering::Release);
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod loom_tests {
    use loom::sync::{Arc, Mutex};
    use loom::thread;
    use std::sync::atomic::Ordering;

    use super::{CommitDue, DueFlag};

    flag!(loom::sync::atomic::AtomicBool);

    /// A lane's counts of segments made and shared, guarded by its lock.
    #[derive(Default)]
    struct Lane {
        made: u32,
        shared: u32,
    }

    #[test]
    fn loom_no_growth_is_forgotten() {
        loom::model(|| {
            let due = Arc::new(CommitDue::<loom::sync::atomic::AtomicBool>::new());
            let lanes = Arc::new([Mutex::new(Lane::default()), Mutex::new(Lane::default())]);
            let growers: Vec<_> = (0..2)
                .map(|at| {
                    let (due, lanes) = (due.clone(), lanes.clone());
                    thread::spawn(move || {
                        let mut lane = lanes[at].lock().unwrap();
                        lane.made += 1;
                        due.raise();
                    })
                })
                .collect();
            // The commit.
            {
                let mut held: Vec<_> = lanes.iter().map(|lane| lane.lock().unwrap()).collect();
                for lane in &mut held {
                    lane.shared = lane.made;
                }
                due.set(false);
            }
            for grower in growers {
                grower.join().unwrap();
            }
            let open = lanes.iter().any(|lane| {
                let lane = lane.lock().unwrap();
                lane.shared < lane.made
            });
            assert_eq!(due.is_raised(), open, "due exactly when something is not shared");
        });
    }
}
