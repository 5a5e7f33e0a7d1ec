//! `KEY=VALUE` on the command line, and the patterns that only mappings can say.

use super::*;

#[test]
fn overrides_set_add_and_take_back() {
    let spec = small(&[
        "optimizer.lr.head=1e-4",
        "train.recompute=full",
        "data.columns=[x, y]",
        "data.weight=w",
        "data.weight=",
        "head.frozen={'a\\.b': 4}",
        "run.name=007",
    ]);
    let toy = settings(&spec);
    assert_eq!(toy.optimizer.lr.head, 1e-4);
    assert_eq!(spec.train.recompute, Recompute::Full);
    assert_eq!(toy.data.columns, ["x", "y"]);
    assert_eq!(toy.data.weight, None);
    assert_eq!(toy.head.frozen["a\\.b"], 4);
    assert_eq!(spec.run.name, "007");
}

#[test]
fn a_shells_argument_has_neither_comments_nor_lines() {
    let weight = |given: &str| settings(&small(&[&format!("data.weight={given}")])).data.weight;
    for name in ["my #3", "a\nb", "a\t#b", "a#b"] {
        assert_eq!(weight(name).as_deref(), Some(name));
    }
    assert_eq!(weight("'a #b'").as_deref(), Some("a #b"));
    assert_eq!(settings(&small(&["data.columns=[x, y] # both"])).data.columns, ["x", "y"]);
}

#[test]
fn an_override_reaches_into_a_scalar_and_the_later_one_wins() {
    assert_eq!(
        small(&["train.recompute=full", "train.recompute.every=2"]).train.recompute,
        Recompute::Every(2)
    );
    assert_eq!(
        small(&["train.recompute={every: 2}", "train.recompute=none"]).train.recompute,
        Recompute::None
    );
}

#[test]
fn a_wrong_override_is_named() {
    refuses(
        SMALL,
        &["train.steps=ten"],
        "override `train.steps=ten`: train.steps: expected a whole number of at least 0, found `ten`",
    );
    refuses(
        SMALL,
        &["optimizer.lr.haed=1"],
        "override `optimizer.lr.haed=1`: optimizer.lr.haed: unknown key\n    help: did you mean `optimizer.lr.head`?",
    );
    refuses(
        SMALL,
        &["data.columns.0=y"],
        "override `data.columns.0=y`: data.columns: is a list and cannot be changed in part\n    \
         help: replace it as a whole: `data.columns=[first, second]`",
    );
    refuses(
        SMALL,
        &["train.steps"],
        "override `train.steps`: there is no `=` in it\n    \
         help: write `section.key=value`, for instance `train.steps=100`",
    );
    refuses(
        SMALL,
        &["train..steps=1"],
        "override `train..steps=1`: a part of the key is empty\n    \
         help: write `section.key=value`, for instance `train.steps=100`",
    );
    refuses(
        SMALL,
        &["train.micro_batch=9"],
        "override `train.micro_batch=9`: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`",
    );
}

#[test]
fn text_that_yaml_reads_as_something_else_is_told_with_the_spelling_that_a_shell_takes() {
    type Value = fn(RunSpec) -> String;
    let listen = |spec: RunSpec| spec.launch.listen.unwrap_or_default();
    let path = |spec: RunSpec| spec.data.path;
    let cases: [(&str, &str, Value); 7] = [
        ("launch.listen", "[::1]:29703", listen),
        ("data.path", "a: b", path),
        ("data.path", "*a", path),
        ("data.path", "[it's \"here\"", path),
        ("data.path", "[a, b]", path),
        ("data.path", "{a}", path),
        ("data.path", r"[a\b]", path),
    ];
    for (key, text, value) in cases {
        let error = read(SMALL, &[&format!("{key}={text}")]).expect_err(text).to_string();
        let (_, spelled) = error.split_once("quote the value: `").unwrap_or_else(|| panic!("{error}"));
        let line = format!("printf %s {}", spelled.trim_end_matches('`'));
        let shell = std::process::Command::new("sh").args(["-c", &line]).output().expect("a shell");
        let argument = String::from_utf8(shell.stdout).expect("text");
        assert_eq!(value(read(SMALL, &[&argument]).expect(&argument)), text);
    }
    refuses(
        SMALL,
        &["data.columns=[x, [a]]"],
        "override `data.columns=[x, [a]]`: data.columns.1: expected text, found a list",
    );
}

#[test]
fn one_value_where_a_list_is_expected_is_told_with_the_list_that_it_makes() {
    for (given, wanted) in [("x", &["x"][..]), ("x,y", &["x", "y"]), ("'a: b'", &["a: b"])] {
        let error = read(SMALL, &[&format!("data.columns={given}")]).expect_err(given).to_string();
        let (_, list) = error.split_once("help: write `").unwrap_or_else(|| panic!("{error}"));
        let spec = small(&[&format!("data.columns={}", list.trim_end_matches('`'))]);
        assert_eq!(settings(&spec).data.columns, wanted, "{error}");
    }
}

#[test]
fn of_many_problems_with_a_long_override_the_first_and_the_begin_are_told() {
    use crate::config::error::{ConfigError, Place, Problem};
    let place = Place::Override("x".repeat(9000).into());
    let problems = vec![Problem::new("data.columns", "is wrong").at(&place); 5000];
    let told = ConfigError::Invalid(problems).to_string();
    assert!(
        told.starts_with(&format!("override `{}...`: data.columns: is wrong\n", "x".repeat(200))),
        "{told}"
    );
    assert!(told.ends_with("\nand 4936 more") && told.lines().count() == 65, "{told}");
}

#[test]
fn a_question_mark_yields_to_what_the_file_and_earlier_overrides_say() {
    let mode = |given: &[&str]| small(given).train.recompute;
    assert_eq!(mode(&["train.recompute?=auto"]), Recompute::Auto);
    assert_eq!(mode(&["train.recompute=none", "train.recompute?=auto"]), Recompute::None);
    assert_eq!(mode(&["train.recompute={every: 2}", "train.recompute?=auto"]), Recompute::Every(2));
    assert_eq!(mode(&["train.recompute?=auto", "train.recompute=full"]), Recompute::Full);
}
