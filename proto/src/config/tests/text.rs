//! What is not YAML, or not of the type that a field has.

use super::*;

#[test]
fn a_wrong_type_names_field_place_and_what_was_found() {
    let with = |batch: &str| SMALL.replace("global_batch: 8", &format!("global_batch: {batch}"));
    let expected = |found: &str| {
        format!("run.yaml:9:17: train.global_batch: expected a whole number of at least 0, found {found}")
    };
    for (batch, found) in [
        ("eight", "`eight`"),
        ("8.5", "`8.5`"),
        ("-1", "`-1`"),
        ("[8]", "a list"),
        ("{a: 1}", "a map"),
        ("'8'", "the text `8` in quotation marks"),
    ] {
        refuses(&with(batch), &[], &expected(found));
    }
    for (batch, meant) in [("1_000", "1000"), ("1e3", "1000"), ("0x10", "16"), ("8.0", "8")] {
        let told = format!("expected a whole number in digits (`{meant}`), found `{batch}`");
        refuses(&with(batch), &[], &format!("run.yaml:9:17: train.global_batch: {told}"));
    }
    let told = "expected a whole number without leading zeros (`10`, or `8` if octal was meant), found `010`";
    refuses(&with("010"), &[], &format!("run.yaml:9:17: train.global_batch: {told}"));
    for (given, meant) in [("yes", "`true`"), ("OFF", "`false`"), ("1", "`true` or `false`")] {
        let change = format!("train.resume={given}");
        let told = format!("override `{change}`: train.resume: expected {meant}, found `{given}`");
        refuses(SMALL, &[&change], &told);
    }
    refuses(
        &SMALL.replace("columns: [x]", "columns: x"),
        &[],
        "run.yaml:6:12: data.columns: expected a list, found `x`\n    help: write `[x]`",
    );
    refuses(
        &SMALL.replace("columns: [x]", "columns: [x, [a]]"),
        &[],
        "run.yaml:6:16: data.columns.1: expected text, found a list",
    );
}

#[test]
fn a_file_that_is_no_map_is_named_whatever_is_laid_over_it() {
    for text in ["", "- a", "run"] {
        let error = read(text, &["train.steps=3"]).unwrap_err().to_string();
        assert!(error.starts_with("run.yaml:1:1: is not a run file"), "{text}: {error}");
    }
}

#[test]
fn text_that_is_not_yaml_is_refused_with_its_place() {
    let error = read("run: [a\nmodel: b\n", &[]).unwrap_err().to_string();
    assert!(error.starts_with("run.yaml:2:"), "{error}");
    assert!(error.contains("not YAML"), "{error}");
    refuses(
        &SMALL.replace("path: d", "path: d\n  path: e"),
        &[],
        "run.yaml:6:3: key `path` is given twice; first at run.yaml:5:3\n    help: remove one of them",
    );
    refuses(
        "a: 1\n---\nb: 2\n",
        &[],
        "run.yaml:2:1: a second YAML document begins here; one file describes one run",
    );
    refuses("!!map {a: 1}", &[], "run.yaml:1:7: YAML tags are not used in run files; write the bare value");
    refuses("a: &x [*x]", &[], "run.yaml:1:8: this alias refers to a value that contains it");
}

#[test]
fn nested_aliases_cannot_exhaust_memory() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let again = format!("*a{}, ", level - 1).repeat(10);
        bomb.push_str(&format!("a{level}: &a{level} [{}]\n", again.trim_end_matches(", ")));
    }
    let error = read(&bomb, &[]).unwrap_err().to_string();
    assert!(error.contains("more than 100000 values"), "{error}");
    let deep = format!("a: {}{}", "[".repeat(100), "]".repeat(100));
    let error = read(&deep, &[]).unwrap_err().to_string();
    assert!(error.contains("levels deep"), "{error}");
}

#[test]
fn aliases_are_expanded() {
    let spec = read(&SMALL.replace("name: a", "name: &p m").replace("path: d", "path: *p"), &[]).unwrap();
    assert_eq!(spec.data.path, "m");
}

#[test]
fn an_empty_file_and_an_empty_section_say_what_is_missing() {
    refuses("task: {type: toy}\n", &[], "run.yaml:1:1: run: this key is required and missing");
    let empty = "run:\ntask: {type: toy}\n";
    refuses(empty, &[], "run.yaml:1:4: run.name: this key is required and missing");
}

#[test]
fn an_empty_section_of_defaults_is_the_defaults() {
    assert_eq!(read(&format!("{SMALL}launch:\n"), &[]).unwrap(), small(&[]));
}
