//! Plans in files: read, checked, and written again.

use symmpool_collectives::plan::Plan;

use crate::FuzzTarget;

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "plan_json",
    run,
    words: &[
        "{\"op\":\"copy\",\"dst\":{\"buffer\":\"output\",\"index\":0},\"src\":{\"buffer\":\"input\",\"index\":0}},",
        "{\"op\":\"put\",\"peer\":1,\"dst\":{\"buffer\":\"scratch\",\"index\":0,\"rank\":1},\"src\":{\"buffer\":\"input\",\"index\":0}},",
        "{\"op\":\"signal\",\"peer\":1},",
        "{\"op\":\"wait\",\"peer\":0},",
        "{\"op\":\"barrier\"},",
        "{\"op\":\"join\"},",
        "\"reduce\"",
        "\"get\"",
        "\"srcs\":[],",
        "\"channel\":3,",
        "\"group\":1,",
        "\"line\":7,",
        "\"count\":2,",
        "\"rank\":1,",
        "\"protocol\":\"ll\",",
        "\"blocks\":4,",
        "\"scratch\":8,",
        "\"reproducible\":false,",
        "\"all_to_all\"",
        "\"all_reduce\"",
        "\"all_gather\"",
        "\"reduce_scatter\"",
        "\"broadcast\"",
        "{\"name\":\"own\",\"outputs\":[[[[0,0]]]]}",
        "[",
        "]",
        "{",
        "}",
        "\\u0000",
        "-1",
        "1e9",
    ],
    quick: 40_000,
    max_memory: 64 << 20,
    max_input: 16 << 10,
};

fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let plan = match Plan::from_json(text) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(error.is_invalid_argument(), "{error}");
            return assert!(error.to_string().len() < 4096, "a text that is repeated in the error");
        }
    };
    let again = Plan::from_json(&plan.to_json()).expect("a plan that was written");
    assert_eq!((&again, again.hash()), (&plan, plan.hash()));
    let world = plan.world;
    match plan.check() {
        Ok(checked) => {
            assert_eq!(checked.plan(), &again);
            for rank in 0..world {
                let _ = (checked.lengths(rank, 0), checked.lengths(rank, usize::MAX));
            }
            let _ =
                (checked.in_place(), checked.needs_input_window(), checked.needs_output_window());
            if again.len() < 256 && world < 16 {
                let _ = (checked.explain(), checked.draw());
            }
        }
        Err(error) => assert!(error.to_error().is_invalid_argument(), "{}", error.to_error()),
    }
}
