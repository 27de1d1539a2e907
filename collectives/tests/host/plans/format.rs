//! Plans as JSON.

use symmpool_collectives::plan::Plan;

use super::programs;

#[test]
fn plans_come_back_as_they_were() {
    for plan in programs::all(3) {
        let text = plan.to_json();
        assert_eq!(Plan::from_json(&text).unwrap(), plan);
        let mut other = plan.clone();
        other.programs[0][0].line += 1;
        other.source = "elsewhere.py".to_owned();
        assert_eq!(other.hash(), plan.hash(), "lines are not part of what ranks agree on");
        other.programs[0].swap(0, 1);
        assert_ne!(other.hash(), plan.hash());
    }
}

#[test]
fn what_is_no_plan_is_refused_with_the_reason() {
    let right = programs::one_shot(2).to_json();
    let wrong = |from: &str, to: &str| {
        let text = right.replacen(from, to, 1);
        assert_ne!(text, right, "{from}");
        text
    };
    let deep = "[".repeat(100_000);
    let many = format!(
        "{{\"symmpool_plan\":1,\"name\":\"many\",\"collective\":\"all_reduce\",\"world\":1,\"chunks\":1,\
         \"programs\":[[{}{{\"op\":\"barrier\"}}]]}}",
        "{\"op\":\"barrier\"},".repeat(1_000_000)
    );
    let cases = [
        ("", "not a plan"),
        ("{}", "symmpool_plan"),
        ("nonsense", "not a plan"),
        (deep.as_str(), "not a plan"),
        (many.as_str(), "1000001 operations; 262144 are possible"),
        (&right[..right.len() / 2], "not a plan"),
        (&wrong("\"symmpool_plan\":1", "\"symmpool_plan\":2"), "version 2"),
        (&wrong("\"all_reduce\"", "\"all_reduse\""), "unknown collective"),
        (&wrong("\"world\":2", "\"world\":3"), "2 programs for 3 ranks"),
        (&wrong("\"world\":2", "\"world\":100000"), "ranks; 1024 are possible"),
        (&wrong("\"chunks\":1", "\"chunks\":0"), "at least one chunk"),
        (&wrong("\"world\":2", "\"world\":-2"), "not a plan"),
        (&wrong("\"simple\"", "\"ll256\""), "unknown protocol"),
        (&wrong("\"protocol\"", "\"blocks\":0,\"protocol\""), "0 thread blocks; 1 to 1024"),
        (&wrong("\"protocol\"", "\"blocks\":4294967295,\"protocol\""), "1 to 1024 are possible"),
        (&wrong("\"all_reduce\"", "3"), "expected a collective's name, or an object"),
        (
            &wrong("\"all_reduce\"", "{\"name\":\"own\",\"outputs\":[[[[-1,0]]]]}"),
            "invalid value: integer `-1`",
        ),
        (&wrong("\"name\"", "\"more\":1,\"name\""), "unknown field"),
        (&wrong("\"put\"", "\"putt\""), "unknown op"),
        (&wrong("\"put\"", "\"copy\",\"peer\":1"), "\"peer\", which has none"),
        (&wrong("\"op\":\"signal\",\"peer\":1", "\"op\":\"signal\""), "a signal without \"peer\""),
        (&wrong("\"scratch\",\"index\"", "\"inbox\",\"index\""), "unknown buffer"),
        (
            &wrong("\"index\":0", "\"index\":0,\"count\":4294967295"),
            "chunks that are read and written",
        ),
        (&wrong("\"peer\":1", "\"peer\":1,\"channel\":16"), "channels between two ranks"),
    ];
    for (text, words) in cases {
        let error = Plan::from_json(text).expect_err(words);
        assert!(error.is_invalid_argument(), "{words}");
        let shown = error.to_string();
        assert!(shown.contains(words), "{words}: {shown}");
        assert!(shown.len() < 500, "{words}: {} bytes", shown.len());
    }
}

#[test]
fn an_error_does_not_repeat_a_whole_file() {
    let right = programs::one_shot(2).to_json();
    let long = "x".repeat(1 << 20);
    for text in [
        right.replacen("\"name\"", &format!("\"{long}\":1,\"name\""), 1),
        right.replacen("\"name\":", &format!("\"name\":\"\",\"scratch\":\"{long}\",\"n\":"), 1),
    ] {
        let error = Plan::from_json(&text).unwrap_err().to_string();
        assert!(error.len() < 1024 && error.contains("at line 1"), "{} bytes", error.len());
    }
}
