//! What the tests of groups and rendezvous share.

use crate::Group;

/// Runs `body` as each of `world` ranks, one thread a rank, and returns what each returned. A
/// panic of one is a panic of the test.
pub(crate) fn on_ranks<T: Send>(world: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::in_process(world).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| body(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// This test program again, running the test `name` alone, with `role` to tell it apart. For what
/// threads cannot stand in for: processes that are killed, and counts of open files.
pub(crate) fn this_test_as(name: &str, role: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// The role given by [`this_test_as`]; `None` in the test proper.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

const ROLE: &str = "SYMMPOOL_TEST_ROLE";
