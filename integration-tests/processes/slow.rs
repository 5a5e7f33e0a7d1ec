//! A rank that is slower than the others is named, and nothing else happens to it.

use crate::support::{Running, read_json};

#[test]
fn a_rank_that_is_slowed_down_is_named_with_what_takes_longer_and_told_when_it_keeps_up() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let output_dir = format!("run.output_dir={}", output.display());
    let arguments = ["run", "configs/quickstart.yaml", &output_dir, "train.steps=60", "eval.samples=0"];
    let fault = [("COX_FAULT_SLOW", "rank=1 step=8 until=36 percent=130 part=data")];
    let (status, printed) = Running::start_with(&arguments, &fault).finish();
    assert!(status.success(), "{printed}");
    let lines: Vec<&str> = printed.lines().collect();
    let place = |text: &str| lines.iter().position(|line| line.contains(text));
    let named = place("rank 1 is slow: ").unwrap_or_else(|| panic!("{printed}"));
    assert!(lines[named].contains("most of it in data"), "{}", lines[named]);
    let twenty = place("28/60").unwrap_or_else(|| panic!("{printed}"));
    assert!(named < twenty, "step 27 is the twentieth that is slow: {printed}");
    assert!(
        place("rank 1 keeps up with the other ranks again").is_some_and(|well| well > named),
        "{printed}"
    );
    assert_eq!(read_json(&output.join("summary.json"))["steps"], 60);
}
