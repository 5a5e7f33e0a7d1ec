//! Run files that nobody would write by accident.

use coxswain_fuzz::Target;

use crate::toy::{SMALL, read};

#[test]
fn a_hostile_run_file_is_refused_or_read_within_its_own_size() {
    let anchors = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ntext: |\n  x\n  y\n\"q\\u00e9\": {k: 'v', l: [1, 2.5, ~]}\n";
    let sections = format!("{SMALL}\nsections:\n  one: {{train: {{steps: 3}}}}\n");
    let samples = [SMALL.to_owned(), anchors.to_owned(), sections];
    // A node of the tree has its place and its path, and a complaint repeats the line.
    Target::new("run files", samples.map(String::into_bytes)).holds(4 << 20, 1024).check(|bytes| {
        drop(read(&String::from_utf8_lossy(bytes), &["section=one"]));
        drop(read(&String::from_utf8_lossy(bytes), &[]));
    });
}

#[test]
fn a_hostile_override_is_refused_or_laid_over() {
    let samples = ["train.steps=3", "data={path: [a, {b: 'c'}]}", "section=one", "lora.targets=[q, k]"];
    let samples = samples.map(|text| text.as_bytes().to_vec());
    Target::new("overrides", samples).holds(4 << 20, 4096).check(|bytes| {
        drop(read(SMALL, &[&String::from_utf8_lossy(bytes)]));
    });
}

#[test]
fn a_mapping_of_eighty_thousand_keys_is_read_in_time() {
    let keys: String = (0..80_000).map(|n| format!("  k{n}: 1\n")).collect();
    let text = format!("{SMALL}eval:\n{keys}");
    // It hangs where each key is compared with all before it.
    let target = Target::new("long mappings", [text.into_bytes()]).tries(0).holds(4 << 20, 1024);
    target.check(|bytes| drop(read(&String::from_utf8_lossy(bytes), &[])));
}

#[test]
fn of_eighty_thousand_unknown_keys_the_first_are_named_and_the_others_counted() {
    let keys: String = (0..80_000).map(|n| format!("  k{n}: 1\n")).collect();
    let text = format!("{SMALL}eval:\n{keys}");
    let told = read(&text, &[]).expect_err("they are unknown").to_string();
    assert!(told.contains("eval.k0: unknown key") && told.contains("not listed here: 79968"), "{told}");
}
