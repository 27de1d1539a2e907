//! Whether a commit is due: the one word that lanes, commits and scopes share without a lock.
//!
//! A lane raises it while it holds its own lock, a commit lowers it while it holds the locks of
//! all symmetric lanes. So it can never be lowered past a growth that the commit did not see.

use crate::sync::{AtomicBool, Ordering};

/// Raised when a symmetric lane has grown, or enough waits to be taken back.
#[derive(Debug)]
pub(crate) struct Due(AtomicBool);

impl Due {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// A commit is due for a lane. The caller holds that lane's lock.
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Everything has been shared, or `still` not. The caller holds the locks of all lanes.
    pub(crate) fn settle(&self, still: bool) {
        self.0.store(still, Ordering::Release);
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::Due;

    /// Segments made and segments shared, as a lane's lock guards them.
    #[derive(Default)]
    struct Lane {
        made: u32,
        shared: u32,
    }

    #[test]
    fn loom_no_growth_is_forgotten() {
        loom::model(|| {
            let due = Arc::new(Due::new());
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
                due.settle(false);
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
