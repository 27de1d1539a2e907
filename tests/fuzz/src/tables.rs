//! Tables of the fastest algorithms, as programs load them.

use symmpool_collectives::read_table;

use crate::FuzzTarget;

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "tables",
    run,
    words: &[
        "{\"symmpool_tables\":1,\"devices\":[\"A\"],\"rows\":[",
        "{\"world\":2,\"algorithm\":\"one_shot\",\"up_to\":4096},",
        "{\"world\":2,\"algorithm\":\"two_shot\"}",
        "\"collective\":\"all_gather\",",
        "\"lamport\":true,",
        "\"windows\":false,",
        "\"blocks\":65536,",
        "null",
        "]}",
        "-1",
        "1e400",
    ],
    quick: 60_000,
    max_memory: 16 << 20,
    max_input: 16 << 10,
};

fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(why) = read_table(text) {
        assert!(!why.is_empty() && why.len() < 4096, "{} bytes of an error", why.len());
    }
}
