//! What bad input gets: one clear line, and nothing half-written.

use crate::support::{Toy, refused};

#[test]
fn an_unknown_task_is_told_with_those_that_there_are() {
    let toy = Toy::new(20);
    let (code, printed) = refused(toy.command("run", &["task.type=regresion"]));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("`regresion` is not one of `vla_flow`, "), "{printed}");
    assert!(printed.contains("did you mean `regression`?"), "{printed}");
    assert!(!toy.path("run").exists());
}

#[test]
fn a_key_of_another_task_is_told_with_its_task() {
    let toy = Toy::new(20);
    let (code, printed) = refused(toy.command("run", &["lora.rank=8"]));
    assert_eq!(code, Some(2), "{printed}");
    let message = "is a key of the task `vla_flow`, and this file's is `regression`";
    assert!(printed.contains("lora") && printed.contains(message), "{printed}");
    assert!(!toy.path("run").exists());
}

#[test]
fn the_tasks_own_rules_are_located_and_have_a_remedy() {
    let toy = Toy::new(20);
    let (code, printed) =
        refused(toy.command("run", &["network.width=0", "cache.mode=exact", "data.target=b"]));
    assert_eq!(code, Some(2), "{printed}");
    for message in ["network.width", "cache.mode", "data.target", "predict another column"] {
        assert!(printed.contains(message), "{message}: {printed}");
    }
}

#[test]
fn a_column_that_is_not_there_is_told_with_those_that_are() {
    let toy = Toy::new(20);
    let (code, printed) = refused(toy.command("run", &["data.target=z"]));
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.contains("no such column; name one of a, b, c, y"), "{printed}");
}

#[test]
fn a_run_directory_of_another_task_is_refused_and_left_as_it_is() {
    let toy = Toy::new(60);
    toy.train("run", &["train.steps=2", "train.global_batch=8", "train.micro_batch=4"]);
    let manifest = std::fs::read(toy.path("run/manifest.json")).expect("it has run");
    let mut other = toy.cox(&["run", "configs/quickstart.yaml", "train.steps=4"]);
    other.arg(format!("run.output_dir={}", toy.path("run").display()));
    let (code, printed) = refused(other);
    assert!(code.is_some_and(|code| code != 0), "{printed}");
    assert!(printed.contains("task.type (\"regression\" there, \"vla_flow\" here)"), "{printed}");
    assert_eq!(std::fs::read(toy.path("run/manifest.json")).ok(), Some(manifest));
}
