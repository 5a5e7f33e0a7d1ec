//! Commands that read a run: with the settings that it was trained with, at an address that is one, into
//! places that can be written; and plans of worlds that there can be.

use std::process::Command;

use crate::{
    SHORT,
    support::{Toy, refused},
};

/// What a command printed that is to end with this code, and to say this.
fn refused_with(command: Command, code: i32, expected: &str) -> String {
    let what = format!("{command:?}");
    let (found, printed) = refused(command);
    assert_eq!(found, Some(code), "{what}: {printed}");
    assert!(printed.contains(expected), "{what}: {printed}");
    printed
}

#[test]
fn weights_are_read_with_the_settings_that_they_were_trained_with() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let (run, out) = (toy.path("run").display().to_string(), toy.path("out").display().to_string());
    for command in [&["eval", &run][..], &["export", &run, "--out", &out]] {
        let told =
            refused_with(toy.cox(&[command, &["network.width=16"]].concat()), 2, "network.width (32 there");
        assert!(told.contains("leave the override out"), "{told}");
        // Another shape than that of the weights is no damage of theirs, for which one would remove them.
        let fewer = [command, &["data.inputs=[a, b]"]].concat();
        let told = refused_with(toy.cox(&fewer), 3, "the settings that this checkpoint was trained with");
        assert!(!told.contains("damaged") && !told.contains("remove"), "{told}");
        assert!(!toy.path("out").exists());
    }
    // What is only looked at may be another.
    let (code, told) = refused(toy.cox(&["eval", &run, "eval.samples=8"]));
    assert_eq!(code, Some(0), "{told}");
}

#[test]
fn an_export_that_cannot_be_written_is_refused_as_such() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let run = toy.path("run").display().to_string();
    for place in ["/dev/full", "/proc/none/out"] {
        refused_with(toy.cox(&["export", &run, "--out", place]), 2, "cannot be written: ");
    }
}

#[test]
fn no_address_and_no_directory_are_reported_as_such() {
    let toy = Toy::new(500);
    for address in ["nonsense", "29400", "127.0.0.1:99999", "127.0.0.1:"] {
        refused_with(toy.cox(&["status", "--endpoint", address]), 2, "expected HOST:PORT");
    }
    let none = toy.path("none").display().to_string();
    refused_with(toy.cox(&["status", &none]), 8, "there is no such directory");
}

#[test]
fn a_plan_is_of_a_world_that_a_launch_would_take() {
    let toy = Toy::new(500);
    let table = format!("data.path={}", toy.path("table.parquet").display());
    for more in ["--world=65", "launch.nproc_per_node=65"] {
        let command = toy.cox(&["plan", "integration-tests/toy/table.yaml", &table, more]);
        refused_with(command, 2, "a batch of 64 cannot be shared by 65 workers");
    }
}
