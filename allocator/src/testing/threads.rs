//! Ranks that are threads.

use std::panic::resume_unwind;
use std::thread;

use crate::Group;

/// Runs `body` on a thread for each of `items`, and returns the results in their order. A panic of one is
/// a panic of the caller.
pub fn on_each<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    body: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> =
            items.into_iter().map(|item| scope.spawn(move || body(item))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Runs `body` as each of `world` ranks that meet in memory, one thread a rank, and returns the results in
/// rank order. A panic of one is a panic of the caller.
pub fn on_ranks<R: Send>(world: u32, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    on_each(Group::in_process(world).expect("a small group"), body)
}
